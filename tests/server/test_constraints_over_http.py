"""Constraints through the server: the fields of OpenAI, llama-server and vLLM, on the fake model's bytes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.parametrize("server", ["fake"], indirect=True)

HELLO = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"\d{4}-(0[1-9]|1[0-2])"
FRUIT = ["apple", "apple pie", "pear"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SUM = 'root ::= [0-9] "+" [0-9]'


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_is_json_of_its_schema(client: openai.OpenAI, seed: int) -> None:
    """SPEC D2: `response_format`, streamed and not, the same text for a seed."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked: Any = {"model": "default", "messages": HELLO, "response_format": form, "seed": seed}
    whole = client.chat.completions.create(**asked, max_tokens=400)
    assert whole.choices[0].finish_reason == "stop"
    text = whole.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), PERSON)
    chunks = client.chat.completions.create(**asked, max_tokens=400, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": DATE}, DATE),
        ({"guided_regex": DATE}, DATE),
        ({"structured_outputs": {"regex": DATE}}, DATE),
        ({"choice": FRUIT}, "|".join(FRUIT)),
        ({"guided_choice": FRUIT}, "|".join(FRUIT)),
        ({"grammar": SUM}, r"\d\+\d"),
        ({"grammar": '<root> ::= "a" | "b" <root>'}, "b*a"),
        ({"grammar": 'start: "x"+ "y"'}, "x+y"),
        ({"json_schema": {"enum": [1, "two"]}}, '1|"two"'),
        ({"guided_json": '{"const": true}'}, "true"),
    ],
)
def test_every_field_holds_every_choice_to_it(
    http: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    """SPEC D2, I7: with `n`, the whole text matches."""
    body = {"prompt": "say", "max_tokens": 300, "n": 3, "seed": 1, **fields}
    answer = http.post("/v1/completions", json=body).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_any_json_object_will_do(http: httpx.Client) -> None:
    """SPEC D2: json_object; what is cut short by max_tokens says so."""
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 60, "seed": 3}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"regex": "a(b"}, "regex", ""),
        ({"regex": "a", "choice": ["b"]}, "regex", "together"),
        ({"choice": []}, "choice", "1 to"),
        ({"json_schema": {"type": "object", "unevaluatedProperties": False}}, "", "unevaluatedProperties"),
        ({"json_schema": {"not": {"type": "string"}}}, "", "not"),
        ({"grammar": "root ::= nothing"}, "grammar", "nothing"),
        ({"grammar": "(" * 100_000}, "grammar", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "together"),
        (
            {"guided_json": {"type": "nothing"}, "tools": TOOLS, "tool_choice": "required"},
            "tool_choice",
            "forces",
        ),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json", "nothing"),
    ],
)
def test_what_cannot_be_held_to_is_a_400_that_says_why(
    http: httpx.Client, fields: dict[str, Any], param: str, told: str
) -> None:
    """SPEC D2, S3: and the engine answers on."""
    is_chat = "response_format" in fields or "tools" in fields
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = {"max_tokens": 5, **fields, **({"messages": HELLO} if "chat" in route else {"prompt": "x"})}
    answer = http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert told in error["message"]
    assert not param or error["param"] == param
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
