"""`stoker ui`: the page of the running server in a browser, and recordings of what it shows.

A recording is the documents of `/v1/runtime/events` as JSON Lines; `--replay` serves the page from one, on
loopback, without an engine (SPEC U6). What a recording is, `stoker.server.ui.replay` knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from stoker.cli.session import tell
from stoker.cli.target import ApiKey, Url, ask_server, server_url
from stoker.errors import InvalidRequestError
from stoker.private import FILE_MODE
from stoker.wording import count_text, size_text

if TYPE_CHECKING:
    from stoker.remote.connection import ServerConnection
    from stoker.server.ui.replay import EventRecording

PAGE = "/ui"
_MIB = 2**20
_MAX_MB = 256


def ui(
    *,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser; else print the address alone.")
    ] = True,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write what the page is told there until Ctrl-C.", metavar="FILE"),
    ] = None,
    max_mb: Annotated[
        int | None, typer.Option("--max-mb", help="MiB that a recording may take. [256]", min=1, metavar="N")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="Show a recording, without a server.", metavar="FILE"),
    ] = None,
    speed: Annotated[
        str | None, typer.Option("--speed", help="Times the recording's own pace, or max. [1]", metavar="N")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Open the page of the running server, which shows what it does and steers it."""
    from stoker.remote.connection import ServerConnection

    if record is not None and replay is not None:
        raise InvalidRequestError("--record and --replay exclude each other", param="record")
    if speed is not None and replay is None:
        raise InvalidRequestError("speed is of a recording: --replay FILE shows one", param="speed")
    if max_mb is not None and record is None:
        raise InvalidRequestError("max_mb is of a recording: --record FILE makes one", param="max_mb")
    if replay is not None:
        from stoker.server.ui.replay import EventRecording

        _show(EventRecording(replay), _pace(speed or "1"), opens=browser)
    elif record is not None:
        _record(ServerConnection(server_url(url), api_key), _Tape(record, (max_mb or _MAX_MB) * _MIB))
    else:
        server = ServerConnection(server_url(url), api_key)
        ask_server(server.url, api_key, "/health")
        _open(f"{server.url}{PAGE}", opens=browser)


def _open(address: str, *, opens: bool) -> None:
    """Print the address, and open it where there is a browser with windows."""
    typer.echo(address)
    if not opens:
        return
    import webbrowser

    try:
        found = webbrowser.get()
    except webbrowser.Error:
        found = None
    if found is None or type(found) is webbrowser.GenericBrowser:  # one of the terminal
        tell("stoker: there is no browser to open it with")
        return
    found.open(address)


def _pace(speed: str) -> float:
    """The multiple of the recording's own pace. Raises InvalidRequestError."""
    if speed == "max":
        return math.inf
    with contextlib.suppress(ValueError):
        if 0 < (found := float(speed)) < math.inf:
            return found
    raise InvalidRequestError(f"speed is a number above 0, or max, got {speed!r}", param="speed")


# ---------------------------------------------------------------- recordings


def _record(server: ServerConnection, tape: _Tape) -> None:
    """Write documents until Ctrl-C or the bound."""
    try:
        asyncio.run(tape.write(server))
    except KeyboardInterrupt:
        pass
    finally:
        if tape.is_begun:
            tell(f"stoker: {count_text(tape.num_documents, 'document')}, {size_text(tape.num_bytes)}")


class _Tape:
    """A new file with what a server tells; there is none before its first document.

    Args:
        path: of the file; its folder exists.
        max_bytes: of all documents.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self.is_begun = False
        self.num_documents = self.num_bytes = 0

    async def write(self, server: ServerConnection) -> None:
        """Write until the server ends or there is no room.

        Raises:
            InvalidRequestError: the file is there already.
            OSError: it cannot be made or written.
            StokerError: no server answers, or it lets nobody in.
        """
        from stoker.remote.wire import DONE, EVENTS

        server.open()
        try:
            async with contextlib.aclosing(server.stream("GET", EVENTS)) as events:
                with contextlib.ExitStack() as at_the_end:
                    async for event in events:
                        if event.data == DONE:
                            return
                        if not self.is_begun:
                            file = at_the_end.enter_context(_new_file(self._path))
                            self.is_begun = True
                            tell(f"stoker: records {server.url} to {self._path}; Ctrl-C ends it")
                        if not self._keep(event.data.encode() + b"\n", file):
                            return
        finally:
            await server.close()

    def _keep(self, line: bytes, file: BinaryIO) -> bool:
        """Write a line and flush it; False: there is no room for it."""
        if self.num_bytes + len(line) > self._max_bytes:
            tell(f"stoker: ended at --max-mb {self._max_bytes // _MIB}")
            return False
        file.write(line)
        file.flush()
        self.num_documents += 1
        self.num_bytes += len(line)
        return True


def _new_file(path: Path) -> BinaryIO:
    """A file that was not there, for its owner alone; a pipe or a device is written to as it is."""
    is_passed_on = path.is_fifo() or path.is_char_device()
    flags = os.O_WRONLY | os.O_CLOEXEC | (0 if is_passed_on else os.O_CREAT | os.O_EXCL)
    try:
        return os.fdopen(os.open(path, flags, FILE_MODE), "wb")
    except FileExistsError:
        text = f"record: {path} is there already and stays: name a new file, or delete it first"
        raise InvalidRequestError(text, param="record") from None


def _show(recording: EventRecording, speed: float, *, opens: bool) -> None:
    """Serve the page of a recording on loopback until Ctrl-C."""
    import uvicorn

    from stoker.server.run_file import url_of
    from stoker.server.serve import bind
    from stoker.server.ui.replay import replay_app

    with bind("127.0.0.1", 0) as listener:
        how: dict[str, Any] = {"log_config": None, "log_level": "critical", "lifespan": "off"}
        server = uvicorn.Server(
            uvicorn.Config(replay_app(recording, speed), timeout_graceful_shutdown=1, **how)
        )
        _open(f"{url_of('127.0.0.1', listener.getsockname()[1])}{PAGE}", opens=opens)
        with contextlib.suppress(KeyboardInterrupt):  # the end that is meant
            asyncio.run(server.serve(sockets=[listener]))
