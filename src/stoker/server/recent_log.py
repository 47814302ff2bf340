"""The last records of this program's log, for operators who ask over HTTP.

Owns a bounded number of them; what a terminal or a file shows of the log is set up by the commands.

Apart because it is a handler of the log: it holds no part of a request.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque

import msgspec

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
