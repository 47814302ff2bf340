"""States of requests that leave a machine in order: over real servers, behind a gate."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from stoker.gate import carrier
from stoker.gate.runtime import GateRuntime
from stoker.ipc.codec import event_decoder
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.remote.wire import HANDOVER, HANDOVER_STATE, HEAD_BYTES, STATE_TOKENS
from stoker.runtime import Runtime
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from conftest import ServerThread

SLOW = "fake:eog_period=0,step_delay_s=0.01,token_delay_s=0.0002"
NUM_STREAMS = 12
Start = Callable[..., "ServerThread"]


def make(folder: Path, model: str | None = SLOW, **fields: Any) -> Callable[[], Runtime]:
    """Makes a machine with files of its own."""
    own = {"states_dir": folder / "states", "run_dir": folder / "run", "cache_dir": folder / "cache"}
    fields = {"isolation": "thread", "slots": NUM_STREAMS, "kv_cells": 16384, **own, **fields}
    return lambda: Runtime(model=model, **fields)


@pytest.fixture
def machines(start_server: Start, tmp_path: Path) -> list[ServerThread]:
    """Two that serve the same model."""
    found = [start_server(make(tmp_path / name)) for name in "ab"]
    for machine in found:
        machine.ready.result(60)
    return found


@pytest.fixture
def gate(start_server: Start, machines: list[ServerThread], tmp_path: Path) -> ServerThread:
    """A gate before both."""
    settings = EngineSettings(peers=[machine.url for machine in machines], run_dir=tmp_path)
    found = start_server(lambda: GateRuntime(settings))
    found.ready.result(60)
    return found


def body_of(number: int) -> dict[str, Any]:
    """A long prompt of its own, drawn."""
    prompt = f"{number} {'upon a time there was ' * 8}"
    return {"prompt": prompt, "max_tokens": 90, "seed": number, "temperature": 0.8}


def counted(url: str, name: str) -> float:
    """A metric of a server."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"stoker:{name} ")))


class Streams:
    """Clients of the gate, a thread each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun = threading.Semaphore(0)

    def run(self, trouble: Callable[[], None]) -> list[tuple[str, list[str]]]:
        """Text and ends of each; `trouble` is made when all have begun."""
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            asked = [pool.submit(self._one, number) for number in range(NUM_STREAMS)]
            for _ in asked:
                assert self._begun.acquire(timeout=60)
            trouble()
            return [each.result(60) for each in asked]

    def _one(self, number: int) -> tuple[str, list[str]]:
        text, ends, num_chunks = "", [], 0
        body = {**body_of(number), "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                num_chunks += 1
                if num_chunks == 3:
                    self._begun.release()
        return text, ends


def undisturbed(machine: ServerThread) -> list[tuple[str, list[str]]]:
    """Text and end of each request, of one machine that keeps nothing of them."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        bodies = [{**body_of(number), "cache": False} for number in range(NUM_STREAMS)]
        url = f"{machine.url}/v1/completions"
        answers = pool.map(lambda body: httpx.post(url, json=body, timeout=60).json()["choices"][0], bodies)
        return [(answer["text"], [answer["finish_reason"]]) for answer in answers]


def stop_one(gate: ServerThread, machines: list[ServerThread]) -> None:
    """Stop the machine that has the more requests; the gate is told as soon as it drains."""
    machine = max(machines, key=lambda one: len(one.call(one.runtime.with_client)))
    threading.Thread(target=machine.stop).start()
    while httpx.get(f"{machine.url}/v1/runtime/overview", timeout=60).json()["is_ready"]:
        pass
    gate.call(lambda: gate.runtime._site.look_soon(machine.url.removeprefix("http://")))


def check_moved(gate: ServerThread, machines: list[ServerThread]) -> None:
    """Twelve streams end as undisturbed, with a machine stopped under them that gives its states out."""
    calm = undisturbed(machines[1])
    assert Streams(gate.url).run(lambda: stop_one(gate, machines)) == calm
    num_states = counted(gate.url, "states_moved_total")
    assert 0 < num_states <= counted(gate.url, "requests_moved_total")
    assert counted(gate.url, "states_moved_bytes_total") > 100 * num_states


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are moved however small the model and however busy the machine."""
    monkeypatch.setattr(carrier, "move_limit_s", lambda num_tokens, tokens_per_s: 30.0)
    monkeypatch.setattr(carrier, "is_move_quicker", lambda *figures: True)


@pytest.mark.long
@pytest.mark.usefixtures("patient")
def test_a_machine_that_is_stopped_hands_its_requests_over_with_their_states(
    gate: ServerThread, machines: list[ServerThread]
) -> None:
    """P13: of twelve streams no token is lost or doubled, and each has one end."""
    check_moved(gate, machines)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_states_of_a_real_model_move_between_engines_of_their_own(
    start_server: Start, tmp_path: Path
) -> None:
    """P13: stories260K in two processes, repeatable: texts are equal to the letter."""
    fields = {"isolation": "process", "repeatable": "on", "threads": 1}
    machines = [start_server(make(tmp_path / name, None, **fields)) for name in "ab"]
    for machine in machines:
        machine.ready.result(60)
    settings = EngineSettings(peers=[machine.url for machine in machines], run_dir=tmp_path)
    gate = start_server(lambda: GateRuntime(settings))
    gate.ready.result(60)
    check_moved(gate, machines)
    left = max(machines, key=lambda one: one.service.context.is_stopping is False)
    asked = httpx.post(f"{left.url}/tokenize", json={"content": body_of(0)["prompt"]}, timeout=60)
    num_prompt, num_states = len(asked.json()["tokens"]), counted(gate.url, "states_moved_total")
    assert counted(left.url, "prefix_cache_hits_total") >= (num_prompt - 2) * num_states


def state_of(machine: ServerThread, submit: Submit) -> httpx.Response:
    """What is computed of a request, while it runs there."""
    with httpx.stream(
        "POST", f"{machine.url}{HANDOVER}", content=msgspec.msgpack.encode(submit), timeout=60
    ) as answer:
        decoder = event_decoder()
        for part in answer.iter_raw():
            if any(isinstance(event, Delta) for frame in decoder.feed(part) for event in frame):
                return httpx.get(f"{machine.url}{HANDOVER_STATE}/{submit.request_id}", timeout=60)
    raise AssertionError("it ended before its first token")


def give(machine: ServerThread, request: GenerateRequest, state: bytes) -> httpx.Response:
    """Have a machine take a state."""
    head = msgspec.msgpack.encode(msgspec.structs.replace(request, prompt=""))
    body = len(head).to_bytes(HEAD_BYTES, "little") + head + state
    return httpx.post(f"{machine.url}{HANDOVER_STATE}", content=body, timeout=60)


def cached(machine: ServerThread, request: GenerateRequest) -> int:
    """Tokens of its prompt that a machine need not compute."""
    body = msgspec.msgpack.encode(Submit(request_id=f"at-{request.cache_salt}", request=request))
    answer = httpx.post(f"{machine.url}{HANDOVER}", content=body, timeout=60)
    (end,) = [
        event
        for frame in event_decoder().feed(answer.content)
        for event in frame
        if isinstance(event, Finished)
    ]
    return end.usage.cached_tokens


def code_of(answer: httpx.Response) -> str:
    """Of an error."""
    return str(answer.json()["error"]["code"])


@pytest.mark.long
def test_a_state_is_taken_for_its_own_request_alone_and_only_whole(
    machines: list[ServerThread], start_server: Start, tmp_path: Path
) -> None:
    """P13: cut or changed bytes, another model and another key get nothing of it; none is left behind."""
    asked = GenerateRequest(
        prompt=body_of(1)["prompt"],
        model="fake",
        max_tokens=200,
        sampling=Sampling(seed=1),
        cache_salt="mine",
    )
    found = state_of(machines[0], Submit(request_id="r", request=asked))
    assert found.status_code == 200, found.text
    state, num_tokens = found.content, int(found.headers[STATE_TOKENS])
    assert num_tokens > 150
    changed = bytearray(state)
    changed[-1] ^= 1
    for bad in (state[:-1], state[:40], b"", bytes(changed)):
        assert code_of(give(machines[1], asked, bad)) == "cache_file"
    assert code_of(httpx.post(f"{machines[1].url}{HANDOVER_STATE}", content=b"abc", timeout=60)) == (
        "invalid_request"
    )
    assert give(machines[1], asked, state).json() == {"num_tokens": num_tokens}
    assert give(machines[1], asked, state).json() == {"num_tokens": num_tokens}
    short = msgspec.structs.replace(asked, max_tokens=2)
    assert cached(machines[1], msgspec.structs.replace(short, cache_salt="another's")) == 0
    assert cached(machines[1], short) > 150
    nobody = httpx.get(f"{machines[0].url}{HANDOVER_STATE}/nobody", timeout=60)
    assert (nobody.status_code, code_of(nobody)) == (404, "state_not_found")
    for name in "ab":
        assert not list((tmp_path / name / "cache").glob("moving/*"))
    other = start_server(make(tmp_path / "c", "fake:recurrent=1"))
    other.ready.result(60)
    assert code_of(give(other, asked, state)) == "cache_file"
    small = start_server(make(tmp_path / "d", SLOW, cache_ram_bytes=1000))
    small.ready.result(60)
    assert give(small, asked, state).status_code == 413
