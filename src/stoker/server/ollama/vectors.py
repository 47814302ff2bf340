"""POST /api/embed and /api/embeddings: vectors of texts as Ollama has them.

A text that is too long is refused with both numbers, unless `truncate` is true: then its end is cut off.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import ContextLengthError, InvalidRequestError
from stoker.ipc.status import CallKind
from stoker.server.context import ServerContext
from stoker.server.fields import Int, header_fields, present
from stoker.server.inbound.body import Described, Many, Name, Named, read_body
from stoker.server.inbound.security import salt_of
from stoker.server.ollama.lines import nanoseconds
from stoker.server.ollama.loading import loaded_or_unloaded
from stoker.server.ollama.names import OllamaBody, asked_model
from stoker.server.ollama.options import kept_seconds
from stoker.server.openai.embeddings import MAX_TEXTS
from stoker.server.reply import json_response, large_json_response
from stoker.server.streaming import in_one_call
from stoker.tasks.embed import embed_texts, require_embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.model import ModelInfo
    from stoker.tasks.embed import TextEmbeddings


class OllamaVectorFields(OllamaBody):
    """What both routes take."""

    model: Name
    truncate: bool | None = None
    options: Named[Any] | None = None
    keep_alive: float | str | None = None


class OllamaEmbedRequest(OllamaVectorFields):
    """Texts to embed."""

    input: str | Many[str] | None = None
    dimensions: Int | None = None

    def texts(self) -> list[str]:
        """Every text. Raises InvalidRequestError: there are too many."""
        found = [self.input] if isinstance(self.input, str) else self.input or []
        if len(found) > MAX_TEXTS:
            text = f"{len(found)} inputs; at most {MAX_TEXTS} are taken"
            raise InvalidRequestError(text, param="input")
        return found


class OllamaEmbeddingsRequest(OllamaVectorFields):
    """One text to embed."""

    prompt: str | None = None


def router(context: ServerContext) -> APIRouter:
    """The routes of vectors."""
    routes = APIRouter(tags=["ollama"])

    @routes.post("/api/embed", openapi_extra=Described(OllamaEmbedRequest))
    async def embed(request: Request) -> Response:
        """One vector a text, of length 1."""
        began_s = time.monotonic()
        body = await read_body(request, OllamaEmbedRequest)
        context.require_ready()
        info = asked_model(context.runtime, request, body.model)
        if not (texts := body.texts()):
            await loaded_or_unloaded(context, request, info, body.keep_alive)
            return json_response({"model": body.model, "embeddings": []})
        found = await _embedded(context, request, body, info, texts, dimensions=body.dimensions)
        took_ns = nanoseconds(time.monotonic() - began_s)
        counts = {
            "total_duration": took_ns,
            "load_duration": 1,
            "prompt_eval_count": found.usage.prompt_tokens,
        }
        return await large_json_response({"model": body.model, "embeddings": found.floats(), **counts})

    @routes.post("/api/embeddings", openapi_extra=Described(OllamaEmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        """The vector of one text, as the model gives it."""
        body = await read_body(request, OllamaEmbeddingsRequest)
        context.require_ready()
        info = asked_model(context.runtime, request, body.model)
        if not body.prompt:
            await loaded_or_unloaded(context, request, info, body.keep_alive)
            return json_response({"embedding": []})
        found = await _embedded(context, request, body, info, [body.prompt], normalize=False)
        return json_response({"embedding": found.floats()[0]})

    return routes


async def _embedded(
    context: ServerContext,
    request: Request,
    body: OllamaVectorFields,
    info: ModelInfo,
    texts: Sequence[str],
    **how: Any,
) -> TextEmbeddings:
    """The vectors of texts.

    Raises:
        ContextLengthError: a text is too long and is not to be cut.
        StokerError: why there are none.
    """
    require_embedding(info, hint="")  # no field of this API asks for a state
    fields = how | present(
        cache_salt=salt_of(request.state.key_digest, ""), keep_alive_s=kept_seconds(body.keep_alive)
    )
    work = partial(embed_texts, context.runtime, model=info.id, **fields, **header_fields(request))
    try:
        return await in_one_call(request, CallKind.EMBED, partial(work, texts))
    except ContextLengthError as error:
        if not body.truncate:
            raise
        cut = [await _cut(context, info, text, int(error.details["n_ctx"])) for text in texts]
    return await in_one_call(request, CallKind.EMBED, partial(work, cut))


async def _cut(context: ServerContext, info: ModelInfo, text: str, n_ctx: int) -> tuple[int, ...]:
    """The tokens of a text, those at its end left out where there are more than fit.

    What the vocabulary puts behind every text stays there.
    """
    tokens, _ = await context.runtime.tokenize(text, model=info.id)
    if len(tokens) <= n_ctx:
        return tuple(tokens)
    bare, _ = await context.runtime.tokenize("", model=info.id)
    is_closed = len(bare) > 1 and bare[-1] == tokens[-1]
    return (*tokens[: n_ctx - is_closed], *tokens[len(tokens) - is_closed :])
