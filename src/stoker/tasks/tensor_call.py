"""Calls that are requests each of which comes back as a tensor: texts to embed or to score, states.

Owns how many requests of a call are under way at once. Their id and their deadline are the group's, what the
tensors mean is known to the task that asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from typing import Any, Protocol

from stoker.chat.conversation import NO_TOOLS, ToolOffer
from stoker.client.requests.group import KnownAs, RequestGroup
from stoker.errors import EngineError, QueueFullError
from stoker.images.intake import Intake
from stoker.ipc.events import Finished, StateReady
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import CallKind
from stoker.tasks.chat import ChatPlan
from stoker.tasks.fields import Message

MAX_IN_FLIGHT = 64
"""Texts of one call that are under way at once."""


class TaskRuntime(Protocol):
    """What the tasks take of a runtime."""

    @property
    def images(self) -> Intake:
        """Takes in the images of requests."""
        ...

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name."""
        ...

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        offer: ToolOffer = NO_TOOLS,
        *,
        model: str = "default",
        template_args: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """What a conversation asks of the model."""
        ...

    def group(
        self, kind: CallKind, request: GenerateRequest, num_members: int, known_as: KnownAs
    ) -> AbstractContextManager[RequestGroup]:
        """One call that is several requests, under one id while the block runs."""
        ...


Answered = tuple[StateReady, Finished]
"""What a request with `state_output` comes back with."""


async def answers_of(
    runtime: TaskRuntime, kind: CallKind, requests: Sequence[GenerateRequest], known_as: KnownAs
) -> list[Answered]:
    """What each request asked for with `state_output`, in their order; `timeout_s` is for all together.

    Raises:
        RequestCancelledError: the call was cancelled by its id.
        StokerError: one failed; the others are cancelled.
    """
    if not requests:
        return []
    with runtime.group(kind, requests[0], len(requests), known_as) as group:
        call = _TensorCall(group)
        try:
            async with asyncio.TaskGroup() as tasks_of_call:
                tasks = [tasks_of_call.create_task(call.answer(request)) for request in requests]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


class _TensorCall:
    """The requests of one call. Where the queue is at its bound, fewer of them are under way at once."""

    def __init__(self, group: RequestGroup) -> None:
        self._group = group
        self._limit = MAX_IN_FLIGHT
        self._num_running = 0
        self._has_moved = asyncio.Condition()

    async def answer(self, request: GenerateRequest) -> Answered:
        """What one request comes back with."""
        while True:
            async with self._place():
                try:
                    return await self._ask(request)
                except QueueFullError:
                    if self._num_running == 1:  # the requests that wait there are not of this call
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

    async def _ask(self, request: GenerateRequest) -> Answered:
        ready: StateReady | None = None
        async with aclosing(self._group.stream(request)) as events:
            async for event in events:
                match event:
                    case StateReady():
                        ready = event
                    case Finished() if ready is not None:
                        return ready, event
        if self._group.is_cancelled:
            raise self._group.cancelled_error()
        raise EngineError("the request ended without what it asked for")
