"""Reasoning apart from answers: in streams, in prompts that open it, and out of the history."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.chat.answer_events import Reasoning
from stoker.chat.conversation import prepared_turn
from stoker.chat.reasoning import (
    BRACKETS,
    THINK,
    ReasoningSplitter,
    ReasoningTags,
    is_opened_by,
    reasoning_tags_of,
    strip_reasoning,
)


def split(text: str, tags: ReasoningTags = THINK, *, is_open: bool = False) -> tuple[str, str]:
    """Reasoning and answer of a text that comes a character at a time."""
    splitter = ReasoningSplitter(tags, is_open=is_open)
    events = [event for char in text for event in splitter.feed(char)] + splitter.finish()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event for event in events if isinstance(event, str))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", ("Hm.\n\nSo.", "Yes.\n")),
        ("\n<think>a</think>b", ("a", "b")),
        ("<think></think>b", ("", "b")),
        ("<think>never ends \n", ("never ends", "")),
        ("<think>a </thin", ("a </thin", "")),
        ("<think>a</think>", ("a", "")),
        ("Just this.", ("", "Just this.")),
        ("<thin air>", ("", "<thin air>")),
        ("<th", ("", "<th")),
        ("b <think>no</think>", ("", "b <think>no</think>")),
        ("<think>a</think>b</think>", ("a", "b</think>")),
        ("", ("", "")),
    ],
)
def test_reasoning_is_what_the_text_begins_with_between_the_tags(text: str, parts: tuple[str, str]) -> None:
    """SPEC D7: reasoning split, white space around it dropped."""
    assert split(text) == parts


def test_a_prompt_that_opened_the_reasoning_needs_no_opening_tag() -> None:
    """SPEC D7: templates that open it in the prompt."""
    assert split("Hm.\n</think>\n\nYes.", is_open=True) == ("Hm.", "Yes.")
    assert split("Hm.", is_open=True) == ("Hm.", "")
    assert is_opened_by("<|im_start|>assistant\n<think>\n", THINK)
    assert not is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not is_opened_by("<|im_start|>assistant\n", THINK)


def test_other_tags_are_known_too() -> None:
    """SPEC D7: per template."""
    assert split("[THINK]a[/THINK]b", BRACKETS) == ("a", "b")
    assert reasoning_tags_of("... [/THINK] ...") is BRACKETS
    assert reasoning_tags_of("{{ content.split('</think>')[-1] }}") is THINK
    assert reasoning_tags_of("plain") is None
    assert reasoning_tags_of(None) is None


def test_a_tag_is_held_while_it_is_partial() -> None:
    """SPEC D7: tags held while partial, no character more, and white space that may stand before one."""
    splitter = ReasoningSplitter(THINK)
    assert splitter.feed("<thi") == []
    assert splitter.feed("nk>a b") == [Reasoning("a b")]
    assert splitter.is_reasoning
    assert splitter.feed(" </th") == []
    assert splitter.feed("at c") == [Reasoning(" </that c")]
    assert splitter.feed("\n</think>\n") == []
    assert not splitter.is_reasoning
    assert splitter.feed("\nd ") == ["d "]
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (
            {"role": "assistant", "content": "<think>a</think>\n\nb", "reasoning_content": "a"},
            {"role": "assistant", "content": "b"},
        ),
        ({"role": "assistant", "content": "a\n</think>\n\nb"}, {"role": "assistant", "content": "b"}),
        ({"role": "assistant", "content": "b"}, {"role": "assistant", "content": "b"}),
        (
            {"role": "assistant", "content": "Write <think>x</think>."},
            {"role": "assistant", "content": "Write <think>x</think>."},
        ),
        (
            {"role": "user", "content": "<think>a</think>b"},
            {"role": "user", "content": "<think>a</think>b"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [1], "reasoning": "a"},
            {"role": "assistant", "content": None, "tool_calls": [1]},
        ),
    ],
)
def test_the_model_is_not_shown_what_it_thought(message: dict[str, Any], kept: dict[str, Any]) -> None:
    """SPEC D7: stripped from history, of the assistant's turns alone."""
    before, question = dict(message), {"role": "user", "content": "And?"}
    assert strip_reasoning([message, question]) == [kept, question]
    assert message == before


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("tags", [THINK, None])
def test_in_a_loop_of_calls_the_template_gets_what_was_thought(name: str, tags: ReasoningTags | None) -> None:
    """adr/0020: behind the user's last turn, by the name that templates know; text stays as it was given."""
    asked = {"role": "user", "content": "Weather?"}
    called = {"role": "assistant", "content": "", "tool_calls": [1], name: "I look."}
    result = {"role": "tool", "content": "<think>rain</think>"}
    inline = {"role": "assistant", "content": "<think>Rain.</think>It rains."}
    shown = {"role": "assistant", "content": "", "tool_calls": [1], "reasoning_content": "I look."}
    assert strip_reasoning([called, asked, called, result, inline], tags) == [
        {"role": "assistant", "content": "", "tool_calls": [1]},
        asked,
        shown,
        result,
        inline,
    ]


def test_a_turn_of_a_model_that_reasons_is_prepared_for_it() -> None:
    """SPEC D7: history stripped, tags looked for, and the place told by the prompt."""
    history = [{"role": "assistant", "content": "<think>a</think>b"}, {"role": "user", "content": "c"}]
    turn = prepared_turn(history, "{{ messages }}</think>")
    assert [message["content"] for message in turn.messages] == ["b", "c"]
    assert turn.control_tokens == ("<think>", "</think>")
    assert turn.form("...<think>\n").is_reasoning
    assert not turn.form("...").is_reasoning
    plain = prepared_turn(history, "{{ messages }}")
    assert plain.messages[0]["content"] == "<think>a</think>b"
    assert plain.form("<think>").tags is None
