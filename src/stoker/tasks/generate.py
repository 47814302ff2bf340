"""Deltas of a completion and of a chat: from the keyword arguments of a call to a request and its stream.

Owns the order of the steps. Fields are `fields`', the conversation is laid out and read by `chat`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, Unpack

from stoker.client.requests.stream import OnNotice, StreamEvent, TextDelta, text_deltas
from stoker.errors import StokerError
from stoker.images.turns import with_images
from stoker.ipc.request import GenerateRequest
from stoker.tasks.chat import chat_deltas, offer_of
from stoker.tasks.fields import (
    ConversationKeywords,
    GenerateKeywords,
    Message,
    Prompt,
    struct_fields,
    turns_of,
    warn_former,
    with_sampling_defaults,
)
from stoker.tasks.states import States
from stoker.tasks.tensor_call import TaskRuntime

__all__ = ["chatted", "generated"]


class GeneratingRuntime(TaskRuntime, Protocol):
    """What a generation takes of a runtime."""

    @property
    def states(self) -> States:
        """Saved states, which a request may begin from."""
        ...

    def stream(
        self, request: GenerateRequest, request_id: str | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request."""
        ...


async def generated(
    runtime: GeneratingRuntime, prompt: Prompt | GenerateRequest, **fields: Unpack[GenerateKeywords]
) -> AsyncGenerator[TextDelta, None]:
    """See `Runtime.generate`."""
    given = _current(fields)
    request_id, on_notice = given.pop("request_id", None), given.pop("on_notice", None)
    given = with_sampling_defaults(prompt, given, _sampling_defaults(runtime, prompt, given))
    request = await runtime.states.request(prompt, **given)
    async with aclosing(_texts(runtime, request, request_id, on_notice)) as deltas:
        async for delta in deltas:
            yield delta


async def chatted(
    runtime: GeneratingRuntime, messages: str | Sequence[Message], **fields: Unpack[ConversationKeywords]
) -> AsyncGenerator[TextDelta, None]:
    """See `Runtime.chat`."""
    given = _current(fields)
    request_id, on_notice = given.pop("request_id", None), given.pop("on_notice", None)
    tools, choice = given.pop("tools", None), given.pop("tool_choice", None)
    is_parallel, tool_format = given.pop("parallel_tool_calls", True), given.pop("tool_format", None)
    offer = offer_of(tools, choice, is_parallel=is_parallel, tool_format=tool_format)
    shown = with_images(turns_of(messages), given.pop("images", ()))
    plan = await runtime.prepare_chat(
        shown,
        offer,
        model=given.get("model", "default"),
        template_args=given.pop("template_args", None),
    )
    given = with_sampling_defaults("", given, _sampling_defaults(runtime, "", given))
    asked = plan.fields(given)
    if plan.images:
        asked["pictures"] = tuple(taken.picture for taken in await runtime.images.take(plan.images))
    request = await runtime.states.request(plan.prompt, **asked)
    async with (
        aclosing(_texts(runtime, request, request_id, on_notice)) as texts_only,
        aclosing(chat_deltas(texts_only, plan.form)) as deltas,
    ):
        async for delta in deltas:
            yield delta


def _current(fields: GenerateKeywords | ConversationKeywords) -> dict[str, Any]:
    warn_former(fields)
    return struct_fields(fields)


def _sampling_defaults(
    runtime: GeneratingRuntime, prompt: Prompt | GenerateRequest, given: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Those of the model that is to answer; None where it cannot, which its stream then says."""
    asked = prompt.model if isinstance(prompt, GenerateRequest) else "default"
    with suppress(StokerError):
        return runtime.resolve(given.get("model", asked)).sampling_defaults
    return None


async def _texts(
    runtime: GeneratingRuntime, request: GenerateRequest, request_id: str | None, on_notice: OnNotice | None
) -> AsyncGenerator[TextDelta, None]:
    async with (
        aclosing(runtime.stream(request, request_id)) as events,
        aclosing(text_deltas(request, events, on_notice)) as deltas,
    ):
        async for delta in deltas:
            yield delta
