"""`stoker chat`: a conversation in the terminal.

Owns the options, which screen fits the terminal, and the history of what was typed. The conversation is
`stoker.cli.chat`'s.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer

from stoker.cli.exits import ExitCode
from stoker.cli.fitting_model import GENERATE
from stoker.cli.logs import NotesHandler
from stoker.cli.options import AsJson, System, engine_settings, takes_fields
from stoker.cli.target import Asked, Target, asks_model
from stoker.ipc.request import Sampling
from stoker.private import FILE_MODE, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prompt_toolkit.history import History

    from stoker.cli.chat.plain import PlainScreen
    from stoker.cli.chat.screen import TerminalScreen
    from stoker.cli.chat.session import ChatSession

HISTORY_FILE = "chat_history"


@asks_model
@takes_fields("max_tokens", "temperature", "top_p", "seed")
def chat(
    target: Target,
    fields: dict[str, Any],
    *,
    system: System = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Image before the first turn; repeat for more.", metavar="FILE"),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option("--audio", help="Recording before the first turn; repeat for more.", metavar="FILE"),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", help="PDF or text before the first turn; repeat for more.", metavar="FILE"),
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Neither read nor write what was typed in earlier chats.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Talk with a model; /help lists what can be done, /exit leaves.

    Without a terminal on standard input each of its lines is a turn.
    """
    from stoker.cli.chat.plain import no_echo
    from stoker.cli.chat.session import ChatSession

    drawn = {name: value for name, value in fields.items() if name != "max_tokens"}
    Sampling(**drawn)  # says what is wrong before a model is loaded
    session = ChatSession(fields, system=system or "")
    given = (("/image", image), ("/audio", audio), ("/file", file))
    attached = [(command, str(path)) for command, paths in given for path in paths or ()]
    with no_echo():
        num_failed = asyncio.run(
            _chat(target, session, attached, has_history=not no_history, as_json=as_json)
        )
    if num_failed and not sys.stdin.isatty():
        raise typer.Exit(ExitCode.FAULT)


async def _chat(
    target: Target,
    session: ChatSession,
    attached: Sequence[tuple[str, str]],
    *,
    has_history: bool,
    as_json: bool,
) -> int:
    """Talk until the last line; how many turns and commands have failed."""
    from stoker.cli.chat.loop import ChatLoop

    async with target.opened(GENERATE, slots=1) as asked:
        session.model = asked.model

        def models() -> list[str]:
            return _models(asked, target)

        async with _screen(models, has_history=has_history, as_json=as_json) as screen:
            loop = ChatLoop(asked.runtime, session, screen, models)
            with NotesHandler(asyncio.get_running_loop(), loop.note):
                if sys.stdin.isatty():
                    screen.say(f"{asked.model}: /help says what can be done")
                for command, path in attached:
                    await loop.attach(command, path)
                await loop.run()
    return loop.num_failed


def _screen(
    models: Callable[[], Sequence[str]], *, has_history: bool, as_json: bool
) -> TerminalScreen | PlainScreen:
    """What fits standard input and output."""
    from stoker.cli.chat.commands import CommandCompleter
    from stoker.cli.chat.plain import DumbTerminalLines, PlainScreen, piped_line
    from stoker.cli.chat.screen import TerminalScreen

    if not sys.stdin.isatty():
        return PlainScreen(piped_line, as_json=as_json)
    history = _history(is_kept=has_history)
    if as_json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        return PlainScreen(DumbTerminalLines(history), as_json=as_json)
    return TerminalScreen(history, CommandCompleter(models))


def _history(*, is_kept: bool) -> History:
    """What was typed in earlier chats, in a file for its owner alone; where there can be none, in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not is_kept:
        return InMemoryHistory()
    file = platformdirs.user_state_path("stoker") / HISTORY_FILE
    try:
        make_folder(file.parent)
        file.touch(mode=FILE_MODE)
        file.chmod(FILE_MODE)
    except OSError as error:
        typer.echo(f"stoker: no history is kept: {file}: {error.strerror}", err=True)
        return InMemoryHistory()
    return FileHistory(str(file))


def _models(asked: Asked, target: Target) -> list[str]:
    """Names of models that answer: the served ones, and those that are here where the chat loads its own."""
    from stoker.models.store import ModelStore
    from stoker.runtime import Runtime

    served = [info.id for info in asked.runtime.models if GENERATE.is_done_by(info)]
    if not isinstance(asked.runtime, Runtime):
        return served
    here = ModelStore(engine_settings(target.config).models_dir).list()
    found = [file.id for file in here if file.description and GENERATE.is_done_by(file.description)]
    return list(dict.fromkeys([*served, *found]))
