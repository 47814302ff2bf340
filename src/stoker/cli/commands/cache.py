"""`stoker cache`: what the disk tier of the prefix cache holds, and how to be rid of it (SPEC C9).

Works on the files alone, whether a server runs or not: one that misses a file computes it again.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.command import HelpfulCommand, HelpfulGroup
from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Config, Version, engine_settings, with_version
from stoker.cli.tables import new_console, print_table
from stoker.wording import count_text, size_text

if TYPE_CHECKING:
    from stoker.cache.disk.files import PrefixFolder
    from stoker.cache.disk.prefix_file import PrefixFile

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Keep = Annotated[bool, typer.Option("--keep", help="Leave damaged files where they are.")]

app = typer.Typer(
    cls=HelpfulGroup,
    rich_markup_mode=None,
    help="Look at the stored prefixes on disk, check them or remove them.",
    epilog="stoker cache ls\nstoker cache clear --yes",
)


@app.callback()
def _options(*, _version: Version = False) -> None:
    pass


@app.command("ls", cls=HelpfulCommand, epilog="stoker cache ls")
@with_version
def ls(*, as_json: AsJson = False, config: Config = None) -> None:
    """List the stored prefixes, the latest used first."""
    folder = _folder(config)
    found = folder.files()[::-1]
    if as_json:
        typer.echo(json.dumps([_as_record(file) for file in found], indent=2))
    elif not found:
        typer.echo(f"nothing is stored in {folder.folder}")
    else:
        _show(found, folder.folder)


@app.command("size", cls=HelpfulCommand, epilog="stoker cache size")
@with_version
def size(*, as_json: AsJson = False, config: Config = None) -> None:
    """Show what all stored prefixes take on disk, and what they may take."""
    folder = _folder(config)
    total, files = folder.total_bytes(), folder.files()
    if as_json:
        record = {
            "folder": str(folder.folder),
            "num_files": len(files),
            "num_tokens": sum(file.num_tokens for file in files),
            "size_bytes": total,
            "limit_bytes": folder.limit_bytes,
        }
        typer.echo(json.dumps(record, indent=2))
        return
    prefixes = count_text(len(files), "prefix", "prefixes")
    typer.echo(f"{size_text(total)} of {size_text(folder.limit_bytes)}, {prefixes}, in {folder.folder}")


@app.command("clear", cls=HelpfulCommand, epilog="stoker cache clear")
@with_version
def clear(*, yes: Yes = False, as_json: AsJson = False, config: Config = None) -> None:
    """Remove every stored prefix; what is asked for again is computed again."""
    folder = _folder(config)
    total = folder.total_bytes()
    if not yes:
        typer.confirm(f"Remove {size_text(total)} of stored prefixes from {folder.folder}?", abort=True)
    removed = folder.clear()
    if as_json:
        typer.echo(json.dumps({"num_removed": len(removed), "size_bytes": total}))
    else:
        typer.echo(f"removed {count_text(len(removed), 'file')}, {size_text(total)}")


@app.command("verify", cls=HelpfulCommand, epilog="stoker cache verify")
@with_version
def verify(*, keep: Keep = False, as_json: AsJson = False, config: Config = None) -> None:
    """Read every file through and remove what is damaged; exit code 1 if something is."""
    folder = _folder(config)
    num_sound, damaged = 0, []
    for found in folder.verify():
        if not found.problem:
            num_sound += 1
            continue
        if not keep:
            folder.remove(found.name)
        damaged.append({"name": found.name, "problem": found.problem, "is_removed": not keep})
    if as_json:
        typer.echo(json.dumps({"num_sound": num_sound, "damaged": damaged}, indent=2))
    else:
        for each in damaged:
            fate = "kept" if keep else "removed"
            typer.echo(f"{each['name']}: {each['problem']}; {fate}")
        typer.echo(f"{count_text(num_sound, 'file', 'files')} sound, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(ExitCode.NO)


def _folder(config: Path | None) -> PrefixFolder:
    from stoker.cache.disk.files import FOLDER_NAME, PrefixFolder

    settings = engine_settings(config)
    return PrefixFolder(settings.cache_dir / FOLDER_NAME, settings.cache_disk_bytes)


def _as_record(file: PrefixFile) -> dict[str, object]:
    return {
        "name": file.name,
        "model": file.source,
        "fingerprint": file.model,
        "namespace": file.namespace.hex(),
        "num_tokens": file.num_tokens,
        "size_bytes": file.size_bytes,
        "is_background": file.is_background,
        "used": _time(file.used_s).isoformat(timespec="seconds"),
    }


def _show(found: list[PrefixFile], folder: Path) -> None:
    console = new_console()
    rows = [
        (
            str(file.num_tokens),
            size_text(file.size_bytes),
            "background" if file.is_background else "interactive",
            _time(file.used_s).strftime("%Y-%m-%d %H:%M"),
            f"{file.name} for {Path(file.source).name}",
        )
        for file in found
    ]
    print_table(console, ("tokens", "size", "class", "last used", "file and model"), rows)
    console.print(f"folder: {folder}", style="dim")


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).astimezone()
