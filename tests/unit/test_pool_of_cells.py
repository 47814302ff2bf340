"""`kv_cells` and `ctx_size`: how many cells all slots share, and the most one request may use (SPEC I2)."""

import pytest

from memory_stand_in import MIB
from stoker import Runtime
from stoker.backends.llama.backend import load
from stoker.client.models.loading import SpecChanges
from stoker.errors import ContextLengthError
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import FinishReason
from stoker.models.memory_estimate.fit import Estimate, MemoryBudget, weigh
from tiny_models import write_llama


@pytest.mark.parametrize(
    ("ctx_size", "kv_cells", "most", "cells"),
    [(512, None, 512, 512), (512, 2048, 512, 2048), (2048, 512, 512, 512), (0, 512, 512, 512)],
)
async def test_both_mean_what_they_say(tmp_path, ctx_size, kv_cells, most, cells):
    """I2: reported, kept to by requests, and counted by the engine."""
    settings = {"ctx_size": ctx_size, "kv_cells": kv_cells, "isolation": "thread", "run_dir": tmp_path}
    async with Runtime("fake:eog_period=0", **settings) as runtime:
        assert runtime.resolve("fake").n_ctx == most
        assert (await runtime.status()).engine.kv_cells_total == cells
        last = [d async for d in runtime.generate([65] * (most - 20), max_tokens=1000, temperature=0.0)][-1]
        assert (last.finish_reason, last.usage.completion_tokens) == (FinishReason.LENGTH, 20)
        with pytest.raises(ContextLengthError):
            await anext(runtime.generate([65] * most, max_tokens=1))


def test_llama_cpp_gets_the_cells_and_a_request_the_context(tmp_path):
    """I2, K7: a pool is larger than what one request may use."""
    path = str(write_llama(tmp_path / "m.gguf"))
    spec = ModelSpec(id="m", path=path, n_ctx=100, num_cells=512, num_slots=2, n_batch=64, num_threads=1)
    with load(spec, cache_dir=tmp_path) as backend:
        assert (backend.capabilities.n_ctx, backend.capabilities.num_cells) == (100, 512)


def test_a_load_with_a_context_of_its_own_has_a_pool_of_that_size():
    """I2: `ctx_size` of a load is what all its slots share."""
    spec = ModelSpec(id="m", path="m", n_ctx=512, num_cells=2048)
    changed = SpecChanges(n_ctx=4096).applied(spec)
    assert (changed.pool_cells, changed.most_tokens) == (4096, 4096)
    assert SpecChanges(num_slots=2).applied(spec).pool_cells == 2048


def test_what_is_short_of_memory_loses_cells_before_context():
    """R2: half the pool, and of the context only what no longer fits into it."""

    def estimate(spec):
        return Estimate(lines={"kv": spec.pool_cells * MIB}, n_ctx=spec.pool_cells)

    spec = ModelSpec(id="m", path="m", n_ctx=4096, num_cells=16384)
    for room, expected in ((8192, (8192, 4096)), (2048, (2048, 2048))):
        budget = MemoryBudget(free_bytes=room * MIB, limit_bytes=2**60, margin_bytes=0)
        found = weigh(spec, estimate, budget)
        assert (found.spec.num_cells, found.spec.n_ctx) == expected
        assert found.degraded == (f"context {room} instead of 16384",)
