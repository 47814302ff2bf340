"""`stoker top` on a terminal: frames as things happen, and what is typed.

Owns the selected row, the question before a cancel, and the clock. What a frame shows is `frame`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.cli.session import text_of
from stoker.cli.top.frame import FrameState, frame, selectable
from stoker.cli.top.keys import Key, typed
from stoker.cli.top.layout import ASCII, UNICODE
from stoker.cli.top.source import EventSource
from stoker.cli.top.view import RuntimeView
from stoker.errors import StokerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from stoker.cli.top.view import Document
    from stoker.remote.connection import ServerConnection

FRAME_S = 0.25
"""Frames that follow events are at least so far apart; one that follows a key comes at once."""
TICK_S = 1.0
"""Without events there is a frame each second, as times pass."""
NOTE_S = 5.0
"""How long a line about an action stays."""
MAX_ACTIONS = 8
"""Actions that wait for the server's answers; a further one is refused."""
_DOING = {Key.PAUSE: "pause", Key.RESUME: "resume", Key.CANCEL: "cancel"}


class TopScreen:
    """A server on a terminal, until the reader quits.

    Args:
        server: is open.
        console: on the terminal.
    """

    def __init__(self, server: ServerConnection, console: Console) -> None:
        self.view = RuntimeView()
        self._server = server
        self._console = console
        self._source = EventSource(server, self._note_lost)
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
        self._selected = ""
        self._asks_cancel = ""
        self._note = ""
        self._note_until_s = 0.0
        self._lost = ""
        self._read_s = time.monotonic()
        self._has_news = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._has_quit = asyncio.Event()
        self._actions: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<TopScreen {self.view!r}, {self._selected or 'nothing'} selected>"

    async def run(self) -> None:
        """Show frames until `q`.

        Raises:
            StokerError: no server answers at the beginning, or it lets nobody in.
        """
        from rich.live import Live

        async with contextlib.AsyncExitStack() as stack:
            documents = await stack.enter_async_context(aclosing(self._source.documents()))
            self._take(await anext(documents))  # before the screen is taken, so that an error is a line
            stack.enter_context(self._resizes())
            if sys.stdin.isatty():
                stack.enter_context(typed(sys.stdin.fileno(), self._press))
            live = Live(
                console=self._console,
                screen=True,
                auto_refresh=False,
                get_renderable=self._rendered,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            stack.enter_context(live)
            await self._until_quit(documents, live)

    async def _until_quit(self, documents: AsyncGenerator[Document, None], live: Live) -> None:
        """Read and show until `q`; raises what ends the reading."""
        working = self._read(documents), self._show(live), self._has_quit.wait()
        tasks = [asyncio.ensure_future(work) for work in working]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            left = [*tasks, *self._actions]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    # ------------------------------------------------------------ what happens

    async def _read(self, documents: AsyncGenerator[Document, None]) -> None:
        async for document in documents:
            self._take(document)

    def _take(self, document: Document) -> None:
        self.view.take(document)
        self._read_s = time.monotonic()
        self._has_news.set()

    def _note_lost(self, reason: str) -> None:
        self._lost = reason
        self._has_news.set()

    @contextlib.contextmanager
    def _resizes(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._is_urgent.set)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)

    # ------------------------------------------------------------ frames

    async def _show(self, live: Live) -> None:
        """A frame after news, but few a second, after a key at once, and each second anyway."""
        while True:
            live.refresh()
            self._has_news.clear()
            self._is_urgent.clear()
            await self._first_of(self._has_news, self._is_urgent, wait_s=TICK_S)
            if not self._is_urgent.is_set():
                await self._first_of(self._is_urgent, wait_s=FRAME_S)

    @staticmethod
    async def _first_of(*events: asyncio.Event, wait_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @property
    def _now(self) -> float:
        """Seconds since the epoch on the server's clock: of its last document, and what has passed here.

        It stands still while the server does not answer, as what is shown does.
        """
        return self.view.at + (0.0 if self._lost else time.monotonic() - self._read_s)

    def _rendered(self) -> Text:
        from rich.text import Text

        width, height = self._console.size
        now = self._now
        rows = selectable(self.view, now)
        if self._selected and self._selected not in rows:
            self._selected = ""
        state = FrameState(
            width=width,
            height=height,
            now=now,
            selected=self._selected,
            footer=self._footer(),
            silent_s=time.monotonic() - self._read_s if self._lost else None,
            glyphs=self._glyphs,
        )
        return Text("\n", no_wrap=True, overflow="crop").join(frame(self.view, state))

    def _footer(self) -> str:
        if self._asks_cancel:
            return f"cancel {self._asks_cancel}? c again does, any other key does not"
        if self._lost:
            return f"trying again: {self._lost}"
        if self._note and time.monotonic() < self._note_until_s:
            return self._note
        return f"q quit  {self._glyphs.arrows} select  p pause  r resume  c cancel"

    # ------------------------------------------------------------ keys

    def _press(self, key: Key) -> None:
        asked, self._asks_cancel = self._asks_cancel, ""
        match key:
            case Key.QUIT:
                self._has_quit.set()
            case Key.UP | Key.DOWN | Key.FIRST | Key.LAST:
                self._select(key)
            case Key.CANCEL if self._selected and asked != self._selected:
                self._asks_cancel = self._selected
            case Key.PAUSE | Key.RESUME | Key.CANCEL:
                self._act(_DOING[key])
        self._is_urgent.set()

    def _select(self, key: Key) -> None:
        rows = selectable(self.view, self._now)
        if not rows:
            return
        at = rows.index(self._selected) if self._selected in rows else -1
        last = len(rows) - 1
        to = {Key.UP: max(0, at - 1), Key.DOWN: min(last, at + 1), Key.FIRST: 0, Key.LAST: last}[key]
        self._selected = rows[to]

    def _act(self, action: str) -> None:
        """Ask the server to do that to the selected request; the line below says what came of it."""
        if not self._selected:
            self._say(f"select a request with {self._glyphs.arrows} first")
        elif len(self._actions) >= MAX_ACTIONS:
            self._say(f"{MAX_ACTIONS} actions wait for the server")
        else:
            task = asyncio.get_running_loop().create_task(self._ask(action, self._selected))
            self._actions.add(task)
            task.add_done_callback(self._actions.discard)

    async def _ask(self, action: str, request_id: str) -> None:
        path = f"/v1/runtime/requests/{quote(request_id, safe='')}/{action}"
        try:
            await self._server.post(path, {})
        except StokerError as error:
            self._say(text_of(error))
        else:
            self._say(f"{action}: {request_id}")

    def _say(self, note: str) -> None:
        self._note, self._note_until_s = note, time.monotonic() + NOTE_S
        self._is_urgent.set()
