"""Python functions as tools: what a model is told of them, and the loop that runs them."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field
from scripted_engine import model_info

import stoker.sync
from stoker import FinishReason, Runtime, TextDelta
from stoker.client.requests.stream import ToolCall
from stoker.errors import InvalidRequestError
from stoker.ipc.model import ModelInfo
from stoker.ipc.usage import Usage
from stoker.tasks.chat import offer_of
from stoker.tasks.functions import PythonTool
from stoker.tasks.run_tools import run_tools

FAKE = "fake:eog_period=0"


class Unit(StrEnum):
    """Of a temperature."""

    C = "celsius"
    F = "fahrenheit"


class Report(BaseModel):
    """A result that is no text."""

    city: str
    degrees: float


def weather(city: Annotated[str, Field(max_length=9)], unit: Unit = Unit.C) -> Report:
    """Say what the weather is.

    Args:
        city: where.
        unit: of the result.
    """
    return Report(city=city, degrees=20.0 if unit is Unit.C else 68.0)


async def later(days: int) -> str:
    """Wait."""
    return f"{days} days later"


@functools.wraps(later)
def decorated(*args: Any, **kwargs: Any) -> Any:
    """As a decorator leaves it: it looks synchronous and returns a coroutine."""
    return later(*args, **kwargs)


def parsed(city: str) -> Report:
    """Read a report that is none."""
    return Report.model_validate({"city": city})


def broken() -> None:
    """Fail."""
    raise RuntimeError("no network")


async def test_a_function_is_described_by_its_signature_and_docstring():
    """FOUND library: names, types, defaults and what the docstring says."""
    (tool,) = offer_of([weather]).tools
    assert (tool.name, tool.description.splitlines()[0]) == ("weather", "Say what the weather is.")
    assert "city: where." in tool.description
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["city"]["maxLength"] == 9
    assert tool.parameters["additionalProperties"] is False
    assert "celsius" in json.dumps(tool.parameters)


@pytest.mark.parametrize(
    ("function", "arguments", "result"),
    [
        (weather, '{"city": "Oslo"}', '{"city":"Oslo","degrees":20.0}'),
        (weather, '{"city": "Oslo", "unit": "fahrenheit"}', '{"city":"Oslo","degrees":68.0}'),
        (weather, '{"unit": "kelvin"}', "error: city: Missing required argument; unit: Input should be"),
        (weather, '{"city": "Oslo", "when": 1}', "error: when: Unexpected keyword argument"),
        (weather, "no JSON", "error: arguments: Invalid JSON"),
        (later, '{"days": 3}', "3 days later"),
        (later, '{"days": "x"}', "error: days: Input should be a valid integer"),
        (broken, "{}", "error: RuntimeError: no network"),
        (parsed, '{"city": "Oslo"}', "error: ValidationError: 1 validation error for Report"),
        (decorated, '{"days": 2}', "2 days later"),
        (threading.get_ident, "{}", ""),
    ],
)
async def test_a_call_gives_text_whatever_happens(function: Any, arguments: str, result: str):
    """FOUND library: values as JSON, errors as results; a plain function does not hold the loop up."""
    if function is threading.get_ident:

        def where() -> int:
            """In a thread of its own."""
            return threading.get_ident()

        assert await PythonTool(where).result("{}") != str(threading.get_ident())
        return
    assert (await PythonTool(function).result(arguments)).startswith(result)


async def test_a_result_is_bounded():
    """S4: what a function returns becomes part of the prompt."""

    def long() -> str:
        return "x" * 100_000

    text = await PythonTool(long).result("{}")
    assert len(text) < 66_000
    assert text.endswith("it has 100000 characters)")


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (lambda city: city, "no name that a model could call it by"),
        (7, "tools.0 is not an object"),
    ],
)
def test_what_is_no_tool_is_refused(tool: Any, text: str):
    """By a typed error (D17)."""
    with pytest.raises(InvalidRequestError, match=text):
        offer_of([tool])

    def strange(lock: threading.Lock) -> None: ...

    with pytest.raises(InvalidRequestError, match="parameters of strange cannot be described"):
        offer_of([strange])


async def test_a_model_calls_a_function_and_answers():
    """D7: from a model that knows nothing: one forced call, then it may write."""
    called: list[int] = []

    def count(number: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Count."""
        called.append(number)
        return "counted"

    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    async with Runtime(FAKE, isolation="thread", ctx_size=16384, drain_s=0.0) as runtime:
        run = await runtime.run_tools("Count.", tools=[count], max_rounds=1, seed=1, max_tokens=300, **forced)
    assert len(called) == run.num_rounds == 1
    assert [turn["role"] for turn in run.messages] == ["user", "assistant", "tool", "assistant"]
    assert run.messages[2]["content"] == "counted"
    assert run.answer.tool_calls == ()
    assert run.usage.completion_tokens > run.answer.usage.completion_tokens


def test_a_script_runs_tools_too():
    """I9: stoker.sync mirrors it."""
    with (
        stoker.sync.Runtime(FAKE, isolation="thread", drain_s=0.0) as runtime,
        pytest.raises(InvalidRequestError, match="a list of Python functions"),
    ):
        runtime.run_tools("Count.", tools=[])


async def test_one_function_alone_is_no_list_of_tools():
    """A typed error that says what is taken."""
    with pytest.raises(InvalidRequestError, match="a list of Python functions"):
        await run_tools(Told(), "Go.", tools=later)  # type: ignore[arg-type]


# ------------------------------------------------------------ rounds


class Told:
    """A runtime that answers with what it is given, one answer a request."""

    def __init__(self, *answers: Sequence[ToolCall] | str) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[dict[str, Any]], Any]] = []

    def resolve(self, model: str | None) -> ModelInfo:
        """Some model."""
        return model_info("m", "m.gguf")

    async def chat(self, messages: Any, **fields: Any) -> AsyncGenerator[TextDelta, None]:
        """The next answer."""
        self.asked.append((list(messages), fields.get("tool_choice")))
        answer = self.answers.pop(0)
        text = answer if isinstance(answer, str) else ""
        calls = [] if isinstance(answer, str) else list(answer)
        usage = Usage(prompt_tokens=1, completion_tokens=2)
        yield TextDelta(text=text, tool_calls=calls, finish_reason=FinishReason.STOP, usage=usage)

    def generate(self, prompt: Any, **fields: Any) -> AsyncGenerator[TextDelta, None]:
        """Not asked for."""
        raise AssertionError


LATER = ToolCall("a", "later", '{"days": 1}')


async def test_calls_are_run_in_their_order_until_there_are_none():
    """FOUND library: results carry the ids of their calls; a forced call is forced once; usage is summed."""
    runtime = Told([LATER, ToolCall("b", "broken", "{}")], [LATER], "Done.")
    run = await run_tools(runtime, "Go.", tools=[later, broken], tool_choice="required")
    assert (run.answer.text, run.num_rounds, run.usage.completion_tokens) == ("Done.", 2, 6)
    results = [turn for turn in run.messages if turn["role"] == "tool"]
    assert [(turn["tool_call_id"], turn["content"]) for turn in results] == [
        ("a", "1 days later"),
        ("b", "error: RuntimeError: no network"),
        ("a", "1 days later"),
    ]
    assert run.messages[1]["tool_calls"][0]["function"] == {"name": "later", "arguments": '{"days": 1}'}
    assert [choice for _, choice in runtime.asked] == ["required", None, None]


async def test_rounds_are_bounded_and_the_last_answer_may_call_nothing():
    """FOUND library: bounded; the caller gets an answer, not an endless conversation."""
    runtime = Told([LATER], [LATER], "Enough.")
    run = await run_tools(runtime, "Go.", tools=[later], max_rounds=2)
    assert (run.answer.text, run.num_rounds) == ("Enough.", 2)
    assert [choice for _, choice in runtime.asked] == [None, None, "none"]


async def test_a_call_of_what_is_no_function_of_ours_is_the_callers():
    """D7: a tool in OpenAI's form is offered and not run."""
    other = {"type": "function", "function": {"name": "other"}}
    run = await run_tools(Told([ToolCall("a", "other", "{}")]), "Go.", tools=[later, other])
    assert run.answer.tool_calls[0].name == "other"
    assert run.num_rounds == 0
