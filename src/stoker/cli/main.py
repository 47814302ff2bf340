"""The program `stoker`: what it does before its commands, which are `stoker.cli.app`'s, are imported.

A server's engine is spawned here: what it imports takes as long as what the command does. Apart because it
comes before those imports.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.client.process.child import EngineChild

_NO_SERVER = frozenset({"-h", "--help", "-V", "--version", "--isolation"})
"""Words of the command line with which `serve` needs no process, or may need none."""
_MODEL = ("-m", "--model")


def main() -> None:
    """Entry point of the `stoker` script."""
    _open_closed_streams()
    with contextlib.ExitStack() as stack:
        child = _spawned(_models_in(sys.argv[1:])) if _is_server(sys.argv[1:]) else None
        if child is not None:
            stack.callback(child.close)
        run_command = _imported()
        run_command(child)


def _imported() -> Callable[[EngineChild | None], None]:
    """The commands; Ctrl-C while they are imported ends the program as it does afterwards."""
    gc.disable()  # what is imported stays: to look through it for garbage takes a twelfth of the time
    try:
        from stoker.cli.app import run_command
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    gc.freeze()
    gc.enable()
    return run_command


def _is_server(words: Sequence[str]) -> bool:
    """Whether an engine's process will be needed, as far as the command line tells."""
    is_asked = words[:1] == ["serve"] and "STOKER_ISOLATION" not in os.environ
    return is_asked and not any(word.partition("=")[0] in _NO_SERVER for word in words)


def _models_in(words: Sequence[str]) -> list[str]:
    """The files that the command line names as models, as far as it tells: the settings may say more."""
    named = [after for word, after in itertools.pairwise(words) if word in _MODEL]
    named += [word.partition("=")[2] for word in words if word.startswith("--model=")]
    return [name for name in named if os.path.isfile(name)]  # noqa: PTH113 - pathlib is not imported yet


def _spawned(models: Sequence[str]) -> EngineChild | None:
    """An engine's process; None where the machine refuses one: the server's own start says why."""
    from stoker.client.process.child import EngineChild

    try:
        return EngineChild(models=models)
    except (OSError, MemoryError):
        return None


def _open_closed_streams() -> None:
    """A standard stream that was closed, as by `>&-`, is /dev/null: no other file may get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8"))
