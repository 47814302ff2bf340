"""The benchmark of swaps: what is asked when, what counts as one, what servers are told; nothing timed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tiny_models import write_gemma3

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import bare_load
from bench.__main__ import parse_arguments, plan_of
from bench.bare_load import BareLoad, measure_bare_load
from bench.client import Client
from bench.errors import BenchError
from bench.peers import Shape
from bench.session import Plan, compare_running
from bench.status import models_in_memory
from bench.swap_servers import (
    OWN_BYTES,
    Budget,
    LlamaRouter,
    StokerOfTwo,
    budget_for_one,
    copies_of,
    require_router,
)
from bench.target import Target
from bench.workloads import WORKLOADS, swap
from bench.workloads.swap import Swap
from bench_stand_in import StandIn, serving

from stoker.errors import InsufficientMemoryError
from stoker.ipc.model import ModelSpec
from stoker.models.memory_estimate import fit as verdict
from stoker.models.memory_estimate.estimate import estimator_of

SHAPE = Shape(num_slots=4, ctx_size=4096, num_threads=2)
PROMPT_TOKENS = 7
"""What the stand-in makes of any prompt."""


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in needs no time to settle."""
    monkeypatch.setattr(swap, "SETTLE_S", 0)


# ---------------------------------------------------------------- the workload


@dataclass
class OfTwo(StandIn):
    """Serves two models, the one asked last is in memory; tells it as Stoker does, or as its peer."""

    models: tuple[str, ...] = ("first", "second")
    inside: set[str] = field(default_factory=lambda: {"first"})
    is_stoker: bool = True
    keeps_both: bool = False
    degraded: tuple[str, ...] = ()

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        if head.startswith(b"GET /v1/runtime"):
            states = [
                {"id": m, "state": "ready" if m in self.inside else "absent", "degraded": self.degraded}
                for m in self.models
            ]
            return [json.dumps({"models": states} if self.is_stoker else {"error": "not found"}).encode()]
        if head.startswith(b"GET"):
            listed = [
                {"id": m, "status": {"value": "loaded" if m in self.inside else "unloaded"}}
                for m in self.models
            ]
            return [json.dumps({"data": listed}).encode()]
        pieces = super()._pieces(head, body)
        asked = self.bodies[-1]["model"]
        self.inside = self.inside | {asked} if self.keeps_both else {asked}
        return pieces


class Bare:
    """Notes what it is to load; each load takes a second."""

    def __init__(self, num_prompt_tokens: int = PROMPT_TOKENS) -> None:
        self.loads: list[tuple[str, str]] = []
        self._num_prompt_tokens = num_prompt_tokens

    async def __call__(self, model: str, prompt: str) -> BareLoad:
        """One load of one second."""
        self.loads.append((model, prompt))
        return BareLoad(1.0, self._num_prompt_tokens)


@pytest.mark.parametrize("is_stoker", [True, False])
@pytest.mark.parametrize("inside", [{"first"}, {"second"}, set()])
async def test_models_are_asked_in_turn_from_the_one_that_is_out(
    inside: set[str], *, is_stoker: bool
) -> None:
    """R3: each request is for the model that is out; the first is not timed; no prompt comes twice."""
    stand_in, bare = OfTwo(inside=inside, is_stoker=is_stoker), Bare()
    async with serving(stand_in) as url:
        outcome = await Swap(bare).run(Target("x", Client(url)), seed=3)
    one, other = ("second", "first") if "first" in inside else ("first", "second")
    asked = [(body["model"], body["prompt"]) for body in stand_in.bodies]
    assert [model for model, _ in asked] == [one, other, one, other, one]
    assert len({prompt for _, prompt in asked}) == len(asked)
    assert bare.loads == asked[1:]
    assert set(outcome.values) == {metric.key for metric in Swap.metrics}
    assert outcome.values["bare_ms"] == 1000
    assert outcome.values["ttft_ms"] == pytest.approx(outcome.values["over_bare"] * 1000)
    assert (
        outcome.values["over_bare_least"] <= outcome.values["over_bare"] <= outcome.values["over_bare_most"]
    )


async def test_a_request_for_a_model_that_stayed_is_no_swap() -> None:
    """R3: a server that holds both has nothing to compare."""
    async with serving(OfTwo(keeps_both=True)) as url:
        with pytest.raises(BenchError, match="has first in memory already"):
            await Swap(Bare()).run(Target("x", Client(url)), seed=3)


async def test_a_model_that_was_cut_down_is_no_comparison() -> None:
    """R2: a shorter context loads sooner, so it is not the model that was asked for."""
    async with serving(OfTwo(degraded=("context 2048 instead of 4096",))) as url:
        with pytest.raises(BenchError, match="less than was asked for: context 2048"):
            await Swap(Bare()).run(Target("x", Client(url)), seed=3)


async def test_a_bare_load_reads_the_same_prompt() -> None:
    """R3: as many tokens as the server counts, or both did not do the same."""
    async with serving(OfTwo()) as url:
        with pytest.raises(BenchError, match=r"x made 7 tokens of a prompt, the bare load 8"):
            await Swap(Bare(num_prompt_tokens=8)).run(Target("x", Client(url)), seed=3)


async def test_an_answer_cut_short_ends_the_measurement() -> None:
    """L6: a server that stops early is not faster."""
    async with serving(OfTwo(num_missing=1)) as url:
        with pytest.raises(BenchError, match="8 tokens were asked for, 7 came"):
            await Swap(Bare()).run(Target("x", Client(url)), seed=3)


async def test_a_server_of_another_number_of_models_is_refused() -> None:
    """R3: the message names what it serves."""
    async with serving(OfTwo(models=("only",))) as url:
        with pytest.raises(BenchError, match="serves only; a swap takes two"):
            await Swap(Bare()).run(Target("x", Client(url)), seed=3)


async def test_a_server_that_does_not_tell_what_is_in_memory_is_refused() -> None:
    """I4: without that a swap cannot be told from an answer of a model that was there."""
    async with serving(StandIn()) as url:
        with pytest.raises(BenchError, match="does not tell"):
            await models_in_memory(Client(url))


@dataclass
class Loading(OfTwo):
    """Has a model on its way in and another on its way out."""

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        states = ["loading", "unloading", "absent", "failed", "suspended", "ready"]
        return [json.dumps({"models": [{"id": state, "state": state} for state in states]}).encode()]


async def test_a_model_on_its_way_in_or_out_counts_as_in_memory() -> None:
    """L1: it takes memory."""
    async with serving(Loading()) as url:
        assert await models_in_memory(Client(url)) == {"loading", "unloading", "ready"}


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    return write_gemma3(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("shape", [SHAPE, Shape(num_slots=8, ctx_size=16384, num_threads=None)])
def test_the_budget_holds_one_model_whole_and_no_form_of_another_beside_it(model: Path, shape: Shape) -> None:
    """R1, R2: weighed with Stoker's own words, also where its own size was guessed wrong."""
    estimate, told = estimator_of(model), budget_for_one(model, shape)
    spec = ModelSpec(
        id="m",
        path=str(model),
        num_slots=shape.num_slots,
        n_ctx=shape.ctx_size,
        num_threads=shape.num_threads or 0,
    )
    asked = estimate(spec)
    smallest_bytes = min(estimate(each).total_bytes for each in verdict.smaller_forms(spec, asked))
    for wrong_bytes in (-smallest_bytes // 3, 0, smallest_bytes // 3):
        most_bytes = told.limit_bytes - OWN_BYTES - wrong_bytes

        def budget(taken_bytes: int, most_bytes: int = most_bytes) -> verdict.MemoryBudget:
            free_bytes = most_bytes - taken_bytes
            return verdict.MemoryBudget(
                free_bytes=free_bytes, limit_bytes=most_bytes, margin_bytes=told.margin_bytes
            )

        assert verdict.weigh(spec, estimate, budget(0)).spec == spec
        with pytest.raises(InsufficientMemoryError):
            verdict.weigh(spec, estimate, budget(asked.total_bytes))
    assert (OWN_BYTES + asked.total_bytes) / told.limit_bytes <= 0.5


def test_both_servers_get_both_models_and_the_same_shape(tmp_path: Path, model: Path) -> None:
    """R3: slots, context and threads agree; each has room for one."""
    models = copies_of(model, tmp_path / "models")
    assert [each.name for each in models] == ["first.gguf", "second.gguf"]
    assert all(each.read_bytes() == model.read_bytes() for each in models)
    told = budget_for_one(model, SHAPE)
    ours = StokerOfTwo(models, told, tmp_path / "cache").command(SHAPE, 5)
    theirs = LlamaRouter(Path("bin/llama-server"), tmp_path / "models").command(SHAPE, 5)
    for flag, peer_flag, value in (
        ("--slots", "-np", "4"),
        ("--ctx-size", "-c", "4096"),
        ("--threads", "-t", "2"),
        ("--host", "--host", "127.0.0.1"),
    ):
        assert ours[ours.index(flag) + 1] == theirs[theirs.index(peer_flag) + 1] == value
    assert [word for flag, word in pairwise(ours) if flag == "--model"] == list(map(str, models))
    assert ours[ours.index("--memory-limit") + 1] == str(told.limit_bytes)
    assert ours[ours.index("--memory-margin") + 1] == str(told.margin_bytes)
    assert theirs[theirs.index("--models-dir") + 1] == str(tmp_path / "models")
    assert theirs[theirs.index("--models-max") + 1] == "1"
    assert "-m" not in theirs


def test_nothing_of_the_users_own_server_is_taken_up(tmp_path: Path) -> None:
    """L2: suspended requests lie in the run folder; the benchmark has one of its own."""
    command = StokerOfTwo((), Budget(2, 1), tmp_path / "cache").command(SHAPE, 5)
    assert command[command.index("--run-dir") + 1].startswith(str(tmp_path))
    assert command[command.index("--cache-dir") + 1].startswith(str(tmp_path))


@pytest.fixture(params=["  --models-dir PATH   folder", "  -m, --model"])
def binary(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A llama-server that only tells of itself."""
    script = tmp_path / "llama-server"
    code = f"#!/bin/sh\n[ $1 = --version ] && echo 'version: 47 (abc)' || echo '{request.param}'\n"
    script.write_text(code)
    script.chmod(0o755)
    return script


def test_a_peer_without_router_mode_is_refused_with_its_version(binary: Path) -> None:
    """R3: what cannot be compared is said, not left out."""
    if "--models-dir" in binary.read_text():
        require_router(binary)
        return
    with pytest.raises(BenchError, match=r"llama-server 47 \(abc\) has no router mode"):
        require_router(binary)


# ---------------------------------------------------------------- bare loads


async def test_a_bare_load_is_made_in_a_process_of_its_own(model: Path) -> None:
    """R3: load, context, prefill and a token, with nothing of Stoker's."""
    load = await measure_bare_load(model, SHAPE, "Notes: time year")
    assert load.took_s > 0
    assert load.num_prompt_tokens > 0


async def test_a_bare_load_that_fails_says_why(tmp_path: Path) -> None:
    """R3: the end of what the library said is in the error."""
    with pytest.raises(BenchError, match=r"(?s)bare load of none\.gguf failed.*gave no model"):
        await measure_bare_load(tmp_path / "none.gguf", SHAPE, "hello")


async def test_a_build_that_crashes_on_repacked_weights_is_tried_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R9: as Stoker itself finds out and does."""
    commands: list[list[str]] = []

    def crash_once(command: list[str], _prompt: str) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        is_first = len(commands) == 1
        said = '{"took_s": 2.5, "num_prompt_tokens": 9}\n'
        return subprocess.CompletedProcess(command, -11 if is_first else 0, "" if is_first else said, "")

    monkeypatch.setattr(bare_load, "_run", crash_once)
    assert await measure_bare_load(Path("m.gguf"), SHAPE, "hello") == BareLoad(2.5, 9)
    assert [("--no-extra-bufts" in command) for command in commands] == [False, True]


# ---------------------------------------------------------------- the plan


def test_swaps_are_part_of_a_whole_run_and_can_be_had_alone() -> None:
    """R3: `--only swap` measures nothing else."""
    assert plan_of(parse_arguments([])).has_swap
    alone = plan_of(parse_arguments(["--only", "swap"]))
    assert alone.has_swap
    assert (alone.workloads, alone.figures) == ((), frozenset())
    assert not plan_of(parse_arguments(["--only", "single"])).has_swap


async def test_servers_of_others_are_not_asked_to_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: what they were started with is their owner's; the run says what it left out."""
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    plan = Plan((WORKLOADS["single"](),), frozenset(), range(1, 2), has_swap=True)
    console = Console(record=True, width=130, file=io.StringIO())
    async with serving(StandIn()) as one, serving(StandIn()) as two:
        report = await compare_running(plan, (one, two), ("a", "b"), console)
    assert [comparison.workload for comparison in report.comparisons] == ["single"]
    assert "swap is left out" in console.export_text()
