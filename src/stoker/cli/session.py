"""A runtime for one user in a terminal: opened with progress, asked, answers written as they come.

Owns the way from a request to text on stdout. What is asked, and what an interruption means, is the
command's business.
"""

from __future__ import annotations

import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.cli.activity import Activity
from stoker.ipc.events import Delta, Finished, PrefillProgress
from stoker.ipc.usage import Timings, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker.cli.options import RuntimeFactory
    from stoker.ipc.request import FinishReason, GenerateRequest
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

_CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


@dataclass
class ReplyText:
    """What has come of an answer so far; whole once `usage` is there."""

    text: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def summary(self) -> str:
        """One line of figures; empty if the answer did not end by itself."""
        if self.usage is None or self.timings is None:
            return ""
        speed = self.usage.completion_tokens / self.timings.decode_s if self.timings.decode_s else 0.0
        return (
            f"{self.usage.completion_tokens} tokens, {speed:.0f} a second, "
            f"prompt of {self.usage.prompt_tokens} read in {self.timings.prefill_s:.2f} s, "
            f"ended by {self.finish_reason}"
        )


def new_runtime(settings: EngineSettings) -> Runtime:
    """The runtime that commands use unless they are handed another."""
    from stoker.runtime import Runtime

    return Runtime(settings=settings)


@asynccontextmanager
async def opened(settings: EngineSettings, factory: RuntimeFactory | None) -> AsyncIterator[Runtime]:
    """A started runtime, closed at the end; a bar shows the load.

    Raises:
        StokerError: the model cannot be served.
    """
    runtime = (factory or new_runtime)(settings)
    try:
        with Activity() as activity:
            runtime.on_load, runtime.takes_up = activity.on_load, False
            await runtime.start()
        yield runtime
    finally:
        await runtime.close()


async def write_answer(runtime: Runtime, request: GenerateRequest, answer: ReplyText) -> None:
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
            _write("\n")


def _take(event: Any, answer: ReplyText, activity: Activity) -> None:
    match event:
        case PrefillProgress():
            activity.on_prefill(event)
        case Delta():
            activity.clear()
            answer.text += event.text
            answer.finish_reason = event.finish_reason or answer.finish_reason
            _write(event.text)
        case Finished():
            answer.usage, answer.timings = event.usage, event.timings


def _write(text: str) -> None:
    """To stdout at once; a terminal does not get control characters that a model made up."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
