"""The child process of an engine before anything knows it: spawned, and not told yet how it is to run.

Importing this loads next to nothing, so that a command spawns an engine first: what both import takes them
half a second each, side by side. `transport` connects to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE_MODULE = "stoker.engine"
SOCKET_BUFFER_BYTES = 4 * 1024**2


class EngineChild:
    """A process in a session of its own, at the other end of a socketpair.

    It imports what it needs, then reads from its stdin how to run; where that ends without a word it exits.
    Nothing of this process is imported or run again in it, so a script needs no `__main__` guard.

    Args:
        module: what `python -m` runs.
        models: files whose headers it reads before it is told anything.

    Attributes:
        socket: our end; whoever takes it closes it.
        output: read end of its stdout and stderr, a descriptor; whoever takes it closes it.
        process: the process.

    Raises:
        OSError, MemoryError: the machine refuses a process or a descriptor; nothing is left open.
    """

    def __init__(self, module: str = ENGINE_MODULE, models: Sequence[str] = ()) -> None:
        self._is_taken = False
        with contextlib.ExitStack() as made:
            self.socket, theirs = socket.socketpair()
            made.callback(self.socket.close)
            with theirs:
                for end in (self.socket, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                self.socket.setblocking(False)
                self.output, sink = os.pipe()
                made.callback(os.close, self.output)
                with os.fdopen(sink, "wb") as native:
                    self.process = _spawned((module, str(theirs.fileno()), *models), theirs, native.fileno())
            made.pop_all()

    def __repr__(self) -> str:
        return f"<EngineChild {self.process.pid}>"

    def tell(self, config: bytes) -> None:
        """How it is to run, an `EngineConfig` as JSON; one that has ended already is not told."""
        self._is_taken = True
        assert self.process.stdin is not None, "it has a pipe"
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(config)

    def close(self) -> None:
        """End it, where it still runs; idempotent. What was not taken is closed."""
        self.process.kill()
        self.process.wait()
        if not self._is_taken:
            self._is_taken = True
            assert self.process.stdin is not None, "it has a pipe"
            self.process.stdin.close()
            self.socket.close()
            os.close(self.output)


def _spawned(arguments: Sequence[str], theirs: socket.socket, sink: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *arguments],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.PIPE,
        stdout=sink,  # native libraries print; our stdout belongs to the application
        stderr=sink,
        start_new_session=True,  # the terminal's Ctrl-C and hang-up are for this program
    )
