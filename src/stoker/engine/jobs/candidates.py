"""What a request to choose asks of a model (SPEC D5): its candidates' tokens, and where a text begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import ContextLengthError, UnsupportedError
from stoker.ipc.request import GenerateRequest

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Vocabulary
    from stoker.backends.protocol.scoring import Scoring
    from stoker.sampling.logprobs import Likelihoods

MAX_TOKENS = 2**18
"""Tokens of all candidates of a request together."""


@dataclass(frozen=True, slots=True)
class ToScore:
    """Candidates of a request, tokenised.

    Attributes:
        texts: each candidate's tokens, alone: none are added.
        initial: what stands for the initial state where scores are calibrated; None: they are not.
    """

    texts: tuple[tuple[int, ...], ...]
    initial: tuple[int, ...] | None

    @property
    def num_tokens(self) -> int:
        """Of all candidates."""
        return sum(map(len, self.texts))


@dataclass(slots=True)
class ScoringPass:
    """The candidates of a request after one prompt: what computes them, and what was found so far."""

    scoring: Scoring
    found: Likelihoods


def candidates_of(request: GenerateRequest, vocabulary: Vocabulary, model: str) -> ToScore:
    """The candidates of a request to choose.

    Raises:
        UnsupportedError: it asks for what does not go with it, or there is nothing to calibrate by.
        ContextLengthError: the candidates are too long.
    """
    _refuse_conditions(request)
    tokenize = vocabulary.tokenize
    texts = tuple(
        tuple(tokenize(text, add_special=False, parse_special=False)) for text in request.candidates
    )
    found = ToScore(texts, _initial_tokens(vocabulary, model) if request.is_calibrated else None)
    if found.num_tokens > MAX_TOKENS:
        raise ContextLengthError(
            f"the choices have {found.num_tokens} tokens, at most {MAX_TOKENS} are taken",
            param="choices",
            num_tokens=found.num_tokens,
            max_tokens=MAX_TOKENS,
        )
    return found


def check_candidates(scored: ToScore, num_prompt: int, n_ctx: int) -> None:
    """Raises ContextLengthError where the prompt with a candidate is longer than the context."""
    longest = max(map(len, scored.texts))
    if num_prompt + longest > n_ctx:
        what = f"the prompt of {num_prompt} with the longest choice of {longest}"
        raise ContextLengthError.over(what, num_prompt + longest, n_ctx, param="choices")


def _refuse_conditions(request: GenerateRequest) -> None:
    for name, is_given in (
        ("lora", bool(request.adapters)),
        ("state", request.initial_state is not None),
        ("image", bool(request.pictures)),
    ):
        if is_given:
            raise UnsupportedError(
                f"choices are scored by the model alone after a text alone, without {name}", param=name
            )


def _initial_tokens(vocabulary: Vocabulary, model: str) -> tuple[int, ...]:
    """The token that every text begins with, or the one between texts."""
    text = vocabulary.bos_text or vocabulary.eos_text
    found = tuple(vocabulary.tokenize(text, add_special=False, parse_special=True)) if text else ()
    if not found:
        raise UnsupportedError(
            f"{model} has neither a BOS nor an EOS token: there is nothing to calibrate by", param="calibrate"
        )
    return found
