"""Tables of models in the settings file: what each gets, and what changes when the file is read again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from stoker.client.models.specs import ModelSource
from stoker.errors import InvalidRequestError, ModelNotFoundError, StokerError
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.remote.bodies import request_body
from stoker.runtime import Runtime
from stoker.server.app import create_app, server_context
from stoker.settings import EngineSettings, ServerSettings, load_settings
from stoker.site_settings import hash_of

FAKE = "fake:eog_period=0"
SLOW = f"{FAKE},step_delay_s=0.005"
NUM_STREAMS = 20


def settings_of(tables, **fields):
    """Settings with those tables, of an engine in this process."""
    return EngineSettings(model_tables=tables, isolation="thread", **fields)


def states(runtime):
    """State of each model, in their order."""
    return {model.id: model.state for model in runtime.model_states()}


async def test_each_model_has_what_its_table_says_and_else_what_holds_for_all():
    """G6: and is loaded at the start where the table says so; the first one is the default."""
    tables = {
        "chat": {"file": FAKE, "slots": 2, "load": True, "aliases": ["gpt-4o"]},
        "jobs": {"file": FAKE, "priority": "background", "ctx-size": 512},
    }
    async with Runtime(settings=settings_of(tables, slots=5, ctx_size=2048)) as runtime:
        chat, jobs = runtime.models
        assert (chat.num_slots, chat.n_ctx, jobs.num_slots, jobs.n_ctx) == (2, 2048, 5, 512)
        assert states(runtime) == {"chat": "ready", "jobs": "absent"}
        assert runtime.resolve("gpt-4o").id == runtime.resolve("default").id == "chat"
        ended = []
        runtime.on_ended = ended.append
        async for _ in runtime.stream(GenerateRequest(prompt="x", model="jobs", max_tokens=1)):
            pass
        assert (states(runtime)["jobs"], ended[0].priority) == ("ready", "background")


async def test_a_request_over_http_gets_the_models_sampling_where_it_does_not_say():
    """G6: also a value that is the library's default beats the model's."""
    tables = {"chat": {"file": FAKE, "aliases": ["c"], "sampling": {"temperature": 0.0, "top_k": 7}}}
    async with Runtime(settings=settings_of(tables)) as runtime:
        seen = []
        app = create_app(server_context(runtime, ServerSettings(allowed_hosts=("box",))))
        runtime.on_arrival = lambda request_id, owner, request, num: seen.append(request.sampling)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://box") as http:
            body = {"model": "chat", "prompt": "x", "max_tokens": 1}
            for given in ({}, {"temperature": 0.8}):
                assert (await http.post("/v1/completions", json=body | given)).is_success
            listed = (await http.get("/v1/models")).json()["data"]
        assert [(one.temperature, one.top_k) for one in seen] == [(0.0, 7), (0.8, 7)]
        assert [(one["id"], one.get("parent")) for one in listed] == [("chat", None), ("c", "chat")]


async def test_a_call_of_the_library_gets_the_models_sampling_where_it_does_not_say():
    """G6: what a call names wins, a whole `Sampling` or request too, and an alias is the model."""
    tables = {"chat": {"file": FAKE, "aliases": ["c"], "sampling": {"temperature": 0.0, "top_k": 7}}}
    turns = [{"role": "user", "content": "x"}]
    async with Runtime(settings=settings_of(tables)) as runtime:
        seen = []
        runtime.on_arrival = lambda request_id, owner, request, num: seen.append(request.sampling)
        calls = [
            runtime.generate("x", max_tokens=1),
            runtime.generate("x", max_tokens=1, model="c", temperature=0.8),
            runtime.generate("x", max_tokens=1, sampling={"top_k": 3}),
            runtime.generate("x", max_tokens=1, sampling=Sampling(min_p=0.2)),
            runtime.generate(GenerateRequest(prompt="x", max_tokens=1)),
            runtime.chat(turns, max_tokens=1, top_k=5),
        ]
        for deltas in calls:
            async for _ in deltas:
                pass
        await runtime.ask("x", max_tokens=1)
        with pytest.raises(ModelNotFoundError):
            await runtime.ask("x", model="other")
    drawn = [(one.temperature, one.top_k, one.min_p) for one in seen]
    own, whole = (0.0, 7, 0.05), (0.8, 40, 0.05)
    expected = [own, (0.8, 7, 0.05), (0.0, 3, 0.05), (0.8, 40, 0.2), whole, (0.0, 5, 0.05), own]
    assert drawn == expected


async def test_a_call_of_the_library_at_a_server_gets_the_models_sampling_too():
    """G6: the body says which fields the caller named, and the server fills in the others."""
    tables = {"chat": {"file": FAKE, "sampling": {"temperature": 0.0, "top_k": 7}}}
    async with Runtime(settings=settings_of(tables)) as runtime:
        seen = []
        app = create_app(server_context(runtime, ServerSettings(allowed_hosts=("box",))))
        runtime.on_arrival = lambda request_id, owner, request, num: seen.append(request.sampling)
        request = GenerateRequest(prompt="x", max_tokens=1, sampling=Sampling(temperature=0.8, top_k=3))
        bodies = [request_body(request, sampling=named) for named in ((), {"temperature"}, {"top_k"}, None)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://box") as http:
            for body in bodies:
                assert (await http.post("/v1/runtime/requests", json=body)).is_success
    assert [(one.temperature, one.top_k) for one in seen] == [(0.0, 7), (0.8, 7), (0.0, 3), (0.8, 3)]


@pytest.mark.parametrize("models", [(), ("jobs",), ("own", "chat"), ("fake:other",)])
def test_the_draft_model_of_the_settings_guesses_for_the_default_model(models):
    """G6: whatever that is, and unless its table names another; others may have another vocabulary."""
    tables = {
        "chat": {"file": FAKE},
        "jobs": {"file": FAKE},
        "own": {"file": FAKE, "draft_model": "fake:own"},
    }
    source = ModelSource.read(settings_of(tables, models=models, draft_model="fake:draft"))
    drafts = {one.spec.id: one.spec.draft_path for one in source.served}
    default = source.served[0].spec.id
    assert drafts == dict.fromkeys(drafts, "") | {default: "fake:draft"} | {"own": "fake:own"}
    assert default == {(): "chat", ("fake:other",): "fake"}.get(models, *models[:1])


@pytest.mark.parametrize(
    ("table", "place", "text"),
    [
        ({"file": "no-such-model.gguf"}, "models.a.file", "no such model file"),
        ({"file": FAKE, "aliases": ["b"]}, "models.b", "is a name of models.a.aliases too"),
        ({"file": FAKE, "chat_template": "none.jinja"}, "models.a.chat_template", "none.jinja"),
        ({"file": FAKE, "draft_model": "no-such-model.gguf"}, "models.a.draft_model", "no such"),
        ({"file": FAKE, "ctx_sise": 3}, "models.a.ctx_sise", "did you mean ctx_size"),
        ({"file": FAKE, "sampling": {"temprature": 1}}, "models.a.sampling", "did you mean temperature"),
        ({"file": FAKE, "sampling": {"top_p": 7}}, "models.a.sampling", "top_p"),
        ({"file": FAKE, "tool_format": "hermez"}, "models.a.tool_format", "there are apriel"),
    ],
)
async def test_a_wrong_table_is_refused_with_its_place(table, place, text):
    """G6: whether the value is wrong or what it leads to."""
    with pytest.raises(StokerError, match=text) as caught:
        async with Runtime(settings=settings_of({"a": table, "b": {"file": FAKE}})):
            pass
    assert caught.value.param == place


async def test_a_changed_model_serves_on_and_a_removed_one_ends_its_requests():
    """G7: one that is new comes, one that differs is loaded otherwise, one that is gone is not found."""
    before = {"chat": {"file": FAKE, "load": True, "slots": 2}, "old": {"file": FAKE, "load": True}}
    after = {"new": {"file": FAKE, "load": True}, "chat": {"file": FAKE, "slots": 3, "aliases": ["c"]}}
    async with Runtime(settings=settings_of(before)) as runtime:
        asked = [GenerateRequest(prompt="x", model=m, max_tokens=300) for m in ("chat", "old")]
        streams = [runtime.stream(request) for request in asked]
        for stream in streams:
            await anext(stream)
        async with asyncio.timeout(60):
            await runtime.take_settings(settings_of(after))
            assert runtime.resolve("c").id == "chat"
            with pytest.raises(ModelNotFoundError):
                runtime.resolve("old")
            assert list(states(runtime)) == ["new", "chat"]
            ends = [[event async for event in stream][-1] for stream in streams]
            assert [end.usage.completion_tokens for end in ends] == [300, 300]


async def test_a_removed_model_stays_for_the_requests_that_wait_for_its_one_slot():
    """G7: they run on it as it is loaded; nobody loads it anew for them."""
    before = {"chat": {"file": FAKE, "load": True}, "old": {"file": SLOW, "load": True, "slots": 1}}
    async with Runtime(settings=settings_of(before)) as runtime:
        loads = []
        runtime.on_load = loads.append
        request = GenerateRequest(prompt="x", model="old", max_tokens=20)
        streams = [runtime.stream(request) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        events = runtime.events()
        await anext(events)
        await runtime.take_settings(settings_of({"chat": before["chat"]}))
        ends = [[event async for event in stream][-1] for stream in streams]
        assert [end.usage.completion_tokens for end in ends] == [20] * 3
        async with asyncio.timeout(60):
            while "absent" not in (told := [each.state for each in loads if each.model == "old"]):
                await anext(events)
        assert "loading" not in told


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
async def test_a_removed_model_is_known_to_a_new_engine_while_a_stream_needs_it(tmp_path):
    """G7: the engine ends under its stream, which goes on in the next one; then the model is freed."""
    before = {"chat": {"file": FAKE}, "old": {"file": SLOW, "load": True}}
    settings = EngineSettings(model_tables=before, run_dir=tmp_path, cache_dir=tmp_path)
    async with Runtime(settings=settings) as runtime, asyncio.timeout(60):
        events, loads = runtime.events(), []
        runtime.on_load = lambda each: loads.append((each.model, each.state))
        await anext(events)
        stream = runtime.stream(GenerateRequest(prompt="x", model="old", max_tokens=200))
        while not isinstance(await anext(stream), Delta):
            pass
        await runtime.take_settings(settings.replace(model_tables={"chat": before["chat"]}))
        os.kill((await runtime.status()).pid, signal.SIGKILL)
        told = [event async for event in stream]
        assert (type(told[-1]), told[-1].usage.completion_tokens) == (Finished, 200)
        while ("old", "absent") not in loads:
            await anext(events)


async def test_a_model_is_pinned_and_unpinned_by_settings_that_are_read_again():
    """G7: at once, without a load."""
    async with Runtime(settings=settings_of({"chat": {"file": FAKE, "load": True}})) as runtime:
        for is_pinned in (True, False):
            await runtime.take_settings(
                settings_of({"chat": {"file": FAKE, "load": True, "pinned": is_pinned}})
            )
            (shown,) = (await runtime.status()).engine.models
            assert (shown.is_pinned, shown.state) == (is_pinned, "ready")


async def test_settings_that_cannot_be_served_change_nothing():
    """G7: the names of keys are taken only with models that can be."""
    async with Runtime(settings=settings_of({"chat": {"file": FAKE, "load": True}})) as runtime:
        taken = []
        with pytest.raises(StokerError, match="no such model file"):
            await runtime.take_settings(settings_of({"chat": {"file": "gone.gguf"}}), lambda: taken.append(1))
        assert (taken, states(runtime)) == ([], {"chat": "ready"})


def test_tables_and_a_list_of_models_are_told_apart(tmp_path):
    """G6: `models` is either; a flag's names may be those of tables."""
    file = tmp_path / "stoker.toml"
    file.write_text('[models.chat]\nfile = "x.gguf"\nmax-tokens = 3\n', encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"models\.chat\.max_tokens in .*no such setting"):
        load_settings({}, file)
    file.write_text('[models.chat]\nfile = "x.gguf"\n', encoding="utf-8")
    engine, _ = load_settings({"models": ["chat"]}, file)
    assert (engine.models, engine.model_tables["chat"].file) == (("chat",), "x.gguf")


def _key(key):
    """The table of a key, named like it."""
    return f'[keys.{key}]\nhash = "{hash_of(key.encode())}"\nadmin = true\n'


async def _streamed(http, model):
    """How many tokens a stream has delivered, and its finish reason."""
    body = {"model": model, "prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    return json.loads(lines[-1][6:])["usage"]["completion_tokens"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")
async def test_a_sighup_under_twenty_streams_loses_none_on_fake(tmp_path):
    """G7: models and keys of the file hold without a restart, and every stream comes to its end."""
    file = tmp_path / "stoker.toml"
    text = f'port = 0\n[models.chat]\nfile = "{SLOW}"\nload = true\nslots = 4\n{_key("first")}'
    file.write_text(text + f'[models.old]\nfile = "{SLOW}"\nload = true\n', encoding="utf-8")
    names = ("CACHE", "STATE", "DATA")
    env = os.environ | {f"XDG_{name}_HOME": str(tmp_path / name) for name in names}
    command = [sys.executable, "-m", "stoker.cli", "serve", "--config", str(file)]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=subprocess.DEVNULL, env=env)
    try:
        line = await process.stdout.readline()
        url = f"http://127.0.0.1:{json.loads(line)['port']}"
        known = {"Authorization": "Bearer first"}
        other = {"Authorization": "Bearer second"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=known) as http, asyncio.timeout(120):
            assert (await http.get("/v1/models", headers=other)).status_code == 401
            models = ["chat", "old"] * (NUM_STREAMS // 2)
            streams = [asyncio.ensure_future(_streamed(http, model)) for model in models]
            while len((await http.get("/v1/runtime")).json()["requests"]) < NUM_STREAMS:
                assert not any(stream.done() for stream in streams)
            events = http.stream("GET", "/v1/runtime/events")
            async with events as answer:
                changed = text.replace("slots = 4", 'slots = 6\naliases = ["gpt"]')
                file.write_text(changed + _key("second"), encoding="utf-8")
                process.send_signal(signal.SIGHUP)
                async for _ in answer.aiter_lines():
                    listed = (await http.get("/v1/models")).json()["data"]
                    if {(one["id"], one["meta"]["num_slots"]) for one in listed} == {("chat", 6), ("gpt", 6)}:
                        break
            assert await asyncio.gather(*streams) == [300] * NUM_STREAMS
            gone = await http.post("/v1/completions", json={"model": "old", "prompt": "x"})
            named = await http.post("/v1/completions", json={"model": "gpt", "prompt": "x", "max_tokens": 1})
            assert (gone.status_code, named.status_code) == (404, 200)
            assert (await http.get("/v1/models", headers=other)).status_code == 200
    finally:
        process.terminate()
        assert await process.wait() == 0
