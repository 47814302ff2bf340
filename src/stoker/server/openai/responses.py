"""POST /v1/responses: OpenAI's Responses API as another spelling of chat completions, and its token count.

A body becomes that of a chat completion as JSON values, which that route's schema checks. Nothing is stored,
so nothing can be referred to later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import GenerateRequest
from stoker.json_size import num_chars
from stoker.server.context import ServerContext
from stoker.server.errors import OriginRules
from stoker.server.fields import GenerationFields, Int, ResponseFormat, tier_of
from stoker.server.inbound.body import Described, Many, Named, read_body
from stoker.server.openai.chat import Translation, prompt_tokens, translated_turn
from stoker.server.openai.responses_writer import ResponseChunks, ResponseHead, WholeResponse
from stoker.server.reply import ignored_header, json_response
from stoker.server.streaming import collected, streamed

IGNORED_TOOLS = "stoker_ignored_tools"
"""Key in the answer's metadata: the tools that the model was not told of."""

MAX_ECHO_CHARS = 2 * 1024**2
"""Of what a response repeats of its request, without the instructions, which are bounded with the prompt. A
stream repeats it three times; 128 tools of 16,000 characters fit."""

_REFUSED = ("previous_response_id", "conversation", "background", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_SHARED = frozenset(GenerationFields.model_fields) - {"n", "stream_options"}
_LIMIT = "max_output_tokens"


class ResponsesRequest(GenerationFields):
    """A response to make."""

    input: str | Many[Named[Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    tools: Many[Named[Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Named[Any] | None = None
    response_format: ResponseFormat | None = None
    reasoning: Named[Any] | None = None
    truncation: str | None = None
    top_logprobs: Int | None = None
    include: Many[str] | None = None
    metadata: Named[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: Named[Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    def refuse_unsupported(self) -> None:
        """Refuse what would need stored responses, several answers or logprobs."""
        super().refuse_unsupported()
        for name, value in self.model_dump(include=set(_REFUSED), exclude_none=True).items():
            if value not in ("", [], {}, False):
                raise UnsupportedError(f"{name} is not supported: no response is stored", param=name)
        if self.n not in (None, 1):
            raise UnsupportedError("a response has one answer; n is not supported here", param="n")
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            raise UnsupportedError("logprobs of responses are not supported", param="top_logprobs")

    def to_chat(self) -> Translation:
        """The chat completion that asks for the same.

        Raises:
            InvalidRequestError: an item, a tool or the choice is malformed; `param` names it.
            UnsupportedError: a kind of item, or a field, is not served.
        """
        self.refuse_unsupported()
        origins = OriginRules({"messages": "input", "prompt": "input", "context_shift": "truncation"})
        origins.add("max_completion_tokens", _LIMIT)
        origins.add("max_tokens", _LIMIT)
        given = {
            "messages": self._messages(origins),
            "max_completion_tokens": self.max_output_tokens,
            "tools": self._tools(origins) or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(origins),
            "chat_template_kwargs": _template_args(self.reasoning) | (self.chat_template_kwargs or {})
            or None,
            "context_shift": True if self.truncation == "auto" else None,
        }
        body = self.model_dump(include=set(_SHARED), exclude_none=True, by_alias=True)
        return Translation(
            body | {name: value for name, value in given.items() if value is not None}, origins
        )

    def echo(self, asked: GenerateRequest, ignored: str = "") -> dict[str, Any]:
        """What the response object repeats of the request.

        Args:
            asked: what is generated: values that were not given are those that were used.
            ignored: the tools that were left out, as text.

        Raises:
            InvalidRequestError: it is over `MAX_ECHO_CHARS`.
        """
        sampling = asked.sampling
        echo = {
            "background": False,
            "frequency_penalty": sampling.frequency_penalty,
            "instructions": self.instructions,
            _LIMIT: self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": {**(self.metadata or {}), **({IGNORED_TOOLS: ignored} if ignored else {})},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {name: (self.reasoning or {}).get(name) for name in ("effort", "summary")},
            "safety_identifier": self.safety_identifier,
            "service_tier": tier_of(asked.priority),
            "store": False,
            "temperature": sampling.temperature,
            "text": {**(self.text or {}), "format": _whole_format((self.text or {}).get("format"))},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_whole_tool(tool) for tool in self.tools or () if _is_told(tool)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
        size = num_chars(echo) - len(self.instructions or "")
        if size > MAX_ECHO_CHARS:
            raise InvalidRequestError(
                f"what a response repeats of its request (metadata, tools, text and the like) has {size}"
                f" characters beside the instructions, at most {MAX_ECHO_CHARS} are taken; shorten metadata",
                param="metadata",
            )
        return echo

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """By the name that the model knows a function by: its namespace, and its name there."""
        return {
            _full_name(tool, inner): (tool["name"], inner["name"])
            for tool in self.tools or ()
            if tool.get("type") == "namespace" and isinstance(tool.get("name"), str)
            for inner in _functions_of(tool)
            if isinstance(inner.get("name"), str)
        }

    def _messages(self, origins: OriginRules) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
            origins.add_text("messages.0", "instructions")
        if isinstance(self.input, str):
            origins.add_text(f"messages.{len(messages)}", "input")
            return [*messages, {"role": "user", "content": self.input}]
        thoughts: list[str] = []  # they belong to the turn that the next item is a part of
        for index, item in enumerate(self.input or ()):
            if item.get("type") == "reasoning":
                thoughts += _thoughts(item, f"input.{index}")
                continue
            _take(item, f"input.{index}", messages, origins)
            if thoughts and messages[-1]["role"] == "assistant":
                before = messages[-1].get("reasoning_content")
                messages[-1]["reasoning_content"] = "\n".join([before, *thoughts] if before else thoughts)
            thoughts = []
        if not messages:
            raise InvalidRequestError("input holds no message", param="input")
        return messages

    def _tools(self, origins: OriginRules) -> list[dict[str, Any]]:
        """The functions in the chat completions' form, those of namespaces too; other tools as they are."""
        tools: list[dict[str, Any]] = []
        for where, name, tool in _each_tool(self.tools or ()):
            place = f"tools.{len(tools)}"
            origins.add(place, where)
            origins.add(f"{place}.function", where)
            if tool.get("type") == "function":
                function = {key: value for key, value in tool.items() if key != "type"} | {"name": name}
                tools.append({"type": "function", "function": function})
            else:
                tools.append(dict(tool))
        return tools

    def _format(self, origins: OriginRules) -> dict[str, Any] | None:
        given = (self.text or {}).get("format")
        if not isinstance(given, Mapping) or given.get("type") in (None, "text"):
            if self.response_format is None:
                return None
            return self.response_format.model_dump(exclude_none=True, by_alias=True)
        if self.response_format is not None:
            text = "text.format and response_format cannot be asked for together"
            raise InvalidRequestError(text, param="response_format")
        origins.add("response_format", "text.format")
        origins.add("response_format.json_schema", "text.format")
        if given["type"] != "json_schema":
            return {"type": str(given["type"])}
        return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


class InputTokensRequest(ResponsesRequest):
    """A response whose prompt is to be counted; the instructions alone are enough."""

    input: str | Many[Named[Any]] | None = None  # type: ignore[assignment] # it may be left out here


def default_echo() -> dict[str, Any]:
    """What a response object repeats of a request that said nothing but its input."""
    return ResponsesRequest.model_validate({"input": ""}).echo(GenerateRequest(prompt=""))


# ------------------------------------------------------------ items


def _take(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]], origins: OriginRules) -> None:
    """Add the message that an item is; calls join the assistant's turn before them."""
    kind = item.get("type", "message")
    if kind == "function_call":
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
            origins.add(f"messages.{len(messages) - 1}", where)
        calls = last.setdefault("tool_calls", [])
        place = f"messages.{len(messages) - 1}.tool_calls.{len(calls)}"
        origins.add(place, where)
        origins.add(f"{place}.function", where)
        calls.append(_call(item, where))
        return
    place = f"messages.{len(messages)}"
    origins.add(place, where)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"{where} has no role", param=f"{where}.role")
        messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
    elif kind == "function_call_output":
        origins.add(f"{place}.content", f"{where}.output")
        content = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
    else:
        raise UnsupportedError(f"{where}: items of type {str(kind)[:40]!r} are not supported", param=where)


def _thoughts(item: Mapping[str, Any], where: str) -> list[str]:
    """The texts of a reasoning item: what the model thought, or a summary where that is all there is."""
    for name in ("content", "summary"):
        if parts := item.get(name):
            texts = _content(parts, f"{where}.{name}")
            return [texts] if isinstance(texts, str) else [part["text"] for part in texts if "text" in part]
    return []


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = _text(item, "name", where)
    if isinstance(namespace := item.get("namespace"), str) and namespace:
        name = f"{namespace}.{name}"
    function = {"name": name, "arguments": _text(item, "arguments", where)}
    return {"id": _text(item, "call_id", where), "type": "function", "function": function}


def _content(content: Any, where: str) -> Any:
    """Text, or parts in the chat completions' form; other kinds of parts go on as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidRequestError(f"{where} is neither text nor a list of parts", param=where)
    return [_content_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _content_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = _text(part, "type", where)
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", where)}
    return dict(part)


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is not text", param=f"{where}.{name}")
    return value


# ------------------------------------------------------------ tools


def _each_tool(tools: list[dict[str, Any]] | tuple[()]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(place, name for the model, tool) of each; a namespace is the tools in it."""
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type") != "namespace":
            yield where, tool.get("name"), tool
            continue
        _text(tool, "name", where)
        for number, inner in enumerate(_functions_of(tool, where)):
            yield f"{where}.tools.{number}", _full_name(tool, inner), inner


def _functions_of(namespace: Mapping[str, Any], where: str = "tools") -> list[dict[str, Any]]:
    inner = namespace.get("tools")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise InvalidRequestError(f"{where}.tools is not a list of tools", param=f"{where}.tools")
    return inner


def _full_name(namespace: Mapping[str, Any], tool: Mapping[str, Any]) -> Any:
    """`NAMESPACE.NAME`, by which the model knows the function; a name that is no text stays what it is."""
    name = tool.get("name")
    return f"{namespace['name']}.{name}" if isinstance(name, str) else name


def _is_told(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in ("function", "namespace")


def _whole_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with every field that the client's types have; a namespace without tools that are left out."""
    if tool.get("type") == "namespace":
        inner = [_whole_tool(one) for one in _functions_of(tool) if _is_told(one)]
        return {"description": "", **tool, "tools": inner}
    return {"description": None, "parameters": None, "strict": False, **tool}


def _choice(given: Any) -> Any:
    if not isinstance(given, Mapping) or given.get("type") != "function":
        return given
    name, namespace = given.get("name"), given.get("namespace")
    full = f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name
    return {"type": "function", "function": {"name": full}}


# ------------------------------------------------------------ the rest


def _whole_format(given: Any) -> Any:
    """The format of the text with every field that the client's types have."""
    if not isinstance(given, Mapping) or given.get("type") is None:
        return {"type": "text"}
    if given["type"] != "json_schema":
        return dict(given)
    return {"name": "", "description": None, "schema": None, "strict": False, **given}


def _template_args(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    """The effort as templates know it."""
    effort = (reasoning or {}).get("effort")
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/responses", openapi_extra=Described(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer an input."""
        body = await read_body(request, ResponsesRequest)
        turn = await translated_turn(context, request, body, "resp_")
        echo = await asyncio.to_thread(body.echo, turn.request, ignored_header(turn.left_out))
        head = ResponseHead(turn.call.id, turn.request.model, int(time.time()), echo, body.namespaces())
        is_stream = body.stream
        del body  # its images are megabytes, and it may wait for long
        if not is_stream:
            return turn.tell(await collected(turn.call, WholeResponse(head, turn.form), request))
        chunks = ResponseChunks(head, turn.form)
        return turn.tell(streamed(turn.call, chunks, context.settings.keepalive_s))

    @routes.post("/v1/responses/input_tokens", openapi_extra=Described(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        """The tokens that the prompt of a response has, images and tools included; nothing is generated."""
        body = await read_body(request, InputTokensRequest)
        num_tokens = await prompt_tokens(context, request, body)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    return routes
