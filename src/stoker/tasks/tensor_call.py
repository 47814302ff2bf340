"""One call that is many requests, each of which comes back as a tensor: texts to embed or to score.

Owns how many of a call are under way at once and that their deadline is one. What the tensors mean is the
caller's business, computing the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import msgspec

from stoker.client.requests.stream import StreamEvent
from stoker.errors import EngineError, QueueFullError, RequestTimeoutError
from stoker.ipc.events import Finished, StateReady
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import GenerateRequest
from stoker.ipc.usage import Tensor, Usage

MAX_IN_FLIGHT = 64
"""Texts of one call that are under way at once."""


class Engine(Protocol):
    """What such a call takes of the runtime."""

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request."""
        ...


async def tensors_of(engine: Engine, requests: Sequence[GenerateRequest]) -> list[tuple[Tensor, Usage]]:
    """What each request asked for with `state_output`, in their order; `timeout_s` is for all together.

    Raises:
        StokerError: one failed; the others are cancelled.
    """
    call = _TensorCall(engine, asyncio.get_running_loop().time())
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call.tensor(request)) for request in requests]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class _TensorCall:
    """The requests of one call. Where the line is at its bound, fewer of them are under way at once."""

    def __init__(self, engine: Engine, begun_s: float) -> None:
        self._engine = engine
        self._begun_s = begun_s
        self._limit = MAX_IN_FLIGHT
        self._num_running = 0
        self._has_moved = asyncio.Condition()

    async def tensor(self, request: GenerateRequest) -> tuple[Tensor, Usage]:
        """The tensor of one request as the model gave it."""
        while True:
            async with self._place():
                try:
                    return await self._ask(self._with_time_left(request))
                except QueueFullError:
                    if self._num_running == 1:  # it is others who wait there
                        raise
                    self._limit = min(self._limit, self._num_running - 1)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with self._has_moved:
            await self._has_moved.wait_for(lambda: self._num_running < self._limit)
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            async with self._has_moved:
                self._has_moved.notify_all()

    def _with_time_left(self, request: GenerateRequest) -> GenerateRequest:
        if request.timeout_s is None:
            return request
        left_s = request.timeout_s - (asyncio.get_running_loop().time() - self._begun_s)
        if left_s <= 0:
            raise RequestTimeoutError(
                f"the texts took longer than their timeout_s {request.timeout_s}", param="timeout_s"
            )
        return msgspec.structs.replace(request, timeout_s=left_s)

    async def _ask(self, request: GenerateRequest) -> tuple[Tensor, Usage]:
        tensor: Tensor | None = None
        async with aclosing(self._engine.stream(request)) as events:
            async for event in events:
                match event:
                    case StateReady():
                        tensor = event.tensors[0]
                    case Finished() if tensor is not None:
                        return tensor, event.usage
        raise EngineError("the request ended without what it asked for")
