"""The bodies and answers of /v1/states and of embeddings by state (SPEC K5, D8, I6)."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from pydantic import AliasChoices, Field

from stoker.errors import InvalidRequestError
from stoker.ipc.request import MAX_SALT_CHARS, Priority
from stoker.server.fields import InlineState, state_bytes
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Body, Many, Name, TokenIds
from stoker.server.inbound.security import salt_of
from stoker.server.openai.chat_body import Message
from stoker.server.openai.completion_body import check_tokens
from stoker.tasks.embed import floats_of

if TYPE_CHECKING:
    from stoker.tasks.states import StateEmbedding

MAX_INPUTS = 64
MAX_JSON_FLOATS = 2**20
"""More numbers than these go as base64 only: 4 MB instead of some 20."""


class StateWork(Body):
    """What all work on states takes: the model, the state to begin from, and the request's class and salt."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    model: Name | None = None
    state: str | InlineState | None = None
    cache: bool | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARS)
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    timeout_s: float | None = None

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `States.save` and `States.embed`, but for the prompt."""
        given = {
            "state": state_bytes(self.state),
            "cache": self.cache,
            "cache_salt": salt_of(key_digest, self.cache_salt or ""),
            "priority": Priority.BACKGROUND if self.service_tier == "flex" else None,
            "timeout_s": self.timeout_s,
        }
        return {name: value for name, value in given.items() if value is not None}


class SaveStateRequest(StateWork):
    """A state to keep: of `prompt` or `messages`, uploaded as `data` (base64), or laid ready as `file`."""

    name: str | None = None
    prompt: str | TokenIds | None = Field(None, validation_alias=AliasChoices("prompt", "input"))
    messages: Many[Message] | None = Field(None, min_length=1)
    data: str | None = None
    file: str | None = None

    def source(self) -> str:
        """Which of the four was given.

        Raises:
            InvalidRequestError: none, or several.
        """
        names = ("prompt", "messages", "data", "file")
        found = [name for name in names if getattr(self, name) is not None]
        if len(found) != 1:
            text = " and ".join(found) or "none of them"
            raise InvalidRequestError(f"one of {', '.join(names)} is taken, got {text}", param="prompt")
        return found[0]


class StateEmbeddingRequest(StateWork):
    """One prompt, or for /v1/embeddings several, to embed by state."""

    kind: str | None = None
    input: str | Many[str] | TokenIds | Many[TokenIds] = Field(
        validation_alias=AliasChoices("input", "prompt")
    )
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self, n_vocab: int, most: int | None = None) -> list[str | tuple[int, ...]]:
        """Every prompt, at most `most`: text, or token ids of a vocabulary of `n_vocab`.

        Raises:
            InvalidRequestError: none, too many, or a token id out of range.
        """
        given: Any = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        most = most or MAX_INPUTS
        if not 0 < len(given) <= most:
            raise InvalidRequestError(f"{len(given)} inputs; 1 to {most} are taken", param="input")
        return [prompt_of(entry, n_vocab, "input") for entry in given]

    def encoded(self, embedding: StateEmbedding) -> list[float] | str:
        """The numbers as the caller wants them.

        Raises:
            InvalidRequestError: too many to be written as JSON numbers.
        """
        count = len(embedding.data) // 4
        if self.encoding_format != "base64" and count > MAX_JSON_FLOATS:
            raise InvalidRequestError(
                f"the state has {count} numbers, at most {MAX_JSON_FLOATS} go as JSON;"
                ' ask for "encoding_format": "base64"',
                param="encoding_format",
            )
        return self.written(embedding.data)

    def written(self, data: bytes) -> list[float] | str:
        """Little-endian float32 as base64, or as numbers."""
        if self.encoding_format == "base64":
            return base64.b64encode(data).decode()
        return floats_of(data).tolist()


def prompt_of(given: str | list[int], n_vocab: int, param: str) -> str | tuple[int, ...]:
    """Text as it is, token ids checked. Raises InvalidRequestError."""
    if isinstance(given, str):
        return given
    check_tokens(given, n_vocab, param)
    return tuple(given)


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of embeddings."""

    prompt_tokens: int
    total_tokens: int


class StateEmbeddingAnswer(msgspec.Struct, frozen=True):
    """One embedding by state; `data` is float32, row-major, in base64 little-endian."""

    model: str
    shape: tuple[int, ...]
    data: list[float] | str
    usage: EmbeddingUsage
    object: str = "state_embedding"


class EmbeddingEntry(msgspec.Struct, frozen=True):
    """One entry of a list of embeddings, with its shape besides what OpenAI's have."""

    index: int
    shape: tuple[int, ...]
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    """A list of embeddings."""

    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
