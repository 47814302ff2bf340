"""What `/metrics` shows of each served model: state, load, memory, slots, and its steps of late."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from stoker.ipc.model import ModelLife
from stoker.ipc.request import Priority
from stoker.server.metrics.families import counters, gauges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

    from stoker.ipc.status import ModelStatus, SlotStatus

_MILLISECONDS = 1000.0
_SLOT_STATES = ("idle", "prefill", "decode")
_LOADING = frozenset({ModelLife.LOADING, ModelLife.DOWNLOADING})
_MODEL = ["model"]


def served(models: Sequence[ModelStatus]) -> Iterable[Metric]:
    """How many models are in each state, and the figures of each."""
    counts = collections.Counter(model.state for model in models)
    by_state = {(str(state),): float(counts[state]) for state in ModelLife}
    yield gauges("models", "Served models by state.", ["state"], by_state)
    states = {(model.id, str(state)): float(model.state == state) for model in models for state in ModelLife}
    yield gauges("model_state", "1 at the state it has.", ["model", "state"], states)
    fractions = {
        (model.id,): model.fraction if model.state in _LOADING else float(model.state == ModelLife.READY)
        for model in models
    }
    yield gauges("model_load_fraction", "How far its load is; 1: in memory.", _MODEL, fractions)
    leases = {(model.id,): float(model.leases) for model in models}
    yield gauges("model_leases", "Requests that run on it or wait for it.", _MODEL, leases)
    pinned = {(model.id,): float(model.is_pinned) for model in models}
    yield gauges("model_pinned", "1: it is never unloaded to make room.", _MODEL, pinned)
    num_bytes = {(model.id, line): float(size) for model in models for line, size in model.bytes.items()}
    text = "What it takes by purpose; what it would take where it is not in memory."
    yield gauges("model_bytes", text, ["model", "line"], num_bytes)


def streaming(models: Sequence[ModelStatus]) -> Iterable[Metric]:
    """Experts that are read from disk as they are needed: what stays in memory, and what steps have read."""
    found = [(model.id, model.streaming) for model in models if model.streaming is not None]
    sizes = {
        (model, part): float(size)
        for model, one in found
        for part, size in (("all", one.size), ("budget", one.budget), ("resident", one.resident))
    }
    text = "Experts read from disk as needed: all, what may stay in memory, and what is there."
    yield gauges("expert_bytes", text, ["model", "part"], sizes)
    for name, text, values in (
        ("expert_read_bytes", "Read from disk by steps.", {m: float(one.read_bytes) for m, one in found}),
        ("expert_read_seconds", "Time of steps that read from disk.", {m: one.read_s for m, one in found}),
        ("expert_read_faults", "Page faults that waited.", {m: float(one.num_faults) for m, one in found}),
    ):
        yield counters(name, text, "model", values)
    rates = {(model,): one.bytes_per_s for model, one in found}
    text = "What the disk has given steps a second, the computing between included."
    yield gauges("expert_read_bytes_per_second", text, _MODEL, rates)


def slots_by_state(slots: Sequence[SlotStatus]) -> Metric:
    """How many slots of each model are idle, read a prompt, or write."""
    counts = collections.Counter((slot.model, str(slot.state)) for slot in slots)
    models = sorted({slot.model for slot in slots})
    values = {(model, state): float(counts[model, state]) for model in models for state in _SLOT_STATES}
    return gauges("slots", "Slots by what they do.", ["model", "state"], values)


def active(activity: Mapping[str, Mapping[str, float]]) -> Iterable[Metric]:
    """What the steps of each model were like lately, and whose the time was."""
    late = "Of a step, on average lately."
    steps = {(model,): figures["step_ms"] / _MILLISECONDS for model, figures in activity.items()}
    yield gauges("step_seconds", late, _MODEL, steps)
    for name in ("rows_per_step", "tokens_per_step"):
        yield gauges(name, late, _MODEL, {(model,): figures[name] for model, figures in activity.items()})
    shares = {
        (model, str(priority)): figures[name]
        for model, figures in activity.items()
        for priority, name in ((Priority.INTERACTIVE, "people_share"), (Priority.BACKGROUND, "jobs_share"))
    }
    text = "Of the time lately, in steps with a person's row or without."
    yield gauges("time_share", text, ["model", "priority"], shares)
