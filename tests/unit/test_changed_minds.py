"""Callers of a runtime who change their minds about models, and a program that ends while it resumes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker import Runtime
from stoker.errors import NotReadyError
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import GenerateRequest, Sampling

SLOW = "fake:eog_period=0,load_s=0.3"


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    """With one model that takes a while to load."""
    async with Runtime(SLOW, isolation="thread", ctx_size=2048, run_dir=tmp_path / "run") as runtime:
        yield runtime


def state(runtime: Runtime) -> str:
    """Of its model, as it shows it."""
    return str(runtime.model_states()[0].state)


async def until_state(runtime: Runtime, wanted: str) -> None:
    """Until the model is there."""
    for _ in range(2000):
        if state(runtime) == wanted:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"it is {state(runtime)}")


async def test_a_reload_that_everybody_cancels_leaves_the_model_that_serves(runtime: Runtime) -> None:
    """SPEC R4, L5: it is ready all the while."""
    asking = [asyncio.create_task(runtime.load_model("fake", ctx_size=4096)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert state(runtime) == "ready"
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert (await runtime.load_model("fake", ctx_size=8192)).n_ctx == 8192
    assert state(runtime) == "ready"


@pytest.mark.parametrize("goes", [False, True], ids=["beside itself", "in its place"])
async def test_a_model_is_as_it_was_where_nobody_waits_for_its_reload_any_more(
    tmp_path: Path, *, goes: bool
) -> None:
    """SPEC R4, L5: a caller who leaves no longer wants it, though the model had gone for that load."""
    card = ",weights_mib=300,device=Kept,device_mib=500" if goes else ""
    settings = {"ctx_size": 2048, "run_dir": tmp_path / "run", "memory_margin": 0, "device_lease": False}
    async with Runtime(SLOW + card, isolation="thread", gpu_layers="all", **settings) as runtime:
        asking = asyncio.create_task(runtime.load_model("fake", ctx_size=4096))
        await asyncio.sleep(0.05)
        if goes:
            await until_state(runtime, "loading")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_state(runtime, "ready")
        await asyncio.sleep(0.5)  # longer than the load would have taken
        await until_state(runtime, "ready")
        assert runtime.models[0].n_ctx == 2048
        assert (await runtime.ask("so", max_tokens=4)).text
        assert runtime.models[0].n_ctx == 2048


async def test_a_load_right_after_a_cancelled_one_is_a_load_of_its_own(runtime: Runtime) -> None:
    """SPEC R4: the end of the former is no answer to it."""
    await runtime.unload_model("fake")
    await until_state(runtime, "absent")
    former = asyncio.create_task(runtime.load_model("fake"))
    await until_state(runtime, "loading")
    former.cancel()
    later = asyncio.create_task(runtime.load_model("fake"))
    with pytest.raises(asyncio.CancelledError):
        await former
    assert (await asyncio.wait_for(later, 20)).id == "fake"
    assert state(runtime) == "ready"


async def test_a_load_beside_an_unload_ends_with_the_model_there(runtime: Runtime) -> None:
    """SPEC R5: what is on its way out is not there."""
    unloading = asyncio.create_task(runtime.unload_model("fake"))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(runtime.load_model("fake"), 20)).id == "fake"
    await asyncio.wait_for(unloading, 20)
    await until_state(runtime, "ready")


@pytest.mark.long
async def test_a_program_that_ends_while_it_resumes_keeps_what_was_suspended(tmp_path: Path) -> None:
    """SPEC L2: until an engine serves again."""
    folder = tmp_path / "run"
    slow = "fake:eog_period=0,load_s=1.5,step_delay_s=0.02"
    asked = GenerateRequest(prompt="so", max_tokens=100, sampling=Sampling(temperature=0.0))
    runtime = Runtime(slow, isolation="thread", ctx_size=2048, run_dir=folder, drain_s=0.0)
    await runtime.start()
    stream = runtime.stream(asked, "one")
    async for event in stream:
        if isinstance(event, Delta):
            break
    await runtime.suspend()
    resuming = asyncio.create_task(runtime.resume())
    await until_state(runtime, "loading")
    await runtime.close()
    with pytest.raises(NotReadyError):
        await resuming
    with pytest.raises(NotReadyError):
        async for _ in stream:
            pass
    async with Runtime(slow, isolation="thread", ctx_size=2048, run_dir=folder) as again:
        assert [kept.id for kept in again.kept()] == ["one"]
        events = [event async for event in again.attach("one")]
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion_tokens == 100
