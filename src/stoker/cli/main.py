"""The command `stoker`: which subcommands there are and how an error ends one.

Owns exit codes: 0 done, 1 `doctor` or `cache verify` found something broken or `plan` no room, 2 the input or
the machine is at fault, 130 Ctrl-C, 141 the reader of a pipe left. The module of a
command imports what is heavy when it runs, so that `stoker --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stoker.cli.commands import (
    cache,
    chat,
    choose,
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
from stoker.errors import StokerError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141  # what a shell reports for SIGPIPE


class _ErrorsInOneLine(TyperGroup):
    """Ends a command that raised with one line and an exit code instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:  # the library keeps a copy of click's Context, which moves
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except StokerError as error:
            _complain(error.message)
            raise typer.Exit(EXIT_BAD_INPUT) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            _forget_stdout()
            raise typer.Exit(EXIT_PIPE_CLOSED) from error
        except OSError as error:
            _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
            raise typer.Exit(EXIT_BAD_INPUT) from error


app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run language models on this machine, for people who wait and jobs that do not.",
)


def _show_version(is_asked: bool) -> None:  # noqa: FBT001 - how the library calls it
    if is_asked:
        typer.echo(f"stoker {version('stoker')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("embed")(embed.embed)
app.command("rerank")(rerank.rerank)
app.command("choose")(choose.choose)
app.command("read")(read.read)
app.command("models")(models.models)
app.command("pull")(pull.pull)
app.command("plan")(plan.plan)
app.command("ps")(ps.ps)
app.command("load")(remote.load)
app.command("unload")(remote.unload)
app.command("pin")(remote.pin)
app.command("suspend")(remote.suspend)
app.command("resume")(remote.resume)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point of the `stoker` script."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text file, outside of tests
    app()


def _complain(message: str) -> None:
    from stoker.settings import is_debug

    if is_debug():
        typer.echo(traceback.format_exc(), err=True)
    typer.echo(f"stoker: {message}", err=True)


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
