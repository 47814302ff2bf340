"""A server as a process that sleeps and wakes: by signals, with its machine, and over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from logind_stand_in import DAEMON, LogindStandIn, PrivateBus

PROGRAM = """
import sys
from pathlib import Path
from stoker.server.serve import run_server
from stoker.settings import EngineSettings, ServerSettings
folder = Path(sys.argv[1])
folders = dict(cache_dir=folder / "cache", run_dir=folder / "run", states_dir=folder / "states")
engine = EngineSettings(models=("fake:eog_period=0,step_delay_s=0.02",), drain_s=0.2, **folders)
sys.exit(run_server(engine, ServerSettings(port=0, keepalive_s=0.2)))
"""
BODY = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 1.0, "seed": 7}
TIMEOUT_S = 60


class Process:
    """One server process with its folders."""

    def __init__(self, folder, bus_address):
        environment = os.environ | {"DBUS_SYSTEM_BUS_ADDRESS": bus_address}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
        )
        line = json.loads(self._process.stdout.readline())
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{line['port']}", timeout=TIMEOUT_S)

    def send(self, number):
        """A signal."""
        self._process.send_signal(number)

    def state(self):
        """Of the engine."""
        return self.http.get("/v1/runtime").json()["engine"]["state"]

    def end(self):
        """Stop in order, its clients still connected. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(TIMEOUT_S)
        self._process.stdout.close()
        self.http.close()


@pytest.fixture
def start(tmp_path):
    """Start processes that share folders and end with the test."""
    started = []

    def starts(bus_address="unix:path=/nowhere"):
        started.append(Process(tmp_path, bus_address))
        return started[-1]

    yield starts
    for process in started:
        process.end()


@contextlib.contextmanager
def streaming(process, **headers):
    """An open stream of BODY, past its first text; gives the lines that follow."""
    with process.http.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True}, headers=headers
    ) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        yield first, lines


def text_of(*lines):
    """The whole text of a stream that came to its end."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(chunk) for chunk in data]
    assert not any("error" in chunk for chunk in chunks)
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def undisturbed(process):
    """The text that nobody interrupted."""
    return process.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]


@pytest.mark.long
def test_signals_suspend_and_resume_and_no_stream_notices(start, until):
    """SPEC L2: SIGUSR1 and SIGUSR2; comments go on, who comes meanwhile waits, everybody gets their text."""
    process = start()
    expected = undisturbed(process)
    with streaming(process) as (first, lines):
        process.send(signal.SIGUSR1)
        until(lambda: process.state() == "suspended")
        assert process.http.get("/ready").json() == {"status": "suspended"}
        assert [m["state"] for m in process.http.get("/v1/runtime").json()["models"]] == ["suspended"]
        assert process.http.get("/v1/models").json()["data"]
        assert process.http.get("/metrics").is_success
        assert process.state() == "suspended"  # asking has woken nothing
        process.send(signal.SIGUSR2)
        assert text_of(first, *lines) == expected
    assert process.state() == "serving"
    assert undisturbed(process) == expected


@pytest.mark.long
@pytest.mark.skipif(not DAEMON, reason="needs dbus-daemon")
async def test_a_machine_that_sleeps_takes_the_server_with_it(start, until, tmp_path):
    """SPEC L2: logind tells; the lock goes when the memory is free; at waking the streams go on."""
    bus = PrivateBus(tmp_path)
    try:
        async with LogindStandIn(bus.address) as logind:
            process = await asyncio.to_thread(start, bus.address)
            await logind.has_been_asked(1)
            logind.tell(is_asleep=True)
            await asyncio.to_thread(until, lambda: not logind.is_held(0))
            assert await asyncio.to_thread(process.state) == "suspended"
            logind.tell(is_asleep=False)
            await logind.has_been_asked(2)
            assert await asyncio.to_thread(undisturbed, process)
            await asyncio.to_thread(process.end)
            assert not logind.is_held(1)
    finally:
        bus.stop()


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("header", marks=pytest.mark.slow), "answer"])
def test_a_request_outlives_a_server_that_was_suspended(start, until, name):
    """SPEC L2: the next server runs it on; its client comes back by either id and has the whole text."""
    process = start()
    expected = undisturbed(process)
    with streaming(process, **{"X-Request-Id": "mine"}) as (first, _):
        answer_id = json.loads(first.removeprefix("data: "))["id"]
        assert process.http.post("/v1/runtime/suspend").json() == {"suspended": True}
        process.end()
    again = start()
    known = "mine" if name == "header" else answer_id
    (kept,) = again.http.get("/v1/runtime/requests").json()["data"]
    assert (kept["id"], kept["names"], kept["is_kept"]) == (answer_id, ["mine", answer_id], True)
    with again.http.stream("GET", f"/v1/runtime/requests/{known}/stream") as answer:
        lines = list(answer.iter_lines())
    assert text_of(*lines) == expected
    assert {json.loads(line[6:])["id"] for line in lines if line.startswith("data: {")} == {answer_id}
    gone = again.http.get("/v1/runtime/requests/nobody/stream")
    assert gone.json()["error"]["code"] == "request_not_found"
