"""Requests that name adapters, through the façade and the loop, on the fake backend."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from scripted_engine import model_info

from stoker import GenerateRequest, Runtime, Sampling
from stoker.client.client import resolved
from stoker.errors import InvalidRequestError, ModelNotFoundError, UnsupportedError
from stoker.ipc.events import Delta, Parked
from stoker.ipc.model import AdapterSpec
from stoker.ipc.request import Priority

FAKE = "fake:eog_period=0"
LORA = ("red=fake:red", "blue=fake:blue@0.5")
PROMPT = "a prompt of some length, so that it is worth keeping what was computed of it"


@pytest.fixture
async def runtime(tmp_path: Any) -> AsyncIterator[Runtime]:
    """A fake model with two adapters."""
    settings = {"isolation": "thread", "slots": 2, "ctx_size": 2048, "run_dir": tmp_path / "run"}
    async with Runtime(FAKE, lora=LORA, **settings) as started:
        yield started


async def tokens(runtime: Runtime, prompt: str = PROMPT, **fields: Any) -> list[int]:
    """Token ids of a greedy answer."""
    fields = {"max_tokens": 12, "temperature": 0.0, **fields}
    return [token async for delta in runtime.generate(prompt, **fields) for token in delta.token_ids]


async def cached(runtime: Runtime, **fields: Any) -> int:
    """Prompt tokens that were not computed."""
    async for delta in runtime.generate(PROMPT, max_tokens=1, **fields):
        last = delta
    assert last.usage is not None
    return last.usage.cached_tokens


async def test_every_adapter_and_scale_makes_a_text_of_its_own(runtime: Runtime) -> None:
    """SPEC K6: and the same one however it is written."""
    texts = [
        await tokens(runtime),
        await tokens(runtime, lora="red"),
        await tokens(runtime, lora={"red": 0.5}),
        await tokens(runtime, lora="blue"),
        await tokens(runtime, lora={"red": 1.0, "blue": 0.5}),
    ]
    assert len({tuple(text) for text in texts}) == len(texts)
    assert await tokens(runtime, lora={"red": 1.0}) == texts[1]
    assert await tokens(runtime, model="red") == texts[1]
    assert await tokens(runtime, model="blue") == await tokens(runtime, lora=((1, None),)) == texts[3]
    assert await tokens(runtime, lora=(("blue", None), ("red", None))) == texts[4]
    assert await tokens(runtime, model="red", lora={"blue": 0.5}) == texts[4]
    assert await tokens(runtime, lora={"red": 0.0}) == texts[0]
    assert await tokens(runtime, model="red", lora={"red": 0}) == texts[0]


async def test_side_by_side_everybody_gets_its_own(runtime: Runtime) -> None:
    """SPEC K6: more requests than slots, with and without adapters."""
    ways: list[dict[str, Any]] = [{}, {"lora": "red"}, {"model": "blue"}, {"lora": {"red": 2.0}}]
    alone = [await tokens(runtime, cache=False, **way) for way in ways]
    together = await asyncio.gather(*(tokens(runtime, cache=False, **way) for way in ways * 2))
    assert together == alone * 2


async def test_what_one_adapter_computed_no_other_takes_over(runtime: Runtime) -> None:
    """SPEC C1, K6: names and scales are part of the namespace."""
    assert await cached(runtime) == 0
    assert await cached(runtime) > 0
    assert await cached(runtime, lora="red") == 0
    assert await cached(runtime, lora={"red": 0.5}) == 0
    assert await cached(runtime, model="red") > 0
    assert await cached(runtime, lora={"red": 0.0}) > 0


async def test_the_file_behind_a_name_is_part_of_the_namespace(tmp_path: Any) -> None:
    """SPEC C1, K6: stored prefixes of another file of that name are not found, those of the same one are."""
    found = []
    for path in ("fake:red", "fake:other", "fake:red"):
        settings = {"isolation": "thread", "cache_dir": tmp_path, "run_dir": tmp_path}
        async with Runtime(FAKE, lora=(f"red={path}",), cache_mode="snapshot", **settings) as runtime:
            found.append(await cached(runtime, model="red"))
    assert found[:2] == [0, 0]
    assert found[2] > 0


@pytest.mark.parametrize("park_bytes", [0, 2**20], ids=["from tokens", "from a snapshot"])
async def test_parked_and_resumed_it_goes_on_with_its_adapter(tmp_path: Any, park_bytes: int) -> None:
    """SPEC K6, Q4: background gives way to all who come, and comes back to the same text."""
    fake, num_tokens, num_parked = "fake:eog_period=0,step_delay_s=0.002", 150, 0
    settings = {"isolation": "thread", "slots": 1, "ctx_size": 512, "n_batch": 64, "run_dir": tmp_path}
    async with Runtime(fake, lora=LORA, park_bytes=park_bytes, **settings) as runtime:
        expected = await tokens(runtime, lora="red", max_tokens=num_tokens, cache=False)
        adapters = (("red", None),)
        request = GenerateRequest(
            prompt=PROMPT,
            adapters=adapters,
            max_tokens=num_tokens,
            sampling=Sampling(temperature=0.0),
            priority=Priority.BACKGROUND,
            cache=False,
        )
        got: list[int] = []
        async with aclosing(runtime.stream(request)) as events:
            async for event in events:
                if isinstance(event, Parked):
                    num_parked += 1
                elif isinstance(event, Delta):
                    got += event.token_ids
                    if len(got) in {20, 60, 100}:
                        await tokens(runtime, "x" * 300, max_tokens=2, lora="blue")
        assert got == expected
        assert num_parked == 3


async def test_a_crash_in_the_middle_changes_no_text(tmp_path: Any) -> None:
    """SPEC L3, K6: the replayed request has its adapters."""
    fake = "fake:eog_period=0,step_delay_s=0.005"
    async with Runtime(fake, lora=LORA, run_dir=tmp_path) as runtime:
        expected = await tokens(runtime, model="blue", max_tokens=60)
        killed = (await runtime.status()).pid
        got: list[int] = []
        async for delta in runtime.generate(PROMPT, model="blue", max_tokens=60, temperature=0.0):
            got += delta.token_ids
            if len(got) == 20:
                os.kill(killed, signal.SIGKILL)
        assert got == expected
        assert (await runtime.status()).pid != killed


@pytest.mark.parametrize(
    ("adapters", "text"),
    [
        ("green", "has no adapter 'green'; it has: red, blue"),
        (((2, 1.0),), "has no adapter 2"),
        (((-1, 1.0),), "has no adapter -1"),
        ((("red", 1.0), (0, 0.5)), "'red' is named twice"),
        ({"red": 1e9}, "lora must be between -100 and 100"),
        (tuple((name, 1.0) for name in "abcdefghijklmnopq"), "names 17 adapters, at most 16"),
    ],
)
async def test_what_cannot_be_meant_is_refused(runtime: Runtime, adapters: Any, text: str) -> None:
    """SPEC K6: naming those there are."""
    with pytest.raises(InvalidRequestError, match=text) as caught:
        await tokens(runtime, lora=adapters)
    assert caught.value.param == "lora"


async def test_names_resolve_to_the_model_that_has_them(runtime: Runtime) -> None:
    """SPEC K6: an adapter's name is a model's for requests; nothing else is."""
    assert (runtime.resolve("red").adapter, runtime.resolve("red").id) == ("red", runtime.resolve(None).id)
    assert [spec.name for spec in runtime.models[0].adapters] == ["red", "blue"]
    with pytest.raises(ModelNotFoundError):
        runtime.resolve("green")
    with pytest.raises(ModelNotFoundError):
        await runtime.unload_model("red")


def test_a_sealed_request_says_all_there_is_to_say() -> None:
    """SPEC L3: a restart, or another program, has no defaults to look up."""
    known = (AdapterSpec(name="z", path="z", scale=0.25), AdapterSpec(name="a", path="a"))
    info = msgspec.structs.replace(model_info("m", "m.gguf"), adapters=known)
    request = GenerateRequest(prompt="x", sampling=Sampling(), adapters=((0, None), ("a", -2.0)))
    found = resolved(request, info, None)
    assert found.adapters == (("a", -2.0), ("z", 0.25))
    assert found.sampling.seed is not None


async def test_a_choice_by_an_adapters_name_is_refused_and_not_made_without_it(runtime: Runtime) -> None:
    """SPEC K6, D5: its scores come from the model alone, which is not what was asked for."""
    for asked in ({"model": "red"}, {"lora": "red"}):
        with pytest.raises(UnsupportedError, match="without lora") as caught:
            await runtime.choose(PROMPT, ["a", "b"], **asked)
        assert caught.value.param == "lora"
    assert len((await runtime.choose(PROMPT, ["a", "b"])).results) == 2
