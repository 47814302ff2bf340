"""POST /api/generate: a prompt by the model's chat template, or raw, or what stands between two texts.

Without a prompt it only loads the model, or with `"keep_alive": 0` unloads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.images.intake import image_reports
from stoker.images.turns import Given, require_vision
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest
from stoker.server.context import ServerContext
from stoker.server.errors import OriginRules
from stoker.server.fields import header_fields, present
from stoker.server.inbound.body import Described, Many, beside, read_body, validated
from stoker.server.ollama.bound import Bound, turn_within
from stoker.server.ollama.chat import (
    PREFIX,
    OllamaTurn,
    answered,
    image_parts,
    image_url,
    tell_ignored,
)
from stoker.server.ollama.lines import LineHead, one_line
from stoker.server.ollama.loading import loaded_or_unloaded
from stoker.server.ollama.names import asked_model
from stoker.server.ollama.options import OllamaFields, OllamaOptions
from stoker.server.openai.chat import ChatTurn, translated_turn
from stoker.server.openai.completions import CompletionRequest
from stoker.server.streaming import GenerationCall
from stoker.tasks.chat import PLAIN

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo
    from stoker.runtime import Runtime

_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - these characters they are
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before the text in front, before the text behind, and before what is to be written, by family."""


class OllamaGenerateRequest(OllamaFields):
    """A prompt to answer or to continue."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: Many[str] | None = None
    raw: bool | None = None
    template: str | None = None
    context: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether no chat template lays the prompt out."""
        return bool(self.raw or self.suffix)

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and is not served, by name.

        Raises:
            UnsupportedError, InvalidRequestError: naming the field.
        """
        if self.context:
            text = "context is not taken: send the conversation as messages to /api/chat; what was computed"
            raise UnsupportedError(f"{text} of it before is found again by itself", param="context")
        if self.template:
            text = "template is not taken here: serve the model with another one (--chat-template FILE)"
            raise UnsupportedError(text, param="template")
        for name in ("system", "suffix") if self.raw else ("system", "images") if self.suffix else ():
            if getattr(self, name):
                text = f"{name} cannot be used with {'raw' if self.raw else 'suffix'}: the prompt is the text"
                raise InvalidRequestError(text, param=name)

    def turns(self, origins: OriginRules) -> list[dict[str, Any]]:
        """The conversation that asks for the same."""
        turns: list[dict[str, Any]] = []
        if self.system:
            origins.add_text("messages.0", "system")
            turns.append({"role": "system", "content": self.system})
        place = f"messages.{len(turns)}"
        origins.add_text(place, "prompt")
        parts = image_parts(self.images or [], "images")
        for number in range(len(parts)):
            origins.add(f"{place}.content.{number}", f"images.{number}")
            origins.add(f"{place}.content.{number}.image_url", f"images.{number}")
        content: Any = [*parts, {"type": "text", "text": self.prompt or ""}] if parts else self.prompt
        return [*turns, {"role": "user", "content": content}]


def router(context: ServerContext) -> APIRouter:
    """The route of prompts."""
    routes = APIRouter(tags=["ollama"])

    @routes.post("/api/generate", openapi_extra=Described(OllamaGenerateRequest))
    async def generate(request: Request) -> Response:
        """Answer a prompt, line by line unless `stream` is false."""
        body = await read_body(request, OllamaGenerateRequest)
        head = LineHead(body.model, is_chat=False)
        context.require_ready()
        info = asked_model(context.runtime, request, body.model)
        body.refuse_unsupported()
        if not (body.prompt or body.suffix or body.images):
            done = await loaded_or_unloaded(context, request, info, body.keep_alive)
            return one_line(head.done(done), is_streamed=body.is_streamed)
        tell_ignored(request, body, info)

        def make(given: OllamaGenerateRequest) -> Awaitable[ChatTurn]:
            if given.is_plain:
                return _plain_turn(context, request, given, info)
            return translated_turn(context, request, OllamaTurn(given, info, given.turns), PREFIX)

        bound = Bound.of(body, OllamaOptions.read(body.options or {}), info, "prompt")
        shorten = partial(_shortened, context.runtime, body, bound, info)
        turn = await turn_within(context.runtime, bound, body, make, shorten)
        is_streamed = body.is_streamed
        del body  # its images are megabytes, and it may wait for long
        return await answered(context, request, turn, head, is_streamed=is_streamed)

    return routes


async def _plain_turn(
    context: ServerContext, request: Request, body: OllamaGenerateRequest, info: ModelInfo
) -> ChatTurn:
    """The turn of a prompt that is the text itself.

    Raises:
        CallerError: the body asks for what cannot be.
    """
    prompt, images = body.prompt or "", []
    if body.suffix:
        prompt = await _between(context.runtime, info, prompt, body.suffix)
    origins = OriginRules({"json_schema": "format"})
    schema = body.answer_schema()
    given = body.shared(origins) | present(
        prompt=prompt,
        json_schema={"type": "object"} if schema is True else schema,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    with origins.named():
        completion = validated(CompletionRequest, given)
        told = partial(completion.to_shared, info, request.state.key_digest)
        shared = await beside(request, told) | header_fields(request)
    shared["max_tokens"] = OllamaOptions.read(body.options or {}).token_limit(info)
    if body.images:
        require_vision(info, "images")
        places = enumerate(map(image_url, body.images))
        images = await context.runtime.images.take([Given(url, f"images.{at}") for at, url in places])
        if IMAGE_MARKER not in prompt:
            prompt = IMAGE_MARKER * len(images) + prompt
    asked = GenerateRequest(prompt=prompt, model=info.asked_as, **shared)
    if images:
        asked = msgspec.structs.replace(asked, pictures=tuple(one.picture for one in images))
    call = GenerationCall(context, PREFIX, request, [asked], origins)
    return ChatTurn(call, PLAIN, image_reports(images))


async def _between(runtime: Runtime, info: ModelInfo, before: str, behind: str) -> str:
    """The prompt for what stands between two texts, in the tokens that the model has for it.

    Raises:
        UnsupportedError: its vocabulary has none.
    """
    for family in _FILL_IN:
        found = [await runtime.tokenize(mark, model=info.id, add_special=False) for mark in family]
        if all(len(tokens) == 1 for tokens, _ in found):
            first, second, last = family
            return f"{first}{before}{second}{behind}{last}"
    text = f"suffix: the model {info.id} has no tokens to fill in text with, so it does not support insert"
    raise UnsupportedError(text, param="suffix")


async def _shortened(
    runtime: Runtime,
    body: OllamaGenerateRequest,
    bound: Bound,
    info: ModelInfo,
    num_tokens: int,
    _counted: Callable[[OllamaGenerateRequest], Awaitable[int]],
) -> OllamaGenerateRequest:
    """The same with as much less of the prompt's beginning as has to go."""
    tokens, _ = await runtime.tokenize(body.prompt or "", model=info.id, add_special=False)
    kept = tokens[num_tokens - bound.most_prompt :]
    return body.model_copy(update={"prompt": await runtime.detokenize(kept, model=info.id)})
