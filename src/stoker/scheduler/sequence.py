"""One running completion: its tokens, where it stands, and how it got there.

Owns the state table of a sequence (SPEC, ARCHITECTURE "Lifecycles"). Which slot, when and with whom is the
scheduler's decision; what its text looks like is decode's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stoker.request import FinishReason, Priority


class SequenceState(StrEnum):
    """Where a sequence stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    PAUSED = "paused"
    DONE = "done"


_S = SequenceState
MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    _S.QUEUED: frozenset({_S.PREFILL, _S.PAUSED, _S.DONE}),
    _S.PREFILL: frozenset({_S.DECODE, _S.PARKED, _S.PAUSED, _S.DONE}),
    _S.DECODE: frozenset({_S.PARKED, _S.PAUSED, _S.DONE}),
    _S.PARKED: frozenset({_S.PREFILL, _S.PAUSED, _S.DONE}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.PARKED, _S.DONE}),
    _S.DONE: frozenset(),
}

STORY_LENGTH = 32
"""Moves a sequence remembers: its arrival and the latest ones."""


class ParkForm(StrEnum):
    """What is kept of a sequence that gave its place up (SPEC Q4), the cheapest to go on from first."""

    CELLS = "cells"
    SNAPSHOT = "snapshot"
    TOKENS = "tokens"


class IllegalMoveError(AssertionError):
    """A state was left by a way the table does not have: a bug of ours, told with the sequence's story."""


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Names a sequence: choice `index` of request `request_id`."""

    request_id: str
    index: int

    def __str__(self) -> str:
        return f"{self.request_id}[{self.index}]"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated after it.

    Attributes:
        tokens: prompt and generated token ids; the last generated one is not computed yet.
        num_prompt: how many of them are the prompt.
        num_computed: how many the backend holds.
        wants_prompt_logits: every prompt position asks for its row (prompt logprobs), so nothing is reused.
        leader: the choice of the same request that prefills the shared prompt first (SPEC Q16).
        arrival_s, deadline_s: on the engine's clock.
        num_cached: prompt tokens that were not computed for this sequence at its first admission.
        num_wanted: tokens it may generate at most; None: as many as fit.
        ends_if_preempted: it is ended rather than parked (SPEC Q4).
        slot: where it runs.
        form: what is kept of it while it waits to go on; None: it runs or has not begun.
        home: the slot that keeps its cells, for the form CELLS.
        snapshot: its state as bytes, opaque here, for the form SNAPSHOT; None until it was exported.
        snapshot_bytes: what it takes, or is reckoned to take.
        num_preemptions: times it was parked or ended for somebody else.
        started_s: when it first got a slot.
        last_step_s: when it last was in a step, at first its arrival.
        is_owed: background that waited over its patience and has not had a token since (SPEC Q7).
    """

    key: SequenceKey
    tokens: list[int]
    num_prompt: int
    priority: Priority = Priority.INTERACTIVE
    arrival_s: float = 0.0
    deadline_s: float | None = None
    wants_prompt_logits: bool = False
    leader: Sequence | None = None
    num_computed: int = 0
    num_cached: int | None = None
    num_wanted: int | None = None
    ends_if_preempted: bool = False
    slot: int | None = None
    form: ParkForm | None = None
    home: int | None = None
    snapshot: bytes | None = None
    snapshot_bytes: int = 0
    num_preemptions: int = 0
    started_s: float | None = None
    last_step_s: float = 0.0
    is_owed: bool = False
    state: SequenceState = SequenceState.QUEUED
    finish_reason: FinishReason | None = None
    story: list[tuple[float, str]] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.key} {self.state} slot={self.slot} "
            f"{self.num_computed}/{len(self.tokens)} of which prompt {self.num_prompt}>"
        )

    def move(self, state: SequenceState, now: float, why: str) -> None:
        """Change state; raises IllegalMoveError with the story if the table has no such move."""
        if state not in MOVES[self.state]:
            told = "; ".join(f"{at:.3f} {what}" for at, what in self.story)
            raise IllegalMoveError(f"{self!r} cannot become {state} ({why}); story: {told}")
        self.state = state
        self.tell(now, f"{state}: {why}")

    def tell(self, now: float, what: str) -> None:
        """Add a line to its story; of a long one the middle is forgotten."""
        if len(self.story) == STORY_LENGTH:
            del self.story[1]
        self.story.append((now, what))

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot."""
        return self.slot is not None

    @property
    def is_background(self) -> bool:
        """Whether nobody waits for it."""
        return self.priority is Priority.BACKGROUND

    @property
    def is_held(self) -> bool:
        """Whether it waits for its leader to compute the prompt they share."""
        leader = self.leader
        if leader is None or leader.state is SequenceState.DONE:
            return False
        return leader.num_computed < leader.num_prompt
