"""`timings` of an answer, as llama-server names them (SPEC O2): the same in every API that has the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from stoker.ipc.usage import GapStatus, Timings, Usage, total_usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.server.streaming import AnswerReading

_MILLISECONDS = 1000.0


class TimingsAnswer(msgspec.Struct, frozen=True):
    """Milliseconds the request spent and how often others took its place (SPEC O2).

    From `cache_n` on as llama-server names them; speeds are of the tokens after the first, None: no such.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    num_preemptions: int
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_token_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float | None = None
    predicted_per_second: float | None = None
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET
    itl_ms: GapStatus | UnsetType = UNSET

    @classmethod
    def of(cls, ended: Sequence[tuple[Usage, Timings]], num_choices: int = 1) -> TimingsAnswer:
        """Those of an answer to several prompts, each of so many choices.

        Of each stage the longest counts, as prompts run side by side; preemptions and tokens are added up.
        """
        usage = total_usage([each for each, _ in ended])
        every = [each for _, each in ended] or [Timings()]
        prefill_ms = max(timings.prefill_s for timings in every) * _MILLISECONDS
        decode_ms = max(timings.decode_s for timings in every) * _MILLISECONDS
        num_read = usage.prompt_tokens - usage.cached_tokens
        num_later = usage.completion_tokens - num_choices * len(every)
        return cls(
            queue_ms=max(timings.queue_s for timings in every) * _MILLISECONDS,
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            num_preemptions=sum(timings.num_preemptions for timings in every),
            cache_n=usage.cached_tokens,
            prompt_n=num_read,
            prompt_ms=prefill_ms,
            prompt_per_token_ms=_ratio(prefill_ms, num_read),
            prompt_per_second=_ratio(num_read * _MILLISECONDS, prefill_ms),
            predicted_n=usage.completion_tokens,
            predicted_ms=decode_ms,
            predicted_per_token_ms=_ratio(decode_ms, num_later),
            predicted_per_second=_ratio(num_later * _MILLISECONDS, decode_ms),
            draft_n=usage.draft_tokens or UNSET,
            draft_n_accepted=usage.accepted_tokens if usage.draft_tokens else UNSET,
            itl_ms=every[0].itl_ms or UNSET if len(every) == 1 else UNSET,
        )


def timings_fields(reading: AnswerReading) -> dict[str, Any]:
    """`timings` of an answer with one choice as a field of an object; none before its end."""
    if reading.timings is None:
        return {}
    return {"timings": msgspec.to_builtins(TimingsAnswer.of([(reading.usage, reading.timings)]))}


def _ratio(amount: float, of: float) -> float | None:
    """None where there is nothing to divide."""
    return amount / of if of > 0 and amount > 0 else None
