"""What a machine tells of itself, and what of that speaks against giving it new work.

`PeerState` is a value: a door makes one from `/v1/runtime`, or a replica publishes it. `closed` is what
forbids new work: what would be sent there could not run. `reluctance` is what makes a machine the last
resort: a hot, full or pressed one would hold the request in its own line, as it does with its own.
Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from stoker.ipc.request import Priority
from stoker.machine.ladder import Rung

HOT = frozenset({"serious", "critical"})
"""From here a machine holds its background and loads no model."""


class ByClass(msgspec.Struct, frozen=True):
    """A number of requests of each class."""

    interactive: int = 0
    background: int = 0

    def of(self, priority: Priority) -> int:
        """That of one class."""
        return self.background if priority is Priority.BACKGROUND else self.interactive


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a site as it was last heard of.

    Attributes:
        name: by which the site knows it; it is hashed, so a machine that is renamed is another.
        at: when it said so, on the clock of who asks.
        is_up: it answers and is ready.
        is_draining: what it has ends there, and nothing new begins.
        is_suspended: its engine has stored what it computed and ended.
        heat: nominal, fair, serious or critical.
        rungs: of the ladder against memory pressure that are taken.
        models: names of those in memory or on their way there.
        available: those it can load, each with how well it fits there: the bytes that would stay free;
            below 0: it does not fit.
        running, waiting: requests by class.
        num_slots: that generate at once.
        free_cells: that a new prompt may take, stored prefixes that give way among them, by model; of one
            that is not there it is not known.
        interactive_wait_s: how long a person would wait there for a slot.
        prefixes: hashes of `prefix_chain` that it has, the newest.
    """

    name: str
    at: float = 0.0
    is_up: bool = True
    is_draining: bool = False
    is_suspended: bool = False
    heat: str = "nominal"
    rungs: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()
    available: Mapping[str, float] = {}
    running: ByClass = ByClass()
    waiting: ByClass = ByClass()
    num_slots: int = 1
    free_cells: Mapping[str, int] = {}
    interactive_wait_s: float = 0.0
    prefixes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a machine has no name")
        if self.num_slots < 1:
            raise ValueError(f"{self.name} has {self.num_slots} slots, and must have 1 at least")

    def told(self, priority: Priority) -> int:
        """Requests of a class that it had."""
        return self.running.of(priority) + self.waiting.of(priority)


def closed(state: PeerState) -> str:
    """Why no new work may begin on that machine, for people; empty: it may."""
    if not state.is_up:
        return "it does not answer"
    if state.is_draining:
        return "it is being drained"
    if state.is_suspended:
        return "it is suspended"
    return ""


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a machine the last resort.

    Attributes:
        max_wait_s: a person would wait longer there.
        max_silence_s: it said nothing for longer.
    """

    max_wait_s: float = 10.0
    max_silence_s: float = 15.0


class NewWork(Protocol):
    """What is asked about a request that is to begin somewhere."""

    @property
    def model(self) -> str:
        """Its model."""
        ...

    @property
    def priority(self) -> Priority:
        """Its class."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """About how many tokens its prompt has."""
        ...


def reluctance(state: PeerState, work: NewWork, now: float, limits: PeerLimits) -> str:
    """Why new work should rather begin elsewhere, for people; empty: here is as good."""
    is_job = work.priority is Priority.BACKGROUND
    free_cells = state.free_cells.get(work.model, work.num_prompt_tokens)
    why = ""
    if now - state.at > limits.max_silence_s:
        why = f"it said nothing for {now - state.at:.0f} s"
    elif state.heat in HOT:
        why = f"its heat is {state.heat}"
    elif Rung.PARK_INTERACTIVE in state.rungs:
        why = "its memory is short, and everything waits there"
    elif is_job and Rung.PAUSE_BACKGROUND in state.rungs:
        why = "its memory is short, and background waits there"
    elif not is_job and state.interactive_wait_s > limits.max_wait_s:
        why = f"people wait {state.interactive_wait_s:.0f} s there"
    elif work.num_prompt_tokens > free_cells:
        why = f"it has room for {free_cells} tokens, and the prompt has {work.num_prompt_tokens}"
    return why
