"""Models whose load ends the engine: an engine in a process of its own, the fake backend and tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from stoker import Runtime
from stoker.errors import LoadCrashedError, StokerError

FAKE = "fake:id=good,eog_period=0,step_delay_s=0.005"
NUM_TOKENS = 100


@asynccontextmanager
async def running(tmp_path: Path, model: str | Path) -> AsyncIterator[Runtime]:
    """A runtime with folders of its own."""
    folders = {name: tmp_path / name for name in ("cache_dir", "run_dir", "models_dir")}
    async with Runtime(model=str(model), isolation="process", slots=2, ctx_size=512, **folders) as runtime:
        yield runtime


async def text_of(runtime: Runtime, model: str, num_tokens: int) -> str:
    """One greedy answer, whole."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    return "".join([delta.text async for delta in runtime.generate("hello", **fields)])


async def refusal(runtime: Runtime, model: str) -> StokerError:
    """Why a request is refused."""
    with pytest.raises(StokerError) as caught:
        await text_of(runtime, model, 1)
    return caught.value


@pytest.mark.long
async def test_a_crash_before_the_first_progress_is_charged_to_the_load(tmp_path: Path) -> None:
    """L3: the engine had said that it began; after two the model is refused with the native text."""
    async with running(tmp_path, FAKE) as runtime:
        undisturbed = await text_of(runtime, "good", NUM_TOKENS)
        text, error = await asyncio.gather(
            text_of(runtime, "good", NUM_TOKENS),
            runtime.load_model("fake:id=bad,load_aborts=1"),
            return_exceptions=True,
        )
        assert text == undisturbed
        assert isinstance(error, LoadCrashedError)
        assert "ASSERT(!load_aborts) failed" in error.message
        assert isinstance(await refusal(runtime, "bad"), LoadCrashedError)
        assert (await runtime.status()).restarts == 2


@pytest.mark.long
async def test_a_file_that_crashes_llama_cpp_is_refused_and_its_successor_served(tmp_path: Path) -> None:
    """L3, R9: one engine ends of it, then a child; the other model's answer is whole and the same."""
    models = tmp_path / "models_dir"
    good = tiny_models.write_llama(models / "good.gguf")  # its kind is remembered as safe
    bad = tiny_models.write_crashing_llama(models / "bad.gguf")
    async with running(tmp_path, good) as runtime:
        undisturbed = await text_of(runtime, "good", NUM_TOKENS)
        text, error = await asyncio.gather(
            text_of(runtime, "good", NUM_TOKENS), runtime.load_model("bad"), return_exceptions=True
        )
        assert text == undisturbed
        assert isinstance(error, LoadCrashedError)
        assert "GGML_ASSERT" in error.message
        assert (await runtime.status()).restarts == 1
        assert isinstance(await refusal(runtime, "bad"), LoadCrashedError)
        with pytest.raises(LoadCrashedError, match="GGML_ASSERT"):
            await runtime.load_model("bad")  # tried once more, because somebody asked, and in a child
        assert (await runtime.status()).restarts == 1
        assert await text_of(runtime, "good", NUM_TOKENS) == undisturbed
        bad.unlink()
        tiny_models.write_llama(bad)
        assert await text_of(runtime, "bad", NUM_TOKENS) == undisturbed
        assert (await runtime.status()).restarts == 1
