"""/v1/states (SPEC K5, D8, I6): states of recurrent models, and embeddings of prompts by state.

With API keys a state belongs to the key that made it. What the routes do is `stoker.tasks.states`'s.
"""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.ipc.status import CallKind
from stoker.server.fields import (
    InlineState,
    RequestFields,
    check_tokens,
    decoded,
    header_fields,
    present,
    state_bytes,
)
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Described, Many, TokenIds, read_body
from stoker.server.openai.conversation import Message, laid_out, turns_of
from stoker.server.reply import InputUsage, json_response, large_json_response
from stoker.server.streaming import in_one_call
from stoker.tasks.embed import floats_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.server.context import ServerContext
    from stoker.tasks.states import SavedState, StateEmbedding


MAX_INPUTS = 64
MAX_JSON_FLOATS = 2**20
"""More numbers than these go as base64 only: 4 MB instead of some 20."""


class StateWork(RequestFields):
    """What all work on states takes: the state to begin from beside the fields of every request."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    state: str | InlineState | None = None
    cache: bool | None = None

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of `States.save` and `States.embed`, but for the prompt."""
        return super().fields(key_digest) | present(state=state_bytes(self.state), cache=self.cache)


class SaveStateRequest(StateWork):
    """A state to keep: of `prompt` or `messages`, uploaded as `data` (base64), or laid ready as `file`."""

    name: str | None = None
    replace: bool = False
    prompt: str | TokenIds | None = Field(None, validation_alias=AliasChoices("prompt", "input"))
    messages: Many[Message] | None = Field(None, min_length=1)
    data: str | None = None
    file: str | None = None

    def source(self) -> str:
        """Which of the four was given.

        Raises:
            InvalidRequestError: none, or several.
        """
        names = ("prompt", "messages", "data", "file")
        found = [name for name in names if getattr(self, name) is not None]
        if len(found) != 1:
            text = " and ".join(found) or "none of them"
            raise InvalidRequestError(f"one of {', '.join(names)} is taken, got {text}", param="prompt")
        return found[0]


class StateEmbeddingRequest(StateWork):
    """One prompt, or for /v1/embeddings several, to embed by state."""

    kind: str | None = None
    input: str | Many[str] | TokenIds | Many[TokenIds] = Field(
        validation_alias=AliasChoices("input", "prompt")
    )
    encoding_format: Literal["float", "base64"] | None = None

    def inputs(self, n_vocab: int, most: int | None = None) -> list[str | tuple[int, ...]]:
        """Every prompt, at most `most`: text, or token ids of a vocabulary of `n_vocab`.

        Raises:
            InvalidRequestError: none, too many, or a token id out of range.
        """
        given: Any = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        most = most or MAX_INPUTS
        if not 0 < len(given) <= most:
            raise InvalidRequestError(f"{len(given)} inputs; 1 to {most} are taken", param="input")
        return [prompt_of(entry, n_vocab, "input") for entry in given]

    def encoded(self, embedding: StateEmbedding) -> list[float] | str:
        """The numbers as the caller wants them.

        Raises:
            InvalidRequestError: too many to be written as JSON numbers.
        """
        count = len(embedding.data) // 4
        if self.encoding_format != "base64" and count > MAX_JSON_FLOATS:
            raise InvalidRequestError(
                f"the state has {count} numbers, at most {MAX_JSON_FLOATS} go as JSON;"
                ' ask for "encoding_format": "base64"',
                param="encoding_format",
            )
        return self.written(embedding.data)

    def written(self, data: bytes) -> list[float] | str:
        """Little-endian float32 as base64, or as numbers."""
        if self.encoding_format == "base64":
            return base64.b64encode(data).decode()
        return floats_of(data).tolist()


def prompt_of(given: str | list[int], n_vocab: int, param: str) -> str | tuple[int, ...]:
    """Text as it is, token ids checked. Raises InvalidRequestError."""
    if isinstance(given, str):
        return given
    check_tokens(given, n_vocab, param)
    return tuple(given)


class StateEmbeddingAnswer(msgspec.Struct, frozen=True):
    """One embedding by state; `data` is float32, row-major, in base64 little-endian."""

    model: str
    shape: tuple[int, ...]
    data: list[float] | str
    usage: InputUsage
    object: str = "state_embedding"


BINARY = "application/octet-stream"
FINISHED: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False}
"""How turns are laid out of which none is to be answered."""


def router(context: ServerContext) -> APIRouter:
    """The routes of states and of one prompt's embedding by state."""
    routes = APIRouter(tags=["states"])
    states = _StateRoutes(context)
    body = Described(SaveStateRequest)
    routes.post("/v1/states", openapi_extra=body)(states.save)
    routes.get("/v1/states")(states.list)
    routes.get("/v1/states/{state_id}")(states.get)
    routes.get("/v1/states/{state_id}/content")(states.content)
    routes.delete("/v1/states/{state_id}")(states.delete)
    inputs = Described(StateEmbeddingRequest)
    routes.post("/v1/states/embeddings", openapi_extra=inputs)(states.embed)
    return routes


class _StateRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def save(self, request: Request) -> Response:
        """Keep a state: of a prompt or a conversation, or a safetensors file.

        The file comes as `data` in base64, or as the body itself with the type application/octet-stream and
        `model` and `name` in the query.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == BINARY:
            return await self._upload(request)
        body = await read_body(request, SaveStateRequest)
        source = body.source()
        self._context.require_ready()
        states, owner = self._context.runtime.states, request.state.key_digest
        info = states.recurrent("default" if body.model is None else body.model)
        if source in {"data", "file"}:
            sent, file = body.data, body.file or ""
            given = states.dropped(file) if sent is None else await asyncio.to_thread(decoded, sent, "data")
            saved = await states.put(given, model=info.id, name=body.name, owner=owner, replace=body.replace)
            return json_response(_saved(saved))
        own = await asyncio.to_thread(body.fields, owner)
        fields = {**own, **header_fields(request), "model": info.id}
        prompt: str | tuple[int, ...]
        if body.messages is not None:
            turns = await asyncio.to_thread(turns_of, body.messages, info.id)
            how = {"model": info.id, "template_args": FINISHED, "owner": owner}
            prompt = (await laid_out(self._context, request, turns, **how)).prompt
            fields["is_chat"] = True
        else:
            prompt = prompt_of(body.prompt or "", info.n_vocab, "prompt")
        work = partial(states.save, prompt, name=body.name, replace=body.replace, **fields)
        return json_response(_saved(await in_one_call(request, CallKind.STATE, work)))

    async def _upload(self, request: Request) -> Response:
        async with self._context.bodies.received(request.receive) as received:
            data = bytes(received)
        self._context.require_ready()
        model, name = request.query_params.get("model", "default"), request.query_params.get("name")
        owner = request.state.key_digest
        return json_response(
            _saved(await self._context.runtime.states.put(data, model=model, name=name, owner=owner))
        )

    async def list(self, request: Request) -> Response:
        """Every saved state of the caller, the newest first."""
        found = await self._context.runtime.states.list(request.state.key_digest)
        return json_response({"object": "list", "data": [_saved(state) for state in found]})

    async def get(self, request: Request, state_id: str) -> Response:
        """What is known of a saved state."""
        return json_response(
            _saved(await self._context.runtime.states.get(state_id, request.state.key_digest))
        )

    async def content(self, request: Request, state_id: str) -> Response:
        """The state as a safetensors file."""
        data = await self._context.runtime.states.content(state_id, request.state.key_digest)
        name = {"Content-Disposition": f'attachment; filename="{state_id}.safetensors"'}
        return Response(data, headers=name, media_type=BINARY)

    async def delete(self, request: Request, state_id: str) -> Response:
        """Forget a saved state."""
        await self._context.runtime.states.delete(state_id, request.state.key_digest)
        return json_response({"id": state_id, "object": "state.deleted", "deleted": True})

    async def embed(self, request: Request) -> Response:
        """The recurrent state of one prompt, or its last hidden state, with the shape."""
        body = await read_body(request, StateEmbeddingRequest)
        (found,) = await embedded_by_state(self._context, request, body, most=1)
        data = await asyncio.to_thread(body.encoded, found)
        return await large_json_response(
            StateEmbeddingAnswer(found.model, found.shape, data, InputUsage.of(found.usage))
        )


async def embedded_by_state(
    context: ServerContext, request: Request, body: StateEmbeddingRequest, most: int | None = None
) -> Sequence[StateEmbedding]:
    """The states that the body's prompts leave, at most `most` of them.

    Raises:
        UnsupportedError: the model is an encoder, which has none.
        StokerError: a request was refused or failed.
    """
    context.require_ready()
    info = context.runtime.resolve(body.model)
    if info.model_class == ModelClass.ENCODER:
        raise UnsupportedError(
            f'{info.id} is an encoder: it has no state; leave "kind" out for vectors of texts', param="kind"
        )
    own = await asyncio.to_thread(body.fields, request.state.key_digest)  # a state of megabytes is decoded
    fields = {**own, **header_fields(request), "model": info.id}
    work = partial(context.runtime.states.embed_all, body.inputs(info.n_vocab, most), **fields)
    return await in_one_call(request, CallKind.STATE, work)


async def initial_state(
    context: ServerContext, request: Request, state: str | InlineState, model: str
) -> dict[str, Any]:
    """The keyword argument of a `GenerateRequest` that a body's `state` is.

    Raises:
        InvalidRequestError: there is no such state, or it is no good.
        UnsupportedError: the model has none to begin from.
    """
    given = state if isinstance(state, str) else await asyncio.to_thread(decoded, state.data, "state")
    states = context.runtime.states
    return {"initial_state": await states.given(given, model=model, owner=request.state.key_digest)}


def _saved(state: SavedState) -> dict[str, Any]:
    return {"object": "state", **msgspec.structs.asdict(state)}
