"""File descriptors held in reserve: they are closed when an engine starts, which needs some below the limit.

Owns those descriptors alone. The server bounds its connections itself, and the system sets the limit.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

START_DESCRIPTORS = 8
"""A start opens seven: a socket pair, the pipe of its stderr, the null device, and the pipe on which a child
reports that it could not be executed. One is for a library that opens a file meanwhile."""


class DescriptorReserve:
    """Descriptors that stay open until a start needs them.

    Args:
        size: how many.
    """

    def __init__(self, size: int = START_DESCRIPTORS) -> None:
        self._size = size
        self._held: list[int] = []

    def __repr__(self) -> str:
        return f"<DescriptorReserve {len(self._held)} of {self._size}>"

    def __len__(self) -> int:
        return len(self._held)

    def fill(self) -> None:
        """Open what is missing, as far as the system allows."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The descriptors are free inside the block, which must not await: other tasks would take them."""
        self.close()
        try:
            yield
        finally:
            self.fill()

    def close(self) -> None:
        """Close all; `fill` opens them again."""
        while self._held:
            os.close(self._held.pop())
