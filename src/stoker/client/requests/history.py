"""What requests and calls go through, as others than their callers are told of it: no text, no token.

Reads the requests' meters and moves, publishes the events about requests and calls, and keeps what the last
of them that ended were; their texts (`texts`) only where they may be read.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.client.requests.load_rows import LoadRows
from stoker.client.requests.meter import PROGRESS_EVERY_S, Wait
from stoker.client.requests.moves import ShownState
from stoker.client.requests.texts import EndedTexts
from stoker.ipc.events import (
    Delta,
    Failed,
    Finished,
    Paused,
    PrefillProgress,
    Queued,
    Resumed,
    Waiting,
    event_name,
)
from stoker.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.client.event_bus import EventBus
    from stoker.client.requests.group import RequestGroup
    from stoker.client.requests.record import RequestRecord
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo
    from stoker.ipc.events import RequestEvent
    from stoker.ipc.request import FinishReason
    from stoker.ipc.status import RequestMove, RequestStatus

WRITTEN_EVERY_S = 2.0
"""How often subscribers are told how much of an answer there is."""
MAX_RECENT = 64
"""Requests and calls that have ended and are still shown; past this the oldest goes."""


class RequestHistory:
    """Tells subscribers what happens to requests, and keeps the last that ended.

    Args:
        table: of requests.
        bus: gets the events.
        is_ready: whether a model is in memory, by its id.
        now: seconds on the clock of the requests' meters.
        keeps_texts: texts of requests may be read by their ids.

    Attributes:
        recent: requests and calls that have ended, the oldest first.
        texts: of those; None: texts may not be read.
        loads: those of models that are under way.
    """

    def __init__(
        self,
        table: RequestTable,
        bus: EventBus,
        is_ready: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
        *,
        keeps_texts: bool = False,
    ) -> None:
        self.recent: deque[RequestStatus] = deque(maxlen=MAX_RECENT)
        self.texts = EndedTexts(MAX_RECENT) if keeps_texts else None
        self._table = table
        self._bus = bus
        self._is_ready = is_ready
        self._now = now
        self.loads = LoadRows(bus.request_told, time.time)
        bus.on_load = self._load_moved

    def __repr__(self) -> str:
        return f"<RequestHistory of {len(self.recent)} that ended>"

    # ------------------------------------------------------------ before an engine has it

    def arrived(self, record: RequestRecord, why_held: str = "") -> None:
        """A request was submitted; `why_held` says why no engine gets it at once, empty: one does."""
        now = self._now()
        if not self._is_ready(record.request.model):
            record.meter.wait(Wait.MODEL, now)
        if record.is_ready and not why_held:
            move = record.moves.all_move(ShownState.PREPARING, record.meter.at(now), "")
        elif record.is_ready:
            move = record.moves.all_move(ShownState.HELD, record.meter.at(now), why_held)
        else:
            move = record.moves.all_move(ShownState.PREPARING, record.meter.at(now), "its form is translated")
        self._publish("arrived", record, move, self._row(record) if self._bus.keeps else {})

    def call_began(self, group: RequestGroup) -> None:
        """A call of several requests has come."""
        status = group.request_status()
        row = {**status.as_row(), "group": None, "move": msgspec.to_builtins(status.moves[-1])}
        self._bus.request_told(status.request_id, "arrived", row, group.owner)

    def call_paused(self, group: RequestGroup) -> None:
        """Its caller stops a call; its requests are told of one by one, as they stand still."""
        at = time.time()
        self._publish_of_call("paused", group, group.moves.all_move(ShownState.PAUSED, at, "asked to"))

    def given(self, record: RequestRecord) -> None:
        """An engine is given a request, perhaps not the first one."""
        if record.moves.state is not ShownState.HELD:
            return  # so it was told when it arrived
        at = record.meter.at(self._now())
        if not record.was_accepted:
            move = record.moves.all_move(ShownState.PREPARING, at, "the engine is there")
            self._publish("preparing", record, move)
            return
        num_tokens = count_text(record.num_generated, "token")
        why = f"the engine was restarted: goes on from {num_tokens}"
        self._publish("replayed", record, record.moves.all_move(ShownState.PREPARING, at, why))

    def held(self, wait: Wait, why: str) -> None:
        """No engine has any request from now on."""
        now = self._now()
        for record in self._table.live():
            record.meter.wait(wait, now)
            record.meter.num_restarts += record.moves.state is not ShownState.HELD
            if move := record.moves.all_move(ShownState.HELD, record.meter.at(now), why):
                self._publish("held", record, move)

    def _load_moved(self, fields: Mapping[str, Any]) -> None:
        """A model is loaded, as its event says: those that wait for it know how far that is, from 0 to 1."""
        self.loads.take(fields)
        for record in self._table.live():
            if record.request.model == fields["model"]:
                record.meter.load_fraction = fields.get("fraction", 0.0)

    # ------------------------------------------------------------ what an engine reports

    def took(self, event: RequestEvent) -> None:
        """An engine reports; whether the client is shown that is not known yet."""
        record = self._table.find(event.request_id)
        if record is None:
            return
        now = self._now()
        if isinstance(event, Delta):
            self.wrote(record, event, now)
            return
        record.meter.take(event, now)
        if isinstance(event, PrefillProgress):
            if record.meter.tell_progress(now):
                self._publish("prefill_progress", record, None, _fields(event))
        elif not record.is_held:
            self._moved(event, record, now)

    def _moved(self, event: RequestEvent, record: RequestRecord, now: float) -> None:
        move = record.moves.take(event, record.meter.at(now))
        if isinstance(event, Queued | Waiting):
            meter = record.meter
            if move is None and isinstance(event, Waiting):
                return
            wait = record.moves.wait
            fields = {
                "position": meter.position,
                "eta_s": meter.eta_s(now),
                "waits_for": wait.reason if wait else "",
                "by": wait.by if wait else None,  # so that other keys are not told who that is
            }
            self._publish("queued" if isinstance(event, Queued) else "waiting", record, move, fields)
        elif move is not None:
            self._publish(event_name(type(event)), record, move, _fields(event))

    def timed(self, end: Finished) -> Finished:
        """The end of a request with the times between its tokens."""
        record = self._table.find(end.request_id)
        if record is None:
            return end
        timings = msgspec.structs.replace(end.timings, itl_ms=record.meter.gaps.status())
        return msgspec.structs.replace(end, timings=timings)

    def overdue_progress(self) -> list[RequestEvent]:
        """Tell subscribers of prompts that are read and of which nothing was told for long.

        Returns:
            The same for the clients that asked for it.
        """
        now = self._now()
        found: list[RequestEvent] = []
        for record in self._table.live():
            if record.moves.state is not ShownState.PREFILL or not record.meter.is_progress_overdue(now):
                continue
            event = record.meter.progress(record.request_id, now)
            record.meter.tell_progress(now)
            self._publish("prefill_progress", record, None, _fields(event))
            if record.request.return_progress and not record.num_generated:
                found.append(event)
        return found

    def wrote(self, record: RequestRecord, delta: Delta, now: float) -> None:
        """A choice wrote something."""
        record.meter.wrote(delta, now)
        moves = record.moves
        if delta.token_ids and not moves.is_writing(delta.index):
            self._publish_move("decoding", record, moves.writes(delta.index, record.meter.at(now)))
        elif delta.token_ids and record.meter.tell_progress(now, WRITTEN_EVERY_S) and self._bus.is_watched:
            status = record.status(now)
            written = {
                "completion_tokens": status.completion_tokens,
                "tokens_per_second": status.tokens_per_second,
            }
            self._publish("progress", record, None, written)
        if delta.finish_reason is not None:
            ended = moves.choice_ends(delta.index, record.meter.at(now), str(delta.finish_reason))
            self._publish_move("choice_ended", record, ended)

    # ------------------------------------------------------------ what its client is shown

    def shown(self, event: RequestEvent) -> None:
        """The client of a request is shown that; called before the request is forgotten."""
        if not isinstance(event, Paused | Resumed | Finished | Failed):
            return
        record = self._table.record(event.request_id)
        if record is None:
            return
        now = self._now()
        if isinstance(event, Paused | Resumed):
            record.meter.steer(event, now)
            if record.is_held and not record.is_asleep:  # else the engine tells, or all are held
                self._held_moves(event, record, now)
            return
        record.meter.end(now)
        reason = event.error.code if isinstance(event, Failed) else record.finish_reason or ""
        record.moves.all_move(ShownState.ENDED, record.meter.at(now), reason)
        if record.group is None:
            self._keep_text(record)
            self._ended(record.status(now), event)

    def _held_moves(self, event: Paused | Resumed, record: RequestRecord, now: float) -> None:
        """Its caller stops a request, or lets it go on, that no engine has."""
        at = record.meter.at(now)
        if isinstance(event, Paused):
            move = record.moves.all_move(ShownState.PAUSED, at, "asked to")
        else:
            move = record.moves.all_move(ShownState.HELD, at, "no engine has it yet")
        self._publish(event_name(type(event)), record, move)

    def refused(self, record: RequestRecord, error: ErrorInfo) -> None:
        """A request ended before it was submitted; one of a call is told of with the call.

        One that asked for an id in use is not told of: that is another request's.
        """
        if record.group is None and self._table.find(record.request_id) is None:
            (failed,) = record.failed(error)
            self._keep_text(record)
            self._ended(record.status(self._now()), failed)

    def call_ended(self, group: RequestGroup, end: FinishReason | ErrorInfo) -> None:
        """A call of several requests has ended, as its caller sees it."""
        self._ended(group.ended_as(end))

    def _keep_text(self, record: RequestRecord) -> None:
        if self.texts is not None:
            self.texts.keep(record)

    def _ended(self, status: RequestStatus, event: RequestEvent | None = None) -> None:
        self.recent.append(status)
        self._bus.request_ended(status, event)

    # ------------------------------------------------------------ to subscribers

    def _row(self, record: RequestRecord) -> dict[str, Any]:
        return record.status(self._now()).as_row()

    def _publish_move(self, what: str, record: RequestRecord, move: RequestMove | None) -> None:
        if move is not None:
            self._publish(what, record, move)

    def _publish(
        self,
        what: str,
        record: RequestRecord,
        move: RequestMove | None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        group = record.group
        if group is not None and move is not None and not group.is_paused:
            self._publish_of_call(
                what, group, group.moves.member_moved(record.request_id, record.moves, move)
            )
        if self._bus.keeps:
            told = dict(fields or {})
            if move is not None:
                told["move"] = msgspec.to_builtins(move)
            told["group"] = group.id if group else None
            self._bus.request_told(record.request_id, what, told, record.owner)

    def call_went_on(self, group: RequestGroup) -> None:
        """A request of a call has ended: tell how far that is, but not after each, nor after the last."""
        now, is_last = self._now(), group.num_done >= group.num_members
        if self._bus.keeps and not is_last and now - group.told_s >= PROGRESS_EVERY_S:
            group.told_s = now
            status = group.request_status()
            fields = {
                "num_done": status.num_done,
                "num_members": status.num_members,
                "prompt_tokens": status.prompt_tokens,
                "group": None,
            }
            self._bus.request_told(group.id, "progress", fields, group.owner)

    def _publish_of_call(self, what: str, group: RequestGroup, move: RequestMove | None) -> None:
        """Tell of a move of a call, and how far it is."""
        if move is not None and self._bus.keeps:
            told = {"move": msgspec.to_builtins(move), "num_done": group.num_done, "group": None}
            self._bus.request_told(group.id, what, told, group.owner)


def _fields(event: RequestEvent) -> dict[str, Any]:
    """The figures of an engine's event, without its name and its request's."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    del fields["type"], fields["request_id"]
    return fields
