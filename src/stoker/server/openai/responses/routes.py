"""The routes of responses: made, counted, compacted, read again, forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.chat.answer import AnswerForm, WholeAnswer
from stoker.chat.turns import text_of
from stoker.client.requests.stream import StreamEvent
from stoker.errors import InvalidRequestError, ResponseNotFoundError, UnsupportedError
from stoker.server.context import ServerContext
from stoker.server.inbound.body import Described, read_body
from stoker.server.openai.chat import prompt_tokens, translated_turn
from stoker.server.openai.responses.body import CompactRequest, InputTokensRequest, ResponsesRequest
from stoker.server.openai.responses.continuation import AskedResponse, Earlier, begun_response
from stoker.server.openai.responses.items import Item, item_id, sealed, whole_items
from stoker.server.openai.responses.store import ItemSpool, ResponseStore, StoredResponse
from stoker.server.openai.responses.writer import (
    Keep,
    ResponseChunks,
    ResponseEvents,
    ResponseHead,
    WholeResponse,
    usage_fields,
)
from stoker.server.reply import json_response
from stoker.server.streaming import AnswerReading, collected, streamed

log = logging.getLogger(__name__)

MAX_LISTED = 100
"""Items of one answer."""
_LISTED = 20


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generate"])
    _add_generating(routes, context)
    _add_stored(routes, context)
    return routes


def _add_generating(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/v1/responses", openapi_extra=Described(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer an input."""
        asked = await _earlier(context, request).asked(await read_body(request, ResponsesRequest))
        turn, head = await begun_response(context, request, asked)
        is_stream = asked.body.stream
        kept = await _keeping(context, request, asked, head) if head.echo["store"] else None
        del asked  # its images are megabytes, and it may wait for long
        events = ResponseEvents(head, turn.form, kept)
        if not is_stream:
            return turn.tell(await collected(turn.call, WholeResponse(events), request))
        return turn.tell(streamed(turn.call, ResponseChunks(events), context.settings.keepalive_s))

    @routes.post("/v1/responses/input_tokens", openapi_extra=Described(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        """The tokens that the prompt of a response has, images and tools included; nothing is generated."""
        body = await read_body(request, InputTokensRequest)
        num_tokens = await prompt_tokens(context, request, await _earlier(context, request).asked(body))
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    @routes.post("/v1/responses/compact", openapi_extra=Described(CompactRequest))
    async def compact(request: Request) -> Response:
        """A shorter conversation in place of a long one: its system texts, and a summary by the model."""
        asked = await _earlier(context, request).asked(await read_body(request, CompactRequest))
        turn = await translated_turn(context, request, asked, "resp_")
        return turn.tell(await collected(turn.call, _Compaction(turn.call.id, turn.form, asked), request))


def _add_stored(routes: APIRouter, context: ServerContext) -> None:
    @routes.get("/v1/responses/{response_id}")
    async def stored(response_id: str, request: Request) -> Response:
        """A stored response."""
        if request.query_params.get("stream") == "true":
            raise UnsupportedError("a stored response is not streamed again", param="stream")
        return json_response((await _stored(context, request, response_id)).response)

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Response:
        """Forget a stored response; those that went on from it stay."""
        if not await context.responses.delete(request.state.key_digest, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        limit: str = str(_LISTED),
        order: str = "desc",
        after: str | None = None,
    ) -> Response:
        """What a stored response answers, earlier turns included."""
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order is {order[:40]!r}; it is asc or desc", param="order")
        items = (await _stored(context, request, response_id)).items
        return json_response(_listed(items if order == "asc" else items[::-1], limit, after))


async def _keeping(
    context: ServerContext, request: Request, asked: AskedResponse, head: ResponseHead
) -> Keep | None:
    """Stores the response when it has come; None: it cannot be, which the log says and the response too."""

    def spooled() -> ItemSpool:
        return context.responses.spooled(asked.items(head.id))

    try:
        spool = await asyncio.to_thread(spooled)
    except OSError as error:
        log.warning("a response is not stored: %s", error)
        head.echo["store"] = False
        return None
    return partial(_keep, context.responses, request.state.key_digest, spool)


def _keep(store: ResponseStore, owner: str, spool: ItemSpool, response: dict[str, Any]) -> None:
    store.keep(owner, response, spool.items)


def _earlier(context: ServerContext, request: Request) -> Earlier:
    return Earlier(context.responses, request.state.key_digest)


async def _stored(context: ServerContext, request: Request, response_id: str) -> StoredResponse:
    found = await context.responses.get(request.state.key_digest, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"Response with id {response_id[:80]!r} not found.", param="response_id")


def _listed(items: Sequence[Item], limit: str, after: str | None) -> dict[str, Any]:
    """A page of items behind that of the id `after`."""
    number = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LISTED)) else 0
    if not 1 <= number <= MAX_LISTED:
        raise InvalidRequestError(f"limit is {limit[:40]!r}; it is 1 to {MAX_LISTED}", param="limit")
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after: there is no item {after[:80]!r}", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + number]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + number < len(items),
    }


class _Compaction:
    """Collects the summary that a model writes, into a compaction object."""

    def __init__(self, own_id: str, form: AnswerForm, asked: AskedResponse) -> None:
        self._id = own_id
        self._asked = asked
        self._reading = AnswerReading(form, own_id)
        self._answer = WholeAnswer()

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        self._answer.add(self._reading.read(event))

    def whole(self) -> bytes:
        """The body."""
        items = [*self._asked.earlier, *whole_items(self._asked.body.own_items, self._id)]
        kept = [item for item in items if item.get("role") in ("system", "developer")]
        text = self._answer.content.strip() or _transcript(items)
        own_id = item_id(self._id, "compaction", len(kept))
        document = {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*kept, {"id": own_id, "type": "compaction", "encrypted_content": sealed(text)}],
            "usage": usage_fields(self._reading.usage, self._reading.num_reasoning_tokens),
        }
        return msgspec.json.encode(document)


def _transcript(items: Sequence[Item]) -> str:
    """What was said, where the model has no words for it."""
    said = [(item.get("role"), text_of(item.get("content"))) for item in items]
    return "\n".join(f"{role}: {text}" for role, text in said if role and text)
