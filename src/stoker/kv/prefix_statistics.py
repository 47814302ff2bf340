"""Counts what prompts cost and what was saved of it (SPEC C13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.usage import CacheSource

if TYPE_CHECKING:
    from stoker.kv.sequence import Sequence


class PrefixStatistics:
    """Prompt tokens by what became of them, since the model was loaded."""

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_computed = 0
        self._num_misses = 0
        self._num_hits = dict.fromkeys(CacheSource, 0)
        self._num_cached = dict.fromkeys(CacheSource, 0)

    def __repr__(self) -> str:
        return f"<PrefixStatistics {self._num_computed} of {self._num_prompt_tokens} prompt tokens computed>"

    def admitted(self, sequence: Sequence) -> None:
        """A sequence got its first slot, with what could be reused; of several choices the first counts."""
        if sequence.leader is None:
            self._num_prompt_tokens += sequence.num_prompt
            self._count(sequence, 1)

    def taken_back(self, sequence: Sequence) -> None:
        """What it was admitted with could not be had after all."""
        if sequence.leader is None:
            self._count(sequence, -1)
            self._num_misses += 1

    def _count(self, sequence: Sequence, times: int) -> None:
        source = sequence.cache_source
        if source is None:
            self._num_misses += times
        else:
            self._num_hits[source] += times
            self._num_cached[source] += times * (sequence.num_cached or 0)

    def computed(self, sequence: Sequence, count: int) -> None:
        """`count` tokens after those computed before are about to count as computed."""
        self._num_computed += max(0, min(count, sequence.num_prompt - sequence.num_computed))

    def stats(self) -> dict[str, float]:
        """Every count."""
        counts: dict[str, float] = {
            "prompt_tokens_total": self._num_prompt_tokens,
            "prompt_tokens_computed_total": self._num_computed,
            "cache_misses_total": self._num_misses,
        }
        for source in CacheSource:
            counts[f"cache_hits_{source}_total"] = self._num_hits[source]
            counts[f"cached_tokens_{source}_total"] = self._num_cached[source]
        return counts
