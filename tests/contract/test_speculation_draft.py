"""Draft models in llama.cpp: what they guess, which are refused, what they take (SPEC D9, R1)."""

import msgspec
import pytest

import tiny_models
from stoker.backends.llama.backend import load
from stoker.backends.llama.draft import SLICE_TOKENS
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import AdapterSpec, ModelSpec, Speculation
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.models.memory_estimate.fit import with_draft

TEXT = [1, 40, 41, 42, 90, 91, 92, 60]
NUM_CELLS = 256


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of tiny models."""
    folder = tmp_path_factory.mktemp("drafts")
    tiny_models.write_llama(folder / "large.gguf")
    tiny_models.write_mamba(folder / "mamba.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "TOKENS", [*tiny_models.TOKENS[:-1], "▁moon"])
        tiny_models.write_llama(folder / "moon.gguf")
        patch.setattr(tiny_models, "TOKENS", [*tiny_models.TOKENS, "▁sun"])
        tiny_models.write_llama(folder / "sun.gguf")
    return folder


def open_with(files, draft, mode=Speculation.AUTO):
    """The large model, guessed for by another file."""
    spec = ModelSpec(
        id="m",
        path=str(files / "large.gguf"),
        num_slots=1,
        n_ctx=NUM_CELLS,
        n_batch=128,
        num_threads=1,
        speculation=mode,
        draft_path=str(files / draft),
    )
    return load(spec, cache_dir=files)


@pytest.fixture(scope="module")
def backend(files):
    """A model that guesses for itself: what it guesses is what it says."""
    with open_with(files, "large.gguf") as backend:
        yield backend


def said(backend, tokens, count):
    """What the model itself says next, greedily."""
    backend.drop(0)
    text, pending = list(tokens), list(tokens)
    for _ in range(count):
        row = backend.launch(BatchPlan((PlanItem(0, len(text) - len(pending), pending, 1),))).rows()[0]
        pending = [int(row.argmax())]
        text += pending
    return text[len(tokens) :]


def test_it_guesses_what_the_same_model_says(backend):
    """SPEC D9: after a text, after a part of its own guesses, and after another text."""
    answer = said(backend, TEXT, 12)
    other = [1, 99, 98, 97]
    assert backend.drafter.guess(TEXT, 6) == answer[:6]
    assert backend.drafter.guess([*TEXT, *answer[:3]], 6) == answer[3:9]
    assert backend.drafter.guess(other, 4) == said(backend, other, 4)
    assert backend.drafter.guess(TEXT, 6) == answer[:6]
    assert backend.drafter.guess([*TEXT, 77], 4) == said(backend, [*TEXT, 77], 4)


def test_a_long_text_is_read_a_slice_a_call_and_one_too_long_not_at_all(backend):
    """SPEC D9: nobody waits for more than a slice; the context of the draft bounds it."""
    tokens = [20 + at % 50 for at in range(2 * SLICE_TOKENS + 10)]
    assert backend.drafter.guess(tokens, 2) == []
    assert backend.drafter.guess(tokens, 2) == []
    assert len(backend.drafter.guess(tokens, 2)) == 2
    assert len(backend.drafter.guess(tokens, 500)) == NUM_CELLS - len(tokens)
    assert backend.drafter.guess([20] * (NUM_CELLS + 3), 5) == []


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("sun.gguf", r"sun\.gguf cannot guess for large\.gguf: it has 263 tokens, the other 262"),
        ("moon.gguf", r"token 261 is b' moon' and b' world'"),
        ("mamba.gguf", r"mamba\.gguf cannot guess for large\.gguf: it cannot take back"),
    ],
)
def test_a_model_that_cannot_guess_for_the_other_is_refused_with_the_reason(files, draft, reason):
    """SPEC D9: typed, with both names; nothing stays loaded."""
    with pytest.raises(UnsupportedError, match=reason) as caught:
        open_with(files, draft)
    assert caught.value.param == "draft_model"


def test_a_draft_that_is_not_there_is_a_typed_error(files):
    """SPEC D9, R7; one that is not wanted is not looked at."""
    with pytest.raises(ModelFileError):
        open_with(files, "none.gguf")
    with open_with(files, "none.gguf", Speculation.LOOKUP) as backend:
        assert backend.drafter is None


def test_the_estimate_counts_the_draft_model(files, backend):
    """SPEC R1: never under what its buffers take."""
    alone = estimator_of(files / "large.gguf")
    spec = ModelSpec(id="m", path="", num_slots=1, n_ctx=NUM_CELLS)
    estimate = with_draft(alone, alone)(spec)
    assert estimate.lines["draft"] >= backend.drafter.memory() == backend.memory()["draft"]
    assert estimate.total_bytes == alone(spec).total_bytes + estimate.lines["draft"]
    adapted = msgspec.structs.replace(spec, adapters=(AdapterSpec(name="a", path="", size_bytes=2**20),))
    assert with_draft(alone, alone)(adapted).lines["draft"] == estimate.lines["draft"]
