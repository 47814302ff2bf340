"""The engine's log in this process: from which level on it is wanted, and its records as this one's.

Apart because the transport asks for the level and the dispatcher gets the records.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.ipc.events import Logged

ROOT_LOGGER = "stoker"


def wanted_level() -> int:
    """The lowest level that `stoker` or a logger below it lets pass now."""
    names = list(logging.root.manager.loggerDict)  # in one go: other threads may make loggers meanwhile
    below = [name for name in names if name.startswith(f"{ROOT_LOGGER}.")]
    return min(logging.getLogger(name).getEffectiveLevel() for name in (ROOT_LOGGER, *below))


def relay(event: Logged, pid: int) -> None:
    """Log a record of the engine of that process here, with its time, where its logger is enabled for it."""
    logger = logging.getLogger(event.logger)
    if not logger.isEnabledFor(event.level):
        return
    fields = {
        "name": event.logger,
        "levelno": event.level,
        "levelname": logging.getLevelName(event.level),
        "msg": event.text,
        "created": event.at,
        "msecs": event.at % 1 * 1000,
        "process": pid,
        "processName": "engine",
    }
    logger.handle(logging.makeLogRecord(fields))
