"""The workloads in which something could be found again, and what they read, end and draw."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import cache_overhead, publication, session, status, target
from bench.cache_chart import rows_of
from bench.client import Client, Completion, Stream
from bench.errors import BenchError
from bench.peers import LlamaServer, Shape, StokerServer
from bench.prompts import random_prompt, shuffled
from bench.results import Comparison, Report, Series
from bench.session import Plan, compare_running
from bench.stages import Stage, hit_rate, medians, stage_of
from bench.target import Target
from bench.workloads import WORKLOADS, Better, Metric, agents, shared, turns
from bench_stand_in import StandIn, StandInProcess, serving

DEFAULT = Shape(num_slots=8, ctx_size=16384, num_threads=2)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in needs no time."""
    for module, name in (
        (shared, "HEAD_START_S"),
        (status, "LOOK_EVERY_S"),
        (target, "LOOK_EVERY_S"),
    ):
        monkeypatch.setattr(module, name, 0)


@dataclass
class Remembering(StandIn):
    """Counts a word as a token, and a prompt's longest known beginning as cached; tells it as Stoker does."""

    remembers: bool = True
    is_stoker: bool = True
    num_computed: int = 1000
    known: list[list[str]] = field(default_factory=list)

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        if head.startswith(b"GET /v1/runtime"):
            counters = {"prompt_tokens_computed_total": self.num_computed}
            return [json.dumps({"counters": counters if self.is_stoker else {}}).encode()]
        return super()._pieces(head, body)

    def _documents(self) -> list[dict[str, Any]]:
        words = self.bodies[-1]["prompt"].split()
        cached = max((_common(words, known) for known in self.known), default=0)
        if self.remembers:
            self.known.append(words)
        self.num_computed += len(words) - cached
        *others, last = super()._documents()
        usage = last["usage"] | {
            "prompt_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return [*others, {"choices": [], "usage": usage, "timings": {"prompt_n": len(words) - cached}}]


def _common(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def aim(url: str) -> Target:
    """A target without a process."""
    return Target("x", Client(url))


# ---------------------------------------------------------------- shared and taken over


def test_the_prefix_is_measured_by_as_many_other_words() -> None:
    """C4: another order of the same words is as long, and shares too little to be found."""
    prompt = random_prompt(200, "a")
    other = shuffled(prompt, "b")
    assert sorted(other.split()) == sorted(prompt.split())
    assert _common(other.split(), prompt.split()) < 8
    assert shuffled(prompt, "b") == other


async def test_a_prefix_computed_once_is_seen_as_computed_once() -> None:
    """C4: by the engine's counter, which is looked at before and after the crowd."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["shared"]().run(aim(url), seed=3)
    assert 0.99 < outcome.values["prefix_times"] <= 1.0
    assert 0.99 < outcome.values["prefix_computed"] <= 1.0
    assert outcome.values["hit_rate"] == pytest.approx(15 * 638 / (16 * 658), abs=0.005)
    assert [stage.name for stage in outcome.stages] == ["all at once"]
    assert len(stand_in.bodies) == 17
    assert len({body["prompt"] for body in stand_in.bodies}) == 17


@pytest.mark.parametrize("is_stoker", [True, False])
async def test_a_prefix_computed_for_each_is_seen_so(is_stoker: bool) -> None:
    """C4: by the counter where there is one, else by what the answers say of their own prompts."""
    async with serving(Remembering(remembers=False, is_stoker=is_stoker)) as url:
        outcome = await WORKLOADS["shared"]().run(aim(url), seed=3)
    assert outcome.values["prefix_times"] == 16
    assert outcome.values["hit_rate"] == 0


async def test_the_counter_is_believed_before_the_answers() -> None:
    """C4: work for a request that ended without an answer is in the counter alone."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        crowd = shared._Crowd(Client(url), "x")
        cold = await crowd.measure_prefix()
        before = await status.counter(Client(url), status.COMPUTED)
        streams = [await Client(url).complete(request) for request in crowd.requests[:2]]
        stand_in.num_computed += 319
        work = await crowd.work_of(streams, cold, before)
    assert work.prefix_times == pytest.approx(1.5, abs=0.01)


@dataclass
class Held(Remembering):
    """Does not go on with one prompt until all others were asked."""

    prompt: str = ""
    num_others: int = 0
    all_came: asyncio.Event = field(default_factory=asyncio.Event)

    async def pace(self, body: bytes, index: int) -> None:
        """At the first piece: the leader waits, the others are counted."""
        asked = json.loads(body) if body else {}
        if index or asked.get("max_tokens") != shared.NUM_TOKENS:
            return
        if asked["prompt"] == self.prompt:
            await self.all_came.wait()
        else:
            self.num_others += 1
            if self.num_others == shared.NUM_OTHERS:
                self.all_came.set()


async def test_the_first_leaves_and_the_others_are_answered() -> None:
    """C4: the leader is given up long before its first token; fifteen whole answers."""
    stand_in = Held(prompt=shared._Crowd(Client("http://h"), "takeover 3").requests[0].prompt)
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["takeover"]().run(aim(url), seed=3)
    assert outcome.values["left_early"] == 1
    assert outcome.values["complete"] == 15
    assert [trace.is_complete for trace in outcome.traces] == [False] + [True] * 15


# ---------------------------------------------------------------- turns


@dataclass
class Counting(Remembering):
    """Notes how many requests are open at once."""

    num_open: int = 0
    most_open: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One more while it is answered."""
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await super().answer(reader, writer)
        self.num_open -= 1


async def test_a_conversation_goes_on_from_what_was_said_when_all_others_had_a_turn() -> None:
    """C2: a later prompt is the earlier one, its answer and more; four turns are open at a time."""
    stand_in = Counting()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["turns"]().run(aim(url), seed=3)
    prompts = [body["prompt"] for body in stand_in.bodies]
    answer = "".join(f" t{index}" for index in range(turns.ANSWER_TOKENS))
    first = prompts[:12]
    assert len({prompt[:80] for prompt in first}) == 12
    for begun, grown in ((first, prompts[12:24]), (prompts[12:24], prompts[24:])):
        assert sorted(begun) == sorted(
            prompt for prompt in begun if any(g.startswith(f"{prompt}{answer}\n") for g in grown)
        )
    assert stand_in.most_open <= turns.NUM_AT_ONCE
    assert outcome.values["complete"] == 36
    assert outcome.values["hit_rate"] > 0.8
    assert [stage.name for stage in outcome.stages] == ["turn 1", "turn 2", "turn 3"]


@dataclass
class Forgetful(Remembering):
    """Cuts the answers of one conversation short from its second turn on."""

    seed: str = ""

    def _documents(self) -> list[dict[str, Any]]:
        prompt = self.bodies[-1]["prompt"]
        self.num_missing = int(prompt.startswith(random_prompt(20, self.seed)) and "\n" in prompt)
        return super()._documents()


async def test_a_turn_that_fails_is_counted_with_those_that_would_have_followed() -> None:
    """Q12: two of thirty-six are missing, and the run goes on."""
    stand_in = Forgetful(seed="turns_tight 3 5")
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["turns_tight"]().run(aim(url), seed=3)
    assert outcome.values["complete"] == 34
    assert len(stand_in.bodies) == 35


async def test_a_server_that_answers_no_turn_takes_the_limit() -> None:
    """L6: no answer is not a fast one."""
    async with serving(Remembering(num_missing=1)) as url:
        outcome = await WORKLOADS["turns_tight"]().run(aim(url), seed=3)
    assert outcome.values["complete"] == 0
    assert outcome.values["ttft_later_ms"] == outcome.values["ttft_first_ms"] == turns.TURN_LIMIT_S * 1e3
    assert outcome.stages == ()


def test_the_cells_for_two_conversations_do_not_hold_three() -> None:
    """C7: slots for four, so that cells are what is short."""
    shape = WORKLOADS["turns_tight"]().shape(DEFAULT)
    whole = turns.PROMPT_WORDS + turns.NUM_TURNS * turns.ANSWER_TOKENS
    whole += (turns.NUM_TURNS - 1) * turns.USER_WORDS
    assert shape.num_slots == 4
    assert 2 * whole < shape.ctx_size < 3 * whole
    assert WORKLOADS["turns"]().shape(DEFAULT).ctx_size > 12 * whole


# ---------------------------------------------------------------- agents


async def test_every_burst_has_the_tools_in_common_and_chats_come_between() -> None:
    """C2: six tasks, four chats that are like nothing else, six tasks."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await WORKLOADS["agents"]().run(aim(url), seed=3)
    tools = random_prompt(agents.TOOLS_WORDS, "agents 3")
    kinds = [body["prompt"].startswith(tools) for body in stand_in.bodies]
    assert kinds == ([True] * 6 + [False] * 4) * 3 + [True] * 6
    tails = {body["prompt"].removeprefix(tools) for body in stand_in.bodies}
    assert len(tails) == 36
    assert {20 <= len(t.split()) <= 40 for t in tails if not t.startswith("Notes")} == {True}
    assert outcome.values["hit_rate"] > 0.9
    assert outcome.stages[0].hit_rate < outcome.stages[1].hit_rate


# ---------------------------------------------------------------- restarts


async def test_a_prompt_is_asked_again_after_a_restart_and_after_a_kill() -> None:
    """C9: two prompts, each twice, the server ended between; warm before each second time."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        process = StandInProcess(url)
        subject = Target("x", process.client, process)
        outcome = await WORKLOADS["restart"]().run(subject, seed=3)
        assert subject.client is process.client
    assert process.deeds == ["restart", "kill", "start"]
    long = [body["prompt"] for body in stand_in.bodies if len(body["prompt"].split()) > 1000]
    assert long[0] == long[1] != long[2] == long[3]
    assert [len(body["prompt"].split()) for body in stand_in.bodies] == [1998, 101, 1998, 1998, 101, 1998]
    assert outcome.values["same_answers"] == 2
    assert [stage.name for stage in outcome.stages] == ["cold", "restarted", "killed"]
    assert [stage.hit_rate > 0.9 for stage in outcome.stages] == [False, True, True]


async def test_only_what_the_benchmark_started_is_ended() -> None:
    """L4: a server that somebody else runs is left alone, with a sentence that says so."""
    for end in (
        Target("theirs", Client("http://h")).restart,
        Target("theirs", Client("http://h")).lose_engine,
    ):
        with pytest.raises(BenchError, match="theirs was started by somebody else"):
            await end()


@dataclass
class Engined(StandIn):
    """Tells of an engine: a process while that lives, then one restart, then a successor."""

    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    states: list[str] = field(default_factory=lambda: ["restarting", "serving"])

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        if not head.startswith(b"GET /v1/runtime"):
            return super()._pieces(head, body)
        engine = {"pid": self.pid, "state": "serving"}
        if self.process is not None and self.process.poll() is not None:
            engine = {"pid": 999_999_999, "state": self.states.pop(0)}
        return [json.dumps({"engine": engine}).encode()]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process below this one that waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_an_engine_is_killed_and_its_successor_awaited(child: subprocess.Popen[bytes]) -> None:
    """L3: SIGKILL to the process the server names; the server itself stays; warm on return."""
    stand_in = Engined(process=child, pid=child.pid)
    async with serving(stand_in) as url:
        process = StandInProcess(url, os.getpid())
        await Target("x", process.client, process).lose_engine()
    assert child.returncode == -signal.SIGKILL
    assert stand_in.states == []
    assert process.deeds == []
    assert len(stand_in.bodies) == 1


async def test_a_process_that_is_not_the_servers_is_never_killed(child: subprocess.Popen[bytes]) -> None:
    """L3: a wrong number ends nobody."""
    async with serving(Engined(pid=os.getppid())) as url:
        process = StandInProcess(url, child.pid)
        with pytest.raises(BenchError, match="none of the server's own"):
            await Target("x", process.client, process).lose_engine()


async def test_an_engine_that_does_not_come_back_is_an_error(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: the wait has an end."""
    monkeypatch.setattr(target, "SUCCESSOR_LIMIT_S", 0.05)
    stand_in = Engined(process=child, pid=child.pid, states=["restarting"] * 10_000)
    async with serving(stand_in) as url:
        process = StandInProcess(url, os.getpid())
        with pytest.raises(BenchError, match="had no engine again"):
            await Target("x", process.client, process).lose_engine()


async def test_servers_of_others_are_not_asked_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a comparison of running servers leaves the workload out and says so."""
    chosen = (WORKLOADS["restart"](), WORKLOADS["single"]())
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    console = Console(record=True, quiet=False, width=130, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123, ASYNC230
    async with serving(StandIn()) as one, serving(StandIn()) as two:
        report = await compare_running(
            Plan(chosen, frozenset(), range(1, 2)), (one, two), ("a", "b"), console
        )
    console.file.close()
    assert [comparison.workload for comparison in report.comparisons] == ["single"]
    assert "restart is left out" in console.export_text()


# ---------------------------------------------------------------- what servers tell


@dataclass
class Telling(StandIn):
    """Gives one document after the other at /v1/runtime, the last for ever."""

    documents: list[Any] = field(default_factory=list)
    num_asked: int = 0

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        document = self.documents[min(self.num_asked, len(self.documents) - 1)]
        self.num_asked += 1
        return [json.dumps(document).encode()]


@pytest.mark.parametrize(
    ("documents", "value"),
    [
        ([{"counters": {"a_total": 7}}], 7),
        ([{"counters": {}}, {"counters": {"a_total": 7}}], 7),
        ([{"counters": {"b_total": 7}}], None),
        ([{"data": []}], None),
        ([[1, 2]], None),
    ],
)
async def test_a_counter_is_found_by_name_or_is_none(documents: list[Any], value: float | None) -> None:
    """O1: an engine in a long step is asked again; a server that counts otherwise is no error."""
    async with serving(Telling(documents=documents)) as url:
        assert await status.counter(Client(url), "a_total") == value


async def test_a_server_without_the_page_tells_nothing() -> None:
    """I4: an answer of 404 is read as nothing."""
    async with serving(StandIn(status=404)) as url:
        assert await status.counter(Client(url), "a_total") is None
        assert await status.engine_pid(Client(url)) is None
        await status.wait_saved(Client(url))


async def test_what_is_kept_counts_as_saved_when_several_looks_agree() -> None:
    """C9: an entry is made a moment after its answer; a single zero may come before it."""
    numbers = [0, 0, 2, 1, 0, 0, 0]
    stand_in = Telling(documents=[{"cache": {"disk": {"num_unsaved": n}}} for n in numbers])
    async with serving(stand_in) as url:
        await status.wait_saved(Client(url))
    assert stand_in.num_asked == len(numbers)


async def test_the_wait_for_saving_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: a disk that takes no files holds the run up for seconds, not for ever."""
    monkeypatch.setattr(status, "SAVED_LIMIT_S", 0.05)
    async with serving(Telling(documents=[{"cache": {"num_unsaved": 1}}])) as url:
        async with asyncio.timeout(30):
            await status.wait_saved(Client(url))


def test_what_a_server_keeps_lies_in_a_folder_of_its_own() -> None:
    """C9: one run does not find what another left."""
    command = StokerServer("m.gguf", Path("some/folder")).command(DEFAULT, 5)
    assert command[command.index("--cache-dir") + 1] == "some/folder"
    assert "--cache-dir" not in StokerServer("m.gguf").command(DEFAULT, 5)


async def test_every_pair_of_servers_begins_with_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C9: both shapes of one run have their own, there while the servers run and gone after."""
    folders: list[Path] = []

    class Started(StandInProcess):
        def __init__(self, server: StokerServer | LlamaServer, *_: object) -> None:
            super().__init__(address)
            if isinstance(server, StokerServer):
                assert server.cache_dir is not None
                assert list(server.cache_dir.iterdir()) == []
                folders.append(server.cache_dir)

        async def __aenter__(self) -> Started:
            return self

        async def __aexit__(self, *_: object) -> None:
            assert folders[-1].is_dir()

    monkeypatch.setattr(session, "ServerProcess", Started)
    monkeypatch.setattr(session, "binary_version", str)
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    chosen = (WORKLOADS["single"](), WORKLOADS["exhaustion"]())
    contestants = session.Contestants(tmp_path / "m.gguf", tmp_path / "server", DEFAULT)
    async with serving(StandIn()) as address:
        plan = Plan(chosen, frozenset(), range(1, 2))
        await session.compare_started(plan, contestants, Console(quiet=True))
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


# ---------------------------------------------------------------- stages and their picture


def answer(num_prompt: int, num_cached: int, ttft_s: float) -> Stream:
    """A whole answer."""
    return Stream(
        sent_s=1.0,
        token_times_s=(1.0 + ttft_s,),
        last_s=3.0,
        prompt_tokens=num_prompt,
        completion_tokens=1,
        cached_tokens=num_cached,
        text="",
    )


def test_a_hit_rate_is_of_tokens_not_of_requests() -> None:
    """O1: cached prompt tokens over all; a first token is the median."""
    stage = stage_of("all", [answer(100, 0, 0.5), answer(300, 300, 0.1), answer(100, 50, 0.2)])
    assert (stage.name, stage.hit_rate) == ("all", pytest.approx(0.7))
    assert stage.ttft_ms == pytest.approx(200)
    assert hit_rate([]) == 0


def test_what_was_computed_is_by_the_servers_timings_where_it_has_them() -> None:
    """C13: else prompt tokens less cached ones."""
    assert answer(100, 60, 0.1).computed_tokens == 40
    assert replace(answer(100, 60, 0.1), timed_tokens=41).computed_tokens == 41


async def test_the_timings_of_a_stream_are_read() -> None:
    """C13: `prompt_n` of the last chunk."""
    async with serving(Remembering()) as url:
        stream = await Client(url).complete(Completion(prompt="a b c", max_tokens=2))
    assert (stream.timed_tokens, stream.computed_tokens) == (3, 3)


def test_stages_of_repetitions_are_matched_by_name() -> None:
    """Q12: one in which nothing was answered is missing from its repetition only."""
    one, two = Stage("a", 0.0, 10.0), Stage("b", 0.5, 20.0)
    assert medians([[one, two], [Stage("a", 1.0, 30.0)]]) == (Stage("a", 0.5, 20.0), two)


def test_the_picture_has_a_row_a_stage_even_if_one_server_lacks_it() -> None:
    """Q12: matched by name, in the order of the workload."""
    one, two = Stage("a", 0.0, 10.0), Stage("b", 0.5, 20.0)
    speed = Series(Metric("s", "s", "s", Better.HIGHER), (1.0,), (1.0,))
    silent = Comparison("v", "v", (speed,))
    rows = rows_of((silent, Comparison("w", "w", (speed,), (), ((one, two), (two,)))))
    assert [(row.title, row.stages) for row in rows] == [("w\na", (one, None)), ("w\nb", (two, two))]


@pytest.mark.parametrize("slow_ms", [30.0, 3000.0])
def test_the_report_shows_hit_rates_and_first_tokens(tmp_path: Path, slow_ms: float) -> None:
    """O1: a picture beside the page, the numbers in the document; none where there is nothing to show."""
    pytest.importorskip("matplotlib")
    stages = ((Stage("a", 0.9, 12.0),), (Stage("a", 0.0, slow_ms),))
    speed = Series(Metric("s", "s", "s", Better.HIGHER), (1.0,), (1.0,))
    report = Report(("x", "y"), {}, {}, (Comparison("w", "w", (speed,), (), stages),), ())
    names = [path.name for path in publication.write(report, tmp_path)]
    assert names == ["report.md", "report.json", "report.png", "cache.png"]
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")
    assert "](cache.png)" in (tmp_path / "report.md").read_text()
    (workload,) = json.loads((tmp_path / "report.json").read_bytes())["workloads"]
    assert workload["stages"][1] == [{"name": "a", "hit_rate": 0.0, "ttft_ms": slow_ms}]
    plain = Report(("x", "y"), {}, {}, (Comparison("w", "w", (speed,)),), ())
    publication.write(plain, tmp_path)
    assert not (tmp_path / "cache.png").exists()
    assert "cache.png" not in (tmp_path / "report.md").read_text()


# ---------------------------------------------------------------- overhead


def test_a_lookup_is_timed_for_every_kind_and_finds_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: each shape of the tree with whole, half and no match, each with a limit; a lookup that misses fails."""
    figures = cache_overhead.measure_lookups(num_entries=40, num_lookups=20)
    assert len(figures) == len({figure.key for figure in figures}) == 12
    assert {figure.limit for figure in figures} == {1.0}
    with monkeypatch.context() as patched:
        patched.setattr(cache_overhead.RadixTree, "insert", lambda *_: None)
        with pytest.raises(BenchError, match="0 tokens were found where 2000 are stored"):
            cache_overhead.measure_lookups(num_entries=40, num_lookups=20)


async def test_the_crowd_without_anything_to_find_is_all_different() -> None:
    """C10: no prompt begins like another, and throughput is of every token."""
    stand_in = Remembering()
    async with serving(stand_in) as url:
        outcome = await cache_overhead.UniquePrompts().run(aim(url), seed=3)
    assert len({body["prompt"][:40] for body in stand_in.bodies}) == cache_overhead.NUM_REQUESTS
    assert outcome.values["tokens_per_s"] > 0


async def test_two_modes_of_one_server_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """C10: with the cache and without, each with a folder of its own."""
    started: list[tuple[str, Path | None]] = []

    class Started(StandInProcess):
        def __init__(self, server: StokerServer, _shape: Shape, _folder: Path, environment: dict[str, str]):
            super().__init__(address)
            started.append((environment["STOKER_CACHE_MODE"], server.cache_dir))

        async def __aenter__(self) -> Started:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(cache_overhead, "ServerProcess", Started)
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    async with serving(Remembering()) as address:
        comparison = await cache_overhead.compare_modes(Path("m.gguf"), DEFAULT, range(1, 3))
    assert [mode for mode, _ in started] == ["live+snapshot", "off"]
    assert len({folder for _, folder in started}) == 2
    assert len(comparison.series[0].ratios) == 2
