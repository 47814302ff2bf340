"""Server-sent events (SPEC S2): frames out, comments while nothing flows, errors in band once begun.

Owns the shape of the stream on the wire. What the frames say is decided by whoever yields them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from stoker.errors import ErrorInfo, StokerError
from stoker.ipc.events import PrefillProgress
from stoker.server.errors import INTERNAL_ERROR, error_body
from stoker.server.inbound.bodies import ClientGoneError, while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send


log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
GRACE_S = 0.02  # longer than an engine's events take to come, too short to be noticed
LOADING_GRACE_S = 1.0  # where a model is to be loaded first: by then it is known whether it fits


def frame(data: bytes) -> bytes:
    """One `data:` frame; `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip; `text` is one line."""
    return f": {text}\n\n".encode()


KEEP_ALIVE = comment("keep-alive")


def _failed(info: ErrorInfo) -> bytes:
    return frame(error_body(info))


@dataclass(frozen=True)
class Ending:
    """How a stream ends and lasts.

    Attributes:
        done: the last frame.
        fail: what an error after the beginning is written as.
        beat: sent while nothing else is to be sent.
        note: what a text beside the answer, such as a place in the queue, is written as; empty: it is not.
        media_type: of the whole.
    """

    done: bytes = DONE
    fail: Callable[[ErrorInfo], bytes] = _failed
    beat: bytes = KEEP_ALIVE
    note: Callable[[str], bytes] = comment
    media_type: str = "text/event-stream"


class EventStream(Response):
    """A streamed answer made of the frames that a generator yields.

    The answer begins with the first data frame, so an error raised before that is an ordinary HTTP error. An
    empty frame or a comment begins it `grace_s` later, as what comes right behind it may be a header: a
    request that finds a free slot is queued and admitted at once. If nothing comes for `keepalive_s` it
    begins too. A client that leaves cancels the generator at once.

    Args:
        frames: complete SSE frames; closed by this class.
        headers: sent with the beginning; the generator may add to it until then.
        keepalive_s: seconds of silence after which the ending's beat is sent.
        grace_s: what an empty frame or a comment waits.
        ending: what the stream ends with; OpenAI's way by default.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        keepalive_s: float,
        grace_s: float = GRACE_S,
        ending: Ending | None = None,
    ) -> None:
        self._ending = ending or Ending()
        super().__init__(media_type=self._ending.media_type)
        self._frames = frames
        self._late_headers = headers
        self._keepalive_s = keepalive_s
        self._grace_s = grace_s
        self._held = b""  # comments that came before the beginning
        self._opening = asyncio.Lock()
        self._opener: asyncio.Future[None] | None = None
        self._beating: asyncio.Future[None] | None = None
        self._is_open = False
        self._was_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client leaves."""
        self._send_body = scope.get("state", {}).get("send_body", send)
        self._beating = asyncio.ensure_future(self._beat(send))
        try:
            with contextlib.suppress(ClientGoneError):
                await while_connected(self._pump(send), receive)
        finally:
            await asyncio.gather(*self._stop_timers(), return_exceptions=True)

    def _stop_timers(self) -> list[asyncio.Future[None]]:
        """Cancel what would begin the answer by itself; gives what then ends."""
        timers = [timer for timer in (self._beating, self._opener) if timer is not None]
        for timer in timers:
            timer.cancel()
        return timers

    async def _pump(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for data in frames:
                    self._was_silent = False
                    if data and self._is_open:
                        await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
                    else:
                        await self._begin(data, send)
        except asyncio.CancelledError:
            self._stop_timers()  # the client left while they may have waited for the pump's sending
            raise
        except Exception as error:
            async with self._opening:  # the beat or the opener may be sending the headers
                if not self._is_open:
                    self._stop_timers()  # one that is due would begin it before the caller sees the error
                    raise
            failed = self._ending.fail(_info(error))
            await send({"type": "http.response.body", "body": failed, "more_body": True})
        await self._open(send)
        self._stop_timers()  # no beat behind the end, however slowly that is taken
        await send({"type": "http.response.body", "body": self._ending.done, "more_body": False})

    async def _begin(self, data: bytes, send: Send) -> None:
        """Take in what comes before the beginning, or begins the answer."""
        if self._is_open:
            return
        if not data or data.startswith(b":"):
            self._held += data
            self._opener = self._opener or asyncio.ensure_future(self._open_soon(send))
            return
        await self._open(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _open_soon(self, send: Send) -> None:
        await asyncio.sleep(self._grace_s)
        await self._open(send)

    async def _open(self, send: Send) -> None:
        """Send status, headers and what was held once; the pump, the beat and the opener may come here."""
        async with self._opening:
            if self._is_open:
                return
            self.headers.update(self._late_headers)
            self.headers["Cache-Control"] = "no-cache"
            self.headers["X-Accel-Buffering"] = "no"
            del self.headers["Content-Length"]
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while self._held:  # more may come while it is sent
                held, self._held = self._held, b""
                await send({"type": "http.response.body", "body": held, "more_body": True})
            self._is_open = True

    async def _beat(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keepalive_s)
            if self._was_silent:
                await self._open(send)
                await send({"type": "http.response.body", "body": self._ending.beat, "more_body": True})
            self._was_silent = True


def _info(error: Exception) -> ErrorInfo:
    if isinstance(error, StokerError):
        return error.info()
    log.error("a stream failed after it began", exc_info=error)
    return INTERNAL_ERROR


_encode = msgspec.json.Encoder().encode


def typed_frames(objects: Iterable[dict[str, Any]]) -> bytes:
    """Frames of objects that each have a `type`."""
    return b"".join(
        b"event: " + one["type"].encode() + b"\ndata: " + _encode(one) + b"\n\n" for one in objects
    )


PROGRESS_EVENT = "prefill_progress"
"""The name of events about a prompt, for those who ask for a name."""


def progress_fields(event: PrefillProgress) -> dict[str, Any]:
    """`prompt_progress` as in chat chunks: tokens in all, from the cache, computed so far; milliseconds."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.time_ms,
    }
