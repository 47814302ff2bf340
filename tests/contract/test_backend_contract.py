"""What every backend must do; the contract stands in `stoker.backends.protocol.backend`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.protocol.backend import Backend, BatchPlan, PlanItem, Rows
from stoker.engine.jobs.vocabulary import digests_of
from stoker.errors import InvalidRequestError, PoolFullError, StepFailedError
from stoker.ipc.model import KVLayout

TestedBackend = FakeBackend | LlamaBackend

TEXT = "Once upon a time there was a little girl named Lily. She loved to play outside in the park."


def item(backend: Backend, seq: int, tokens: Sequence[int], num_logits: int = 1) -> PlanItem:
    """Tokens that continue a sequence where it stands."""
    return PlanItem(seq, backend.length(seq), tokens, num_logits)


def feed(backend: Backend, seq: int, tokens: Sequence[int], num_logits: int = 1) -> Rows:
    """Rows of one step that appends tokens to one sequence, as a copy."""
    return backend.launch(BatchPlan((item(backend, seq, tokens, num_logits),))).rows().copy()


def prompt(backend: Backend, num_tokens: int = 16) -> list[int]:
    """So many tokens of a text that the models know."""
    tokens = backend.vocabulary.tokenize(TEXT, add_special=True, parse_special=True)
    assert len(tokens) >= num_tokens
    return tokens[:num_tokens]


def is_near(backend: Backend, row: Rows, reference: Rows) -> bool:
    """Whether two rows come from one history: the same bits on the fake, within 0.1 on a model of floats.

    Kernels add in an order that follows batch shape and place of the cells; quantised activations blow that
    up to a logit. There rows of one history correlate by 0.9994, of two that differ in a token by 0.9976.
    """
    if backend.capabilities.architecture in {"fake", "hello"}:
        return np.array_equal(row, reference)
    if "F32" in backend.capabilities.description:
        return float(np.abs(row - reference).max()) < 0.1
    return float(np.corrcoef(row, reference)[0, 1]) > 0.9985


def assert_near(backend: Backend, rows: Rows, expected: Rows) -> None:
    """Every row, or the one row, is near its reference."""
    for row, reference in zip(np.atleast_2d(rows), np.atleast_2d(expected), strict=True):
        assert is_near(backend, row, reference)


def assert_equal_choice(row: Rows, reference: Rows) -> None:
    """The same best token, or one that the reference has within 0.05 of its best."""
    assert float(reference.max()) - float(reference[int(row.argmax())]) <= 0.05


def greedy(backend: Backend, seq: int, row: Rows, num_tokens: int) -> tuple[list[int], Rows]:
    """The best tokens one after another, and the row after the last of them."""
    tokens = []
    for _ in range(num_tokens):
        tokens.append(int(row.argmax()))
        row = feed(backend, seq, tokens[-1:])[0]
    return tokens, row


def test_a_prompt_in_chunks_gives_the_logits_of_the_prompt_at_once(any_generating: Backend) -> None:
    """B1: a plan item is tokens after tokens, no prefill flag."""
    tokens = prompt(any_generating)
    at_once = feed(any_generating, 0, tokens)
    for begin, end in ((0, 5), (5, 6), (6, len(tokens))):
        chunked = feed(any_generating, 1, tokens[begin:end])
    assert_near(any_generating, chunked, at_once)
    assert any_generating.length(0) == any_generating.length(1) == len(tokens)


def test_a_sequence_in_a_batch_chooses_what_it_chooses_alone(any_generating: Backend) -> None:
    """E1: rows of several sequences in one step do not mix."""
    tokens = prompt(any_generating)
    parts = [tokens, tokens[:7], tokens[3:12]]
    alone = [feed(any_generating, seq, part)[0] for seq, part in enumerate(parts)]
    batched = any_generating.launch(
        BatchPlan(tuple(PlanItem(4 + seq, 0, part, 1) for seq, part in enumerate(parts)))
    ).rows()
    assert batched.shape == (3, any_generating.capabilities.n_vocab)
    for row, reference in zip(batched, alone, strict=True):
        assert_equal_choice(row, reference)


def test_a_fork_shares_cells_and_then_goes_its_own_way(generating: Backend) -> None:
    """SPEC Q16: forked sequences share a prefill and differ from the first token of their own."""
    tokens = prompt(generating)
    first = feed(generating, 0, tokens)[0]
    generating.fork(0, 1, len(tokens) - 1)
    assert generating.length(1) == len(tokens) - 1
    assert_near(generating, feed(generating, 1, tokens[-1:])[0], first)
    ours, theirs = feed(generating, 0, tokens[:1])[0], feed(generating, 1, tokens[4:5])[0]
    assert not is_near(generating, ours, theirs)
    feed(generating, 2, [*tokens, tokens[4]], 0)
    assert_equal_choice(feed(generating, 1, tokens[:1])[0], feed(generating, 2, tokens[:1])[0])


@pytest.mark.long
def test_forks_of_a_long_prefix_need_no_cells_of_their_own(generating: Backend) -> None:
    """B2: `fork` shares cells."""
    num_prefix = generating.capabilities.n_ctx - 128
    for begin in range(0, num_prefix, 128):
        feed(generating, 0, [40] * min(128, num_prefix - begin), 0)
    for seq in range(1, 5):
        generating.fork(0, seq, num_prefix)
        feed(generating, seq, [40 + seq] * 16)
    generating.drop(0)
    assert generating.length(4) == num_prefix + 16
    feed(generating, 1, [50])


def test_trim_and_going_on_is_as_if_the_tail_had_never_been(generating: Backend) -> None:
    """B2: `trim` keeps a prefix that can be continued."""
    tokens = prompt(generating)
    fresh = feed(generating, 0, tokens)
    feed(generating, 1, [*tokens[:10], *tokens[:6]])
    generating.trim(1, 10)
    assert generating.length(1) == 10
    assert_near(generating, feed(generating, 1, tokens[10:]), fresh)


def test_a_trim_of_a_fork_leaves_its_source_alone(generating: Backend) -> None:
    """B2: shared cells live as long as one sequence holds them."""
    tokens = prompt(generating)
    feed(generating, 0, tokens[:-1], 0)
    feed(generating, 2, tokens[:-1], 0)
    generating.fork(0, 1, len(tokens) - 1)
    generating.trim(1, 4)
    generating.drop(1)
    assert_near(generating, feed(generating, 0, tokens[-1:]), feed(generating, 2, tokens[-1:]))


@pytest.mark.long
def test_a_full_pool_changes_nothing_and_drop_makes_room(pooling: Backend) -> None:
    """SPEC Q12: a step without cells raises PoolFullError, lengths stay, and freed cells serve again."""
    filler, num_cells = [41] * 128, pooling.capabilities.num_cells
    for seq in range(num_cells // 128):
        feed(pooling, seq, filler, 0)
    lengths = [pooling.length(seq) for seq in range(pooling.capabilities.num_sequences)]
    with pytest.raises(PoolFullError):
        pooling.launch(BatchPlan((item(pooling, 0, [1]), item(pooling, 9, [2, 3])))).rows()
    assert [pooling.length(seq) for seq in range(pooling.capabilities.num_sequences)] == lengths
    pooling.drop(1)
    assert pooling.length(1) == 0
    rows = pooling.launch(BatchPlan((item(pooling, 0, [1]), item(pooling, 9, [2, 3])))).rows()
    assert rows.shape[0] == 2
    assert (pooling.length(0), pooling.length(9)) == (129, 2)


@pytest.mark.parametrize("bad", ["token above", "token below", "start", "empty", "rows", "sequence"])
def test_a_failed_step_changes_nothing(any_generating: Backend, bad: str) -> None:
    """SPEC Q12: what is wrong with one item raises StepFailedError and costs no sequence anything."""
    tokens = prompt(any_generating)
    n_vocab, num_sequences = any_generating.capabilities.n_vocab, any_generating.capabilities.num_sequences
    wrong = {
        "token above": PlanItem(1, 3, [tokens[0], n_vocab], 1),
        "token below": PlanItem(1, 3, [-1], 1),
        "start": PlanItem(1, 4, [tokens[0]], 1),
        "empty": PlanItem(1, 3, [], 0),
        "rows": PlanItem(1, 3, [tokens[0]], 2),
        "sequence": PlanItem(num_sequences, 0, [tokens[0]], 1),
    }[bad]
    feed(any_generating, 0, tokens[:-1], 0)
    feed(any_generating, 1, tokens[:3], 0)
    feed(any_generating, 2, tokens[:-1], 0)
    with pytest.raises(StepFailedError):
        any_generating.launch(BatchPlan((item(any_generating, 0, [tokens[0]]), wrong))).rows()
    assert [any_generating.length(seq) for seq in range(3)] == [len(tokens) - 1, 3, len(tokens) - 1]
    assert_near(any_generating, feed(any_generating, 0, tokens[-1:]), feed(any_generating, 2, tokens[-1:]))


def test_exported_state_goes_on_bit_exactly(any_backend: TestedBackend) -> None:
    """SPEC Q4, Equal: restoring exported state is bit-exact."""
    tokens = prompt(any_backend)
    feed(any_backend, 0, tokens)
    data = any_backend.export_state(0)
    expected = feed(any_backend, 0, tokens[:1])
    any_backend.drop(0)
    any_backend.import_state(0, data)
    assert any_backend.length(0) == len(tokens)
    assert np.array_equal(feed(any_backend, 0, tokens[:1]), expected)


def test_exported_state_fits_between_the_cells_of_others(pooling_states: TestedBackend) -> None:
    """SPEC Q4: state returns from RAM while other sequences hold scattered cells."""
    tokens = prompt(pooling_states)
    for step, token in enumerate(tokens):
        pooling_states.launch(BatchPlan(tuple(PlanItem(seq, step, [token], 1) for seq in range(3)))).rows()
    data = pooling_states.export_state(0)
    pooling_states.drop(0)
    num_free = pooling_states.capabilities.num_cells - 2 * len(tokens)
    for begin in range(0, num_free, 100):
        feed(pooling_states, 5, [42] * min(100, num_free - begin), 0)
    pooling_states.drop(1)  # what is free now lies scattered, sixteen cells exactly
    pooling_states.import_state(1, data)
    with pytest.raises(PoolFullError):
        feed(pooling_states, 1, tokens[:1])
    pooling_states.drop(5)
    assert_near(pooling_states, feed(pooling_states, 1, tokens[:1]), feed(pooling_states, 2, tokens[:1]))


@pytest.mark.long
def test_a_state_without_room_raises_and_leaves_the_sequence_empty(pooling_states: TestedBackend) -> None:
    """SPEC Q12: an import that does not fit is a full pool, and changes nothing."""
    feed(pooling_states, 0, prompt(pooling_states), 0)
    data, num_cells = pooling_states.export_state(0), pooling_states.capabilities.num_cells
    pooling_states.drop(0)
    for seq in range(num_cells // 128):
        feed(pooling_states, seq, [43] * 128, 0)
    with pytest.raises(PoolFullError):
        pooling_states.import_state(9, data)
    assert pooling_states.length(9) == 0
    pooling_states.drop(0)
    pooling_states.import_state(9, data)
    assert pooling_states.length(9) == 16


@pytest.mark.parametrize("damage", ["nothing", "foreign", "short", "long", "flipped", "swapped"])
def test_foreign_bytes_are_refused(any_backend: TestedBackend, damage: str) -> None:
    """Q4: import raises InvalidRequestError on what it did not export."""
    feed(any_backend, 0, prompt(any_backend), 0)
    data = any_backend.export_state(0)
    middle, data = len(data) // 2, bytes(data)
    part = len(data) // 32 * 8
    bad = {
        "nothing": b"",
        "foreign": b"\x93NUMPY" + bytes(200),
        "short": data[:-1],
        "long": data + b"\0",
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "swapped": data[: -2 * part] + data[-part:] + data[-2 * part : -part],
    }[damage]
    with pytest.raises(InvalidRequestError):
        any_backend.import_state(1, bad)
    assert any_backend.length(1) == 0
    any_backend.import_state(1, data)
    assert any_backend.length(1) == 16


def test_an_empty_sequence_can_be_exported_dropped_and_imported(any_backend: TestedBackend) -> None:
    """B2: `drop` of an empty sequence is allowed."""
    any_backend.drop(3)
    any_backend.import_state(3, any_backend.export_state(3))
    assert any_backend.length(3) == 0


def test_rows_come_in_plan_order_for_the_last_tokens_of_each_item(any_generating: Backend) -> None:
    """SPEC Q9, D6: only tokens that ask have rows, the last of an item first come, in the plan's order."""
    tokens = prompt(any_generating)
    feed(any_generating, 2, tokens[:4], 0)
    plan = BatchPlan(
        (
            PlanItem(5, 0, tokens, 3),
            PlanItem(0, 0, tokens[:9], 0),
            PlanItem(2, 4, tokens[4:5], 1),
            PlanItem(1, 0, tokens[:2], 2),
        )
    )
    rows = any_generating.launch(plan).rows().copy()
    assert rows.shape == (plan.num_rows, any_generating.capabilities.n_vocab)
    assert rows.dtype == np.float32
    ends = [len(tokens) - 2, len(tokens) - 1, len(tokens), 5, 1, 2]
    for seq in range(6):
        any_generating.drop(seq)
    for row, end in zip(rows, ends, strict=True):
        any_generating.drop(0)
        assert_near(any_generating, row, feed(any_generating, 0, tokens[:end])[0])


def test_decode_rows_known_as_such_are_those_of_any_plan(any_generating: Backend) -> None:
    """SPEC Q9: a step of decode rows may take a shorter way; a bad row changes nothing in it."""
    parts = [prompt(any_generating), prompt(any_generating)[:7], prompt(any_generating)[3:12]]

    def rows(first: int, *, is_rows: bool) -> Rows:
        for seq, part in enumerate(parts, start=first):
            feed(any_generating, seq, part, 0)
        items = tuple(PlanItem(first + at, len(part), (part[at],), 1) for at, part in enumerate(parts))
        found = any_generating.launch(BatchPlan(items, is_rows)).rows().copy()
        assert [any_generating.length(first + at) for at in range(3)] == [len(part) + 1 for part in parts]
        return found

    assert_near(any_generating, rows(0, is_rows=True), rows(3, is_rows=False))
    length = any_generating.length(0)
    bad = PlanItem(1, any_generating.length(1), (any_generating.capabilities.n_vocab,), 1)
    with pytest.raises(StepFailedError):
        any_generating.launch(BatchPlan((PlanItem(0, length, (4,), 1), bad), is_rows=True)).rows()
    assert any_generating.length(0) == length


def test_a_step_that_asks_for_nothing_returns_no_rows(any_generating: Backend) -> None:
    """SPEC Q9: prefill chunks ask for no logits."""
    rows = feed(any_generating, 0, prompt(any_generating), 0)
    assert rows.shape == (0, any_generating.capabilities.n_vocab)


def test_a_full_batch_of_rows_is_right_at_both_ends(any_generating: Backend) -> None:
    """SPEC D6: prompt logprobs ask for a row a token, up to a whole batch."""
    tokens = (prompt(any_generating) * 8)[:128]
    rows = feed(any_generating, 0, tokens, len(tokens))
    assert rows.shape[0] == 128
    # the same batch shape, asking for one row: kernels differ with the shape, not with what is asked
    assert_near(any_generating, feed(any_generating, 1, tokens)[0], rows[-1])
    assert_near(any_generating, feed(any_generating, 2, tokens, 64)[0], rows[64])
    assert_near(any_generating, feed(any_generating, 3, tokens[:1])[0], rows[0])


def test_the_history_decides_every_row(any_generating: Backend) -> None:
    """B1: a lost, doubled or reordered token shows in the logits."""
    tokens = prompt(any_generating)
    expected = feed(any_generating, 0, tokens)[0]
    swapped = [*tokens[:3], tokens[4], tokens[3], *tokens[5:]]
    for seq, changed in enumerate((tokens[1:], [tokens[0], *tokens], swapped), start=1):
        assert not is_near(any_generating, feed(any_generating, seq, changed)[0], expected)


def test_threads_can_be_changed_between_steps(any_backend: TestedBackend) -> None:
    """B1: `set_threads` counts from the next step on."""
    tokens = prompt(any_backend)
    reference = feed(any_backend, 0, tokens)[0]
    threads = any_backend.extensions.threads
    assert threads is not None
    threads.set_threads(2)
    try:
        assert threads.num_threads == 2
        assert_equal_choice(feed(any_backend, 1, tokens)[0], reference)
    finally:
        threads.set_threads(1)


def test_text_comes_back_from_its_tokens(any_generating: Backend) -> None:
    """B3: tokenize and piece are each other's inverse on ordinary text."""
    vocabulary = any_generating.vocabulary
    text = 'Zoë said: "42 naïve 🙂 emoji"\n\n  and spaces.'
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(vocabulary.piece(token) for token in tokens).decode().lstrip() == text
    assert vocabulary.tokenize("", add_special=False, parse_special=False) == []


def test_the_added_bos_is_what_every_text_begins_with(any_generating: Backend) -> None:
    """A conversation's prompt gets it where its template wrote none; None: nothing is added."""
    vocabulary = any_generating.vocabulary
    plain = vocabulary.tokenize("Zoë", add_special=False, parse_special=False)
    begun = vocabulary.tokenize("Zoë", add_special=True, parse_special=False)
    added = [] if vocabulary.added_bos is None else [vocabulary.added_bos]
    assert begun[: len(plain) + len(added)] == [*added, *plain]


def test_what_is_no_text_or_token_is_refused(any_generating: Backend) -> None:
    """SPEC S3: lone surrogates and ids outside the vocabulary are the caller's error."""
    with pytest.raises(InvalidRequestError):
        any_generating.vocabulary.tokenize("\ud800", add_special=False, parse_special=False)
    for token in (-1, any_generating.capabilities.n_vocab):
        with pytest.raises(InvalidRequestError):
            any_generating.vocabulary.piece(token)
        with pytest.raises(InvalidRequestError):
            any_generating.vocabulary.special_piece(token)


def test_every_row_of_logits_has_a_spelling(any_generating: Backend) -> None:
    """S3: one that no token has an empty one; vocabularies are told apart by all of them."""
    vocabulary, n_vocab = any_generating.vocabulary, any_generating.capabilities.n_vocab
    digests = digests_of(vocabulary, n_vocab, has_ways=True)
    assert (len(digests.sample), len(digests.whole)) == (16, 32)
    assert digests == digests_of(vocabulary, n_vocab, has_ways=True)
    assert not digests_of(vocabulary, n_vocab).whole


def test_tokens_that_end_a_generation_add_no_text(any_generating: Backend) -> None:
    """SPEC D4: EOG tokens are known as such and are spelled only when asked."""
    vocabulary = any_generating.vocabulary
    assert vocabulary.eog_tokens
    for token in vocabulary.eog_tokens:
        assert vocabulary.is_eog(token)
        assert vocabulary.piece(token) == b""
        assert vocabulary.special_piece(token) != b""
    assert vocabulary.eos_text.encode() in {
        vocabulary.special_piece(token) for token in vocabulary.eog_tokens
    }
    assert not vocabulary.is_eog(prompt(any_generating)[-1])


def test_capabilities_are_consistent(generating: Backend) -> None:
    """SPEC K7: resolved limits are reported after load."""
    found = generating.capabilities
    is_apart = found.kv_layout is KVLayout.STREAMS
    assert found.num_cells == 512 * (found.num_sequences if is_apart else 1)
    assert found.n_ctx == min(512, found.n_ctx_train)
    assert found.n_batch == 128
    assert found.num_sequences > 4  # the slots asked for
    assert found.can_trim
    assert found.can_fork
    assert found.label
    assert set(generating.memory()) == {"weights", "kv", "compute"}
    assert generating.memory()["kv"] > 0


def test_greedy_text_is_the_same_twice(any_generating: Backend) -> None:
    """SPEC Q4: the same history gives the same text."""
    tokens = prompt(any_generating)
    first, _ = greedy(any_generating, 0, feed(any_generating, 0, tokens)[0], 8)
    second, _ = greedy(any_generating, 1, feed(any_generating, 1, tokens)[0], 8)
    assert first == second
