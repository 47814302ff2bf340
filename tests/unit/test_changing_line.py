"""The line that a coding agent changes with every request, taken out of its system prompt."""

from __future__ import annotations

import pytest

from stoker.chat.conversation import prepared_turn
from stoker.chat.turns import without_changing_line
from stoker.models.chat_templates import CHATML

LINE = "x-anthropic-billing-header: cc_version=2.1.4; cc_entrypoint=cli; cch=a1b2c;"
USER = {"role": "user", "content": "Hi"}


def parts(*texts):
    """A content of text parts."""
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (f"{LINE}\nYou are an agent.", "You are an agent."),
        (f"You are an agent.\n  {LINE}\r\nBe brief.", "You are an agent.\nBe brief."),
        (f"You are an agent.\n{LINE.upper()}", "You are an agent.\n"),
        (f"Say {LINE}", f"Say {LINE}"),
        (parts(LINE, "You are an agent."), parts("You are an agent.")),
        (parts(f"{LINE}\nA", "B"), parts("A", "B")),
        (None, None),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_changing_line_is_taken_out_of_the_first_system_text(role, content, kept):
    """SPEC W1: as a line of its own; what is around it stays, character for character."""
    turns = [{"role": role, "content": content}, USER]
    if kept:
        assert without_changing_line(turns) == [{"role": role, "content": kept}, USER]
    assert turns[0]["content"] == content


def test_a_system_text_of_that_line_alone_is_none():
    """SPEC W1: the prompt is that of a conversation without it."""
    assert without_changing_line([{"role": "system", "content": LINE}, USER]) == [USER]
    assert without_changing_line([{"role": "system", "content": parts(LINE)}, USER]) == [USER]


def test_the_line_stays_wherever_else_somebody_wrote_it():
    """SPEC W1: in the user's words, and in later system texts."""
    turns = [{"role": "system", "content": "A"}, {"role": "user", "content": LINE}]
    turns.append({"role": "system", "content": LINE})
    assert without_changing_line(turns) == turns
    assert without_changing_line([USER]) == [USER]


def test_two_requests_with_other_lines_have_one_prompt():
    """SPEC W1: by the way that every API goes."""
    turns = [prepared_turn([{"role": "system", "content": f"{LINE}{n}\nA"}, USER], CHATML) for n in (1, 2)]
    assert turns[0].messages == turns[1].messages
    assert turns[0].messages[0]["content"] == "A"
