"""One running completion: its tokens, where it stands, and how it got there.

Owns the state table of a sequence ("Lifecycles" in docs/architecture.md). The scheduler decides which slot,
when and with whom; `sampling` decides the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stoker.backends.protocol.backend import PLAIN, Conditioning, PicturePart
from stoker.cache.entry import Entry
from stoker.ipc.request import FinishReason, Medium, Priority
from stoker.ipc.usage import CacheSource, Tensor
from stoker.kv.checkpoints import Checkpoints


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """The place of an image, or of a part of one, in a sequence.

    Attributes:
        start: position of its first embedding.
        part: its embeddings, and how they are computed.
        image: the image, or the recording.
        key: the tokens that stand for the whole image, four bytes each: equal for equal ones (SPEC C11).
        offset: embeddings of the image in parts before it.
    """

    start: int
    part: PicturePart
    image: Medium
    key: bytes
    offset: int = 0

    def __repr__(self) -> str:
        return f"<ImageSpan {self.start} to {self.end}>"

    @property
    def num_tokens(self) -> int:
        """Its embeddings."""
        return self.part.num_tokens

    @property
    def end(self) -> int:
        """Position after its last embedding."""
        return self.start + self.num_tokens


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
    _S.DECODE: frozenset({_S.PREFILL, _S.PARKED, _S.PAUSED, _S.DONE}),
    _S.PARKED: frozenset({_S.PREFILL, _S.PAUSED, _S.DONE}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.PARKED, _S.DONE}),
    _S.DONE: frozenset(),
}

STORY_LENGTH = 32
"""Moves that a sequence remembers: its arrival and the latest ones."""


class ParkForm(StrEnum):
    """What is kept of a parked sequence (SPEC Q4), the cheapest to go on from first."""

    CELLS = "cells"
    SNAPSHOT = "snapshot"
    TOKENS = "tokens"


class IllegalMoveError(AssertionError):
    """A move that the state table does not have: our bug, with the sequence's history."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Why a queued sequence does not run.

    Attributes:
        reason: for people.
        by: the request that `reason` names; empty: it names none.
        is_prefix: its beginning is being computed by another sequence.
    """

    reason: str
    by: str = ""
    is_prefix: bool = False


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
        arrival_s: on the engine's clock.
        num_cached: prompt tokens that were not computed for this sequence at its first admission.
        num_wanted: tokens it may generate at most; None: as many as fit.
        ends_if_preempted: it is ended rather than parked (SPEC Q4).
        slot: where it runs.
        place: the number of its slot for people, while it runs: the lowest that was free.
        form: what is kept of it while it waits to go on; None: it runs or has not begun.
        parked_slot: the slot that keeps its cells, for the form CELLS.
        entry: the stored state it goes on from, leased by it: its own of the form SNAPSHOT, or another's that
            is being read or put into its slot.
        has_asked_store: a state was read for it from the shared store, or was not to be had.
        is_importing: its slot gets its tokens from `entry` before the next step.
        namespace: who may share what is computed for it (SPEC C1).
        shares: whether it uses what others computed, and they use its own (SPEC C10).
        initial_state: what a recurrent model begins from; None: its own.
        conditioning: what its tokens are computed with beside themselves.
        images: where images stand among its tokens.
        takes_candidates: its next token is drawn from the largest logits of a row.
        is_to_embed: it asks for the model's view of its last token, which is left to the backend.
        follows: the sequence that computes a prefix it waits for (SPEC C4).
        meets_at: where a step of it ends, so that its followers go on together with it.
        num_ahead: tokens of a draft that the backend holds beyond those computed, until they are drawn.
        is_raised: an interactive sequence follows it, so it does not count as background for now.
        cache_source: where the cached tokens came from.
        checkpoints: where it leaves states behind; None: its model can go back.
        num_forgotten: generated tokens that a shift of the context dropped (SPEC C12).
        num_drafted, num_accepted: tokens that were guessed for it, and those of them that were drawn.
        num_preemptions: times it was parked or ended for another sequence.
        hindrance: why it does not run; None: it runs, or that is not known yet.
        why: of its last move.
        others: requests that its story names, the latest ones.
        started_s: when it first got a slot.
        last_step_s: when it last was in a step, at first its arrival.
        owed_since_s: the last step, or arrival, of background that waited too long and has not had a token
            since (SPEC Q7); None: it is owed none.
    """

    key: SequenceKey
    tokens: list[int]
    num_prompt: int
    priority: Priority = Priority.INTERACTIVE
    arrival_s: float = 0.0
    wants_prompt_logits: bool = False
    leader: Sequence | None = None
    num_computed: int = 0
    num_cached: int | None = None
    num_wanted: int | None = None
    ends_if_preempted: bool = False
    slot: int | None = None
    place: int = 0
    form: ParkForm | None = None
    parked_slot: int | None = None
    entry: Entry | None = None
    has_asked_store: bool = False
    is_importing: bool = False
    namespace: bytes = b""
    shares: bool = True
    initial_state: list[Tensor] | None = None
    conditioning: Conditioning = PLAIN
    images: tuple[ImageSpan, ...] = ()
    takes_candidates: bool = False
    is_to_embed: bool = False
    follows: PrefixFollow | None = None
    meets_at: int = 0
    num_ahead: int = 0
    is_raised: bool = False
    cache_source: CacheSource | None = None
    checkpoints: Checkpoints | None = None
    num_forgotten: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    started_s: float | None = None
    last_step_s: float = 0.0
    owed_since_s: float | None = None
    state: SequenceState = SequenceState.QUEUED
    finish_reason: FinishReason | None = None
    story: list[tuple[float, str]] = field(default_factory=list)
    hindrance: Hindrance | None = None
    why: str = ""
    others: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.key} {self.state} slot={self.slot} "
            f"{self.num_computed}/{len(self.tokens)} of which prompt {self.num_prompt}>"
        )

    def move(self, state: SequenceState, now: float, why: str, by: str = "") -> None:
        """Change state; raises IllegalMoveError if the table has no such move.

        `by` is the request that `why` names.
        """
        if state not in MOVES[self.state]:
            told = "; ".join(f"{at:.3f} {what}" for at, what in self.story)
            raise IllegalMoveError(f"{self!r} cannot become {state} ({why}); story: {told}")
        self.state, self.why, self.hindrance = state, why, None
        self.tell(now, f"{state}: {why}")
        if by and by not in self.others:
            self.others = [*self.others[1 - STORY_LENGTH :], by]

    def tell(self, now: float, what: str) -> None:
        """Add to its history, of which the middle is dropped."""
        if len(self.story) == STORY_LENGTH:
            del self.story[1]
        self.story.append((now, what))

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.tokens) - self.num_computed

    def draw_ahead(self) -> None:
        """Count the next token of the draft, which is computed already, as drawn."""
        assert self.num_ahead > 0, f"{self!r} has no draft"
        self.num_ahead -= 1
        self.num_computed += 1

    def guess_last(self) -> None:
        """Its last token was computed in vain: it counts as one of a draft."""
        assert self.num_pending == 0, f"{self!r} has tokens to compute"
        self.num_ahead += 1
        self.num_computed -= 1

    @property
    def num_in_reach(self) -> int:
        """Pending tokens that one step may carry: to the next checkpoint, image edge, or meeting place."""
        if self.awaits_image:
            return 0
        at = self.num_computed
        places = [edge for span in self.images for edge in (span.start, span.end)]
        places.append(self.meets_at)
        if self.checkpoints is not None and (checkpoint := self.checkpoints.next_after(at)) is not None:
            places.append(checkpoint)
        return min([self.num_pending, *(place - at for place in places if place > at)])

    @property
    def unencoded_images(self) -> list[ImageSpan]:
        """Its images still to be computed whose embeddings are not there yet, in their order."""
        if not self.images:
            return []
        placed = {each.start for each in self.conditioning.pictures}
        return [span for span in self.images if span.end > self.num_computed and span.start not in placed]

    @property
    def is_at_image(self) -> bool:
        """Whether its next token is an image's."""
        return bool(self.images) and self.num_pending > 0 and self.tokens[self.num_computed] < 0

    @property
    def awaits_image(self) -> bool:
        """Whether its next token is an image's whose embeddings are not there yet."""
        return bool(self.images) and any(span.start <= self.num_computed for span in self.unencoded_images)

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt + self.num_forgotten

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot."""
        return self.slot is not None

    @property
    def is_background(self) -> bool:
        """Whether it gives way to interactive sequences."""
        return self.priority is Priority.BACKGROUND and not self.is_raised

    @property
    def is_owed(self) -> bool:
        """Whether it waited too long (SPEC Q7) and has not had a token since."""
        return self.owed_since_s is not None

    @property
    def is_held(self) -> bool:
        """Whether it waits for its leader to compute the prompt they share."""
        leader = self.leader
        if leader is None or leader.state is SequenceState.DONE:
            return False
        return leader.num_computed < leader.num_prompt


@dataclass(frozen=True, slots=True)
class PrefixFollow:
    """A wait until `leader` has computed `length` tokens."""

    leader: Sequence
    length: int

    @property
    def is_over(self) -> bool:
        """Whether the tokens are there, or do not come from this leader any more."""
        leader = self.leader
        return leader.state is not SequenceState.PREFILL or leader.num_computed >= self.length
