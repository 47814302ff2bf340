"""Whether a command line of a page names commands and options that exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import Any

import typer

from stoker.cli.app import app

PLACEHOLDER = re.compile(r"^(?:[A-Z][A-Z_./:@=0-9\[\]]*\.*|\.\.\.|\[.*|.*\]|\|)$")
"""Words such as MODEL, [PROMPT] or TEXT..., which stand for something."""


@cache
def root() -> Any:
    """The tree of commands; a group has `commands`."""
    return typer.main.get_command(app)


def problem(words: list[str]) -> str:
    """What is wrong with `stoker WORDS`; empty: nothing."""
    command = root()
    known = {"--help"}
    for word in words:
        if word in {"|", ">", "<", "&", "&&", ";", "2>&1"}:
            break
        known |= _options(command)
        name = re.sub(r"[\]\[.]+$", "", word.lstrip("[")).split("\\|")[0].split("|")[0]
        if name.startswith("-") and name not in {"-", "--"}:
            if name.partition("=")[0] not in known:
                return f"{command.name} has no option {name}"
        elif hasattr(command, "commands"):
            if name in command.commands:
                command = command.commands[name]
            elif not PLACEHOLDER.match(word):
                return f"{command.name} has no command {name}"
    return ""


def _options(command: Any) -> set[str]:
    return {
        each
        for parameter in command.params
        for each in (
            *parameter.opts,
            *parameter.secondary_opts,
            *command.context_settings.get("help_option_names", ()),
        )
    }


@cache
def flags() -> frozenset[str]:
    """Every option of every command."""
    found: set[str] = set()
    commands = [root()]
    while commands:
        command = commands.pop()
        found |= _options(command)
        commands += getattr(command, "commands", {}).values()
    return frozenset(found)


def problems(script: str) -> list[str]:
    """What is wrong with the `stoker` commands of a shell script."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\||;|\|", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue  # a quote that goes on in the next line; the shell itself checks the syntax
            while words and re.match(r"^(\w+=|\$|sudo$|exec$|nohup$)", words[0]):
                words.pop(0)
            if words and words[0].rpartition("/")[2] == "stoker" and (wrong := problem(words[1:])):
                found.append(f"{part.strip()}: {wrong}")
    return found
