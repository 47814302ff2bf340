"""Prompts that are padded to a tile on a CPU: nothing of the padding is left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stoker.backends.llama import row_tiles
from stoker.backends.llama.binding import accelerators, llama
from stoker.backends.llama.cells import TiledPool
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import StepAbortedError, StepFailedError
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
    """The rows of each native call; every prompt of less than a tile is padded."""
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
    given.setdefault("pads_prompts", True)
    return LlamaContext(model, ContextOptions(**given))  # type: ignore[arg-type]


def grown(context: LlamaContext, seq: int, *texts: tuple[int, ...]) -> np.ndarray:
    """A sequence that gets these after each other; the row of its last token."""
    for text in texts:
        rows = context.step(BatchPlan((PlanItem(seq, context.lengths[seq], text, 1),)))
    return rows[0].copy()


def states_of(context: LlamaContext) -> dict[int, bytes]:
    """The cells of each sequence as the library has them."""
    return {seq: bytes(context.read_state(seq)) for seq in range(4) if context.lengths[seq]}


def test_padding_changes_nothing_but_the_way_it_is_rounded(
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
        assert len(tiled.read_state(seq)) == len(plain.read_state(seq)), (
            "cells of the padding are still there"
        )
    tiled.close()
    plain.close()


def test_a_pool_without_room_for_padding_computes_the_step_as_it_is(
    model: LlamaModel, num_computed: list[int]
) -> None:
    """Q24: nobody's cells are in the way, and nobody loses any."""
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


@pytest.mark.parametrize("code", [2, -3])
def test_a_step_that_failed_leaves_none_either(
    model: LlamaModel, num_computed: list[int], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Q24, Q12: ended or failed with its cells written; a long step after it keeps all of its tokens."""
    context, other, decode = context_of(model), context_of(model), llama.llama_decode
    grown(context, 0, FIRST)
    expected = states_of(context)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_decode", lambda *given: decode(*given) or code)
        with pytest.raises(StepAbortedError if code > 0 else StepFailedError):
            grown(context, 0, NEXT)
    assert states_of(context) == expected
    row = grown(context, 0, NEXT * 2, (9,))
    assert num_computed == [64, 64, 80, 1]
    assert np.array_equal(row, grown(other, 0, FIRST, NEXT * 2, (9,)))
    assert states_of(context) == states_of(other)
    context.close()
    other.close()


def test_a_part_of_a_step_is_not_padded(model: LlamaModel, num_computed: list[int]) -> None:
    """Q24, K6: where adapters cut a step in several calls, cells of the later ones are not counted yet."""
    context = context_of(model)
    first, second = PlanItem(0, 0, FIRST, 1), PlanItem(1, 0, NEXT, 1)
    context._cells.prepare(BatchPlan((first, second)))
    for item in (first, second):
        plan = BatchPlan((item,))
        assert context._cells.padded(plan, NUM_CELLS) is plan
    grown(context, 0, FIRST)
    assert num_computed == [len(FIRST), len(NEXT), 64]
    context.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"key_type": KeyType.BF16},
        {"flash_attention": FlashAttention.OFF},
        {"n_ubatch": 32},
        {"has_streams": True},
        {"pads_prompts": False},
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
