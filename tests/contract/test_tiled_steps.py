"""Steps of a CPU that get rows of no use: nothing of these is left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stoker.backends.llama import row_tiles
from stoker.backends.llama.binding import accelerators
from stoker.backends.llama.cells import TiledPool
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StepAbortedError
from stoker.ipc.model import FlashAttention
from tiny_models import TINY, write_llama

pytestmark = pytest.mark.skipif(bool(accelerators()), reason="devices have tiles of their own")
NUM_CELLS = 256
FIRST = tuple(range(3, 63))
NEXT = tuple(range(5, 45))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    """A tiny decoder."""
    model = LlamaModel(ModelOptions(path=write_llama(tmp_path_factory.mktemp("models") / "m.gguf")))
    yield model
    model.close()


@pytest.fixture
def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each native call; every step of two to 63 is filled up."""
    monkeypatch.setattr(row_tiles, "LEAST_GAIN", 0.0)
    counts: list[int] = []
    padded = TiledPool.padded

    def counted(self: TiledPool, plan: BatchPlan, most: int) -> BatchPlan:
        found = padded(self, plan, most)
        counts.append(found.num_tokens)
        return found

    monkeypatch.setattr(TiledPool, "padded", counted)
    return counts


def context_of(model: LlamaModel, **fields: object) -> LlamaContext:
    """A small pool for a few sequences."""
    given = {"num_cells": NUM_CELLS, "n_batch": 128, "num_sequences": 4, "num_threads": 1} | fields
    given.setdefault("fills_tiles", True)
    return LlamaContext(model, ContextOptions(**given))  # type: ignore[arg-type]


def grown(context: LlamaContext, seq: int, *texts: tuple[int, ...]) -> np.ndarray:
    """A sequence that gets these after each other; the row of its last token."""
    for text in texts:
        rows = context.step(BatchPlan((PlanItem(seq, context.lengths[seq], text, 1),)))
    return rows[0].copy()


def positions_of(context: LlamaContext) -> dict[int, bytes]:
    """What the library itself says of each sequence."""
    return {seq: bytes(context.read_state(seq))[:2048] for seq in range(4) if context.lengths[seq]}


def test_rows_of_no_use_change_nothing_but_the_way_it_is_rounded(
    model: LlamaModel, num_computed: list[int]
) -> None:
    """Q24: the text goes on from its own last token, beside others, with the same cells in use."""
    tiled, plain = context_of(model), context_of(model, key_type=KeyType.BF16)
    for context in (tiled, plain):
        grown(context, 0, FIRST)
    rows = []
    for context in (tiled, plain):
        both = (PlanItem(1, 0, FIRST[:9], 1), PlanItem(0, len(FIRST), NEXT[:30], 1))
        found = [context.step(BatchPlan(both)).copy()]
        found += [grown(context, seq, (9,))[None] for seq in (0, 1)]
        rows.append(np.concatenate(found))
    assert num_computed == [64, 64, 1, 1]
    assert [tiled.lengths[seq] for seq in (0, 1)] == [len(FIRST) + 31, 10]
    assert np.abs(rows[0] - rows[1]).max() < 0.02 * np.abs(rows[1]).max()
    assert np.array_equal(rows[0].argmax(axis=1), rows[1].argmax(axis=1))
    for seq in (0, 1):
        assert len(tiled.read_state(seq)) == len(plain.read_state(seq)), "cells of the rows are still there"
    tiled.close()
    plain.close()


def test_a_pool_without_room_for_them_computes_the_step_as_it_is(
    model: LlamaModel, num_computed: list[int]
) -> None:
    """Q24: neither cells that others have nor the end of a context are in the way."""
    context = context_of(model)
    grown(context, 0, FIRST * 2, FIRST[:40])
    grown(context, 1, FIRST[:40])
    grown(context, 2, FIRST[:50])
    context.drop(1)
    context.drop(2)
    grown(context, 0, FIRST[:40])
    grown(context, 0, FIRST[:20])
    assert num_computed == [120, 64, 64, 50, 64, 20]
    assert context.lengths[0] == 220
    context.close()


def test_a_step_that_was_ended_takes_them_back_too(model: LlamaModel, num_computed: list[int]) -> None:
    """Q24, Q16: what follows is as if it had not been."""
    context = context_of(model)
    assert context.abort_flag is not None
    grown(context, 0, FIRST)
    expected = positions_of(context)
    context.abort_flag.abort_step()
    with pytest.raises(StepAbortedError):
        grown(context, 0, NEXT)
    context.abort_flag.allow_steps()
    assert positions_of(context) == expected
    row = grown(context, 0, (9,))
    assert num_computed == [64, 64, 1]
    other = context_of(model)
    assert np.array_equal(row, grown(other, 0, FIRST, (9,)))
    context.close()
    other.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"key_type": KeyType.BF16},
        {"flash_attention": FlashAttention.OFF},
        {"n_ubatch": 32},
        {"has_streams": True},
        {"fills_tiles": False},
    ],
)
def test_only_where_attention_has_tiles(model: LlamaModel, fields: dict[str, object]) -> None:
    """Q24: not over keys of another type than the values, nor in products of matrices."""
    for given, is_tiled in (({}, True), (fields, False)):
        context = context_of(model, **given)
        assert isinstance(context._cells, TiledPool) is is_tiled
        context.close()


def test_a_model_that_cannot_take_tokens_back_has_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Q24: its state is that of all tokens that it has read."""
    model = LlamaModel(ModelOptions(path=TINY["rwkv7"](tmp_path_factory.mktemp("recurrent") / "m.gguf")))
    context = context_of(model)
    assert not isinstance(context._cells, TiledPool)
    context.close()
    model.close()
