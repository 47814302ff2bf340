"""A recording of `/v1/runtime/events` shown by the page without a server (SPEC U6).

Owns the form of a recording (JSON Lines of the stream's documents), and the application that tells them again
at their own pace, another one, or as fast as they are read. Nothing of it can be steered.
"""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from stoker.errors import InvalidRequestError
from stoker.server.inbound.security import LOOPBACK_NAMES
from stoker.server.reply import json_response
from stoker.server.sse import KEEP_ALIVE, frame
from stoker.server.ui.page import ASSETS, PATH, shipped_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.requests import Request

FASTEST = float("inf")
MAX_LINE_BYTES = 16 * 2**20
_BATCH = 256
"""Documents in one piece of the answer, where nothing is waited for."""
_BEAT_S = 5.0
_LONGEST_PAUSE_S = 3600.0
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class EventRecording:
    """The documents of a file.

    Args:
        path: JSON Lines, as `stoker ui --record` writes them, or a stream as it came; .gz: compressed.

    Raises:
        InvalidRequestError: it begins with no document.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if next(self.documents(), None) is None:
            raise InvalidRequestError(f"{path} holds no events", param="replay")

    def __repr__(self) -> str:
        return f"EventRecording({self._path})"

    def documents(self) -> Iterator[dict[str, Any]]:
        """One by one, as they stand in the file. Raises InvalidRequestError: a line is none."""
        opened = gzip.open if self._path.suffix == ".gz" else open
        with opened(self._path, "rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                text = line.removeprefix(b"data:").strip()
                if not text or text.startswith((b"id:", b"event:", b":")):
                    continue
                try:
                    document = _decode(text)
                except msgspec.DecodeError as error:
                    where = f"{self._path}, line {number}"
                    raise InvalidRequestError(f"{where} is no event: {error}", param="replay") from None
                yield document


def replay_app(recording: EventRecording, speed: float) -> Starlette:
    """The page, and the documents at that multiple of their own pace; FASTEST: without pauses."""

    async def index(_request: Request) -> Response:
        return shipped_page().index()

    async def asset(request: Request) -> Response:
        found = shipped_page().asset(
            request.path_params["digest"],
            request.path_params["name"],
            request.headers.get("Accept-Encoding", ""),
        )
        if found is None:
            raise HTTPException(404)
        return found

    async def events(request: Request) -> Response:
        after = request.headers.get("last-event-id", "")
        frames = _frames(recording, speed, int(after) if after.isdecimal() else 0)
        return StreamingResponse(
            frames, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def root(_request: Request) -> Response:
        return RedirectResponse(PATH, 302)

    async def refuse(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = "this is a recording: it can be looked at, and nothing else"
        return json_response({"error": {"code": "recording", "message": text}}, status)

    routes = [
        Route("/", root),
        Route(PATH, index),
        Route(f"{ASSETS}/{{digest}}/{{name:path}}", asset),
        Route("/v1/runtime/events", events),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES), www_redirect=False)
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={HTTPException: refuse})


async def _frames(recording: EventRecording, speed: float, after: int) -> AsyncIterator[bytes]:
    """Frames numbered by their place in the recording; behind the last one comments, for good."""
    batch: list[bytes] = []
    began: float | None = None
    at = 0.0
    loop = asyncio.get_running_loop()
    for number, document in enumerate(_marked(recording.documents(), speed), 1):
        at = document.get("at", at)
        if began is None or number <= after:
            began = loop.time() - at / speed
        if number <= after:
            continue
        due = min(began + at / speed - loop.time(), _LONGEST_PAUSE_S)
        if batch and (due > 0 or len(batch) == _BATCH):
            yield b"".join(batch)
            batch.clear()
            await asyncio.sleep(0)
        while due > 0:
            await asyncio.sleep(min(due, _BEAT_S))
            due = began + at / speed - loop.time()
            if due > 0:
                yield KEEP_ALIVE
        batch.append(b"id: %d\n" % number + frame(_encode(document)))
    yield b"".join(batch)
    while True:
        yield KEEP_ALIVE
        await asyncio.sleep(_BEAT_S)


def _marked(documents: Iterator[dict[str, Any]], speed: float) -> Iterator[dict[str, Any]]:
    """Snapshots that say that this is a recording; one at the beginning in any case."""
    mark = {"may": {"administrate": False}, "replay": {"speed": "max" if speed == FASTEST else speed}}
    for place, document in enumerate(documents):
        if document.get("event") == "snapshot":
            yield document | mark
            continue
        if place == 0:
            yield {"event": "snapshot", "schema": 2, "at": document.get("at", 0.0), **mark}
        yield document
