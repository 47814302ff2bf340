"""The command `stoker`: which subcommands there are, in which order and with which examples.

A command is imported and built when it is asked for, as each would else wait for all others; `--help` asks
for all. What is heavy their modules import when they run. How errors end a command is `stoker.cli.command`'s,
the exit codes are those of `stoker.cli.exits`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.completion import get_completion_inspect_parameters

from stoker.cli.command import CONTEXT_SETTINGS, HelpfulCommand, HelpfulGroup
from stoker.cli.commands import completion
from stoker.cli.options import Version, with_version

if TYPE_CHECKING:
    from stoker.client.process.child import EngineChild

ASKING, MODELS, SERVER, MACHINE = "Ask a model", "Models", "Server", "This machine"


class _Offer(NamedTuple):
    """A command: the panel of `--help` it stands in, where it is below `stoker.cli`, and examples.

    `MODULE:NAME` is a function, or the application of a group of commands.
    """

    panel: str
    where: str
    examples: tuple[str, ...] = ()


_OFFERS = {
    "run": _Offer(
        ASKING,
        "commands.run:run",
        (
            "stoker run 'Why is the sky blue?'",
            "stoker run 'Summarise this' < report.txt",
            "git diff | stoker run 'Write a commit message for this' --temperature 0",
        ),
    ),
    "chat": _Offer(
        ASKING, "commands.chat:chat", ("stoker chat", "stoker chat --system 'Answer in one sentence.'")
    ),
    "embed": _Offer(
        ASKING,
        "commands.embed:embed",
        ("stoker embed 'a text' 'another'", "stoker embed < lines.txt > vectors"),
    ),
    "rerank": _Offer(
        ASKING,
        "commands.rerank:rerank",
        (
            "stoker rerank 'capital of France' Bananas Paris",
            "stoker rerank 'who pays?' --top-n 3 < paragraphs.txt",
        ),
    ),
    "choose": _Offer(
        ASKING,
        "commands.choose:choose",
        ("stoker choose 'The film was great. The mood is' --choice ' good' --choice ' bad'",),
    ),
    "read": _Offer(
        ASKING,
        "commands.read:read",
        (
            "stoker read scan.png --ask 'What is the total?'",
            "stoker read *.jpg --schema receipt.json > receipts.jsonl",
        ),
    ),
    "models": _Offer(
        MODELS, "commands.models:models", ("stoker models", "stoker models --json | jq -r '.[].id'")
    ),
    "pull": _Offer(
        MODELS,
        "commands.pull:pull",
        ("stoker pull Qwen/Qwen2.5-0.5B-Instruct-GGUF", "stoker pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0"),
    ),
    "plan": _Offer(
        MODELS, "commands.plan:plan", ("stoker plan", "stoker plan big.gguf --ctx-size 32768 --slots 4")
    ),
    "calibrate": _Offer(
        MODELS,
        "calibrate.command:calibrate",
        ("stoker calibrate", "stoker calibrate big.gguf --only threads"),
    ),
    "serve": _Offer(
        SERVER,
        "commands.serve:serve",
        (
            "stoker serve",
            "stoker serve -m chat.gguf -m embedder.gguf --port 8000",
            "stoker serve --config stoker.toml",
        ),
    ),
    "gate": _Offer(
        SERVER,
        "gate.command:gate",
        (
            "stoker gate --peer http://192.168.1.5:8686 --peer http://192.168.1.6:8686 --peer-key-file keys",
            "stoker gate --config gate.toml",
        ),
    ),
    "ps": _Offer(
        SERVER, "commands.ps:ps", ("stoker ps", "stoker ps --url http://192.168.1.5:8686 --api-key KEY")
    ),
    "top": _Offer(
        SERVER, "top.command:top", ("stoker top", "stoker top --once", "stoker top --json | jq .memory")
    ),
    "ui": _Offer(
        SERVER,
        "ui.command:ui",
        ("stoker ui", "stoker ui --record day.jsonl", "stoker ui --replay day.jsonl --speed 10"),
    ),
    "load": _Offer(SERVER, "commands.remote:load", ("stoker load chat.gguf --keep-alive 10m",)),
    "unload": _Offer(SERVER, "commands.remote:unload", ("stoker unload chat",)),
    "pin": _Offer(SERVER, "commands.remote:pin", ("stoker pin chat", "stoker pin chat --off")),
    "launch": _Offer(
        SERVER,
        "agents.launch:launch",
        ("stoker launch claude", "stoker launch codex -- exec 'Write a test for parse.py'"),
    ),
    "suspend": _Offer(SERVER, "commands.remote:suspend", ("stoker suspend", "stoker suspend --grace-s 30")),
    "resume": _Offer(SERVER, "commands.remote:resume", ("stoker resume",)),
    "doctor": _Offer(MACHINE, "commands.doctor:doctor", ("stoker doctor",)),
    "config": _Offer(SERVER, "config.commands:app"),
    "ray": _Offer(SERVER, "ray.commands:app"),
    "cache": _Offer(MACHINE, "commands.cache:app"),
    "completion": _Offer(MACHINE, "commands.completion:app"),
}


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each built when it is looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = dict.fromkeys(_OFFERS)

    def __getitem__(self, name: str) -> Any:
        if self._built[name] is None:
            self._built[name] = _built(name, _OFFERS[name])
        return self._built[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As of any mapping; a KeyError of what is imported is no unknown name."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._built

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)


class _AllCommands(HelpfulGroup):
    """The group of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()


app = typer.Typer(
    cls=_AllCommands,
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


def _built(name: str, offer: _Offer) -> Any:
    """The library's command, with what every command has."""
    module, _, attribute = offer.where.partition(":")
    target = getattr(import_module(f"stoker.cli.{module}"), attribute)
    alone = typer.Typer(rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        alone.add_typer(target, name=name, rich_help_panel=offer.panel)
    else:
        epilog = "\n".join(offer.examples)
        add = alone.command(name, cls=HelpfulCommand, rich_help_panel=offer.panel, epilog=epilog)
        add(with_version(target))
    return typer.main.get_group(alone).commands[name]


def run_command(child: EngineChild | None = None) -> None:
    """Run what the command line asks for, and exit.

    Args:
        child: an engine's process that was spawned for it; it is ended where the command has no use for it.
    """
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text file, outside of tests
    if completion.VARIABLE in os.environ:
        get_completion_inspect_parameters()  # registers the shells, which the library's own flags would do
    app(prog_name=completion.PROGRAM, obj=child)
