"""POST /v1/messages: Anthropic's Messages API as another spelling of chat completions, and its token count.

A body becomes that of a chat completion as JSON values, which that route's schema checks.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import check_range
from stoker.server.anthropic.writer import MessageChunks, MessageHead, WholeMessage
from stoker.server.context import ServerContext
from stoker.server.errors import OriginRules
from stoker.server.fields import GenerationFields, ResponseFormat, names_progress
from stoker.server.inbound.body import Body, Described, Many, Name, Named, read_body
from stoker.server.openai.chat import Translation, prompt_tokens, translated_turn
from stoker.server.openai.conversation import ThinkingFields
from stoker.server.reply import json_response
from stoker.server.streaming import collected, streamed

_SHARED = frozenset(GenerationFields.model_fields) - {"n", "stop", "stream_options", "service_tier"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MAX_TEMPERATURE = 1.0  # Anthropic's; a client that sends more takes it for OpenAI's


class MessageTurn(Body):
    """One turn; a system prompt is no turn here, though some clients send one."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Named[Any]]


class MessagesRequest(ThinkingFields, GenerationFields):
    """A message to make."""

    messages: Many[MessageTurn]
    max_tokens: int
    system: str | Many[Named[Any]] | None = None
    stop_sequences: Many[str] | None = None
    tools: Many[Named[Any]] | None = None
    tool_choice: Named[Any] | None = None
    thinking: Named[Any] | None = None
    output_config: Named[Any] | None = None
    output_format: Named[Any] | None = None
    response_format: ResponseFormat | None = None
    tool_format: Name | None = None
    # Their values, "standard_only" among them, choose what somebody pays.
    service_tier: Any = None

    def to_chat(self) -> Translation:
        """The chat completion that asks for the same.

        Raises:
            InvalidRequestError: a block, a tool or the choice is malformed; `param` names it.
            UnsupportedError: a kind of block, or a field, is not served.
        """
        self.refuse_unsupported()
        if self.temperature is not None:
            check_range("temperature", self.temperature, 0.0, _MAX_TEMPERATURE)
        if self.n not in (None, 1):
            raise UnsupportedError("a message is one answer; n is not supported here", param="n")
        origins = OriginRules({"prompt": "messages", "stop": "stop_sequences"})
        origins.add("max_completion_tokens", "max_tokens")
        choice = self.tool_choice or {}
        given = {
            "messages": self._messages(origins),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": self._tools(origins) or None,
            "tool_choice": _choice(choice) if choice else None,
            "tool_format": self.tool_format,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "service_tier": "flex" if self.service_tier == "flex" else None,
            "response_format": self._format(origins),
            "chat_template_kwargs": self.thinking_args(_template_args(self.thinking)) or None,
        }
        body = self.model_dump(include=set(_SHARED), exclude_none=True, by_alias=True)
        return Translation(
            body | {name: value for name, value in given.items() if value is not None}, origins
        )

    def _messages(self, origins: OriginRules) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _joined(self.system, "system")})
            origins.add_text("messages.0", "system")
        for index, turn in enumerate(self.messages):
            where = f"messages.{index}"
            if isinstance(turn.content, str):
                origins.add(f"messages.{len(messages)}", where)
                messages.append({"role": turn.role, "content": turn.content})
            elif turn.role == "assistant":
                messages.append(_assistant(turn.content, where, f"messages.{len(messages)}", origins))
            else:
                _take_results(turn.content, where, messages, origins)
                _take_rest(turn, turn.content, where, messages, origins)
        return messages

    def _tools(self, origins: OriginRules) -> list[dict[str, Any]]:
        """Functions in the chat completions' form; tools of the vendor's own kinds as they are."""
        tools = []
        for index, tool in enumerate(self.tools or ()):
            where = f"tools.{index}"
            origins.add(f"{where}.function", where)
            origins.add(f"{where}.function.parameters", f"{where}.input_schema")
            tools.append(_function(tool) if tool.get("type") in (None, "custom") else dict(tool))
        return tools

    def _format(self, origins: OriginRules) -> dict[str, Any] | None:
        """The form of the answer, by whichever of its three names it was asked for."""
        asked = {
            "output_config.format": (self.output_config or {}).get("format"),
            "output_format": self.output_format,
        }
        found = {where: given for where, given in asked.items() if given is not None}
        if self.response_format is not None:
            found["response_format"] = self.response_format.model_dump(exclude_none=True, by_alias=True)
        if len(found) > 1:
            text = f"{' and '.join(found)} cannot be asked for together"
            raise InvalidRequestError(text, param=list(found)[1])
        if not found:
            return None
        where, given = found.popitem()
        if where == "response_format":
            return dict(given)
        if not isinstance(given, Mapping) or given.get("type") != "json_schema":
            raise InvalidRequestError(f"{where}.type is json_schema", param=f"{where}.type")
        origins.add("response_format", where)
        origins.add("response_format.json_schema", where)
        return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


class CountTokensRequest(MessagesRequest):
    """A message whose prompt is to be counted."""

    max_tokens: int | None = None  # type: ignore[assignment] # nothing is generated


# ------------------------------------------------------------ turns


def _assistant(blocks: list[dict[str, Any]], where: str, place: str, origins: OriginRules) -> dict[str, Any]:
    """The turn, which is `place` in the chat completion."""
    origins.add(place, where)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{where}.content.{index}"
        kind = block.get("type")
        if kind == "text":
            origins.add(f"{place}.content.{len(texts)}", here)
            texts.append(_text(block, "text", here))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", here))
        elif kind != "redacted_thinking":
            raise UnsupportedError(f"{here}: blocks of type {str(kind)[:40]!r} are not supported", param=here)
    parts = [{"type": "text", "text": text} for text in texts]
    message: dict[str, Any] = {"role": "assistant", "content": parts if len(texts) > 1 else "".join(texts)}
    optional = {"tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
    return message | {name: value for name, value in optional.items() if value}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    """A call; what is malformed in it stays as it is, and ends no conversation."""
    given = block.get("input")
    arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _take_results(
    blocks: list[dict[str, Any]], where: str, messages: list[dict[str, Any]], origins: OriginRules
) -> None:
    """Add the results of tools, each a turn of its own; they stand before the text beside them."""
    for index, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            continue
        here = f"{where}.content.{index}"
        origins.add(f"messages.{len(messages)}", here)
        for number, kind in _attached(block.get("content")):
            place = f"messages.{len(messages)}.content.{number}"
            _add_origins(origins, kind, place, f"{here}.content.{number}")
        content = _result(block.get("content") or "", f"{here}.content")
        call_id = _text(block, "tool_use_id", here)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _take_rest(
    turn: MessageTurn,
    blocks: list[dict[str, Any]],
    where: str,
    messages: list[dict[str, Any]],
    origins: OriginRules,
) -> None:
    """Add what is no result as one turn; blocks that are neither text nor images go on as they are."""
    place = f"messages.{len(messages)}"
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        here = f"{where}.content.{index}"
        kind = block.get("type")
        if kind == "tool_result":
            continue
        origins.add(f"{place}.content.{len(parts)}", here)
        if kind == "text":
            parts.append({"type": "text", "text": _text(block, "text", here)})
        elif kind in _ATTACHED:
            _add_origins(origins, str(kind), f"{place}.content.{len(parts)}", here)
            parts.append(_ATTACHED[kind](block, here))
        else:
            parts.append({**block, "type": str(kind)})
    if parts or not blocks:
        origins.add(place, where)
        messages.append({"role": turn.role, "content": parts})


def _attached(content: Any) -> Iterator[tuple[int, str]]:
    """(index, kind) of the images and documents among the blocks."""
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if (kind := _kind(block)) in _ATTACHED:
            yield number, kind


def _add_origins(origins: OriginRules, kind: str, place: str, here: str) -> None:
    """An image or a document stands at `place` in the chat completion, its block `here` in the body."""
    if kind == "image":
        origins.add(f"{place}.image_url", f"{here}.source")
        return
    origins.add(f"{place}.file", here)
    for name, own in (("file_data", "data"), ("file_url", "url"), ("file_id", "file_id")):
        origins.add(f"{place}.file.{name}", f"{here}.source.{own}")


def _result(content: Any, where: str) -> Any:
    """Text, or parts where a tool shows images or documents."""
    if not isinstance(content, list) or not any(_attached(content)):
        return _joined(content, where)
    return [_result_part(block, f"{where}.{index}") for index, block in enumerate(content)]


def _result_part(block: Any, where: str) -> dict[str, Any]:
    if (kind := _kind(block)) in _ATTACHED:
        return _ATTACHED[kind](block, where)
    return {"type": "text", "text": _joined([block], where)}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An image as chat completions name it."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        raise InvalidRequestError(f"{where}.source.type is base64 or url", param=f"{where}.source")
    url = _text(source, "url", f"{where}.source") if kind == "url" else None
    if url is None:
        media, data = (_text(source, name, f"{where}.source") for name in ("media_type", "data"))
        url = f"data:{media};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A document as chat completions name it; its text becomes a file of text.

    Raises:
        InvalidRequestError: its source is malformed.
        UnsupportedError: it is to be cited, or holds what is no text.
    """
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        text = f"{where}.citations: answers name no places of documents here; leave it out"
        raise UnsupportedError(text, param=f"{where}.citations")
    source: Any = block.get("source")
    here, kind = f"{where}.source", _kind(source)
    file: dict[str, Any] = {name: block.get(name) for name in ("title", "context")}
    match kind:
        case "base64":
            media, data = (_text(source, name, here) for name in ("media_type", "data"))
            file["file_data"] = f"data:{media};base64,{data}"
        case "text":
            file["file_data"] = _text_uri(_text(source, "data", here))
        case "content":
            file["file_data"] = _text_uri(_joined(source.get("content"), f"{here}.content"))
        case "url":
            file["file_url"] = _text(source, "url", here)
        case "file":
            file["file_id"] = _text(source, "file_id", here)
        case _:
            text = f"{here}.type is base64, text, content or url"
            raise InvalidRequestError(text, param=here)
    return {"type": "file", "file": file}


def _text_uri(text: str) -> str:
    return f"data:text/plain;base64,{base64.b64encode(text.encode('utf-8', 'replace')).decode('ascii')}"


_ATTACHED: Mapping[Any, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "image": _image,
    "document": _document,
}
"""What makes a part of a block, by its kind."""


def _joined(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise InvalidRequestError(f"{where} is neither text nor a list of blocks", param=where)
    for index, block in enumerate(content):
        if block.get("type") != "text":
            here = f"{where}.{index}"
            raise UnsupportedError(f"{here}: text is taken here, no other block", param=here)
    return "\n".join(_text(block, "text", f"{where}.{index}") for index, block in enumerate(content))


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is not text", param=f"{where}.{name}")
    return value


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": given.get("name"),
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _choice(given: Mapping[str, Any]) -> Any:
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type is auto, any, tool or none", param="tool_choice.type")
    return _CHOICES[kind]


def _template_args(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Thinking as templates know it; left to them where it is neither on nor off."""
    kind = (thinking or {}).get("type")
    return {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/messages", openapi_extra=Described(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, MessagesRequest)
        turn = await translated_turn(context, request, body, "msg_")
        head = MessageHead(
            turn.call.id,
            turn.request.model,
            request.state.request_id,
            turn.request.priority,
            names_progress=names_progress(request),
        )
        is_stream = body.stream
        del body  # its images are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.call, WholeMessage(head, turn.form), request))
        chunks = MessageChunks(head, turn.form)
        return turn.tell(streamed(turn.call, chunks, context.settings.keepalive_s))

    @routes.post("/v1/messages/count_tokens", openapi_extra=Described(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """The tokens that the prompt of a message has, images and tools included; nothing is generated."""
        body = await read_body(request, CountTokensRequest)
        return json_response({"input_tokens": await prompt_tokens(context, request, body)})

    return routes
