"""One HTTP request's work in the runtime, and its events as an HTTP answer: streamed, or in one body.

Owns the ids, the merging of several prompts' streams and their metrics. Either answer ends the work at once
when the client leaves (SPEC S5). What an event looks like on the wire is its writer's.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.responses import Response

from stoker.chat.turn_ends import TURN_ENDS
from stoker.client.requests.stream import Notice
from stoker.ipc.events import Admitted, Delta, Finished, Queued
from stoker.ipc.usage import Usage, total_usage
from stoker.server.inbound.bodies import while_connected
from stoker.server.reply import CACHE_HEADER, ETA_HEADER, POSITION_HEADER
from stoker.server.sse import GRACE_S, LOADING_GRACE_S, Ending, EventStream
from stoker.tasks.chat import ChoiceReaders

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from starlette.requests import Request

    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.client.requests.stream import StreamEvent
    from stoker.client.store.file import KeptRequest
    from stoker.ipc.request import FinishReason, GenerateRequest
    from stoker.ipc.status import CallKind
    from stoker.ipc.usage import CacheSource, Timings
    from stoker.server.context import ServerContext
    from stoker.server.errors import OriginRules

    Numbered = AsyncGenerator[tuple[int, StreamEvent], None]  # with the index of the prompt
    Arrival = tuple[int, StreamEvent] | Exception | None

T = TypeVar("T")

_MERGE_DEPTH = 64  # events waiting for a slow client; then the prompts' streams wait too


class Source(Protocol):
    """Where events come from: a generation, or a kept request that its client comes back to."""

    @property
    def is_ready(self) -> bool:
        """Whether every model it needs is in memory."""
        ...

    def events(self) -> Numbered:
        """(index of the prompt, event) as they come."""
        ...


class ChunkWriter(Protocol):
    """Writes events as SSE frames."""

    @property
    def ending(self) -> Ending:
        """How the stream ends and lasts."""
        ...

    def write(self, prompt: int, event: StreamEvent, /) -> bytes:
        """Frames of one event of one prompt; empty if it shows nothing."""
        ...

    def end(self) -> bytes:
        """Frames after the last event."""
        ...


class WholeWriter(Protocol):
    """Collects events into one body."""

    def add(self, prompt: int, event: StreamEvent, /) -> None:
        """Take in one event of one prompt."""
        ...

    def whole(self) -> bytes:
        """The body."""
        ...


class GenerationCall:
    """The prompts of one HTTP request, run side by side.

    Args:
        context: of the server.
        prefix: of the answer's id.
        request: the HTTP request.
        requests: one a prompt.
        origins: where the places of the requests stand in the caller's body; None: they are the caller's.

    Attributes:
        id: the answer's `id`.
        requests: as given.
        origins: as given.
        runtime_ids: the runtime's request ids, one a prompt.
    """

    def __init__(
        self,
        context: ServerContext,
        prefix: str,
        request: Request,
        requests: Sequence[GenerateRequest],
        origins: OriginRules | None = None,
    ) -> None:
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.requests = requests
        self.origins = origins
        self._context = context
        self._names = (request.state.request_id, self.id)
        self._owner = request.state.key_digest
        self._route = request.scope["route"].path
        several = len(requests) > 1
        self.runtime_ids = [f"{self.id}-{i}" if several else self.id for i in range(len(requests))]
        for runtime_id in self.runtime_ids:
            _note_parent(request, runtime_id)

    def __repr__(self) -> str:
        return f"GenerationCall({self.id}, {len(self.requests)} prompts)"

    def events(self) -> Numbered:
        """(index of the prompt, event) as they come; closing it cancels every prompt.

        Iterating raises the StokerError of the first prompt that failed, with places of the caller's body;
        the others are cancelled.
        """
        return merged([self._one(index) for index in range(len(self.requests))])

    @property
    def is_ready(self) -> bool:
        """Whether every model it needs is in memory."""
        runtime = self._context.runtime
        needed = {runtime.resolve(request.model).id for request in self.requests}
        ready = {status.id for status in runtime.model_states() if status.state == "ready"}
        return needed <= ready

    async def _one(self, index: int) -> Numbered:
        request = self.requests[index]
        named = nullcontext() if self.origins is None else self.origins.named()
        with self._context.metrics.request(kind_of(request), request.priority) as meter, named:
            stream = self._context.runtime.stream(
                request,
                request_id=self.runtime_ids[index],
                names=self._names,
                owner=self._owner,
                route=self._route,
            )
            async with aclosing(stream) as events:
                async for event in events:
                    meter.note(event)
                    yield index, event


async def in_one_call(request: Request, kind: CallKind, work: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """What a call of the library gives that may be several requests; it is cancelled when the client leaves.

    Args:
        request: the HTTP request.
        kind: of the call.
        work: begins it; gets as keyword arguments what the call is known by: an id, the `X-Request-Id`, the
            owner and the route.

    Raises:
        ClientGoneError: the client left while it ran.
        RequestCancelledError: it was cancelled by its id.
        StokerError: what ended it.
    """
    call_id, names = f"{kind}-{uuid.uuid4().hex}", (request.state.request_id,)
    route = request.scope["route"].path
    _note_parent(request, call_id)
    running = work(request_id=call_id, names=names, owner=request.state.key_digest, route=route)
    return await while_connected(running, request.receive)


def _note_parent(request: Request, request_id: str) -> None:
    """Let the trace of a request begin where the caller's `traceparent` says, if there are traces."""
    tracing = request.app.state.tracing
    if tracing is not None:
        tracing.comes_from(request_id, request.headers)


def merged(streams: Sequence[Numbered]) -> Numbered:
    """The events of several prompts' streams as they come; closing it closes all of them.

    Iterating raises the StokerError of the first stream that failed; the others are closed.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[Numbered]) -> Numbered:
    arrived: asyncio.Queue[Arrival] = asyncio.Queue(_MERGE_DEPTH)
    tasks = [asyncio.ensure_future(_forward(stream, arrived)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            arrival = await arrived.get()
            if arrival is None:
                num_open -= 1
            elif isinstance(arrival, Exception):
                raise arrival
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: Numbered, arrived: asyncio.Queue[Arrival]) -> None:
    """Pass one stream's events on, then None or what ended it."""
    try:
        async with aclosing(stream) as events:
            async for event in events:
                await arrived.put(event)
    except Exception as error:  # noqa: BLE001 - raised again where the streams meet
        await arrived.put(error)
    else:
        await arrived.put(None)


def kind_of(request: GenerateRequest | KeptRequest) -> str:
    """The kind of a request that generates."""
    return "chat" if request.is_chat else "completion"


class AnswerReading:
    """One chat answer with one choice as it is read from its stream: what a typed writer asks of it.

    Attributes:
        reason: why it ended; None: it has not.
        stop_text: the stop string of the caller that ended it.
        usage: known at its end.
        timings: likewise; None: it has not ended, or nothing was generated.
    """

    def __init__(self, form: AnswerForm, seed: str) -> None:
        self._readers = ChoiceReaders(form, seed)
        self.reason: FinishReason | None = None
        self.stop_text: str | None = None
        self.usage = Usage()
        self.timings: Timings | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that were read as reasoning."""
        return self._readers.num_reasoning_tokens

    def read(self, event: StreamEvent) -> list[AnswerEvent]:
        """What an event adds to the answer."""
        if isinstance(event, Finished):
            self.usage, self.timings = event.usage, event.timings
        if not isinstance(event, Delta):
            return []
        found = self._readers.read(event)
        if event.finish_reason is not None:
            self.reason = self._readers.finish_reason(event)
            self.stop_text = None if event.stop_text in TURN_ENDS else event.stop_text
        return found


# ------------------------------------------------------------ answers


def streamed(source: Source, writer: ChunkWriter, keepalive_s: float) -> EventStream:
    """The events of `source` as server-sent events.

    The headers tell the place in the queue at arrival and, where known, the seconds to go (SPEC Q14); what
    changes while it waits or stands still comes as comments, which clients ignore unless they know them.
    X-Stoker-Cache tells what the first prompt to get a slot found in the cache (SPEC C13); a stream that had
    to begin while it still waited has no such header, only the usage at its end. Where a model has to be
    loaded it begins a little later, as a load that is refused is an ordinary HTTP error.
    """
    headers: dict[str, str] = {}
    grace_s = GRACE_S if source.is_ready else LOADING_GRACE_S
    return EventStream(_frames(source, writer, headers), headers, keepalive_s, grace_s, writer.ending)


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
            if type(event) is not Delta and isinstance(event, Notice):
                yield _notice(event, headers, writer.ending.note)
                if not isinstance(event, Admitted):  # until then it may still be refused, with a status
                    continue
            if data := writer.write(prompt, event):
                yield data
    yield writer.end()


def _notice(event: Notice, headers: dict[str, str], note: Callable[[str], bytes]) -> bytes:
    """The note that tells of it; the first place, and what the cache had, go to the headers.

    An empty frame lets the client have the headers now, not with its first token.
    """
    if isinstance(event, Admitted):
        headers.setdefault(CACHE_HEADER, _cache_header(event.cache_source, event.cached_tokens))
        return b""
    if not isinstance(event, Queued):
        return note(type(event).__name__.lower())
    eta = "" if event.eta_s is None else f"{event.eta_s:.1f}"
    is_first = POSITION_HEADER not in headers
    if is_first:
        headers[POSITION_HEADER] = str(event.position)
        if eta:
            headers[ETA_HEADER] = eta
    if is_first and event.position == 0:
        return b""
    return note(f"queued position={event.position}" + (f" eta_s={eta}" if eta else ""))


async def _collect(source: Source, writer: WholeWriter) -> tuple[bytes, Usage]:
    usages: list[Usage] = []
    async with aclosing(source.events()) as events:
        async for prompt, event in events:
            writer.add(prompt, event)
            if isinstance(event, Finished):
                usages.append(event.usage)
    return writer.whole(), total_usage(usages)
