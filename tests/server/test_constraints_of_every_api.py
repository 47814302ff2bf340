"""Constraints on responses and messages, as on chat completions: by every name, and beside a forced call."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.parametrize("server", ["fake"], indirect=True)

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"enum": [1, "two"]}
JSON = r'1|"two"'
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["days"],
}
ROUTES = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


def body(route: str, **fields: Any) -> dict[str, Any]:
    """A body of that route."""
    if route == "/v1/responses":
        return {"input": HELLO, "max_output_tokens": 300, "seed": 1, **fields}
    return {"messages": HELLO, "max_tokens": 300, "seed": 1, **fields}


def told(answer: dict[str, Any]) -> str:
    """The text of an answer of any of the three APIs."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    (block,) = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return str(block["text"])


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    """(name, arguments) of the one call in an answer of any of the three APIs."""
    if "choices" in answer:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    if "output" in answer:
        (item,) = answer["output"]
        return item["name"], json.loads(item["arguments"])
    (block,) = answer["content"]
    return block["name"], block["input"]


def forced(route: str) -> dict[str, Any]:
    """The fields that force a call there."""
    function = {"name": "look", "parameters": PARAMETERS}
    if route == "/v1/responses":
        choice: Any = {"type": "function", "name": "look"}
        return {"tools": [{"type": "function", **function}], "tool_choice": choice}
    if route == "/v1/messages":
        choice = {"type": "tool", "name": "look"}
        return {"tools": [{"name": "look", "input_schema": PARAMETERS}], "tool_choice": choice}
    choice = {"type": "function", "function": {"name": "look"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}


def schema_format(route: str) -> dict[str, Any]:
    """The route's own field for a format, with `SCHEMA`."""
    if route == "/v1/responses":
        return {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}
    if route == "/v1/messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x"+ "y"'}}, "x+y"),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"json_schema": SCHEMA}, JSON),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
    ],
)
def test_every_api_holds_its_answer_to_it(
    http: httpx.Client, route: str, fields: dict[str, Any], pattern: str
) -> None:
    """SPEC D2, I7: the names of the other servers, wherever the prompt comes from."""
    answer = http.post(route, json=body(route, **fields))
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, told(answer.json())), answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_the_apis_own_format_holds(http: httpx.Client, route: str) -> None:
    """SPEC D2: `response_format`, `text.format`, `output_config.format`."""
    answer = http.post(route, json=body(route, **schema_format(route)))
    assert re.fullmatch(JSON, told(answer.json())), answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_forced_call_wins_over_a_format(http: httpx.Client, route: str) -> None:
    """SPEC D7: clients send both; an answer that is a call has no text to be formed."""
    answer = http.post(route, json=body(route, **forced(route), **schema_format(route)))
    assert answer.status_code == 200, answer.text
    name, arguments = called(answer.json())
    assert name == "look"
    assert 0 <= arguments["days"] <= 9


@pytest.mark.parametrize("route", ROUTES)
def test_a_forced_call_and_a_pattern_are_refused(http: httpx.Client, route: str) -> None:
    """SPEC S3: what was asked for as a pattern of the whole answer cannot be met."""
    answer = http.post(route, json=body(route, **forced(route), regex="a"))
    assert answer.status_code == 400
    assert "regex" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_schema_that_cannot_be_held_to_is_named_by_its_own_field(http: httpx.Client, route: str) -> None:
    """SPEC S3: in the words of the API that was called, streamed or not."""
    fields = json.loads(json.dumps(schema_format(route)).replace(json.dumps(SCHEMA), '{"type": "nothing"}'))
    own = {"/v1/responses": "text.format", "/v1/messages": "output_config.format"}
    for is_stream in (False, True):
        answer = http.post(route, json=body(route, **fields, stream=is_stream))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == own.get(route, "response_format")
