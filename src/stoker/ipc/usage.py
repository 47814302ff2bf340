"""Figures of a request: tokens, seconds, probabilities, tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class CacheSource(StrEnum):
    """Where a request's cached tokens came from (SPEC C13).

    Cells of an ended request, a snapshot in host memory, on disk or in the store that machines share, or
    cells of a request that still ran.
    """

    LIVE = "live"
    RAM = "ram"
    DISK = "disk"
    SHARED = "shared"
    STORE = "store"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its natural-log probability under the raw logits.

    `top` holds (token id, bytes, logprob), best first. A first prompt token has logprob None.
    """

    token_id: int
    token_bytes: bytes
    logprob: float | None
    top: list[tuple[int, bytes, float]]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, over all its choices.

    Attributes:
        cached_tokens: prompt tokens that were not computed for this request.
        cache_source: None: there were none.
        dropped_tokens: dropped by context shifts (SPEC C12).
        draft_tokens, accepted_tokens: that were guessed for it, and those of them that were right.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_source: CacheSource | None = None
    dropped_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sum over several requests; the cache's source is that of the most cached tokens."""
    most = max(usages, key=lambda usage: usage.cached_tokens, default=Usage())
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        cache_source=most.cache_source,
        dropped_tokens=sum(usage.dropped_tokens for usage in usages),
        draft_tokens=sum(usage.draft_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
    )


class GapStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds between two deliveries of tokens to one choice; `p50` and `p99` are within 2.5 %."""

    mean: float
    p50: float
    p99: float
    max: float


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a request spent in the engine (SPEC O2), and its preemptions.

    `decode_s` is from the first token to the end, including time spent parked. `itl_ms` is between deliveries
    without that, None: there were no two.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    itl_ms: GapStatus | None = None


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A named array of little-endian float32, row-major."""

    name: str
    shape: tuple[int, ...]
    data: bytes
