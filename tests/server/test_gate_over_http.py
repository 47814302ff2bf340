"""A gate over real servers: every dialect, machines that go, tokens of another vocabulary."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from stoker.cli.top.frame import FrameState, frame
from stoker.cli.top.view import RuntimeView
from stoker.errors import AuthenticationError, StokerError
from stoker.gate.http_peer import HttpPeer
from stoker.gate.prompts import chain_of
from stoker.gate.runtime import GateRuntime
from stoker.ipc.codec import event_decoder
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.remote.wire import HANDOVER, HANDOVER_STATE
from stoker.runtime import Runtime
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from conftest import ServerThread

SLOW = "fake:eog_period=0,step_delay_s=0.01"
Start = Callable[..., "ServerThread"]
ASKED = {"prompt": "Once upon a time", "max_tokens": 60, "seed": 7, "temperature": 0.9}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 40, "temperature": 0}


def make_machine(model: str = SLOW) -> Runtime:
    """A machine of the site."""
    return Runtime(model=model, isolation="thread", slots=4, states_dir="no-such-folder")


@pytest.fixture
def machines(start_server: Start) -> list[ServerThread]:
    """Two that serve the same model."""
    found = [start_server(make_machine) for _ in range(2)]
    for machine in found:
        machine.ready.result(60)
    return found


@pytest.fixture
def gate(start_server: Start, machines: list[ServerThread], tmp_path: Path) -> ServerThread:
    """A gate before both."""
    urls = [machine.url for machine in machines]
    settings = EngineSettings(peers=urls, run_dir=tmp_path, states_dir=tmp_path / "states")
    found = start_server(lambda: GateRuntime(settings))
    found.ready.result(60)
    return found


def until(is_done: Callable[[], bool]) -> None:
    """Return as soon as it is."""
    for _ in range(6000):
        if is_done():
            return
        time.sleep(0.01)
    raise AssertionError("not reached")


def text_of(answer: httpx.Response) -> str:
    """Of a completion that came whole."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def lines_of(url: str, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Lines of a stream."""
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        yield from answer.iter_lines()


def owner_of(machines: list[ServerThread]) -> ServerThread:
    """The machine that runs the one request there is."""
    (found,) = [one for one in machines if one.call(one.runtime.with_client)]
    return found


def lose(machine: ServerThread) -> None:
    """End every connection of a machine at once, and take no other: as if it was killed."""

    def end() -> None:
        for listener in machine.service.server.servers:
            listener.close()
        for connection in list(machine.service.server.server_state.connections):
            connection.transport.abort()

    machine.call(end)


@pytest.mark.long
def test_every_dialect_answers_as_a_machine_does(gate: ServerThread, machines: list[ServerThread]) -> None:
    """P10: bodies and texts are those of one server."""
    with httpx.Client(base_url=gate.url, timeout=60) as http:
        direct = httpx.post(f"{machines[0].url}/v1/completions", json=ASKED, timeout=60)
        assert text_of(http.post("/v1/completions", json=ASKED)) == text_of(direct)
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["fake"]
        chat = http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
        claude = http.post("/v1/messages", json={**CHAT, "model": "fake"}).json()["content"][0]["text"]
        assert chat == claude
        ollama = {"model": "fake", "messages": CHAT["messages"], "stream": False}
        options = {"num_predict": 40, "temperature": 0}
        assert (
            http.post("/api/chat", json={**ollama, "options": options}).json()["message"]["content"] == chat
        )
        chosen = http.post("/v1/choose", json={"prompt": "It is", "choices": [" a", " b"]})
        assert [one["rank"] for one in chosen.json()["data"]] == [0, 1]
        assert http.post("/tokenize", json={"content": "hi"}).json()["tokens"]
        status = http.get("/v1/runtime").json()
        assert len(status["slots"]) == 8
        assert [(one["state"], one["num_slots"]) for one in status["machines"]] == [("up", 4)] * 2
        assert http.post("/v1/completions", json={**ASKED, "model": "none"}).status_code == 404


@pytest.mark.long
@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_a_stream_outlives_its_machine(gate: ServerThread, machines: list[ServerThread], how: str) -> None:
    """P7: no token twice or missing, one end, and the client sees a pause."""
    asked = {**ASKED, "max_tokens": 240}  # longer than it takes to be told of a stop
    whole = text_of(httpx.post(f"{machines[0].url}/v1/completions", json=asked, timeout=60))
    text, num_chunks, ends, pauses = "", 0, [], 0
    for line in lines_of(gate.url, "/v1/completions", asked):
        pauses += line.startswith(": parked")
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["text"]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        num_chunks += 1
        if num_chunks == 10:
            machine = owner_of(machines)
            if how == "lost":
                lose(machine)
            else:
                threading.Thread(target=machine.stop).start()
    assert text == whole
    assert ends == ["length"]
    assert pauses == 1


def test_a_machine_that_takes_tokens_replays_grammar_and_draw(machines: list[ServerThread]) -> None:
    """P7, P9: behind tokens it gives what the whole request had there; another vocabulary's it refuses."""
    request = GenerateRequest(prompt="Once", max_tokens=30, sampling=Sampling(seed=3), stop=("zzz",))
    whole = handed(machines[0], Submit(request_id="a", request=request))
    tokens = [token for event in whole if isinstance(event, Delta) for token in event.token_ids]
    given = Submit(
        request_id="b", request=request, generated=[tokens[:12]], is_finished=[False], mirostat_mu=[None]
    )
    rest = handed(machines[1], given)
    assert [t for event in rest if isinstance(event, Delta) for t in event.token_ids] == tokens[12:]
    assert isinstance(rest[-1], Finished)
    assert rest[-1].usage.completion_tokens == 30
    strange = msgspec.msgpack.encode(msgspec.structs.replace(given, vocabulary_sample="another"))
    refused = httpx.post(f"{machines[1].url}{HANDOVER}", content=strange, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "vocabulary_mismatch")


def handed(machine: ServerThread, submit: Submit) -> list[Any]:
    """The events of a request that is handed over."""
    body = msgspec.msgpack.encode(submit)
    answer = httpx.post(f"{machine.url}{HANDOVER}", content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [event for frame in event_decoder().feed(answer.content) for event in frame]


def test_the_moves_of_a_request_tell_where_it_goes_on(
    gate: ServerThread, machines: list[ServerThread]
) -> None:
    """P11: in which slot of which machine, after a loss as at first."""
    num_chunks, left = 0, machines[0]
    for line in lines_of(gate.url, "/v1/completions", ASKED):
        num_chunks += line.startswith("data: {")
        if num_chunks == 10:
            lost = owner_of(machines)
            left = next(one for one in machines if one is not lost)
            lose(lost)
            num_chunks += 1
    status = httpx.get(f"{gate.url}/v1/runtime", timeout=60).json()
    moves = status["recent"][-1]["moves"]
    states = [move["state"] for move in moves if move["state"] in {"prefill", "decode", "parked"}]
    assert states == ["prefill", "decode", "parked", "prefill", "decode"]
    found = [(move["slot"], move["reason"]) for move in moves if move["state"] == "prefill"]
    numbers = {one["name"]: one["slots"]["fake"] for one in status["machines"]}
    for machine, (slot, reason) in zip((lost, left), found, strict=True):
        name = f"127.0.0.1:{machine.port}"
        first, num_slots = numbers[name]
        assert first <= slot < first + num_slots
        assert reason.endswith(f"at {name}")


def test_only_operators_hand_requests_over(start_server: Start, tmp_path: Path) -> None:
    """P7: what was delivered before is a gate's word; a body that is none is a typed error."""
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    (tmp_path / "admin").write_text("boss\n")
    machine = start_server(make_machine, api_key_file=keys, admin_key_file=tmp_path / "admin")
    machine.ready.result(60)
    submit = msgspec.msgpack.encode(Submit(request_id="a", request=GenerateRequest(prompt="x", max_tokens=1)))

    def asked(key: str, body: bytes) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{machine.url}{HANDOVER}", content=body, headers=headers)
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

    assert asked("one", submit) == (403, "operator_only")
    assert asked("boss", submit) == (200, "")
    for broken in (b"{}", b"", b"\x91" * 5000, submit.replace(b"prompt", b"\xff" * 6), submit[:-1]):
        assert asked("boss", broken) == (400, "invalid_request")
    for key, status in (("one", 403), ("boss", 404)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{machine.url}{HANDOVER_STATE}/a", headers=headers).status_code == status
    headers = {"Authorization": "Bearer one"}
    assert httpx.post(f"{machine.url}{HANDOVER_STATE}", headers=headers, content=b"").status_code == 403
    young = msgspec.msgpack.encode(
        Submit(request_id="a", request=GenerateRequest(prompt="x"), age_s=float("nan"))
    )
    assert asked("boss", young) == (400, "invalid_request")


def test_top_shows_the_machines_and_what_moved(gate: ServerThread, machines: list[ServerThread]) -> None:
    """P11: a table in `stoker top`, from a snapshot; a server without machines has none."""
    num_chunks = 0
    for line in lines_of(gate.url, "/v1/completions", ASKED):
        num_chunks += line.startswith("data: {")
        if num_chunks == 10:
            lose(owner_of(machines))
            num_chunks += 1

    def frame_of(url: str) -> list[str]:
        view = RuntimeView()
        with httpx.stream("GET", f"{url}/v1/runtime/events", timeout=30) as answer:
            line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        view.take(json.loads(line.removeprefix("data: ")))
        return [text.plain for text in frame(view, FrameState(width=160, height=60, now=view.at))]

    left = next(
        one for one in machines if one.call(lambda one=one: one.service.server.servers[0].is_serving())
    )
    shown = frame_of(gate.url)
    at = next(number for number, line in enumerate(shown) if line.startswith("MACHINES"))
    rows = {line.split()[0]: line.split()[1:] for line in shown[at + 1 : at + 3]}
    lost = next(one for one in machines if one is not left)
    assert rows[f"127.0.0.1:{lost.port}"][0] == "down"
    assert rows[f"127.0.0.1:{left.port}"][0] == "up"
    assert not any(line.startswith("MACHINES") for line in frame_of(left.url))


@pytest.mark.long
def test_peers_of_a_file_are_taken_over_while_requests_run(
    gate: ServerThread, machines: list[ServerThread], tmp_path: Path
) -> None:
    """P10: one that is left out hands its request over, and a model that nobody has any more goes."""
    whole = text_of(httpx.post(f"{machines[0].url}/v1/completions", json=ASKED, timeout=60))
    text, has_changed = "", False
    for line in lines_of(gate.url, "/v1/completions", ASKED):
        if not line.startswith("data: {"):
            continue
        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        if not has_changed:
            has_changed = True
            left = next(one for one in machines if one is not owner_of(machines))
            settings = EngineSettings(peers=[left.url], run_dir=tmp_path)
            work = gate.runtime.take_settings(settings)
            asyncio.run_coroutine_threadsafe(work, gate._loop).result(10)
    assert text == whole
    assert len(httpx.get(f"{gate.url}/v1/runtime").json()["slots"]) == 4


def test_a_gate_that_no_machine_answers_says_so_and_serves_as_soon_as_one_does(
    start_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P10: every wait says what for: to callers, to operators, in the log; never to those without a key."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        name = f"127.0.0.1:{nobody.getsockname()[1]}"
        settings = EngineSettings(peers=[f"http://{name}"], run_dir=tmp_path, states_dir=tmp_path / "states")
        with caplog.at_level(logging.WARNING, "stoker.gate.site"):
            gate = start_server(lambda: GateRuntime(settings))
            until(lambda: "waiting until one does" in caplog.text)
        with httpx.Client(base_url=gate.url, timeout=60) as http:
            for answer in (http.post("/v1/chat/completions", json=CHAT), http.get("/v1/runtime")):
                assert answer.status_code == 503
                assert f"no machine serves yet ({name}: " in answer.json()["error"]["message"]
            assert name not in http.get("/ready").text
            machine = start_server(make_machine)
            work = gate.runtime.take_settings(settings.replace(peers=[machine.url]))
            asyncio.run_coroutine_threadsafe(work, gate._loop).result(10)
            gate.ready.result(60)
            assert text_of(http.post("/v1/completions", json=ASKED))


def test_a_link_goes_on_with_what_it_has_when_its_key_changes(start_server: Start, tmp_path: Path) -> None:
    """P10: a request under way ends well, and what is asked next has the other key."""
    admin = tmp_path / "admin"
    admin.write_text("boss\n")
    machine = start_server(make_machine, api_key_file=admin, admin_key_file=admin)
    machine.ready.result(60)
    request = GenerateRequest(prompt="x", model="fake", max_tokens=40)

    async def play() -> None:
        link, has_begun, ended = HttpPeer(machine.url, "boss"), asyncio.Event(), asyncio.Event()
        told: list[Any] = []
        ends: list[StokerError | None] = []

        def on_events(events: list[Any]) -> None:
            told.extend(events)
            has_begun.set()

        def on_end(error: StokerError | None) -> None:
            ends.append(error)
            ended.set()

        link.run(Submit(request_id="a", request=request), on_events, on_end)
        await has_begun.wait()
        for key in ("none", "boss"):
            other = HttpPeer(machine.url, key)
            link.take_key(other)
            await other.close()
            if key == "none":
                with pytest.raises(AuthenticationError):
                    await link.look()
        assert (await link.look()).overview.is_ready
        await asyncio.wait_for(ended.wait(), 60)
        assert ends == [None]
        assert sum(len(event.token_ids) for event in told if isinstance(event, Delta)) == 40
        again = asyncio.Event()
        link.run(Submit(request_id="b", request=request), told.extend, lambda _: again.set())
        await asyncio.wait_for(again.wait(), 60)
        assert isinstance(told[-1], Finished)
        await link.close()

    asyncio.run(play())


def test_a_machine_that_wants_another_key_is_told_of_until_its_file_has_one(
    start_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P8, P10: it gets nothing, and each who looks is told why; callers see nothing of it."""
    keys, admin, own = (tmp_path / name for name in ("keys", "admin", "own"))
    keys.write_text("one\n")
    admin.write_text("boss\n")
    own.write_text("one\n")
    closed = start_server(make_machine, api_key_file=keys, admin_key_file=admin)
    both = [start_server(make_machine), closed]
    for machine in both:
        machine.ready.result(60)
    urls = [machine.url for machine in both]
    settings = EngineSettings(peers=urls, peer_key_file=own, run_dir=tmp_path, states_dir=tmp_path / "s")
    with caplog.at_level(logging.INFO, "stoker.gate.site"):
        gate = start_server(lambda: GateRuntime(settings))
        gate.ready.result(60)

        def reasons() -> list[str]:
            return [one["reason"] for one in httpx.get(f"{gate.url}/v1/runtime").json()["machines"]]

        until(lambda: "an operator's key is needed" in reasons()[1])
        assert reasons()[0] == ""
        for _ in range(6):
            assert text_of(httpx.post(f"{gate.url}/v1/completions", json={**ASKED, "max_tokens": 2}))
        own.write_text("boss\n")
        work = gate.runtime.take_settings(settings)
        asyncio.run_coroutine_threadsafe(work, gate._loop).result(10)
        until(lambda: reasons() == ["", ""])


@pytest.mark.long
def test_a_gate_that_is_new_finds_the_machine_that_has_a_beginning(
    start_server: Start, machines: list[ServerThread], tmp_path: Path
) -> None:
    """P12: machines tell what gates gave them, so that a restarted one, or a second, need not remember."""
    prompts = [f"{number} {'upon a time there was ' * 16}" for number in range(6)]
    for number, prompt in enumerate(prompts):  # half of them lie elsewhere than their place on the ring
        asked = GenerateRequest(prompt=prompt, model="fake", max_tokens=2)
        submit = Submit(request_id=f"r{number}", request=asked, chain=chain_of(asked))
        url = f"{machines[number % 2].url}{HANDOVER}"
        assert httpx.post(url, content=msgspec.msgpack.encode(submit), timeout=60).status_code == 200
    settings = EngineSettings(peers=[one.url for one in machines], run_dir=tmp_path / "later")
    later = start_server(lambda: GateRuntime(settings))
    later.ready.result(60)
    for prompt in prompts:
        answer = httpx.post(f"{later.url}/v1/completions", json={**ASKED, "prompt": prompt}, timeout=60)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    (room,) = httpx.get(f"{machines[0].url}/v1/runtime/status", timeout=60).json()["engine"]["rooms"].values()
    assert 0 < room["free_cells"] <= room["num_cells"]
    assert room["prefill_tokens_per_s"] > 0
