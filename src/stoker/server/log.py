"""The server's log: lines for requests that have ended and moves of models and engine, and the last records.

Owns the words of these lines, and a bounded number of records for operators who ask over HTTP. What a
terminal or a file shows of the log is up to whoever configures logging; the figures travel beside a line in
the record's attribute `fields`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.ipc.status import CallKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from stoker.client.event_bus import RuntimeEvent

requests_log = logging.getLogger("stoker.requests")
models_log = logging.getLogger("stoker.models")
log = logging.getLogger(__name__)

_CALLS = frozenset(CallKind)


LOGGED = frozenset({"request", "model", "engine", "heat"})
"""Events that it is to be given."""


class EventLog:
    """Logs the events of one runtime."""

    def __init__(self) -> None:
        self._model_states: dict[str, str] = {}
        self._was_away = False

    def __repr__(self) -> str:
        return f"<EventLog of {self._model_states}>"

    async def follow(self, events: AsyncGenerator[RuntimeEvent, None]) -> None:
        """Log events until there are no more."""
        async with aclosing(events) as followed:
            async for event in followed:
                try:
                    self._take(event.event, event.fields)
                except Exception:
                    log.exception("an event cannot be logged: %s", event)

    def _take(self, name: str, fields: Mapping[str, Any]) -> None:
        match name:
            case "request" if fields["what"] in {"finished", "failed"} and fields["kind"] != "load":
                requests_log.info("%s", request_line(fields), extra={"fields": dict(fields)})
            case "model":
                self._take_model(fields)
            case "engine":
                self._take_engine(fields["state"])
            case "heat":
                log.info("the machine's heat is %s", fields["level"])
            case "snapshot" if dropped := fields.get("dropped"):
                log.warning("%d events came too fast to be logged", dropped)

    def _take_engine(self, state: str) -> None:
        """What the supervisor does not log: sleep, and that the engine is back."""
        if state == "suspended":
            log.info("suspended; requests wait until it resumes")
        elif state == "serving" and self._was_away:
            log.info("the engine serves again")
        self._was_away = state in {"suspended", "restarting"}

    def _take_model(self, fields: Mapping[str, Any]) -> None:
        model, state = fields["model"], fields["state"]
        if self._model_states.get(model) == state:  # further with the same
            return
        self._model_states[model] = state
        passed_over, error = fields.get("reason"), (fields.get("error") or {}).get("message", "")
        why = passed_over or error
        served = ", served in another way" if passed_over else ", served as before" if error else ""
        text = {
            "absent": "is not in memory",
            "failed": "failed",
            "ready": f"is ready{served}",
        }.get(state, f"is {state}")
        models_log.info(
            "%s %s%s", model, text, f": {_one_line(why)}" if why else "", extra={"fields": dict(fields)}
        )


def request_line(fields: Mapping[str, Any]) -> str:
    """An ended request: class, tokens in and out, first token, speed, model, end, what it waited for.

    Args:
        fields: of the event, see `stoker.ipc.status.RequestStatus`.
    """
    first_s, speed = fields["first_token_s"], fields["tokens_per_second"]
    first = "" if first_s is None else _seconds(first_s)
    rate = "" if speed is None else f"{speed:.0f}/s" if speed >= 10 else f"{speed:.1f}/s"  # noqa: PLR2004 - likewise
    error = fields.get("error")
    end = f"{error['code']}: {_one_line(error['message'])}" if error else _end_of(fields)
    text = (
        f"{fields['priority']:<11} {fields['prompt_tokens']:>4} in {fields['completion_tokens']:>4} out"
        f" {first:>7} {rate:>5} {end} {fields['model']}"
    )
    return "; ".join([text, *_notes(fields)])


def _end_of(fields: Mapping[str, Any]) -> str:
    kind, reason = fields["kind"], str(fields["finish_reason"])
    if kind in _CALLS:  # whose end is no reason, unless somebody stopped it
        return f"{kind} {reason}" if reason == "cancelled" else str(kind)
    return reason


def _notes(fields: Mapping[str, Any]) -> list[str]:
    notes = []
    if fields["cached_tokens"]:
        notes.append(f"{fields['cached_tokens']} from the cache")
    if fields["num_parks"]:
        notes.append(f"gave way {_seconds(fields['parked_s'])}")
    if fields["waited_for"]:
        notes.append(f"waited: {_one_line(fields['waited_for'])}")
    return notes


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 - two digits tell enough


def _one_line(text: str) -> str:
    """Text of others without what would end the line or steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


MAX_RECORDS = 256
MAX_CHARS = 2000
"""Of a message; the rest is left out."""


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record: its number, seconds since the epoch, level, logger and text."""

    number: int
    at: float
    level: str
    logger: str
    message: str


class RecentLog(logging.Handler):
    """Keeps the last records of `stoker` and its children while it is attached."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[LogRecord] = deque(maxlen=MAX_RECORDS)
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<RecentLog of {len(self._records)}>"

    def attach(self) -> None:
        """Keep records from now on."""
        logging.getLogger("stoker").addHandler(self)

    def detach(self) -> None:
        """Keep no further ones."""
        logging.getLogger("stoker").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; the oldest goes."""
        try:
            message = record.getMessage()[:MAX_CHARS]
        except Exception:  # noqa: BLE001 - a call to the log never fails, as with every handler
            self.handleError(record)
            return
        self._records.append(
            LogRecord(
                number=next(self._numbers),
                at=record.created,
                level=record.levelname,
                logger=record.name,
                message=message,
            )
        )

    def after(self, number: int) -> list[LogRecord]:
        """What came after that number, the oldest first."""
        return [record for record in list(self._records) if record.number > number]
