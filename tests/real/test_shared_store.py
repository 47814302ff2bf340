"""Two machines with a model of the same content share prefixes, each with its own engine (SPEC C19, C20)."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker import GenerateRequest, Runtime, Sampling
from stoker.ipc.events import Delta, Finished
from stoker.ipc.shared_store import SharedStoreStatus
from stoker.models import trials
from tiny_models import write_llama

PROMPT = tuple(3 + at * 7 % 250 for at in range(300))
WAIT_S = 60.0


def machine(model: Path, folder: Path, store: Path, **fields: Any) -> Runtime:
    """A machine with an engine process, one cache folder for what trials find, and the store."""
    given = {"slots": 2, "ctx_size": 1024, "threads": 1, "repeatable": "on", "cache_disk_bytes": 0}
    folders = {"cache_dir": model.parents[1], "run_dir": folder}
    return Runtime(str(model), prefix_store=str(store), **given | folders | fields)


async def store_of(runtime: Runtime) -> SharedStoreStatus:
    """What the engine knows of the store."""
    status = (await runtime.status()).engine.cache.shared
    assert status is not None
    return status


async def until(runtime: Runtime, name: str, least: int) -> None:
    """That much of it is known."""
    async with asyncio.timeout(WAIT_S):
        while getattr(await store_of(runtime), name) < least:  # noqa: ASYNC110 - it tells only who asks
            await asyncio.sleep(0.05)


async def answer(runtime: Runtime) -> tuple[list[int], int, Any]:
    """Tokens, and what was cached of the prompt."""
    request = GenerateRequest(prompt=PROMPT, max_tokens=12, sampling=Sampling(temperature=0.7, seed=5))
    tokens: list[int] = []
    async for event in runtime.stream(request):
        if isinstance(event, Delta):
            tokens += event.token_ids
        if isinstance(event, Finished):
            usage = event.usage
    return tokens, usage.cached_tokens, usage.cache_source


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model on two machines, with other times and at other places."""
    one = write_llama(tmp_path_factory.mktemp("one") / "m.gguf", context=2048)
    other = tmp_path_factory.mktemp("other") / "copied.gguf"
    shutil.copyfile(one, other)
    os.utime(other, (1_000_000_000, 1_000_000_000))
    return one, other


@pytest.mark.long
async def test_the_second_machine_goes_on_from_what_the_first_computed(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """C19, C20: the same tokens; an engine that was restarted, and that had another salt, are told apart."""
    async with machine(models[0], tmp_path / "a", tmp_path / "store") as first:
        expected, cached, source = await answer(first)
        assert (cached, source) == (0, None)
        await until(first, "num_files", 1)
    async with machine(models[1], tmp_path / "b", tmp_path / "store") as second:
        await answer_nothing(second)
        await until(second, "num_usable", 1)
        assert await answer(second) == (expected, len(PROMPT) - 1, "store")
        assert (await store_of(second)).problem == ""


async def answer_nothing(runtime: Runtime) -> None:
    """Have the model loaded without a token computed."""
    await runtime.tokenize("a")


@pytest.mark.long
async def test_machines_that_round_otherwise_are_apart_where_texts_are_repeatable(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C20: a state of another CPU would change the text in the end; without that promise it is used."""
    for repeatable, source in (("on", None), ("off", "store")):
        store, fields = tmp_path / repeatable, {"isolation": "thread", "repeatable": repeatable}
        async with machine(models[0], tmp_path / f"a{repeatable}", store, **fields) as first:
            await answer(first)
            await until(first, "num_files", 1)
        with monkeypatch.context() as patch:
            patch.setattr(trials, "cpu_identity", lambda: ("another",))
            async with machine(models[1], tmp_path / f"b{repeatable}", store, **fields) as second:
                await answer_nothing(second)
                await until(second, "num_files", 1)
                assert (await answer(second))[2] == source
