"""What the user sees while waiting: a bar on stderr for loading a model and reading a prompt.

Gone when there is something to read; on anything but a terminal it draws nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from stoker.ipc.events import ModelState, PrefillProgress

LONG_PROMPT_TOKENS = 64  # a shorter one is read before a bar can be


class Activity:
    """A context manager around one wait."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
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
