"""A runtime for one user in a terminal: opened with progress, asked, answers written as they come.

Owns what is read from standard input, what a user sees while waiting (a bar on stderr, on a terminal only,
gone when there is something to read), and the way from a request to text on stdout. What is asked, and what
an interruption means, is the command's.
"""

from __future__ import annotations

import select
import stat
import sys
from contextlib import asynccontextmanager
from os import fstat
from typing import TYPE_CHECKING, Self

import typer

from stoker.errors import InvalidRequestError
from stoker.ipc.events import Parked, PrefillProgress, Queued
from stoker.wording import duration_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from rich.console import Console
    from rich.progress import TaskID

    from stoker.cli.options import RuntimeFactory
    from stoker.client.requests.stream import Notice
    from stoker.errors import StokerError
    from stoker.ipc.events import ModelState
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

LONG_PROMPT_TOKENS = 64  # a shorter one is read before a bar can be
FIRST_BYTE_S = 2.0
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""For `str.translate`: what a model or a file name holds must not command a terminal."""


def piped_text() -> str:
    """All of standard input; empty for a terminal."""
    return "" if sys.stdin.isatty() else sys.stdin.read()


def piped_beside_a_prompt() -> str:
    """Standard input where a prompt was given too: all of it if it is a file or something comes soon.

    A program started by another one often has an open pipe on stdin without a writer.
    """
    try:
        kind = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a real file
        return ""
    if stat.S_ISREG(kind):
        return sys.stdin.read()
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return ""
    if select.select([sys.stdin], [], [], FIRST_BYTE_S)[0]:
        return sys.stdin.read()
    typer.echo("stoker: nothing came on standard input; going on without it (a prompt of - waits)", err=True)
    return ""


def given_lines(arguments: list[str] | None, what: str) -> list[str | None]:
    """Texts of the command line, else the lines of standard input; None for a blank one.

    Raises:
        InvalidRequestError: there are none, or an argument is blank.
    """
    if arguments and not all(map(str.strip, arguments)):
        raise InvalidRequestError(f"one of the {what} is blank", param=what)
    lines = [line if line.strip() else None for line in arguments or piped_text().splitlines()]
    if not any(lines):
        raise InvalidRequestError(f"there are no {what}: give some, or pipe them in, one a line", param=what)
    return lines


class Activity:
    """A context manager around one wait.

    Args:
        console: shows it; None: one on stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_interactive,  # TERM=dumb shows no bars
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_load(self, state: ModelState) -> None:
        """Show how far a model is."""
        stage = f" ({state.stage})" if state.stage else ""
        self._show(f"load {state.model}", f"{state.state} {state.model}{stage}", state.fraction)

    def on_notice(self, notice: Notice | PrefillProgress) -> None:
        """Show what an answer waits for."""
        match notice:
            case PrefillProgress():
                self.on_prefill(notice)
            case Queued(position=position, eta_s=eta_s) if position:
                eta = "" if eta_s is None else f", about {duration_text(eta_s)} to go"
                self._show("queue", f"in the queue, {position} before it{eta}", 0.0)
            case Parked():
                self._show("queue", "makes room for another request", 0.0)

    def on_prefill(self, progress: PrefillProgress) -> None:
        """Show how much of a prompt has been read, and how much of it did not have to be."""
        if progress.total >= LONG_PROMPT_TOKENS:
            text = f"reading the prompt: {progress.processed} of {progress.total} tokens"
            if progress.cached:
                text += f", {progress.cached} from the cache"
            self._show("prefill", text, progress.processed / progress.total)

    def clear(self) -> None:
        """Take the bars away: the answer begins."""
        self._progress.stop()

    def _show(self, key: str, text: str, fraction: float) -> None:
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(text, total=1.0)
        self._progress.update(self._bars[key], description=text, completed=fraction)


@asynccontextmanager
async def opened(settings: EngineSettings, factory: RuntimeFactory | None) -> AsyncIterator[Runtime]:
    """A started runtime, closed at the end; a bar shows the load.

    Raises:
        StokerError: the model cannot be served.
    """
    from stoker.runtime import Runtime

    runtime = factory(settings) if factory else Runtime(settings=settings)
    try:
        with Activity() as activity:
            runtime.on_load, runtime.takes_up = activity.on_load, False
            await runtime.start()
        yield runtime
    finally:
        await runtime.close()


def text_of(error: StokerError) -> str:
    """Its message, in which options stand for the arguments of the library."""
    return error.message.replace("`url`", "--url").replace("`api_key`", "--api-key")


def tell(text: str, *, end: str = "\n") -> None:
    """A dim text on stderr, about the answer and not of it; without escapes where a terminal takes none."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False, soft_wrap=True).print(
        Text(text.translate(CONTROLS)), style="dim", end=end
    )


def write(text: str) -> None:
    """To stdout at once; a terminal does not get control characters that a model made up."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
