"""What is typed at `stoker top`, key by key, without waiting for the end of a line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import termios
import tty
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_PENDING = 64
"""Bytes of a sequence that is not complete; past this it is no key, and dropped."""


class Key(StrEnum):
    """A key that means something."""

    UP = "up"
    DOWN = "down"
    FIRST = "first"
    LAST = "last"
    QUIT = "quit"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    OTHER = "other"


_BY_BYTES = {
    b"\x1b[A": Key.UP,
    b"\x1bOA": Key.UP,
    b"k": Key.UP,
    b"\x1b[B": Key.DOWN,
    b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN,
    b"\x1b[H": Key.FIRST,
    b"\x1b[F": Key.LAST,
    b"g": Key.FIRST,
    b"G": Key.LAST,
    b"q": Key.QUIT,
    b"Q": Key.QUIT,
    b"\x03": Key.QUIT,
    b"\x04": Key.QUIT,
    b"p": Key.PAUSE,
    b"r": Key.RESUME,
    b"c": Key.CANCEL,
}
_ESCAPE = b"\x1b"


class KeyReader:
    """Bytes of a terminal as keys; a sequence may come in pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def __repr__(self) -> str:
        return f"<KeyReader {self._pending!r}>"

    def read(self, data: bytes) -> list[Key]:
        """The keys that have come with these bytes."""
        self._pending += data
        keys = []
        while self._pending:
            size = _sequence_size(self._pending)
            if size == 0:
                if len(self._pending) > MAX_PENDING:
                    self._pending = b""
                break
            keys.append(_BY_BYTES.get(self._pending[:size], Key.OTHER))
            self._pending = self._pending[size:]
        return keys


def _sequence_size(data: bytes) -> int:
    """How many bytes the first key has; 0: its end has not come."""
    if not data.startswith(_ESCAPE):
        return 1
    if len(data) == 1:
        return 0
    if data[1:2] not in {b"[", b"O"}:
        return 1  # the escape key alone, and another behind it
    for at, byte in enumerate(data[2:], start=2):
        if 0x40 <= byte <= 0x7E:  # noqa: PLR2004 - the final byte of a control sequence, ECMA-48
            return at + 1
    return 0


@contextlib.contextmanager
def typed(fd: int, on_key: Callable[[Key], None]) -> Iterator[None]:
    """Call `on_key` with each key of the terminal `fd` while the block runs, on the event loop.

    The terminal shows nothing of what is typed, and is as before afterwards. Ctrl-C comes as a key.
    """
    loop, reader = asyncio.get_running_loop(), KeyReader()
    before = termios.tcgetattr(fd)

    def take() -> None:
        data = os.read(fd, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(fd)
            on_key(Key.QUIT)
        for key in reader.read(data):
            on_key(key)

    tty.setraw(fd, termios.TCSANOW)
    mode = termios.tcgetattr(fd)
    mode[1] = before[1]  # what is written is still a line a line
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    loop.add_reader(fd, take)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
