"""Named keys of the settings file: classes, models, requests and tokens a minute, and who may operate."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from stoker.cli.app import app as commands
from stoker.errors import InvalidRequestError, RateLimitError
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import RequestStatus
from stoker.runtime import Runtime
from stoker.server.app import create_app, server_context
from stoker.server.inbound.named_keys import NamedKeys, Permit
from stoker.server.inbound.quotas import Quotas
from stoker.settings import ServerSettings, load_settings
from stoker.site_settings import KeySettings, hash_of

COMPLETE = "/v1/completions"
PEOPLE, JOBS, TINY, ADMIN = (
    {"Authorization": f"Bearer {key}"} for key in ("people", "jobs", "tiny", "admin")
)


def key_table(key, **may):
    """A key's table."""
    return {"hash": hash_of(key.encode()), **may}


KEYS = {
    "people": key_table("people", models=["chat"]),
    "jobs": key_table("jobs", classes=["background"], tokens_per_minute=600),
    "tiny": key_table("tiny", requests_per_minute=2),
    "admin": key_table("admin", admin=True),
}


@pytest.fixture
async def served():
    """A client of a server with those keys, two fake models, and its context."""
    models = ["fake:eog_period=0,id=chat", "fake:eog_period=0,id=other"]
    async with Runtime(models=models, isolation="thread", slots=4) as runtime:
        context = server_context(runtime, ServerSettings(allowed_hosts=("box",), keys=KEYS))
        transport = httpx.ASGITransport(create_app(context), client=("127.0.0.1", 4242))
        async with httpx.AsyncClient(transport=transport, base_url="http://box", timeout=60) as http:
            http.context = context
            yield http


def refused(answer, status, code):
    """The error of a refusal, which is of that status and code."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    return error


async def test_a_key_that_is_not_in_the_file_is_refused(served):
    """G1: with named keys each request needs one of them, also from this machine."""
    assert (await served.get("/v1/models")).status_code == 401
    assert (await served.get("/v1/models", headers={"X-Api-Key": "sha256:x"})).status_code == 401
    assert (await served.get("/v1/models", headers={"X-Api-Key": KEYS["jobs"]["hash"]})).status_code == 401
    assert (await served.get("/v1/models", headers={"X-Api-Key": "jobs"})).is_success
    assert (await served.get("/health")).is_success


async def test_a_background_key_runs_in_the_background_and_may_not_ask_for_more(served):
    """G2: by every way to ask; whoever asks for nothing gets the class that is allowed."""
    body = {"prompt": "x", "max_tokens": 2}
    seen = await served.post(COMPLETE, json=body, headers=JOBS)
    assert seen.json()["service_tier"] == "flex"
    wanted = {"X-Stoker-Priority": "interactive"}
    error = refused(await served.post(COMPLETE, json=body, headers=JOBS | wanted), 403, "key_forbids")
    assert error["details"] == {"classes": ["background"]}
    asked = body | {"priority": "interactive"}
    refused(await served.post(COMPLETE, json=asked, headers=JOBS), 403, "key_forbids")
    again = await served.post(COMPLETE, json=asked, headers=PEOPLE)
    assert again.json()["service_tier"] == "default"


async def test_a_key_reaches_its_models_only(served):
    """G3: requests for others are refused before anything is computed, and lists show its own."""
    listed = (await served.get("/v1/models", headers=PEOPLE)).json()["data"]
    assert [model["id"] for model in listed] == ["chat"]
    assert len((await served.get("/v1/models", headers=JOBS)).json()["data"]) == 2
    for path, body in (
        (COMPLETE, {"model": "other", "prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"model": "other", "content": "x"}),
    ):
        assert (
            refused(await served.post(path, json=body, headers=PEOPLE), 403, "key_forbids")["param"]
            == "model"
        )
    refused(await served.get("/v1/models/other", headers=PEOPLE), 403, "key_forbids")
    assert (await served.post(COMPLETE, json={"prompt": "x", "max_tokens": 1}, headers=PEOPLE)).is_success


async def test_tokens_of_a_minute_run_out_with_a_time_to_come_back(served):
    """G4: prompts and answers count; the next request is a 429 with `Retry-After`, other keys go on."""
    body = {"model": "chat", "prompt": "x", "max_tokens": 310, "ignore_eos": True}
    for _ in range(2):
        assert (await served.post(COMPLETE, json=body, headers=JOBS)).is_success
    answer = await served.post(COMPLETE, json=body, headers=JOBS)
    error = refused(answer, 429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error"
    assert (error["details"], int(answer.headers["Retry-After"]) > 0) == (
        {"limit": "tokens", "per_minute": 600},
        True,
    )
    assert (await served.post(COMPLETE, json=body, headers=PEOPLE)).is_success
    assert (await served.get("/v1/models", headers=JOBS)).is_success


async def test_requests_of_a_minute_run_out(served):
    """G4: calls of several requests count as one."""
    body = {"prompt": "x", "max_tokens": 1}
    for _ in range(2):
        assert (await served.post(COMPLETE, json=body, headers=TINY)).is_success
    assert refused(await served.post(COMPLETE, json=body, headers=TINY), 429, "rate_limit_exceeded")
    cancelled = await served.post("/v1/runtime/requests/none/cancel", headers=TINY)
    assert refused(cancelled, 404, "request_not_found"), "steering stays possible"


def test_a_key_may_name_its_models_by_any_of_their_names():
    """G3: its id, an alias, an adapter; however the request names the model."""
    info = ModelInfo.bare(ModelSpec(id="chat", path="chat.gguf"))
    info = msgspec.structs.replace(info, aliases=("gpt",), adapter="french")
    may = {
        name: Permit("k", models=frozenset({name})).may_use(info) for name in ("chat", "gpt", "french", "x")
    }
    assert may == {"chat": True, "gpt": True, "french": True, "x": False}


async def test_only_an_admins_key_operates(served):
    """G5: others get 403, from loopback too."""
    for path in ("/v1/runtime/models/pin", "/v1/runtime/models/unload"):
        assert (
            "admin = true"
            in refused(
                await served.post(path, json={"model": "other"}, headers=PEOPLE), 403, "operator_only"
            )["message"]
        )
        assert (await served.post(path, json={"model": "other"}, headers=ADMIN)).is_success


async def test_without_an_admin_nobody_operates():
    """G5: keys without an operator's among them turn the routes off, and say how they are turned on."""
    async with Runtime(model="fake:", isolation="thread") as runtime:
        settings = ServerSettings(allowed_hosts=("box",), keys={"jobs": KEYS["jobs"]})
        transport = httpx.ASGITransport(
            create_app(server_context(runtime, settings)), client=("127.0.0.1", 4242)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://box") as http:
            answer = await http.post("/v1/runtime/suspend", json={}, headers=JOBS)
            assert "no client may do it" in refused(answer, 403, "operator_only")["message"]


async def test_a_key_ends_its_own_requests_and_no_others(served):
    """G5: another key's request is a 404, and stays."""
    body = {"model": "chat", "prompt": "x", "max_tokens": 10**6, "ignore_eos": True, "context_shift": True}
    async with aclosing(served.context.runtime.events()) as events:
        await anext(events)  # the snapshot
        sent = served.post(COMPLETE, json=body, headers=PEOPLE | {"X-Request-Id": "mine"})
        running = asyncio.ensure_future(sent)
        async for event in events:
            if event.event == "request":
                break
    path = "/v1/runtime/requests/mine/cancel"
    assert (await served.post(path, headers=JOBS)).status_code == 404
    assert not running.done()
    assert (await served.post(path, headers=PEOPLE)).is_success
    assert (await running).json()["choices"][0]["finish_reason"] == "cancelled"


# ---------------------------------------------------------------- the arithmetic of a minute


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self):
        """Now."""
        return self.now


@pytest.fixture
def quota():
    """Quotas of one key of 600 tokens a minute, its digest and their clock."""
    keys = NamedKeys({"jobs": KeySettings(**KEYS["jobs"])})
    clock = Clock()
    return Quotas(keys, clock), keys.find(b"jobs").digest, clock


def ended(request_id, owner, num_tokens):
    """The end of a request that used so many."""
    return RequestStatus(
        request_id=request_id,
        owner=owner,
        model="m",
        priority="background",
        kind="completion",
        route="/",
        arrived_at=0.0,
        prompt_tokens=1,
        completion_tokens=num_tokens - 1,
    )


def test_many_at_once_are_not_more_than_one_after_the_other(quota):
    """G4: what a request may come to take is held until it ends, and what it did not take comes back."""
    quotas, owner, _ = quota
    asked = GenerateRequest(prompt=(1,), max_tokens=299)
    quotas.arrived("a", owner, asked, 1)
    quotas.arrived("b", owner, asked, 1)
    with pytest.raises(RateLimitError):
        quotas.arrived("c", owner, asked, 1)
    quotas.ended(ended("a", owner, 10))
    quotas.arrived("c", owner, asked, 1)
    quotas.arrived("other", "no-named-key", asked, 1)


def test_what_was_used_beyond_is_waited_for(quota):
    """G4: ten tokens flow in a second; the error says how long it takes, and after that it is true."""
    quotas, owner, clock = quota
    quotas.arrived("a", owner, GenerateRequest(prompt=(1,)), 1)
    quotas.ended(ended("a", owner, 700))
    with pytest.raises(RateLimitError) as caught:
        quotas.check(owner)
    assert caught.value.retry_after_s == pytest.approx(10.1)
    clock.now += 10.0
    with pytest.raises(RateLimitError):
        quotas.check(owner)
    clock.now += 0.2
    quotas.check(owner)
    clock.now += 10_000  # a minute's worth is the most that is there
    quotas.arrived("b", owner, GenerateRequest(prompt=(1,)), 1)
    quotas.ended(ended("b", owner, 600))
    with pytest.raises(RateLimitError):
        quotas.check(owner)


# ---------------------------------------------------------------- the file


def test_a_key_is_made_as_the_file_takes_it(tmp_path):
    """G1: the table goes to stdout, the key to stderr; the file has the hash alone."""
    made = CliRunner().invoke(commands, ["config", "key", "my phone"])
    file = tmp_path / "stoker.toml"
    file.write_text(made.stdout, encoding="utf-8")
    key = made.stderr.split()[-1]
    assert key not in made.stdout
    _, server = load_settings({}, file)
    assert NamedKeys(server.keys).find(key.encode()).permit.name == "my phone"
    made = json.loads(CliRunner().invoke(commands, ["config", "key", "a", "--json"]).stdout)
    assert hash_of(made["key"].encode()) == made["hash"]


@pytest.mark.parametrize(
    ("table", "place", "text"),
    [
        ("[keys.a]", "keys.a.hash", "no SHA-256 hash"),
        ("[keys.a]\nhash = 'secret'", "keys.a.hash", "stoker config key"),
        (f"[keys.a]\nhash = '{hash_of(b'a')}'\nclases = ['background']", "keys.a.clases", "mean classes"),
        (f"[keys.a]\nhash = '{hash_of(b'a')}'\nclasses = ['high']", "keys.a.classes", "interactive"),
        (f"[keys.a]\nhash = '{hash_of(b'a')}'\n[keys.b]\nhash = '{hash_of(b'a')}'", "keys.b.hash", "keys.a"),
        ("keys = 3", "keys", r"\[keys.NAME\]"),
    ],
)
def test_a_wrong_key_table_is_refused_with_its_place(tmp_path, table, place, text):
    """G1: the message has the key's name, what is wrong and the file."""
    file = tmp_path / "stoker.toml"
    file.write_text(table, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=text) as caught:
        load_settings({}, file)
    assert caught.value.param == place
    assert caught.value.message.startswith(f"{place} in {file}")
