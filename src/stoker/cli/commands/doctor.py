"""`stoker doctor`: what this machine offers Stoker, what is broken, and what to do about it.

Owns how findings are shown and the exit code; `stoker.cli.commands.examination` finds them.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.options import AsJson, Config, engine_settings

_MARKS = {"ok": "[green]ok    [/]", "warning": "[yellow]look  [/]", "broken": "[red]broken[/]"}


def doctor(*, as_json: AsJson = False, config: Config = None) -> None:
    """Examine the build, the CPU, memory and models; exit code 1 if something is broken."""
    from stoker.cli.commands.examination import Level, examine

    findings = examine(engine_settings(config))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            console.print(f"{_MARKS[finding.level]} {finding.subject:<10} {escape(finding.text)}")
            if finding.remedy:
                console.print(f"{'':17} -> {escape(finding.remedy)}")
    if any(finding.level is Level.BROKEN for finding in findings):
        raise typer.Exit(1)
