"""`--help` of every command: names whole at any width, examples that parse; `-h`, `-V`; one-line errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stoker.cli.app import app
from stoker.cli.exits import MEANINGS
from terminal import Terminal

EXIT_CODES = Path(__file__).parents[2] / "docs" / "exit-codes.md"
GROUP = typer.main.get_command(app)
SHELL_WORDS = {"|", "<", ">", "*.jpg"}


def commands():
    """Every command with the words that call it."""
    for name, command in GROUP.commands.items():
        yield (name,), command
        for inner, further in getattr(command, "commands", {}).items():
            yield (name, inner), further


COMMANDS = [pytest.param(words, command, id=" ".join(words)) for words, command in [((), GROUP), *commands()]]


def invoke(*arguments, **how):
    """One call of the program."""
    return CliRunner().invoke(app, list(arguments), prog_name="stoker", **how)


def stoker(*arguments, **how):
    """One call of the program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **how,
    )


@pytest.mark.parametrize("columns", ["60", "80", "120"])
@pytest.mark.parametrize(("words", "command"), COMMANDS)
def test_help_shows_every_name_whole_at_any_width(words, command, columns, monkeypatch):
    """T1: what cannot be read cannot be typed; no line is wider than the terminal, but for examples."""
    monkeypatch.setenv("COLUMNS", columns)
    top = typer.Context(GROUP, info_name="stoker", **GROUP.context_settings)
    shown = command.get_help(typer.Context(command, info_name=" ".join(words), parent=top) if words else top)
    text, _, examples = shown.partition("\nExamples:\n")
    names = [name for each in command.params for name in each.opts if name.startswith("--")]
    assert [name for name in names if not re.search(rf"{name}(?![\w-])", text)] == []
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "…" not in text
    assert "<" not in text
    assert examples


@pytest.mark.parametrize(("words", "command"), COMMANDS)
def test_the_examples_of_help_are_commands_that_there_are(words, command):
    """T1: each names a command and options that it has."""
    for line in command.epilog.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        given = list(lexer)
        given = given[given.index("stoker") + 1 :]
        given = given[: next((at for at, word in enumerate(given) if word in {"|", "<", ">"}), None)]
        called = GROUP
        while given and given[0] in getattr(called, "commands", {}):
            called = called.commands[given.pop(0)]
        assert not hasattr(called, "commands"), line
        called.make_context("stoker", given, obj=None).close()


@pytest.mark.parametrize(("words", "command"), COMMANDS)
def test_every_command_knows_the_short_names(words, command):
    """T1: `-h` is `--help`; `-V` and `--version` tell the version everywhere."""
    assert invoke(*words, "-h").stdout == invoke(*words, "--help").stdout
    versions = {invoke(*words, flag).stdout for flag in ("-V", "--version")}
    assert len(versions) == 1
    assert versions.pop().startswith("stoker ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--seed", "x"], "--seed: 'x' is no whole number; see stoker run --help"),
        (["run", "-n", "0"], "-n: '0' is less than 1; see stoker run --help"),
        (["run", "--max-tokens=0"], "--max-tokens: '0' is less than 1; see stoker run --help"),
        (["run", "--schema", "{", "x"], "--schema: it is no JSON: "),
        (["run", "--json-schema={", "x"], "--json-schema: it is no JSON: "),
        (["plan", "x", "--limit", "1XB"], "--limit: '1XB' is not a size"),
        (["plan", "x", "--memory-limit", "1XB"], "--memory-limit: '1XB' is not a size"),
        (["run", "--tempeature", "1"], "no such option: --tempeature; did you mean --temperature?; see"),
        (["load", "--ctx", "1"], "no such option: --ctx; did you mean --ctx-size?; see stoker load --help"),
        (["run", "--timeout", "1"], "no such option: --timeout; see stoker run --help"),
        (["run", "--lora", "x"], "no such option: --lora; it is of `stoker serve`; see stoker run --help"),
        (["run", "--choice="], "no such option: --choice; it is of `stoker choose`; see stoker run --help"),
        (["embed", "x", "--url", "nope"], "the URL of a server looks like http://127.0.0.1:8686, not like"),
        (["run", "--n", "3"], "no such option: --n; did you mean -n?; see stoker run --help"),
        (["modles"], "no such command 'modles'. Did you mean 'models'"),
        (["completion", "show", "ksh"], "SHELL: 'ksh' is not one of 'bash', 'zsh', 'fish'; see"),
        (["run", "Hi", "-m", "a\x1b]0;b\x07"], "no model 'a"),
        (["rerank"], "missing argument 'QUERY'; see stoker rerank --help"),
        (["cache", "lss"], "no such command 'lss'"),
        (["embed", "x", "--url", "http://127.0.0.1:1", "--no-server"], "--url and --no-server exclude"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text):
    """T2: without a box, a usage block or words of a library."""
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"stoker: {text}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("words", [["ps"], ["run", "x"], ["ui"], ["load", "x"]])
def test_a_server_that_is_not_there_is_told_in_words_of_the_command_line(words):
    """T2: `url` is an argument of the library."""
    done = invoke(*words, "--url", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert done.stderr.endswith("`stoker serve`, or say where one is with --url or STOKER_URL\n")


@pytest.mark.parametrize("words", [[], ["cache"], ["completion"]])
def test_a_group_without_a_command_shows_its_help(words):
    """T1: the first thing that is typed, `stoker`, is no mistake."""
    done = invoke(*words)
    assert (done.exit_code, done.stdout, done.stderr) == (0, invoke(*words, "--help").stdout, "")


@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--help"], ["serve", "--help"]])
def test_a_reader_that_left_ends_every_command_the_same_way(arguments):
    """T3: 141 and no word, as a shell says of a program that SIGPIPE ended."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--version"]])
def test_a_closed_stdout_is_no_error(arguments):
    """T3: `stoker models >&-` does its work and says nothing."""
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -m stoker.cli "$@" >&-', sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("columns", [80, 120])
def test_help_in_a_terminal_fits_it(columns):
    """T1: at the width of the window nothing is wrapped by the terminal itself."""
    with Terminal("stoker", "serve", "--help", columns=columns, rows=24) as terminal:
        assert terminal.ended() == 0
        shown = terminal.text
    assert "--default-max-tokens" in shown
    assert "--cache-ram-bytes" in shown
    assert shown == terminal.transcript.decode().replace("\r\n", "\n").rstrip("\n")


def test_json_is_a_document_of_its_own(tmp_path):
    """T3: stdout carries nothing else."""
    done = stoker("models", "--json", env={**os.environ, "STOKER_MODELS_DIR": str(tmp_path)})
    assert isinstance(json.loads(done.stdout), list)


def test_the_table_of_exit_codes_is_the_one_of_the_code():
    """T3: they stand once in the code and once in the documentation, and both say the same."""
    rows = [
        line for line in EXIT_CODES.read_text(encoding="utf-8").splitlines() if line[:3].strip("| ").isdigit()
    ]
    assert rows == [f"| {code} | {text.replace('|', chr(92) + '|')} |" for code, text in MEANINGS.items()]
