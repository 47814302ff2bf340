"""Runs the blocks of a page in order, as a reader would, and compares what they print with the page."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import options
import yaml
from blocks import Block

from stoker.settings import load_settings

PAGE_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):8686")
NEEDS_SERVER = re.compile(PAGE_ADDRESS.pattern + r"|stoker (?:ps|top|load|unload|pin|suspend|resume)\b")
PATIENCE_S = 240.0
SESSION = re.compile(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", re.MULTILINE)
"""A command, which goes on after a backslash at the end of a line, and what it prints."""
SHELL = ["/bin/bash", "-eu", "-o", "pipefail", "-c"]


class WrongPageError(AssertionError):
    """A page says what does not hold."""


@dataclass
class Place:
    """A folder with what the blocks before have left there.

    Attributes:
        folder: where everything runs.
        env: of every program.
        server_url: gives the address that stands for the one on the page.
        printed: standard output of the last block that ran.
    """

    folder: Path
    env: dict[str, str]
    server_url: Callable[[], str]
    printed: str = field(default="", init=False)

    def do(self, block: Block) -> None:
        """Run, compare or parse one block, as its language and mark say."""
        match block.mark, block.language:
            case (("drawing" | "sample"), "text"):
                pass
            case "output", ("text" | "json"):
                compare(block.text, self.printed)
            case "file", language:
                if language != "text":
                    check_syntax(block)
                (self.folder / block.words).write_text(block.text, encoding="utf-8")
            case "not run", _:
                check_syntax(block)
            case _, "python":
                check_syntax(block)
                self.printed = self._run(
                    [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c"], block.text
                )
            case _, ("sh" | "bash"):
                check_syntax(block)
                self.printed = self._run(SHELL, block.text)
            case _, "console":
                self._converse(block)
            case _, "toml":
                path = self.folder / "of_the_page.toml"
                path.write_text(block.text, encoding="utf-8")
                load_settings({}, path)
            case _:
                check_syntax(block)

    def _converse(self, block: Block) -> None:
        """Every line after `$` is run; the lines up to the next one are what it prints."""
        check_syntax(block)
        for command, expected in SESSION.findall(block.text):
            self.printed = self._run(SHELL, command)
            if expected.strip():
                compare(expected, self.printed)

    def _run(self, program: list[str], text: str) -> str:
        """What it prints to standard output; it has to end well."""
        env = self.env
        if NEEDS_SERVER.search(text):
            env = {**env, "STOKER_URL": self.server_url()}
            text = PAGE_ADDRESS.sub(self.server_url().removeprefix("http://"), text)
        done = subprocess.run(
            [*program, text],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise WrongPageError(f"exit {done.returncode}:\n{text}\n{done.stdout}\n{done.stderr}")
        return done.stdout


def check_syntax(block: Block) -> None:
    """What can be said of a block without running it; an unknown language is refused."""
    match block.language:
        case "python":
            compile(block.text, str(block), "exec")
        case "sh" | "bash" | "console":
            script = block.text
            if block.language == "console":
                script = "".join(command for command, _ in SESSION.findall(script))
            done = subprocess.run(
                [*SHELL[:1], "-n"], input=script, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise WrongPageError(done.stderr)
            check_commands(script)
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "yaml":
            yaml.safe_load(block.text)
        case "ini":
            unit = configparser.ConfigParser(strict=False, interpolation=None)
            unit.read_string(block.text)
            starts = [
                value for section in unit.values() for key, value in section.items() if key.startswith("exec")
            ]
            check_commands("\n".join(starts))
        case _:
            raise WrongPageError(
                "nobody runs this; give it a language that is run, or a mark (tests/docs/blocks.py)"
            )


def check_commands(script: str) -> None:
    """Its `stoker` commands have the names and options they use."""
    if found := options.problems(script):
        raise WrongPageError("\n".join(found))


def compare(expected: str, printed: str) -> None:
    """That a page shows what was printed, numbers and the width of columns aside.

    `...` at the end of a line stands for its rest, on a line of its own for any lines.
    """
    lines = [re.escape(_plain(line)) for line in expected.strip("\n").splitlines()]
    pattern = "\n".join(
        ".*(?:\n.*)*?" if line == r"\.\.\." else line.replace(r"\.\.\.", ".*?") for line in lines
    )
    shown = "\n".join(_plain(line) for line in printed.strip("\n").splitlines())
    if not re.fullmatch(pattern, shown):
        raise WrongPageError(f"the page shows\n{expected}\nbut this was printed\n{printed}")


def _plain(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,]\d+)*", "0", line)).strip()
