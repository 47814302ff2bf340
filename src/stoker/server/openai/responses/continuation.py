"""What a response is asked for with the turns that it continues, and how it is made.

HTTP and WebSocket both go this way: earlier items from the store or the connection, then the chat completion
that asks for the same, then what the response repeats of its request and where it is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError, PreviousResponseError
from stoker.server.openai.chat import ChatTurn, Translation, translated_turn
from stoker.server.openai.responses.body import ResponsesRequest
from stoker.server.openai.responses.items import Item, check_outputs, reference_of, response_of, whole_items
from stoker.server.openai.responses.store import StoredResponse
from stoker.server.openai.responses.writer import REASONING_EVENT, ResponseHead
from stoker.server.reply import ignored_header

if TYPE_CHECKING:
    from starlette.requests import Request

    from stoker.server.context import ServerContext
    from stoker.server.openai.responses.store import ResponseStore

SPECIFICATION_HEADER = "OpenResponses-Version"
"""A request with it gets Open Responses' names of events. Where they are not OpenAI's, clients know
OpenAI's, even those made for Open Responses, and the specification's schemas its own."""


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A body, its references resolved, and the items of what it continues.

    Attributes:
        body: as it came, but for its references.
        earlier: in their whole form.
    """

    body: ResponsesRequest
    earlier: Sequence[Item] = ()

    def to_chat(self) -> Translation:
        """The chat completion that asks for the same. Raises InvalidRequestError, UnsupportedError."""
        check_outputs(self.earlier, self.body.own_items)
        return self.body.to_chat(self.earlier)

    def items(self, response_id: str) -> list[dict[str, Any]]:
        """All that the response of that id answers."""
        return [*map(dict, self.earlier), *whole_items(self.body.own_items, response_id)]


@dataclass(frozen=True, slots=True)
class Earlier:
    """Where earlier responses of a caller are found.

    Attributes:
        store: of the server.
        owner: digest of the caller's API key.
        last: the response that this connection made last, stored or not.
    """

    store: ResponseStore
    owner: str
    last: StoredResponse | None = None

    async def asked(self, body: ResponsesRequest) -> AskedResponse:
        """The body with what it refers to.

        Raises:
            PreviousResponseError: the response that it continues is not there.
            InvalidRequestError: it refers to an item that is not there.
        """
        earlier: Sequence[Item] = ()
        if body.previous_response_id:
            found = await self._find(body.previous_response_id)
            if found is None:
                text = f"previous_response_id: no response {body.previous_response_id[:80]!r} is stored"
                raise PreviousResponseError(text, param="previous_response_id")
            earlier = found.conversation
        if isinstance(body.input, list) and any(map(reference_of, body.input)):
            items = [await self._item(item, index, earlier) for index, item in enumerate(body.input)]
            body = body.model_copy(update={"input": items})
        return AskedResponse(body, earlier)

    async def _find(self, response_id: str) -> StoredResponse | None:
        if self.last is not None and self.last.response["id"] == response_id:
            return self.last
        return await self.store.get(self.owner, response_id)

    async def _item(self, item: Item, index: int, earlier: Sequence[Item]) -> Item:
        """The item, or what it stands for."""
        own_id = reference_of(item)
        if own_id is None:
            return item
        found = next((one for one in earlier if one.get("id") == own_id), None)
        if found is None and (response_id := response_of(own_id)) is not None:
            stored = await self._find(response_id)
            items = stored.conversation if stored else []
            found = next((one for one in items if one.get("id") == own_id), None)
        if found is None:
            text = f"input.{index}.id: no item {own_id[:80]!r} is stored"
            raise InvalidRequestError(text, param=f"input.{index}.id")
        return found


async def begun_response(
    context: ServerContext, request: Request, asked: AskedResponse
) -> tuple[ChatTurn, ResponseHead]:
    """The turn that answers, and the head of its response.

    Raises:
        CallerError: the body asks for what cannot be.
        NotReadyError: no model is ready.
    """
    body = asked.body
    turn = await translated_turn(context, request, asked, "resp_")
    echo = await asyncio.to_thread(body.echo, turn.request, ignored_header(turn.left_out))
    if not context.responses.is_on:
        echo["store"] = False
    head = ResponseHead(
        turn.call.id,
        turn.request.model,
        int(time.time()),
        echo,
        body.namespaces(),
        max_calls=body.max_tool_calls,
        seals_reasoning=body.asks_reasoning_back,
        reasoning_event="reasoning" if SPECIFICATION_HEADER in request.headers else REASONING_EVENT,
    )
    return turn, head
