"""A conversation with tools that are run here, until the model answers.

Owns the rounds: an answer's calls are run, their results become turns, and the model is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from stoker.client.requests.stream import ToolCall
from stoker.errors import InvalidRequestError
from stoker.ipc.usage import Usage, total_usage
from stoker.tasks.ask import Answer, AnsweringRuntime, AskKeywords, ask
from stoker.tasks.fields import Message, turns_of
from stoker.tasks.functions import PythonTool

__all__ = ["RunToolsKeywords", "ToolRun", "run_tools"]

MAX_ROUNDS = 8


class ToolRun(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a conversation with tools.

    Attributes:
        answer: the last one. It has calls only where one is of a tool that is no Python function.
        messages: the conversation, with the turns that were added, the answer's included.
        num_rounds: how often calls were run.
        usage: tokens of all the answers together.
    """

    answer: Answer
    messages: list[Message]
    num_rounds: int
    usage: Usage


class RunToolsKeywords(AskKeywords, total=False):
    """Those of `ask`, and the most rounds."""

    max_rounds: int


async def run_tools(
    runtime: AnsweringRuntime, messages: str | Sequence[Message], **fields: Unpack[RunToolsKeywords]
) -> ToolRun:
    """Ask, run the calls of the answer, and ask again with their results, until an answer has no calls.

    The calls of an answer run one after the other. What a function raises, and arguments that it does not
    take, are told to the model as its result. After `max_rounds` rounds no tool may be called any more.

    Args:
        runtime: that has the model.
        messages: as for `chat`.
        fields: as for `ask`; `tools` are Python functions. A `tool_choice` that forces a call does so once.
            `max_rounds` is how often calls are run, 8 unless it is given.

    Raises:
        InvalidRequestError: there are no tools, or one cannot be described.
        StokerError: a request was refused or failed.
    """
    offered = fields.get("tools")
    told = [
        PythonTool(tool) if callable(tool) else tool
        for tool in (offered if isinstance(offered, list | tuple) else ())
    ]
    tools = {tool.name: tool for tool in told if isinstance(tool, PythonTool)}
    if not tools:
        raise InvalidRequestError("tools: a list of Python functions is needed", param="tools")
    described = [tool.described if isinstance(tool, PythonTool) else tool for tool in told]
    given: dict[str, Any] = {**fields, "tools": described}
    max_rounds = given.pop("max_rounds", MAX_ROUNDS)
    turns, usages = list(turns_of(messages)), []
    num_rounds = 0
    while True:
        if num_rounds >= max_rounds:
            given = {**given, "tool_choice": "none"}
        answer = await ask(runtime, turns, **given)
        usages.append(answer.usage)
        turns.append(_turn(answer))
        if not answer.tool_calls or any(call.name not in tools for call in answer.tool_calls):
            return ToolRun(answer=answer, messages=turns, num_rounds=num_rounds, usage=total_usage(usages))
        for call in answer.tool_calls:
            result = await tools[call.name].result(call.arguments)
            turns.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        num_rounds += 1
        given = {**given, "tool_choice": None}


def _turn(answer: Answer) -> Message:
    """The answer as a turn of the conversation."""
    turn: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        turn["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        turn["tool_calls"] = [_call(call) for call in answer.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
