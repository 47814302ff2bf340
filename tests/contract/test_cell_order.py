"""Where a native context puts tokens, and that their order there is kept (docs/adr/0019)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from stoker.backends.llama.cells import OrderedPool
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.state import SequenceStates
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import PoolFullError
from tiny_models import TOKENS, quantised, write_llama

NUM_CELLS, NUM_SEQUENCES = 256, 6
_COUNTS = struct.Struct("<IIII")  # magic, sequence, streams, cells
_CELL = struct.Struct("<iIi")  # position, number of owners, the owner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    """A tiny decoder whose weights are quantised."""
    folder = tmp_path_factory.mktemp("models")
    path = quantised(write_llama(folder / "f32.gguf"), folder / "q4_1.gguf", "Q4_1")
    model = LlamaModel(ModelOptions(path=path, use_extra_bufts=False))
    yield model
    model.close()


def context_of(model: LlamaModel, *, keeps_order: bool) -> LlamaContext:
    """A small pool for a few sequences."""
    return LlamaContext(
        model,
        ContextOptions(
            num_cells=NUM_CELLS,
            n_batch=64,
            num_sequences=NUM_SEQUENCES,
            num_threads=1,
            key_type=KeyType.BF16,
            keeps_order=keeps_order,
        ),
    )


def row(context: LlamaContext, seq: int, tokens: list[int]) -> np.ndarray:
    """Append tokens; the last one's logits."""
    return context.step(BatchPlan((PlanItem(seq, context.lengths[seq], tokens, 1),)))[0].copy()


def positions(context: LlamaContext, seq: int) -> list[int]:
    """The positions of a sequence's tokens, in the order of their cells in the library."""
    payload = context.read_state(seq).tobytes()
    *_, count = _COUNTS.unpack_from(payload)
    return [_CELL.unpack_from(payload, _COUNTS.size + at * _CELL.size)[0] for at in range(count)]


@pytest.mark.parametrize("keeps_order", [True, False])
def test_a_sequence_that_grows_beside_a_hole_keeps_its_bits(model: LlamaModel, *, keeps_order: bool) -> None:
    """SPEC Q4, Equal: a fork too; without the order, it grows into the hole before its own tokens."""
    context = context_of(model, keeps_order=keeps_order)
    prompt, rest = list(range(3, 43)), list(range(50, 80))
    row(context, 0, prompt)
    alone = [row(context, 0, [token]) for token in rest]
    context.drop(0)
    row(context, 1, list(range(90, 120)))
    row(context, 2, prompt)
    context.fork(2, 3, len(prompt))
    row(context, 2, [7])
    context.drop(1)
    forked = [row(context, 3, [token]) for token in rest]
    assert all(map(np.array_equal, forked, alone)) is keeps_order
    context.close()


@pytest.mark.long
def test_every_sequence_lies_in_the_order_of_its_tokens_where_the_map_says(model: LlamaModel) -> None:
    """SPEC C3, Q4: whatever is forked, cut, dropped, taken out and put back, over many thousand calls."""
    context = context_of(model, keeps_order=True)
    states = SequenceStates(model, context, "tiny")
    order = context._cells
    assert isinstance(order, OrderedPool)
    random = Random(19)
    for _ in range(1500):
        change(context, states, random)
        order.map.check()
        for seq in range(NUM_SEQUENCES):
            cells, length = order.map.cells(seq), context.lengths[seq]
            assert len(cells) == length
            assert cells == sorted(cells)
            assert positions(context, seq) == list(range(length)) or length == 0
    context.close()


def change(context: LlamaContext, states: SequenceStates, random: Random) -> None:
    """One call of any kind."""
    seq, other = random.sample(range(NUM_SEQUENCES), 2)
    held = context.lengths[seq]
    match random.choice(["step", "step", "step", "fork", "trim", "drop", "move"]):
        case "fork" if held and not context.lengths[other]:
            context.fork(seq, other, random.randint(1, held))
        case "trim" if held:
            context.trim(seq, random.randint(0, held))
        case "drop":
            context.drop(seq)
        case "move" if held and not context.lengths[other]:
            data = states.export(seq)
            context.drop(seq)
            states.restore(other, data)
        case _:
            seqs = random.sample(range(NUM_SEQUENCES), random.randint(1, NUM_SEQUENCES))
            plan = BatchPlan(tuple(item(context, seq, random) for seq in seqs))
            assert isinstance(context._cells, OrderedPool)
            is_full = plan.num_tokens > NUM_CELLS - context._cells.map.num_used
            try:
                context.step(plan)
            except PoolFullError:
                assert is_full
            else:
                assert not is_full


def item(context: LlamaContext, seq: int, random: Random) -> PlanItem:
    """A few more tokens."""
    tokens = [random.randrange(len(TOKENS)) for _ in range(random.choice([1, 1, 1, 2, 9]))]
    return PlanItem(seq, context.lengths[seq], tokens, 1)
