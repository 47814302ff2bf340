"""Parts of a workload by what a cache does in them: how much was found, and how soon the first token came."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.client import Stream


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of one workload on one server.

    Attributes:
        hit_rate: prompt tokens that were not computed for their request, over all of them; 0 to 1.
        ttft_ms: first token, median of its requests.
    """

    name: str
    hit_rate: float
    ttft_ms: float


def stage_of(name: str, streams: Sequence[Stream]) -> Stage:
    """The stage that these answers make, of which there is at least one."""
    return Stage(name, hit_rate(streams), median(stream.ttft_s for stream in streams) * 1e3)


def hit_rate(streams: Sequence[Stream]) -> float:
    """Cached prompt tokens over all prompt tokens, by the server's own count; 0 for no answers."""
    num_prompt = sum(stream.prompt_tokens for stream in streams)
    return sum(stream.cached_tokens for stream in streams) / num_prompt if num_prompt else 0.0


def medians(repetitions: Iterable[Sequence[Stage]]) -> tuple[Stage, ...]:
    """Each stage over all repetitions that had it, in the order of their first appearance."""
    by_name: dict[str, list[Stage]] = {}
    for stages in repetitions:
        for stage in stages:
            by_name.setdefault(stage.name, []).append(stage)
    return tuple(
        Stage(name, median(s.hit_rate for s in stages), median(s.ttft_ms for s in stages))
        for name, stages in by_name.items()
    )
