"""`stoker plan`: whether a model would fit this machine, and in what form, without loading it (SPEC R2).

Owns how the answer is shown and the exit code, NO where it cannot be loaded. The estimate is
`models.memory_estimate.estimate`'s, the fit `models.memory_estimate.fit`'s. No native library is touched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker.cli.exits import ExitCode
from stoker.cli.options import AsJson, Config, engine_settings, models_that_begin
from stoker.wording import size_text

if TYPE_CHECKING:
    from stoker.ipc.model import ModelSpec, ProjectorSpec
    from stoker.models.memory_estimate.fit import Estimate, MemoryBudget
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings

INSUFFICIENT = "insufficient"
"""Beside the words of a fit: it would fit, but not beside what is in use now."""

_COLOURS = {"fits": "green", "tight": "yellow", "degraded": "yellow"}
_MEANINGS = {
    "fits": "it loads as asked",
    "tight": "it loads as asked and leaves little",
    "degraded": "it loads with less",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is shown. `estimate` and `spec` are of the form it would be loaded in, else of the smallest."""

    fit: str
    spec: ModelSpec
    estimate: Estimate
    budget: MemoryBudget
    tier: str
    degraded: tuple[str, ...] = ()
    reason: str = ""

    @property
    def can_load(self) -> bool:
        return self.fit in _COLOURS


def plan(
    *,
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
    found = _plan(engine_settings(config, **flags), model, mmproj)
    if as_json:
        typer.echo(json.dumps(_as_record(found), indent=2))
    else:
        _show(found)
    if not found.can_load:
        raise typer.Exit(ExitCode.NO)


def _plan(settings: EngineSettings, model: str | None, mmproj: Path | None) -> _Plan:
    from stoker.backends.registry import open_model
    from stoker.errors import InsufficientMemoryError
    from stoker.machine.limits import effective_limit, read_limits, tier_of
    from stoker.models.memory_estimate.fit import MemoryBudget, smallest, weigh

    spec = _spec(settings, model, mmproj)
    profile = read_limits(settings.memory_limit)
    budget = MemoryBudget(
        free_bytes=profile.available_bytes,
        limit_bytes=effective_limit(profile),
        margin_bytes=settings.memory_margin,
    )
    tier = str(tier_of(profile.effective_bytes))
    estimate = open_model(spec.path).estimator()
    try:
        fitted = weigh(spec, estimate, budget)
    except InsufficientMemoryError as error:
        fitted = smallest(spec, estimate)
        fit, reason = INSUFFICIENT, error.message
    else:
        fit = str(fitted.fit)
        reason = _MEANINGS.get(fit) or _why_too_large(fitted.estimate, budget)
    return _Plan(
        fit=fit,
        spec=fitted.spec,
        estimate=fitted.estimate,
        budget=budget,
        tier=tier,
        degraded=fitted.degraded,
        reason=reason,
    )


def _why_too_large(least: Estimate, budget: MemoryBudget) -> str:
    needed = f"it needs {size_text(least.total_bytes)} at the least"
    if budget.most_bytes:
        return f"{needed}; a model may take {size_text(budget.most_bytes)} here"
    limit, margin = size_text(budget.limit_bytes), size_text(budget.margin_bytes)
    return f"{needed}; the limit of {limit} leaves nothing beside the margin of {margin} that stays free"


def _spec(settings: EngineSettings, model: str | None, mmproj: Path | None) -> ModelSpec:
    from msgspec.structs import replace

    from stoker.client.models.specs import ModelSource
    from stoker.models.store import ModelStore

    file = ModelStore(settings.models_dir).resolve(model)
    spec = ModelSource(settings).described(file).spec
    return spec if mmproj is None else replace(spec, projector=_projector(mmproj, file))


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
        "degraded": list(found.degraded),
        "n_ctx": found.estimate.n_ctx,
        "slots": found.spec.num_slots,
        "kv_type": found.spec.kv_type,
        "kv_layout": found.estimate.kv_layout,
        "bytes": dict(found.estimate.lines),
        "total_bytes": found.estimate.total_bytes,
        "free_bytes": found.budget.free_bytes,
        "margin_bytes": found.budget.margin_bytes,
        "limit_bytes": found.budget.limit_bytes,
        "tier": found.tier,
    }


def _show(found: _Plan) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, size in found.estimate.lines.items():
        table.add_row(name, size_text(size))
    table.add_row("total", size_text(found.estimate.total_bytes), style="bold", end_section=True)
    for name, size in (
        ("free", found.budget.free_bytes),
        ("margin", found.budget.margin_bytes),
        ("limit", found.budget.limit_bytes),
    ):
        table.add_row(name, size_text(size), style="dim")
    table.add_row("tier", found.tier, style="dim")
    each = " each" if found.estimate.kv_layout == "streams" else ""
    form = f"context {found.estimate.n_ctx}{each}, slots {found.spec.num_slots}"
    console.print(f"[bold]{escape(found.spec.id)}[/] {escape(form)}")
    console.print(table)
    colour = _COLOURS.get(found.fit, "red")
    console.print(f"[{colour}]{found.fit}[/]: {escape(found.reason)}")
    lead = "->" if found.can_load else "even with"
    for phrase in found.degraded:
        console.print(f"  {lead} {escape(phrase)}")
