"""A runtime for one user in a terminal: opened with progress, asked, answers written as they come.

Owns what is read from standard input, what a user sees while waiting (a bar on stderr, on a terminal only,
gone when there is something to read), and the way from a request to text on stdout. What is asked, and what
an interruption means, is the command's.
"""

from __future__ import annotations

import select
import stat
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from os import fstat
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from stoker.errors import InvalidRequestError
from stoker.ipc.events import Delta, Finished, Parked, PrefillProgress, Queued
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, Usage
from stoker.wording import count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from stoker.cli.options import RuntimeFactory
    from stoker.client.requests.stream import Notice, TextDelta
    from stoker.ipc.events import ModelState
    from stoker.ipc.request import GenerateRequest
    from stoker.remote.runtime import RemoteRuntime
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

LONG_PROMPT_TOKENS = 64  # a shorter one is read before a bar can be
FIRST_BYTE_S = 2.0
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""For `str.translate`: what a model makes up must not command a terminal."""


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


@dataclass
class ReplyText:
    """What has come of an answer so far; whole once `usage` is there."""

    model: str = ""
    text: str = ""
    reasoning: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    def take(self, delta: TextDelta) -> None:
        """Add a piece."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage, self.timings = delta.usage or self.usage, delta.timings or self.timings

    def record(self) -> dict[str, Any]:
        """As JSON for programs."""
        usage, timings = self.usage or Usage(), self.timings or Timings()
        return {
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason or FinishReason.CANCELLED,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue_s": timings.queue_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
        }

    @property
    def summary(self) -> str:
        """One line of figures; empty if the answer did not end by itself."""
        if self.usage is None or self.timings is None:
            return ""
        speed = self.usage.completion_tokens / self.timings.decode_s if self.timings.decode_s else 0.0
        return (
            f"{count_text(self.usage.completion_tokens, 'token')}, {speed:.0f} a second, "
            f"prompt of {self.usage.prompt_tokens} read in {duration_text(self.timings.prefill_s)}, "
            f"ended by {self.finish_reason}"
        )


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


async def write_answer(runtime: Runtime | RemoteRuntime, request: GenerateRequest, answer: ReplyText) -> None:
    """Stream the answer to stdout and into `answer`, which keeps what came before an interruption.

    Raises:
        StokerError: the request failed.
    """
    try:
        with Activity() as activity:
            async with aclosing(runtime.stream(request)) as events:
                async for event in events:
                    _take(event, answer, activity)
    finally:
        if answer.text and not answer.text.endswith("\n"):
            write("\n")


def _take(event: Any, answer: ReplyText, activity: Activity) -> None:
    match event:
        case PrefillProgress():
            activity.on_prefill(event)
        case Delta():
            activity.clear()
            answer.text += event.text
            answer.finish_reason = event.finish_reason or answer.finish_reason
            write(event.text)
        case Finished():
            answer.usage, answer.timings = event.usage, event.timings


def tell(text: str, *, end: str = "\n") -> None:
    """A dim text on stderr, about the answer and not of it; without escapes where a terminal takes none."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text), style="dim", end=end)


def write(text: str) -> None:
    """To stdout at once; a terminal does not get control characters that a model made up."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
