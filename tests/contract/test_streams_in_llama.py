"""Streams in a native context: copies at the right time, passes as foreseen, states as those of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from stoker.backends.llama import binding
from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.binding import llama
from stoker.backends.llama.cells import Streams
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.state import SequenceStates
from stoker.backends.protocol.backend import BatchPlan, PlanItem, Rows
from stoker.backends.stream_map import num_passes
from stoker.errors import PoolFullError
from stoker.ipc.model import KVLayout, ModelSpec
from stoker.models.memory_estimate.estimate import estimator_of
from tiny_models import TOKENS, quantised, write_llama

NUM_CELLS, NUM_SEQUENCES, N_BATCH, N_UBATCH = 256, 6, 64, 16
TEXT = list(range(3, 43))


@pytest.fixture(scope="module")
def model(tiny_decoder: Path) -> Iterator[LlamaModel]:
    """A tiny decoder with weights in f32."""
    model = LlamaModel(ModelOptions(path=tiny_decoder, use_extra_bufts=False))
    yield model
    model.close()


@pytest.fixture
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    """A few streams."""
    context = context_of(model)
    yield context
    context.close()


def context_of(model: LlamaModel, *, has_streams: bool = True, is_off_host: bool = False) -> LlamaContext:
    """A small context."""
    return LlamaContext(
        model,
        ContextOptions(
            num_cells=NUM_CELLS,
            n_batch=N_BATCH,
            num_sequences=NUM_SEQUENCES,
            num_threads=1,
            has_streams=has_streams,
            n_ubatch=N_UBATCH,
            is_off_host=is_off_host,
        ),
    )


def feed(context: LlamaContext, *items: tuple[int, list[int]]) -> Rows:
    """One step that appends tokens to sequences, as the runner makes it; a row for the last of each."""
    plan = BatchPlan(tuple(PlanItem(seq, context.lengths[seq], tokens, 1) for seq, tokens in items))
    order = context.arrange(plan)
    rows = context.step(BatchPlan(tuple(plan.items[place] for place in order)))
    found = np.empty_like(rows)
    found[list(order)] = rows
    return found


def test_each_sequence_has_as_many_cells_as_a_request_may_use(context: LlamaContext) -> None:
    """SPEC C15: others hold theirs whatever one takes; one too many is a full pool and changes nothing."""
    assert (context.capacity, context.num_cells) == (NUM_CELLS, NUM_CELLS * NUM_SEQUENCES)
    for seq in range(NUM_SEQUENCES):
        for _ in range(NUM_CELLS // N_BATCH):
            feed(context, (seq, [41] * N_BATCH))
    with pytest.raises(PoolFullError):
        feed(context, (2, [1]))
    assert [context.lengths[seq] for seq in range(NUM_SEQUENCES)] == [NUM_CELLS] * NUM_SEQUENCES
    context.trim(2, NUM_CELLS - 1)
    feed(context, (2, [1]))


def test_a_chain_of_forks_reads_the_same_before_and_after_it_is_copied(context: LlamaContext) -> None:
    """SPEC C15: a state asked of a copy that the library has not made yet is that of its source."""
    states = SequenceStates(context._model, context, "tiny")
    feed(context, (0, TEXT))
    context.fork(0, 1, 30)
    context.fork(1, 2, 30)
    context.drop(0)
    context.drop(1)
    asked = states.export(2)
    expected = feed(context, (2, [7]))
    states.restore(3, asked)
    assert np.array_equal(feed(context, (3, [7])), expected)


def test_a_state_may_come_into_the_source_of_a_copy_that_was_not_made(context: LlamaContext) -> None:
    """SPEC C15: the copy has what the source held when it was ordered."""
    states = SequenceStates(context._model, context, "tiny")
    feed(context, (0, TEXT), (1, [5] * 20))
    other = states.export(1)
    context.fork(0, 2, len(TEXT))
    context.drop(0)
    states.restore(0, other)
    copied, restored, original = feed(context, (2, [7])), feed(context, (0, [8])), feed(context, (1, [8]))
    assert np.abs(restored - original).max() < 1e-4
    context.drop(3)
    feed(context, (3, TEXT))
    assert np.abs(feed(context, (3, [7])) - copied).max() < 1e-4


def test_states_go_between_streams_and_a_pool(model: LlamaModel, context: LlamaContext) -> None:
    """SPEC C1, C15: what was stored in one layout of cells is used in the other."""
    pool = context_of(model, has_streams=False)
    in_pool, in_streams = SequenceStates(model, pool, "tiny"), SequenceStates(model, context, "tiny")
    assert in_pool.fingerprint == in_streams.fingerprint
    feed(context, (4, [9]), (3, TEXT))
    assert bytes(in_streams.export(3)) != b""
    in_pool.restore(5, in_streams.export(3))
    expected = feed(context, (3, [7]))
    assert np.abs(feed(pool, (5, [7])) - expected).max() < 1e-4
    in_streams.restore(1, in_pool.export(5))
    assert np.abs(feed(pool, (5, [8])) - feed(context, (1, [8]))).max() < 1e-4
    pool.close()


def test_rows_come_in_the_order_of_the_plan(context: LlamaContext) -> None:
    """SPEC C15: also of a plan that is not in the order of the streams."""
    feed(context, (0, TEXT), (1, [4]), (2, [5, 6]))
    for seq in (0, 1, 2):
        context.fork(seq, seq + 3, context.lengths[seq])
    parts = [PlanItem(2, 2, [9, 8, 7], 2), PlanItem(0, len(TEXT), [9], 1), PlanItem(1, 1, [9], 1)]
    together = context.step(BatchPlan(tuple(parts))).copy()
    forked = [PlanItem(part.seq + 3, part.start, part.tokens, part.num_logits) for part in parts]
    alone = np.concatenate([context.step(BatchPlan((part,))).copy() for part in forked])
    assert together.shape == alone.shape == (4, len(TOKENS))
    assert np.abs(together - alone).max() < 1e-4


def test_a_step_makes_as_many_passes_as_foreseen(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC C15: gaps and slices cut a step as `num_passes` says."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")  # the library tells each part of a step
    context = context_of(model)
    cells = context._cells
    assert isinstance(cells, Streams)
    for seq in range(NUM_SEQUENCES):
        feed(context, (seq, [seq + 3] * 4))
    random, told = Random(5), set()
    for _ in range(30):
        seqs = random.sample(range(NUM_SEQUENCES), random.randint(1, NUM_SEQUENCES))
        counts = {seq: random.choice([1, 1, 3, 10]) for seq in seqs}
        items = (PlanItem(seq, context.lengths[seq], [7] * count, 1) for seq, count in counts.items())
        by_stream = {cells.map.stream(seq): count for seq, count in counts.items()}
        foreseen = num_passes(by_stream, context.n_ubatch)
        with native_lines() as lines:
            context.step(BatchPlan(tuple(items)))
        assert sum(b"added ubatch to split" in line for line in lines) == foreseen
        told.add(foreseen)
    assert {1, 2, 3} <= told
    context.close()


@contextmanager
def native_lines() -> Iterator[list[bytes]]:
    """What the library says meanwhile, details too."""
    lines: list[bytes] = []
    listener = llama.llama_log_callback(lambda _level, text, _data: lines.append(text))
    llama.llama_log_set(listener, None)
    try:
        yield lines
    finally:
        llama.llama_log_set(binding._receive_native, None)


def test_whatever_comes_and_goes_rows_are_those_of_a_pool(tmp_path: Path) -> None:
    """SPEC C15: random steps, forks, trims, drops and moves; to the bit where the pool keeps its order."""
    path = quantised(write_llama(tmp_path / "f32.gguf"), tmp_path / "q4_1.gguf", "Q4_1")
    model = LlamaModel(ModelOptions(path=path, use_extra_bufts=False))
    options = ContextOptions(
        num_cells=NUM_CELLS,
        n_batch=N_BATCH,
        num_sequences=NUM_SEQUENCES,
        num_threads=1,
        key_type=KeyType.BF16,
        has_streams=True,
    )
    ordered = replace(options, num_cells=2048, keeps_order=True, has_streams=False)
    contexts = streams, pool = LlamaContext(model, options), LlamaContext(model, ordered)
    moved = tuple(SequenceStates(model, each, "tiny") for each in contexts)
    random = Random(21)
    for _ in range(500):
        change(contexts, moved, random)
        cells = streams._cells
        assert isinstance(cells, Streams)
        cells.map.check()
        assert all(streams.lengths[seq] == pool.lengths[seq] for seq in range(NUM_SEQUENCES))
        assert sorted(cells.map.streams) == [seq for seq in range(NUM_SEQUENCES) if streams.lengths[seq]]
    streams.close()
    pool.close()
    model.close()


def change(contexts: tuple[LlamaContext, ...], moved: tuple[SequenceStates, ...], random: Random) -> None:
    """The same call of any kind on each of the contexts; a step's rows are near each other."""
    seq, other = random.sample(range(NUM_SEQUENCES), 2)
    held, is_free = contexts[0].lengths[seq], not contexts[0].lengths[other]
    match random.choice(["step", "step", "step", "fork", "trim", "drop", "move"]):
        case "fork" if held and is_free:
            length = random.randint(1, held)
            for context in contexts:
                context.fork(seq, other, length)
        case "trim" if held:
            length = random.randint(0, held)
            for context in contexts:
                context.trim(seq, length)
        case "move" if held and is_free:
            for context, states in zip(contexts, moved, strict=True):
                data = states.export(seq)
                context.drop(seq)
                states.restore(other, data)
        case "step":
            seqs = random.sample(range(NUM_SEQUENCES), random.randint(1, NUM_SEQUENCES))
            seqs = [each for each in seqs if contexts[0].lengths[each] < NUM_CELLS - 9]
            items = [
                (each, [random.randrange(len(TOKENS)) for _ in range(random.choice([1, 1, 1, 2, 9]))])
                for each in seqs
            ]
            if items:
                in_streams, in_pool = (feed(context, *items) for context in contexts)
                assert np.array_equal(in_streams, in_pool)
        case _:
            for context in contexts:
                context.drop(seq)


@pytest.mark.parametrize("has_streams", [True, False])
def test_what_a_copy_costs_is_found_without_changing_anything(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, *, has_streams: bool
) -> None:
    """SPEC C16: in streams by bytes, in a device's pool by the time of a few tokens, for all of them."""
    seconds = iter(range(100))
    monkeypatch.setattr("stoker.backends.llama.cells.time.perf_counter", lambda: float(next(seconds)))
    options = ContextOptions(
        num_cells=2048,
        n_batch=N_BATCH,
        num_sequences=3,
        num_threads=1,
        is_off_host=True,
        has_streams=has_streams,
    )
    context = LlamaContext(model, options)
    states = SequenceStates(model, context, "tiny")
    for seq in (0, 1, 0):
        feed(context, (seq, [7] * N_BATCH))
    before = bytes(states.export(0))
    short_s, long_s = context.export_s(1), context.export_s(0)
    assert long_s == pytest.approx(2 * short_s, rel=0.01)
    cell_bytes = context.memory()["kv"] / (context.capacity * 4)  # of three sequences and one to copy with
    # keys and values alone, until a state was read that is worth measuring
    assert long_s == pytest.approx(cell_bytes * 2 * N_BATCH / 4e9 if has_streams else 128 / 32, rel=0.01)
    assert context.export_s(2) == 0.0
    assert bytes(states.export(0)) == before
    assert context.lengths[0] == 2 * N_BATCH
    context.close()


def test_what_makes_way_for_those_that_begin_is_where_it_was(model: LlamaModel) -> None:
    """SPEC C17: streams that only keep something are copied away before the step, and go on from there."""
    context, pool = context_of(model), context_of(model, has_streams=False)
    texts = {seq: [3 + seq + at for at in range(10 + seq)] for seq in range(NUM_SEQUENCES)}
    for each in (context, pool):
        for seq, text in texts.items():
            feed(each, (seq, text))
        for seq in (1, 4):
            each.drop(seq)
    before = dict(context._cells.natives)
    begun = [(seq, [30 + seq] * 5) for seq in (1, 4)]
    rows = [feed(each, *begun) for each in (context, pool)]
    np.testing.assert_allclose(rows[0], rows[1], atol=0.05)
    streams = context._cells.natives
    assert abs(streams[1] - streams[4]) == 1, "two passes"
    assert any(streams[seq] != stream for seq, stream in before.items()), "nothing had to make way"
    for seq in range(NUM_SEQUENCES):
        rows = [feed(each, (seq, [40, 41])) for each in (context, pool)]
        np.testing.assert_allclose(rows[0], rows[1], atol=0.05)
    context.close()
    pool.close()


def test_prompts_of_several_lengths_are_computed_as_if_they_were_as_long_as_each_other(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC C17: rows are the same, now and later, in fewer native passes; nothing is left behind."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")  # the library tells each part of a step
    context, on_device = context_of(model), context_of(model, is_off_host=True)
    lengths = (11, 16, 9, 13)
    prompts = [(seq, TEXT[:length]) for seq, length in enumerate(lengths)]
    first = feed(context, *prompts)
    with native_lines() as lines:
        padded = feed(on_device, *prompts)
    foreseen = num_passes(dict.fromkeys(range(4), 16), N_UBATCH)
    assert sum(b"added ubatch to split" in line for line in lines) == foreseen
    assert foreseen < num_passes(dict(enumerate(lengths)), N_UBATCH)
    assert np.abs(first - padded).max() < 1e-4
    assert [on_device.lengths[seq] for seq in range(4)] == list(lengths)
    for _ in range(2):
        first, padded = (feed(each, *((seq, [7]) for seq in range(4))) for each in (context, on_device))
        assert np.abs(first - padded).max() < 1e-4
    for each in (context, on_device):
        each.close()


def test_a_stream_that_is_nearly_full_is_not_filled_beyond_its_end(model: LlamaModel) -> None:
    """SPEC C17: its last tokens are computed, beside a longer prompt."""
    on_device = context_of(model, is_off_host=True)
    for _ in range(NUM_CELLS // N_BATCH - 1):
        feed(on_device, (0, [41] * N_BATCH))
    feed(on_device, (0, [41] * (N_BATCH - 6)))
    feed(on_device, (0, [5] * 6), (1, TEXT[:8]))
    assert [on_device.lengths[seq] for seq in (0, 1)] == [NUM_CELLS, 8]
    on_device.close()


def test_a_model_that_cannot_go_back_keeps_its_pool(
    open_llama: Callable[..., LlamaBackend], tiny_model: Callable[[str], Path]
) -> None:
    """SPEC C15: streams are for models that keep every cell."""
    with open_llama(tiny_model("gemma3"), KVLayout.STREAMS) as backend:
        assert backend.capabilities.kv_layout is KVLayout.POOL


def test_what_a_request_may_use_is_the_capacity(
    open_llama: Callable[..., LlamaBackend], tiny_decoder: Path
) -> None:
    """SPEC C15: each of the sequences, spare ones included, for all the tokens of a request."""
    with open_llama(tiny_decoder, KVLayout.STREAMS) as backend:
        found = backend.capabilities
        assert (found.kv_layout, found.n_ctx, found.num_sequences) == (KVLayout.STREAMS, 512, 5)
        assert found.num_cells == 512 * 5
        spec = ModelSpec(id="m", path="", num_slots=4, n_ctx=512, n_batch=128, kv_layout=KVLayout.STREAMS)
        told = estimator_of(tiny_decoder)(spec).lines["kv"]
        assert backend.memory()["kv"] == pytest.approx(told, rel=0.02)  # the library tells hundredths of MiB
    with open_llama(tiny_decoder) as backend:
        assert backend.capabilities.kv_layout is KVLayout.POOL  # on a CPU
