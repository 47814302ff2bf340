"""Screens of the commands in a terminal of a given size, as a person sees them."""

from __future__ import annotations

import pytest

from terminal import Terminal


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_an_answer_is_plain_text_where_no_cursor_moves(term):
    """T8: `TERM=dumb` gets the answer as it comes, in lines of its own, without an escape."""
    words = ("run", "Hi", "--no-server", "-m", "fake:eog_period=0", "-n", "12", "--seed", "1")
    with Terminal("stoker", *words, columns=120, env={"TERM": term}) as terminal:
        assert terminal.ended() == 0
        shown = terminal.text.strip().splitlines()
    assert "12 tokens, " in shown[-1]
    assert len(shown) == 2, "an answer of a line and its figures"
    assert (b"\x1b" in terminal.transcript) == (term != "dumb")
