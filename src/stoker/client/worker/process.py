"""One worker process from outside: started, asked one thing at a time, ended by force.

Used by one thread at a time, but for `kill`. `pool` decides what follows a failure.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from stoker.client.worker.jobs import FrameError, FrameKind, receive, send
from stoker.errors import NotReadyError

CHILD = Path(__file__).with_name("child.py")
START_LIMIT_S = 30.0
"""A start takes a tenth of a second; this is for a machine that is short of everything."""
RETRY_AFTER_S = 1.0
_NUM_SLICES = 20


class LostError(Exception):
    """The process ended before it answered."""


class LateError(Exception):
    """There was no answer within the limit."""


class WorkerProcess:
    """A child process that has said that it is ready.

    Nothing of this process is imported or run again in it, and it inherits its socket only.

    Args:
        limit_s: seconds for one job.
        max_bytes: memory for one job.

    Raises:
        NotReadyError: the machine refuses another process, or it does not come up.
    """

    def __init__(self, limit_s: float, max_bytes: int) -> None:
        self._limit_s = limit_s
        try:
            self._connection, self._process = _started(limit_s, max_bytes)
        except OSError as error:
            text = f"no process for templates and grammars can be started: {error}"
            raise NotReadyError(text, retry_after_s=RETRY_AFTER_S) from error
        try:
            self._receive(START_LIMIT_S)
        except (LostError, LateError) as error:
            self.end()
            text = f"the process for templates and grammars does not come up: {error} ({self._ending()})"
            raise NotReadyError(text, retry_after_s=RETRY_AFTER_S) from error

    def __repr__(self) -> str:
        return f"<WorkerProcess pid={self.pid}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, kind: FrameKind, job: bytes) -> tuple[FrameKind, bytearray]:
        """The frame that answers a job of that kind.

        Raises:
            LostError: the process ended; it is of no more use.
            LateError: no answer within the limit; it is of no more use.
        """
        self._connection.settimeout(self._limit_s)
        try:
            send(self._connection, kind, job)
        except TimeoutError:
            raise LateError from None
        except OSError as error:
            raise LostError(str(error)) from None
        return self._receive(self._limit_s)

    def kill(self) -> None:
        """Kill it, from any thread; an `ask` that waits in another thread raises LostError."""
        self._process.kill()

    def end(self) -> None:
        """End it, reap it and close the socket. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self, limit_s: float) -> tuple[FrameKind, bytearray]:
        """The next frame; waited for in slices: while this process stands still, none of them pass."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not any(poll.poll(limit_s / _NUM_SLICES * 1000) for _ in range(_NUM_SLICES)):
            raise LateError(f"no answer in {limit_s:g} s")
        self._connection.settimeout(limit_s)
        try:
            return receive(self._connection)
        except TimeoutError:
            raise LateError(f"half an answer in {limit_s:g} s") from None
        except (OSError, FrameError) as error:
            raise LostError(str(error)) from None

    def _ending(self) -> str:
        status = self._process.returncode or 0
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
        return f"exit status {status}"


def _started(limit_s: float, max_bytes: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        try:
            return ours, subprocess.Popen(
                [sys.executable, "-P", str(CHILD), str(descriptor), str(limit_s), str(max_bytes)],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=2,  # our stdout belongs to the application
                start_new_session=True,  # the terminal's Ctrl-C and hang-up are for this program
            )
        except BaseException:
            ours.close()
            raise
