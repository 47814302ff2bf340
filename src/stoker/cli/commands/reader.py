"""Where a conversation's lines come from: an editable, remembered line in a terminal, or a pipe."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Protocol

import platformdirs
import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings

from stoker.private import make_folder

if TYPE_CHECKING:
    from pathlib import Path

    from prompt_toolkit.key_binding import KeyPressEvent

HISTORY_FILE = "chat_history"


class LineReader(Protocol):
    """Something that gives the user's next text."""

    async def read(self) -> str:
        """The next text. Raises EOFError when there is none."""
        ...


class TerminalReader:
    """An edited line: Enter sends, Alt-Enter makes a new line, Ctrl-C clears, Ctrl-D ends.

    Args:
        history: file that remembers what was sent; readable by its owner only.
    """

    def __init__(self, history: Path) -> None:
        make_folder(history.parent)
        history.touch(mode=0o600)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            history=FileHistory(str(history)),
            key_bindings=_bindings(),
            prompt_continuation=". ",
        )

    async def read(self) -> str:
        """The next text. Raises EOFError at Ctrl-D."""
        while True:
            try:
                text: str = await self._session.prompt_async()
            except KeyboardInterrupt:
                typer.secho("(/exit or Ctrl-D leaves)", err=True, dim=True)
            else:
                return text


class PipeReader:
    """Standard input, a line at a time."""

    async def read(self) -> str:
        """The next line. Raises EOFError at the end."""
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line


def new_reader() -> LineReader:
    """The reader that fits standard input."""
    if sys.stdin.isatty():
        return TerminalReader(platformdirs.user_data_path("stoker") / HISTORY_FILE)
    return PipeReader()


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
