"""Who may operate a server, and what others are shown of requests that are not theirs."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import HOLD, StandInRuntime
from typer.testing import CliRunner

from stoker.cli.app import app as commands
from stoker.client.event_bus import RuntimeEvent
from stoker.client.store.file import KeptRequest
from stoker.errors import AuthenticationError
from stoker.ipc.model import Reach
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import EngineStatus, ModelStatus
from stoker.runtime import Runtime
from stoker.server.app import create_app, server_context
from stoker.server.inbound.address import is_loopback
from stoker.server.inbound.security import Access, KeyRing
from stoker.settings import ServerSettings

START_S = 60.0
REQUESTS = "/v1/runtime/requests"
LOAD = "/v1/runtime/models/load"
ONE, TWO, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("key-one", "key-two", "key-admin"))
OPERATIONS = [
    (LOAD, {"model": "stand-in"}),
    ("/v1/runtime/models/unload", {"model": "stand-in"}),
    ("/v1/runtime/models/pin", {"model": "stand-in"}),
    ("/v1/runtime/suspend", {}),
    ("/v1/runtime/resume", {}),
]


@pytest.fixture
def key_files(tmp_path):
    """A file of two keys and one of an operator's."""
    keys, operators = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    operators.write_text("# who runs this\nkey-admin\n", encoding="utf-8")
    return {"api_key_file": keys, "admin_key_file": operators}


def asked_from(peer, **settings):
    """A client at that address of a server whose runtime notes what it is asked."""
    runtime = StandInRuntime(is_ready=True)
    app = create_app(server_context(runtime, ServerSettings(allowed_hosts=("box",), **settings)))
    transport = httpx.ASGITransport(app, client=(peer, 4242))
    return runtime, httpx.AsyncClient(transport=transport, base_url="http://box")


def refusal(answer):
    """Message of a refusal to who is no operator."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (403, "operator_only", "permission_error")
    return error["message"]


# ---------------------------------------------------------------- who it is


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_loopback_is_told_from_everything_else(peer):
    """S4: also an IPv4 address that is written as IPv6."""
    assert is_loopback(peer)
    for other in ("", "192.168.1.9", "::ffff:192.168.1.9", "fe80::1%eth0", "localhost", "127.0.0.1.evil"):
        assert not is_loopback(other)


@given(st.text(max_size=40))
def test_any_text_is_judged_as_an_address(text):
    """S4: a peer of an unknown form is not local."""
    assert isinstance(is_loopback(text), bool)


def test_an_operators_key_is_good_without_being_an_ordinary_one_too():
    """S4: and an ordinary one is not more than that; the digests tell them apart."""
    access = Access(KeyRing(["a"]), KeyRing(["o"]))
    operator, plain = access.identify(None, b"o", ""), access.identify(b"Bearer a", None, "127.0.0.1")
    assert (operator.refusal, bool(plain.refusal)) == ("", True)
    assert operator.key_digest != plain.key_digest
    for wrong in (None, b"x", b""):
        with pytest.raises(AuthenticationError):
            access.identify(None, wrong, "127.0.0.1")


def test_keys_are_in_no_representation():
    """S4: whoever logs them tells how many there are."""
    access = Access(KeyRing(["secret"]), KeyRing(["other-secret"]))
    assert "secret" not in repr(access)


# ---------------------------------------------------------------- what only operators do


@pytest.mark.parametrize(("path", "body"), OPERATIONS)
async def test_an_operators_key_is_needed_where_there_is_one(key_files, path, body):
    """S4, I4: a plain key is refused whatever its body, the runtime hears nothing; the operator's is good."""
    runtime, http = asked_from("127.0.0.1", **key_files)
    async with http:
        for given_body in (body, {"model": 5}, "nonsense"):
            refused = await http.post(path, json=given_body, headers=ONE)
            assert "--admin-key-file" in refusal(refused)
        assert (await http.post(path, json=body)).status_code == 401
        assert runtime.calls == []
        assert (await http.post(path, json=body, headers=ADMIN)).is_success
        assert len(runtime.calls) == 1


@pytest.mark.parametrize(("path", "body"), OPERATIONS)
async def test_with_keys_and_without_operators_nobody_operates(key_files, path, body):
    """S4: off, and the message names the flag that turns it on."""
    runtime, http = asked_from("127.0.0.1", api_key_file=key_files["api_key_file"])
    async with http:
        assert "--admin-key-file" in refusal(await http.post(path, json=body, headers=ONE))
        assert (await http.post(path, json=body, headers=ADMIN)).status_code == 401
    assert runtime.calls == []


@pytest.mark.parametrize(("path", "body"), OPERATIONS)
async def test_without_keys_programs_of_this_machine_operate_and_no_others(path, body):
    """S4: a server that is bound elsewhere refuses its other callers, who may use it all the same."""
    runtime, http = asked_from("127.0.0.1")
    async with http:
        assert (await http.post(path, json=body)).is_success
    assert len(runtime.calls) == 1
    runtime, http = asked_from("192.168.1.9")
    async with http:
        assert "--admin-key-file" in refusal(await http.post(path, json=body))
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).is_success
    assert runtime.calls == []


async def test_an_operators_file_alone_asks_ordinary_callers_for_nothing(key_files):
    """S4: and makes even local programs show the key."""
    runtime, http = asked_from("127.0.0.1", admin_key_file=key_files["admin_key_file"])
    async with http:
        assert (await http.get("/v1/models")).is_success
        assert (await http.get("/v1/models", headers={"Authorization": "Bearer sk-any"})).is_success
        refusal(await http.post("/v1/runtime/suspend", json={}))
        assert runtime.calls == []
        assert (await http.post("/v1/runtime/suspend", json={}, headers=ADMIN)).is_success


async def test_an_operators_key_is_good_for_ordinary_requests(key_files):
    """S4: one key is enough for who has it."""
    _, http = asked_from("127.0.0.1", **key_files)
    async with http:
        for path in ("/v1/models", "/metrics", "/v1/runtime", REQUESTS):
            assert (await http.get(path, headers=ADMIN)).is_success
        body = {"prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body, headers=ADMIN)).is_success


@pytest.mark.parametrize(
    ("settings", "key", "reach"),
    [({}, {}, Reach.LOCAL), ({"allow_downloads": True}, {}, Reach.HUB), ("with operators", ADMIN, Reach.HUB)],
)
async def test_what_a_load_may_lead_to(key_files, settings, key, reach):
    """S4, L7: downloads by name for an operator with a key, or where the setting lets local programs."""
    runtime, http = asked_from("127.0.0.1", **(key_files if settings == "with operators" else settings))
    async with http:
        assert (await http.post(LOAD, json={"model": "stand-in"}, headers=key)).is_success
    assert runtime.reaches == [reach]


# ---------------------------------------------------------------- what others see


@pytest.fixture
def keyed(start_server, key_files, tmp_path):
    """A server with one slot over an engine that works until it is told to stop, for three keys."""
    server = start_server(
        lambda: Runtime(
            "fake:eog_period=0,step_delay_s=0.01",
            isolation="thread",
            slots=1,
            cache_dir=tmp_path / "cache",
            run_dir=tmp_path / "run",
            drain_s=0.0,
        ),
        **key_files,
    )
    server.ready.result(START_S)
    return server


class Answers:
    """Answers that go on until this block is left, each under its key and `X-Request-Id`."""

    def __init__(self, http):
        self._http = http
        self._streams = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for stream in reversed(self._streams):
            await stream.__aexit__(None, None, None)

    async def begin(self, key, name):
        """One more; returns when it has a place in the line."""
        body = {"prompt": f"a prompt of {name}", "max_tokens": 4000, "stream": True}
        stream = self._http.stream(
            "POST", "/v1/completions", json=body, headers={**key, "X-Request-Id": name}
        )
        self._streams.append(stream)
        assert (await stream.__aenter__()).is_success


async def status_when(http, key, holds):
    """The status as that key sees it, as soon as it is so."""
    while True:
        status = (await http.get("/v1/runtime", headers=key)).json()
        if holds(status):
            return status
        await asyncio.sleep(0.01)


async def test_the_status_shows_a_key_its_own_requests_and_counts_of_the_others(keyed):
    """S4, I4: same form; others' ids, lengths and stories are withheld; an operator sees all."""
    async with httpx.AsyncClient(base_url=keyed.url, timeout=START_S) as http, Answers(http) as answers:
        await answers.begin(ONE, "runs")

        def is_running(status):
            return status["slots"][0]["num_tokens"] > 20

        await status_when(http, ADMIN, is_running)
        waiting = asyncio.create_task(answers.begin(TWO, "waits"))
        whole = await status_when(http, ADMIN, lambda status: status["queue"])
        of_one = await status_when(http, ONE, lambda status: status["queue"])
        of_two = await status_when(http, TWO, lambda status: status["queue"])
        for own in (whole["slots"][0], whole["queue"][0]):
            assert own["request_id"]
            assert own["story"]
        assert of_one["slots"][0]["request_id"] == whole["slots"][0]["request_id"]
        assert of_two["queue"][0]["request_id"] == whole["queue"][0]["request_id"]
        for foreign in (of_one["queue"][0], of_two["slots"][0]):
            assert (foreign["request_id"], foreign["num_tokens"], foreign["story"]) == (None, 0, [])
        assert (of_one["queue"][0]["position"], of_two["slots"][0]["state"]) == (0, "decode")
        for seen in (of_one, of_two):
            assert seen.keys() == whole.keys()
            assert [part.keys() for part in seen["slots"]] == [part.keys() for part in whole["slots"]]
        lists = [(await http.get(REQUESTS, headers=key)).json()["data"] for key in (ONE, TWO, ADMIN)]
        assert [[entry["names"][0] for entry in found] for found in lists] == [
            ["runs"],
            ["waits"],
            ["runs", "waits"],
        ]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.long
@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
async def test_another_keys_request_is_not_there_and_an_operator_reaches_it(keyed, action):
    """S4, Q17: 404, as of an id that nobody has, by each of its names; the answer goes on."""
    async with httpx.AsyncClient(base_url=keyed.url, timeout=START_S) as http, Answers(http) as answers:
        await answers.begin(ONE, "mine")
        (entry,) = (await http.get(REQUESTS, headers=ONE)).json()["data"]
        for name in (*entry["names"], entry["id"]):
            hidden = await http.post(f"{REQUESTS}/{name}/{action}", headers=TWO)
            unknown = await http.post(f"{REQUESTS}/{'x' * len(name)}/{action}", headers=TWO)
            assert hidden.status_code == unknown.status_code == 404
            assert hidden.text == unknown.text.replace("x" * len(name), name)
        assert (await http.get(REQUESTS, headers=ONE)).json()["data"][0]["id"] == entry["id"]
        reached = await http.post(f"{REQUESTS}/mine/{action}", headers=ADMIN)
        assert list(reached.json().values())[1] == [entry["id"]]


async def test_the_events_tell_a_key_of_its_own_requests_from_the_first_to_the_last(keyed):
    """S4, O3: of others nothing; an operator hears of all."""
    told = {}
    async with httpx.AsyncClient(base_url=keyed.url, timeout=START_S) as http:

        async def listen(name, key, ready):
            async with http.stream("GET", "/v1/runtime/events", headers=key) as answer:
                found = told[name] = []
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        ready.set()
                        found.append(json.loads(line.removeprefix("data: ")))
                        ends = [each for each in found if each.get("what") == "finished"]
                        if len(ends) == (2 if name == "admin" else 1):
                            return

        listeners = []
        for name, key in (("one", ONE), ("two", TWO), ("admin", ADMIN)):
            ready = asyncio.Event()
            listeners.append(asyncio.create_task(listen(name, key, ready)))
            await ready.wait()
        ids = {}
        for name, key in (("one", ONE), ("two", TWO)):
            body = {"prompt": "x", "max_tokens": 2}
            ids[name] = (await http.post("/v1/completions", json=body, headers=key)).json()["id"]
        await asyncio.wait_for(asyncio.gather(*listeners), START_S)
    seen = {name: {e["request_id"] for e in found if e["event"] == "request"} for name, found in told.items()}
    assert seen == {"one": {ids["one"]}, "two": {ids["two"]}, "admin": set(ids.values())}
    whats = [[e["what"] for e in told[name] if e["event"] == "request"] for name in ("one", "two")]
    assert all(each[0] == "arrived" and each[-1] == "finished" for each in whats)


async def test_callers_without_keys_from_elsewhere_see_nobodys_requests():
    """S4: without keys nobody can tell whose they are; who knows an id may end it."""
    runtime, http = asked_from("192.168.1.9")
    runtime.live["cmpl-1"] = GenerateRequest(prompt="x")
    runtime.kept_requests.append(KeptRequest(id="kept-1", names=["mine"], model="m"))
    async with http:
        assert (await http.get(REQUESTS)).json()["data"] == []
        (slot,) = (await http.get("/v1/runtime")).json()["slots"]
        assert slot["request_id"] is None
        assert (await http.post(f"{REQUESTS}/mine/cancel")).json()["cancelled"] == ["kept-1"]
    runtime, http = asked_from("127.0.0.1")
    runtime.kept_requests.append(KeptRequest(id="kept-1", model="m"))
    async with http:
        assert [found["id"] for found in (await http.get(REQUESTS)).json()["data"]] == ["kept-1"]


async def test_reasons_and_errors_of_models_are_for_operators(key_files):
    """S4: they may name files; that a model failed is told to all."""
    runtime, http = asked_from("127.0.0.1", **key_files)
    path = "/home/someone/secret.gguf"
    failed = ModelStatus(id="stand-in", state="failed", reason=f"{path} is no GGUF")
    runtime.engine = EngineStatus(
        slots=[], queue=[], parked=[], counters={}, kv_cells_total=1, kv_cells_used=0, models=[failed]
    )
    error = {"code": "model_file_invalid", "message": f"{path} is no GGUF"}
    fields = {"model": "stand-in", "state": "failed", "reason": path, "error": error}
    runtime.told = [RuntimeEvent(event="model", at=1.0, fields=fields)]
    runtime.release()
    async with http:
        for where in ("/v1/runtime", "/v1/runtime/events"):
            plain = await http.get(where, headers=ONE)
            assert path not in plain.text
            assert '"failed"' in plain.text
            assert path in (await http.get(where, headers=ADMIN)).text


def test_a_request_kept_without_a_key_is_no_keys(key_files, start_server):
    """S4, L2: a server that asks for keys since its restart hands it to operators only."""
    server = start_server(**key_files)
    server.ready.result(START_S)
    kept = KeptRequest(id="a", names=["mine"], model="m")
    server.call(lambda: server.runtime.kept_requests.append(kept))
    server.call(lambda: server.runtime.kept_scripts.update({"a": [HOLD]}))
    server.call(server.runtime.release)
    with httpx.Client(base_url=server.url) as http:
        assert http.get(f"{REQUESTS}/mine/stream", headers=ONE).status_code == 404
        assert http.get(REQUESTS, headers=ONE).json()["data"] == []
        with http.stream("GET", f"{REQUESTS}/mine/stream", headers=ADMIN) as answer:
            assert answer.status_code == 200


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "command", [["load", "stand-in"], ["unload", "stand-in"], ["pin", "stand-in"], ["suspend"], ["resume"]]
)
def test_commands_say_that_an_operators_key_is_needed(key_files, start_server, monkeypatch, command):
    """S4, I1: one line that names the server's flag and the command's; with the key they work."""
    server = start_server(**key_files)
    server.ready.result(START_S)
    monkeypatch.setenv("STOKER_URL", server.url)
    monkeypatch.setenv("STOKER_API_KEY", "key-one")
    refused = CliRunner().invoke(commands, command)
    assert refused.exit_code == 2
    for word in ("operator", "--admin-key-file", "--api-key"):
        assert word in refused.output
    assert "key-one" not in refused.output
    assert CliRunner().invoke(commands, ["ps"]).exit_code == 0
    assert CliRunner().invoke(commands, [*command, "--api-key", "key-admin"]).exit_code == 0
