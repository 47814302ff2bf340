"""Answers of a given form by the library: the fields of HTTP, and classes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from stoker import Runtime
from stoker.errors import AnswerInvalidError, InvalidRequestError, error_from_info
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.tasks.fields import request_of
from stoker.tasks.form import AnswerSchema
from stoker.tasks.read_images import Question

FAKE = "fake:eog_period=0"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Place(BaseModel):
    """Where."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Trip(BaseModel):
    """Of places, one inside the other."""

    stops: list[Place] = Field(min_length=1, max_length=2)


@dataclasses.dataclass
class Pair:
    """What pydantic knows without being of pydantic."""

    left: bool
    right: bool


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    """A runtime on the fake backend, which writes at random whatever it is held to."""
    async with Runtime(FAKE, isolation="thread", ctx_size=8192, drain_s=0.0) as started:
        yield started


@pytest.mark.parametrize(
    ("field", "given", "pattern"),
    [
        ("regex", "[0-9]{3}", "[0-9]{3}"),
        ("choice", ["red", "blue"], "red|blue"),
        ("choice", ("red",), "red"),
        ("grammar", 'root ::= "a" "b"', "ab"),
        ("grammar", 'start: "c" "d"', "cd"),
        ("json_schema", {"enum": [1, 2]}, "[12]"),
        ("json_schema", '{"enum": [3]}', "3"),
        ("schema", {"enum": [4]}, "4"),
        ("schema", bool, "true|false"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": [5]}}}, "5"),
        ("response_format", {"type": "json_object", "schema": {"enum": [6]}}, "6"),
    ],
)
async def test_every_form_holds_by_the_name_it_has_over_http(
    runtime: Runtime, field: str, given: Any, pattern: str
):
    """D4, D2: of a completion, of a chat and of a whole answer."""
    how: dict[str, Any] = {field: given, "max_tokens": 60, "seed": 2}
    completion = "".join([delta.text async for delta in runtime.generate("N:", **how)])
    chat = "".join([delta.text async for delta in runtime.chat("N?", **how)])
    answer = await runtime.ask("N?", **how)
    for text in (completion, chat, answer.text):
        assert re.fullmatch(pattern, text.strip()), text
    assert (answer.parsed is None) is (field != "schema")


async def test_any_object_and_any_text_are_forms_too():
    """D2: `json_object` without a schema, and `text`, which is none."""
    wanted = request_of("x", {"response_format": {"type": "json_object"}}).constraint
    assert wanted is not None
    assert wanted.kind is ConstraintKind.JSON_OBJECT
    assert request_of("x", {"response_format": {"type": "text"}, "regex": None}).constraint is None


async def test_an_answer_is_an_instance_of_the_class_that_was_asked_for(runtime: Runtime):
    """FOUND library: `schema=` takes classes; what one allows is all that the model may write."""
    answer = await runtime.ask("Where?", schema=Trip, seed=4, max_tokens=600)
    assert isinstance(answer.parsed, Trip)
    assert answer.parsed == Trip.model_validate_json(answer.text)
    other = await runtime.ask("Which?", schema=Pair, seed=4, max_tokens=100)
    assert isinstance(other.parsed, Pair)
    several = await runtime.ask("Which?", schema=list[bool], raw=True, seed=1, max_tokens=300)
    assert several.parsed == json.loads(several.text)


async def test_an_answer_by_a_json_schema_is_its_values(runtime: Runtime):
    """FOUND library: checked, not only constrained."""
    answer = await runtime.ask("Where?", schema=SCHEMA, seed=4, max_tokens=100)
    assert answer.parsed == json.loads(answer.text)
    assert answer.parsed["city"] in {"Oslo", "Rome"}


async def test_what_is_not_of_the_schema_is_an_error_that_keeps_the_text(runtime: Runtime):
    """FOUND library: cut off, or what the schema does not allow; it crosses processes with its text."""
    with pytest.raises(AnswerInvalidError, match=r"cut off after 2 tokens \(max_tokens\)") as caught:
        await runtime.ask("Where?", schema=Place, seed=4, max_tokens=2)
    assert caught.value.details["text"]
    again = error_from_info(caught.value.info())
    assert isinstance(again, AnswerInvalidError)
    assert again.details == caught.value.details
    with pytest.raises(ValueError, match="at city: Input should be 'Oslo' or 'Rome'"):
        AnswerSchema(Place).value('{"city": "Bonn", "days": 2}')
    with pytest.raises(ValueError, match=r"at city: 'Bonn' is not one of"):
        AnswerSchema(SCHEMA).value('{"city": "Bonn"}')
    with pytest.raises(ValueError, match="no JSON"):
        AnswerSchema(SCHEMA).value("Oslo")


async def test_an_answer_that_was_cancelled_or_is_a_call_has_no_value(runtime: Runtime):
    """L6: it ended as somebody wished."""
    async for delta in runtime.chat("hi", schema=Trip, request_id="mine", max_tokens=4000):
        assert delta.request_id
        break
    tools = [{"type": "function", "function": {"name": "look"}}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300, "seed": 1}
    answer = await runtime.ask("hi", schema=Trip, tools=tools, **forced)
    assert answer.parsed is None
    assert answer.tool_calls


def test_a_reading_takes_a_class_as_well():
    """`rt.read(img, schema=Place)` was a TypeError (D17)."""
    question = Question(schema=Place)
    assert question.constraint is not None
    assert json.loads(question.constraint.source)["additionalProperties"] is False
    assert question.value('{"city": "Oslo", "days": 2}') == Place(city="Oslo", days=2)


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice and regex cannot be asked for together", "regex"),
        ({"regex": 5}, "regex is a text, got int", "regex"),
        ({"grammar": ["a"]}, "grammar is a text", "grammar"),
        ({"choice": "abc"}, "choice is a list of texts", "choice"),
        ({"choice": [1]}, "choice is a list of texts", "choice"),
        ({"choice": []}, "choice has 0 texts", "choice"),
        ({"schema": "int"}, "schema is a class or a JSON Schema, not text", "schema"),
        ({"schema": Place(city="Oslo", days=1)}, "write schema=Place, the class itself", "schema"),
        ({"schema": asyncio.Lock}, "neither a class that pydantic knows", "schema"),
        ({"schema": {"type": "strin"}}, "the schema is wrong at type", "schema"),
        ({"json_schema": Place}, "a class is asked for by schema", "json_schema"),
        ({"json_schema": {"default": object()}}, "no JSON can hold", "json_schema"),
        ({"response_format": Place}, "a class is asked for by schema", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format is", "response_format"),
        ({"constraint": 5}, "constraint: expected", "constraint"),
    ],
)
def test_a_form_that_is_none_is_refused_in_words(fields: dict[str, Any], text: str, param: str):
    """By the name that the caller used (D17, D20)."""
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as caught:
        request_of("x", fields)
    assert caught.value.param == param


async def test_one_set_of_names_and_the_former_ones_warn(runtime: Runtime):
    """FOUND library: the names of HTTP; those of before 0.2 still work."""
    former: dict[str, Any] = {"constraint": Constraint.of_regex("a"), "keep_alive_s": 5.0, "adapters": ()}
    with pytest.warns(DeprecationWarning, match=" is .* now") as caught:
        answer = await runtime.ask("x", max_tokens=9, **former)
    assert answer.text == "a"
    said = sorted(str(warning.message) for warning in caught)
    assert [text.split()[2] for text in said] == ["lora", "one", "keep_alive"]
    assert {warning.filename for warning in caught} == {__file__}
    assert len((await runtime.status()).engine.slots) == 8
    with pytest.warns(DeprecationWarning, match="num_slots is slots now"):
        await runtime.load_model("default", num_slots=2)
    assert len((await runtime.status()).engine.slots) == 2
    with pytest.warns(DeprecationWarning, match="unpin_model"):
        await runtime.pin_model("default", is_pinned=False)
    await runtime.pin_model("default")
    assert runtime.model_states()[0].is_pinned
    await runtime.unpin_model("default")
    assert not runtime.model_states()[0].is_pinned
    with pytest.raises(InvalidRequestError, match="no field 'n_slots'; did you mean"):
        await runtime.load_model("default", n_slots=2)
    with pytest.raises(InvalidRequestError, match="no field 'temprature'"):
        await anext(runtime.generate("x", temprature=1))


@pytest.mark.parametrize(
    ("lora", "kept"),
    [
        ("a", (("a", None),)),
        ({"a": 0.5, "b": None}, (("a", 0.5), ("b", None))),
        (["a", ("b", 2.0), {"id": 0, "scale": 1.0}], (("a", None), ("b", 2.0), (0, 1.0))),
        ([{"id": "c"}], (("c", None),)),
    ],
)
def test_adapters_are_named_as_over_http(lora: Any, kept: Any):
    """K6: a name, names with scales, or a list of either."""
    assert request_of("x", {"lora": lora}).adapters == kept


@pytest.mark.parametrize("lora", [3, [3], [("a", 1.0, 2)], [{"name": "a"}], b"a", [("a", "b")]])
def test_adapters_that_are_none_are_refused_by_their_name(lora: Any):
    """The field that the caller gave (D17)."""
    with pytest.raises(InvalidRequestError, match="lora") as caught:
        request_of("x", {"lora": lora})
    assert caught.value.param == "lora"


def test_a_time_to_stay_is_seconds_or_text():
    """R8: as over HTTP; what is no class is told which there are."""
    assert request_of("x", {"keep_alive": "5m"}).keep_alive_s == 300.0
    assert request_of("x", {"keep_alive": -1}).keep_alive_s == -1.0
    with pytest.raises(InvalidRequestError, match="keep_alive: 'soon' is not a time"):
        request_of("x", {"keep_alive": "soon"})
    with pytest.raises(InvalidRequestError, match="known: interactive, background"):
        request_of("x", {"priority": "urgent"})
