"""`stoker load`, `unload`, `pin`, `suspend` and `resume`: what a running server shall have in memory.

Each is one request to the server (SPEC R3, L2); `stoker ps` shows what came of it.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from stoker.cli.options import AsJson, takes_placement
from stoker.cli.target import ApiKey, Url, ask_server, reading_answer
from stoker.errors import InvalidRequestError
from stoker.site_settings import PlacementSettings
from stoker.wording import size_text

_MODELS = "/v1/runtime/models"

Named = Annotated[str, typer.Argument(metavar="MODEL", help="Id of a served model, as `stoker ps` shows it.")]


@takes_placement("as it is")
@reading_answer()
def load(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A served model, a name from `stoker models`, or OWNER/REPO of a hub.",
        ),
    ],
    *,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            "--keep-alive", help="How long it stays after its last request: 30s, 10m, -1.", metavar="TIME"
        ),
    ] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option("--ctx-size", "-c", help="Tokens of context all its slots share.", metavar="N"),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", help="Requests that run on it at once.", metavar="N")
    ] = None,
    placement: dict[str, Any],
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Load a model into the running server; Ctrl-C gives it up."""
    asked = {
        "model": model,
        "keep_alive": keep_alive,
        "ctx_size": ctx_size,
        "slots": slots,
        **PlacementSettings(**placement).given_placement(),
    }
    body = {name: value for name, value in asked.items() if value is not None}
    loaded = _post(url, api_key, f"{_MODELS}/load", body, f"loading {model}")
    size = size_text(sum(loaded["bytes"].values()))
    less = f", with less than asked for: {'; '.join(loaded['degraded'])}" if loaded["degraded"] else ""
    _say(loaded, f"{loaded['id']} is ready: {size}, context {loaded['n_ctx']}{less}", as_json=as_json)


@reading_answer()
def unload(model: Named, *, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Free a model; it stays served and is loaded again when a request needs it."""
    answer = _post(url, api_key, f"{_MODELS}/unload", {"model": model}, f"unloading {model}")
    _say(answer, f"{answer['id']} is not in memory any more", as_json=as_json)


@reading_answer()
def pin(
    model: Named,
    *,
    off: Annotated[bool, typer.Option("--off", help="It may be unloaded again.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Never unload a model to make room for another."""
    answer = _post(url, api_key, f"{_MODELS}/pin", {"model": model, "pinned": not off}, f"pinning {model}")
    fate = "is pinned: once it is in memory it stays there" if answer["pinned"] else "may be unloaded"
    _say(answer, f"{answer['id']} {fate}", as_json=as_json)


@reading_answer()
def suspend(
    *,
    grace_s: Annotated[
        float | None,
        typer.Option(
            "--grace-s", help="Seconds before it begins; `stoker resume` meanwhile prevents it.", metavar="X"
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Save every request of the running server and free its memory, until `stoker resume`."""
    if grace_s is not None and not math.isfinite(grace_s):  # in JSON it would be null, which is none given
        raise InvalidRequestError(f"grace_s is no finite number, got {grace_s}", param="grace_s")
    body = {} if grace_s is None else {"grace_s": grace_s}
    answer = _post(url, api_key, "/v1/runtime/suspend", body, "suspending")
    _say(answer, "suspended" if answer["suspended"] else "resumed before it was suspended", as_json=as_json)


@reading_answer()
def resume(*, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Load what was loaded and let every request of the suspended server go on."""
    answer = _post(url, api_key, "/v1/runtime/resume", {}, "resuming")
    _say(answer, "suspended again meanwhile" if answer["suspended"] else "serving", as_json=as_json)


def _post(
    url: str | None, api_key: str | None, path: str, body: dict[str, Any], doing: str
) -> dict[str, Any]:
    """The server's answer; on a terminal it shows what is being waited for."""
    from rich.console import Console

    with Console(stderr=True).status(doing):
        return ask_server(url, api_key, path, body)


def _say(answer: dict[str, Any], text: str, *, as_json: bool) -> None:
    typer.echo(json.dumps(answer, indent=2) if as_json else text)
