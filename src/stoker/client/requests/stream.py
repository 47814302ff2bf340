"""The stream of one request: filled by the table, read by one consumer, bounded however slow that one is.

Owns merging: past MAX_WAITING entries the deltas of a choice join the last one that waits, and of the notices
(place in the queue, admitted, parked, paused, resumed) only the newest stays. Progress replaces progress, a
place the one before it; of admissions only the first is passed on. No text is lost, and what waits is at most
the request's own tokens. Owns also the pace, by which tokens that one long step gave are read one after the
other while the next step is computed, and how the events of a generation read as pieces of text.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stoker.client.requests.record import joined
from stoker.errors import error_from_info
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    PromptEcho,
    Queued,
    Resumed,
    StateReady,
)
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from stoker.ipc.events import Event
    from stoker.ipc.request import GenerateRequest

MAX_WAITING = 256

Notice = Queued | Admitted | Parked | Paused | Resumed
"""How a request stands between its tokens; true when it was sent."""

StreamEvent = Notice | PrefillProgress | PromptEcho | StateReady | Delta | Finished

OnNotice = Callable[[Notice | PrefillProgress], None]
"""Called with what a request waits for: its place, its prompt's progress, interruptions and their end."""


class ToolCall(msgspec.Struct, frozen=True):
    """A function that the model wants called; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one choice's text; the last of all carries `finish_reason`, `usage` and `timings`.

    Of a conversation's answer, `text` is without `reasoning`, and without the `tool_calls` that it makes.
    `index` is the choice's, `request_id` the one by which the request is cancelled, paused and resumed.
    """

    text: str = ""
    index: int = 0
    request_id: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """The former name of `tool_calls`."""
        warnings.warn("calls is tool_calls now", DeprecationWarning, stacklevel=2)
        return self.tool_calls


class RequestStream:
    """Async iterator over a request's events; the last is `Finished`, a `Failed` is raised.

    Args:
        on_abandon: called once when the consumer leaves before the end.

    Attributes:
        has_returns: each admission is told, not only the first.
    """

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        self._on_abandon = on_abandon
        self.has_returns = False
        # Deltas that will be read as one wait as a list: joined only then, merging costs nothing.
        self._waiting: deque[list[Delta] | StreamEvent | Failed] = deque()
        self._runs: dict[int, list[Delta]] = {}  # the last that waits of each choice
        self._reader: asyncio.Future[None] | None = None  # waits for the next event
        self._due_s = 0.0  # when the next delta of the same step is to be read, by the loop; 0: at once
        self._is_admitted = False
        self._is_ended = False  # the terminal event was pushed
        self._is_over = False  # the consumer has read it, or has left

    def __repr__(self) -> str:
        return f"<RequestStream waiting={len(self._waiting)} ended={self._is_ended}>"

    @property
    def is_over(self) -> bool:
        """Whether the consumer has read the terminal event, or has left."""
        return self._is_over

    def push(self, event: Event) -> None:
        """Add an event; what comes after the terminal one, or after the consumer left, is ignored."""
        if self._is_ended or self._is_over:
            return
        if type(event) is Delta:
            self._push_delta(event)
        else:
            self._push_other(event)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _push_other(self, event: Event) -> None:
        match event:
            case Queued() | PrefillProgress() if self._waiting and type(self._waiting[-1]) is type(event):
                self._waiting[-1] = event
            case Admitted() if self._is_admitted and not self.has_returns:
                return  # of another choice, or of a return: what the first one found counts
            case Queued() | Admitted() | Parked() | Paused() | Resumed():
                self._is_admitted |= type(event) is Admitted
                self._push_notice(event)
            case Finished() | Failed():
                self._is_ended = True
                self._waiting.append(event)
            case PrefillProgress() | PromptEcho() | StateReady():
                self._waiting.append(event)

    def _push_notice(self, notice: Notice) -> None:
        if len(self._waiting) >= MAX_WAITING:
            passing = (Notice, PrefillProgress)
            self._waiting = deque(entry for entry in self._waiting if not isinstance(entry, passing))
        self._waiting.append(notice)

    def _push_delta(self, delta: Delta) -> None:
        run = self._runs.get(delta.index)
        if run is not None and len(self._waiting) >= MAX_WAITING:
            run.append(delta)
        else:
            run = self._runs[delta.index] = [delta]
            self._waiting.append(run)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._waiting or (self._due_s and self._is_early()):
            if self._is_over:
                raise StopAsyncIteration
            await self._next_push()
        event = self._waiting.popleft()
        self._due_s = 0.0
        match event:
            case list():
                last = event[-1]
                if self._runs.get(last.index) is event:
                    del self._runs[last.index]
                if last.pause_s:
                    self._due_s = asyncio.get_running_loop().time() + last.pause_s
                return last if len(event) == 1 else joined(event)
            case Failed():
                self._is_over = True
                raise error_from_info(event.error)
            case Finished():
                self._is_over = True
        return event

    def _is_early(self) -> bool:
        """Whether all that waits is of the step that the last delta was of, and not due yet."""
        if asyncio.get_running_loop().time() >= self._due_s:
            return False
        *before, last = [
            entry[0] if isinstance(entry, list) and len(entry) == 1 else None for entry in self._waiting
        ]
        return last is not None and all(delta is not None and delta.pause_s for delta in before)

    async def _next_push(self) -> None:
        """Until something is pushed, or what waits is due."""
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_at(self._due_s, self._wake) if self._waiting else None
        try:
            await self._reader
        finally:
            if timer is not None:
                timer.cancel()

    async def aclose(self) -> None:
        """Leave; a request that has not ended is cancelled in the engine. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._waiting.clear()
            self._wake()
            if not self._is_ended:
                self._on_abandon()


async def text_deltas(
    request: GenerateRequest, events: AsyncIterator[StreamEvent], on_notice: OnNotice | None = None
) -> AsyncGenerator[TextDelta, None]:
    """The text of a request's stream; what is no text goes to `on_notice`."""
    num_open = request.n
    last: Delta | None = None
    async for event in events:
        match event:
            case PromptEcho() if request.echo:
                for index in range(request.n):
                    yield TextDelta(
                        text=event.text, index=index, request_id=event.request_id, logprobs=event.logprobs
                    )
            case Delta():
                num_open -= event.finish_reason is not None
                if num_open == 0:
                    last = event  # it waits for the usage
                else:
                    yield _piece(event.request_id, event, None)
            case Finished():
                yield _piece(event.request_id, last, event)
            case Queued() | Admitted() | Parked() | Paused() | Resumed() | PrefillProgress() if on_notice:
                on_notice(event)


def _piece(request_id: str, delta: Delta | None, finished: Finished | None) -> TextDelta:
    return TextDelta(
        request_id=request_id,
        text=delta.text if delta else "",
        index=delta.index if delta else 0,
        token_ids=delta.token_ids if delta else [],
        logprobs=delta.logprobs if delta else None,
        finish_reason=delta.finish_reason if delta else FinishReason.LENGTH,  # no token was asked for
        usage=finished.usage if finished else None,
        timings=finished.timings if finished else None,
    )
