"""The parts of a frame of `stoker top`: what each row and each line of the head says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stoker.cli.top.layout import Column, Part, Row
from stoker.cli.top.view import IN_SLOT
from stoker.wording import count_text, duration_text, size_text

if TYPE_CHECKING:
    from stoker.cli.top.layout import Glyphs
    from stoker.cli.top.view import Document, RuntimeView

STYLES = {"interactive": "cyan", "background": "magenta"}
"""Of rows, by class; the class itself stands in words beside."""
_WIDE = 110
_MEDIUM = 60
"""A screen that is narrower has the columns alone that tell who it is and what it does."""
_ID = re.compile(r"\b([a-z]+[-_][0-9a-f]{6})[0-9a-f]{6,}")
"""An id of a request that was made up, by its beginning."""
_BAR_CELLS = 12
_IN_MEMORY = frozenset({"ready", "unloading"})
_LOADING = frozenset({"loading", "downloading"})


# ---------------------------------------------------------------- the head


def head(
    view: RuntimeView, now: float, glyphs: Glyphs, silent_s: float | None = None
) -> list[tuple[str, str]]:
    """The lines above the parts, each with a style: engine, memory, speed, and each accelerator.

    `silent_s`: for how long the server has not answered; None: it does.
    """
    engine = view.engine
    is_well = engine.get("state") == "serving" and silent_s is None
    return [
        (_engine_text(view, now, glyphs, silent_s), "bold" if is_well else "bold yellow"),
        (_memory_text(view, glyphs), _pressure_style(view.memory.get("pressure", ""))),
        (_speed_text(view, glyphs), ""),
        *(
            (_device_text(device, glyphs), "")
            for device in view.memory.get("devices", ())
            if device.get("total")
        ),
    ]


def _joined(parts: list[str], glyphs: Glyphs) -> str:
    return f" {glyphs.dot} ".join(part for part in parts if part)


def _engine_text(view: RuntimeView, now: float, glyphs: Glyphs, silent_s: float | None) -> str:
    engine = view.engine
    threads = engine.get("threads") or 0
    restarts = engine.get("restarts") or 0
    state, reason = engine.get("state", "unknown"), engine.get("reason", "")
    lost = "" if silent_s is None else f"the server has not answered for {duration_text(silent_s)}"
    heat = view.heat.get("level", "nominal")
    parts = [
        f"Stoker {view.version}".strip(),
        lost or f"{state} for {duration_text(view.engine_age_s(now))}",
        reason if not lost and state not in {"serving", reason} else "",
        f"heat {heat}" if heat not in {"nominal", ""} else "",
        count_text(threads, "thread") if threads else "",
        engine.get("threads_reason", ""),
        count_text(restarts, "restart") if restarts else "",
        engine.get("label", ""),
    ]
    return _joined(parts, glyphs)


def _memory_text(view: RuntimeView, glyphs: Glyphs) -> str:
    memory = view.memory
    if not memory.get("limit"):
        return "memory not measured yet"
    fraction = memory["footprint"] / memory["limit"]
    parts = [
        f"memory {bar(fraction, glyphs)} {size_text(memory['footprint'])} of {size_text(memory['limit'])}",
        _pressure_text(memory),
        f"gives up {', '.join(memory['rungs'])}" if memory.get("rungs") else "",
        f"{size_text(memory.get('available', 0))} available",
    ]
    return _joined(parts, glyphs)


def _pressure_text(memory: Document) -> str:
    level = memory.get("pressure") or "unknown"
    source = memory.get("pressure_source", "")
    why = f" ({source})" if source and level != "normal" else ""
    return f"pressure {level} {memory.get('pressure_fraction', 0.0):.0%}{why}"


def _pressure_style(pressure: str) -> str:
    return {"warning": "yellow", "critical": "bold red"}.get(pressure, "")


def bar(fraction: float, glyphs: Glyphs) -> str:
    """A fraction as a bar."""
    num_full = round(min(max(fraction, 0.0), 1.0) * _BAR_CELLS)
    return glyphs.full * num_full + glyphs.empty * (_BAR_CELLS - num_full)


def _speed_text(view: RuntimeView, glyphs: Glyphs) -> str:
    prompt, written = view.tokens_per_second
    cache = view.cache
    disk = cache.get("disk") or {}
    parts = [
        f"{written:,.0f} tokens/s written, {prompt:,.0f} read",
        _step_text(view),
        _cache_text(cache),
        "disk tier off: " + disk["problem"] if disk.get("problem") else "",
    ]
    return _joined(parts, glyphs)


def _cache_text(cache: Document) -> str:
    """Hits of the last minute, and what is stored."""
    tiers = cache.get("ram") or {}, cache.get("disk") or {}
    stored = size_text(sum(tier.get("bytes", 0) for tier in tiers))
    hit_rate = cache.get("hit_rate")
    hits = "" if hit_rate is None else f"{hit_rate:.0%} hits, "
    return f"cache {hits}{count_text(cache.get('entries', 0), 'prefix', 'prefixes')}, {stored}"


def _step_text(view: RuntimeView) -> str:
    """The longest mean step of the models that compute, against its target."""
    busy = [steps for steps in view.steps.values() if steps.get("num_steps")]
    if not busy:
        return "no steps"
    slowest = max(busy, key=lambda steps: steps.get("step_ms", 0.0))
    target_ms = slowest.get("target_ms") or 0.0
    target = f" of {target_ms:.0f}" if target_ms else ""
    return f"step {slowest.get('step_ms', 0.0):.1f}{target} ms"


def _device_text(device: Document, glyphs: Glyphs) -> str:
    own, total = device.get("own"), device["total"]
    used = total - device.get("free", 0)
    parts = [
        f"{device['id']} {bar(used / total, glyphs)} {size_text(used)} of {size_text(total)}",
        f"own {size_text(own)}" if own is not None else "",
        f"{device['celsius']:.0f} °C" if device.get("celsius") is not None else "",
        f"{device['power_w']:.0f} W" if device.get("power_w") is not None else "",
        f"held by {device['held_by']}" if device.get("held_by") else "",
    ]
    return _joined(parts, glyphs)


# ---------------------------------------------------------------- the parts


def slots(view: RuntimeView, now: float) -> Part:
    """What each slot does."""
    columns = [
        Column("SLOTS", 12),
        Column("", 2, is_number=True),
        Column("class", 11, least_width=_MEDIUM),
        Column("state", 7),
        Column("for", 6, is_number=True, least_width=_MEDIUM),
        Column("prompt", 11, is_number=True, least_width=_MEDIUM),
        Column("written", 11, is_number=True),
        Column("tok/s", 6, is_number=True, least_width=_WIDE),
        Column("parked", 6, is_number=True, least_width=_WIDE),
        Column("route", 22, least_width=_WIDE),
        Column("request", 0),
    ]
    rows = [_slot_row(view, lane, now) for _, lane in sorted(view.lanes.items())]
    return Part("slots", columns, rows, 4, "no model is in memory")


def _slot_row(view: RuntimeView, lane: Document, now: float) -> Row:
    request_id = lane.get("request_id") or ""
    is_busy = lane.get("state") in IN_SLOT
    row = view.requests.get(request_id, {})
    cells = [lane["model"], str(lane["slot"])]
    if not is_busy:
        return Row([*cells, "", "idle", *[""] * 7], "dim", is_idle=True)
    shown_id = row.get("group") or request_id
    cells += [
        row.get("priority", ""),
        lane["state"],
        _short(now - row["since"]) if "since" in row else "",
        _prompt(row),
        _written(row),
        _number(row.get("tokens_per_second")),
        str(row.get("num_parks") or ""),
        row.get("route", ""),
        shown_id or "another key's",
    ]
    return Row(cells, STYLES.get(row.get("priority", ""), ""), shown_id)


def _prompt(row: Document) -> str:
    """Tokens of the prompt; while it is read how many are there."""
    total, done = row.get("prompt_tokens") or 0, row.get("processed_tokens") or 0
    if not total:
        return ""
    return f"{done:,}/{total:,}" if row.get("state") == "prefill" and done < total else f"{total:,}"


def _written(row: Document) -> str:
    written, most = row.get("completion_tokens") or 0, row.get("max_tokens")
    if row.get("state") == "prefill":
        return ""
    return f"{written:,}/{most:,}" if most else f"{written:,}"


def line(view: RuntimeView, now: float) -> Part:
    """Who waits, is parked or is paused, and why."""
    columns = [
        Column("LINE", 4, is_number=True),
        Column("class", 11, least_width=_MEDIUM),
        Column("state", 11),
        Column("ETA", 6, is_number=True, least_width=_MEDIUM),
        Column("waits", 6, is_number=True, least_width=_MEDIUM),
        Column("model", 14, least_width=_WIDE),
        Column("kind", 10, least_width=_WIDE),
        Column("request", 16),
        Column("why", 0),
    ]
    rows = [_line_row(row, now) for row in view.waiting]
    if view.num_hidden:
        rows.append(Row(["", "", f"{view.num_hidden:,} more", *[""] * 6], "dim"))
    return Part("line", columns, rows, 4, "nobody waits")


def _line_row(row: Document, now: float) -> Row:
    position, eta_s = row.get("position"), row.get("eta_s")
    num_members = row.get("num_members") or 0
    members = f"{row.get('num_done') or 0}/{num_members} " if num_members > 1 else ""
    cells = [
        "" if position is None else str(position),
        row.get("priority", ""),
        row.get("state", "").replace("_", " "),
        "" if eta_s is None else _short(eta_s),
        _short(now - row["since"]),
        row.get("model", ""),
        row.get("kind", ""),
        shortened(row["request_id"]),
        members + shortened(row.get("waits_for") or ""),
    ]
    return Row(cells, STYLES.get(row.get("priority", ""), ""), row["request_id"])


def recent(view: RuntimeView, now: float) -> Part:
    """What has ended, the latest first."""
    columns = [
        Column("ENDED", 6, is_number=True),
        Column("class", 11, least_width=_MEDIUM),
        Column("kind", 10, least_width=_WIDE),
        Column("outcome", 12),
        Column("in", 7, is_number=True, least_width=_MEDIUM),
        Column("out", 6, is_number=True),
        Column("first", 6, is_number=True, least_width=_MEDIUM),
        Column("total", 6, is_number=True),
        Column("cached", 7, is_number=True, least_width=_WIDE),
        Column("tok/s", 6, is_number=True, least_width=_WIDE),
        Column("p99 ms", 6, is_number=True, least_width=_WIDE),
        Column("request", 0),
    ]
    rows = [_recent_row(row, now) for row in reversed(view.recent)]
    return Part("recent", columns, rows, 2, "nothing has ended in the last minutes")


def _recent_row(row: Document, now: float) -> Row:
    error = row.get("error") or {}
    first_s, total_s = row.get("first_token_s"), row.get("end_to_end_s")
    ended_at = row.get("ended_at") or row["arrived_at"] + (total_s or 0.0)
    cells = [
        _short(now - ended_at),
        row.get("priority", ""),
        row.get("kind", ""),
        error.get("code") or row.get("finish_reason") or "",
        f"{row.get('prompt_tokens') or 0:,}",
        f"{row.get('completion_tokens') or 0:,}",
        "" if first_s is None else _short(first_s),
        "" if total_s is None else _short(total_s),
        f"{row.get('cached_tokens') or 0:,}",
        _number(row.get("tokens_per_second")),
        _number((row.get("itl_ms") or {}).get("p99")),
        row["request_id"],
    ]
    return Row(cells, "red" if error else "dim", row["request_id"])


def models(view: RuntimeView, now: float) -> Part:
    """Each served model."""
    columns = [
        Column("MODELS", 24),
        Column("state", 16),
        Column("memory", 10, is_number=True),
        Column("uses", 4, is_number=True),
        Column("stays", 0),
    ]
    rows = [_model_row(model, now) for _, model in sorted(view.models.items())]
    return Part("models", columns, rows, 1, "no model is served")


def _model_row(model: Document, now: float) -> Row:
    state = model.get("state", "")
    num_bytes = sum((model.get("bytes") or {}).values())
    size = size_text(num_bytes) if num_bytes else ""
    error = model.get("error") or {}
    cells = [
        model["model"],
        f"{model.get('stage') or state} {model.get('fraction', 0.0):.0%}" if state in _LOADING else state,
        size if state in _IN_MEMORY or not size else f"({size})",
        str(model.get("leases") or ""),
        error.get("message") or model.get("reason") or _stays(model, now),
    ]
    return Row(cells, "red" if state == "failed" else "" if state in _IN_MEMORY else "dim")


def _stays(model: Document, now: float) -> str:
    if model.get("is_pinned"):
        return "pinned"
    if model.get("state") != "ready" or model.get("leases"):
        return ""
    unload_in_s = model.get("unload_in_s")
    if unload_in_s is None:
        return ""
    return f"for {duration_text(max(0.0, model['at'] + unload_in_s - now))}"


def machines(view: RuntimeView) -> Part:
    """Each machine of a gate."""
    columns = [
        Column("MACHINES", 24),
        Column("state", 10),
        Column("busy", 8, is_number=True),
        Column("waiting", 7, is_number=True),
        Column("here", 5, is_number=True),
        Column("moved", 5, is_number=True),
        Column("pressure", 9),
        Column("models, or why it gets nothing", 0),
    ]
    rows = [_machine_row(machine) for machine in view.machines]
    return Part("machines", columns, rows, 1, "no machine")


def _machine_row(machine: Document) -> Row:
    is_up = machine.get("state") == "up"
    cells = [
        machine["name"],
        machine.get("state", ""),
        f"{machine.get('num_busy', 0)} of {machine.get('num_slots', 0)}",
        str(machine.get("num_waiting") or ""),
        str(machine.get("num_requests") or ""),
        str(machine.get("num_moved") or ""),
        machine.get("pressure", ""),
        machine.get("reason") or ", ".join(machine.get("models", ())),
    ]
    return Row(cells, "" if is_up else "red" if machine.get("state") == "down" else "yellow")


# ---------------------------------------------------------------- one request


def story(row: Document, glyphs: Glyphs) -> str:
    """What is known of a request, in a line."""
    itl_ms = row.get("itl_ms") or {}
    parts = [
        row["request_id"],
        row.get("waits_for", ""),
        row.get("kind", ""),
        row.get("model", ""),
        row.get("route", ""),
        f"queue {_short(row['queue_s'])}" if row.get("queue_s") else "",
        f"first token {_short(row['first_token_s'])}" if row.get("first_token_s") is not None else "",
        f"{row['cached_tokens']:,} from {row.get('cache_source') or 'the cache'}"
        if row.get("cached_tokens")
        else "",
        f"parked {row['num_parks']}x, {_short(row.get('parked_s') or 0.0)}" if row.get("num_parks") else "",
        f"{count_text(row['num_restarts'], 'restart')} survived" if row.get("num_restarts") else "",
        f"between tokens p50 {itl_ms['p50']:.0f} ms, p99 {itl_ms['p99']:.0f} ms" if itl_ms else "",
        (row.get("error") or {}).get("message", ""),
    ]
    return _joined(parts, glyphs)


def shortened(text: str) -> str:
    """A text with the ids of requests cut to what tells them apart."""
    return _ID.sub(r"\1", text)


def _short(seconds: float) -> str:
    """A time in at most six cells."""
    return duration_text(max(0.0, seconds)).replace(" days", " d").replace(" min", " m")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
