"""Server-sent events (SPEC S2): frames out, comments while nothing flows, errors in band once begun.

Owns the shape of the stream on the wire. What the frames say is decided by whoever yields them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.responses import Response

from stoker.errors import ErrorInfo, StokerError
from stoker.server.disconnect import ClientGoneError, while_connected
from stoker.server.errors import INTERNAL_ERROR, error_body

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def frame(data: bytes) -> bytes:
    """One `data:` frame; `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip; `text` is one line."""
    return f": {text}\n\n".encode()


KEEP_ALIVE = comment("keep-alive")


class EventStream(Response):
    """A streamed answer made of the frames that a generator yields.

    The answer begins with the first thing yielded, so an error raised before that is an ordinary HTTP error;
    an empty frame begins it without saying anything. If nothing comes for `keepalive_s` it begins anyway.
    A client that leaves cancels the generator at once.

    Args:
        frames: complete SSE frames; closed by this class.
        headers: sent with the beginning; the generator may add to it before its first frame.
        keepalive_s: seconds of silence after which a comment is sent.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes, None], headers: dict[str, str], keepalive_s: float
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._frames = frames
        self._late_headers = headers
        self._keepalive_s = keepalive_s
        self._opening = asyncio.Lock()
        self._is_open = False
        self._was_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Send the stream until it ends or the client leaves."""
        beat = asyncio.ensure_future(self._beat(send))
        try:
            with contextlib.suppress(ClientGoneError):
                await while_connected(self._pump(send), receive)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for data in frames:
                    self._was_silent = False
                    if not self._is_open:
                        await self._open(send)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            async with self._opening:  # the beat may be sending the headers
                if not self._is_open:
                    raise
            failed = frame(error_body(_info(error)))
            await send({"type": "http.response.body", "body": failed, "more_body": True})
        await self._open(send)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _open(self, send: Send) -> None:
        """Send status and headers once; the pump and the beat may both come here."""
        async with self._opening:
            if self._is_open:
                return
            self.headers.update(self._late_headers)
            self.headers["Cache-Control"] = "no-cache"
            self.headers["X-Accel-Buffering"] = "no"
            del self.headers["Content-Length"]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_open = True

    async def _beat(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keepalive_s)
            if self._was_silent:
                await self._open(send)
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._was_silent = True


def _info(error: Exception) -> ErrorInfo:
    if isinstance(error, StokerError):
        return error.info()
    log.error("a stream failed after it began", exc_info=error)
    return INTERNAL_ERROR
