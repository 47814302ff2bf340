"""A kept request's stream for a client that comes back (SPEC L2): whole, from its first token.

Owns which of the runtime's requests an id stands for and in which form they are written. The runtime decides
what is kept, and for how long.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from stoker.errors import RequestNotFoundError
from stoker.server.anthropic.writer import PING, MessageChunks, MessageHead
from stoker.server.openai.chat_writer import ChatChunks
from stoker.server.openai.completion_writer import TextChunks
from stoker.server.openai.responses_body import default_echo
from stoker.server.openai.responses_writer import ResponseChunks, ResponseHead
from stoker.server.streaming.generation import merged
from stoker.server.streaming.head import Head
from stoker.server.streaming.sse import Ending
from stoker.tasks.chat import form_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from stoker.client.requests.stream import StreamEvent
    from stoker.server.context import ServerContext
    from stoker.server.streaming.delivery import ChunkWriter
    from stoker.server.streaming.generation import Caller


class Attachment:
    """The kept requests behind one name: one, or the prompts of one completion, in order.

    Args:
        context: of the server.
        caller: requests of its API key are found; an operator finds all.
        name: the client's `X-Request-Id`, the answer's id or the runtime's.

    Raises:
        RequestNotFoundError: nothing of that name is kept for this caller.
    """

    def __init__(self, context: ServerContext, caller: Caller, name: str) -> None:
        self._context = context
        found = [
            kept
            for kept in context.runtime.kept()
            if caller.may_steer(kept.owner) and name in (kept.id, *kept.names)
        ]
        if not found:
            raise RequestNotFoundError(f"no request is kept under the id {name!r}", param="id")
        # One X-Request-Id may have been sent with several requests: the last answer is meant.
        answer = found[-1].names[-1] if found[-1].names else found[-1].id
        same = [kept for kept in found if (kept.names[-1] if kept.names else kept.id) == answer]
        self._kept = sorted(same, key=lambda kept: (len(kept.id), kept.id))  # ...-2 before ...-10
        self._answer_id = answer

    def __repr__(self) -> str:
        return f"Attachment({self._answer_id}, {len(self._kept)} prompts)"

    @property
    def is_ready(self) -> bool:
        """It was taken in before; there is nothing to wait for."""
        return True

    def writer(self) -> tuple[ChunkWriter, Ending]:
        """Writes chunks as the request's own route does, with usage at the end; how its stream ends.

        Which route that was is told by the answer's id. What a response repeats of its request is not kept;
        its object shows the defaults.
        """
        first, own = self._kept[0], self._answer_id
        form = form_of(first.note)
        if first.is_chat and own.startswith("resp_"):
            head = ResponseHead(own, first.model, int(time.time()), default_echo())
            responses = ResponseChunks(head, form)
            return responses, Ending(b"", responses.fail)
        if first.is_chat and own.startswith("msg_"):
            messages = MessageChunks(MessageHead(own, first.model), form)
            return messages, Ending(b"", messages.fail, PING)
        chat = Head(own, first.model, first.n, wants_usage=True)
        return ChatChunks(chat, form) if first.is_chat else TextChunks(chat, len(self._kept)), Ending()

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """(index of the prompt, event) as they come; leaving ends nothing.

        Raises:
            StokerError: what ended one of the requests.
        """
        streams = [self._one(index) for index in range(len(self._kept))]
        async with aclosing(merged(streams)) as events:
            async for event in events:
                yield event

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        kept = self._kept[index]
        stream = self._context.runtime.attach(kept.id, owner=kept.owner)
        async with aclosing(stream) as events:
            async for event in events:
                yield index, event
