"""The terminal that screens are tested in."""

import sys

import pytest

from terminal import Terminal


def test_a_program_is_seen_at_the_width_of_its_terminal():
    """What it asks of the terminal is what the test gave."""
    with Terminal("sh", "-c", "stty size; exit 3", columns=57, rows=11) as terminal:
        assert terminal.ended() == 3
        assert terminal.lines == ["11 57"]


def test_what_is_typed_reaches_it_and_lines_that_left_the_screen_are_kept():
    """A conversation longer than the screen is whole in `text`."""
    with Terminal("sh", "-c", "read a; seq 1 30; echo got $a", rows=10) as terminal:
        terminal.send("hello\r")
        text = terminal.until("got hello")
        assert terminal.ended() == 0
    assert [line for line in text.splitlines() if line.isdigit()] == [str(n) for n in range(1, 31)]


def test_waiting_for_what_never_comes_fails_with_what_was_shown():
    """A program that ended says so at once."""
    with (
        Terminal("sh", "-c", "echo something else") as terminal,
        pytest.raises(AssertionError, match="something else"),
    ):
        terminal.until("never")


def test_ctrl_c_interrupts_the_program():
    """The terminal is the program's own: the key is a signal to it."""
    program = "import time; print('up', flush=True); time.sleep(100)"  # a shell may miss it as it forks
    with Terminal(sys.executable, "-c", program) as terminal:
        terminal.until("up")
        terminal.send("\x03")
        assert terminal.ended() in (-2, 130)
