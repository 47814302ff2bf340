"""Kept conversations with tools read again in the form of their own API, and prompts with tools shown."""

from __future__ import annotations

import json

import msgspec
import pytest
import stand_in
from stand_in import FINISHED, INFO, delta

from planning import planned_chat
from stoker.client.store.file import KeptRequest
from stoker.errors import NotReadyError
from stoker.ipc.request import FinishReason
from stoker.tasks.chat import offer_of

TEMPLATE = "{{ tools }}<tool_call></tool_call></think>{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT = '<think>Hm.</think>So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
HELLO = [{"role": "user", "content": "Hi"}]
STORY = [*(delta(char) for char in TEXT), delta("", finish_reason=FinishReason.STOP), FINISHED]


@pytest.fixture
def tool_model(monkeypatch):
    """The stand-in's model has a template that knows tools and reasoning."""
    monkeypatch.setattr(stand_in, "INFO", msgspec.structs.replace(INFO, chat_template=TEMPLATE))


def note():
    """What the front keeps with a conversation that offers tools."""
    info = msgspec.structs.replace(INFO, chat_template=TEMPLATE)
    return planned_chat(info, HELLO, offer_of(TOOLS)).fields({})["note"]


def attached(scripted, http, own, story=STORY):
    """Every JSON document of the stream of a kept request whose answer has that id."""
    kept = KeptRequest(id=own, names=["mine", own], is_chat=True, model="m", note=note())
    scripted.runtime.kept_requests[:] = [kept]
    scripted.runtime.kept_scripts[own] = story
    with http.stream("GET", f"/v1/runtime/requests/{own}/stream") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_kept_conversations_calls_are_calls_again(scripted, scripted_http):
    """SPEC L2, D7: content, reasoning and calls, with the ids that they had."""
    runs = []
    for own in ("chatcmpl-1", "chatcmpl-1", "chatcmpl-2"):
        found = attached(scripted, scripted_http, own)
        deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
        assert "".join(one.get("content") or "" for one in deltas) == "So:"
        assert "".join(one.get("reasoning_content") or "" for one in deltas) == "Hm."
        pieces = [piece for one in deltas for piece in one.get("tool_calls", ())]
        assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"a": 1}
        assert [c["finish_reason"] for chunk in found for c in chunk["choices"]][-1] == "tool_calls"
        runs.append(pieces[0]["id"])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("own", "last", "failed"),
    [("resp_1", "response.completed", "response.failed"), ("msg_1", "message_stop", "error")],
)
def test_it_comes_in_the_events_of_its_own_api(scripted, scripted_http, own, last, failed):
    """SPEC L2, S1: which the answer's id tells; its errors too."""
    found = attached(scripted, scripted_http, own)
    assert found[-1]["type"] == last
    assert any("tool_use" in str(event) or "function_call" in str(event) for event in found)
    broken = attached(scripted, scripted_http, f"{own}-x", [delta("a"), NotReadyError("gone")])
    assert broken[-1]["type"] == failed


def test_a_request_takes_its_form_along(scripted, scripted_http, tool_model):
    """SPEC L2: the runtime is given what a later program needs to read the answer."""
    scripted_http.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS})
    assert scripted.runtime.requests[0].note == note()


def test_the_shown_prompt_is_the_one_with_tools(scripted, scripted_http, tool_model):
    """S1, D7: /apply-template takes what /v1/chat/completions takes."""
    bare = scripted_http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    body = {"messages": HELLO, "tools": TOOLS}
    shown = scripted_http.post("/apply-template", json=body).json()["prompt"]
    assert "tools=" in shown
    assert "tools=" not in bare
    none = scripted_http.post("/apply-template", json={**body, "tool_choice": "none"}).json()["prompt"]
    assert none == bare
    refused = scripted_http.post("/apply-template", json={**body, "tool_choice": "sometimes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
