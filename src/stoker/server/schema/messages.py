"""The body of /v1/messages (Anthropic's Messages API), and the chat completion that it asks for.

Owns the other spelling of the same things. The result is a body of /v1/chat/completions as JSON values, which
that route's schema checks and serves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stoker.errors import ErrorInfo, InvalidRequestError, UnsupportedError
from stoker.server.body import Body, Many, Named
from stoker.server.schema.fields import GenerationFields, Int

_SHARED = frozenset(GenerationFields.model_fields) - {"n", "stop", "stream_options", "service_tier"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageTurn(Body):
    """One turn; a system prompt is no turn here, though some clients send one."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Named[Any]]


class MessagesRequest(GenerationFields):
    """A message to make."""

    messages: Many[MessageTurn]
    max_tokens: Int
    system: str | Many[Named[Any]] | None = None
    stop_sequences: Many[str] | None = None
    tools: Many[Named[Any]] | None = None
    tool_choice: Named[Any] | None = None
    thinking: Named[Any] | None = None
    chat_template_kwargs: Named[Any] | None = None
    # Their values, "standard_only" among them, choose what somebody pays.
    service_tier: Any = None

    def to_chat(self) -> dict[str, Any]:
        """The body of /v1/chat/completions that asks for the same.

        Raises:
            InvalidRequestError: a block, a tool or the choice is malformed; `param` names it.
            UnsupportedError: a kind of block or tool, or a field, is not served.
        """
        self.refuse_unsupported()
        if self.n not in (None, 1):
            raise UnsupportedError("a message is one answer; n is not supported here", param="n")
        body = self.model_dump(include=set(_SHARED), exclude_none=True)
        choice = self.tool_choice or {}
        given = {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": [_tool(tool, f"tools.{index}") for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "service_tier": "flex" if self.service_tier == "flex" else None,
            "chat_template_kwargs": _template_args(self.thinking) | (self.chat_template_kwargs or {}) or None,
        }
        return body | {name: value for name, value in given.items() if value is not None}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _joined(self.system, "system")}
        for index, turn in enumerate(self.messages):
            where = f"messages.{index}.content"
            if isinstance(turn.content, str):
                yield {"role": turn.role, "content": turn.content}
            elif turn.role == "assistant":
                yield _assistant(turn.content, where)
            else:
                yield from _user(turn, turn.content, where)


def error_answer(info: ErrorInfo) -> dict[str, Any]:
    """The body of an error as this API's clients read it."""
    kind = _ERROR_TYPES.get(info.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": info.message, "code": info.code}}


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, calls = [], []
    for index, block in enumerate(blocks):
        here = f"{where}.{index}"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", here))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, Mapping):
                raise InvalidRequestError(f"{here}.input is not an object", param=f"{here}.input")
            function = {"name": _text(block, "name", here), "arguments": json.dumps(given)}
            calls.append({"id": _text(block, "id", here), "type": "function", "function": function})
        elif kind not in _THOUGHTS:  # what the model thought is not shown to it again
            raise UnsupportedError(f"{here}: blocks of type {str(kind)[:40]!r} are not supported", param=here)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return message | ({"tool_calls": calls} if calls else {})


def _user(turn: MessageTurn, blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools first, each a turn of its own, then the rest; other blocks go on as they are."""
    parts = []
    for index, block in enumerate(blocks):
        here = f"{where}.{index}"
        kind = block.get("type")
        if kind == "tool_result":
            content = _result(block.get("content") or "", f"{here}.content")
            yield {"role": "tool", "tool_call_id": _text(block, "tool_use_id", here), "content": content}
        elif kind == "text":
            parts.append({"type": "text", "text": _text(block, "text", here)})
        elif kind == "image":
            parts.append(_image(block, here))
        else:
            parts.append({**block, "type": str(kind)})
    if parts or not blocks:
        yield {"role": turn.role, "content": parts}


def _result(content: Any, where: str) -> Any:
    """Text, or parts where a tool shows pictures."""
    if not isinstance(content, list) or not any(_kind(block) == "image" for block in content):
        return _joined(content, where)
    return [
        _image(block, f"{where}.{index}")
        if _kind(block) == "image"
        else {"type": "text", "text": _joined([block], f"{where}.{index}")}
        for index, block in enumerate(content)
    ]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A picture as chat completions name it."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        raise InvalidRequestError(f"{where}.source.type is base64 or url", param=f"{where}.source")
    url = _text(source, "url", f"{where}.source") if kind == "url" else None
    if url is None:
        media, data = (_text(source, name, f"{where}.source") for name in ("media_type", "data"))
        url = f"data:{media};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


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


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = given.get("type") or "custom"
    if kind != "custom":
        raise UnsupportedError(f"{where}: tools of type {str(kind)[:40]!r} are not supported", param=where)
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
    if kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type is auto, any, tool or none", param="tool_choice.type")
    return _CHOICES[str(kind)]


def _template_args(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Thinking as templates know it; left to them where it is neither on nor off."""
    kind = (thinking or {}).get("type")
    return {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}
