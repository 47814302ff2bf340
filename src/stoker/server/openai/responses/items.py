"""Items of a response's input: the messages that they are, and the whole form in which they are stored.

Owns the ids of items, which lead back to their response, and what is sealed in an item: a summary or thoughts
as text that clients pass back unread. It hides nothing from them: it holds what they sent or were shown.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.server.errors import OriginRules

Item = Mapping[str, Any]

SUMMARY = "Summary of the conversation so far:"
_SEAL = "stoker-1."
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "compaction": "cmp"}
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})[io][0-9]+")


def item_id(response_id: str, kind: str, index: int, place: str = "o") -> str:
    """The id of an item of a response; `place`: "o" for its output, "i" for its input."""
    found = _RESPONSE_ID.fullmatch(response_id)
    base = found[1] if found else response_id.removeprefix("resp_")
    return f"{_PREFIXES.get(kind, 'item')}_{base}{place}{index}"


def response_of(own_id: str) -> str | None:
    """The id of the response that an item is of; None: the id is not one of `item_id`."""
    found = _ITEM_ID.fullmatch(own_id)
    return f"resp_{found[1]}" if found else None


def sealed(text: str) -> str:
    """A text as `encrypted_content`."""
    return _SEAL + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(content: Any) -> str | None:
    """The text of an `encrypted_content`; None: another server made it."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None


def reference_of(item: Item) -> str | None:
    """The id of the item that this one stands for; None: it is one itself."""
    kind = item.get("type")
    is_reference = kind == "item_reference" or (kind is None and set(item) == {"id"})
    return str(item.get("id")) if is_reference else None


def check_outputs(earlier: Iterable[Item], items: Sequence[Item]) -> None:
    """Refuse the output of a call that no earlier item makes. Raises InvalidRequestError."""
    calls = {one.get("call_id") for one in (*earlier, *items) if one.get("type") == "function_call"}
    for index, item in enumerate(items):
        if item.get("type") == "function_call_output" and item.get("call_id") not in calls:
            place = f"input.{index}.call_id"
            text = (
                f"no tool call found for function call output with call_id {str(item.get('call_id'))[:80]!r}"
            )
            text = f"{place}: {text}"
            raise InvalidRequestError(text, param=place)


# ------------------------------------------------------------ as messages


def messages_of(
    placed: Iterable[tuple[str, Item]], messages: list[dict[str, Any]], origins: OriginRules
) -> None:
    """Add the messages that items are to `messages`, and their places to `origins`.

    Args:
        placed: items, each with its place in the caller's body.
        messages: of the chat completion, those before the items.
        origins: of the chat completion.

    Raises:
        InvalidRequestError: an item is malformed; `param` names it.
        UnsupportedError: a kind of item is not served.
    """
    thoughts: list[str] = []  # they belong to the turn that the next item is a part of
    for where, item in placed:
        if item.get("type") == "reasoning":
            thoughts += _thoughts(item, where)
            continue
        _take(item, where, messages, origins)
        if thoughts and messages[-1]["role"] == "assistant":
            before = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n".join([before, *thoughts] if before else thoughts)
        thoughts = []


def _take(item: Item, where: str, messages: list[dict[str, Any]], origins: OriginRules) -> None:
    """Add the message that an item is; calls join the assistant's turn before them."""
    kind = item.get("type", "message")
    place = f"messages.{len(messages)}"
    if kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
            origins.add(place, where)
        messages[-1].setdefault("tool_calls", []).append(_call(item))
        return
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
    elif kind == "compaction":
        summary = unsealed(item.get("encrypted_content"))
        if summary is None:
            place = f"{where}.encrypted_content"
            raise InvalidRequestError(f"{place} is of a compaction that another server made", param=place)
        messages.append({"role": "system", "content": f"{SUMMARY}\n\n{summary}"})
    else:
        raise UnsupportedError(f"{where}: items of type {str(kind)[:40]!r} are not supported", param=where)


def _thoughts(item: Item, where: str) -> list[str]:
    """The texts of a reasoning item: what the model thought, or a summary where that is all there is."""
    if not item.get("content") and (text := unsealed(item.get("encrypted_content"))):
        return [text]
    for name in ("content", "summary"):
        if parts := item.get(name):
            texts = _content(parts, f"{where}.{name}")
            return [texts] if isinstance(texts, str) else [part["text"] for part in texts if "text" in part]
    return []


def _call(item: Item) -> dict[str, Any]:
    """A call; what is malformed in it stays as it is, and ends no conversation."""
    name = item.get("name")
    if isinstance(namespace := item.get("namespace"), str) and namespace:
        name = f"{namespace}.{name}"
    function = {"name": name, "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _content(content: Any, where: str) -> Any:
    """Text, or parts in the chat completions' form; other kinds of parts go on as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidRequestError(f"{where} is neither text nor a list of parts", param=where)
    return [_content_part(part, f"{where}.{index}") for index, part in enumerate(content)]


def _content_part(part: Item, where: str) -> dict[str, Any]:
    kind = _text(part, "type", where)
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _text(part, "text", where)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", where)}
    return dict(part)


def _text(given: Item, name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} is not text", param=f"{where}.{name}")
    return value


# ------------------------------------------------------------ in their whole form


def whole_items(given: str | Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Items as responses show them: each with an id, a type and a status, contents as parts."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return [_whole_item(item, response_id, index) for index, item in enumerate(given)]


def _whole_item(item: Item, response_id: str, index: int) -> dict[str, Any]:
    kind = str(item.get("type") or "message")
    own_id = item.get("id") if isinstance(item.get("id"), str) else None
    whole = {**item, "type": kind, "id": own_id or item_id(response_id, kind, index, "i")}
    if kind in ("message", "function_call", "function_call_output") and not whole.get("status"):
        whole["status"] = "completed"
    if kind == "message" and isinstance(content := item.get("content"), str):
        is_output = item.get("role") == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_output else "input_text", "text": content}
        whole["content"] = [part | ({"annotations": [], "logprobs": []} if is_output else {})]
    return whole
