"""The command `stoker top`: frames on a terminal, one frame in a pipe or with `--once`, JSON for programs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.target import ApiKey, Url, server_url

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.cli.top.view import Document

Once = Annotated[bool, typer.Option("--once", help="Print one frame and end; in a pipe it always does.")]


def top(*, once: Once = False, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Show what the running server does: slots, the line and why it waits, models, memory, speed.

    Arrows select a request; p pauses it, r resumes it, c cancels it; q ends.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    address = server_url(url)
    if as_json:
        typer.echo(json.dumps(asyncio.run(_snapshot(address, api_key)), indent=2))
    elif once or not console.is_interactive:  # TERM=dumb moves no cursor
        _print_frame(console, asyncio.run(_snapshot(address, api_key)))
    else:
        asyncio.run(_watch(console, address, api_key))


async def _snapshot(url: str, api_key: str | None) -> Document:
    """The state of everything. Raises StokerError: no server answers, or it lets nobody in."""
    from stoker.cli.top.source import EventSource
    from stoker.remote.connection import ServerConnection

    server = ServerConnection(url, api_key)
    server.open()
    try:
        return await EventSource(server, lambda _: None).snapshot()
    finally:
        await server.close()


async def _watch(console: Console, url: str, api_key: str | None) -> None:
    from stoker.cli.top.screen import TopScreen
    from stoker.remote.connection import ServerConnection

    server = ServerConnection(url, api_key)
    server.open()
    try:
        await TopScreen(server, console).run()
    finally:
        await server.close()


def _print_frame(console: Console, document: Document) -> None:
    """One frame with every row; as wide as the terminal, or as its longest line in a pipe."""
    from stoker.cli.tables import PIPE_COLUMNS
    from stoker.cli.top.frame import ALL_LINES, FrameState, frame
    from stoker.cli.top.layout import ASCII, UNICODE
    from stoker.cli.top.view import RuntimeView

    view = RuntimeView()
    view.take(document)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    glyphs = ASCII if console.options.ascii_only else UNICODE
    state = FrameState(width=console.width, height=ALL_LINES, now=view.at, glyphs=glyphs)
    for line in frame(view, state):
        console.print(line, soft_wrap=True)
