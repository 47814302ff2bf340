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
    _S.PAUSED: frozenset({_S.PREFILL, _S.DONE}),
    _S.DONE: frozenset(),
}


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
    slot: int | None = None
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
        self.story.append((now, f"{state}: {why}"))

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
    def is_held(self) -> bool:
        """Whether it waits for its leader to compute the prompt they share."""
        leader = self.leader
        if leader is None or leader.state is SequenceState.DONE:
            return False
        return leader.num_computed < leader.num_prompt
