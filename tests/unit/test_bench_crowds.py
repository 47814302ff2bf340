"""The workloads in which requests compete: for slots, for cells, for cores; and how their bars are judged."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import noise, tables
from bench.client import BrokenStream, Client, Completion, Stream
from bench.errors import BenchError
from bench.peers import LlamaServer, Shape, StokerServer
from bench.results import Series
from bench.target import Target
from bench.timeline import Trace
from bench.workloads import WORKLOADS, Better, Judged, Metric, noisy, priority
from bench_stand_in import StandIn, serving

from stoker.ipc.request import Priority

DEFAULT = Shape(num_slots=8, ctx_size=16384, num_threads=2)


# ---------------------------------------------------------------- attempts


@pytest.mark.parametrize(("tail", "words"), [("error", "out of cells"), ("cut", "closed the connection")])
async def test_a_broken_stream_is_an_outcome_that_keeps_what_came(tail: str, words: str) -> None:
    """L6: the tokens that arrived, when it broke, and why."""
    heard: list[None] = []
    stand_in = StandIn()
    async with serving(stand_in) as url:
        client = Client(url)
        await client.model()
        stand_in.tail = tail
        completion = Completion(prompt="hello", max_tokens=5)
        outcome = await client.attempt(completion, on_text=lambda: heard.append(None))
    assert isinstance(outcome, BrokenStream)
    assert words in outcome.reason
    assert len(outcome.token_times_s) == len(heard) == 5
    assert outcome.sent_s <= outcome.token_times_s[0] <= outcome.last_s


@dataclass
class Silent(StandIn):
    """Begins to answer and never goes on."""

    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def timer(self, body: bytes, index: int) -> None:
        """Stop in the middle of a completion."""
        if body and index == 20:
            await self.released.wait()


async def test_a_server_that_hangs_is_left_after_the_time_allowed() -> None:
    """L6: a request that never ends is not waited for without bound."""
    stand_in = Silent()
    async with serving(stand_in) as url:
        outcome = await Client(url).attempt(Completion(prompt="hello", max_tokens=99), timeout_s=0.05)
        stand_in.released.set()
    assert isinstance(outcome, BrokenStream)
    assert "in 0.05 s" in outcome.reason
    assert outcome.token_times_s


async def test_a_server_that_is_gone_is_an_outcome_too() -> None:
    """Q12: a crash in one repetition does not end the run."""
    async with serving(StandIn()) as url:
        client = Client(url)
        await client.model()
    assert isinstance(await client.attempt(Completion(prompt="hello", max_tokens=5)), BrokenStream)


# ---------------------------------------------------------------- priority


@dataclass
class Crowded(StandIn):
    """Holds its background answers after some tokens until every interactive request has come."""

    kinds: list[str] = field(default_factory=list)
    all_came: asyncio.Event = field(default_factory=asyncio.Event)

    async def timer(self, body: bytes, index: int) -> None:
        """Note what kind came; hold background in its middle."""
        if not body:
            return
        is_background = "service_tier" in json.loads(body)
        if index == 0:
            self.kinds.append("background" if is_background else "interactive")
        if self.kinds.count("interactive") == priority.NUM_ALONE + priority.NUM_ARRIVALS:
            self.all_came.set()
        if is_background and index == 60:
            await self.all_came.wait()


async def test_interactive_requests_arrive_while_background_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q3: first some alone, then all background, then the arrivals, before any background is done."""
    monkeypatch.setattr(priority, "ARRIVE_EVERY_S", 0)
    stand_in = Crowded()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["priority"]().run(Target("x", Client(url)), seed=3)
    assert stand_in.kinds[:5] == ["interactive"] * 5
    assert stand_in.kinds[5:9] == ["background"] * 4
    assert sorted(stand_in.kinds[5:]) == ["background"] * 8 + ["interactive"] * 6
    assert outcome.values["background_complete"] == 8
    assert outcome.values["arrivals_beside"] == 6
    assert [trace.priority for trace in outcome.traces] == [Priority.BACKGROUND] * 8 + [
        Priority.INTERACTIVE
    ] * 6
    tiers = {body.get("service_tier"): body["max_tokens"] for body in stand_in.bodies}
    assert tiers == {"flex": 300, None: 24}
    assert len({body["prompt"] for body in stand_in.bodies}) == 19


@dataclass
class Fickle(StandIn):
    """Cuts background answers short by a token."""

    def _documents(self) -> list[dict[str, Any]]:
        self.num_missing = int("service_tier" in self.bodies[-1])
        return super()._documents()


async def test_a_background_answer_cut_short_is_counted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4: every token or it does not count."""
    monkeypatch.setattr(priority, "ARRIVE_EVERY_S", 0)
    async with serving(Fickle()) as url:
        outcome = await WORKLOADS["priority"]().run(Target("x", Client(url)), seed=3)
    assert outcome.values["background_complete"] == 0


def stream(sent_s: float, *times_s: float) -> Stream:
    """A whole interactive answer with these arrivals."""
    return Stream(
        sent_s=sent_s,
        token_times_s=times_s,
        last_s=times_s[-1],
        prompt_tokens=60,
        completion_tokens=len(times_s),
        cached_tokens=0,
        text="",
    )


def test_the_numbers_of_a_crowd_are_against_its_own_idle_figures() -> None:
    """Q3: first token over 1.5 idle ones and two steps; decode over decode alone."""
    alone = [stream(0.0, 0.2, 0.3)]
    background = Trace(
        priority=Priority.BACKGROUND,
        sent_s=1.0,
        token_times_s=(2.0, 2.05, 2.1, 9.0),
        ended_s=9.0,
        is_complete=True,
    )
    crowd = priority._Crowd((background,), (stream(3.0, 3.2, 3.325), stream(8.0, 8.8, 8.925)))
    values = priority._values(alone, crowd)
    assert values["idle_ttft_ms"] == pytest.approx(200)
    assert values["step_ms"] == pytest.approx(50)
    assert values["ttft_p95_ms"] == pytest.approx(800)
    assert values["ttft_over_allowed"] == pytest.approx(0.8 / (0.3 + 0.1))
    assert values["speed_kept"] == pytest.approx(0.8)
    assert values["wall_s"] == pytest.approx(8.0)
    assert values["arrivals_beside"] == 2


def test_a_percentile_of_few_values_is_the_greatest() -> None:
    """O2: a true percentile, never one between two values."""
    assert priority.percentile([3.0, 1.0, 2.0], 95) == 3.0
    assert priority.percentile(list(range(1, 101)), 95) == 95


# ---------------------------------------------------------------- exhaustion and noise


async def test_only_whole_answers_count_when_cells_run_out() -> None:
    """Q12: an error or a token missing is no answer, and neither ends the run."""
    counts = []
    for stand_in in (StandIn(), StandIn(num_missing=1), StandIn(tail="error")):
        async with serving(stand_in) as url:
            outcome = await WORKLOADS["exhaustion"]().run(Target("x", Client(url)), seed=3)
        counts.append(outcome.values["complete"])
        assert len(outcome.traces) == 8
        assert all(len(trace.token_times_s) >= 319 for trace in outcome.traces)
    assert counts == [8, 0, 0]


def test_a_process_is_busy_in_its_block_and_ended_with_it() -> None:
    """M7: the noise is ours and never outlives its measurement, whatever happens inside."""
    processes = []

    def fail_inside() -> None:
        with noise.busy_process() as process:
            processes.append(process)
            assert process.poll() is None
            raise BenchError("inside")

    with pytest.raises(BenchError, match="inside"):
        fail_inside()
    assert processes[0].returncode is not None


def test_a_busy_process_without_its_parent_ends_by_itself() -> None:
    """M7: not even a benchmark that was killed leaves it behind."""
    subprocess.run([sys.executable, "-c", noise.CODE, "0"], check=True, timeout=60)


async def test_the_noise_lasts_for_the_middle_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: quiet, noisy, quiet again; small answers fill the time before each."""
    for name in ("BEFORE_QUIET_S", "AFTER_START_S", "AFTER_STOP_S"):
        monkeypatch.setattr(noisy, name, 1e-9)
    stand_in = StandIn()
    marks: list[int] = []

    @contextmanager
    def busy() -> Iterator[None]:
        marks.append(len(stand_in.bodies))
        yield
        marks.append(len(stand_in.bodies))

    monkeypatch.setattr(noisy, "busy_process", busy)
    async with serving(stand_in) as url:
        await WORKLOADS["noisy"]().run(Target("x", Client(url)), seed=3)
    lengths = [body["max_tokens"] for body in stand_in.bodies]
    parts = (lengths[: marks[0]], lengths[marks[0] : marks[1]], lengths[marks[1] :])
    for part in parts:
        assert part[-1] == 256
        assert set(part[:-1]) <= {16}
    assert len({body["prompt"] for body in stand_in.bodies}) == len(lengths)


async def test_noise_is_ended_when_the_server_fails_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: an error on the way leaves no process."""
    processes: list[subprocess.Popen[bytes]] = []
    stand_in = StandIn()

    @contextmanager
    def busy() -> Iterator[None]:
        with noise.busy_process() as process:
            processes.append(process)
            stand_in.status = 503
            yield

    monkeypatch.setattr(noisy, "busy_process", busy)
    monkeypatch.setattr(noisy, "BEFORE_QUIET_S", 0)
    async with serving(stand_in) as url:
        with pytest.raises(BenchError, match="503"):
            await WORKLOADS["noisy"]().run(Target("x", Client(url)), seed=3)
    assert processes[0].returncode is not None


# ---------------------------------------------------------------- shapes and bars


def test_each_workload_says_what_shape_it_needs() -> None:
    """I2: four slots for the crowd, a third of the cells, threads as each server picks them."""
    shapes = {name: kind().shape(DEFAULT) for name, kind in WORKLOADS.items()}
    assert shapes["single"] == DEFAULT
    assert shapes["priority"] == Shape(4, 16384, 2)
    assert shapes["exhaustion"] == Shape(8, 1024, 2)
    assert shapes["noisy"] == Shape(8, 16384, None)
    assert str(shapes["noisy"]) == "slots 8, context 16384, threads as each server chooses"


def test_threads_that_a_server_chooses_are_not_on_its_command_line() -> None:
    """I2: the flag is left out, for both; context shift is off whatever the default is."""
    shape = WORKLOADS["noisy"]().shape(DEFAULT)
    theirs = LlamaServer(Path("llama-server"), Path("m.gguf")).command(shape, 5)
    assert "--threads" not in StokerServer("m.gguf").command(shape, 5)
    assert "-t" not in theirs
    assert "--no-context-shift" in theirs


def metric(better: Better, bar: float, judged: Judged) -> Metric:
    """A metric with a bar."""
    return Metric("key", "title", "unit", better, bar=bar, judged=judged)


def test_a_bar_can_be_of_the_first_servers_own_values() -> None:
    """Q3: their median, or each of them; the peer's do not matter."""
    median_low = metric(Better.LOWER, 1.0, Judged.MEDIAN)
    assert Series(median_low, (0.9, 1.0, 7.0), (1.0, 1.0, 1.0)).is_good is True
    assert Series(median_low, (0.9, 1.1), (9.0, 9.0)).is_good is False
    median_high = metric(Better.HIGHER, 0.8, Judged.MEDIAN)
    assert Series(median_high, (0.9, 0.7), (0.1, 0.1)).is_good is False
    each = metric(Better.HIGHER, 8, Judged.EACH)
    assert Series(each, (8, 8), (0, 8)).is_good is True
    assert Series(each, (8, 7, 8), (0, 0, 0)).is_good is False
    assert Series(metric(Better.LOWER, 5, Judged.EACH), (4, 6), (1, 1)).judged == 6


def test_a_peer_with_nothing_makes_an_infinite_ratio() -> None:
    """Q12: eight answers against none; none against none is even."""
    each = metric(Better.HIGHER, 8, Judged.EACH)
    assert Series(each, (8, 0), (0, 0)).ratios == (math.inf, 1.0)
    assert Series(each, (0,), (8,)).ratios == (0.0,)


def test_a_bar_says_what_it_is_of() -> None:
    """O2: a reader can tell a ratio from a value."""
    texts = [
        tables.bar_text(metric(Better.HIGHER, 0.95, Judged.RATIO)),
        tables.bar_text(metric(Better.LOWER, 1 / 1.15, Judged.RATIO)),
        tables.bar_text(metric(Better.LOWER, 1, Judged.MEDIAN)),
        tables.bar_text(metric(Better.HIGHER, 8, Judged.EACH)),
    ]
    assert texts == ["≥ 0.95", "≥ 0.87", "own ≤ 1", "each ≥ 8"]
