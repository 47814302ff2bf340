"""What every backend must do with the state of a model: give it, begin from it, and the last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.llama.backend import LlamaBackend
from stoker.backends.llama.binding import llama
from stoker.backends.protocol.backend import BatchPlan, PlanItem, Rows
from stoker.errors import StepFailedError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.ipc.usage import Tensor
from tiny_models import TINY, WINDOW, write_mamba

TestedBackend = FakeBackend | LlamaBackend
OpenLlama = Callable[[Path], LlamaBackend]
TinyModel = Callable[[str], Path]

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 250, 40)]
FIRST, REST = TOKENS[:25], TOKENS[25:]


def feed(backend: TestedBackend, seq: int, tokens: Sequence[int], num_logits: int = 1) -> Rows:
    """Rows of one step that appends tokens to one sequence, as a copy."""
    return backend.launch(BatchPlan((PlanItem(seq, backend.length(seq), tokens, num_logits),))).rows().copy()


def numbers(tensor: Tensor) -> np.ndarray:
    """A tensor as numpy has it."""
    return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)


@pytest.mark.parametrize("name", TINY)
def test_models_that_cannot_go_back_say_so_and_move_bit_exactly(
    open_llama: OpenLlama, tiny_model: TinyModel, name: str
) -> None:
    """SPEC C2, K1, K7: neither trim nor fork; an exported state goes on elsewhere with no bit changed."""
    kind = {"jamba": ModelClass.HYBRID, "lfm2": ModelClass.HYBRID, "gemma3": ModelClass.DECODER}
    with open_llama(tiny_model(name)) as backend:
        found = backend.capabilities
        assert (found.model_class, found.can_trim, found.can_fork) == (
            kind.get(name, ModelClass.RECURRENT),
            False,
            False,
        )
        assert bool(found.state_layout) is (found.model_class is ModelClass.RECURRENT)
        feed(backend, 0, TOKENS * 3)
        assert backend.length(0) > 2 * WINDOW
        data = backend.export_state(0)
        expected = feed(backend, 0, REST)
        feed(backend, 1, FIRST)
        backend.drop(0)
        backend.import_state(5, bytes(data))
        assert np.array_equal(feed(backend, 5, REST), expected)
        backend.import_state(0, bytearray(data))
        with pytest.raises(UnsupportedError):
            backend.trim(0, 10)
        with pytest.raises(UnsupportedError):
            backend.fork(0, 2, 10)


def test_each_layer_has_one_matrix_called_state(recurrent: TestedBackend) -> None:
    """SPEC D8: those are what a prompt's embedding is made of, so all have one shape."""
    layout = recurrent.capabilities.state_layout
    layers = {name.rpartition(".")[0] for name, _ in layout}
    shapes = [shape for name, shape in layout if name.endswith(".state")]
    assert len(shapes) == len(layers)
    assert len(set(shapes)) == 1


def test_a_state_stands_for_the_tokens_it_has_seen(recurrent: TestedBackend) -> None:
    """SPEC K5: A, its state put into another sequence, then B, are A and B at once; it counts as no token."""
    expected = feed(recurrent, 0, TOKENS)
    feed(recurrent, 1, FIRST, 0)
    state = recurrent.read_state(1)
    after = feed(recurrent, 1, REST)
    recurrent.write_state(2, state)
    assert recurrent.length(2) == 0
    assert [(tensor.name, tensor.shape) for tensor in state] == list(recurrent.capabilities.state_layout)
    assert np.array_equal(feed(recurrent, 2, REST), after)
    assert recurrent.length(2) == len(REST)
    assert np.abs(after - expected).max() < 1e-5
    assert not np.array_equal(feed(recurrent, 3, REST), after)


def test_a_state_is_taken_as_it_is_given(recurrent: TestedBackend) -> None:
    """SPEC K5: what was put in comes out again, and every number of it counts."""
    feed(recurrent, 0, FIRST, 0)
    state = recurrent.read_state(0)
    recurrent.write_state(1, state)
    assert recurrent.read_state(1) == state
    expected = feed(recurrent, 1, REST)
    for index in range(2):
        changed = list(state)
        values = numbers(state[index]) + 1
        changed[index] = Tensor(state[index].name, state[index].shape, values.tobytes())
        recurrent.write_state(2, changed)
        recurrent.write_state(2, changed)  # a second time replaces the first
        assert not np.array_equal(feed(recurrent, 2, REST), expected)
        recurrent.drop(2)


def test_an_initial_state_survives_export_and_failure_and_ends_with_drop(
    recurrent: TestedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC K5, Q12: parked before its first token or failed in its first step, it still begins from there."""
    own = feed(recurrent, 0, REST)
    feed(recurrent, 1, FIRST, 0)
    state = recurrent.read_state(1)
    recurrent.write_state(2, state)
    data = recurrent.export_state(2)
    with pytest.raises(StepFailedError):
        feed(recurrent, 2, [recurrent.capabilities.n_vocab])
    if isinstance(recurrent, LlamaBackend):
        monkeypatch.setattr(llama, "llama_decode", lambda context, batch: 2)
        with pytest.raises(StepFailedError):
            feed(recurrent, 2, REST)
        monkeypatch.undo()
    expected = feed(recurrent, 2, REST)
    assert not np.array_equal(expected, own)
    recurrent.import_state(3, data)
    assert recurrent.length(3) == 0
    assert np.array_equal(feed(recurrent, 3, REST), expected)
    recurrent.drop(2)
    assert np.abs(feed(recurrent, 2, REST) - own).max() < 1e-5
    recurrent.write_state(4, state)
    recurrent.drop(4)
    assert np.abs(feed(recurrent, 4, REST) - own).max() < 1e-5


def test_prompt_logprobs_begin_from_the_state_too(recurrent: TestedBackend) -> None:
    """SPEC K5, D6: every row of a prompt is one after the state, also after export and import."""
    expected = feed(recurrent, 0, TOKENS, len(TOKENS))[len(FIRST) :]
    feed(recurrent, 1, FIRST, 0)
    recurrent.write_state(2, recurrent.read_state(1))
    recurrent.import_state(3, recurrent.export_state(2))
    for seq in (2, 3):
        assert np.abs(feed(recurrent, seq, REST, len(REST)) - expected).max() < 1e-4


def test_a_sequence_that_has_not_begun_has_the_state_of_its_own(recurrent: TestedBackend) -> None:
    """SPEC K5: beginning from the model's own state is beginning from none."""
    own = feed(recurrent, 0, REST)
    recurrent.write_state(1, recurrent.read_state(2))
    assert np.abs(feed(recurrent, 1, REST) - own).max() < 1e-5


def test_a_failed_first_step_leaves_a_recurrent_sequence_empty(
    recurrent: TestedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC Q12: a native failure after some of the work was done costs nothing where nothing was before."""
    own = feed(recurrent, 0, REST)
    if isinstance(recurrent, LlamaBackend):
        decode = llama.llama_decode
        monkeypatch.setattr(llama, "llama_decode", lambda context, batch: decode(context, batch) or 2)
        with pytest.raises(StepFailedError):
            feed(recurrent, 1, FIRST)
        monkeypatch.undo()
    assert recurrent.length(1) == 0
    assert np.abs(feed(recurrent, 1, REST) - own).max() < 1e-5


def test_a_model_without_a_recurrent_state_refuses_one(
    loaded_tiny: Callable[[str], LlamaBackend], decoder: LlamaBackend
) -> None:
    """SPEC K5: a state for a decoder or a hybrid is the caller's error, which says what the model is."""
    for backend, kind in ((decoder, "decoder"), (loaded_tiny("jamba"), "hybrid")):
        with pytest.raises(UnsupportedError, match=kind) as caught:
            backend.read_state(0)
        assert caught.value.param == "state"
        with pytest.raises(UnsupportedError, match=kind):
            backend.write_state(0, [])


def test_the_last_hidden_state_is_of_the_last_token(any_backend: TestedBackend) -> None:
    """SPEC D8: the same for a sequence that holds all tokens and for one that lacks the last."""
    text = "Once upon a time there was a little girl named Lily."
    tokens = any_backend.vocabulary.tokenize(text, add_special=True, parse_special=True)
    feed(any_backend, 0, tokens)
    feed(any_backend, 1, tokens[:-1])
    hidden, other = any_backend.last_hidden(0, tokens), any_backend.last_hidden(1, tokens)
    assert np.abs(numbers(hidden) - numbers(other)).max() <= 0.02 * np.abs(numbers(hidden)).max()
    assert any_backend.length(0) == any_backend.length(1) == len(tokens)
    after = [feed(any_backend, seq, tokens[3:6])[0] for seq in (0, 1)]
    assert np.corrcoef(after[0], after[1])[0, 1] > 0.998
    changed = [*tokens[:-1], tokens[4]]
    feed(any_backend, 2, changed)
    assert not np.allclose(numbers(any_backend.last_hidden(2, changed)), numbers(hidden), atol=1e-3)


@pytest.mark.parametrize("name", TINY)
def test_the_output_matrix_turns_the_hidden_state_into_the_logits(
    loaded_tiny: Callable[[str], LlamaBackend], tiny_model: TinyModel, name: str
) -> None:
    """SPEC D8: checked against the weights in the file, beyond the window and over several batches."""
    backend = loaded_tiny(name)
    for seq in (0, 1):
        backend.drop(seq)
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tiny_model(name)).tensors}
    matrix = weights.get("output.weight", weights["token_embd.weight"])
    tokens = TOKENS * 4
    feed(backend, 0, tokens[:128], 0)
    logits = feed(backend, 0, tokens[128:])[0]
    hidden = backend.last_hidden(0, tokens)
    assert hidden.shape == (matrix.shape[1],)
    assert np.abs(matrix @ numbers(hidden) - logits).max() < 1e-4
    one = TOKENS[:1]
    logits = feed(backend, 1, one)[0]
    assert np.abs(matrix @ numbers(backend.last_hidden(1, one)) - logits).max() < 1e-4


def test_the_fingerprint_follows_the_file(open_llama: OpenLlama, tmp_path: Path) -> None:
    """SPEC C1: a model of the same shape and name with other weights has another; loaded twice, the same."""
    found = []
    for name, seed in (("a", 7), ("b", 8), ("a", 7)):
        path = tmp_path / f"{name}.gguf"
        if not path.exists():
            write_mamba(path, seed)
        with open_llama(path) as backend:
            found.append(backend.capabilities.fingerprint)
            data = backend.export_state(0)
    assert found[0] == found[2] != found[1]
    assert found[0] in bytes(data).hex()
