"""/v1/choose: which of some texts is the likeliest after a prompt.

What a score is, is `stoker.tasks.choose`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import UnsupportedError
from stoker.server.headers import header_fields
from stoker.server.inbound.body import described, read_body
from stoker.server.inbound.disconnect import while_connected
from stoker.server.native.choose_body import ChooseRequest, answer_of
from stoker.server.native.states import json_later
from stoker.tasks.choose import Choosing, require_choosing

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.server.context import ServerContext


def router(context: ServerContext) -> APIRouter:
    """The route of choosing."""
    routes = APIRouter(tags=["choose"])
    choose = _ChooseRoute(context)
    routes.post("/v1/choose", openapi_extra=described(ChooseRequest))(choose.choose)
    return routes


class _ChooseRoute:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._choosing = Choosing(context.runtime)

    async def choose(self, request: Request) -> Response:
        """The choices, the likeliest first; `score` is in nats a token, the lower the better."""
        body = await read_body(request, ChooseRequest)
        body.check()
        self._context.require_ready()
        info = self._context.runtime.resolve(body.model)
        require_choosing(info)
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            **await self._prompt(body, request, info),
            "model": info.asked_as,
        }
        work = self._choosing.choose(choices=body.choices, **fields)
        found = await while_connected(work, request.receive)
        return await json_later(answer_of(found))

    async def _prompt(self, body: ChooseRequest, request: Request, info: ModelInfo) -> dict[str, Any]:
        if body.prompt is not None:
            return {"prompt": body.prompt}
        args = body.chat_template_kwargs or {}
        how = {"model": info.id, "template_args": args, "owner": request.state.key_digest}
        turns = await asyncio.to_thread(body.turns, info.id)
        plan = await self._context.runtime.prepare_chat(turns, **how)
        if plan.images:
            where = plan.images[0].param
            raise UnsupportedError(f"{where}: choices are scored after text, not after pictures", param=where)
        return {"prompt": plan.prompt, "is_chat": True}
