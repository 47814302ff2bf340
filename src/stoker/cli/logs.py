"""Where the log of a command goes and what it looks like: the only place that configures logging.

The library logs through `logging.getLogger("stoker...")` and shows nothing. Here a line gets its form by
where it goes: a terminal, journald, another program or a file.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from stoker.settings import load_settings

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console

    from stoker.settings import ServerSettings

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_JOURNAL_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
_STDERR = 2


def terminal() -> Console | None:
    """A console on stderr where that is a terminal; None where it is not: what draws there is not loaded."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


def set_up(settings: ServerSettings, console: Console | None) -> None:
    """Send the log of this program where the settings say; called once.

    Args:
        settings: level, form and place.
        console: as from `terminal`; it gets lines above whatever it shows besides.
    """
    handler = _handler(settings, console)
    if settings.quiet:
        handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("stoker").setLevel(settings.log_level.upper())
    logging.captureWarnings(capture=True)


def set_up_if_asked(config: Path | None, flags: Mapping[str, Any]) -> None:
    """As `set_up` for a command that shows no log unless flags, environment or file ask for one.

    Raises:
        InvalidRequestError, MachineSetupError: see `stoker.settings.load_settings`.
    """
    settings = load_settings(flags, config)[1]
    if settings.model_fields_set & {"log_level", "log_file"}:
        set_up(settings, terminal())


def _handler(settings: ServerSettings, console: Console | None) -> logging.Handler:
    handler: logging.Handler
    if settings.log_file is not None:
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.WatchedFileHandler(settings.log_file, encoding="utf-8")
    elif console is not None and settings.log_format == "text":
        from stoker.cli.log_lines import TerminalHandler

        return TerminalHandler(console, shows_logger=settings.log_level == "debug")
    else:
        handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif settings.log_file is None and _is_journal():
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
    return handler


def _is_journal() -> bool:
    """Whether stderr leads to journald, as `JOURNAL_STREAM` says (systemd.exec(5))."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    if not stream:
        return False
    found = os.fstat(_STDERR)
    return stream == f"{found.st_dev}:{found.st_ino}"


class NotesHandler(logging.Handler):
    """Gives warnings to a function of an event loop's thread, from whichever thread they come.

    While entered with `with`, it has the log of `stoker` to itself, unless that is written to a file.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on; the loop may have ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, f"{record.levelname.lower()}: {record.getMessage()}")

    def __enter__(self) -> Self:
        logger = logging.getLogger("stoker")
        logger.addHandler(self)
        has_file = any(isinstance(each, logging.FileHandler) for each in logging.root.handlers)
        self._propagated, logger.propagate = logger.propagate, has_file
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("stoker")
        logger.removeHandler(self)
        logger.propagate = self._propagated


class JournalFormatter(logging.Formatter):
    """Lines with the priority that journald reads; a message of several lines has it on each."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record; journald adds the time."""
        priority = next(number for level, number in _JOURNAL_PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, a request's or event's figures, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The object of a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
