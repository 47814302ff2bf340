"""The body of /v1/responses (OpenAI's Responses API), and the chat completion that it asks for.

Owns the other spelling of the same things. The result is a body of /v1/chat/completions as JSON values, which
that route's schema checks and serves; nothing is stored, so nothing can be referred to later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.server.body import Many, Named
from stoker.server.schema.fields import GenerationFields, Int

_REFUSED = ("previous_response_id", "conversation", "background", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text"})
_SHARED = frozenset(GenerationFields.model_fields) - {"n", "stream_options"}


class ResponsesRequest(GenerationFields):
    """A response to make."""

    input: str | Many[Named[Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: Many[Named[Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Named[Any] | None = None
    reasoning: Named[Any] | None = None
    truncation: str | None = None
    top_logprobs: Int | None = None
    include: Many[str] | None = None
    metadata: Named[str] | None = None
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

    def to_chat(self) -> dict[str, Any]:
        """The body of /v1/chat/completions that asks for the same.

        Raises:
            InvalidRequestError: an item, a tool or the choice is malformed; `param` names it.
            UnsupportedError: a kind of item or tool, or a field, is not served.
        """
        self.refuse_unsupported()
        body = self.model_dump(include=set(_SHARED), exclude_none=True)
        given = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format((self.text or {}).get("format")),
            "chat_template_kwargs": _template_args(self.reasoning) | (self.chat_template_kwargs or {})
            or None,
            "context_shift": True if self.truncation == "auto" else None,
        }
        return body | {name: value for name, value in given.items() if value is not None}

    def echo(self) -> dict[str, Any]:
        """What the response object repeats of the request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (self.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": (self.text or {}).get("format") or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            for message in _item(item, f"input.{index}"):
                _append(messages, message)
        if not messages:
            raise InvalidRequestError("input holds no message", param="input")
        return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message; calls join the assistant's turn before them, as they are one turn for a template."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or "tool_calls" not in message:
        messages.append(message)
        return
    messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}


def _item(item: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"{where} has no role", param=f"{where}.role")
        yield {"role": role, "content": _content(item.get("content"), f"{where}.content")}
    elif kind == "function_call":
        function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        yield {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content}
    elif kind != "reasoning":  # what the model thought is not shown to it again
        raise UnsupportedError(f"{where}: items of type {str(kind)[:40]!r} are not supported", param=where)


def _content(content: Any, where: str) -> Any:
    """Text, or parts in the chat completions' form; other kinds of parts go on as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidRequestError(f"{where} is neither text nor a list of parts", param=where)
    return [
        {"type": "text", "text": _text(part, "text", f"{where}.{index}")}
        if part.get("type") in _TEXT_PARTS
        else {**part, "type": str(part.get("type"))}
        for index, part in enumerate(content)
    ]


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is not text", param=f"{where}.{name}")
    return value


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A function without the object around it."""
    kind = given.get("type")
    if kind != "function":
        raise UnsupportedError(f"{where}: tools of type {str(kind)[:40]!r} are not supported", param=where)
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _choice(given: Any) -> Any:
    if isinstance(given, Mapping) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _format(given: Any) -> dict[str, Any] | None:
    if not isinstance(given, Mapping) or given.get("type") in (None, "text"):
        return None
    if given["type"] != "json_schema":
        return {"type": str(given["type"])}
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _template_args(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    """The effort as templates know it."""
    effort = (reasoning or {}).get("effort")
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}
