"""`stoker config`: what is wrong with a settings file, what it comes to, and keys for it.

Apart because each command has its module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.command import HelpfulCommand, HelpfulGroup
from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Config, Version, with_version
from stoker.errors import InvalidRequestError
from stoker.settings import TABLES, EngineSettings, load_settings, sources_of
from stoker.site_settings import KeySettings, PerModelSettings, hash_of, new_key, read_tables

DEFAULT_FILE = Path("stoker.toml")
File = Annotated[Path, typer.Argument(help="Settings file.", metavar="FILE")]
Resolved = Annotated[bool, typer.Option("--resolved", help="Show defaults too.")]

Name = Annotated[str, typer.Argument(help="What the key is called in the file.", metavar="NAME")]

app = typer.Typer(
    cls=HelpfulGroup,
    rich_markup_mode=None,
    help="Check a settings file, show what holds, make keys for it.",
    epilog="stoker config check stoker.toml\nstoker config show --resolved\nstoker config key phone",
)


@app.callback()
def _options(*, _version: Version = False) -> None:
    pass


@app.command("check", cls=HelpfulCommand, epilog="stoker config check stoker.toml")
@with_version
def check(file: File = DEFAULT_FILE, *, as_json: AsJson = False) -> None:
    """Tell everything that is wrong with a settings file, each with its line; exit code 1 if anything is."""
    from stoker.cli.config.check import problems_of

    problems = problems_of(file)
    if as_json:
        typer.echo(json.dumps([problem._asdict() for problem in problems], indent=2))
    for line, place, text in [] if as_json else problems:
        where = f"{file}:{line}" if line else str(file)
        typer.echo(f"{where}: {place}: {text}" if place else f"{where}: {text}")
    if problems:
        raise typer.Exit(ExitCode.NO)
    if not as_json:
        typer.echo(f"{file}: nothing is wrong")


@app.command("show", cls=HelpfulCommand, epilog="stoker config show --resolved --config stoker.toml")
@with_version
def show(*, resolved: Resolved = False, config: Config = None) -> None:
    """Show the settings that are given and where each comes from; with --resolved those that are not, too."""
    config = config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    engine, server = load_settings({}, config)
    sources = sources_of(config)
    for settings in (engine, server):
        for name, value in settings.model_dump(mode="json").items():
            if name not in TABLES and (resolved or name in sources):
                _show_line(name, value, sources.get(name, "default"))
    _show_models(engine, sources, resolved=resolved)
    for name, each in server.keys.items():
        typer.echo(f"\n[keys.{_bare_or_quoted(name)}]")
        for field, value in each.model_dump(mode="json", exclude_unset=not resolved).items():
            _show_line(field, value, f"keys.{name}" if field in each.model_fields_set else "default")


def _show_models(engine: EngineSettings, sources: dict[str, str], *, resolved: bool) -> None:
    for_all = engine.model_dump(mode="json")
    for name, table in engine.model_tables.items():
        of_all = {*PerModelSettings.model_fields, *(("draft_model",) if name == engine.default_table else ())}
        typer.echo(f"\n[models.{_bare_or_quoted(name)}]")
        for field, value in table.model_dump(mode="json").items():
            if field in table.model_fields_set:
                _show_line(field, value, f"models.{name}")
            elif resolved and field in of_all:
                _show_line(field, for_all[field], f"for all: {sources.get(field, 'default')}")
            elif resolved:
                _show_line(field, value, "default")


def _show_line(name: str, value: object, source: str) -> None:
    typer.echo(f"{name} = {json.dumps(value)}  # {source}")


@app.command("key", cls=HelpfulCommand, epilog="stoker config key phone")
@with_version
def key(name: Name, *, as_json: AsJson = False) -> None:
    """Make a key: its table for the file on stdout, the key itself, which is stored nowhere, on stderr."""
    made = new_key()
    table = {"hash": hash_of(made.encode())}
    try:
        read_tables("keys", KeySettings, {name: table})
    except InvalidRequestError as error:
        text = error.message.removeprefix(f"{error.param}: ")
        raise InvalidRequestError(f"name: {text}", param="name") from None
    if as_json:
        typer.echo(json.dumps({"name": name, "key": made, **table}))
        return
    typer.echo(f"\n[keys.{_bare_or_quoted(name)}]\nhash = {json.dumps(table['hash'])}")
    typer.echo(f"the key, which is not shown again: {made}", err=True)


def _bare_or_quoted(name: str) -> str:
    """As TOML writes a key."""
    is_bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if is_bare else json.dumps(name, ensure_ascii=False)
