"""One program, embedded and connected: `Runtime(...)` and `Runtime.connect(url)` behave alike."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

import stoker.sync
from stoker import FinishReason, GenerateRequest, Runtime, TextDelta
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestNotFoundError,
    StateNotFoundError,
    StokerError,
    UnsupportedError,
)
from stoker.ipc.events import Admitted, Delta, Finished, Paused, Queued, Resumed
from stoker.remote.runtime import RemoteRuntime
from stoker.remote.states import RemoteStates
from stoker.tasks.states import States

MODELS = (
    "fake:id=enc,encoder=1",
    "fake:id=rank,encoder=1,pooling=rank",
    "fake:id=rnn,recurrent=1,eog_period=0",
    "fake:id=eyes,vision=20,eog_period=0",
    "fake:id=slow,eog_period=0,step_delay_s=0.02",
)
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]},
        },
    }
]
BAD_PART = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
HI = [{"role": "user", "content": "hi"}]
LONG = 10_000

NOT_CARRIED = {
    "group": "one call of several requests is opened by the server, for its own routes",
    "ended": "the program does not end with the server",
    "owner_of": "digests of API keys are the server's",
    "connect": "it is what makes one",
}
OWN = {"url": "an embedded runtime has none"}
STATES_NOT_CARRIED = {
    "dropped": "files beside the server are the server's",
    "given": "a state is read where it is",
    "recurrent": "the server says which model has states",
    "request": "the server makes the request",
}


@pytest.fixture(params=["embedded", "connected"])
async def runtime(
    request: pytest.FixtureRequest, start_server: Callable[..., Any], tmp_path: Path
) -> AsyncIterator[Any]:
    """The same models in this process, and behind a server."""

    def embedded() -> Runtime:
        how: dict[str, Any] = {"isolation": "thread", "ctx_size": 2048, "slots": 4, "drain_s": 0.0}
        return Runtime("fake:id=talk,eog_period=0", models=MODELS, states_dir=tmp_path / "states", **how)

    if request.param == "embedded":
        opened: Any = embedded()
    else:
        server = await asyncio.to_thread(start_server, embedded, keepalive_s=0.5)
        await asyncio.to_thread(server.ready.result, 60)
        opened = Runtime.connect(server.url)
    async with opened as started:
        yield started


async def collect(deltas: AsyncIterator[TextDelta]) -> list[TextDelta]:
    """All deltas."""
    return [delta async for delta in deltas]


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what others do; it is asked again and again, as a runtime tells of it to nobody."""
    while not is_so():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.01)


# ------------------------------------------------------------ the same methods


def public(cls: type) -> dict[str, Any]:
    """Public methods and properties by name, and what `async with` calls."""
    return {
        name: value
        for name, value in inspect.getmembers_static(cls)
        if not name.startswith("_") or name in {"__aenter__", "__aexit__"}
    }


@pytest.mark.parametrize(
    ("here", "there", "missing", "own"),
    [(Runtime, RemoteRuntime, NOT_CARRIED, OWN), (States, RemoteStates, STATES_NOT_CARRIED, {})],
)
def test_a_remote_runtime_has_the_methods_and_signatures_of_an_embedded_one(
    here: type, there: type, missing: dict[str, str], own: dict[str, str]
) -> None:
    """I11: names, parameters, defaults and annotations; what differs is listed with its reason."""
    ours, theirs = public(here), public(there)
    assert ours.keys() - theirs.keys() == missing.keys()
    assert theirs.keys() - ours.keys() == own.keys()
    for name in ours.keys() & theirs.keys():
        mine, other = ours[name], theirs[name]
        assert type(mine) is type(other), name
        if isinstance(mine, property):
            assert inspect.signature(mine.fget) == inspect.signature(other.fget), name  # type: ignore[arg-type]
            continue
        assert inspect.signature(mine) == inspect.signature(other), name
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(other), name


# ------------------------------------------------------------ text


async def test_the_last_delta_carries_reason_usage_and_timings(runtime: Any) -> None:
    """I9: text, token ids and probabilities come piece by piece, the figures at the end."""
    *early, last = await collect(runtime.generate("hello", max_tokens=7, logprobs=2))
    assert (last.finish_reason, last.usage.completion_tokens) == (FinishReason.LENGTH, 7)
    assert last.timings.decode_s >= 0
    assert not any(delta.finish_reason or delta.usage for delta in early)
    entries = [entry for delta in [*early, last] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == [t for d in [*early, last] for t in d.token_ids]
    assert all(len(entry.top) == 2 and isinstance(entry.token_bytes, bytes) for entry in entries)


async def test_stream_refuses_what_is_no_request_and_shows_one(runtime: Any) -> None:
    """SPEC I10: a text is for `generate`; the error shows where `temperature` goes in a request."""
    with pytest.raises(InvalidRequestError, match=r"GenerateRequest, got str; .*Sampling") as caught:
        await collect(runtime.stream("Hello"))
    assert caught.value.param == "request"


@pytest.mark.parametrize(
    ("url", "api_key", "param"), [(5, None, "url"), ("http://127.0.0.1:8686", 5, "api_key")]
)
def test_a_url_or_key_of_another_type_is_refused_by_name(url: Any, api_key: Any, param: str) -> None:
    """SPEC I10: before anything is sent, by the plain runtime too."""
    for connect in (Runtime.connect, stoker.sync.Runtime.connect):
        with pytest.raises(InvalidRequestError) as caught:
            connect(url, api_key=api_key)
        assert caught.value.param == param


async def test_the_text_of_a_seed_is_the_same_here_and_there(runtime: Any) -> None:
    """D1: one text for one seed, whoever computes it; every field of sampling travels."""
    fields = {"max_tokens": 24, "temperature": 5.0, "min_p": 0.0, "seed": 5, "logit_bias": {121: -100.0}}
    deltas = await collect(runtime.generate("hello", stop=["zz"], echo=True, **fields))
    assert "".join(delta.text for delta in deltas) == "helloo pjvdk dzb\ufffdzalaivamgb f"


async def test_token_ids_and_choices_travel(runtime: Any) -> None:
    """I9, Q16: a prompt of token ids, and two choices told apart by their index."""
    deltas = await collect(runtime.generate([256, 104, 105], max_tokens=5, n=2, seed=3))
    counts = {at: sum(len(d.token_ids) for d in deltas if d.index == at) for at in (0, 1)}
    assert counts == {0: 5, 1: 5}
    assert deltas[-1].usage.prompt_tokens == 3


async def test_a_conversation_is_answered(runtime: Any) -> None:
    """D7: text is text, and a forced call comes whole."""
    deltas = await collect(runtime.chat(HI, max_tokens=6, template_args={"x": 1}))
    assert sum(len(delta.token_ids) for delta in deltas) == 6
    forced = {"tools": WEATHER, "tool_choice": "required", "parallel_tool_calls": False}
    deltas = await collect(runtime.chat(HI, max_tokens=200, seed=1, **forced))
    (call,) = [call for delta in deltas for call in delta.tool_calls]
    assert (call.name, deltas[-1].finish_reason) == ("weather", FinishReason.TOOL_CALLS)
    assert call.arguments.replace(" ", "") in {'{"hot":true}', '{"hot":false}'}
    assert "".join(delta.text for delta in deltas).strip() == ""


async def test_an_answer_keeps_to_a_constraint(runtime: Any) -> None:
    """D2: constraints travel as they are."""
    deltas = await collect(runtime.generate("N:", max_tokens=9, regex="[0-9]{3}"))
    assert "".join(delta.text for delta in deltas).isdigit()


async def test_pictures_are_shown(runtime: Any) -> None:
    """V2: paths, bytes and Pillow images, in a turn or beside it."""
    picture = Pillow.new("RGB", (40, 30), "red")
    turn = [{"role": "user", "content": [picture_part(picture), "what is it?"]}]
    first = await collect(runtime.chat(turn, model="eyes", max_tokens=4, seed=1))
    second = await collect(
        runtime.chat(
            [{"role": "user", "content": "what is it?"}], model="eyes", images=picture, max_tokens=4, seed=1
        )
    )
    assert [d.token_ids for d in first] == [d.token_ids for d in second]
    plain = await collect(runtime.chat(HI, model="eyes", max_tokens=4))
    assert first[-1].usage.prompt_tokens > plain[-1].usage.prompt_tokens + 5


def picture_part(picture: Any) -> Any:
    """As a part of a turn."""
    from stoker import Image  # noqa: PLC0415

    return Image(picture)


async def test_a_picture_is_read_into_json(runtime: Any) -> None:
    """V4: of the form that was asked for, with what became of the picture."""
    reading = await runtime.read(
        Pillow.new("RGB", (40, 30), "red"), ask="Is it red?", schema=RED, model="eyes"
    )
    assert reading.value in ({"red": True}, {"red": False})
    assert [(one.width, one.height) for one in reading.images] == [(40, 30)]
    with pytest.raises(InvalidRequestError, match="one answer"):
        await runtime.read(Pillow.new("RGB", (4, 4)), model="eyes", n=2)


RED = {
    "type": "object",
    "properties": {"red": {"type": "boolean"}},
    "required": ["red"],
    "additionalProperties": False,
}


# ------------------------------------------------------------ one request


async def test_the_events_of_a_request_are_told(runtime: Any) -> None:
    """Q14, C13: its place, its admission, its text and its end, under the id that was given."""
    request = GenerateRequest(prompt="hello", max_tokens=3)
    events = [event async for event in runtime.stream(request, "mine")]
    assert {event.request_id for event in events} == {"mine"}
    kinds = list(dict.fromkeys(type(event) for event in events))
    assert kinds == [Queued, Admitted, Delta, Finished]


@pytest.mark.long
async def test_a_request_is_paused_resumed_and_cancelled_by_its_id(runtime: Any) -> None:
    """Q12: its stream says so."""
    request = GenerateRequest(prompt="hello", model="slow", max_tokens=400)
    told: list[type] = []
    async with aclosing(runtime.stream(request, "mine")) as events:
        async for event in events:
            told += [type(event)] if type(event) not in told else []
            if isinstance(event, Delta) and Paused not in told:
                await runtime.pause_request("mine")
            elif isinstance(event, Paused):
                assert [one.id for one in runtime.with_client()] == ["mine"]
                await runtime.resume_request("mine")
            elif isinstance(event, Resumed):
                await runtime.cancel("mine")
            last = event
    assert {Paused, Resumed} <= set(told)
    assert isinstance(last, Finished)
    with pytest.raises(RequestNotFoundError):
        await runtime.cancel("mine")


async def test_leaving_an_iterator_ends_the_request(runtime: Any) -> None:
    """S5, Q12: nothing goes on for a caller who has left."""
    async with aclosing(runtime.generate("hello", model="slow", max_tokens=400)) as deltas:
        async for _ in deltas:
            assert len(runtime.with_client()) == 1
            break
    async with asyncio.timeout(10):
        await until(lambda: not runtime.with_client())


async def test_a_call_is_cancelled_by_the_id_that_it_was_given(runtime: Any) -> None:
    """Q12: a call without a text raises."""
    texts = [f"text {at}" * 20 for at in range(1500)]
    call = asyncio.ensure_future(runtime.embed(texts, model="enc", request_id="texts"))
    async with asyncio.timeout(30):
        await until(lambda: bool(runtime.with_client()))
    await runtime.cancel("texts")
    with pytest.raises(RequestCancelledError):
        await call


# ------------------------------------------------------------ other calls


async def test_texts_are_embedded_ranked_and_chosen(runtime: Any) -> None:
    """K2, K4, D5: vectors bit by bit, scores and probabilities."""
    how = {"priority": "background", "keep_alive": "5m", "timeout_s": 60.0}
    found = await runtime.embed(["one", "two"], model="enc", dimensions=3, **how)
    assert [len(vector) for vector in found.floats()] == [3, 3]
    assert sum(number**2 for number in found.floats()[0]) == pytest.approx(1.0)
    alone = await runtime.embed([256, 104], model="enc", normalize=False)
    assert (alone.model, len(alone.vectors), alone.usage.prompt_tokens) == ("enc", 1, 2)
    assert (await runtime.embed([], model="enc")).vectors == []
    ranking = await runtime.rerank("query", ["a", "bb", "ccc"], model="rank", top_n=2)
    assert len(ranking.results) == 2
    assert ranking.results[0].score >= ranking.results[1].score
    with pytest.raises((InvalidRequestError, UnsupportedError)):
        await runtime.embed("one", model="enc", temperatur=1)
    chosen = await runtime.choose("hello", ["a", "b", ""], calibrate=True)
    assert [each.rank for each in chosen.results] == [0, 1, 2]
    assert chosen.results[-1].choice == ""
    assert chosen.results[-1].score == float("inf")


async def test_texts_become_tokens_and_back(runtime: Any) -> None:
    """I9: ids with the bytes of each; prompts are counted and conversations laid out."""
    tokens, pieces = await runtime.tokenize("hé", add_special=False)
    assert b"".join(pieces) == "hé".encode()
    assert await runtime.detokenize(tokens) == "hé"
    assert await runtime.count_tokens(GenerateRequest(prompt="hé")) == len(tokens) + 1
    plan = await runtime.prepare_chat(HI, template_args={"x": 1})
    assert plan.prompt == runtime.plan_chat(HI).prompt == runtime.render_chat(HI)
    assert "hi" in plan.prompt


async def test_a_state_is_saved_begun_from_and_deleted(runtime: Any) -> None:
    """K5, D8: kept under its name, uploaded again, embedded."""
    saved = await runtime.states.save("hello", name="first", model="rnn")
    assert saved in await runtime.states.list()
    content = await runtime.states.content("first")
    assert len(content) == saved.size_bytes
    copy = await runtime.states.put(content, model="rnn", name="second")
    assert (await runtime.states.get("second")).size_bytes == copy.size_bytes
    by_name = await collect(runtime.generate("x", state="first", model="rnn", max_tokens=4, seed=1))
    by_bytes = await collect(runtime.generate("x", state=content, model="rnn", max_tokens=4, seed=1))
    assert [d.token_ids for d in by_name] == [d.token_ids for d in by_bytes]
    whole = GenerateRequest(prompt="x", model="rnn", max_tokens=4, initial_state=content)
    assert [d.token_ids for d in await collect(runtime.generate(whole, seed=1))] == [
        d.token_ids for d in by_name
    ]
    embedding = await runtime.states.embed("hello", model="rnn")
    assert len(embedding.data) == 4 * embedding.shape[0] * embedding.shape[1] * embedding.shape[2]
    for name in ("first", "second"):
        await runtime.states.delete(name)
    with pytest.raises(StateNotFoundError):
        await runtime.states.get("first")


# ------------------------------------------------------------ models and sleep


async def test_models_are_listed_unloaded_loaded_and_pinned(runtime: Any) -> None:
    """R3: what was asked for is seen at once."""
    assert [info.id for info in runtime.models] == ["talk", "enc", "rank", "rnn", "eyes", "slow"]
    assert runtime.resolve(None).id == runtime.resolve("default").id == "talk"
    await runtime.unload_model("enc")
    assert {one.id: one.state for one in runtime.model_states()}["enc"] == "absent"
    info = await runtime.load_model("enc", keep_alive="1m")
    assert (info.id, info.model_class) == ("enc", "encoder")
    assert {one.id: one.state for one in runtime.model_states()}["enc"] == "ready"
    await runtime.pin_model("enc")
    status = await runtime.status()
    assert {one.id: one.is_pinned for one in status.engine.models}["enc"]
    assert len(status.engine.slots) >= 4
    assert runtime.health().state == status.state == "serving"


async def test_what_happens_is_told(runtime: Any) -> None:
    """O3: a snapshot, then each event."""
    told = []
    async with aclosing(runtime.events()) as events:
        async for event in events:
            told.append(event.event)
            if told == ["snapshot"]:
                await runtime.unload_model("enc")
            elif event.event == "model" and event.fields["state"] == "absent":
                assert event.fields["model"] == "enc"
                break
    assert told[0] == "snapshot"


async def test_a_suspended_runtime_keeps_the_request(runtime: Any) -> None:
    """L2: the stream stands still and goes on."""
    assert runtime.is_ready
    request = GenerateRequest(prompt="hello", model="slow", max_tokens=60)
    num_tokens = 0
    async with aclosing(runtime.stream(request, "mine")) as events:
        async for event in events:
            if isinstance(event, Delta):
                num_tokens += len(event.token_ids)
                if num_tokens == 1:
                    await runtime.suspend(grace_s=0.0)
                    assert runtime.is_suspended
                    await runtime.resume()
                    assert not runtime.is_suspended
    assert num_tokens == 60


def test_scripts_without_an_event_loop_connect_too(start_server: Callable[..., Any], tmp_path: Path) -> None:
    """I9, I11: `stoker.sync.Runtime.connect`, by the same names."""
    server = start_server(lambda: Runtime(MODELS[2], isolation="thread", states_dir=tmp_path / "states"))
    server.ready.result(60)
    with stoker.sync.Runtime.connect(server.url) as runtime:
        assert [info.id for info in runtime.models] == ["rnn"]
        assert runtime.resolve(None).id == runtime.status().engine.models[0].id
        assert sum(len(delta.token_ids) for delta in runtime.generate("hello", max_tokens=5)) == 5
        for delta in runtime.chat(HI):
            assert [one.id for one in runtime.with_client()] == [delta.request_id]
            break
        assert runtime.ask("hello", max_tokens=3).usage.completion_tokens == 3
        assert runtime.states.save("hello", name="first") in runtime.states.list()
        assert "hi" in runtime.render_chat(HI)
        assert next(runtime.events()).event == "snapshot"
        with pytest.raises(RequestNotFoundError):
            runtime.cancel("none")


# ------------------------------------------------------------ errors

PROGRAMS: dict[str, tuple[type[StokerError], Callable[[Any], Any]]] = {
    "an unknown model": (ModelNotFoundError, lambda rt: collect(rt.generate("x", model="none"))),
    "a prompt too long": (ContextLengthError, lambda rt: collect(rt.generate("x" * LONG))),
    "an unknown field": (InvalidRequestError, lambda rt: collect(rt.generate("x", temperatur=1))),
    "a value out of range": (InvalidRequestError, lambda rt: collect(rt.generate("x", top_p=2.0))),
    "an unknown token": (InvalidRequestError, lambda rt: collect(rt.generate([9999], max_tokens=1))),
    "a part that is none": (InvalidRequestError, lambda rt: collect(rt.chat(BAD_PART, model="eyes"))),
    "a tool that is none": (InvalidRequestError, lambda rt: collect(rt.chat(HI, tools=[{}]))),
    "no such choice": (InvalidRequestError, lambda rt: collect(rt.chat(HI, tool_choice="perhaps"))),
    "a decoder to embed": (UnsupportedError, lambda rt: rt.embed("x")),
    "an encoder to generate": (UnsupportedError, lambda rt: collect(rt.generate("x", model="enc"))),
    "no such output": (InvalidRequestError, lambda rt: rt.rerank("q", ["a"], model="rank", output=99)),
    "one choice as a text": (InvalidRequestError, lambda rt: rt.choose("x", "abc")),
    "a picture for a blind model": (UnsupportedError, lambda rt: rt.read(Pillow.new("RGB", (4, 4)))),
    "no picture": (InvalidRequestError, lambda rt: rt.read([], model="eyes")),
    "a file that is not there": (InvalidRequestError, lambda rt: rt.read("none.png", model="eyes")),
    "no such request": (RequestNotFoundError, lambda rt: rt.cancel("none")),
    "what is no id at all": (RequestNotFoundError, lambda rt: rt.cancel("../none")),
    "no kept request": (RequestNotFoundError, lambda rt: collect(rt.attach("none"))),
    "no such state": (StateNotFoundError, lambda rt: rt.states.get("none")),
    "a model to unload that is none": (ModelNotFoundError, lambda rt: rt.unload_model("none")),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_errors_are_of_the_same_class_with_the_same_numbers(runtime: Any, name: str) -> None:
    """I11: the class, the field at fault and the details cross HTTP."""
    wanted, program = PROGRAMS[name]
    with pytest.raises(wanted) as caught:
        await program(runtime)
    if wanted is ContextLengthError:
        assert caught.value.details["n_ctx"] == 2048
        assert caught.value.details["num_tokens"] > LONG
        assert caught.value.param == "prompt"
