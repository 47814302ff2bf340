"""What coding agents send over a long conversation, and what must not end it."""

from __future__ import annotations

import logging

import pytest

CALL = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": '{"path": "a", '}}
RESULT = "no such tool"
CHAT = {
    "max_tokens": 1,
    "messages": [
        {"role": "user", "content": "Edit a."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "user", "content": "Go on."},
    ],
}
FUNCTION = {
    **CHAT,
    "messages": [CHAT["messages"][0], {"role": "assistant", "function_call": "edit"}, CHAT["messages"][3]],
}
MESSAGES = {
    "max_tokens": 1,
    "messages": [
        {"role": "user", "content": "Edit a."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "edit", "input": "{a"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": RESULT},
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}
RESPONSES = {
    "max_output_tokens": 1,
    "input": [
        {"role": "user", "content": "Edit a."},
        {"type": "function_call", "call_id": "c1", "name": "edit", "arguments": '{"path": "a", '},
        {"type": "function_call", "name": "edit"},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        {"role": "user", "content": "Go on."},
    ],
}


@pytest.mark.parametrize("server", ["fake"], indirect=True)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", FUNCTION),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", RESPONSES),
    ],
)
def test_a_malformed_call_of_an_earlier_turn_ends_no_conversation(http, caplog, path, body):
    """W2: in each API; the log says that it was there."""
    caplog.set_level(logging.INFO, logger="stoker.tasks.chat")
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "1 earlier turns have malformed tool calls" in caplog.text


WORDS = "Read the file before you edit it; say what you did. "
TOOLS = [{"name": "edit", "description": "Edits a file.", "input_schema": {"type": "object"}}]


def turns_so_far(texts):
    """A conversation in which each answer has called a tool; one call of it is malformed."""
    turns = []
    for number, text in enumerate(texts):
        given = "{broken" if number == 3 else {"path": f"file_{number}"}
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "edit", "input": given}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"line {number}\n" * 9}
        turns += [{"role": "user", "content": f"Do task {number}."}]
        turns += [{"role": "assistant", "content": [{"type": "text", "text": text or "So"}, call]}]
        turns += [{"role": "user", "content": [result]}]
        turns += [{"role": "assistant", "content": [{"type": "text", "text": "Done."}]}]
    return [*turns, {"role": "user", "content": f"Do task {len(texts)}."}]


@pytest.mark.parametrize("server", ["fake"], indirect=True)
def test_an_agents_turns_are_computed_once_though_its_system_prompt_changes(http):
    """W1, W2: twenty turns with a prompt of 6,000 tokens and a header that is never the same."""
    texts = []
    for number in range(20):
        header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number * 7919:05x};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": WORDS * 120}]
        body = {"max_tokens": 8, "system": system, "tools": TOOLS, "messages": turns_so_far(texts)}
        answer = http.post("/v1/messages", json=body, headers={"X-Api-Key": "none"})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        num_cached = usage["cache_read_input_tokens"]
        num_tokens = num_cached + usage["input_tokens"]
        assert num_tokens > 6000
        if number:
            assert num_cached >= 0.95 * num_tokens, (number, usage)
        texts.append("".join(block.get("text", "") for block in answer.json()["content"]))
