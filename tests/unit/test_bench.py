"""The benchmark's own arithmetic, client, processes and files; no model and nothing timed for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import contest, publication, session, step_overhead
from bench.__main__ import main, parse_arguments, plan_of
from bench.client import Client, Completion
from bench.errors import BenchError
from bench.idle import idle_cpu_percent, tree_cpu_s
from bench.install_peer import build_environment, build_percent
from bench.machine import describe_machine
from bench.memory import LIMIT_MIB, held_after_work, memory_figures, tree_pss_mib
from bench.peers import LlamaServer, ServerProcess, Shape, StokerServer
from bench.prompts import random_prompt
from bench.results import Comparison, Figure, Report, Series
from bench.sse import SseDecoder
from bench.steady_device import Lap
from bench.step_overhead import Turn, summarise, summarise_laps
from bench.target import Target
from bench.workloads import WORKLOADS, Better, Metric, Outcome, Workload, noisy, priority, shared
from bench_stand_in import StandIn, StandInProcess, serving

from stoker.backends import registry

SHAPE = Shape(num_slots=8, ctx_size=4096, num_threads=2)
SPEED = Metric("speed", "decode", "tok/s", Better.HIGHER, bar=0.95)
DELAY = Metric("delay", "first token", "ms", Better.LOWER)


# ---------------------------------------------------------------- events and client


def test_events_are_whole_wherever_the_bytes_are_cut() -> None:
    """S2: comments are dropped, CRLF is read, a payload never depends on packet borders."""
    stream = b': hi\n\ndata: {"a": 1}\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\n\n\ndata: [DONE]\n\n'
    for cut in range(len(stream)):
        decoder = SseDecoder()
        assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == [
            b'{"a": 1}',
            b"one\ntwo",
            b"[DONE]",
        ]


async def test_a_stream_is_counted_by_its_usage_and_timed_by_its_text() -> None:
    """S2: usage in a chunk of its own, tokens in order, times that never run backwards."""
    stand_in = StandIn()
    async with serving(stand_in) as url:
        stream = await Client(url).complete(
            Completion(prompt="hello", max_tokens=5, extra=(("timeout_s", 9),))
        )
    assert stream.text == " t0 t1 t2 t3 t4"
    assert (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens) == (7, 5, 3)
    assert len(stream.gaps_s) == 4
    assert stream.sent_s <= stream.token_times_s[0] <= stream.token_times_s[-1] <= stream.last_s
    body = stand_in.bodies[0]
    assert (body["model"], body["temperature"], body["ignore_eos"], body["timeout_s"]) == ("m", 0, True, 9)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("stand_in", "words"),
    [
        (StandIn(tail="error"), "out of cells"),
        (StandIn(tail="cut"), "closed the connection"),
    ],
)
async def test_a_stream_that_goes_wrong_is_an_error_and_never_a_short_answer(
    stand_in: StandIn, words: str
) -> None:
    """S2: errors after the stream began are in-band; a connection cut short is no end."""
    async with serving(stand_in) as url:
        with pytest.raises(BenchError, match=words):
            await Client(url).complete(Completion(prompt="hello", max_tokens=5))


async def test_a_refusal_carries_the_status_and_what_the_server_said() -> None:
    """S3: the error body is shown."""
    stand_in = StandIn()
    async with serving(stand_in) as url:
        client = Client(url)
        await client.model()
        stand_in.status = 503
        with pytest.raises(BenchError, match=r"503.*no such thing"):
            await client.complete(Completion(prompt="hello", max_tokens=5))


def test_only_plain_http_addresses_are_taken() -> None:
    """S4: the client speaks to loopback servers without TLS and says so."""
    with pytest.raises(BenchError, match="not an http"):
        Client("https://localhost:1")


# ---------------------------------------------------------------- workloads


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in needs no time to settle."""
    for module, name in (
        (contest, "SETTLE_S"),
        (priority, "ARRIVE_EVERY_S"),
        (noisy, "BEFORE_QUIET_S"),
        (noisy, "AFTER_START_S"),
        (noisy, "AFTER_STOP_S"),
        (shared, "HEAD_START_S"),
    ):
        monkeypatch.setattr(module, name, 0)


@pytest.mark.parametrize("kind", WORKLOADS.values(), ids=list(WORKLOADS))
async def test_a_workload_yields_every_metric_it_names(kind: type[Workload]) -> None:
    """Q9: each workload drives a server over HTTP and returns its numbers by key."""
    async with serving(StandIn()) as url:
        outcome = await kind().run(Target("x", Client(url), StandInProcess(url)), seed=3)
    assert set(outcome.values) == {metric.key for metric in kind.metrics}
    # a stand-in has answered before anybody can arrive beside it or leave
    early = {"arrivals_beside", "left_early"}
    assert {key for key, value in outcome.values.items() if value <= 0} <= early


COUNTING = {"exhaustion", "turns", "turns_alone", "turns_tight"}


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - COUNTING))
async def test_an_answer_with_a_token_missing_fails_the_workload(name: str) -> None:
    """L6: a server that stops early is not faster."""
    async with serving(StandIn(num_missing=1)) as url:
        with pytest.raises(BenchError, match=r"asked for|without tokens"):
            await WORKLOADS[name]().run(Target("x", Client(url), StandInProcess(url)), seed=3)


async def test_both_servers_get_the_same_prompts_and_none_twice() -> None:
    """C2: no prompt of a run begins like another, so a prefix cache has nothing to find."""
    first, second = StandIn(), StandIn()
    async with serving(first) as one, serving(second) as two:
        for target in (Target("x", Client(one)), Target("y", Client(two))):
            for seed in (1, 2):
                await WORKLOADS["fanout"]().run(target, seed)
    sent, again = ([body["prompt"] for body in stand_in.bodies] for stand_in in (first, second))
    assert sorted(sent) == sorted(again)
    assert len({prompt[:40] for prompt in sent}) == 16
    assert random_prompt(20, 5) == random_prompt(20, 5) != random_prompt(20, 6)


class Recorder(Workload):
    """Notes who ran with which seed."""

    name = "recorder"
    title = "recorder"
    metrics = (SPEED,)

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []

    async def run(self, target: Target, seed: int) -> Outcome:
        """The seed as speed, doubled for the second server."""
        self.runs.append((target.label, seed))
        return Outcome({"speed": float(seed) if target.label == "x" else 2.0 * seed})


async def test_servers_take_turns_on_the_same_seed() -> None:
    """Q9: alternation pairs each measurement with its neighbour in time."""
    workload = Recorder()
    heard: list[str] = []
    pair = (Target("x", Client("http://h")), Target("y", Client("http://h")))
    comparison = await contest.alternate(workload, pair, range(4, 6), heard.append)
    assert workload.runs == [("x", 4), ("y", 4), ("x", 5), ("y", 5)]
    assert heard == ["x", "y", "x", "y"]
    assert comparison.series[0].ratios == (0.5, 0.5)
    assert comparison.timelines == ()


# ---------------------------------------------------------------- results and report


def test_a_ratio_above_one_is_better_in_both_directions() -> None:
    """Q9: speed is ours by theirs, delay is theirs by ours, and the median is of ratios."""
    assert Series(SPEED, (90.0, 50.0, 10.0), (100.0, 100.0, 1.0)).ratio == pytest.approx(0.9)
    assert Series(DELAY, (10.0,), (20.0,)).ratios == (2.0,)
    assert Series(SPEED, (80.0, 1700.0), (100.0, 100.0)).ratio == pytest.approx(0.8)


def test_a_bar_is_judged_and_its_absence_is_no_verdict() -> None:
    """Q9: 0.95 passes at 0.95, misses below."""
    assert Series(SPEED, (95.0,), (100.0,)).is_good is True
    assert Series(SPEED, (94.0,), (100.0,)).is_good is False
    assert Series(DELAY, (1.0,), (1.0,)).is_good is None
    assert Figure("k", "t", "ms", 0.6, limit=0.5).is_good is False
    assert Figure("k", "t", "ms", 0.5).is_good is None


def test_unpaired_values_are_refused() -> None:
    """Q9: a lost repetition does not shift the pairs."""
    with pytest.raises(ValueError, match="do not make pairs"):
        Series(SPEED, (1.0, 2.0), (1.0,))


@pytest.fixture
def report() -> Report:
    """One workload of two metrics and one figure, with a hit and a miss."""
    series = (Series(SPEED, (90.0, 120.0, 99.0), (100.0, 100.0, 100.0)), Series(DELAY, (4.0,), (200.0,)))
    figures = (Figure("own", "own time", "ms", 0.61, limit=0.5),)
    machine = {"cpu": "A | CPU"}
    return Report(("a", "b"), machine, {"slots": "8"}, (Comparison("w", "a load", series),), figures)


def test_what_was_measured_is_written_where_nothing_can_be_drawn(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: the environment of `make run` has no library that draws; the minutes of measuring are kept."""
    monkeypatch.setattr(publication, "can_draw", lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails
    written = publication.write(report, tmp_path)
    assert [path.name for path in written] == ["report.md", "report.json"]
    page = written[0].read_text()
    assert "| 0.990 | 0.900 | 1.200 |" in page
    assert "![" not in page


def test_the_report_is_a_page_a_document_and_a_picture(report: Report, tmp_path: Path) -> None:
    """O2: every value, ratio and verdict is in the files."""
    pytest.importorskip("matplotlib")
    written = publication.write(report, tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["report.md", "report.json", "report.png"]
    page = written[0].read_text()
    assert "0.990" in page
    assert "| 0.990 | 0.900 | 1.200 |" in page
    assert "MISSED" in page
    assert "A \\| CPU" in page
    document = json.loads(written[1].read_bytes())
    assert document["workloads"][0]["metrics"][0]["ratios"] == [0.9, 1.2, 0.99]
    assert document["workloads"][0]["metrics"][0]["good"] is True
    assert document["figures"][0]["good"] is False
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described_without_naming_it() -> None:
    """S4: no host name, no folder."""
    text = " ".join(describe_machine().values())
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert "/" not in describe_machine()["system"]


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Script:
    """A server that is a line of Python; ready when it has printed its child's pid."""

    code: str
    label: ClassVar[str] = "script"

    def command(self, shape: Shape, port: int) -> list[str]:
        """This interpreter, running the code."""
        return [sys.executable, "-c", self.code]

    async def address(self, output: str, port: int) -> str | None:
        """The printed number as a port."""
        return f"http://127.0.0.1:{output.strip()}" if output.endswith("\n") else None


async def test_stopping_a_server_ends_its_children_too(tmp_path: Path) -> None:
    """L4: nothing of a server outlives its measurement."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    async with ServerProcess(Script(code), SHAPE, tmp_path) as process:
        child = psutil.Process(int(process.client.url.rsplit(":", 1)[1]))
        pids = (process.pid, child.pid)
        assert child.is_running()
    await asyncio.to_thread(psutil.wait_procs, [child], 10)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """R9: the end of its log is in the error."""
    script = Script("import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(BenchError, match=r"code 3 at start(.|\n)*no such model"):
        await ServerProcess(script, SHAPE, tmp_path).start()


async def test_stoker_is_ready_when_its_line_says_so() -> None:
    """I3: the address comes from the readiness line, whatever else was printed."""
    server = StokerServer("m.gguf")
    line = '{"event": "ready", "host": "127.0.0.1", "port": 4711, "pid": 1, "models": ["m"]}\n'
    assert await server.address('loading\n[1]\n{"event": "other"}\n', 0) is None
    assert await server.address("loading\n" + line, 0) == "http://127.0.0.1:4711"
    assert await server.address("loading\n" + line[:40], 0) is None


def test_both_servers_are_told_the_same_shape() -> None:
    """I2: slots, context, threads and model agree, and the peer's context is one pool too."""
    ours = StokerServer("m.gguf").command(SHAPE, 5)
    theirs = LlamaServer(Path("bin/llama-server"), Path("m.gguf")).command(SHAPE, 5)
    for flag, peer_flag, value in (
        ("--slots", "-np", "8"),
        ("--ctx-size", "-c", "4096"),
        ("--threads", "-t", "2"),
        ("--model", "-m", "m.gguf"),
        ("--host", "--host", "127.0.0.1"),
    ):
        assert ours[ours.index(flag) + 1] == theirs[theirs.index(peer_flag) + 1] == value
    assert "--kv-unified" in theirs


class Process:
    """Stands for psutil's: some CPU time and some children."""

    def __init__(self, user_s: float, *children: Process) -> None:
        self._times = SimpleNamespace(user=user_s, system=0.25, children_user=0.125, children_system=0.0625)
        self._children = children

    def cpu_times(self) -> SimpleNamespace:
        """User and system seconds."""
        return self._times

    def children(self, *, recursive: bool) -> list[Process]:
        """Those below it, all of them when asked so."""
        below = [found for child in self._children for found in (child, *child.children(recursive=True))]
        return below if recursive else list(self._children)


def test_idle_cpu_counts_the_whole_process_tree() -> None:
    """S6: an engine in a child process is part of what idling costs, one that ended too."""
    tree = Process(1.0, Process(2.0, Process(4.0)))
    assert tree_cpu_s(cast("psutil.Process", tree)) == pytest.approx(8.3125)


SHARING = """
import mmap, os
shared = mmap.mmap(-1, 2**26)
shared.write(bytes(range(256)) * 2**18)
if os.fork() == 0:
    sum(shared[::4096])
os.close(1)
input()
"""


async def test_memory_is_that_of_the_whole_process_tree_after_each_piece_of_work() -> None:
    """S6: a page that a server and its engine share counts once: the tree is less than its resident sizes."""
    command = [sys.executable, "-c", SHARING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220
        assert parent.stdout is not None
        await asyncio.to_thread(parent.stdout.read)  # until both are there, and have touched what they share
        async with serving(StandIn()) as url:
            held = await held_after_work(Target("x", Client(url)), parent.pid, seed=1)
        child = psutil.Process(parent.pid).children()[0]
        assert 64 < tree_pss_mib(psutil.Process(parent.pid)) < 128
        assert child.memory_info().rss > 64 * 2**20
        assert held.keys() == {"single", "fanout"}
        assert 64 < held["fanout"] < 128
        child.kill()
        parent.kill()


def test_memory_is_judged_by_what_one_server_holds_beyond_the_other() -> None:
    """S6: each server's own, and the difference, which has the bar."""
    held = {"stoker": {"single": 650.0, "fanout": 700.0}, "peer": {"single": 530.0, "fanout": 600.0}}
    figures = {figure.key: figure for figure in memory_figures(held)}
    assert figures["memory_single_stoker"].value == 650
    assert figures["memory_single_more"].value == 120
    assert figures["memory_fanout_more"].limit == LIMIT_MIB
    assert not figures["memory_single_more"].is_good
    assert figures["memory_fanout_more"].is_good


async def test_a_process_that_does_nothing_idles_at_zero() -> None:
    """S6: no cost of measuring is charged to the server."""
    command = [sys.executable, "-c", "input()"]
    sleeper = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: ASYNC220 - nothing waits on its pipe
    with sleeper:
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)  # noqa: ASYNC222 - a stop is delivered at once
        assert await idle_cpu_percent(sleeper.pid, duration_s=0.01) == 0
        sleeper.kill()


def test_the_peer_is_built_with_the_same_flags_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9: the miscompiled extension is left out on x86, and only there."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "-mno-amx-tile" in build_environment()["CXXFLAGS"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "amx" not in build_environment()["CXXFLAGS"].replace(os.environ.get("CXXFLAGS", ""), "")
    assert build_percent("  [  7%] Building CXX object") == 7
    assert build_percent("Collecting cmake") is None


def test_own_time_is_the_turn_without_the_native_call() -> None:
    """Q9: only steps that decode all rows, followed by another such step, count."""
    steps = [Turn(num_tokens=8, began_s=0.1 * i, began_cpu_s=0.06 * i) for i in range(30)]
    for turn in steps:
        turn.ended_s, turn.ended_cpu_s = turn.began_s + 0.098, turn.began_cpu_s + 0.059
        turn.drawing_s = 0.0005
    overhead = summarise("greedy", 8, [Turn(200, -9.0, -9.0), *steps])
    assert overhead.num_steps == 29
    assert [overhead.own_median_ms, overhead.own_p95_ms] == pytest.approx([2.0, 2.0])
    assert [overhead.own_cpu_median_ms, overhead.drawing_median_ms] == pytest.approx([1.0, 0.5])
    with pytest.raises(BenchError, match="9 steps"):
        summarise("greedy", 8, steps[:10])


def test_own_time_is_judged_by_rows_and_way_of_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """O4: one row and eight, each way with a limit of its own."""
    names = ("own_median_ms", "own_p95_ms", "own_cpu_median_ms", "drawing_median_ms", "native_median_ms")
    asked: list[str] = []

    def measured(module: str, arguments: list[str]) -> list[dict[str, float | str]]:
        asked.extend([module, *arguments])
        ways = [(rows, way) for rows in (1, 8) for way in step_overhead.WAYS]
        return [dict.fromkeys(names, 0.5) | {"num_rows": rows, "way": way} for rows, way in ways]

    monkeypatch.setattr(session, "_measured", measured)
    contestants = session.Contestants(Path("m.gguf"), Path("server"), SHAPE)
    figures = {figure.key: figure for figure in session.measure_overhead(contestants)}
    assert " ".join(asked) == "step_overhead --model m.gguf --rows 1 8 --threads 2"
    assert len(figures) == 20
    judged = {key: figure.is_good for key, figure in figures.items() if figure.limit is not None}
    assert judged == {
        "own_time_1_greedy_median": False,
        "own_time_1_default_samplers_median": False,
        "own_time_8_greedy_median": False,
        "own_time_8_default_samplers_median": True,
    }
    assert figures["own_time_1_greedy_median"].title == "Python's own time per step, 1 row, greedy, median"


def test_the_time_before_a_launch_and_the_time_behind_it_are_apart() -> None:
    """B5: of steps that decode all rows and follow each other; prompts are not counted."""
    laps = [
        Lap(64, 64, 64, 1.0 * at, 0.5 * at, at + 0.4, 0.5 * at + 0.1, at + 0.9, 0.5 * at + 0.2)
        for at in range(30)
    ]
    found = summarise_laps("greedy", 64, [Lap(500, 64), *laps])
    assert found.num_steps == 29
    assert [found.before_launch_ms, found.after_launch_ms] == pytest.approx([100.0, 400.0])
    assert [found.before_launch_cpu_ms, found.after_launch_cpu_ms] == pytest.approx([300.0, 100.0])
    with pytest.raises(BenchError, match="0 steps had 32 rows"):
        summarise_laps("greedy", 32, laps)


def test_the_admission_of_a_crowd_is_taken_from_the_loop_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: every crowd goes through the queue and the slots of a real engine."""
    monkeypatch.setattr(registry, "BACKENDS", registry.BACKENDS)
    monkeypatch.setattr(step_overhead, "DEVICE_ROWS", (4,))
    admission = step_overhead.measure_admission(512, 0.0)
    assert (admission.num_rows, admission.num_crowds) == (4, step_overhead.NUM_CROWDS)
    assert admission.accept_ms > 0
    assert admission.admit_ms > 0


# ---------------------------------------------------------------- command line


async def test_two_running_servers_are_compared_from_the_command_line(tmp_path: Path) -> None:
    """I1: any OpenAI-compatible addresses, labels in the tables, files in the folder asked for."""
    pytest.importorskip("matplotlib")
    async with serving(StandIn()) as one, serving(StandIn()) as two:
        arguments = ["--url", one, "--label", "left", "--url", two, "--label", "right"]
        arguments += ["--only", "single", "--repeat", "2", "--out", str(tmp_path)]
        assert await asyncio.to_thread(main, arguments) == 0
    document = json.loads((tmp_path / "report.json").read_bytes())
    assert document["labels"] == ["left", "right"]
    assert len(document["workloads"][0]["metrics"][0]["ratios"]) == 2


def test_one_address_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """I1: a comparison takes two servers, and the message says so."""
    with pytest.raises(SystemExit):
        parse_arguments(["--url", "http://h", "--label", "x"])
    assert "two --url and two --label" in capsys.readouterr().err


def test_the_plan_follows_the_options() -> None:
    """I1: everything by default, else what was named; a seed a repetition."""
    everything = plan_of(parse_arguments([]))
    assert [w.name for w in everything.workloads] == list(WORKLOADS)
    assert everything.figures == {"overhead", "masks", "eta", "batch", "idle", "memory"}
    some = plan_of(parse_arguments(["--only", "idle", "--only", "prefill", "--seed", "9", "--repeat", "3"]))
    assert [w.name for w in some.workloads] == ["prefill"]
    assert some.figures == frozenset({"idle"})
    assert some.seeds == range(9, 12)
