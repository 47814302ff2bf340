"""Who else had the cores: the arithmetic, the mark of a disturbed run, and the tables at 80 columns."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import psutil
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import company, contest, publication, session
from bench.client import Client, Stream
from bench.company import DISTURBED_CORES, CpuUse, cores_of_others, cpu_use, is_disturbed
from bench.idle import tree_cpu_s
from bench.peers import Shape
from bench.results import Comparison, Figure, Report, Series, Turn
from bench.target import Target
from bench.workloads import WORKLOADS, Better, Metric, Outcome, Workload
from bench.workloads.workload import PAUSES, pauses
from bench_stand_in import StandIn, StandInProcess, serving

SPEED = Metric("speed", "decode", "tok/s", Better.HIGHER, bar=1.0)
QUIET, TAKEN = Turn(1.0, DISTURBED_CORES), Turn(2.5, DISTURBED_CORES + 0.01)
UNKNOWN = Turn(1.5, None)


def comparison(*turns: tuple[Turn, Turn]) -> Comparison:
    """Three repetitions of one metric."""
    series = (Series(SPEED, (90.0, 120.0, 99.0), (100.0, 100.0, 100.0)),)
    return Comparison("w", "a load", series, turns=turns)


def printed(report: Report, width: int) -> str:
    """What a terminal of so many columns shows."""
    out = io.StringIO()
    publication.show(report, Console(file=out, width=width))
    return out.getvalue()


# ---------------------------------------------------------------- arithmetic


def test_what_others_had_is_the_machines_time_less_our_own() -> None:
    """O5: in cores, so that a long turn and a short one have one threshold."""
    before = CpuUse(at_s=10.0, machine_s=1000.0, own_s=50.0)
    assert cores_of_others(before, CpuUse(14.0, 1010.0, 58.0)) == pytest.approx(0.5)
    assert cores_of_others(before, CpuUse(14.0, 1007.9, 58.0)) == 0.0
    # a sandbox whose kernel tells nothing is not a quiet machine
    assert cores_of_others(before, CpuUse(14.0, 1000.0, 58.0)) is None


def test_a_turn_is_disturbed_past_the_threshold_and_not_where_nothing_is_known() -> None:
    """O5: a tenth of a core, of either turn."""
    assert not is_disturbed([DISTURBED_CORES, 0.0])
    assert is_disturbed([0.0, DISTURBED_CORES + 0.001])
    assert not is_disturbed([None, None])


def test_only_work_on_cores_that_we_may_use_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """O5: idle, waiting and what is counted twice are no work; stolen time is somebody else's."""
    core = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    ours = core._replace(user=3.0, system=2.0, idle=1000.0)
    if hasattr(core, "steal"):
        ours = ours._replace(system=1.5, steal=0.5, iowait=500.0, guest=2.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda *, percpu: [ours, core._replace(user=70.0 * percpu)])
    monkeypatch.setattr(company.os, "sched_getaffinity", lambda _pid: {0}, raising=False)
    assert cpu_use().machine_s == pytest.approx(5.0)


def test_work_of_a_child_that_ended_is_still_ours() -> None:
    """O5: a server that a workload kills was no other process."""
    before = tree_cpu_s(psutil.Process())
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    # the kernel counts in ticks of 10 ms
    assert tree_cpu_s(psutil.Process()) - before > 0.15


# ---------------------------------------------------------------- turns


class Nothing(Workload):
    """Does nothing, equally fast."""

    name = "nothing"
    title = "nothing"
    metrics = (SPEED,)

    async def run(self, target: Target, seed: int) -> Outcome:
        """One value."""
        return Outcome({"speed": 1.0})


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the counts that the turns find, one a look."""

    def follow(*found: CpuUse) -> None:
        looks = chain(found, repeat(found[-1]))
        monkeypatch.setattr(contest, "cpu_use", lambda: next(looks))

    monkeypatch.setattr(contest, "SETTLE_S", 0)
    monkeypatch.setattr(contest, "load_mean", lambda: 0.75)
    return follow


async def test_each_turn_carries_what_others_took_in_it(uses: Callable[..., None]) -> None:
    """O5: of both servers, while the workload ran, not between the turns."""
    uses(
        *(CpuUse(0, 0, 0), CpuUse(2, 4, 3)),  # the first server's turn: half a core
        *(CpuUse(9, 99, 9), CpuUse(11, 103, 13)),  # the second's: none
    )
    one, two = (Target(label, Client("http://h"), StandInProcess("http://h")) for label in "xy")
    found = await contest.alternate(Nothing(), (one, two), range(1))
    assert found.turns == ((Turn(0.75, 0.5), Turn(0.75, 0.0)),)
    assert found.num_disturbed == 1


async def test_servers_that_somebody_else_started_are_not_taken_for_a_disturbance(
    uses: Callable[..., None],
) -> None:
    """O5: their own work is in the machine's count and not in ours; the report says so."""
    uses(CpuUse(0, 0, 0), CpuUse(2, 4, 0))
    one, two = (Target(label, Client("http://h")) for label in "xy")
    found = await contest.alternate(Nothing(), (one, two), range(1))
    assert found.turns == ((Turn(0.75, None), Turn(0.75, None)),)
    report = Report(("x", "y"), {}, {}, (found,), ())
    assert "what others took is not known" in report.load_during
    assert "disturbed" not in printed(report, 80)


def test_a_disturbed_run_is_marked_in_every_form_of_the_report(tmp_path: Path) -> None:
    """O5: how many repetitions of which workload, in the terminal, the page and the data."""
    pytest.importorskip("matplotlib")
    disturbed = comparison((QUIET, TAKEN), (QUIET, QUIET), (TAKEN, TAKEN))
    report = Report(("a", "b"), {}, {}, (disturbed, comparison((QUIET, QUIET))), ())
    assert (disturbed.num_disturbed, report.comparisons[1].num_disturbed) == (2, 0)
    page, data, _ = (
        path.read_bytes().decode(errors="replace") for path in publication.write(report, tmp_path)
    )
    for text in (printed(report, 130), page):
        assert "a load (DISTURBED: 2 of 3)" in text
        assert "2 of 4 repetitions (others took more than 0.1 of a core)" in text
    document = json.loads(data)
    assert [workload["disturbed"] for workload in document["workloads"]] == [2, 0]
    assert document["workloads"][0]["turns"][0][1] == {"load": 2.5, "others_cores": TAKEN.others_cores}
    assert "at most 2.5" in document["load_during"]
    assert "others took 0.10 cores, at most 0.11" in document["load_during"]


def test_a_quiet_run_says_that_it_was_watched() -> None:
    """O5: no mark means something only where somebody looked."""
    quiet = Report(("a", "b"), {}, {}, (comparison((QUIET, QUIET)),), ())
    assert "0 of 1 repetitions" in printed(quiet, 100)
    assert "DISTURBED" not in printed(quiet, 100)
    blind = Report(("a", "b"), {}, {}, (comparison((UNKNOWN, UNKNOWN)),), ())
    assert "0 of 1" not in printed(blind, 100)


@pytest.mark.parametrize("taken_s", [0.0, 5.0])
async def test_figures_that_take_no_server_are_watched_too(
    monkeypatch: pytest.MonkeyPatch, taken_s: float
) -> None:
    """O5: each kind from its beginning to its end; the mark is in the terminal and in the data."""
    uses = iter([CpuUse(0, 0, 0), CpuUse(10, 20 + taken_s, 20)])
    monkeypatch.setattr(session, "cpu_use", lambda: next(uses))
    monkeypatch.setattr(session, "describe_load", lambda: asyncio.sleep(0, "0.0"))
    monkeypatch.setattr(session, "measure_masks", lambda _model: [Figure("k", "masks", "us", 1.0)])
    monkeypatch.setattr(session, "binary_version", str)
    contestants = session.Contestants(Path("m.gguf"), Path("server"), Shape(8, 4096, 2))
    plan = session.Plan((), frozenset({"masks"}), range(1, 2))
    report = await session.compare_started(plan, contestants, Console(quiet=True))
    assert report.document()["figures"][0]["disturbed"] is (taken_s > 0)
    assert ("masks (DISTURBED)" in printed(report, 80)) is (taken_s > 0)


# ---------------------------------------------------------------- the table


def test_the_table_of_ratios_fits_80_columns_with_every_number_whole() -> None:
    """O6: median, least and most of every row of every workload; only words are folded."""
    comparisons = tuple(
        Comparison(
            name,
            kind.title,
            tuple(Series(metric, (0.0123, 16384.0), (16012.0, 131.7)) for metric in kind.metrics),
            turns=((TAKEN, TAKEN),) * 2,
        )
        for name, kind in WORKLOADS.items()
    )
    figures = (Figure("k", "a figure of many words " * 5, "ms", 0.123, limit=0.1, is_disturbed=True),)
    report = Report(("stoker", "llama-server"), {"cpu": "C" * 90}, {}, comparisons, figures)
    lines = printed(report, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    ratios = [series.ratio for each in comparisons for series in each.series]
    assert sum(f" {ratio:.3f} " in line for line in lines for ratio in set(ratios)) == len(ratios)


def test_a_ratio_is_shown_with_its_median_least_and_most() -> None:
    """O6: of all repetitions, in that order."""
    shown = " ".join(printed(Report(("a", "b"), {}, {}, (comparison(),), ()), 80).split())
    assert "decode (tok/s) 99 100 0.990 0.900 1.200 ≥ 1 MISSED" in shown


# ---------------------------------------------------------------- pauses


def stream(*times_s: float) -> Stream:
    """An answer whose text came at these times."""
    return Stream(
        sent_s=0.0,
        token_times_s=times_s,
        last_s=times_s[-1],
        prompt_tokens=1,
        completion_tokens=len(times_s),
        cached_tokens=0,
        text="",
    )


def test_pauses_are_of_all_readers_together() -> None:
    """O6: the p95 and the longest of every gap between two arrivals, in milliseconds."""
    steady = stream(*(0.01 * i for i in range(100)))
    found = pauses([steady, stream(5.0, 5.2)])
    assert found == {"itl_p95_ms": pytest.approx(10.0), "itl_max_ms": pytest.approx(200.0)}
    assert set(found) == {metric.key for metric in PAUSES}


@pytest.mark.parametrize("name", ["single", "fanout"])
async def test_readers_alone_and_together_are_asked_for_their_pauses(name: str) -> None:
    """O6: both rows of the table have them."""
    async with serving(StandIn()) as url:
        outcome = await WORKLOADS[name]().run(Target("x", Client(url)), seed=3)
    assert outcome.values["itl_max_ms"] >= outcome.values["itl_p95_ms"] > 0
