"""`stoker launch`: starts a coding agent against the running server (SPEC W8)."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
from typing import Annotated, Any

import typer

from stoker.cli.agents.programs import NO_KEY, PROGRAMS, AskedServer, Launch
from stoker.cli.target import ApiKey, Url, ask_server, reading_answer, server_url
from stoker.errors import InvalidRequestError, MachineSetupError, ModelNotFoundError


@reading_answer()
def launch(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="claude, codex, aider or opencode.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="For the program; put -- before them.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Id of a served model. [the default]", metavar="NAME")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Start a coding agent that asks the running server."""
    if program not in PROGRAMS:
        near = difflib.get_close_matches(program, PROGRAMS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = f"{program!r} is not known; there are: {', '.join(PROGRAMS)}{hint}"
        raise InvalidRequestError(text, param="program")
    path = shutil.which(program)
    if path is None:
        text = f"there is no program {program} on the PATH; install it first"
        raise MachineSetupError(text, param="program")
    url = server_url(url)
    served = ask_server(url, api_key, "/v1/models")["data"]
    server = _asked(url, api_key or NO_KEY, served, model)
    planned = PROGRAMS[program](server)
    command = [path, *planned.args, *(args or ())]
    _tell(planned, command, server.api_key)
    environment = {name: value for name, value in os.environ.items() if name not in planned.unset}
    os.execve(path, command, environment | planned.variables)  # noqa: S606 - the program takes this one's place


def _asked(url: str, api_key: str, served: list[dict[str, Any]], model: str | None) -> AskedServer:
    """The server with the model of that name, or the first that chats. Raises ModelNotFoundError."""
    found = [one for one in served if (one["id"] == model if model else one["meta"]["has_chat_template"])]
    if not found:
        what = f"no model {model!r}" if model else "no model that takes conversations"
        text = f"the server at {url} serves {what}; it has: {', '.join(one['id'] for one in served)}"
        raise ModelNotFoundError(text, param="model")
    return AskedServer(url, found[0]["id"], found[0]["meta"]["n_ctx"], api_key)


def _tell(planned: Launch, command: list[str], api_key: str) -> None:
    """Say on stderr what is set and started; a key is not shown."""
    for name, value in planned.variables.items():
        shown = value if api_key == NO_KEY else value.replace(api_key, "...")
        typer.echo(f"stoker: {name}={shlex.quote(shown)}", err=True)
    for name in planned.unset:
        if name in os.environ:
            typer.echo(f"stoker: {name} is not passed on", err=True)
    typer.echo(f"stoker: {shlex.join(command)}", err=True)
