"""`stoker plan`: whether a model would fit this machine, and in what form, without loading it (SPEC R2).

Owns how the answer is shown and the exit code, NO where it cannot be loaded. The estimate is
`models.memory_estimate.estimate`'s, the fit `models.memory_estimate.fit`'s. Nothing is computed; a native
library is asked for its devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Config, engine_settings, models_that_begin, takes_placement
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from stoker.backends.device import Device
    from stoker.ipc.model import ModelSpec, ProjectorSpec
    from stoker.models.memory_estimate.fit import DeviceBudget, Estimate, MemoryBudget
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings

INSUFFICIENT = "insufficient"
"""Beside the words of a fit: it would fit, but not beside what is in use now."""

_COLOURS = {"fits": "green", "tight": "yellow", "degraded": "yellow", "streams": "yellow"}
_MEANINGS = {
    "fits": "it loads as asked",
    "tight": "it loads as asked and leaves little",
    "degraded": "it loads with less",
    "streams": "it loads, and reads experts from the disk as they are needed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is shown. `estimate` and `spec` are of the form it would be loaded in, else of the smallest.

    `budget` is what is left for models of `limit_bytes`, beside the `own_bytes` that Stoker itself takes.
    """

    fit: str
    spec: ModelSpec
    passed_over: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    estimate: Estimate
    budget: MemoryBudget
    limit_bytes: int
    own_bytes: int
    tier: str
    n_ctx_train: int
    disk_bytes_per_s: float = 0.0
    calibration: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    reason: str = ""
    pairing: str = ""
    pairing_reason: str = ""

    @property
    def can_load(self) -> bool:
        return self.fit in _COLOURS

    @property
    def read_bytes(self) -> float:
        """What a token has to have read from the disk, if it needs no expert more often than others."""
        experts, kept = self.estimate.experts, self.estimate.lines.get("experts", 0)
        return experts.active_bytes * (1 - kept / experts.size_bytes) if experts.is_streamed else 0.0

    @property
    def disk_tokens_per_s(self) -> float:
        """Tokens a second that the disk has the experts of; 0: none are read, or its speed is not known."""
        return self.disk_bytes_per_s / self.read_bytes if self.read_bytes else 0.0


@takes_placement()
def plan(
    *,
    placement: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name or path. [embedded default]", metavar="MODEL", autocompletion=models_that_begin
        ),
    ] = None,
    ctx_size: Annotated[
        int | None, typer.Option("--ctx-size", "--ctx", "-c", help="Tokens of context. [16384]", metavar="N")
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", help="Requests that run at once. [8]", metavar="N")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit", "--limit", help="Memory to plan for. [what the machine has]", metavar="SIZE"
        ),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option("--memory-margin", "--margin", help="What has to stay free. [512MiB]", metavar="SIZE"),
    ] = None,
    mmproj: Annotated[
        Path | None, typer.Option("--mmproj", help="Projector that is loaded with it. [none]", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Say whether a model fits this machine, what it would take and what it would get less of."""
    flags: dict[str, Any] = {
        "ctx_size": ctx_size,
        "slots": slots,
        "memory_limit": limit,
        "memory_margin": margin,
    }
    found = _plan(engine_settings(config, **flags, **placement), model, mmproj)
    if as_json:
        typer.echo(json.dumps(_as_record(found), indent=2))
    else:
        _show(found)
    if not found.can_load:
        raise typer.Exit(ExitCode.NO)


def _plan(settings: EngineSettings, model: str | None, mmproj: Path | None) -> _Plan:
    from stoker.backends.registry import open_model
    from stoker.client.models.specs import calibration_texts
    from stoker.errors import InsufficientMemoryError
    from stoker.machine.limits import SERVER_BYTES, effective_limit, read_limits, tier_of
    from stoker.machine.mapped import read_speed
    from stoker.models.memory_estimate.fit import Fit, MemoryBudget, smallest, weigh
    from stoker.models.memory_estimate.placing import Placing
    from stoker.models.placement import chosen_devices, with_device_ids, without_devices

    whole, file = _found(settings, model, mmproj)
    spec = whole.ways[0]
    reader = open_model(spec.path, spec.backend)
    there = reader.devices() if spec.placement.has_devices else ()
    devices, spec = chosen_devices(spec.placement, there), with_device_ids(spec, there)
    on_host = without_devices(whole.ways[0], spec)
    profile = read_limits(settings.memory_limit, own_bytes=SERVER_BYTES)
    limit_bytes = effective_limit(profile)
    left_bytes = max(0, limit_bytes - SERVER_BYTES)
    budget = MemoryBudget(
        free_bytes=min(profile.available_bytes, left_bytes),
        limit_bytes=left_bytes,
        margin_bytes=settings.memory_margin,
        devices=tuple(_device_budgets(devices, settings.memory_margin)),
    )
    tier = str(tier_of(profile.effective_bytes))
    estimate = reader.estimator()
    try:
        fitted = weigh(spec, estimate, budget)
    except InsufficientMemoryError as error:
        fitted = smallest(spec, estimate, placing=Placing(estimate, budget))
        fit, reason = INSUFFICIENT, error.message
    else:
        fit = str(Fit.DEGRADED) if on_host and fitted.fit in {Fit.FITS, Fit.TIGHT} else str(fitted.fit)
        reason = _MEANINGS.get(fit) or _why_too_large(fitted.estimate, budget, limit_bytes)
    return _Plan(
        fit=fit,
        spec=fitted.spec,
        passed_over=whole.passed_over,
        fallbacks=tuple(way.served_by for way in whole.fallbacks),
        estimate=fitted.estimate,
        budget=budget,
        limit_bytes=limit_bytes,
        own_bytes=SERVER_BYTES,
        tier=tier,
        n_ctx_train=file.n_ctx_train,
        disk_bytes_per_s=read_speed(spec.path) if fitted.estimate.experts.is_streamed else 0.0,
        calibration=calibration_texts(settings, file),
        degraded=(*fitted.degraded, *on_host),
        reason=reason,
        pairing=_pairing(spec, file),
        pairing_reason=file.description.pairing_reason if file.description else "",
    )


def _pairing(spec: ModelSpec, file: ModelFile) -> str:
    """How it stands with images; empty: it was not made to see."""
    from stoker.ipc.model import Pairing

    if spec.projector is not None:
        return str(Pairing.READY)
    return file.description.pairing if file.description else ""


def _device_budgets(devices: tuple[Device, ...], margin_bytes: int) -> Iterator[DeviceBudget]:
    """What is free now in the own memory of each, as an engine measures it."""
    from stoker.backends.device import HeldDevices
    from stoker.models.memory_estimate.fit import DeviceBudget

    held = HeldDevices(None, margin_bytes)
    held.know(devices)
    for sample in held.samples():
        yield DeviceBudget(
            id=sample.id,
            free_bytes=sample.free_bytes,
            limit_bytes=sample.total_bytes,
            margin_bytes=margin_bytes,
        )


def _why_too_large(least: Estimate, budget: MemoryBudget, limit_bytes: int) -> str:
    needed = f"it needs {size_text(least.host_bytes(budget.devices))} at the least"
    if budget.most_bytes:
        return f"{needed}; a model may take {size_text(budget.most_bytes)} here"
    limit, own, margin = map(size_text, (limit_bytes, limit_bytes - budget.limit_bytes, budget.margin_bytes))
    return f"{needed}; of the limit of {limit} Stoker itself takes {own}, and {margin} have to stay free"


def _found(settings: EngineSettings, model: str | None, mmproj: Path | None) -> tuple[ModelSpec, ModelFile]:
    """The model with every way to serve it, and what the file of the first says."""
    from msgspec.structs import replace

    from stoker.client.models.specs import ModelSource

    found, file = ModelSource(settings).look_up(model)
    spec = found.spec
    return (spec if mmproj is None else replace(spec, projector=_projector(mmproj, file))), file


def _projector(path: Path, model: ModelFile) -> ProjectorSpec:
    """Raises StokerError where they are no pair."""
    from stoker.errors import UnsupportedError
    from stoker.models.projector import check_pair, read_projector

    if model.header is None:
        raise UnsupportedError(f"{model.id} takes no projector")
    projector = read_projector(path)
    check_pair(projector, model.header)
    return projector.spec


def _as_record(found: _Plan) -> dict[str, object]:
    return {
        "model": found.spec.id,
        "path": found.spec.path,
        "verdict": found.fit,
        "reason": found.reason,
        "backend": found.spec.backend,
        "backend_reason": "; ".join(found.passed_over) or None,
        "fallbacks": list(found.fallbacks),
        "degraded": list(found.degraded),
        "pictures": found.pairing or None,
        "pictures_reason": found.pairing_reason or None,
        "n_ctx": found.estimate.n_ctx,
        "n_ctx_train": found.n_ctx_train,
        "slots": found.spec.num_slots,
        "kv_type": found.spec.kv_type,
        "kv_layout": found.estimate.kv_layout,
        "bytes": dict(found.estimate.lines),
        "total_bytes": found.estimate.total_bytes,
        "free_bytes": found.budget.free_bytes,
        "margin_bytes": found.budget.margin_bytes,
        "own_bytes": found.own_bytes,
        "limit_bytes": found.limit_bytes,
        "tier": found.tier,
        "calibration": list(found.calibration),
        "experts": {
            "bytes": found.estimate.experts.size_bytes,
            "active_bytes": found.estimate.experts.active_bytes,
            "budget_bytes": found.estimate.lines.get("experts", 0),
            "read_bytes_per_token": round(found.read_bytes),
            "disk_bytes_per_s": round(found.disk_bytes_per_s),
            "disk_tokens_per_s": round(found.disk_tokens_per_s, 2),
        },
        "layers": found.spec.placement.gpu_layers if found.estimate.on_devices else 0,
        "devices": [_device_record(each, found) for each in found.budget.devices],
    }


def _device_record(device: DeviceBudget, found: _Plan) -> dict[str, object]:
    held = found.estimate.on_devices.get(device.id, {})
    return {
        "id": device.id,
        "bytes": {line: size for line, size in held.items() if size},
        "total_bytes": found.estimate.device_bytes(device.id),
        "free_bytes": device.free_bytes,
        "margin_bytes": device.margin_bytes,
        "limit_bytes": device.limit_bytes,
    }


def _show(found: _Plan) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    each = " each" if found.estimate.kv_layout == "streams" else ""
    form = f"context {found.estimate.n_ctx}{each}, slots {found.spec.num_slots}{_layers(found)}"
    console.print(f"[bold]{escape(found.spec.id)}[/] {escape(form)}{escape(_backend(found))}")
    for phrase in found.passed_over:
        console.print(f"  as {escape(phrase)}")
    for way in found.fallbacks:
        console.print(f"  where that cannot: {escape(way)}")
    console.print(_table(found))
    colour = _COLOURS.get(found.fit, "red")
    console.print(f"[{colour}]{found.fit}[/]: {escape(found.reason)}")
    lead = "->" if found.can_load else "even with"
    for phrase in found.degraded:
        console.print(f"  {lead} {escape(phrase)}")
    if found.pairing:
        why = f": {found.pairing_reason}" if found.pairing_reason else ""
        console.print(f"  pictures: {found.pairing}{escape(why)}")
    for phrase in found.calibration:
        console.print(f"  {escape(phrase)}")
    if found.read_bytes:
        console.print(f"  -> {escape(_from_disk(found))}")
    if 0 < found.n_ctx_train < found.estimate.n_ctx:
        console.print(f"  trained on {found.n_ctx_train} tokens: one request gets no more")


def _from_disk(found: _Plan) -> str:
    """What a token reads, and how many a second the disk has the experts of."""
    needed = f"a token reads {size_text(round(found.read_bytes))} of experts from the disk"
    if not found.disk_bytes_per_s:
        return f"{needed}, whose speed could not be measured"
    speed = size_text(round(found.disk_bytes_per_s))
    return f"{needed}, which gives {speed} a second: {found.disk_tokens_per_s:.2g} tokens/s at the most"


def _backend(found: _Plan) -> str:
    """Who would serve it, where that is not what it would be anyway."""
    is_plain = found.spec.backend == "llama" and not (found.passed_over or found.fallbacks)
    return "" if is_plain else f", backend {found.spec.backend}"


def _layers(found: _Plan) -> str:
    """How many layers would lie on which devices, where there are any."""
    placement, num_layers = found.spec.placement, found.estimate.num_layers
    if not found.estimate.on_devices:
        return ""
    return f", {placement.gpu_layers} of {num_layers} layers on {' and '.join(placement.device)}"


def _table(found: _Plan) -> Table:
    """A column of the machine's memory, and one of each device that has its own."""
    from rich.markup import escape
    from rich.table import Table

    estimate, budget = found.estimate, found.budget
    table = Table(box=None, show_header=bool(budget.devices), pad_edge=False, header_style="dim")
    table.add_column()
    for name in ("machine", *(each.id for each in budget.devices)):
        table.add_column(escape(name), justify="right")
    parts = [estimate.on_devices.get(each.id, {}) for each in budget.devices]
    for line, size in estimate.lines.items():
        held = [part.get(line, 0) for part in parts]
        table.add_row(line, *(size_text(each) if each else "" for each in (size - sum(held), *held)))
    totals = (estimate.device_bytes(each.id) for each in budget.devices)
    table.add_row(
        "total", *_sizes(estimate.host_bytes(budget.devices), *totals), style="bold", end_section=True
    )
    memories: tuple[MemoryBudget | DeviceBudget, ...] = (budget, *budget.devices)
    table.add_row("free", *_sizes(*(each.free_bytes for each in memories)), style="dim")
    table.add_row("margin", *_sizes(*(each.margin_bytes for each in memories)), style="dim")
    table.add_row("Stoker", size_text(found.own_bytes), style="dim")
    limits = (found.limit_bytes, *(each.limit_bytes for each in budget.devices))
    table.add_row("limit", *_sizes(*limits), style="dim")
    table.add_row("tier", found.tier, style="dim")
    return table


def _sizes(*sizes: int) -> Iterator[str]:
    return map(size_text, sizes)
