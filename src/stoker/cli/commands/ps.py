"""`stoker ps`: what a running server has in memory and what it does with it."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from stoker.cli.options import AsJson
from stoker.cli.target import ApiKey, Url, ask_server
from stoker.ipc.model import ModelLife

_BUSY = frozenset({"prefill", "decode"})
_IN_MEMORY = frozenset({ModelLife.READY, ModelLife.UNLOADING})
_MINUTE_S = 60
_HOUR_S = 3600


def ps(*, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Show the models, requests and memory of the running server."""
    status = ask_server(url, api_key, "/v1/runtime")
    if as_json:
        typer.echo(json.dumps(status, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 240  # a pipe has no edge to fold at
    console.print(_models(status))
    if any(slot["state"] in _BUSY for slot in status["slots"]) or _num_waiting(status):
        console.print(_requests(status))
    for line in _summary(status):
        console.print(escape(line), style="dim", soft_wrap=True)


def _models(status: dict[str, Any]) -> Table:
    table = Table("model", "state", "memory", "slots", "tokens", "stays", "notes", box=None)
    table.header_style = "bold"
    for model in status["models"]:
        slots = [slot for slot in status["slots"] if slot["model"] == model["id"]]
        num_busy = sum(slot["state"] in _BUSY for slot in slots)
        table.add_row(
            escape(model["id"]),
            _state(model),
            _memory(model),
            f"{num_busy}/{len(slots)}" if slots else "",
            str(sum(slot["num_tokens"] for slot in slots)) if slots else "",
            _stays(model),
            escape("; ".join([*model["degraded"], *([model["reason"]] if model["reason"] else [])])),
            style="red" if model["state"] == ModelLife.FAILED else None,
        )
    return table


def _state(model: dict[str, Any]) -> str:
    if model["state"] not in {ModelLife.LOADING, ModelLife.DOWNLOADING}:
        return str(model["state"])
    return f"{model['state']} {model['stage']} {model['fraction']:.0%}".replace("  ", " ")


def _memory(model: dict[str, Any]) -> str:
    """What it takes; in brackets what it would take, if it were in memory."""
    num_bytes = sum(model["bytes"].values())
    if model["state"] in _IN_MEMORY:
        return decimal(num_bytes)
    return f"({decimal(num_bytes)})" if num_bytes else ""


def _stays(model: dict[str, Any]) -> str:
    """Until when it is in memory, for people."""
    if model["pinned"]:
        return "pinned"
    if model["state"] != ModelLife.READY:
        return ""
    if model["leases"]:
        return "in use"
    if model["unload_in_s"] is None:
        return "for good" if model["keep_alive_s"] < 0 else ""
    return f"for {_duration(model['unload_in_s'])}"


def _duration(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def _num_waiting(status: dict[str, Any]) -> int:
    return sum(len(status[name]) for name in ("queue", "parked", "paused"))


def _requests(status: dict[str, Any]) -> Table:
    table = Table("request", "model", "class", "state", "tokens", box=None)
    table.header_style = "bold"
    busy = [(slot, slot["state"]) for slot in status["slots"] if slot["state"] in _BUSY]
    waiting = [(found, _place(found)) for found in status["queue"]]
    standing = [(found, name) for name in ("parked", "paused") for found in status[name]]
    for found, state in (*busy, *waiting, *standing):
        name = escape(found["request_id"] or "")
        table.add_row(name, escape(found["model"]), found["class"] or "", state, str(found["num_tokens"]))
    return table


def _place(waiting: dict[str, Any]) -> str:
    eta = "" if waiting["eta_s"] is None else f", about {_duration(waiting['eta_s'])}"
    return f"waits at {waiting['position']}{eta}"


def _summary(status: dict[str, Any]) -> list[str]:
    engine, memory = status["engine"], status["memory"]
    label = f", {engine['label']}" if engine["label"] else ""
    used = f"{decimal(memory['footprint'])} of {decimal(memory['limit'])}"
    pressure = f", pressure {memory['pressure']}" if memory["pressure"] else ""
    return [
        f"engine: {engine['state']}{label}, {engine['threads']} threads, {engine['restarts']} restarts",
        f"memory: {used} used, {decimal(memory['available'])} available{pressure}, heat {status['heat']}",
    ]
