"""Completion: what the shells' scripts are answered, and where `completion install` puts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import write_llama


@pytest.fixture
def stoker(tmp_path):
    """One call of the program with a home of its own, in which a model is."""
    models = tmp_path / "models"
    models.mkdir()
    write_llama(models / "talker.gguf")
    home = {"HOME": str(tmp_path), "STOKER_MODELS_DIR": str(models), "SHELL": "/bin/fish"}

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "stoker.cli", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **home, **variables},
        )

    return run


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("mod", ["models"]),
        ("run --json-s", ["--json-schema"]),
        ("run -m talk", ["talker"]),
        ("embed --model t", ["talker"]),
        ("plan tal", ["talker"]),
        ("cache ver", ["verify"]),
    ],
)
def test_bash_is_told_what_fits(stoker, words, found):
    """T11: commands, options, and names of the models that are here."""
    line = f"stoker {words}"
    number = str(len(line.split()) - 1)
    done = stoker(COMP_WORDS=line, COMP_CWORD=number, _STOKER_COMPLETE="complete_bash")
    assert done.stdout.split() == found, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_are_told_what_fits(stoker, shell):
    """T11: in their own forms, with what a command does."""
    variables = {"_TYPER_COMPLETE_ARGS": "stoker pul", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = stoker(**variables, _STOKER_COMPLETE=f"complete_{shell}")
    assert "pull" in done.stdout
    assert "Download a model" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_installed_where_its_shell_looks(stoker, tmp_path, shell):
    """T11: `install` writes what `show` prints; it says where."""
    installed = json.loads(stoker("completion", "install", shell, "--json").stdout)
    assert installed["shell"] == shell
    assert installed["path"].startswith(str(tmp_path))
    script = stoker("completion", "show", shell).stdout.strip()
    assert Path(installed["path"]).read_text(encoding="utf-8").strip() == script
    assert "_STOKER_COMPLETE" in script


def test_the_shell_is_the_users(stoker):
    """T11: named by `SHELL`; where that is another one the question is one line."""
    assert json.loads(stoker("completion", "show", "--json").stdout)["shell"] == "fish"
    other = stoker("completion", "show", SHELL="/bin/dash")
    assert (other.returncode, other.stderr) == (2, "stoker: which shell? name bash, zsh or fish\n")
