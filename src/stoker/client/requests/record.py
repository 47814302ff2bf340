"""One request in the client: from its submission to its terminal event, or until what is kept was read.

Owns what is known of it. Which requests an engine is given is `replay`'s, where they are found `table`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from stoker.client.requests.transcript import Transcript
from stoker.client.store.file import KeptFile, KeptRequest
from stoker.errors import QueueFullError
from stoker.ipc.commands import Submit
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    Preparing,
    Queued,
    RequestEvent,
    Resumed,
)
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import Timings, Usage

if TYPE_CHECKING:
    from stoker.client.requests.group import RequestGroup
    from stoker.errors import ErrorInfo

MAX_CHARGES = 3
"""So many crashes are charged to a request before it fails."""

EventSink = Callable[[RequestEvent], None]


class Stage(StrEnum):
    """Where a live request is, with the engine that serves now."""

    HELD = "held"  # not given to this engine (yet)
    SENT = "sent"  # given, not heard of
    PREPARING = "preparing"
    QUEUED = "queued"
    ADMITTED = "admitted"  # a choice got a slot; some or all may be parked since
    PAUSED = "paused"


@dataclass(slots=True, eq=False, repr=False)
class RequestRecord:
    """One request.

    Attributes:
        request_id: unique in this program.
        request: what to run, with the id of its model.
        since: when it was submitted, in seconds on a monotonic clock; later where time stood still meanwhile.
        names: what else it is known by.
        owner: digest of the API key that it came with; empty: none.
        group: the call that it belongs to, if that has several requests.
        transcript: what was delivered.
        sinks: called with each of its events, last the terminal one.
        has_client: its caller reads it from its beginning; else it was taken up from a former program.
        ended_s: when it ended without a client.
        stage: where it is with the engine.
        parked: choices that gave their slot up and have not been heard of since.
        is_paused: its caller paused it, whether or not an engine has confirmed it.
        is_asleep: the engine is suspended, and this stands still with it.
        is_quiet: its place in the queue follows from a restart, which the client does not see.
        was_accepted: an engine had it in its queue, or waiting for its model.
        num_context: as in `Admitted`; 0: it was not admitted yet.
        charges: engines that ended while they computed it, since its last token.
        preparation_crashes: engines that ended while they may have prepared it; 0 once one has.
    """

    request_id: str
    request: GenerateRequest
    since: float
    names: Sequence[str] = ()
    owner: str = ""
    group: RequestGroup | None = None
    transcript: Transcript = field(init=False)
    sinks: list[EventSink] = field(default_factory=list)
    has_client: bool = True
    ended_s: float | None = None
    stage: Stage = Stage.HELD
    parked: set[int] = field(default_factory=set)
    has_shown_pause: bool = False
    is_asleep: bool = False
    is_cancelling: bool = False
    is_paused: bool = False
    is_quiet: bool = False
    was_accepted: bool = False
    num_context: int = 0
    num_prompt_tokens: int = 0
    charges: int = 0
    preparation_crashes: int = 0

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.request_id)

    def __repr__(self) -> str:
        return (
            f"<RequestRecord {self.request_id} {self.stage} tokens={self.num_generated} "
            f"parked={sorted(self.parked)} paused={self.is_paused} charges={self.charges}>"
        )

    # ------------------------------------------------------------ questions

    @property
    def num_generated(self) -> int:
        """Tokens delivered, over all choices."""
        return self.transcript.num_tokens

    @property
    def is_ended(self) -> bool:
        """Whether its terminal event is there."""
        return self.transcript.is_ended

    @property
    def num_running(self) -> int:
        """Choices that may hold a slot: it is not known which of several were admitted."""
        if self.stage is not Stage.ADMITTED:
            return 0
        choices = range(self.request.n)
        return sum(not self.transcript.is_finished(i) and i not in self.parked for i in choices)

    @property
    def is_held(self) -> bool:
        """Whether no engine knows of it."""
        return self.stage is Stage.HELD

    @property
    def is_waiting(self) -> bool:
        """Whether it wants its first slot of this engine."""
        return self.stage is not Stage.ADMITTED

    @property
    def is_at_rest(self) -> bool:
        """Whether it is paused and in no step."""
        return self.is_paused and self.stage in {Stage.HELD, Stage.PAUSED}

    @property
    def may_be_in_preparation(self) -> bool:
        """Whether it is being prepared, or may be."""
        return self.stage in {Stage.SENT, Stage.PREPARING}

    @property
    def is_suspect(self) -> bool:
        """Whether one more crash convicts it."""
        return self.charges >= MAX_CHARGES - 1 or self.preparation_crashes > 0

    def has_expired(self, now: float) -> bool:
        """Whether its own deadline has passed."""
        return self.request.timeout_s is not None and now - self.since >= self.request.timeout_s

    def is_known_as(self, name: str) -> bool:
        """Whether it has that id or name."""
        return name == self.request_id or name in self.names

    def kept(self) -> KeptRequest:
        """How it is shown while it has no client."""
        kept = KeptRequest.of(self.request_id, self.request, self.names, self.owner)
        state = "ended" if self.is_ended else "running"
        return msgspec.structs.replace(kept, state=state, num_tokens=self.num_generated)

    # ------------------------------------------------------------ to an engine, or another program

    def submit(self, now: float) -> Submit:
        """The command that lets an engine go on from what was delivered, or begin.

        One that was accepted before carries its (perhaps empty) tokens, which keeps its place in the queue.
        """
        choices = range(self.request.n) if self.was_accepted else ()
        return Submit(
            request_id=self.request_id,
            request=self.request,
            generated=[self.transcript.token_ids(i) for i in choices],
            is_finished=[self.transcript.is_finished(i) for i in choices],
            mirostat_mu=[self.transcript.mirostat_mu(i) for i in choices],
            age_s=now - self.since,
            is_paused=self.is_paused and self.was_accepted,
            num_context=self.num_context,
        )

    def file(self, now: float) -> KeptFile:
        """All that another program needs to go on with it; see `taken_up`."""
        submit = msgspec.structs.replace(self.submit(now), is_paused=self.is_paused)
        return KeptFile(
            submit=submit, shown=self.transcript.shown(), names=list(self.names), owner=self.owner
        )

    @classmethod
    def taken_up(cls, kept: KeptFile, now: float) -> RequestRecord:
        """A request that another program left, as `file` told of it; it has no client here."""
        submit = kept.submit
        record = cls(
            submit.request_id,
            submit.request,
            now - submit.age_s,
            kept.names,
            kept.owner,
            has_client=False,
            is_paused=submit.is_paused,
            has_shown_pause=submit.is_paused,
            was_accepted=bool(submit.generated),
            num_context=submit.num_context,
        )
        record.transcript = Transcript(submit.request_id, kept.shown)
        return record

    # ------------------------------------------------------------ what happens to it

    def take(self, event: RequestEvent) -> bool:
        """Take note of an engine's event; True where the client is to see it.

        A replayed request repeats what the client has seen (its queue, its echo): that is not shown again.
        One that a fresh engine's full queue refused is held again: it had a place before the restart.
        """
        match event:
            case Preparing():
                if self.stage is not Stage.PAUSED:
                    self.stage = Stage.PREPARING
                return False
            case Queued() | Admitted() | Parked() | Paused() | Resumed():
                return self._take_move(event)
            case PrefillProgress():
                self.num_prompt_tokens = event.total
                return self.num_generated == 0
            case Delta():
                return self._take_delta(event)
            case Failed() if self.was_accepted and event.error.code == QueueFullError.code:
                self.hold()
                return False
        return self.transcript.take(event)

    def _take_move(self, event: Queued | Admitted | Parked | Paused | Resumed) -> bool:
        is_shown = False
        match event:
            case Queued():
                self.was_accepted = True
                if self.stage is Stage.PREPARING:
                    self.preparation_crashes = 0
                if self.may_be_in_preparation:
                    self.stage = Stage.QUEUED
                is_shown = not (self.is_quiet or self.is_at_rest)
            case Admitted():
                self.preparation_crashes = 0
                is_shown = self.num_generated == 0  # afterwards it is a return, which the client does not see
                self.was_accepted = True
                self.num_context = event.num_context
                self.stage = Stage.ADMITTED
                self.parked.clear()
            case Parked():
                self.parked.add(event.index)
                self.is_quiet = False
                is_shown = True
            case Paused():  # unless it was resumed meanwhile
                self.stage = Stage.PAUSED if self.is_paused else Stage.QUEUED
                self.parked.clear()
                is_shown = bool(self.tell_pause())
            case Resumed():  # the client knows since `resume`
                self.stage = Stage.QUEUED
                self.is_quiet = False
        return is_shown

    def _take_delta(self, delta: Delta) -> bool:
        if self.transcript.is_finished(delta.index):
            return False
        self.transcript.take(delta)
        if delta.token_ids:
            self.stage = Stage.ADMITTED
            self.parked.discard(delta.index)
            self.is_quiet = False
            self.charges = 0
        return True

    def hold(self) -> None:
        """No engine has it any more."""
        self.stage = Stage.HELD
        self.parked.clear()

    def tell_pause(self) -> list[RequestEvent]:
        """What its client has yet to see of its standing still or going on."""
        stands_still = self.is_paused or self.is_asleep
        if self.has_shown_pause == stands_still:
            return []
        self.has_shown_pause = stands_still
        return [Paused(self.request_id) if stands_still else Resumed(self.request_id)]

    # ------------------------------------------------------------ ends without an engine

    def failed(self, error: ErrorInfo) -> list[RequestEvent]:
        """It ends with that error."""
        return self._noted(Failed(self.request_id, error))

    def cancelled(self) -> list[RequestEvent]:
        """Every open choice ends as cancelled, then the request."""
        ends: list[RequestEvent] = [
            Delta(request_id=self.request_id, index=index, finish_reason=FinishReason.CANCELLED)
            for index in range(self.request.n)
            if not self.transcript.is_finished(index)
        ]
        usage = Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=self.num_generated)
        return self._noted(*ends, Finished(request_id=self.request_id, usage=usage, timings=Timings()))

    def _noted(self, *events: RequestEvent) -> list[RequestEvent]:
        for event in events:
            self.transcript.take(event)
        return list(events)
