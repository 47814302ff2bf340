"""A chat without a screen: where the terminal cannot move its cursor, or there is none.

Owns plain text as it comes, one JSON object an answer, and lines from a pipe or a dumb terminal. Answers go
to stdout, all else to stderr.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO

import typer
from rich.console import Console

from stoker.cli.session import CONTROLS, tell, text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import TracebackType

    from prompt_toolkit.history import History
    from rich.console import RenderableType

    from stoker.cli.chat.session import ChatReply
    from stoker.errors import StokerError

PROMPT = "> "
LEAVING = "(Ctrl-C again or Ctrl-D leaves)"


class PlainScreen:
    """A `ChatScreen` of lines, from `async with` to its end.

    Args:
        read_line: gives the next line; raises EOFError behind the last one.
        as_json: an answer is one JSON object on a line.
    """

    def __init__(self, read_line: Callable[[], Awaitable[str]], *, as_json: bool) -> None:
        self._read_line = read_line
        self._as_json = as_json
        self._open_on: TextIO | None = None  # where a line of an answer or of reasoning is begun
        self._said = ""

    def __repr__(self) -> str:
        return f"PlainScreen(json={self._as_json})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def read(self) -> str:
        """The next line. Raises EOFError behind the last one."""
        return await self._read_line()

    @contextmanager
    def answering(self, task: asyncio.Future[None]) -> Iterator[None]:
        """While entered, Ctrl-C cancels the task; a second one ends the program."""
        before, loop = signal.getsignal(signal.SIGINT), asyncio.get_running_loop()

        def stop() -> None:
            task.cancel()
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
            self._said = ""

    def wait(self, text: str) -> None:
        """One line on a terminal, once for each kind of wait; programs are told nothing."""
        kind = text.partition(":")[0]
        if text and kind != self._said and sys.stderr.isatty():
            self._said = kind
            tell(text)

    def think(self, text: str) -> None:
        """Reasoning goes to stderr, so that stdout holds the answers alone."""
        if not self._as_json:
            self._put(text, sys.stderr)

    def write(self, text: str) -> None:
        """To stdout at once."""
        if not self._as_json:
            self._put(text, sys.stdout)

    def end(self, reply: ChatReply) -> None:
        """End the line, or print the answer; figures are for terminals."""
        if self._as_json:
            print(json.dumps(reply.record(), ensure_ascii=False), flush=True)
        self._end_line()
        if sys.stderr.isatty():
            tell(reply.figures)

    def say(self, content: RenderableType) -> None:
        """To stderr."""
        if isinstance(content, str):
            tell(content)
        else:
            Console(stderr=True, highlight=False).print(content, style="dim")

    def fail(self, error: StokerError, advice: str = "") -> None:
        """To stderr; with JSON also in the answer's place."""
        self._end_line()
        if self._as_json:
            print(json.dumps({"error": {"code": error.code, "message": error.message}}), flush=True)
        typer.echo(f"stoker: {text_of(error)}{advice}", err=True)

    def _put(self, text: str, stream: TextIO) -> None:
        """At once; a terminal does not get control characters that a model made up."""
        if stream is not self._open_on:
            self._end_line()
        stream.write(text.translate(CONTROLS) if stream.isatty() else text)
        stream.flush()
        self._open_on = None if text.endswith("\n") else stream

    def _end_line(self) -> None:
        if self._open_on is not None:
            self._open_on.write("\n")
            self._open_on.flush()
            self._open_on = None


async def piped_line() -> str:
    """The next line of standard input. Raises EOFError at its end."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return line


class DumbTerminalLines:
    """Lines typed at a prompt, one after another.

    Args:
        history: of what was typed.
    """

    def __init__(self, history: History) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        # What is not stdout has to be said; else the library finds out that a terminal is dumb.
        output = None if sys.stdout.isatty() else create_output(stdout=sys.stderr)
        self._session: PromptSession[str] = PromptSession(PROMPT, history=history, output=output)

    async def __call__(self) -> str:
        """The next line. Raises EOFError at Ctrl-D, or at the second Ctrl-C."""
        for is_last in (False, True):
            try:
                line: str = await self._session.prompt_async()
            except KeyboardInterrupt:
                if not is_last:
                    typer.echo(LEAVING, err=True)
            else:
                return line
        raise EOFError


@contextmanager
def no_echo() -> Iterator[None]:
    """While entered, a terminal does not write into answers what is typed meanwhile; it is read later."""
    import termios

    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
