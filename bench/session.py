"""One run of the benchmark from its plan to its report: who is up when, what is measured in which order.

What a workload does is its own business, what the numbers mean is `results`'.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.bare_load import measure_bare_load
from bench.client import Client
from bench.commits import BASE, NEW
from bench.company import cores_of_others, cpu_use, describe_load, is_disturbed
from bench.contest import alternate
from bench.errors import BenchError
from bench.idle import IDLE_S, idle_cpu_percent
from bench.machine import binary_version, describe_machine
from bench.memory import held_after_work, memory_figures
from bench.peers import LlamaServer, ServerProcess, Shape, StokerServer
from bench.results import Comparison, Figure, Report, joined
from bench.swap_servers import LlamaRouter, StokerOfTwo, budget_for_one, copies_of, require_router
from bench.target import Target
from bench.workloads.swap import Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.progress import TaskID

    from bench.commits import Commits
    from bench.peers import Server
    from bench.workloads import Workload

OWN_TIME_LIMITS_MS = {
    (1, "greedy"): 0.25,
    (1, "default samplers"): 0.25,
    (8, "greedy"): 0.4,
    (8, "default samplers"): 0.8,
}
"""By rows and way of drawing: what a step may cost beside the native calls in it."""
IDLE_LIMIT_PERCENT = 0.5
WRONG_ESTIMATES_PERCENT = 10.0
WORSE_BY_NOISE = 1.25
"""So much may two times differ that mean the same: each is of a few arrivals."""
OF_SERVERS = frozenset({"idle", "memory"})
"""Figures that are of a server of one model."""
AFTER_LOAD_S = 3.0
NUM_TAIL_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        workloads: all but `swap`.
        figures: names out of `overhead`, `masks`, `eta`, `batch`, `idle` and `memory`.
        seeds: one a repetition.
        has_swap: the workload `swap` as well, whose servers are told otherwise than those of all others.
        num_starts: the repetitions of a workload are spread over so many starts of both servers.

    Raises:
        ValueError: there are fewer repetitions than starts, or no start.
    """

    workloads: tuple[Workload, ...]
    figures: frozenset[str]
    seeds: range
    has_swap: bool = False
    num_starts: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_starts <= len(self.seeds):
            raise ValueError(f"{len(self.seeds)} repetitions make no {self.num_starts} starts")

    @property
    def seeds_by_start(self) -> tuple[range, ...]:
        """Those of each start, in order; their numbers differ by one at most."""
        num, starts = len(self.seeds), self.num_starts
        return tuple(self.seeds[num * i // starts : num * (i + 1) // starts] for i in range(starts))


@dataclass(frozen=True, slots=True)
class Contestants:
    """The two servers to start. `model` is a GGUF path both load, `binary` the llama-server."""

    model: Path
    binary: Path
    shape: Shape

    def servers(self, cache_dir: Path) -> tuple[Server, Server]:
        """The two, with `cache_dir` for what Stoker keeps from one start to the next."""
        return StokerServer(str(self.model), cache_dir), LlamaServer(self.binary, self.model)


async def compare_started(plan: Plan, contestants: Contestants, console: Console) -> Report:
    """Start both servers, run the plan, stop them."""
    machine = describe_machine() | {"load before": await describe_load()}
    figures = await _measure_figures(plan, contestants, console)
    with tempfile.TemporaryDirectory(prefix="bench-") as logs:
        comparisons = await _run_plan(plan, contestants, Path(logs), console)
        if plan.has_swap:
            comparisons.append(await _compare_swaps(plan, contestants, Path(logs), console))
        figures += await _measure_servers(plan, contestants, Path(logs), console)
    machine[LlamaServer.label] = await asyncio.to_thread(binary_version, contestants.binary)
    settings = {
        **_settings(plan, contestants),
        **({Swap.name: await asyncio.to_thread(_swap_setting, contestants)} if plan.has_swap else {}),
    }
    return Report(
        (StokerServer.label, LlamaServer.label), machine, settings, tuple(comparisons), tuple(figures)
    )


async def compare_commits(plan: Plan, commits: Commits, console: Console) -> Report:
    """Start the servers of two commits of Stoker, run the plan's workloads, stop them.

    What is judged against llama-server has no bar here.
    """
    facts = await asyncio.to_thread(commits.describe)
    machine = describe_machine() | facts | {"load before": await describe_load()}
    if left_out := sorted(plan.figures - OF_SERVERS) + [Swap.name] * plan.has_swap:
        console.print(f"{', '.join(left_out)}: left out, as they are not of a server of one model")
    with tempfile.TemporaryDirectory(prefix="bench-") as logs:
        comparisons = await _run_plan(plan, commits, Path(logs), console)
        figures = await _measure_servers(plan, commits, Path(logs), console)
    return Report(
        (NEW, BASE),
        machine,
        _settings(plan, commits),
        tuple(comparison.without_bars() for comparison in comparisons),
        tuple(replace(figure, limit=None) for figure in figures),
    )


async def compare_running(plan: Plan, urls: Sequence[str], labels: Sequence[str], console: Console) -> Report:
    """Run the plan's workloads against two servers that somebody else started."""
    machine = describe_machine() | {"load before": await describe_load()}
    first, second = (Target(label, Client(url)) for url, label in zip(urls, labels, strict=True))
    for target in (first, second):
        await target.warm_up()
    workloads = [workload for workload in plan.workloads if not workload.ends_servers]
    for workload in set(plan.workloads) - set(workloads):
        console.print(f"{workload.name} is left out: it would have to end servers that somebody else started")
    if plan.has_swap:
        console.print("swap is left out: it takes servers that are started with two models and room for one")
    comparisons = await _run_workloads(workloads, (first, second), plan.seeds, console)
    return Report((first.label, second.label), machine, _plan_settings(plan), tuple(comparisons), ())


async def _measure_figures(plan: Plan, contestants: Contestants, console: Console) -> list[Figure]:
    """Those that take no server, one kind after the other; marked where others had the cores meanwhile."""
    model, seeds = contestants.model, plan.seeds
    kinds: dict[str, tuple[str, Callable[[], list[Figure]]]] = {
        "overhead": ("Python's own time per step", lambda: measure_overhead(contestants)),
        "masks": ("Masks of constraints", lambda: measure_masks(model)),
        "eta": ("Estimates of waiting", lambda: measure_estimates(model, seeds)),
        "batch": ("A person beside a batch", lambda: measure_batch(model, seeds)),
    }
    figures: list[Figure] = []
    for name, (title, measure) in kinds.items():
        if name in plan.figures:
            console.print(f"{title} ...")
            before = cpu_use()
            found = await asyncio.to_thread(measure)
            disturbed = is_disturbed([cores_of_others(before, cpu_use())])
            figures += [replace(figure, is_disturbed=disturbed) for figure in found]
    return figures


def measure_overhead(contestants: Contestants) -> list[Figure]:
    """Python's own time per step, measured in a process of its own.

    Raises:
        BenchError: that process failed; the message carries the end of what it said.
    """
    rows = sorted({num_rows for num_rows, _ in OWN_TIME_LIMITS_MS})
    arguments = ["--model", str(contestants.model), "--rows", *map(str, rows)]
    if contestants.shape.num_threads is not None:
        arguments += ["--threads", str(contestants.shape.num_threads)]
    ways = _measured("step_overhead", arguments)
    return [figure for way in ways for figure in _overhead_figures(way)]


def measure_masks(model: Path) -> list[Figure]:
    """What constraints cost on the tokens of `model`, measured in a process of its own.

    Raises:
        BenchError: that process failed; the message carries the end of what it said.
    """
    return [
        figure for cost in _measured("mask_cost", ["--model", str(model)]) for figure in _mask_figures(cost)
    ]


def measure_estimates(model: Path, seeds: range) -> list[Figure]:
    """How many estimates of waiting were wrong, measured in a process of its own.

    Raises:
        BenchError: that process failed; the message carries the end of what it said.
    """
    arguments = ["--model", str(model), "--seed", str(seeds.start), "--repeat", str(len(seeds))]
    return [_wrong_estimates(row) for row in _measured("eta_accuracy", arguments)]


def measure_batch(model: Path, seeds: range) -> list[Figure]:
    """What a person feels of a batch in the same program, measured in a process of its own.

    Raises:
        BenchError: that process failed; the message carries the end of what it said.
    """
    arguments = ["--model", str(model), "--seed", str(seeds.start), "--repeat", str(len(seeds))]
    rows = {str(row["mode"]): row for row in _measured("batch_beside", arguments)}
    first_ms = {mode: float(row["first_token_p95_ms"]) for mode, row in rows.items()}
    beside = first_ms["batch"] / first_ms["requests"]
    num_lost = float(rows["batch"]["num_prompts"]) - float(rows["batch"]["num_answers"])
    title = "a person's first token beside a batch, p95"
    return [
        Figure("batch_first_token", f"{title}, over beside single requests", "times", beside, WORSE_BY_NOISE),
        Figure("batch_over_alone", f"{title}, over alone", "times", first_ms["batch"] / first_ms["alone"]),
        Figure("batch_lost", "prompts of a batch without an answer", "", num_lost, 0.0),
    ]


def _wrong_estimates(row: dict[str, float | str]) -> Figure:
    kind = f"{row['machine']} machine, {row['priority']}, {row['when']}"
    key = "_".join(str(row[name]).replace(" ", "_") for name in ("machine", "priority", "when"))
    title = f"estimates of waiting that were off by more than two, {kind}"
    percent = 100.0 * (1.0 - float(row["num_right"]) / float(row["num_estimates"]))
    return Figure(f"eta_{key}", title, "%", percent, WRONG_ESTIMATES_PERCENT)


def _measured(module: str, arguments: Sequence[str]) -> list[dict[str, float | str]]:
    """What `python -m bench.MODULE --json` says."""
    command = [sys.executable, "-m", f"bench.{module}", "--json", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        text = f"the {module.replace('_', ' ')} could not be measured"
        raise BenchError(f"{text}:\n{answer.stderr[-NUM_TAIL_CHARS:]}")
    found: list[dict[str, float | str]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def _mask_figures(cost: dict[str, float | str]) -> list[Figure]:
    name = str(cost["name"])
    key, title = f"mask_{name.replace(' ', '_').lower()}", f"constraint, {name}"
    return [
        Figure(f"{key}_median", f"{title}, a token, median", "us", float(cost["median_us"])),
        Figure(f"{key}_p99", f"{title}, a token, p99", "us", float(cost["p99_us"])),
        Figure(f"{key}_compile", f"{title}, compiling, median", "ms", float(cost["compile_ms"])),
        Figure(f"{key}_first", f"{title}, compiling, a model's first", "ms", float(cost["first_ms"])),
    ]


def _overhead_figures(way: dict[str, float | str]) -> list[Figure]:
    name, num_rows = str(way["way"]), int(way["num_rows"])
    key = f"own_time_{num_rows}_{name.replace(' ', '_')}"
    case = f"{num_rows} row{'s' * (num_rows > 1)}, {name}"
    title, limit = f"Python's own time per step, {case}", OWN_TIME_LIMITS_MS[num_rows, name]
    return [
        Figure(f"{key}_median", f"{title}, median", "ms", float(way["own_median_ms"]), limit),
        Figure(f"{key}_p95", f"{title}, p95", "ms", float(way["own_p95_ms"])),
        Figure(f"{key}_cpu", f"{title}, CPU median", "ms", float(way["own_cpu_median_ms"])),
        Figure(f"{key}_drawing", f"{title}, of it drawing", "ms", float(way["drawing_median_ms"])),
        Figure(f"native_{key}", f"native decode, {case}, median", "ms", float(way["native_median_ms"])),
    ]


async def _run_plan(
    plan: Plan, contestants: Contestants | Commits, logs: Path, console: Console
) -> list[Comparison]:
    """All workloads, with servers started anew for each shape, and within it as often as the plan says."""
    comparisons: list[Comparison] = []
    for shape, workloads in _by_shape(plan.workloads, contestants.shape).items():
        starts = []
        for seeds in plan.seeds_by_start:
            async with AsyncExitStack() as stack:
                pair = await _start_pair(contestants, shape, logs, stack)
                starts.append(await _run_workloads(workloads, pair, seeds, console))
        comparisons += map(joined, zip(*starts, strict=True))
    return comparisons


async def _measure_servers(
    plan: Plan, contestants: Contestants | Commits, logs: Path, console: Console
) -> list[Figure]:
    """The figures of `OF_SERVERS` that the plan has."""
    figures: list[Figure] = []
    if "idle" in plan.figures:
        console.print("Idle servers ...")
        async with AsyncExitStack() as stack:
            figures += await _measure_idle(await _start_pair(contestants, contestants.shape, logs, stack))
    if "memory" in plan.figures:
        console.print("Memory of each server alone ...")
        figures += await _measure_memory(contestants, plan.seeds.start, logs)
    return figures


async def _start_pair(
    contestants: Contestants | Commits, shape: Shape, logs: Path, stack: AsyncExitStack
) -> tuple[Target, Target]:
    # a folder of its own: what an earlier run kept on disk must not answer this one
    cache_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-", dir=logs))
    return await _start(contestants.servers(Path(cache_dir)), shape, logs, stack)


async def _compare_swaps(plan: Plan, contestants: Contestants, logs: Path, console: Console) -> Comparison:
    """Both servers with two copies of the model, side by side as ever."""
    shape, binary = contestants.shape, contestants.binary
    await asyncio.to_thread(require_router, binary)
    budget = await asyncio.to_thread(budget_for_one, contestants.model, shape)
    models = await asyncio.to_thread(copies_of, contestants.model, logs / "models")
    files = {model.stem: model for model in models}
    workload = Swap(lambda model, prompt: measure_bare_load(files[model], shape, prompt))
    starts = []
    for seeds in plan.seeds_by_start:
        async with AsyncExitStack() as stack:
            cache_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="swap-cache-", dir=logs))
            servers = StokerOfTwo(models, budget, Path(cache_dir)), LlamaRouter(binary, models[0].parent)
            pair = await _start(servers, shape, logs, stack)
            starts += await _run_workloads([workload], pair, seeds, console)
    return joined(starts)


def _swap_setting(contestants: Contestants) -> str:
    budget = budget_for_one(contestants.model, contestants.shape)
    return f"two copies of the model; {StokerServer.label}: {budget}; {LlamaServer.label}: --models-max 1"


async def _start(
    servers: tuple[Server, Server], shape: Shape, logs: Path, stack: AsyncExitStack
) -> tuple[Target, Target]:
    targets = []
    for server in servers:
        process = await stack.enter_async_context(ServerProcess(server, shape, logs))
        targets.append(Target(server.label, process.client, process))
        await targets[-1].warm_up()
    first, second = targets
    return first, second


async def _run_workloads(
    workloads: Sequence[Workload], pair: tuple[Target, Target], seeds: range, console: Console
) -> list[Comparison]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    comparisons = []
    # redrawn at each turn only: the terminal shares the cores with the servers
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        for workload in workloads:
            task = progress.add_task(workload.name, total=2 * len(seeds))
            on_turn = partial(_show_turn, progress, task, workload.name)
            comparisons.append(await alternate(workload, pair, seeds, on_turn))
    return comparisons


def _show_turn(progress: Progress, task: TaskID, workload: str, label: str) -> None:
    progress.update(task, advance=1, description=f"{workload}: {label}", refresh=True)


async def _measure_idle(pair: tuple[Target, Target]) -> list[Figure]:
    await asyncio.sleep(AFTER_LOAD_S)
    figures = []
    for target, limit in zip(pair, (IDLE_LIMIT_PERCENT, None), strict=True):
        if target.process is not None:
            title = f"idle {target.label}, CPU over {IDLE_S:.0f} s"
            percent = await idle_cpu_percent(target.process.pid)
            figures.append(Figure(f"idle_cpu_{target.label}", title, "%", percent, limit))
    return figures


async def _measure_memory(contestants: Contestants | Commits, seed: int, logs: Path) -> list[Figure]:
    held = {}
    with tempfile.TemporaryDirectory(prefix="cache-", dir=logs) as cache_dir:
        for server in contestants.servers(Path(cache_dir)):
            async with ServerProcess(server, contestants.shape, logs) as process:
                target = Target(server.label, process.client, process)
                held[server.label] = await held_after_work(target, process.pid, seed)
    return memory_figures(held)


def _by_shape(workloads: Sequence[Workload], default: Shape) -> dict[Shape, list[Workload]]:
    groups: dict[Shape, list[Workload]] = {}
    for workload in workloads:
        groups.setdefault(workload.shape(default), []).append(workload)
    return groups


def _settings(plan: Plan, contestants: Contestants | Commits) -> dict[str, str]:
    shape = contestants.shape
    return {
        **_plan_settings(plan),
        "starts": f"{plan.num_starts} of both servers, the repetitions spread over them",
        "model": contestants.model.name,
        "slots": f"{shape.num_slots}",
        "context": f"{shape.ctx_size} tokens, shared by all slots",
        "threads": f"{shape.num_threads}",
        **{w.name: f"{w.shape(shape)}" for w in plan.workloads if w.shape(shape) != shape},
    }


def _plan_settings(plan: Plan) -> dict[str, str]:
    return {
        "repetitions": f"{len(plan.seeds)}, alternating",
        "prompts": f"random words, seeds {plan.seeds.start} to {plan.seeds.stop - 1}",
    }
