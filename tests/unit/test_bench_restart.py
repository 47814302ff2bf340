"""What the benchmark ends and starts anew, what it is told of that, and what must not survive it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import session, status, target
from bench.client import Client
from bench.ending import cancel_on_sigterm
from bench.errors import BenchError
from bench.peers import LlamaServer, Shape, StokerServer
from bench.session import Plan, compare_running
from bench.target import Target
from bench.workloads import WORKLOADS
from bench_stand_in import Remembering, StandIn, StandInProcess, serving

DEFAULT = Shape(num_slots=8, ctx_size=16384, num_threads=2)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in needs no time."""
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(target, "LOOK_EVERY_S", 0)


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


async def test_a_server_started_anew_is_asked_at_its_new_address() -> None:
    """I3: it may have picked another port; and it is warm on return."""
    stand_in = StandIn()
    async with serving(stand_in) as url:
        process = StandInProcess(url)
        subject = Target("x", Client("http://127.0.0.1:1"), process)
        await subject.restart()
        assert subject.client is process.client
    assert len(stand_in.bodies) == 1


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


async def test_a_process_that_is_not_the_servers_is_never_killed(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: a wrong number ends nobody."""
    monkeypatch.setattr(target, "SUCCESSOR_LIMIT_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:  # noqa: ASYNC220 - nothing waits on its pipe
        async with serving(Engined(pid=bystander.pid)) as url:
            process = StandInProcess(url, child.pid)
            with pytest.raises(BenchError, match="none of the server's own"):
                await Target("x", process.client, process).lose_engine()
        assert bystander.poll() is None
        bystander.kill()


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
    plan = Plan(chosen, frozenset(), range(1, 2))
    console = Console(record=True, width=130, file=io.StringIO())
    async with serving(StandIn()) as one, serving(StandIn()) as two:
        report = await compare_running(plan, (one, two), ("a", "b"), console)
    assert [comparison.workload for comparison in report.comparisons] == ["single"]
    assert "restart is left out" in console.export_text()


async def test_sigterm_ends_a_run_with_all_it_started() -> None:
    """L4: whoever stops the benchmark leaves no server behind."""
    ended: list[str] = []

    async def measure() -> None:
        cancel_on_sigterm()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("servers")

    task = asyncio.create_task(measure())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    assert ended == ["servers"]


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


async def test_an_engine_that_never_says_its_counters_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: it is asked for some seconds, not for ever."""
    monkeypatch.setattr(status, "ANSWER_LIMIT_S", 0.05)
    async with serving(Telling(documents=[{"counters": {}}])) as url:
        async with asyncio.timeout(30):
            assert await status.counter(Client(url), "a_total") is None


async def test_a_server_without_the_page_tells_nothing() -> None:
    """I4: an answer of 404 is read as nothing."""
    async with serving(StandIn(status=404)) as url:
        assert await status.counter(Client(url), "a_total") is None
        assert await status.engine_pid(Client(url)) is None
        await status.wait_saved(Client(url))


async def test_what_is_kept_counts_as_saved_when_several_looks_agree() -> None:
    """C9: an entry is made a moment after its answer; a single zero may come before it."""
    numbers = [0, 0, 2, 1, 0, 0, 0]
    stand_in = Telling(documents=[{"cache": {"disk": {"unsaved": n}}} for n in numbers])
    async with serving(stand_in) as url:
        await status.wait_saved(Client(url))
    assert stand_in.num_asked == len(numbers)


async def test_the_wait_for_saving_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: a disk that takes no files holds the run up for seconds, not for ever."""
    monkeypatch.setattr(status, "SAVED_LIMIT_S", 0.05)
    async with serving(Telling(documents=[{"cache": {"unsaved": 1}}])) as url:
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
    """C9: both shapes of one run have their own at each start, there while the servers run and gone after."""
    folders: list[Path] = []

    class Started(StandInProcess):
        def __init__(self, server: StokerServer | LlamaServer, *_: object) -> None:
            super().__init__(address)
            if isinstance(server, StokerServer):
                assert server.cache_dir is not None
                assert list(server.cache_dir.iterdir()) == []
                folders.append(server.cache_dir)

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            assert folders[-1].is_dir()

    monkeypatch.setattr(session, "ServerProcess", Started)
    monkeypatch.setattr(session, "binary_version", str)
    monkeypatch.setattr("bench.contest.SETTLE_S", 0)
    chosen = (WORKLOADS["single"](), WORKLOADS["exhaustion"]())
    contestants = session.Contestants(tmp_path / "m.gguf", tmp_path / "server", DEFAULT)
    async with serving(StandIn()) as address:
        plan = Plan(chosen, frozenset(), range(1, 4), num_starts=2)
        report = await session.compare_started(plan, contestants, Console(quiet=True))
    assert len(set(folders)) == len(folders) == 2 * 2
    assert [len(comparison.series[0].first) for comparison in report.comparisons] == [3, 3]
    assert report.settings["starts"].startswith("2 of both")
    assert not any(folder.exists() for folder in folders)
