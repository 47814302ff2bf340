"""Constraints made to hurt, through a server with a real engine: refused by name, and it answers on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.parametrize("server", ["fake"], indirect=True)


def chain(length: int) -> dict[str, Any]:
    """So many definitions, each of which refers to the next."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}


def endless() -> dict[str, Any]:
    """An object that has to hold itself."""
    return {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


CASES: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": chain(2900)}, "$ref"),
    ({"json_schema": {"$ref": "#"}}, "leads back"),
    ({"json_schema": endless()}, "leads back"),
    ({"json_schema": {"$ref": "http://127.0.0.1/x"}}, "$ref"),
    ({"json_schema": {"type": "string", "minLength": 10**9}}, "minLength"),
    ({"json_schema": {"type": "array", "maxItems": 10**9}}, "maxItems"),
    ({"json_schema": {"type": "number", "multipleOf": 1e-300}}, "multipleOf"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json_schema": '{"minimum": NaN}'}, "NaN"),
    ({"json_schema": '{"minimum": 1' + "0" * 5000 + "}"}, "digits"),
    ({"json_schema": "[" * 100_000}, "deeper"),
    ({"regex": "((a{1,100}){1,100}){1,100}"}, "repeats"),
    ({"regex": r"\p{L}?" * 5000}, "quantifiers"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(" * 5000}, "deeper"),
    ({"regex": "a" * 200_000}, "bytes"),
    ({"grammar": "root ::= root"}, "no finite text"),
    ({"grammar": 'root ::= "a"{0,1000000000}'}, "repeat"),
    ({"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000))}, "rules"),
    ({"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(6000))}, "rules"),
    ({"grammar": 'start: %json {"not": {}}'}, "'not'"),
    ({"grammar": "\n" * 1_000_000}, "empty"),
    ({"grammar": "\n" * 100_000 + "start"}, "grammar"),
    ({"grammar": 'root ::= "a"{' + " " * 100_000}, "cannot read"),
    ({"regex": "a{" + "1" * 5000 + "}"}, "repeats"),
    ({"choice": ["x" * 5000]}, "bytes"),
]


def test_each_is_a_400_that_names_what_is_wrong_while_others_are_served(http: httpx.Client) -> None:
    """SPEC D2, S3: the same engine all the time; somebody else's answer comes whole beside them."""
    before = http.get("/v1/runtime").json()["engine"]
    with ThreadPoolExecutor(1) as other:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        beside = other.submit(http.post, "/v1/completions", json=body)
        for fields, told in CASES:
            answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **fields})
            assert answer.status_code == 400, (str(fields)[:80], answer.text[:200])
            assert told in answer.json()["error"]["message"], answer.text[:300]
        assert beside.result().json()["usage"]["completion_tokens"] == 200
    after = http.get("/v1/runtime").json()["engine"]
    assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_tool_that_cannot_be_forced_is_named(http: httpx.Client, choice: Any) -> None:
    """SPEC D7, D2: keyword, tool and field; without force the same tool is no trouble."""
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 3}
    error = http.post("/v1/chat/completions", json={**body, "tool_choice": choice}).json()["error"]
    assert error["param"] == "tools"
    assert "'uniqueItems' is not supported (at #/properties/a), in the rule args_0_look" in error["message"]
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_numbers_of_a_schema_in_a_body_are_those_of_json(http: httpx.Client) -> None:
    """SPEC S3: whatever the body's reader makes of them it is a 400, never a 500."""
    for number in ("NaN", "1e999", "-Infinity"):
        body = json.dumps({"prompt": "x", "max_tokens": 2, "json_schema": {"minimum": 0}})
        content = body.replace(": 0}", f": {number}}}")
        answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
