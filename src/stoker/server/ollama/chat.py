"""POST /api/chat: Ollama's conversations as another spelling of chat completions.

A body becomes that of a chat completion as JSON values, which that route's schema checks. Without messages
it only loads the model, or with `"keep_alive": 0` unloads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.chat.reasoning import reasoning_tags_of
from stoker.errors import InvalidRequestError
from stoker.server.context import ServerContext
from stoker.server.errors import OriginRules
from stoker.server.fields import present
from stoker.server.inbound.body import Described, Many, Named, read_body
from stoker.server.ollama.bound import Bound, first_that_fits, turn_within
from stoker.server.ollama.lines import AnswerLines, LineHead, WholeLine, one_line
from stoker.server.ollama.loading import loaded_or_unloaded
from stoker.server.ollama.names import asked_model
from stoker.server.ollama.options import OllamaFields, OllamaOptions, note_ignored
from stoker.server.openai.chat import ChatTurn, Translation, translated_turn
from stoker.server.streaming import collected, streamed

if TYPE_CHECKING:
    from stoker.ipc.model import ModelInfo

PREFIX = "ollama-"


class OllamaChatRequest(OllamaFields):
    """A conversation to answer."""

    messages: Many[Named[Any]] | None = None
    tools: Many[Any] | None = None

    def beginning_at(self, start: int) -> OllamaChatRequest:
        """The same from that turn on, behind the system turns before it."""
        turns = self.messages or []
        kept = [turn for turn in turns[:start] if turn.get("role") == "system"]
        return self.model_copy(update={"messages": [*kept, *turns[start:]]})


@dataclass(frozen=True, slots=True)
class OllamaTurn:
    """A body with the model that its name means, as the chat completion that asks for the same."""

    body: OllamaFields
    info: ModelInfo
    messages: Callable[[OriginRules], list[dict[str, Any]]]
    tools: Sequence[Any] | None = None

    def to_chat(self) -> Translation:
        """See `openai.chat.Translated`.

        Raises:
            InvalidRequestError: a turn or an option is malformed; `param` names it.
        """
        body = self.body
        origins = OriginRules({"max_completion_tokens": "options.num_predict", "response_format": "format"})
        origins.add("response_format.json_schema", "format")
        origins.add("enable_thinking", "think")
        origins.add("reasoning_effort", "think")
        options = OllamaOptions.read(body.options or {})
        is_level = isinstance(body.think, str)
        given = present(
            model=self.info.asked_as,
            messages=self.messages(origins),
            tools=list(self.tools or ()) or None,
            max_completion_tokens=options.token_limit(self.info),
            response_format=_response_format(body.answer_schema()),
            enable_thinking=None if is_level else body.think,
            reasoning_effort=body.think if is_level else None,
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs,
        )
        return Translation(body.shared(origins) | given, origins)


def _response_format(schema: Any) -> dict[str, Any] | None:
    if schema is None:
        return None
    if schema is True:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"schema": schema}}


# ------------------------------------------------------------ turns


def turns_of(messages: Sequence[Mapping[str, Any]], origins: OriginRules) -> list[dict[str, Any]]:
    """The turns of a chat completion, one for each of Ollama's.

    Results of tools have no id there: each belongs to the first call before it that has none yet, by the
    tool's name where it says one.

    Raises:
        InvalidRequestError: a turn is malformed.
    """
    open_calls: list[tuple[str, str]] = []  # id and name of those without a result
    turns = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        turn = {"role": message.get("role"), "content": _content(message, where, origins)}
        if message.get("tool_calls"):
            turn["tool_calls"] = _calls(message["tool_calls"], where)
            named = [(call, _name_of(call)) for call in turn["tool_calls"]]
            open_calls += [(call["id"], name) for call, name in named if name is not None]
        if turn["role"] == "assistant" and message.get("thinking"):
            turn["reasoning_content"] = message["thinking"]
            origins.add(f"{where}.reasoning_content", f"{where}.thinking")
        if turn["role"] == "tool":
            turn["tool_call_id"] = _answered(message, open_calls)
        turns.append(turn)
    return turns


def _content(message: Mapping[str, Any], where: str, origins: OriginRules) -> Any:
    """Text, or parts where there are images."""
    text, images = message.get("content"), message.get("images")
    if text is None:
        text = ""
    if not images:
        return text
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.content is not text", param=f"{where}.content")
    parts = image_parts(images, f"{where}.images")
    for number in range(len(parts)):
        origins.add(f"{where}.content.{number}", f"{where}.images.{number}")
        origins.add(f"{where}.content.{number}.image_url", f"{where}.images.{number}")
    return [*parts, {"type": "text", "text": text}] if text else parts


def image_parts(images: Any, where: str) -> list[dict[str, Any]]:
    """Images in base64 as parts of a turn. Raises InvalidRequestError."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequestError(f"{where} is not a list of images in base64", param=where)
    return [{"type": "image_url", "image_url": {"url": image_url(image)}} for image in images]


def image_url(image: str) -> str:
    """Base64 as a data URI; what is one already, as some clients send it, stays as it is."""
    return image if image.startswith("data:") else f"data:;base64,{image}"


def _calls(calls: Any, where: str) -> list[Any]:
    """Calls with an id each, and their arguments as text; what is no call stays as it is."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where}.tool_calls is not a list", param=f"{where}.tool_calls")
    turn = where.rpartition(".")[2]
    return [_call(call, f"call_{turn}_{number}") for number, call in enumerate(calls)]


def _call(call: Any, own_id: str) -> Any:
    name = _name_of(call)
    if name is None:
        return call
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    given = call.get("id")
    function = {"name": name, "arguments": arguments}
    return {"id": given if isinstance(given, str) else own_id, "type": "function", "function": function}


def _name_of(call: Any) -> str | None:
    """The function that a call is of; None: it is no call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _answered(message: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> str:
    """The id of the call that a result belongs to; it is taken out of `open_calls`."""
    own_id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    by_id = [call for call in open_calls if call[0] == own_id]
    by_name = [call for call in open_calls if call[1] == name]
    found = (by_id or by_name or ([] if own_id or name else open_calls))[:1]
    if found:
        open_calls.remove(found[0])
        return found[0][0]
    return str(own_id or f"call_{name or 'unknown'}")


# ------------------------------------------------------------ route


def tell_ignored(request: Request, body: OllamaFields, info: ModelInfo) -> None:
    """Have the answer name what has no effect: options of a load, and thinking of a model that does none."""
    body.tell_ignored(request)
    if body.think and reasoning_tags_of(info.chat_template) is None:
        note_ignored(request, "think")


async def answered(
    context: ServerContext, request: Request, turn: ChatTurn, head: LineHead, *, is_streamed: bool
) -> Response:
    """The answer to a turn."""
    if is_streamed:
        lines = AnswerLines(head, turn.form, turn.call.id)
        return turn.tell(streamed(turn.call, lines, context.settings.keepalive_s))
    return turn.tell(await collected(turn.call, WholeLine(head, turn.form, turn.call.id), request))


def router(context: ServerContext) -> APIRouter:
    """The route of conversations."""
    routes = APIRouter(tags=["ollama"])

    @routes.post("/api/chat", openapi_extra=Described(OllamaChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation, line by line unless `stream` is false."""
        body = await read_body(request, OllamaChatRequest)
        head = LineHead(body.model, is_chat=True)
        context.require_ready()
        info = asked_model(context.runtime, request, body.model)
        if not body.messages:
            done = await loaded_or_unloaded(context, request, info, body.keep_alive)
            return one_line(head.done(done), is_streamed=body.is_streamed)
        tell_ignored(request, body, info)

        def make(given: OllamaChatRequest) -> Awaitable[ChatTurn]:
            asked = OllamaTurn(given, info, partial(turns_of, given.messages or ()), given.tools)
            return translated_turn(context, request, asked, PREFIX)

        bound = Bound.of(body, OllamaOptions.read(body.options or {}), info, "messages")
        turn = await turn_within(context.runtime, bound, body, make, partial(_shortened, body, bound))
        is_streamed = body.is_streamed
        del body  # its images are megabytes, and it may wait for long
        return await answered(context, request, turn, head, is_streamed=is_streamed)

    return routes


async def _shortened(
    body: OllamaChatRequest,
    bound: Bound,
    _num_tokens: int,
    counted: Callable[[OllamaChatRequest], Awaitable[int]],
) -> OllamaChatRequest:
    """The conversation without as many of its oldest exchanges as have to go; at least its last one stays."""
    turns = body.messages or []
    starts = [at for at, turn in enumerate(turns) if at and turn.get("role") == "user"]
    if not starts:
        return body

    async def fits(start: int) -> bool:
        return await counted(body.beginning_at(start)) <= bound.most_prompt

    return body.beginning_at(await first_that_fits(starts, fits))
