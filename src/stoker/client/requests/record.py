"""One request in the client: from its submission to its terminal event, or until what is kept was read.

Owns what is known of it. Which requests an engine is given is `replay`'s, where they are found `table`'s.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from stoker.client.requests.meter import RequestMeter, Wait, tokens_per_second
from stoker.client.requests.moves import LOADING, RequestMoves
from stoker.client.store.file import KeptFile, KeptRequest, Shown
from stoker.errors import InvalidRequestError, QueueFullError
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
    PromptEcho,
    Queued,
    RequestEvent,
    Resumed,
    StateReady,
)
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.status import RequestStatus
from stoker.ipc.usage import Timings, Usage

if TYPE_CHECKING:
    from stoker.client.requests.group import RequestGroup
    from stoker.errors import ErrorInfo

MAX_CHARGES = 3
"""So many crashes are charged to a request before it fails."""

EventSink = Callable[[RequestEvent], None]


def new_request_id() -> str:
    """Of a request or a group that its caller gave none."""
    return f"req-{secrets.token_hex(8)}"


def request_id_of(given: str | None) -> str:
    """The id that a caller gave, or a new one. Raises InvalidRequestError: it is no text, or empty."""
    if given is None:
        return new_request_id()
    if not isinstance(given, str) or not given:
        raise InvalidRequestError(f"request_id is a text, got {given!r:.60}", param="request_id")
    return given


class Stage(StrEnum):
    """Where a live request is, with the engine that serves now."""

    HELD = "held"  # not given to this engine (yet)
    SENT = "sent"  # given, not heard of
    PREPARING = "preparing"
    QUEUED = "queued"
    ADMITTED = "admitted"  # a choice got a slot; some or all may be parked since
    PAUSED = "paused"


MAX_DELTAS = 128
"""A choice's deltas are joined when they are so many: an answer is to take little more than its tokens."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one choice, at least one, as one. `mirostat_mu` is that of the last token."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs = [each.logprobs for each in deltas if each.logprobs is not None]
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join([each.text for each in deltas]),
        token_ids=[token for each in deltas for token in each.token_ids],
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_text=last.stop_text,
        mirostat_mu=next((each.mirostat_mu for each in reversed(deltas) if each.token_ids), None),
    )


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
        route: path of the HTTP route that it came by, or "library".
        choices: the deltas delivered of each choice: the only place in the client that keeps its tokens.
        num_generated: tokens delivered, over all choices.
        sinks: called with each of its events, last the terminal one.
        is_ready: an engine may have it; else its constraint is being translated.
        has_client: its caller reads it from its beginning; else it was taken up from a former program.
        has_file: it was written down when the engine was suspended, or by a former program.
        ended_s: when it ended without a client.
        stage: where it is with the engine.
        parked: choices that gave their slot up and have not been heard of since.
        is_paused: its caller paused it, whether or not an engine has confirmed it.
        is_asleep: the engine is suspended, and this stands still with it.
        is_quiet: its place in the queue follows from a restart, which the client does not see.
        was_accepted: an engine had it in its queue, or waiting for its model.
        num_context: as in `Admitted`; 0: it was not admitted yet.
        made_for, vocabulary: as in `Submit`.
        vocabulary_sample: as in `Submit`, of one that another machine has begun.
        is_handed_over: a gate gave it, with what another machine had made ready of it.
        charges: engines that ended while they computed it, since its last token.
        preparation_crashes: engines that ended while they may have prepared it; 0 once one has.
        meter: its times.
        moves: what it went through, as others are shown it.
    """

    request_id: str
    request: GenerateRequest
    since: float
    names: Sequence[str] = ()
    owner: str = ""
    group: RequestGroup | None = None
    route: str = "library"
    choices: dict[int, list[Delta]] = field(default_factory=dict)
    num_generated: int = 0
    sinks: list[EventSink] = field(default_factory=list)
    is_ready: bool = True
    has_client: bool = True
    has_file: bool = False
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
    made_for: str = ""
    vocabulary: str = ""
    vocabulary_sample: str = ""
    is_handed_over: bool = False
    charges: int = 0
    preparation_crashes: int = 0
    meter: RequestMeter = field(init=False)
    moves: RequestMoves = field(init=False)
    _before: list[PromptEcho | StateReady] = field(default_factory=list)
    _end: Finished | Failed | None = None

    def __post_init__(self) -> None:
        arrived_at = time.time() - (time.monotonic() - self.since)
        self.meter = RequestMeter(arrived_at=arrived_at, arrived_s=self.since)
        self.moves = RequestMoves(self.request.n)

    def __repr__(self) -> str:
        return (
            f"<RequestRecord {self.request_id} {self.stage} tokens={self.num_generated} "
            f"parked={sorted(self.parked)} paused={self.is_paused} charges={self.charges}>"
        )

    # ------------------------------------------------------------ questions

    @property
    def is_ended(self) -> bool:
        """Whether its terminal event is there."""
        return self._end is not None

    @property
    def num_running(self) -> int:
        """Choices that may hold a slot: it is not known which of several were admitted."""
        if self.stage is not Stage.ADMITTED:
            return 0
        return sum(not self._is_finished(i) and i not in self.parked for i in range(self.request.n))

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
        """How it is shown to others than its client."""
        kept = KeptRequest.of(self.request_id, self.request, self.names, self.owner)
        state = "ended" if self.is_ended else "running"
        return msgspec.structs.replace(kept, state=state, num_tokens=self.num_generated)

    def status(self, now: float) -> RequestStatus:
        """What it is and how far it has come, without its text; `now` is on the clock of `since`."""
        meter, end = self.meter, self._end
        usage = end.usage if isinstance(end, Finished) else Usage()
        num_generated = max(usage.completion_tokens, self.num_generated)
        parked_s, decode_s = meter.waited_s(Wait.PARKED, now), meter.decode_s(now)
        return RequestStatus(
            request_id=self.request_id,
            owner=self.owner,
            model=self.request.model,
            priority=self.request.priority,
            kind=self.group.kind if self.group else "chat" if self.request.is_chat else "completion",
            route=self.route,
            arrived_at=meter.arrived_at,
            prompt_tokens=usage.prompt_tokens or meter.prompt_tokens,
            cached_tokens=usage.cached_tokens or meter.cached_tokens,
            completion_tokens=num_generated,
            max_tokens=self.request.max_tokens,
            queue_s=meter.queue_s(now),
            first_token_s=meter.to_first_token_s(),
            decode_s=decode_s,
            tokens_per_second=tokens_per_second(num_generated, len(self.choices), decode_s - parked_s),
            num_parks=meter.num_parks,
            parked_s=parked_s,
            waited_for=meter.longest_wait(now)[1],
            finish_reason=self.finish_reason,
            error=end.error if isinstance(end, Failed) else None,
            state=self._shown_state,
            processed_tokens=meter.processed_tokens,
            position=meter.position,
            eta_s=meter.eta_s(now),
            waits_for=self._waits_for,
            cache_source=usage.cache_source or meter.cache_source,
            end_to_end_s=meter.end_to_end_s(now),
            itl_ms=meter.gaps.status(),
            num_restarts=meter.num_restarts,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
            moves=self.moves.listed,
            num_moves=self.moves.num_moves,
        )

    @property
    def finish_reason(self) -> str | None:
        """Why its choices ended, each reason once; None: none has."""
        reasons = dict.fromkeys(deltas[-1].finish_reason for _, deltas in sorted(self.choices.items()))
        return ", ".join(reason for reason in reasons if reason) or None

    @property
    def _waits_for(self) -> str:
        """Why it does not compute, with how far the load of its model is."""
        why = "" if self.is_ended else self.moves.waits_for
        fraction = self.meter.load_fraction
        return f"{why}, {fraction:.0%}" if why == LOADING and fraction else why

    @property
    def _shown_state(self) -> str:
        if self.is_ended:
            return "ended"
        match self.stage:
            case Stage.ADMITTED | Stage.QUEUED:
                return str(self.moves.state)
            case Stage.SENT:
                return str(Stage.PREPARING)
        return str(self.stage)

    # ------------------------------------------------------------ to an engine, or another program

    def submit(self, now: float) -> Submit:
        """The command that lets an engine go on from what was delivered, or begin.

        One that was accepted before carries its (perhaps empty) tokens, which keeps its place in the queue.
        """
        none = Delta(request_id=self.request_id, index=0)
        choices = [joined(self.choices.get(i) or [none]) for i in range(self.request.n)]
        if not self.was_accepted:
            choices = []
        return Submit(
            request_id=self.request_id,
            request=self.request,
            generated=[list(choice.token_ids) for choice in choices],
            is_finished=[choice.finish_reason is not None for choice in choices],
            mirostat_mu=[choice.mirostat_mu for choice in choices],
            age_s=now - self.since,
            is_paused=self.is_paused and self.was_accepted,
            num_context=self.num_context,
            made_for=self.made_for,
            vocabulary=self.vocabulary,
            vocabulary_sample=self.vocabulary_sample,
        )

    def file(self, now: float) -> KeptFile:
        """All that another program needs to go on with it; see `taken_up`."""
        submit = msgspec.structs.replace(self.submit(now), is_paused=self.is_paused)
        return KeptFile(submit=submit, shown=self.shown(), names=list(self.names), owner=self.owner)

    def shown(self) -> list[Shown]:
        """All that was delivered in few events: what comes before the text, one delta a choice, the end."""
        deltas = [joined(deltas) for _, deltas in sorted(self.choices.items())]
        return [*self._before, *deltas, *([self._end] if self._end else [])]

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
            has_file=True,
            is_paused=submit.is_paused,
            has_shown_pause=submit.is_paused,
            was_accepted=bool(submit.generated),
            num_context=submit.num_context,
            made_for=submit.made_for,
            vocabulary=submit.vocabulary,
        )
        for event in kept.shown:
            record._note(event)
        return record

    @classmethod
    def handed_over(cls, submit: Submit, now: float, owner: str, route: str) -> RequestRecord:
        """A request that a gate gives, from its beginning or from tokens that another machine delivered."""
        record = cls(
            submit.request_id,
            submit.request,
            now - submit.age_s,
            owner=owner,
            route=route,
            is_paused=submit.is_paused,
            was_accepted=any(submit.generated),
            vocabulary_sample=submit.vocabulary_sample,
            is_handed_over=True,
        )
        for index, tokens in enumerate(submit.generated):
            is_over = submit.is_finished[index]
            if tokens or is_over:
                record._note_delta(
                    Delta(
                        request_id=submit.request_id,
                        index=index,
                        token_ids=tokens,
                        finish_reason=FinishReason.STOP if is_over else None,
                        mirostat_mu=submit.mirostat_mu[index],
                    )
                )
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
                return self.request.return_progress and self.num_generated == 0
            case Delta():
                return self.take_delta(event)
            case Failed() if self.was_accepted and event.error.code == QueueFullError.code:
                self.hold()
                return False
        return self._note(event)

    def _note(self, event: RequestEvent) -> bool:
        """Keep what is delivered; False where it repeats what was: an echo and a state are there once."""
        match event:
            case Delta():
                self._note_delta(event)
            case PromptEcho() | StateReady():
                if any(type(before) is type(event) for before in self._before):
                    return False
                self._before.append(event)
            case Finished() | Failed():
                self._end = event
        return True

    def _is_finished(self, index: int) -> bool:
        deltas = self.choices.get(index)
        return deltas is not None and deltas[-1].finish_reason is not None

    def _take_move(self, event: Queued | Admitted | Parked | Paused | Resumed) -> bool:
        is_shown = False
        match event:
            case Queued():
                self.was_accepted = True
                if not event.awaits_model:
                    self.preparation_crashes = 0
                if self.may_be_in_preparation:
                    self.stage = Stage.QUEUED
                is_shown = not (self.is_quiet or self.is_at_rest)
            case Admitted():
                self.preparation_crashes = 0
                is_shown = self.num_generated == 0 or self.is_handed_over  # a return is for gates alone
                self.was_accepted = True
                self.num_context = event.num_context
                self.stage = Stage.ADMITTED
                self.parked.discard(event.index)
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

    def _note_delta(self, delta: Delta) -> None:
        deltas = self.choices.setdefault(delta.index, [])
        deltas.append(delta)
        if len(deltas) == MAX_DELTAS:
            deltas[:] = [joined(deltas)]
        self.num_generated += len(delta.token_ids)

    def take_delta(self, delta: Delta) -> bool:
        """As `take`, of what comes with every token."""
        deltas = self.choices.get(delta.index)
        if deltas is not None and deltas[-1].finish_reason is not None:
            return False
        self._note_delta(delta)
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
            if not self._is_finished(index)
        ]
        usage = Usage(prompt_tokens=self.meter.prompt_tokens, completion_tokens=self.num_generated)
        return self._noted(*ends, Finished(request_id=self.request_id, usage=usage, timings=Timings()))

    def _noted(self, *events: RequestEvent) -> list[RequestEvent]:
        for event in events:
            self._note(event)
        return list(events)
