"""`stoker ps`: what a running server has in memory and what it does with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from stoker.cli.options import AsJson
from stoker.cli.tables import new_console, print_line, print_table
from stoker.cli.target import ApiKey, Url, ask_server, reading_answer
from stoker.ipc.model import ModelLife
from stoker.wording import count_text, duration_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

_BUSY = frozenset({"prefill", "decode"})
_IN_MEMORY = frozenset({ModelLife.READY, ModelLife.UNLOADING})


@reading_answer()
def ps(*, as_json: AsJson = False, url: Url = None, api_key: ApiKey = None) -> None:
    """Show the models, requests and memory of the running server."""
    status = ask_server(url, api_key, "/v1/runtime")
    if as_json:
        typer.echo(json.dumps(status, indent=2))
        return
    console = new_console()
    _print_models(console, status)
    if any(slot["state"] in _BUSY for slot in status["slots"]) or _num_waiting(status):
        console.print()
        _print_requests(console, status)
    if machines := status.get("machines"):
        console.print()
        _print_machines(console, machines)
    for head, text in _summary(status):
        print_line(console, f"{head}: ", text, "dim")


def _print_models(console: Console, status: dict[str, Any]) -> None:
    rows, styles = [], []
    for model in status["models"]:
        slots = [slot for slot in status["slots"] if slot["model"] == model["id"]]
        num_busy = sum(slot["state"] in _BUSY for slot in slots)
        rows.append(
            (
                model["id"],
                _state(model),
                _memory(model),
                f"{num_busy}/{len(slots)}" if slots else "",
                str(sum(slot["num_tokens"] for slot in slots)) if slots else "",
                _stays(model),
                "; ".join([*model["degraded"], *([model["reason"]] if model["reason"] else [])]),
            )
        )
        styles.append("red" if model["state"] == ModelLife.FAILED else "")
    print_table(console, ("model", "state", "memory", "slots", "tokens", "stays", "notes"), rows, styles)


def _state(model: dict[str, Any]) -> str:
    if model["state"] not in {ModelLife.LOADING, ModelLife.DOWNLOADING}:
        return str(model["state"])
    return f"{model['state']} {model['stage']} {model['fraction']:.0%}".replace("  ", " ")


def _memory(model: dict[str, Any]) -> str:
    """What it takes; in brackets what it would take, if it were in memory."""
    num_bytes = sum(model["bytes"].values())
    if model["state"] in _IN_MEMORY:
        return size_text(num_bytes)
    return f"({size_text(num_bytes)})" if num_bytes else ""


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
    return f"for {duration_text(model['unload_in_s'])}"


def _num_waiting(status: dict[str, Any]) -> int:
    return sum(len(status[name]) for name in ("queue", "parked", "paused"))


def _print_requests(console: Console, status: dict[str, Any]) -> None:
    busy = [(slot, slot["state"]) for slot in status["slots"] if slot["state"] in _BUSY]
    waiting = [(found, _place(found)) for found in status["queue"]]
    standing = [(found, name) for name in ("parked", "paused") for found in status[name]]
    has_several = len(status["models"]) > 1  # else its column says nothing
    rows = [
        (
            found["request_id"] or "",
            found["class"] or "",
            str(found["num_tokens"]),
            state,
            *([found["model"]] if has_several else []),
        )
        for found, state in (*busy, *waiting, *standing)
    ]
    head = ("request", "class", "tokens", "state", *(["model"] if has_several else []))
    print_table(console, head, rows)


def _print_machines(console: Console, machines: list[dict[str, Any]]) -> None:
    """Those that a gate serves with."""
    rows = [
        (
            machine["name"],
            machine["state"],
            f"{machine['num_busy']}/{machine['num_slots']}" if machine["state"] != "down" else "",
            str(machine["num_requests"]),
            str(machine["num_moved"]),
            machine["reason"] or ", ".join(machine["models"]),
        )
        for machine in machines
    ]
    styles = ["red" if machine["state"] == "down" else "" for machine in machines]
    head = ("machine", "state", "slots", "here", "moved", "models, or why it gets nothing")
    print_table(console, head, rows, styles)


def _place(waiting: dict[str, Any]) -> str:
    eta = "" if waiting["eta_s"] is None else f", about {duration_text(waiting['eta_s'])}"
    place = f"{waiting['position']} before it" if waiting["position"] else "next in line"
    return f"waits, {place}{eta}"


def _summary(status: dict[str, Any]) -> list[tuple[str, str]]:
    engine, memory = status["engine"], status["memory"]
    label = f", {engine['label']}" if engine["label"] else ""
    used = f"{size_text(memory['footprint'])} of {size_text(memory['limit'])}"
    source = memory.get("pressure_source", "") if memory["pressure"] != "normal" else ""
    why = f" ({source})" if source else ""
    pressure = f", pressure {memory['pressure']}{why}" if memory["pressure"] else ""
    counts = f"{count_text(engine['threads'], 'thread')}, {count_text(engine['restarts'], 'restart')}"
    available = size_text(memory["available"])
    devices = [(each["id"], _device(each)) for each in engine.get("devices", ()) if each["total"]]
    computes = ("engine", f"{engine['state']}{label}, {counts}")
    if machines := status.get("machines"):
        num_up = sum(machine["state"] == "up" for machine in machines)
        computes = ("machines", f"{num_up} of {len(machines)} up")
    return [
        computes,
        (
            "memory",
            f"{used} used, {available} available{pressure}, heat {status['heat']}",
        ),
        *devices,
    ]


def _device(device: dict[str, Any]) -> str:
    """An accelerator, who has how much of its memory, and how it is."""
    parts = [f"{device['name']}, {size_text(device['free'])} of {size_text(device['total'])} free"]
    if device["own"] is not None:
        parts.append(f"own {size_text(device['own'])}, others {size_text(device['others'])}")
    parts += [f"{device['celsius']:.0f} °C"] if device["celsius"] is not None else []
    parts += [f"{device['power_w']:.0f} W"] if device["power_w"] is not None else []
    parts += [f"held by {device['held_by']}"] if device["held_by"] else []
    return ", ".join(parts)
