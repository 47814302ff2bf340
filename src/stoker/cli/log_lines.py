"""Lines of the log on a terminal. Apart because servers without one do not load its library."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.text import Text

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


class TerminalHandler(RichHandler):
    """Lines for people: time of day, level if it is no ordinary one, the message wrapped below itself.

    Args:
        console: of the terminal.
        shows_logger: the logger's name stands before each message.
    """

    def __init__(self, console: Console, *, shows_logger: bool) -> None:
        super().__init__(
            console=console,
            show_level=False,
            show_path=False,
            omit_repeated_times=False,
            log_time_format="%H:%M:%S",
            highlighter=NullHighlighter(),
        )
        self.setFormatter(logging.Formatter("%(message)s"))
        self._shows_logger = shows_logger

    def render_message(self, record: logging.LogRecord, message: str) -> Text:
        """The message with what stands before it."""
        text = Text()
        if style := _STYLES.get(record.levelno):
            text.append(f"{record.levelname.lower()}: ", style)
        if self._shows_logger:
            text.append(f"{record.name}: ", "dim")
        return text.append(message)
