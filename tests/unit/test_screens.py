"""Screens of the commands in a terminal of a given size, as a person sees them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.cli.commands import ps
from stoker.cli.tables import print_line, print_table
from terminal import Terminal
from tiny_models import write_llama


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


def test_a_chat_at_a_dumb_terminal_is_plain_text():
    """T8: what is said of an answer has no escapes there either."""
    words = ("chat", "--no-server", "--no-history", "-m", "fake:eog_period=0", "-n", "8")
    with Terminal("stoker", *words, env={"TERM": "dumb"}) as terminal:
        terminal.until(lambda t: "/help" in t.text)
        terminal.send("Hi\r")
        terminal.until(lambda t: "8 tokens" in t.text and t.lines[-1] == ">")
        terminal.send("/exit\r")
        assert terminal.ended() == 0
    assert b"\x1b[2m" not in terminal.transcript


NAME = "a-model-with-a-rather-long-name-Q4_K_M-00001"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_has_to_be_typed_is_whole_in_the_table_of_models(columns, tmp_path):
    """T10: a name stands in one piece at any width, above or beside what is told of it; so does a path."""
    write_llama(tmp_path / f"{NAME}.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"MZ")
    with Terminal("stoker", "models", columns=columns, env={"STOKER_MODELS_DIR": str(tmp_path)}) as terminal:
        assert terminal.ended() == 0
        shown = terminal.text
    assert "…" not in shown
    (row,) = [line for line in shown.splitlines() if line.startswith(NAME)]
    words = shown.split()
    assert words[words.index(NAME) + 1] == "decoder"
    assert (row.strip() == NAME) == (columns < 120)
    assert str(tmp_path / f"{NAME}.gguf") in shown.replace("\n", "")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_name_of_a_file_breaks_the_table_of_models(columns, tmp_path):
    """T10: wide letters count as such; what would command the terminal or end a line is not shown."""
    wide = "\u30e2\u30c7\u30eb-\u6a21\u578b-\u65e5\u672c\u8a9e-0123456789"
    for name in (wide, "two\nlines", "red\x1b[31m"):
        (tmp_path / f"{name}.gguf").write_bytes(b"MZ")
    with Terminal("stoker", "models", columns=columns, env={"STOKER_MODELS_DIR": str(tmp_path)}) as terminal:
        assert terminal.ended() == 0
        shown = terminal.text
    assert "…" not in shown
    assert wide in shown.replace(" ", "").replace("\n", "")
    assert "two\ufffdlines" in shown
    assert "red\ufffd[31m" in shown


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("columns", [80, 120])
def test_ps_shows_ids_whole(columns, num_models, capsys, monkeypatch):
    """T10: the id of a request is what `cancel` takes; no line is broken by the terminal's edge."""
    monkeypatch.setattr(
        "rich.console.Console", lambda **how: Console(width=columns, force_terminal=True, **how)
    )
    name = "chatcmpl-0123456789abcdef0123456789abcdef"
    slot = {"state": "decode", "model": NAME, "num_tokens": 7, "request_id": name, "class": "interactive"}
    model = {"id": NAME, "state": "ready", "bytes": {"kv": 2**20}, "pinned": True}
    status = {
        "models": [model | {"degraded": ["context 4096 instead of 16384"], "reason": ""}] * num_models,
        "slots": [slot],
        "queue": [slot | {"request_id": "cmpl-2", "position": 3, "eta_s": 4.0}],
        "parked": [],
        "paused": [],
        "engine": {"state": "serving", "label": "", "threads": 1, "restarts": 0},
        "memory": {"footprint": 2**20, "limit": 2**30, "available": 2**29, "pressure": ""},
        "heat": "nominal",
    }
    monkeypatch.setattr(ps, "ask_server", lambda *_: status)
    ps.ps()
    shown = Text.from_ansi(capsys.readouterr().out).plain
    for whole in (
        name,
        NAME,
        "context 4096 instead of 16384",
        "waits, 3 before it, about 4.0 s",
        "1 thread,",
    ):
        assert whole in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns


def shown_table(columns, header, rows, *, is_terminal=True):
    """What `print_table` shows of it, without colours."""
    console = Console(width=columns, force_terminal=is_terminal, file=io.StringIO(), soft_wrap=True)
    print_table(console, header, rows, ["red"])
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()


def test_a_table_that_is_too_wide_has_its_names_above_their_rows():
    """T10: of whatever columns; nothing is lost, and nothing but a name or a reason is beyond the edge."""
    rows = [("a-long-name", "one", "why"), ("b", "two", ""), ("", "three", "x")]
    wide = [
        "name         kind   reason",
        "a-long-name  one    why",
        "b            two",
        "             three  x",
    ]
    assert shown_table(40, ("name", "kind", "reason"), rows) == wide
    narrow = ["name", "  kind", "a-long-name", "  one", "  why", "b", "  two", "  three", "  x"]
    assert shown_table(15, ("name", "kind", "reason"), rows) == narrow
    assert shown_table(15, ("name", "kind", "reason"), rows, is_terminal=False)[0] == "name         kind"
    assert shown_table(9, ("a",), [("abcdefgh",)]) == ["a", "abcdefgh"]
    assert shown_table(9, ("a", "b"), [("a-name-of-more", "why")]) == ["a", "a-name-of-more", "  why"]
    assert shown_table(9, ("a", "b"), []) == ["a  b"]


def test_a_pipe_gets_a_row_a_line(tmp_path, monkeypatch):
    """T8, T10: paths beside their names, without an escape, for `grep` and `awk`."""
    write_llama(tmp_path / f"{NAME}.gguf")
    monkeypatch.setenv("STOKER_MODELS_DIR", str(tmp_path))
    shown = CliRunner().invoke(app, ["models"]).stdout
    assert any(line.startswith(NAME) and line.rstrip().endswith(".gguf") for line in shown.splitlines())
    assert "\x1b" not in shown


@pytest.mark.parametrize("words", [["models"], ["doctor"], ["plan"], ["cache", "ls"], ["cache", "size"]])
def test_documents_have_the_fields_of_their_page(words, monkeypatch, tmp_path):
    """T3: what docs/json.md names is there, and nothing that it does not name."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{' '.join(words)}` |")]
    named = set(re.findall(r"`(\w+)`", line.split("|")[2])) - {"ok", "warning", "broken"}
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    rows = found if isinstance(found, list) else [found]
    assert [set(row) for row in rows if set(row) != named] == []


PATH = "/a/folder/with/a-very-long-name/that-does-not-fit/the-terminal.gguf"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_line_is_folded_between_words_and_a_path_stays_whole(is_terminal):
    """T10: on a terminal; a pipe gets one line."""
    console = Console(
        file=io.StringIO(), width=40, force_terminal=is_terminal, color_system=None, soft_wrap=True
    )
    print_line(
        console, "look   threads    ", f"other programs take the cores, see {PATH} for all that is known"
    )
    lines = console.file.getvalue().splitlines()
    if not is_terminal:
        assert len(lines) == 1
        return
    assert len(lines) > 3
    assert all(line.startswith(" " * 18) for line in lines[1:])
    assert [line for line in lines if PATH in line]
    assert max(len(line) for line in lines if PATH not in line) <= 40
