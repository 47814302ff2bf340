"""A decoder in an engine process of its own, adapted a request, against models with adapters merged in."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from stoker import Runtime
from stoker.errors import ModelFileError
from tiny_adapters import write_adapter, write_merged
from tiny_models import write_llama

PROMPT = "hello world, hello to everybody who reads this"
NUM_TOKENS = 40


@pytest.fixture
def folder(tmp_path):
    """A base, two adapters, and the base with each of them, and with both, merged in."""
    base = write_llama(tmp_path / "base.gguf")
    red, blue = write_adapter(tmp_path / "red.gguf", 1), write_adapter(tmp_path / "blue.gguf", 2)
    write_merged(tmp_path / "merged-red.gguf", base, (red, 1.0))
    write_merged(tmp_path / "merged-blue.gguf", base, (blue, 0.5))
    write_merged(tmp_path / "merged-both.gguf", base, (red, 0.7), (blue, 0.5))
    return tmp_path


def runtime_of(folder, *names: str, **fields: Any) -> Runtime:
    """These files, by their names."""
    first, *others = (str(folder / f"{name}.gguf") for name in names)
    settings = {"ctx_size": 1024, "threads": 1, "run_dir": folder / "run", "slots": 4, "repeatable": "on"}
    return Runtime(first, models=tuple(others), **settings | fields)


async def tokens(runtime: Runtime, **fields: Any) -> list[int]:
    """Token ids of a greedy answer.

    Its best logits are further apart than batches of other shapes shift them, with these models.
    """
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0, **fields}
    return [token async for delta in runtime.generate(PROMPT, **fields) for token in delta.token_ids]


WAYS: dict[str, dict[str, Any]] = {
    "base": {},
    "merged-red": {"model": "red"},
    "merged-blue": {"lora": "blue"},
    "merged-both": {"lora": {"red": 0.7, "blue": 0.5}},
}


@pytest.mark.long
async def test_adapted_requests_side_by_side_say_what_merged_models_say(folder):
    """SPEC K6: in mixed steps, and across a kill of the engine in the middle."""
    async with runtime_of(folder, *WAYS) as reference:
        expected = [await tokens(reference, model=name) for name in WAYS] * 2
    assert len({tuple(each) for each in expected}) == len(WAYS)
    lora = (f"red={folder / 'red.gguf'}", f"blue={folder / 'blue.gguf'}@0.5")
    async with runtime_of(folder, "base", lora=lora) as runtime:
        asked = [tokens(runtime, cache=False, **way) for way in (*WAYS.values(), *WAYS.values())]
        assert await asyncio.gather(*asked) == expected
        killed = (await runtime.status()).pid
        asked = [tokens(runtime, **way) for way in (*WAYS.values(), *WAYS.values())]
        answers = asyncio.gather(*asked)
        async for delta in runtime.generate(PROMPT, model="red", temperature=0.0, max_tokens=5):
            last = delta
        os.kill(killed, signal.SIGKILL)
        assert await answers == expected
        assert last.finish_reason
        await tokens(runtime, max_tokens=1)  # by another engine, however soon the answers had been whole
        assert (await runtime.status()).pid != killed
        assert [model.memory_bytes["adapters"] > 0 for model in runtime.models] == [True]


async def test_an_adapter_of_another_model_fails_the_start_by_both_names(folder):
    """SPEC K6: before an engine is started."""
    write_adapter(folder / "odd.gguf", targets={"blk.0.attn_q.weight": (64, 64)})
    with pytest.raises(ModelFileError, match=r"odd\.gguf does not fit base\.gguf"):
        await runtime_of(folder, "base", lora=(f"odd={folder / 'odd.gguf'}",)).start()
