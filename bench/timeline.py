"""Who ran when: spells of requests in lanes, told from the arrival of their tokens at the client alone.

So looking on disturbs nothing, and works on any server. What it cannot see: a prefill (it counts as waiting)
and a request that goes on slower than `MIN_PAUSE_S` a token (it seems to have paused).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from stoker.ipc.request import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# a gap between tokens that is longer than both is a pause: many steps of the request, and plain to see
PAUSE_GAPS = 5.0
MIN_PAUSE_S = 0.3


class State(StrEnum):
    """What a request does during a spell. `PAUSED`: it had tokens, and now none come."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a client saw of one request. Times are seconds of one clock; `is_complete`: every token came."""

    priority: Priority
    sent_s: float
    token_times_s: tuple[float, ...]
    ended_s: float
    is_complete: bool

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between one arrival of text and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of time in one state. `request` numbers the traces; `is_broken`: it ends in a failure."""

    request: int
    priority: Priority
    state: State
    began_s: float
    ended_s: float
    is_broken: bool = False


Lane = tuple[Spell, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One server's run, in seconds since its first request was sent.

    Attributes:
        slots: lanes of running spells, at no time two in one: as many as ran at once.
        queue: lanes of the waiting and paused ones, likewise.
    """

    slots: tuple[Lane, ...]
    queue: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        """When the last spell ended."""
        return max((lane[-1].ended_s for lane in (*self.slots, *self.queue)), default=0.0)


def timeline_of(traces: Sequence[Trace]) -> Timeline:
    """The timeline of all requests of one run."""
    start_s = min((trace.sent_s for trace in traces), default=0.0)
    spells = [spell for i, trace in enumerate(traces) for spell in spells_of(i, trace, start_s)]
    running = [spell for spell in spells if spell.state is State.RUNNING]
    return Timeline(pack(running), pack(spell for spell in spells if spell.state is not State.RUNNING))


def spells_of(request: int, trace: Trace, start_s: float = 0.0) -> list[Spell]:
    """The spells of one request without a gap, from sending it to its end, counted from `start_s`."""
    borders = list(_borders(trace))
    return [
        Spell(
            request,
            trace.priority,
            state,
            began_s - start_s,
            ended_s - start_s,
            is_broken=not trace.is_complete and index == len(borders) - 1,
        )
        for index, (state, began_s, ended_s) in enumerate(borders)
    ]


def _borders(trace: Trace) -> Iterator[tuple[State, float, float]]:
    times = trace.token_times_s
    if not times:
        yield State.WAITING, trace.sent_s, trace.ended_s
        return
    yield State.WAITING, trace.sent_s, times[0]
    least_pause_s = max(PAUSE_GAPS * median(trace.gaps_s or (0.0,)), MIN_PAUSE_S)
    began_s = times[0]
    for earlier_s, later_s in pairwise(times):
        if later_s - earlier_s > least_pause_s:
            yield State.RUNNING, began_s, earlier_s
            yield State.PAUSED, earlier_s, later_s
            began_s = later_s
    yield State.RUNNING, began_s, times[-1]
    if trace.ended_s - times[-1] > least_pause_s:
        yield State.PAUSED, times[-1], trace.ended_s


def pack(spells: Iterable[Spell]) -> tuple[Lane, ...]:
    """Spells in as few lanes as keep them apart, each lane in order of time.

    A request returns to a lane that it had, if that is free, else takes the first free one.
    """
    lanes: list[list[Spell]] = []
    for spell in sorted(spells, key=lambda spell: (spell.began_s, spell.ended_s)):
        free = [lane for lane in lanes if lane[-1].ended_s <= spell.began_s]
        own = [lane for lane in free if any(other.request == spell.request for other in lane)]
        if free:
            (own or free)[0].append(spell)
        else:
            lanes.append([spell])
    return tuple(map(tuple, lanes))
