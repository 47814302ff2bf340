"""The fake backend itself: what the shared contract does not say of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.backends.fake.backend import FakeBackend, FakeFaults, load
from stoker.backends.fake.vocabulary import BOS, EOS, IM_END, IM_START, FakeVocabulary
from stoker.backends.protocol.backend import BatchPlan, PlanItem, Rows
from stoker.errors import ModelFileError, PoolFullError, StepFailedError, UnsupportedError
from stoker.ipc.model import ModelClass, ModelSpec


def step(backend: FakeBackend, *parts: tuple[int, list[int]]) -> Rows:
    """One step that continues sequences; each part is (seq, tokens)."""
    items = tuple(PlanItem(seq, backend.length(seq), tokens, 1) for seq, tokens in parts)
    return backend.launch(BatchPlan(items)).rows()


def greedy(backend: FakeBackend, num_tokens: int) -> list[int]:
    """Tokens that the backend likes best, one after another."""
    rows, tokens = step(backend, (0, [65, 66])), list[int]()
    for _ in range(num_tokens):
        tokens.append(int(rows[0].argmax()))
        rows = step(backend, (0, tokens[-1:]))
    return tokens


def test_two_backends_say_the_same() -> None:
    """SPEC Q4, Equal: the fake is a function of the tokens alone, in any process."""
    assert greedy(FakeBackend(), 20) == greedy(FakeBackend(num_sequences=2, num_cells=64), 20)
    code = (
        "from stoker.backends.fake.backend import FakeBackend\n"
        "from stoker.backends.protocol.backend import BatchPlan, PlanItem\n"
        "print(float(FakeBackend().launch(BatchPlan((PlanItem(0, 0, [65, 66], 1),))).rows()[0].sum()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(said) == float(step(FakeBackend(), (0, [65, 66]))[0].sum())


def test_greedy_text_is_printable_and_ends_rarely() -> None:
    """A stand-in's text can be read, and is long enough to be interrupted."""
    tokens = greedy(FakeBackend(faults=FakeFaults(eog_period=0)), 300)
    assert bytes(tokens).decode().isprintable()
    backend = FakeBackend()
    assert not any(map(backend.vocabulary.is_eog, greedy(backend, 40)))
    often = greedy(FakeBackend(faults=FakeFaults(eog_period=4)), 40)
    assert 2 < sum(map(backend.vocabulary.is_eog, often)) < 20


def test_rows_are_overwritten_by_the_next_step() -> None:
    """B1: rows are valid until the next step; who keeps them notices."""
    backend = FakeBackend()
    rows = step(backend, (0, [65]))
    kept = rows.copy()
    step(backend, (0, [66]))
    assert not np.array_equal(rows, kept)


def test_ordered_faults_fail_the_step_and_change_nothing() -> None:
    """SPEC Q12: a bad sequence or token fails every step that holds it, and only those."""
    backend = FakeBackend(faults=FakeFaults(bad_sequences=frozenset({2}), bad_tokens=frozenset({7})))
    for parts in (((0, [65]), (2, [65])), ((0, [65]), (1, [66, 7]))):
        with pytest.raises(StepFailedError):
            step(backend, *parts)
    assert backend.num_cells_used == 0
    step(backend, (0, [65]), (1, [66]))
    assert backend.num_cells_used == 2
    backend.check()


def test_an_ordered_abort_kills_the_process() -> None:
    """SPEC L3: a crash of native code can be had without native code."""
    code = (
        "from stoker.backends.fake.backend import load\n"
        "from stoker.backends.protocol.backend import BatchPlan, PlanItem\n"
        "from stoker.ipc.model import ModelSpec\n"
        "backend = load(ModelSpec(id='m', path='fake:abort_tokens=7+9'))\n"
        "backend.launch(BatchPlan((PlanItem(0, 0, [65], 1),)))\n"
        "print('alive', flush=True)\n"
        "backend.launch(BatchPlan((PlanItem(0, 1, [9], 1),)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive"
    assert done.returncode == -signal.SIGABRT


def test_a_path_orders_limits_and_faults() -> None:
    """B4: "fake:" loads like a file, with faults after the colon."""
    fractions: list[float] = []
    spec = ModelSpec(id="m", path="fake:bad_tokens=1+2,step_delay_s=0.5,eog_period=9", num_slots=3, n_ctx=99)
    backend = load(spec, fractions.append)
    assert backend.faults == FakeFaults(bad_tokens=frozenset({1, 2}), step_delay_s=0.5, eog_period=9)
    assert (backend.capabilities.num_cells, backend.capabilities.num_sequences) == (99, 11)
    assert fractions == [1.0]
    for path in ("fake:nonsense=1", "fake:bad_tokens=x", "model.gguf"):
        with pytest.raises(ModelFileError):
            load(ModelSpec(id="m", path=path))


def recurrent() -> FakeBackend:
    """A fake that cannot go back."""
    return FakeBackend(faults=FakeFaults(recurrent=True))


def test_a_script_is_said_word_for_word_turn_by_turn(tmp_path: Path) -> None:
    """B4: answers of a file, after the last the first again; where no turn is opened the text ends."""
    file = tmp_path / "script"
    file.write_bytes(b"ab\fc")
    backend = load(ModelSpec(id="f", path=f"fake:script={file}"))
    vocabulary = backend.vocabulary
    said = ""
    for answer in ("ab", "c", "ab"):
        said += "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokens = vocabulary.tokenize(said, add_special=False, parse_special=True)
        rows = step(backend, (0, tokens[backend.length(0) :]))
        for byte in answer.encode():
            assert int(rows[0].argmax()) == byte
            rows = step(backend, (0, [byte]))
        assert int(rows[0].argmax()) == EOS
        said += f"{answer}<|im_end|>\n"
    with pytest.raises(ModelFileError, match="gone"):
        load(ModelSpec(id="f", path=f"fake:script={tmp_path}/gone"))


def test_a_path_orders_a_recurrent_model() -> None:
    """SPEC K5: "fake:recurrent=1" cannot trim or share, and names the tensors of its state."""
    backend = load(ModelSpec(id="m", path="fake:recurrent=1,eog_period=0"))
    found = backend.capabilities
    assert (found.model_class, found.can_trim, found.can_fork) == (ModelClass.RECURRENT, False, False)
    assert found.state_layout
    assert found.fingerprint != FakeBackend(faults=FakeFaults(eog_period=0)).capabilities.fingerprint
    step(backend, (0, [65, 66]))
    with pytest.raises(UnsupportedError):
        backend.trim(0, 1)
    with pytest.raises(UnsupportedError):
        backend.fork(0, 1, 2)
    backend.trim(0, 0)
    backend.check()


def test_a_recurrent_fake_goes_on_from_a_state_as_from_the_tokens_it_saw() -> None:
    """SPEC K5: a saved state stands for the prompt it was made of, also after export and import."""
    backend = recurrent()
    expected = step(backend, (0, [65, 66, 67, 68])).copy()
    step(backend, (1, [65, 66]))
    backend.write_state(2, backend.read_state(1))
    assert backend.length(2) == 0
    data = backend.export_state(2)
    backend.drop(2)
    assert not np.array_equal(step(backend, (2, [67, 68])), expected)
    backend.drop(2)
    backend.import_state(2, data)
    assert np.array_equal(step(backend, (2, [67, 68])), expected)
    backend.check()


def test_a_decoder_fake_has_a_last_hidden_state_and_no_other() -> None:
    """SPEC D8: the hidden state follows from the tokens; a decoder has no state to begin from."""
    backend = FakeBackend()
    step(backend, (0, [65, 66]), (1, [65, 67]))
    hidden = backend.last_hidden(0, [65, 66])
    assert hidden.shape == (8,)
    assert hidden.data != backend.last_hidden(1, [65, 67]).data
    step(backend, (2, [65]))
    assert backend.last_hidden(2, [65, 66]) == hidden
    assert backend.length(2) == 2
    backend.drop(2)
    for refused in (lambda: backend.read_state(0), lambda: backend.write_state(2, [])):
        with pytest.raises(UnsupportedError):
            refused()


def test_bytes_and_control_tokens_are_the_vocabulary() -> None:
    """B3: byte tokens let a character be split over tokens, as real vocabularies do."""
    vocabulary = FakeVocabulary()
    assert vocabulary.tokenize("é", add_special=True, parse_special=True) == [BOS, 0xC3, 0xA9]
    text = "<|im_start|>a<|im_end|>"
    assert vocabulary.tokenize(text, add_special=False, parse_special=True) == [IM_START, 97, IM_END]
    assert vocabulary.tokenize(text, add_special=False, parse_special=False) == list(text.encode())
    assert (vocabulary.eog_tokens, vocabulary.eos_text) == ((EOS, IM_END), "</s>")


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["step", "fork", "trim", "drop", "move"]), *[st.integers(0, 3)] * 3),
    max_size=40,
)


@given(ACTIONS)
@settings(max_examples=60, deadline=None)
def test_any_order_of_calls_keeps_histories_and_cells_exact(actions: list[tuple[str, int, int, int]]) -> None:
    """SPEC Q12: against a naive model of lists, with the invariants checked after each call."""
    backend = FakeBackend(num_sequences=4, num_cells=24)
    model: list[list[int]] = [[], [], [], []]
    for name, seq, other, number in actions:
        match name:
            case "step":
                tokens = [number + 60] * (number + 1)
                try:
                    step(backend, (seq, tokens))
                    model[seq] = model[seq] + tokens
                except PoolFullError:
                    assert backend.num_cells_used + len(tokens) > 24
            case "fork" if not model[other] and 0 < number <= len(model[seq]):
                backend.fork(seq, other, number)
                model[other] = model[seq][:number]
            case "trim" if number <= len(model[seq]):
                backend.trim(seq, number)
                model[seq] = model[seq][:number]
            case "drop":
                backend.drop(seq)
                model[seq] = []
            case "move" if not model[other]:
                data = backend.export_state(seq)
                backend.drop(seq)
                backend.import_state(other, data)
                model[seq], model[other] = [], model[seq]
        backend.check()
        assert [list(backend.tokens(index)) for index in range(4)] == model
