"""From a generation to an HTTP answer: streamed, or collected into one body.

Both end the generation at once when the client leaves (SPEC S5).
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from stoker.client.requests.stream import Notice
from stoker.ipc.events import Admitted, Finished, Queued
from stoker.ipc.usage import Usage
from stoker.server.inbound.disconnect import while_connected
from stoker.server.streaming.generation import total_usage
from stoker.server.streaming.sse import GRACE_S, LOADING_GRACE_S, Ending, EventStream, comment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.usage import CacheSource
    from stoker.server.openai.translation import OriginRules

POSITION_HEADER = "X-Stoker-Queue-Position"
ETA_HEADER = "X-Stoker-Eta"
CACHE_HEADER = "X-Stoker-Cache"


class Source(Protocol):
    """Where events come from: a generation, or a kept request that its client comes back to."""

    @property
    def is_ready(self) -> bool:
        """Whether every model it needs is in memory."""
        ...

    def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """(index of the prompt, event) as they come."""
        ...


class ChunkWriter(Protocol):
    """Writes events as SSE frames."""

    def write(self, prompt: int, event: StreamEvent, /) -> bytes:
        """Frames of one event of one prompt; empty if it shows nothing."""
        ...

    def end(self) -> bytes:
        """Frames after the last event."""
        ...


class TranslatedSource:
    """A source whose errors name the places of another API's body.

    Args:
        source: of a chat completion.
        origins: where its places stand in the caller's body.
    """

    def __init__(self, source: Source, origins: OriginRules) -> None:
        self._source = source
        self._origins = origins

    def __repr__(self) -> str:
        return f"TranslatedSource({self._source!r})"

    @property
    def is_ready(self) -> bool:
        """As of the source."""
        return self._source.is_ready

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """As of the source.

        Raises:
            StokerError: of the source, translated.
        """
        with self._origins.named():
            async with aclosing(self._source.events()) as events:
                async for event in events:
                    yield event


class WholeWriter(Protocol):
    """Collects events into one body."""

    def add(self, prompt: int, event: StreamEvent, /) -> None:
        """Take in one event of one prompt."""
        ...

    def whole(self) -> bytes:
        """The body."""
        ...


def streamed(
    source: Source, writer: ChunkWriter, keepalive_s: float, ending: Ending | None = None
) -> EventStream:
    """The events of `source` as server-sent events.

    The headers tell the place in the line at arrival and, where known, the seconds to go (SPEC Q14); what
    changes while it waits or stands still comes as comments, which clients ignore unless they know them.
    X-Stoker-Cache tells what the first prompt to get a slot found in the cache (SPEC C13); a stream that had
    to begin while it still waited has no such header, only the usage at its end. Where a model has to be
    loaded it begins a little later, as a load that is refused is an ordinary HTTP error.
    """
    headers: dict[str, str] = {}
    grace_s = GRACE_S if source.is_ready else LOADING_GRACE_S
    return EventStream(_frames(source, writer, headers), headers, keepalive_s, grace_s, ending)


async def collected(source: Source, writer: WholeWriter, request: Request) -> Response:
    """The events of `source` as one JSON body; X-Stoker-Cache says what the usage in it does (SPEC C13).

    Raises:
        ClientGoneError: the client left while it ran.
        StokerError: what ended it.
    """
    body, usage = await while_connected(_collect(source, writer), request.receive)
    headers = {CACHE_HEADER: _cache_header(usage.cache_source, usage.cached_tokens)}
    return Response(body, headers=headers, media_type="application/json")


def _cache_header(source: CacheSource | None, num_tokens: int) -> str:
    """`ram; tokens=640`, or `miss; tokens=0`."""
    return f"{source or 'miss'}; tokens={num_tokens}"


async def _frames(
    source: Source, writer: ChunkWriter, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(source.events()) as events:
        async for prompt, event in events:
            if isinstance(event, Notice):
                yield _notice(event, headers)
                if not isinstance(event, Admitted):  # until then it may still be refused, with a status
                    continue
            if data := writer.write(prompt, event):
                yield data
    yield writer.end()


def _notice(event: Notice, headers: dict[str, str]) -> bytes:
    """How a client hears of it: of its first place by headers, and if it is not the next by a comment too.

    Of the cache it hears by a header alone. An empty frame lets it have the headers now, not with its first
    token.
    """
    if isinstance(event, Admitted):
        headers.setdefault(CACHE_HEADER, _cache_header(event.cache_source, event.cached_tokens))
        return b""
    if not isinstance(event, Queued):
        return comment(type(event).__name__.lower())
    eta = "" if event.eta_s is None else f"{event.eta_s:.1f}"
    is_first = POSITION_HEADER not in headers
    if is_first:
        headers[POSITION_HEADER] = str(event.position)
        if eta:
            headers[ETA_HEADER] = eta
    if is_first and event.position == 0:
        return b""
    return comment(f"queued position={event.position}" + (f" eta_s={eta}" if eta else ""))


async def _collect(source: Source, writer: WholeWriter) -> tuple[bytes, Usage]:
    usages: list[Usage] = []
    async with aclosing(source.events()) as events:
        async for prompt, event in events:
            writer.add(prompt, event)
            if isinstance(event, Finished):
                usages.append(event.usage)
    return writer.whole(), total_usage(usages)
