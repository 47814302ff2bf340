"""The body and the answer of /v1/embeddings: OpenAI's, with `kind` and `normalize` besides (SPEC K2, I6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import UnsupportedError
from stoker.server.fields import Int, keep_alive_seconds
from stoker.server.native.states_body import EmbeddingUsage, StateEmbeddingRequest

if TYPE_CHECKING:
    from stoker.tasks.embed import TextEmbeddings

MAX_TEXTS = 2048
"""As many as OpenAI takes."""
_KINDS = (None, "embedding", "state")


class EmbeddingRequest(StateEmbeddingRequest):
    """Texts to embed; with `"kind": "state"` prompts to embed by the state they leave."""

    dimensions: Int | None = None
    normalize: bool | None = None
    keep_alive: float | str | None = None

    @property
    def is_by_state(self) -> bool:
        """Whether the state after each prompt is wanted. Raises UnsupportedError for an unknown kind."""
        if self.kind not in _KINDS:
            raise UnsupportedError(
                f"embeddings of the kind {(self.kind or '')[:40]!r} are not served;"
                ' "embedding" and "state" are',
                param="kind",
            )
        return self.kind == "state"

    def refuse_text_fields(self) -> None:
        """Raise UnsupportedError for what is done with vectors of texts and not with states."""
        for name in ("dimensions", "normalize"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f'{name} is for vectors of texts, not for "kind": "state"', param=name)

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of the request, but for the texts and what is done with their vectors."""
        seconds = keep_alive_seconds(self.keep_alive)
        return super().fields(key_digest) | ({} if seconds is None else {"keep_alive_s": seconds})

    def text_fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `Embeddings.embed`, but for the texts.

        Raises:
            UnsupportedError: a text is to begin from a state.
        """
        if self.state is not None:
            raise UnsupportedError('a text begins from no state; "kind": "state" takes one', param="state")
        is_normal = True if self.normalize is None else self.normalize
        return {**self.fields(key_digest), "normalize": is_normal, "dimensions": self.dimensions}

    def texts(self, n_vocab: int) -> list[str | tuple[int, ...]]:
        """Every text: as it is, or as token ids of a vocabulary of `n_vocab`. Raises InvalidRequestError."""
        return self.inputs(n_vocab, MAX_TEXTS)

    def entries(self, found: TextEmbeddings) -> list[TextEmbeddingEntry]:
        """The vectors as the caller wants them written."""
        return [TextEmbeddingEntry(index, self.written(data)) for index, data in enumerate(found.vectors)]


class TextEmbeddingEntry(msgspec.Struct, frozen=True):
    """One entry of a list of vectors."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class TextEmbeddingList(msgspec.Struct, frozen=True):
    """A list of vectors."""

    data: list[TextEmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
