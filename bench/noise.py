"""Another program that wants a core: a process that computes without end, for as long as a block lasts."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# it looks for its parent some thirty times a second, so that it ends even where nobody was left to end it
CODE = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep one core busy inside the block; not pinned, so the system places it as it does any program."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
