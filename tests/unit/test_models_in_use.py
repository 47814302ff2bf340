"""Loading a model otherwise while requests need it as it is: none is shortened or ended (SPEC R3, L5)."""

import asyncio
import dataclasses

import msgspec
import pytest

from memory_stand_in import MIB
from stoker import Runtime
from stoker.errors import ModelInUseError
from stoker.ipc.commands import LoadModel, Pause
from stoker.ipc.events import Failed, ModelState, Paused
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.models.memory_estimate.fit import Estimate, Fit, MemoryBudget, weigh

CODE = ModelInUseError.code
NUM_PROMPT = len("the same old song")
SLOW = "fake:eog_period=0,step_delay_s=0.01"
LONG = GenerateRequest(prompt="so", max_tokens=120, sampling=Sampling(temperature=0.0))


def refusals(machine):
    """Why loads of models in memory were refused."""
    return [e.error for e in machine.of(ModelState) if e.error is not None]


def reload(machine, spec, **changes):
    """Ask for it otherwise."""
    machine.load(msgspec.structs.replace(spec, **changes))


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("paused", [False, True], ids=["runs", "paused"])
@pytest.mark.parametrize("max_tokens", [200, None], ids=["says how much", "until the context is full"])
def test_a_shorter_context_is_refused_while_a_request_needs_more(make, paused, max_tokens):
    """L5: with the number and how many; the request has all it asked for."""
    machine = make()
    machine.have("a", n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    machine.submit("r", "a", max_tokens=max_tokens)
    machine.submit("other", "a", max_tokens=20)
    machine.until_tokens("r", 5)
    if paused:
        machine.send(Pause("r"))
        machine.until(lambda: machine.of(Paused, "r"))
    reload(machine, spec, n_ctx=64)
    (error,) = refusals(machine)
    needed = 512 if max_tokens is None else NUM_PROMPT + 200
    assert (error.code, error.http_status, error.param) == (CODE, 409, "ctx_size")
    assert error.details == {"num_requests": 1, "n_ctx": needed}
    for number in ("1 request", str(needed), "64"):
        assert number in error.message
    assert machine.info("a").n_ctx == 512
    if not paused:
        machine.run("r", "other")
        assert len(machine.output("r").tokens[0]) == (max_tokens or 512 - NUM_PROMPT)


def test_a_shorter_context_that_all_fit_into_is_had_and_changes_no_text(make):
    """L5: what runs goes on from its tokens, with the text that it would have had."""
    machine = make()
    machine.have("a", n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    asked = {"prompt": "once upon a time", "max_tokens": 100}
    machine.submit("r", "a", **asked)
    machine.until_tokens("r", 20)
    reload(machine, spec, n_ctx=128)
    machine.until(lambda: machine.info("a").n_ctx == 128)
    machine.run("r")
    assert not refusals(machine)
    assert machine.output("r") == make.alone(**asked)


def test_a_request_that_comes_during_the_load_keeps_the_model_as_it_is(make, gate):
    """L5: the new model is let go, its asker hears why, and nothing of it stays."""
    machine = make()
    gate.open()
    machine.have("a", n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    before = machine.ledger
    gate.shut()
    reload(machine, spec, n_ctx=64)
    machine.until(lambda: gate.begun == ["a", "a"])
    machine.submit("r", "a", max_tokens=200)
    machine.until_tokens("r", 2)
    gate.open()
    machine.until(lambda: refusals(machine))
    machine.run("r")
    assert refusals(machine)[0].code == CODE
    assert len(machine.output("r").tokens[0]) == 200
    assert (machine.info("a").n_ctx, machine.ledger) == (512, before)
    assert gate.backends[-1][1]._is_closed
    reload(machine, spec, n_ctx=64)
    machine.until(lambda: machine.info("a").n_ctx == 64)


def test_another_file_does_not_take_the_place_of_one_that_requests_use(make):
    """L5: their tokens mean nothing to it; unused it goes."""
    machine = make()
    machine.have("a")
    spec = machine.residency._catalogue.get("a").spec
    machine.submit("r", "a", max_tokens=50)
    machine.until_tokens("r", 5)
    reload(machine, spec, path="fake:eog_period=3")
    assert [error.code for error in refusals(machine)] == [CODE]
    machine.run("r")
    assert machine.output("r").reasons == {0: FinishReason.LENGTH}
    reload(machine, spec, path="fake:eog_period=3")
    machine.until(lambda: machine.loop._runners.find("a").spec.path == "fake:eog_period=3")


def test_a_model_comes_back_with_no_less_context_than_its_requests_began_in(make, clock):
    """R2, L5: degraded as far as they allow; with room for less it stays away, and nobody is shortened."""
    machine = make()
    machine.know("a", "eog_period=0,weights_mib=300,cell_kib=32", n_ctx=16384)
    machine.know("b", "eog_period=0,weights_mib=700")
    machine.submit("long", "a", max_tokens=5000)
    machine.until_tokens("long", 30)
    clock.pass_(300)
    machine.submit("other", "b")
    machine.turn()
    clock.pass_(2)
    machine.until(lambda: machine.state("a") == "unloading")
    clock.pass_(31)
    machine.run("other")
    machine.others_mib = 400  # a context of 4,096 would fit
    clock.pass_(300)
    machine.submit("newcomer", "a")
    machine.run("newcomer")
    assert machine.of(Failed, "newcomer")[0].error.code == "insufficient_memory"
    assert not machine.has_ended("long")
    machine.others_mib = 300  # and now one of 8,192
    clock.pass_(300)
    machine.until_tokens("long", len(machine.tokens("long")) + 30)  # it ran on until it was unloaded
    assert machine.info("a").n_ctx == 8192


def test_what_is_cut_down_keeps_the_context_that_is_needed():
    """R2: fewer slots and smaller cells before that."""

    def estimate(spec):
        return Estimate(lines={"kv": spec.n_ctx * spec.num_slots * MIB}, n_ctx=spec.n_ctx)

    spec = ModelSpec(id="m", path="m", n_ctx=16384, num_slots=4)
    budget = MemoryBudget(free_bytes=16384 * MIB, limit_bytes=2**60, margin_bytes=0)
    free, bound = weigh(spec, estimate, budget), weigh(spec, estimate, budget, 5000)
    assert (free.spec.n_ctx, free.spec.num_slots) == (4096, 4)
    assert (bound.spec.n_ctx, bound.spec.num_slots) == (8192, 2)
    assert bound.fit is Fit.DEGRADED


# ---------------------------------------------------------------- from outside


@pytest.fixture
async def runtime(tmp_path):
    """With one slow model of 2,048 tokens of context."""
    async with Runtime(SLOW, isolation="thread", ctx_size=2048, run_dir=tmp_path, drain_s=0.0) as runtime:
        yield runtime


async def begun(stream):
    """A task that reads a stream to its end; returns once it has begun to write."""
    has_begun = asyncio.Event()

    async def read():
        tokens = []
        async for event in stream:
            tokens += getattr(event, "token_ids", [])
            if tokens:
                has_begun.set()
        return tokens

    task = asyncio.create_task(read())
    await has_begun.wait()
    return task


async def test_who_asks_for_less_hears_why_and_may_ask_again_afterwards(runtime):
    """L5: the model is ready all the while and shown as it is."""
    answer = await begun(runtime.stream(LONG))
    with pytest.raises(ModelInUseError, match="1 request on fake may come to hold up to 123 tokens"):
        await runtime.load_model("fake", ctx_size=64)
    assert runtime.resolve("fake").n_ctx == 2048
    assert len(await answer) == 120
    assert (await runtime.load_model("fake", ctx_size=64)).n_ctx == 64


async def test_nothing_is_taken_from_requests_while_no_engine_is_there(runtime):
    """L2, L5: suspended, they wait for the model as it was."""
    answer = await begun(runtime.stream(LONG))
    await runtime.suspend("request", grace_s=0.0)
    with pytest.raises(ModelInUseError, match="1 request for fake wait"):
        await runtime.load_model("fake", ctx_size=64)
    await runtime.resume()
    assert len(await answer) == 120
    assert runtime.resolve("fake").n_ctx == 2048


async def test_an_engine_that_leaves_during_a_load_does_not_come_back_with_less(tmp_path):
    """L2, L5: the load is called off, and its asker hears why."""
    slow = f"{SLOW},load_s=1.0"
    async with Runtime(slow, isolation="thread", ctx_size=2048, run_dir=tmp_path, drain_s=0.0) as runtime:
        asking = asyncio.create_task(runtime.load_model("fake", ctx_size=64))
        await asyncio.sleep(0)
        answer = await begun(runtime.stream(LONG))
        await runtime.suspend("request", grace_s=0.0)
        with pytest.raises(ModelInUseError):
            await asking
        await runtime.resume()
        assert len(await answer) == 120
        assert runtime.resolve("fake").n_ctx == 2048


def test_the_command_for_a_model_that_is_away_is_as_ever(make):
    """R5: only what requests need is kept."""
    machine = make()
    spec = machine.know("a", n_ctx=512)
    machine.send(LoadModel(msgspec.structs.replace(spec, n_ctx=64)))
    machine.until(lambda: machine.state("a") == "ready")
    assert machine.info("a").n_ctx == 64


def test_as_much_context_again_is_enough_where_the_backend_has_rounded_it_up(make):
    """L5, R5: only another time to stay was asked for."""
    machine = make()
    machine.have("a", n_ctx=512)
    spec = machine.residency._catalogue.get("a").spec
    runner = machine.loop._runners.find("a")
    runner.prep = dataclasses.replace(runner.prep, n_ctx=600)
    machine.submit("r", "a", max_tokens=None)
    machine.until_tokens("r", 5)
    reload(machine, spec, keep_alive_s=5.0)
    machine.until(lambda: machine.residency._catalogue.get("a").keep_alive_s == 5.0)
    assert not refusals(machine)
