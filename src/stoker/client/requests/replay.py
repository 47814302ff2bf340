"""Which live requests an engine is given, and whom its end is charged to.

Owns the order in which a fresh engine gets them, the charges for crashes and the quarantine of suspects.
Works on the table's records. Pure: time arrives as an argument, commands and events leave as values.

A crash is charged to the requests that could have caused it: not those in the queue, parked or paused. A
token of progress clears a request. One that has MAX_CHARGES - 1 is a suspect: the next engine gets the
suspects one at a time, before any other request and the newest first (the crashes began when it came), and
only a suspect that was alone when the engine ended is convicted. So no request is convicted for the crash of
another, and none waits longer than the suspects' first tokens take.

Preparation (tokenising, compiling a constraint) crashes the same way each time: one that was being prepared
is convicted at once where nothing else can have been the cause, and else is a suspect at once, until it is
prepared (docs/adr/0015).

A paused request is given to the next engine paused, unless giving it could be what crashes: one that no
engine has accepted yet, or a suspect, is kept here until it is resumed. None waits for a paused suspect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.client.requests.record import MAX_CHARGES, RequestRecord, Stage
from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.client.process.exit import EngineExit
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo
    from stoker.ipc.commands import Submit
    from stoker.ipc.events import RequestEvent
    from stoker.ipc.request import GenerateRequest


class Replay:
    """The live requests of a table, in order of submission, as far as engines are concerned."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._may_release = False
        self._asleep_since: float | None = None

    def __repr__(self) -> str:
        return f"<Replay live={list(self)!r}>"

    def __len__(self) -> int:
        return sum(1 for _ in self._table.live())

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(list(self._table.live()))

    def held(self) -> list[RequestRecord]:
        """Those that no engine knows of."""
        return [live for live in self._table.live() if live.is_held]

    @property
    def is_on_trial(self) -> bool:
        """Whether a suspect runs or wants to: it gets the engine to itself."""
        return any(live.is_suspect and not live.is_at_rest for live in self._table.live())

    @property
    def is_asleep(self) -> bool:
        """Whether everything stands still until `wake`, time included."""
        return self._asleep_since is not None

    def slept_s(self, now: float) -> float:
        """For how long everything has stood still; 0: it does not."""
        return 0.0 if self._asleep_since is None else now - self._asleep_since

    def add(self, live: RequestRecord) -> list[RequestEvent]:
        """Another request, held until `release` lets it go; returns what its client is shown now.

        Raises:
            InvalidRequestError: its id is in use.
        """
        self._table.add(live)
        self._may_release = True
        live.is_asleep = self.is_asleep
        return live.tell_pause()

    def ready(self, live: RequestRecord, request: GenerateRequest) -> None:
        """Its constraint was translated."""
        live.request, live.is_ready = request, True
        self._may_release = True

    def ended(self) -> None:
        """A request has ended: one that waited for it may be given."""
        self._may_release = True

    def pause(self, live: RequestRecord) -> list[RequestEvent]:
        """Its caller wants it to stand still.

        Returns:
            What its client is shown now: where an engine has it, that says when no token can come.
        """
        live.is_paused = True
        return live.tell_pause() if live.is_held else []

    def resume(self, live: RequestRecord) -> list[RequestEvent]:
        """Its caller wants it to go on; returns what its client is shown now.

        A suspect is none for now: a trial takes an engine to itself, and this one has gone on without it.
        """
        live.is_paused = False
        live.charges = min(live.charges, MAX_CHARGES - 2)
        if live.stage is Stage.PAUSED:
            live.stage = Stage.QUEUED
        self._may_release = True
        return live.tell_pause()

    def record(self, event: RequestEvent) -> bool:
        """Take note of an engine's event; True where the client is to see it."""
        live = self._table.find(event.request_id)
        if live is None or live.is_held:
            return False
        was_suspect = live.is_suspect
        is_shown = live.take(event)
        self._may_release |= was_suspect or live.is_ended
        if live.is_held:  # refused: it is given again when one ends
            self._may_release |= all(one.is_held or one.is_at_rest for one in self._table.live())
        return is_shown

    def release(self, now: float) -> list[Submit]:
        """Those that the engine may have now, oldest first; they count as given from here on."""
        chosen = self._choose() if self._may_release else []
        self._may_release = False
        for live in chosen:
            live.stage = Stage.PAUSED if live.is_paused else Stage.SENT
            live.is_quiet = live.num_generated > 0
        return [live.submit(now) for live in chosen]

    def _choose(self) -> list[RequestRecord]:
        if any(live.is_suspect and not live.is_held and not live.is_at_rest for live in self._table.live()):
            return []
        ready = [live for live in self.held() if live.is_ready]
        held = [live for live in ready if not live.is_paused or self._can_wait_in_engine(live)]
        suspects = [live for live in held if live.is_suspect]
        return suspects[-1:] or held

    @staticmethod
    def _can_wait_in_engine(live: RequestRecord) -> bool:
        """Whether an engine may have it paused: what it does with it then has never crashed one."""
        return live.was_accepted and not live.is_suspect

    def sleep(self, now: float) -> list[RequestEvent]:
        """The engine has left as it was asked to: everything is held, and no time passes until `wake`.

        Returns:
            What clients are shown: that they wait, or of those who had cancelled, the end.
        """
        self._asleep_since = now
        for live in self:
            live.is_asleep = True
        return self._hold_all()

    def wake(self, now: float) -> list[RequestEvent]:
        """An engine is to come; returns what clients are shown."""
        since, self._asleep_since = self._asleep_since, None
        events: list[RequestEvent] = []
        for live in self:
            if since is not None:
                live.since += now - max(since, live.since)
            live.is_asleep = False
            events += live.tell_pause()
        return events

    def engine_exited(self, end: EngineExit) -> list[RequestEvent]:
        """The engine has ended unasked and nothing is given any more.

        Returns:
            The last events of those that end here: convicted, or cancelled and not heard of again; and
            the pauses that the engine did not live to confirm.
        """
        convicted = self._charge(end) if end.is_blamable else []
        ends = [event for live in convicted for event in live.failed(_crashed(live, end))]
        return ends + self._hold_all()

    def _hold_all(self) -> list[RequestEvent]:
        """Nothing is given any more; returns the ends of what was cancelled, and pauses not shown yet."""
        events: list[RequestEvent] = []
        for live in self:
            live.hold()
            events += live.cancelled() if live.is_cancelling else live.tell_pause()
        self._may_release = True
        return events

    def _charge(self, end: EngineExit) -> list[RequestRecord]:
        """Charge those that it was busy with; returns whom that convicts."""
        given = [live for live in self if not live.is_held]
        preparing = [live for live in given if live.may_be_in_preparation]
        running = [live for live in given if live.num_running > 0]
        for live in preparing:
            live.preparation_crashes += 1
        if len(preparing) == 1 and not (running or end.besides):
            is_second = preparing[0].preparation_crashes > 1
            return [] if end.was_killed and not is_second else preparing
        if not (preparing or running or end.besides):  # its last words were lost
            running = [live for live in given if not live.is_at_rest]
        bound = MAX_CHARGES if len(given) == 1 else MAX_CHARGES - 1
        for live in running:
            live.charges = min(live.charges + 1, bound)
        return [live for live in running if live.charges >= MAX_CHARGES]


def _crashed(live: RequestRecord, end: EngineExit) -> ErrorInfo:
    crashes = live.charges + live.preparation_crashes
    doing = "preparing" if live.preparation_crashes else f"after {live.num_generated} tokens of"
    error = end.error(
        f"the engine died {count_text(crashes, 'time')} {doing} request {live.request_id}, last", crashes
    )
    error.details["num_tokens"] = live.num_generated
    return error.info()
