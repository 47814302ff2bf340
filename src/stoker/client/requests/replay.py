"""What was delivered of each live request, and which of them a fresh engine may be given.

Owns the record that a restart replays from, the charges for crashes and the quarantine of suspects.
Pure: time arrives as an argument, commands and verdicts leave as values; sending is the host's business.

A crash is charged to the requests that could have caused it: not those in the line, parked or paused. A
token of progress clears a request. One that has MAX_CHARGES - 1 is a suspect: the next engine gets the
suspects one at a time, before anybody else and the newest first (the crashes began when it came), and only
a suspect that was alone when the engine died is convicted. So nobody is convicted for a neighbour's crash,
and nobody waits longer than the suspects' first tokens take.

Preparation (tokenising, compiling a constraint) crashes the same way each time: one that was being prepared
is convicted at once where nothing else can have been the cause, and else is a suspect at once, until it is
prepared (docs/adr/0015).

A paused request is given to the next engine paused, unless giving it could be what crashes: one that no
engine has accepted yet, or a suspect, is kept here until it is resumed. Nobody waits for a paused suspect.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import EngineCrashedError, InvalidRequestError, QueueFullError
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
)
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.client.process.exit import EngineExit
    from stoker.errors import ErrorInfo

MAX_CHARGES = 3


class Stage(StrEnum):
    """Where a live request is, in this life of the engine."""

    HELD = "held"  # not given to this engine (yet)
    SENT = "sent"  # given, not heard of
    PREPARING = "preparing"
    QUEUED = "queued"
    ADMITTED = "admitted"  # a choice got a slot; some or all may be parked since
    PAUSED = "paused"


class RequestRecord:
    """One request between its submission and its terminal event.

    Attributes:
        is_paused: its caller wants it to stand still, whether or not an engine has confirmed it.
        parked: choices that gave their slot up and have not been heard of since.
        place: in the queue, 0 is next, and in about how many seconds it runs; None: it is not in it.
        was_accepted: an engine had it in its line, or waiting for its model.
        num_context: as in `Admitted`; 0: it was not admitted yet.
        preparation_crashes: engines that ended while they may have prepared it; 0 once one has.
        is_quiet: its place in the line is the business of the restart, which the client does not see.
        has_shown_pause: what the client was told last.
        is_asleep: the engine is suspended, and this stands still with it.
    """

    __slots__ = (
        "charges",
        "generated",
        "has_echo",
        "has_shown_pause",
        "is_asleep",
        "is_cancelling",
        "is_finished",
        "is_paused",
        "is_quiet",
        "mirostat_mu",
        "num_context",
        "num_prompt_tokens",
        "parked",
        "place",
        "preparation_crashes",
        "request",
        "request_id",
        "since",
        "stage",
        "was_accepted",
    )

    def __init__(self, request_id: str, request: GenerateRequest, now: float) -> None:
        self.request_id = request_id
        self.request = request
        self.since = now
        self.stage = Stage.HELD
        self.generated: list[list[int]] = [[] for _ in range(request.n)]
        self.is_finished = [False] * request.n
        self.mirostat_mu: list[float | None] = [None] * request.n
        self.parked: set[int] = set()
        self.place: tuple[int, float | None] | None = None
        self.has_echo = False
        self.has_shown_pause = False
        self.is_asleep = False
        self.is_cancelling = False
        self.is_paused = False
        self.is_quiet = False
        self.was_accepted = False
        self.num_context = 0
        self.num_prompt_tokens = 0
        self.charges = 0
        self.preparation_crashes = 0

    def __repr__(self) -> str:
        return (
            f"<RequestRecord {self.request_id} {self.stage} tokens={self.num_generated} "
            f"parked={sorted(self.parked)} paused={self.is_paused} charges={self.charges}>"
        )

    @property
    def num_generated(self) -> int:
        """Tokens delivered, over all choices."""
        return sum(map(len, self.generated))

    @property
    def num_running(self) -> int:
        """Choices that may hold a slot: it is not told which of several were admitted."""
        if self.stage is not Stage.ADMITTED:
            return 0
        return sum(not is_finished and i not in self.parked for i, is_finished in enumerate(self.is_finished))

    @property
    def is_held(self) -> bool:
        """Whether no engine knows of it."""
        return self.stage is Stage.HELD

    @property
    def is_waiting(self) -> bool:
        """Whether it wants its first slot of this life."""
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

    def submit(self, now: float) -> Submit:
        """The command that lets an engine go on from what was delivered, or begin.

        One that was accepted before carries its (perhaps empty) tokens, which keeps its place in the line.
        """
        whole = self.portable(now)
        return whole if self.was_accepted else msgspec.structs.replace(whole, is_paused=False)

    def portable(self, now: float) -> Submit:
        """All that another program needs to go on with it; see `taken_up`."""
        was_accepted = self.was_accepted
        return Submit(
            request_id=self.request_id,
            request=self.request,
            generated=[list(tokens) for tokens in self.generated] if was_accepted else [],
            is_finished=list(self.is_finished) if was_accepted else [],
            mirostat_mu=list(self.mirostat_mu) if was_accepted else [],
            age_s=now - self.since,
            is_paused=self.is_paused,
            num_context=self.num_context,
        )

    @classmethod
    def taken_up(cls, kept: Submit, now: float) -> RequestRecord:
        """A request that another program left, as `portable` told of it."""
        live = cls(kept.request_id, kept.request, now - kept.age_s)
        live.is_paused = live.has_shown_pause = kept.is_paused
        live.was_accepted = bool(kept.generated)
        live.num_context = kept.num_context
        if kept.generated:
            live.generated = [list(tokens) for tokens in kept.generated]
            live.is_finished = list(kept.is_finished)
            live.mirostat_mu = list(kept.mirostat_mu)
        return live

    def has_expired(self, now: float) -> bool:
        """Whether its own deadline has passed."""
        return self.request.timeout_s is not None and now - self.since >= self.request.timeout_s

    def cancelled(self) -> list[RequestEvent]:
        """How it ends when no engine is there to end it: every open choice cancelled, then the terminal."""
        ends: list[RequestEvent] = [
            Delta(request_id=self.request_id, index=index, finish_reason=FinishReason.CANCELLED)
            for index, is_finished in enumerate(self.is_finished)
            if not is_finished
        ]
        usage = Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=self.num_generated)
        return [*ends, Finished(request_id=self.request_id, usage=usage, timings=Timings())]

    def tell_pause(self) -> list[RequestEvent]:
        """What its client has yet to be told of its standing still or going on."""
        stands_still = self.is_paused or self.is_asleep
        if self.has_shown_pause == stands_still:
            return []
        self.has_shown_pause = stands_still
        return [Paused(self.request_id) if stands_still else Resumed(self.request_id)]


class Replay:
    """Every live request, in order of submission."""

    def __init__(self) -> None:
        self._live: dict[str, RequestRecord] = {}
        self._may_release = False
        self._asleep_since: float | None = None

    def __repr__(self) -> str:
        return f"<Replay live={list(self._live.values())!r}>"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> RequestRecord | None:
        """The live request of that id."""
        return self._live.get(request_id)

    def held(self) -> list[RequestRecord]:
        """Those that no engine knows of."""
        return [live for live in self if live.is_held]

    @property
    def is_on_trial(self) -> bool:
        """Whether a suspect runs or wants to: it gets the engine to itself."""
        return any(live.is_suspect and not live.is_at_rest for live in self)

    def slept_s(self, now: float) -> float:
        """For how long everything has stood still; 0: it does not."""
        return 0.0 if self._asleep_since is None else now - self._asleep_since

    @property
    def is_asleep(self) -> bool:
        """Whether everything stands still until `wake`, time included."""
        return self._asleep_since is not None

    def add(self, live: RequestRecord) -> list[RequestEvent]:
        """Another request, held until `release` lets it go; returns what its client is told now.

        Raises:
            InvalidRequestError: a live request has that id.
        """
        if live.request_id in self._live:
            raise InvalidRequestError(f"request id {live.request_id!r} is in use", param="request_id")
        self._live[live.request_id] = live
        self._may_release = True
        live.is_asleep = self.is_asleep
        return live.tell_pause()

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._live.pop(request_id, None)
        self._may_release = True

    def pause(self, live: RequestRecord) -> list[RequestEvent]:
        """Its caller wants it to stand still.

        Returns:
            What its client is told now: where an engine has it, that will say when no token can come.
        """
        live.is_paused = True
        return live.tell_pause() if live.is_held else []

    def resume(self, live: RequestRecord) -> list[RequestEvent]:
        """Its caller wants it to go on; returns what its client is told now.

        A suspect is none for now: a trial takes an engine to itself, and this one has gone on without it.
        """
        live.is_paused = False
        live.charges = min(live.charges, MAX_CHARGES - 2)
        if live.stage is Stage.PAUSED:
            live.stage = Stage.QUEUED
        self._may_release = True
        return live.tell_pause()

    def record(self, event: RequestEvent) -> bool:
        """Take note of an engine's event; True when the client is to see it.

        A replayed request repeats what the client has seen (its line, its echo): that is not shown again.
        """
        live = self._live.get(event.request_id)
        if live is None or live.is_held:
            return False
        is_shown = True
        match event:
            case Preparing():
                if live.stage is not Stage.PAUSED:
                    live.stage = Stage.PREPARING
                is_shown = False
            case Queued() | Admitted() | Parked() | Paused() | Resumed():
                is_shown = self._record_move(live, event)
            case PrefillProgress():
                live.num_prompt_tokens = event.total
                is_shown = live.num_generated == 0
            case PromptEcho():
                is_shown, live.has_echo = not live.has_echo, True
            case Delta():
                is_shown = self._record_delta(live, event)
            case Failed() if live.was_accepted and event.error.code == QueueFullError.code:
                self._take_back(live)
                is_shown = False
            case Finished() | Failed():
                self.drop(live.request_id)
        return is_shown

    def _record_move(self, live: RequestRecord, event: Queued | Admitted | Parked | Paused | Resumed) -> bool:
        is_shown = False
        match event:
            case Queued():
                live.was_accepted = True
                live.place = event.position, event.eta_s
                if live.stage is Stage.PREPARING:
                    self._prepared(live)
                if live.may_be_in_preparation:
                    live.stage = Stage.QUEUED
                is_shown = not (live.is_quiet or live.is_at_rest)
            case Admitted():
                self._prepared(live)
                is_shown = live.num_generated == 0  # afterwards it tells of a return, which is our business
                live.was_accepted = True
                live.num_context = event.num_context
                live.stage = Stage.ADMITTED
                live.place = None
                live.parked.clear()
            case Parked():
                live.parked.add(event.index)
                live.is_quiet = False
                is_shown = True
            case Paused():  # unless it was resumed meanwhile
                live.stage = Stage.PAUSED if live.is_paused else Stage.QUEUED
                live.place = None
                live.parked.clear()
                self._may_release |= live.is_suspect
                is_shown = bool(live.tell_pause())
            case Resumed():  # the client knows since `resume`
                live.stage = Stage.QUEUED
                live.is_quiet = False
        return is_shown

    def _prepared(self, live: RequestRecord) -> None:
        """It was prepared, so its preparation is no cause of a crash."""
        self._may_release |= live.preparation_crashes > 0
        live.preparation_crashes = 0

    def _record_delta(self, live: RequestRecord, delta: Delta) -> bool:
        if live.is_finished[delta.index]:
            return False
        live.is_finished[delta.index] = delta.finish_reason is not None
        if delta.token_ids:
            live.stage = Stage.ADMITTED
            live.parked.discard(delta.index)
            live.is_quiet = False
            live.generated[delta.index] += delta.token_ids
            live.mirostat_mu[delta.index] = delta.mirostat_mu
            self._may_release |= live.is_suspect
            live.charges = 0
        return True

    def _take_back(self, live: RequestRecord) -> None:
        """A fresh engine's line was full: it had a place before the restart, and asks again when one ends."""
        live.stage = Stage.HELD
        live.place = None
        self._may_release |= all(one.is_held or one.is_at_rest for one in self)

    def release(self, now: float) -> list[Submit]:
        """Those that the engine may have now, oldest first; they count as given from here on."""
        chosen = self._choose() if self._may_release else []
        self._may_release = False
        for live in chosen:
            live.stage = Stage.PAUSED if live.is_paused else Stage.SENT
            live.is_quiet = live.num_generated > 0
        return [live.submit(now) for live in chosen]

    def _choose(self) -> list[RequestRecord]:
        if any(live.is_suspect and not live.is_held and not live.is_at_rest for live in self):
            return []
        held = [live for live in self.held() if not live.is_paused or self._can_wait_in_engine(live)]
        suspects = [live for live in held if live.is_suspect]
        return suspects[-1:] or held

    @staticmethod
    def _can_wait_in_engine(live: RequestRecord) -> bool:
        """Whether an engine may have it paused: what it does with it then has never crashed one."""
        return live.was_accepted and not live.is_suspect

    def sleep(self, now: float) -> list[RequestEvent]:
        """The engine has left as it was asked to: everything is held, and no time passes until `wake`.

        Returns:
            What clients are told: that they wait, or of those who had cancelled, the end.
        """
        self._asleep_since = now
        for live in self:
            live.is_asleep = True
        return self._hold_all()

    def wake(self, now: float) -> list[RequestEvent]:
        """An engine is to come; returns what clients are told."""
        since, self._asleep_since = self._asleep_since, None
        events: list[RequestEvent] = []
        for live in self:
            if since is not None:
                live.since += now - max(since, live.since)
            live.is_asleep = False
            events += live.tell_pause()
        return events

    def bury(self, death: EngineExit) -> list[RequestEvent]:
        """The engine died and nothing is given any more.

        Returns:
            The last events of those that end here: convicted, or cancelled and not heard of again; and
            the pauses that the engine did not live to confirm.
        """
        convicted = self._charge(death) if death.is_blamable else []
        events: list[RequestEvent] = [Failed(live.request_id, _crashed(live, death)) for live in convicted]
        for live in convicted:
            self.drop(live.request_id)
        return events + self._hold_all()

    def _hold_all(self) -> list[RequestEvent]:
        """Nothing is given any more; returns the ends of what was cancelled, and pauses not told yet."""
        events: list[RequestEvent] = []
        for live in self:
            live.stage = Stage.HELD
            live.place = None
            live.parked.clear()
            if live.is_cancelling:
                events += live.cancelled()
                self.drop(live.request_id)
            else:
                events += live.tell_pause()
        self._may_release = True
        return events

    def _charge(self, death: EngineExit) -> list[RequestRecord]:
        """Charge those that it was busy with; returns whom that convicts."""
        given = [live for live in self if not live.is_held]
        preparing = [live for live in given if live.may_be_in_preparation]
        running = [live for live in given if live.num_running > 0]
        for live in preparing:
            live.preparation_crashes += 1
        if len(preparing) == 1 and not (running or death.besides):
            is_second = preparing[0].preparation_crashes > 1
            return [] if death.was_killed and not is_second else preparing
        if not (preparing or running or death.besides):  # its last words were lost
            running = [live for live in given if not live.is_at_rest]
        bound = MAX_CHARGES if len(given) == 1 else MAX_CHARGES - 1
        for live in running:
            live.charges = min(live.charges + 1, bound)
        return [live for live in running if live.charges >= MAX_CHARGES]


def _crashed(live: RequestRecord, death: EngineExit) -> ErrorInfo:
    crashes = live.charges + live.preparation_crashes
    doing = "preparing" if live.preparation_crashes else f"after {live.num_generated} tokens of"
    return EngineCrashedError(
        f"the engine died {crashes} {'time' if crashes == 1 else 'times'} {doing} request {live.request_id}, "
        f"last: {death.reason}",
        crashes=crashes,
        num_tokens=live.num_generated,
    ).info()
