"""The command `stoker`: which subcommands there are, in which order and with which examples.

The module of a command imports what is heavy when it runs, so that `stoker --help` answers at once. How
errors end a command is `stoker.cli.command`'s, the exit codes are those of `stoker.cli.exits`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer
from typer.completion import get_completion_inspect_parameters

from stoker.cli.agents import launch
from stoker.cli.calibrate.command import calibrate
from stoker.cli.command import CONTEXT_SETTINGS, HelpfulCommand, HelpfulGroup
from stoker.cli.commands import (
    cache,
    chat,
    choose,
    completion,
    doctor,
    embed,
    models,
    plan,
    ps,
    pull,
    read,
    remote,
    rerank,
    run,
    serve,
)
from stoker.cli.config import commands as config
from stoker.cli.gate import command as gate
from stoker.cli.options import Version, with_version
from stoker.cli.ray import commands as ray
from stoker.cli.top.command import top
from stoker.cli.ui import command as ui

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.process.child import EngineChild

ASKING, MODELS, SERVER, MACHINE = "Ask a model", "Models", "Server", "This machine"

app = typer.Typer(
    cls=HelpfulGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT_SETTINGS,
    help="Run language models on this machine, for people who wait and jobs that do not.",
    epilog="stoker run 'Why is the sky blue?'\nstoker chat\nstoker serve",
)


@app.callback()
def _options(*, _version: Version = False) -> None:
    pass


def _offer(panel: str, name: str, command: Callable[..., None], *examples: str) -> None:
    """Add a command, with what every command has."""
    add = app.command(name, cls=HelpfulCommand, rich_help_panel=panel, epilog="\n".join(examples))
    add(with_version(command))


_offer(
    ASKING,
    "run",
    run.run,
    "stoker run 'Why is the sky blue?'",
    "stoker run 'Summarise this' < report.txt",
    "git diff | stoker run 'Write a commit message for this' --temperature 0",
)
_offer(ASKING, "chat", chat.chat, "stoker chat", "stoker chat --system 'Answer in one sentence.'")
_offer(ASKING, "embed", embed.embed, "stoker embed 'a text' 'another'", "stoker embed < lines.txt > vectors")
_offer(
    ASKING,
    "rerank",
    rerank.rerank,
    "stoker rerank 'capital of France' Bananas Paris",
    "stoker rerank 'who pays?' --top-n 3 < paragraphs.txt",
)
_offer(
    ASKING,
    "choose",
    choose.choose,
    "stoker choose 'The film was great. The mood is' --choice ' good' --choice ' bad'",
)
_offer(
    ASKING,
    "read",
    read.read,
    "stoker read scan.png --ask 'What is the total?'",
    "stoker read *.jpg --schema receipt.json > receipts.jsonl",
)
_offer(MODELS, "models", models.models, "stoker models", "stoker models --json | jq -r '.[].id'")
_offer(
    MODELS,
    "pull",
    pull.pull,
    "stoker pull Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    "stoker pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0",
)
_offer(MODELS, "plan", plan.plan, "stoker plan", "stoker plan big.gguf --ctx-size 32768 --slots 4")
_offer(
    MODELS,
    "calibrate",
    calibrate,
    "stoker calibrate",
    "stoker calibrate big.gguf --only threads",
)
_offer(
    SERVER,
    "serve",
    serve.serve,
    "stoker serve",
    "stoker serve -m chat.gguf -m embedder.gguf --port 8000",
    "stoker serve --config stoker.toml",
)
_offer(
    SERVER,
    "gate",
    gate.gate,
    "stoker gate --peer http://192.168.1.5:8686 --peer http://192.168.1.6:8686 --peer-key-file keys",
    "stoker gate --config gate.toml",
)
_offer(SERVER, "ps", ps.ps, "stoker ps", "stoker ps --url http://192.168.1.5:8686 --api-key KEY")
_offer(SERVER, "top", top, "stoker top", "stoker top --once", "stoker top --json | jq .memory")
_offer(
    SERVER,
    "ui",
    ui.ui,
    "stoker ui",
    "stoker ui --record day.jsonl",
    "stoker ui --replay day.jsonl --speed 10",
)
_offer(SERVER, "load", remote.load, "stoker load chat.gguf --keep-alive 10m")
_offer(SERVER, "unload", remote.unload, "stoker unload chat")
_offer(SERVER, "pin", remote.pin, "stoker pin chat", "stoker pin chat --off")
_offer(
    SERVER,
    "launch",
    launch.launch,
    "stoker launch claude",
    "stoker launch codex -- exec 'Write a test for parse.py'",
)
_offer(SERVER, "suspend", remote.suspend, "stoker suspend", "stoker suspend --grace-s 30")
_offer(SERVER, "resume", remote.resume, "stoker resume")
_offer(MACHINE, "doctor", doctor.doctor, "stoker doctor")
app.add_typer(config.app, name="config", rich_help_panel=SERVER)
app.add_typer(ray.app, name="ray", rich_help_panel=SERVER)
app.add_typer(cache.app, name="cache", rich_help_panel=MACHINE)
app.add_typer(completion.app, name="completion", rich_help_panel=MACHINE)


def run_command(child: EngineChild | None = None) -> None:
    """Run what the command line asks for, and exit.

    Args:
        child: an engine's process that was spawned for it; it is ended where the command has no use for it.
    """
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text file, outside of tests
    if completion.VARIABLE in os.environ:
        get_completion_inspect_parameters()  # registers the shells, which the library's own flags would do
    app(prog_name=completion.PROGRAM, obj=child)
