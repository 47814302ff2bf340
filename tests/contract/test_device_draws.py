"""The largest logits of rows by llama.cpp's own graph, against the whole rows, on the CPU's build."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from ggml_graphs import computed
from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.binding import llama
from stoker.backends.llama.cells import Streams
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.graph import draws
from stoker.backends.llama.graph.marks import GraphMarks, LogitRows
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import StepFailedError
from stoker.ipc.commands import Submit
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Failed
from stoker.ipc.model import ModelSpec, PlacementSpec
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.machine.ledger import Ledger
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.estimate import estimator_of, num_sequences
from tiny_models import TOKENS, write_wide_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import TinyModel
    from stoker.backends.protocol.backend import Candidates, Rows

    WriteVocabulary = Callable[..., Path]

OPTIONS = ContextOptions(num_cells=512, n_batch=64, num_sequences=8, num_threads=1, draws=True)
WAYS = {"pool": OPTIONS, "streams": dataclasses.replace(OPTIONS, has_streams=True)}


@pytest.fixture(scope="module")
def write_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> WriteVocabulary:
    """A function that writes a decoder with so many tokens, one of them broken or none."""

    def write(num_tokens: int, broken_token: int | None = None) -> Path:
        path = tmp_path_factory.mktemp("vocabulary") / "model.gguf"
        return write_wide_llama(path, num_tokens, broken_token)

    return write


@contextmanager
def opened(path: Path, options: ContextOptions = OPTIONS) -> Iterator[LlamaContext]:
    """A context of a model file."""
    model = LlamaModel(ModelOptions(path=path))
    context = LlamaContext(model, options)
    try:
        yield context
    finally:
        context.close()
        model.close()


def launched(context: LlamaContext, *items: PlanItem) -> tuple[Rows, Candidates]:
    """Rows and candidates of a step, as copies."""
    in_flight = context.launch(BatchPlan(items))
    rows, best = in_flight.rows().copy(), in_flight.candidates()
    return rows, best


def assert_best_of(rows: Rows, best: Candidates) -> None:
    """The candidates are the largest of these rows, largest first, with the ids that have them."""
    assert best.ids.shape == best.logits.shape == (len(rows), draws.NUM_CANDIDATES)
    np.testing.assert_array_equal(best.logits, -np.sort(-rows, axis=1)[:, : draws.NUM_CANDIDATES])
    np.testing.assert_array_equal(np.take_along_axis(rows, best.ids, axis=1), best.logits)
    assert all(len(set(ids)) == draws.NUM_CANDIDATES for ids in best.ids.tolist())


def both_ways(context: LlamaContext, *items: PlanItem) -> tuple[Rows, Candidates]:
    """The whole rows of a step, and the candidates of the same step computed again."""
    rows, _ = launched(context, *items)
    for item in items:
        context.trim(item.seq, item.start)
    taking = [PlanItem(each.seq, each.start, each.tokens, each.num_logits, True) for each in items]
    return rows, launched(context, *taking)[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_vocab", [300, 1025, 2048, 2049, 5000, 5003, 32768, 40001, 270_000])
def test_the_graph_finds_the_largest_of_any_vocabulary(
    write_vocabulary: WriteVocabulary, num_vocab: int, way: str
) -> None:
    """B6: no level of maxima to three, whole groups and a rest, margins, parts of a sum and none."""
    with opened(write_vocabulary(num_vocab), WAYS[way]) as context:
        assert context.draws is not None
        items = [PlanItem(seq, 0, range(3 + seq, 8 + seq), 1) for seq in range(5)]
        rows, best = both_ways(context, *items)
        assert rows.shape == (5, num_vocab)
        assert_best_of(rows, best)
        more = [PlanItem(seq, 5, (40 + seq,), 1) for seq in range(5)]
        assert_best_of(*both_ways(context, *more))


@pytest.mark.parametrize("way", WAYS)
def test_each_sequence_gets_what_its_item_asks_for(tiny_decoder: Path, way: str) -> None:
    """B6: whole rows and candidates in one step, in every mix, though the shape of the step stays."""
    with opened(tiny_decoder, WAYS[way]) as context, opened(tiny_decoder, WAYS[way]) as other:
        for number in range(12):
            takes = [bool(number * 5 >> seq & 1) for seq in range(3)]
            items = [PlanItem(seq, number, (50 + number + seq,), 1, take) for seq, take in enumerate(takes)]
            expected, _ = launched(other, *(PlanItem(each.seq, each.start, each.tokens, 1) for each in items))
            rows, best = launched(context, *items)
            np.testing.assert_array_equal(rows, expected[[not take for take in takes]])
            if any(takes):
                assert_best_of(expected[takes], best)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_and_decode_rows_share_a_step(tiny_decoder: Path, way: str) -> None:
    """B6: several native batches in one call keep each row with its sequence; prompts of different length."""
    with opened(tiny_decoder, WAYS[way]) as context:
        for seq in (0, 2, 5):
            launched(context, PlanItem(seq, 0, range(30, 33 + seq), 0))
        items = [
            PlanItem(5, 8, (70,), 1),
            PlanItem(1, 0, range(30, 50), 1),
            PlanItem(0, 3, (71,), 1),
            PlanItem(3, 0, range(40, 47), 0),
            PlanItem(2, 5, (72, 73, 74), 3),
        ]
        assert_best_of(*both_ways(context, *items))


def test_more_rows_than_a_call_may_compute_come_in_several(tiny_decoder: Path) -> None:
    """B6: the library aborts the process where rows exceed what was reserved; none is asked for too many."""
    plain = dataclasses.replace(OPTIONS, draws=False)
    with opened(tiny_decoder) as context, opened(tiny_decoder, plain) as other:
        assert context.draws is not None
        assert context.draws.max_rows < 30
        items = (
            PlanItem(0, 0, range(20, 60), 30),
            PlanItem(1, 0, (9,), 1),
            PlanItem(2, 0, range(10, 20), 10),
        )
        expected, _ = launched(other, *items)
        rows, _ = launched(context, *items)
        np.testing.assert_allclose(rows, expected, atol=0.05)
        assert [context.lengths[seq] for seq in range(3)] == [40, 1, 10]
        for seq in range(3):
            context.drop(seq)
        rows, best = both_ways(context, *items)
        assert_best_of(rows, best)


def test_a_row_with_a_nan_says_so(write_vocabulary: WriteVocabulary) -> None:
    """B6, Q12: a sort may put it anywhere, also outside of what is left."""
    with opened(write_vocabulary(5000, broken_token=4321)) as context:
        rows, best = both_ways(context, PlanItem(0, 0, (5, 6, 7), 1), PlanItem(1, 0, (8,), 1))
        assert np.isnan(rows[:, 4321]).all()
        assert np.isnan(best.logits[:, 0]).all()


@pytest.mark.parametrize("num_vocab", [1000, 5003, 40001, 151_665, 300_000])
def test_a_row_of_few_numbers_has_each_of_them_once(num_vocab: int) -> None:
    """B6, Q12: what fills groups and levels up is then as good as most logits, and stands for none."""
    random = np.random.default_rng(num_vocab)
    rows = np.full((8, num_vocab), -np.inf, np.float32)
    rows[1], rows[2] = 0.0, np.nan
    for row in rows[3:]:  # among them the first and the last, beside which there is nothing
        ids = [0, num_vocab - 1, *random.choice(num_vocab, 50, replace=False)]
        row[ids] = random.standard_normal(len(ids))
    found = computed(rows, lambda context, given: draws._best_of(context, given, num_vocab, len(rows)))
    found = found.reshape(len(rows), draws.WIDTH)
    logits, ids = found[:, : draws.NUM_CANDIDATES], found[:, draws.NUM_CANDIDATES : -1].astype(int)
    assert np.isnan(found[:, -1]).tolist() == [False, False, True] + [False] * 5
    assert all(len(set(of_row)) == draws.NUM_CANDIDATES for of_row in ids.tolist())
    assert (ids >= 0).all()
    filled = np.pad(rows, ((0, 0), (0, 2 * draws.GROUP)), constant_values=-np.inf)
    np.testing.assert_array_equal(np.take_along_axis(filled, ids, axis=1), logits)
    np.testing.assert_array_equal(logits[3:], -np.sort(-rows[3:], axis=1)[:, : draws.NUM_CANDIDATES])


def test_a_short_vocabulary_is_read_whole(tiny_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6: rows that are hardly longer than their candidates stay rows."""
    assert draws.WIDTH < draws.MIN_VOCAB <= len(TOKENS)
    monkeypatch.setattr(draws, "MIN_VOCAB", len(TOKENS) + 1)
    with opened(tiny_decoder) as context:
        assert context.draws is None
        rows, _ = launched(context, PlanItem(0, 0, (5,), 1))
        assert rows.shape == (1, len(TOKENS))


def test_a_device_that_finds_others_than_the_largest_gives_rows(
    tiny_decoder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B6: tried at load against the whole rows of the same graph; then everything goes on without."""
    monkeypatch.setattr(draws, "_DESCENDING", 0)
    with caplog.at_level(logging.WARNING), opened(tiny_decoder) as context:
        assert context.draws is None
        assert "not the largest" in caplog.text
        rows, _ = launched(context, PlanItem(0, 0, (5,), 1), PlanItem(1, 0, (6, 7), 1))
    with opened(tiny_decoder, dataclasses.replace(OPTIONS, draws=False)) as plain:
        expected, _ = launched(plain, PlanItem(0, 0, (5,), 1), PlanItem(1, 0, (6, 7), 1))
        np.testing.assert_array_equal(rows, expected)


def test_without_draws_no_call_computes_more_rows_than_were_reserved_for_them(
    tiny_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6: the context stays as it was made for them; the library would abort the process."""
    monkeypatch.setattr(draws, "_DESCENDING", 0)
    with opened(tiny_decoder) as context:
        assert context.draws is None
        rows, _ = launched(context, PlanItem(0, 0, range(20, 60), 30), PlanItem(1, 0, (9,), 1))
        assert rows.shape == (31, len(TOKENS))
        assert np.isfinite(rows).all()


def test_a_graph_that_cannot_be_built_fails_its_step(
    tiny_decoder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B6, Q12: the error of a callback is the step's, and nothing has changed; at load it costs the draws."""
    with opened(tiny_decoder) as context:
        launched(context, PlanItem(0, 0, (5, 6), 1))

        def broken(*_: object) -> int:
            raise OverflowError("no room")

        monkeypatch.setattr(draws, "_best_of", broken)
        with pytest.raises(StepFailedError, match="no room"):
            context.launch(BatchPlan((PlanItem(0, 2, (7,), 1, True), PlanItem(1, 0, (7,), 1, True))))
        assert [context.lengths[seq] for seq in (0, 1)] == [2, 0]
        monkeypatch.undo()
        assert_best_of(*both_ways(context, PlanItem(0, 2, (7,), 1), PlanItem(1, 0, (7,), 1)))
        monkeypatch.setattr(draws, "_best_of", broken)
    with caplog.at_level(logging.WARNING), opened(tiny_decoder) as other:
        assert other.draws is None
        assert "no room" in caplog.text


@pytest.mark.parametrize("name", ["rwkv7", "lfm2", "gemma3"])
def test_models_that_cannot_go_back_give_candidates_too(tiny_model: TinyModel, name: str) -> None:
    """B6, K1: recurrent, hybrid, and with a sliding window; their rows come in the order of the plan."""
    with opened(tiny_model(name)) as context, opened(tiny_model(name)) as other:
        texts = (range(30, 41), range(50, 53), range(60, 76))
        items = [PlanItem(seq, 0, text, 1) for seq, text in zip((3, 0, 1), texts, strict=True)]
        taking = [PlanItem(each.seq, 0, each.tokens, 1, True) for each in items]
        assert_best_of(launched(other, *items)[0], launched(context, *taking)[1])


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_draws_the_same_ids_from_candidates_and_from_rows(tiny_decoder: Path, way: str) -> None:
    """B6: greedy, sampled, banned, constrained and with log probabilities, in the same steps."""
    requests = {
        "greedy": {"sampling": Sampling(temperature=0.0)},
        "sampled": {"sampling": Sampling(seed=3), "n": 2},
        "banned": {"sampling": Sampling(seed=4, logit_bias={70: -100.0}), "ignore_eos": True},
        "wide": {"sampling": Sampling(seed=5, top_k=0)},
        "logprobs": {"sampling": Sampling(seed=6), "logprobs": 2},
        "prompt": {"sampling": Sampling(seed=7), "prompt_logprobs": 1, "echo": True},
        "constrained": {"constraint": Constraint(kind=ConstraintKind.REGEX, source="[a-f]{12}")},
    }
    found = [
        answered(tiny_decoder, dataclasses.replace(WAYS[way], draws=each), requests) for each in (True, False)
    ]
    assert found[0] == found[1]
    assert all(len(tokens) >= 12 for tokens in found[0].values())


def answered(
    path: Path, options: ContextOptions, requests: dict[str, dict[str, Any]]
) -> dict[tuple[str, int], list[int]]:
    """The token ids of each request's choices, all asked at once."""
    model = LlamaModel(ModelOptions(path=path))
    with LlamaBackend(model, LlamaContext(model, options), read_header(path)) as backend:
        assert (backend.extensions.draws is not None) == options.draws
        jobs, timer = JobTable(), StepTimer(Stopwatch(60.0))
        spec = ModelSpec(id="m", path=str(path), num_slots=6)
        runner = SlotRunner(spec, backend, timer, PrefixCache(CacheLimits(), Ledger()), jobs)
        for name, fields in requests.items():
            known = {"prompt": f"say {name}", "model": "m", "max_tokens": 20, "sampling": Sampling(seed=1)}
            request = GenerateRequest(**(known | fields))
            runner.accept(prepare(Submit(request_id=name, request=request), runner.prep, 0.0), 0.0)
        found: dict[tuple[str, int], list[int]] = {}
        while runner.has_work:
            runner.schedule(timer.now())
            runner.step(timer.now())
            for event in jobs.events:
                assert not isinstance(event, Failed), event
                if isinstance(event, Delta):
                    found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            jobs.events.clear()
        runner.close()
        return found


@pytest.mark.parametrize("num_vocab", [4999, 40000])
def test_the_estimate_counts_what_finding_the_largest_takes(
    write_vocabulary: WriteVocabulary, num_vocab: int
) -> None:
    """B6, M1: rows and a copy where the output matrix lies, and four numbers a token on the host."""
    path = write_vocabulary(num_vocab)
    placement = PlacementSpec(device=("card",), gpu_layers="all")
    spec = ModelSpec(id="m", path=str(path), num_slots=60, n_ctx=512, n_batch=64, placement=placement)
    estimate = estimator_of(path)(spec)
    options = dataclasses.replace(OPTIONS, num_sequences=num_sequences(60))
    with opened(path, options) as context:
        taken = context.memory()["compute"]
    assert taken <= estimate.lines["compute"] <= 1.25 * taken
    rows = 4 * num_vocab * options.num_sequences
    assert 2 * rows < estimate.on_devices["card"]["compute"] < 3.5 * rows


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_decode_rows_alone_are_marked_as_such(
    tiny_decoder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """B7: whatever is wanted of them, and in a pool too; a prompt beside them makes another step of it."""
    told: list[bool] = []
    add = GraphMarks.add

    def added(marks: GraphMarks, context: int, graph: int, rows: LogitRows, num_reused: int) -> None:
        told.append(rows.are_alone)
        add(marks, context, graph, rows, num_reused)

    monkeypatch.setattr(GraphMarks, "add", added)
    with opened(tiny_decoder, WAYS[way]) as context:
        expected = {(5, 1): [False], (1, 2): [True], (1, 3): [True], (6, 3): [False]}
        for number, ((num_tokens, num_rows), are_alone) in enumerate(expected.items()):
            told.clear()
            takes = [seq != number % 2 for seq in range(num_rows)]
            tokens = [range(30, 30 + num_tokens), *[(40,)] * (num_rows - 1)]
            starts = [context.lengths[seq] for seq in range(num_rows)]
            items = zip(range(num_rows), starts, tokens, [1] * num_rows, takes, strict=True)
            launched(context, *(PlanItem(*item) for item in items))
            assert told[:1] == are_alone, f"{num_rows} items, the first of {num_tokens} tokens"


def num_reused(context: LlamaContext) -> int:
    """Steps for which the library took the graph of the step before."""
    return int(llama.llama_perf_context(context.handle).n_reused)


def test_rows_beside_a_prompt_are_found_where_their_own_graph_left_them(
    write_vocabulary: WriteVocabulary,
) -> None:
    """B6: the rows of decode rows are one copy; the library uses their graph for a part of another step."""
    path = write_vocabulary(2049)
    plain = dataclasses.replace(WAYS["streams"], draws=False)
    with opened(path, WAYS["streams"]) as context, opened(path, plain) as other:
        for each in (context, other):
            launched(each, *(PlanItem(seq, 0, (3, 4 + seq), 1, each is context) for seq in range(7)))
        for number in range(2, 12, 3):
            rows = [PlanItem(seq, number, (5 + number + seq,), 1) for seq in range(3)]
            later = [msgspec.structs.replace(row, start=number + 1) for row in rows]
            after = [msgspec.structs.replace(row, start=number + 2) for row in rows]
            prompt = PlanItem(5, context.lengths[5], (40, 41), 1)
            scored = PlanItem(6, context.lengths[6], (42, 43), 2)
            before = num_reused(context)
            for items in (rows, [*later, prompt], [scored, *after]):
                expected, _ = launched(other, *items)
                taking = [msgspec.structs.replace(each, takes_candidates=True) for each in items]
                _, best = launched(context, *taking)
                np.testing.assert_allclose(best.logits, -np.sort(-expected, axis=1)[:, :64], atol=0.02)
                found = np.take_along_axis(expected, best.ids, axis=1)
                np.testing.assert_allclose(found, best.logits, atol=0.02)
            assert num_reused(context) > before, "the graph of the rows was not used for those of the step"


def test_rows_that_end_leave_the_shape_of_a_step_as_it_was(write_vocabulary: WriteVocabulary) -> None:
    """SPEC C15, B6: others fill their places: the graph is used again, candidates and what is kept stay."""
    path = write_vocabulary(700)
    with opened(path, WAYS["streams"]) as context, opened(path, WAYS["streams"]) as other:
        assert isinstance(other._cells, Streams)
        other._cells.fills = False
        for each in (context, other):
            launched(each, *(PlanItem(seq, 0, (3, 4 + seq), 1, takes_candidates=True) for seq in range(8)))
        running = list(range(8))
        for start, ended in enumerate((None, 3, None, 7, None), start=2):
            if ended is not None:
                running.remove(ended)
            before = num_reused(context)
            plan = [PlanItem(seq, start, (5,), 1, takes_candidates=True) for seq in running]
            (_, best), (_, expected) = launched(context, *plan), launched(other, *plan)
            np.testing.assert_array_equal(best.ids[:, :1], expected.ids[:, :1])
            np.testing.assert_allclose(best.logits, expected.logits, atol=1e-4)
            if start > 2:
                assert num_reused(context) == before + 1, f"a graph was built with {running}"
        for each in (context, other):  # what ended goes on where it was, and a stream of nothing is empty
            assert [each.lengths[seq] for seq in range(8)] == [7, 7, 7, 3, 7, 7, 7, 5]
        (_, best), (_, expected) = (
            launched(each, PlanItem(3, 3, (6,), 1, takes_candidates=True)) for each in (context, other)
        )
        np.testing.assert_allclose(best.logits, expected.logits, atol=1e-4)
        context.drop(5)
        rows = [PlanItem(seq, 7, (6,), 1, takes_candidates=True) for seq in (0, 1, 2, 4, 6)]
        launched(context, *rows)
        assert context.lengths[5] == 0
        launched(context, PlanItem(5, 0, (3, 4), 1, takes_candidates=True))


def test_rows_come_back_in_the_order_in_which_they_were_asked_for(write_vocabulary: WriteVocabulary) -> None:
    """SPEC C15, B6: whatever the order of their streams, and after steps of other kinds in between."""
    with opened(write_vocabulary(700), WAYS["streams"]) as context:
        for seq in range(5):
            launched(context, PlanItem(seq, 0, (3, 4 + seq), 2, takes_candidates=True))
        for order in ((3, 0, 4, 1, 2), (3, 0, 4, 1, 2), (0, 1, 2, 3, 4), (4, 2, 3), (4, 2, 3)):
            lengths = {seq: context.lengths[seq] for seq in order}
            items = [PlanItem(seq, lengths[seq], (50 + seq,), 1) for seq in order]
            assert list(context.arrange(BatchPlan(tuple(items)))) == sorted(
                range(len(order)), key=order.__getitem__
            )
            rows, best = both_ways(context, *items)
            np.testing.assert_allclose(best.logits[:, 0], rows.max(axis=1), atol=1e-4)
            np.testing.assert_array_equal(best.ids[:, 0], rows.argmax(axis=1))
            taking = BatchPlan(tuple(PlanItem(seq, lengths[seq] + 1, (9,), 1, True) for seq in order))
            assert list(context.arrange(taking)) == list(range(len(order)))
            assert len(np.unique(rows.argmax(axis=1))) > 1, "rows that are alike tell nothing"


def test_a_stream_that_is_full_fills_no_place(write_vocabulary: WriteVocabulary) -> None:
    """SPEC C15: the step is made without it."""
    options = dataclasses.replace(WAYS["streams"], num_cells=256)
    with opened(write_vocabulary(700), options) as context:
        for begin in range(0, 256, 64):
            launched(context, PlanItem(1, begin, [3] * 64, 0))
        for start in range(2):
            plan = [PlanItem(seq, start, (5,), 1, takes_candidates=True) for seq in (0, 2, 3)]
            _, best = launched(context, *plan)
            assert len(best) == 3
        assert [context.lengths[seq] for seq in range(4)] == [2, 256, 2, 2]
