"""`stoker chat` with lines from a pipe: its commands, turns that fail, and JSON for programs."""

import json
import logging
import os
import signal
import stat

import pytest
from PIL import Image
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.cli.chat.commands import CommandCompleter, typed
from stoker.cli.chat.loop import ChatLoop
from stoker.cli.chat.session import ChatReply


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Settings of nobody's home, and an engine in this process."""
    for name in ("STATE_HOME", "CACHE_HOME"):
        monkeypatch.setenv(f"XDG_{name}", str(tmp_path / name))
    for name in ("MODELS_DIR", "RUN_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"STOKER_{name}", str(tmp_path / name))
    monkeypatch.setenv("STOKER_ISOLATION", "thread")


@pytest.fixture
def chat(tmp_path):
    """A function that lets lines into a chat whose model gives these answers, one a turn."""

    def run(lines, *options, answers=("One.", "Two.", "Three."), orders=""):
        script = tmp_path / "script"
        script.write_text("\f".join(answers), encoding="utf-8")
        words = ["chat", "-m", f"fake:script={script}{orders}", "--no-server", *options]
        return CliRunner().invoke(app, words, input="".join(f"{line}\n" for line in lines))

    return run


def test_each_line_of_a_pipe_is_a_turn_and_stdout_holds_the_answers_alone(chat):
    """I16: reasoning, notes and figures are not among them."""
    result = chat(["Hi", "", "Again"], answers=["<think>hm</think>One.", "Two."])
    assert (result.exit_code, result.stdout) == (0, "One.\nTwo.\n")
    assert "hm" in result.stderr


def test_json_is_one_object_a_turn(chat):
    """I16: text, reasoning, model, figures; an error stands in the answer's place."""
    result = chat(
        ["Hi", "x" * 9000, "Again"], "--json", "--ctx-size", "512", answers=["<think>hm</think>One."]
    )
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert (first["text"], first["reasoning"], first["finish_reason"]) == ("One.", "hm", "stop")
    assert first["completion_tokens"] == len("<think>hm</think>One.") + 1
    assert second["error"]["code"] == "context_length_exceeded"
    assert third["prompt_tokens"] > first["prompt_tokens"]
    assert result.exit_code == 2


def test_a_turn_that_fails_is_forgotten_and_the_chat_goes_on(chat):
    """What bad input gets: the next turn does not carry it, and the exit code tells."""
    result = chat(["x" * 9000, "Hi"], "--ctx-size", "512")
    assert (result.exit_code, result.stdout) == (2, "One.\n")
    assert "; /clear starts over" in result.stderr


def test_the_system_message_is_shown_and_changed_and_what_is_forgotten_is_said(chat):
    """I16: a bare /system wipes nothing; what wipes says so."""
    lines = ["/system", "Hi", "/system", "Again", "/clear", "/system Be brief.", "Hi", "/system -", "/system"]
    result = chat(lines, "--system", "Be kind.")
    assert result.stdout == "One.\nTwo.\nOne.\n"
    assert result.stderr.splitlines() == [
        "system message: Be kind.",
        "system message: Be kind.",
        "2 turns forgotten; the system message stays",
        "started over with another system message: 0 turns forgotten",
        "started over without a system message: 1 turn forgotten",
        "no system message",
    ]


@pytest.mark.parametrize(
    ("line", "command", "text", "looks_mistyped"),
    [
        ("/etc/hosts what is this?", "", "/etc/hosts what is this?", False),
        ("//clear", "", "/clear", False),
        ("/claer", "", "/claer", True),
        ("/ 2", "", "/ 2", False),
        ("/system  Be brief. ", "/system", "Be brief.", False),
        ("/save! a b.md", "/save!", "a b.md", False),
        ("/quit", "/exit", "", False),
        ("plain", "", "plain", False),
    ],
)
def test_what_is_no_command_is_text(line, command, text, looks_mistyped):
    """I16: `//` or an unknown word begins a text."""
    found = typed(line)
    assert (found.command, found.text, found.looks_mistyped) == (command, text, looks_mistyped)


def test_what_looks_like_a_mistyped_command_is_sent_and_said_to_be(chat):
    """I16."""
    result = chat(["/claer"])
    assert result.stdout == "One.\n"
    assert "/help lists" in result.stderr


def test_retry_answers_the_last_turn_again_in_its_place(chat, tmp_path):
    """I16: with another seed, so it is refused where nothing is drawn, and the former answer stays."""
    saved = tmp_path / "c.json"
    result = chat(["/retry", "Hi", "/retry", "Again", f"/save {saved}"])
    assert result.stdout == "One.\nOne.\nTwo.\n"
    assert "nothing has been asked yet" in result.stderr
    texts = [turn["content"] for turn in json.loads(saved.read_text(encoding="utf-8"))["messages"]]
    assert texts == ["Hi", "One.", "Again", "Two."]
    result = chat(["Hi", "/retry", "/retry 0.8", "/retry x", "Again"], "--temperature", "0")
    assert result.stdout == "One.\nOne.\nTwo.\n"
    assert "/retry 0.8" in result.stderr
    assert "'x' is no number" in result.stderr


def test_retry_draws_with_another_seed(tmp_path):
    """I16: the same seed gives the same answer, a retry another one, the next chat both again."""
    words = [
        "chat",
        "-m",
        "fake:eog_period=0",
        "--no-server",
        "--seed",
        "7",
        "-n",
        "24",
        "--temperature",
        "1",
    ]
    first = CliRunner().invoke(app, words, input="Hi\n/retry\n/retry\n").stdout
    assert len(set(first.splitlines())) == 3
    assert CliRunner().invoke(app, words, input="Hi\n/retry\n/retry\n").stdout == first


def test_a_conversation_is_saved_as_markdown_or_json_and_never_replaced_unasked(chat, tmp_path):
    """I16: by the end of the name; readable by its owner alone."""
    file = tmp_path / "talk.md"
    lines = [
        "Hi",
        f"/save {file}",
        "Again",
        f"/save '{file}'",
        f"/save! {file}",
        f"/save {tmp_path}/talk.txt",
        f"/save {tmp_path}/gone/talk.md",
        "/save",
    ]
    result = chat(lines, "--system", "Be kind.")
    assert result.stdout == "One.\nTwo.\n"
    text = file.read_text(encoding="utf-8")
    assert text == (
        "**System**\n\nBe kind.\n\n**You**\n\nHi\n\n**fake**\n\nOne.\n\n"
        "**You**\n\nAgain\n\n**fake**\n\nTwo.\n"
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"1 turn written to {file}" in result.stderr
    assert "is there already" in result.stderr
    assert ".md or .json" in result.stderr
    assert f"there is no folder {tmp_path}/gone" in result.stderr
    assert "nothing to save yet" in chat([f"/save {tmp_path}/other.md"]).stderr


def test_the_models_are_listed_and_another_one_answers(chat):
    """I16: the conversation goes on with it; what cannot answer is refused."""
    lines = ["Hi", "/model", "/model fake:id=other,eog_period=0", "Again", "/model", "/model gone", "/stats"]
    result = chat(lines, "-n", "5")
    assert result.stdout.startswith("One.\n")
    assert "\n* other" in result.stderr
    assert "  fake\n" in result.stderr
    assert "stoker: no model 'gone' here" in result.stderr
    assert "other: 2 answers: 10 tokens" in result.stderr
    assert "is an encoder" in chat(["/model fake:id=vectors,encoder=1"]).stderr


def test_an_image_goes_with_the_next_turn_of_a_model_that_reads_them(chat, tmp_path):
    """I16: a clear message where it reads none, or where the file is no image."""
    image = tmp_path / "a cat.png"
    Image.new("RGB", (64, 48), "red").save(image)
    result = chat(
        [f"/image {image}", f"/image {tmp_path}/gone.png", "/image", "What?", "/image"], orders=",vision=1"
    )
    told = result.stderr
    assert result.stdout == "One.\n"
    assert "a cat.png goes with the next turn, 64 x 48 pixels" in told
    assert "gone.png" in told
    assert "with the next turn: a cat.png" in told
    assert "no image goes with the next turn" in told
    lines = [f"/image {image}", "x" * 9000, "/image", "/retry", "/clear", "Hi", "/image"]
    result = chat(lines, "--ctx-size", "512", orders=",vision=1")
    assert result.stderr.count("with the next turn: a cat.png") == 1, "a turn that failed keeps its images"
    result = chat([f"/image {image}", "Hi"])
    assert "takes text, no pictures" in result.stderr
    assert (result.exit_code, result.stdout) == (2, "One.\n")
    assert chat(["Hi"], "--image", str(image)).exit_code == 2


def test_there_are_no_tools_and_help_lists_every_command(chat):
    """I16: a chat runs nothing that a model asks for, and says so."""
    result = chat(["/tools", "/help"])
    assert "tools are off" in result.stderr
    for name in ("/model", "/system", "/image", "/retry", "/save", "/stats", "/clear", "/exit"):
        assert name in result.stderr


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat, monkeypatch):
    """I16: what came stays in the conversation; the next line is answered."""
    take = ChatReply.take

    def take_and_interrupt(reply, delta):
        take(reply, delta)
        if reply.text == "Stop":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ChatReply, "take", take_and_interrupt)
    lines = ["Hi", "Go on"]
    result = chat(
        lines, "--json", answers=["Stop here, as this is long.", "Two."], orders=",step_delay_s=0.02"
    )
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["finish_reason"], second["text"], result.exit_code) == ("cancelled", "Two.", 0)
    assert first["text"].startswith("Stop")
    assert "long" not in first["text"]


def test_a_warning_stands_behind_the_answer_in_which_it_came(chat, monkeypatch):
    """I16: what the engine logs meanwhile is no part of what the model says."""

    def warn(*_):
        logging.getLogger("stoker.somewhere").warning("the machine is busy")
        logging.getLogger("stoker.somewhere").info("nobody asked")

    monkeypatch.setattr(ChatLoop, "_on_notice", warn)
    result = chat(["Hi", "Again"], answers=["One.\n" * 5, "Two."])
    assert result.output.startswith("One.\n" * 5 + "warning: the machine is busy\n")
    assert "Two.\nwarning: the machine is busy\n" in result.output
    assert result.stdout == "One.\n" * 5 + "Two.\n"
    assert "nobody" not in result.output


def test_an_option_out_of_range_is_refused_before_a_model_is_loaded(chat):
    """I16: one line that names it."""
    result = chat(["Hi"], "--top-p", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "top_p" in result.stderr.replace("-", "_")


def test_a_model_that_ends_at_once_is_said_to(chat):
    """I16: an empty answer is no silence at a terminal; programs see it in the JSON."""
    result = chat(["Hi"], "--json", answers=[""])
    assert json.loads(result.stdout)["completion_tokens"] == 1


def test_tab_completes_names_of_models():
    """I16."""
    completer = CommandCompleter(lambda: ["qwen", "quiet", "other"])

    def completed(line):
        return [found.text for found in completer.get_completions(Document(line), CompleteEvent())]

    assert completed("/model qu") == ["quiet"]
    assert completed("/mo") == ["/model"]
    assert completed("mo") == completed("/clear x") == []
