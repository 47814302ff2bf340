"""The body of /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import AliasChoices, Field

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.server.fields import GenerationFields, Int, check_logprobs
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Many, TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationFields):
    """Completions to make of one or several prompts."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    prompt: str | Many[str] | TokenIds | Many[TokenIds]
    max_tokens: Int | None = Field(None, validation_alias=AliasChoices("max_tokens", "n_predict"))
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int | None = None

    def refuse_unsupported(self) -> None:
        """Refuse infill and re-ranking as well."""
        super().refuse_unsupported()
        check_logprobs("logprobs", self.logprobs)
        if self.suffix:
            raise UnsupportedError("suffix is not supported by this server", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedError("best_of other than n is not supported by this server", param="best_of")

    def prompts(self, n_vocab: int) -> list[str | tuple[int, ...]]:
        """Every prompt: text, or token ids of a vocabulary of `n_vocab`.

        Raises:
            InvalidRequestError: none, too many, an empty one, or a token id out of range.
        """
        found = self._listed()
        if not 0 < len(found) <= MAX_PROMPTS:
            raise InvalidRequestError(f"{len(found)} prompts; 1 to {MAX_PROMPTS} are taken", param="prompt")
        for prompt in found:
            if not isinstance(prompt, str):
                check_tokens(prompt, n_vocab, "prompt")
        return found

    def _listed(self) -> list[str | tuple[int, ...]]:
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [tuple(given)]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given]

    def to_shared(self, n_vocab: int, key_digest: str) -> dict[str, Any]:
        """Keyword arguments that every prompt's `GenerateRequest` gets."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.common(n_vocab, key_digest) | {
            "max_tokens": limit,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
            "echo": bool(self.echo),
        }


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Refuse token ids that the vocabulary lacks.

    Raises:
        InvalidRequestError: there are none, or one is out of range.
    """
    if not tokens:
        raise InvalidRequestError(f"{param} is an empty list of tokens", param=param)
    if min(tokens) < 0 or max(tokens) >= n_vocab:
        wrong = next(token for token in tokens if not 0 <= token < n_vocab)
        raise InvalidRequestError(
            f"{param}: there is no token {wrong}; ids are 0 to {n_vocab - 1}", param=param
        )
