"""Calls that are requests each of which comes back as a tensor: texts to embed or to score, states.

How many of them are under way at once is `backpressure`'s, their id and their deadline are the group's, what
the tensors mean is known to the task that asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any, Protocol

from stoker.chat.conversation import NO_TOOLS, ToolOffer
from stoker.client.requests.group import KnownAs, RequestGroup
from stoker.errors import EngineError, StokerError
from stoker.images.intake import Intake
from stoker.ipc.events import Finished, StateReady
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import CallKind
from stoker.tasks.backpressure import Backpressure
from stoker.tasks.chat import ChatPlan
from stoker.tasks.fields import Message


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
        RequestCancelledError: the call was cancelled by its id; none of its requests is live any more.
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
        answers = [answer for task in tasks if (answer := task.result()) is not None]
        if len(answers) < len(tasks):
            raise group.cancelled_error()
        return answers


class _TensorCall:
    """The requests of one call."""

    def __init__(self, group: RequestGroup) -> None:
        self._group = group
        self._pressure = Backpressure()

    async def answer(self, request: GenerateRequest) -> Answered | None:
        """What one request comes back with; None: the call was cancelled.

        Raising would cancel the other tasks of the call before the engine has told the end of each.
        """
        try:
            return await self._pressure.run(partial(self._ask, request))
        except StokerError:
            if not self._group.is_cancelled:
                raise
            return None

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
