"""A program in a terminal of a given size, as a person at it: what it shows, and what is typed."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

LAUNCH = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that of the program, which Ctrl-C and the window's size need."""

PATIENCE_S = 120.0
"""How long something is waited for before the test fails; never how long a wait takes."""


class Terminal:
    """A program started on a pseudo-terminal, from `with` to its end; it is killed if it has not ended.

    Args:
        argv: the program; `stoker` as the first word stands for this environment's `python -m stoker.cli`.
        columns: of the terminal.
        rows: of the terminal.
        env: what differs from this process's environment.

    Attributes:
        transcript: every byte it has written, escapes included.
        status: its exit code once it has ended, negative for a signal; None before.
    """

    def __init__(self, *argv, columns=80, rows=24, env=None):
        if argv[0] == "stoker":
            argv = (sys.executable, "-m", "stoker.cli", *argv[1:])
        self.argv = [str(word) for word in argv]
        self.size = rows, columns
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.env = {**inherited, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self._screen.write_process_input = self.send  # its answers to what a program asks a terminal
        self._stream = pyte.ByteStream(self._screen)
        self.transcript = b""
        self.status = None

    def __enter__(self):
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *self.size, 0, 0))
        launch = [sys.executable, "-S", "-c", LAUNCH, *self.argv]
        self._process = subprocess.Popen(launch, stdin=theirs, stdout=theirs, stderr=theirs, env=self.env)
        os.close(theirs)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self.fd)

    def send(self, text):
        r"""Type it; "\r" is the return key, "\x03" Ctrl-C, "\x04" Ctrl-D."""
        os.write(self.fd, text.encode())

    def resize(self, columns):
        """Make the window so wide; the program is told."""
        self.size = self.size[0], columns
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", *self.size, 0, 0))
        self._screen.resize(columns=columns)

    @property
    def lines(self):
        """What stands on the screen now, without blanks at the ends of lines and blank lines at the end."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self):
        """All that was shown and has not been written over, lines that left at the top included."""
        columns = self._screen.columns
        past = ["".join(row[at].data for at in range(columns)).rstrip() for row in self._screen.history.top]
        return "\n".join([*past, *self.lines])

    def until(self, condition, patience_s=PATIENCE_S):
        """Wait until the text is shown, or `condition(self)` is true, and return all that was shown."""
        if isinstance(condition, str):
            wanted, is_met = condition, lambda shown: condition in shown.text
        else:
            wanted, is_met = "a condition", condition
        give_up_s = time.monotonic() + patience_s
        while not is_met(self):
            left_s = give_up_s - time.monotonic()
            assert self.status is None, f"ended with {self.status} before {wanted!r}:\n{self.text}"
            assert left_s > 0, f"{wanted!r} was not shown:\n{self.text}"
            self._take(left_s)
        return self.text

    def ended(self, patience_s=PATIENCE_S):
        """Wait for its end; its exit code."""
        give_up_s = time.monotonic() + patience_s
        while self.status is None:
            left_s = give_up_s - time.monotonic()
            assert left_s > 0, f"it did not end:\n{self.text}"
            self._take(left_s)
        return self.status

    def _take(self, wait_s):
        """Take what it writes next; notice its end."""
        if not select.select([self.fd], [], [], wait_s)[0]:
            return
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux's word for the end of a pseudo-terminal
            data = b""
        if data:
            self.transcript += data
            self._stream.feed(data)
        else:
            self.status = self._process.wait()
