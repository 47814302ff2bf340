"""Function calling as it was before tools: `functions`, `function_call` and the role `function`.

Owns what each of these is in terms of tools. Older clients still send them; one call an answer is what they
know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.chat.conversation import ToolOffer
from stoker.errors import InvalidRequestError
from stoker.tasks.chat import offer_of


def function_offer(functions: Sequence[Any], function_call: Any) -> ToolOffer:
    """The offer of `functions`, with `function_call` as the choice among them.

    Raises:
        InvalidRequestError: malformed; `param` names the field.
    """
    try:
        return offer_of([_tool(one) for one in functions], _choice(function_call), is_parallel=False)
    except InvalidRequestError as error:
        raise InvalidRequestError(_named(error.message), param=_named(error.param or "")) from None


def call_id(name: str) -> str:
    """The id that links a call of this function to its result: the old form has names only."""
    return f"call_{name}"


def tool_call(call: Any, where: str) -> dict[str, Any]:
    """`function_call` of an assistant's message as an entry of `tool_calls`. Raises InvalidRequestError."""
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise InvalidRequestError(f"{where} is not a call of a function with a name", param=where)
    return {"id": call_id(call["name"]), "type": "function", "function": dict(call)}


def _tool(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _choice(given: Any) -> Any:
    return _tool({"name": given.get("name")}) if isinstance(given, Mapping) else given


def _named(text: str) -> str:
    """A message or path about tools, about functions."""
    text = text.replace("tool_choice.function", "function_call").replace("tool_choice", "function_call")
    return text.replace(".function", "").replace("tools", "functions")
