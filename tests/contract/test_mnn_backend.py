"""MNN's engine as a backend: the contract of one sequence, on a small model with random weights."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import test_backend_contract as contract
from test_backend_contract import feed, greedy, prompt

from mnn_folders import IM_END, N_VOCAB, tiny_mnn_folder
from stoker.backends.mnn import backend as mnn_backend
from stoker.backends.mnn import trial
from stoker.backends.mnn.backend import MnnBackend
from stoker.backends.mnn.folder import MnnFolder
from stoker.backends.mnn.reader import MnnReader
from stoker.backends.protocol.backend import BatchPlan, PlanItem, Rows
from stoker.errors import (
    InvalidRequestError,
    LoadCrashedError,
    ModelLoadError,
    NotReadyError,
    PoolFullError,
    StepFailedError,
    UnsupportedError,
)
from stoker.ipc.model import AdapterSpec, FlashAttention, ModelSpec
from stoker.models.reader import LoadContext

pytest.importorskip("MNN", reason="MNN is not installed (the mnn extra)")

NEAR = 1e-4
"""What kernels for one row and for many make of the same token, in logits of 1 to 5."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    return tiny_mnn_folder(tmp_path_factory.mktemp("mnn") / "tiny")


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    """How it is loaded."""
    return ModelSpec(id="tiny", path=str(folder), num_slots=4, n_ctx=512, n_batch=128, num_threads=1)


@pytest.fixture(scope="module")
def loaded(folder: Path, spec: ModelSpec) -> Iterator[MnnBackend]:
    """It, loaded once."""
    backend = mnn_backend.load(MnnFolder.open(folder), spec)
    yield backend
    backend.close()


@pytest.fixture
def mnn(loaded: MnnBackend) -> MnnBackend:
    """It, with its sequence empty."""
    loaded.drop(0)
    return loaded


def prompt_of(backend: MnnBackend, text: str) -> list[int]:
    """Tokens of a prompt."""
    return backend.vocabulary.tokenize(text, add_special=True, parse_special=True)


def assert_near(rows: Rows, expected: Rows) -> None:
    """The rows of the same tokens after the same history."""
    assert rows.shape == expected.shape
    assert float(np.abs(rows - expected).max()) < NEAR


def test_a_prompt_in_slices_gives_the_rows_of_the_prompt_at_once(mnn: MnnBackend) -> None:
    """B1, X2: one token after another, in slices, at once; with a row for each token, for some, for none."""
    tokens = prompt(mnn)
    every = feed(mnn, 0, tokens, len(tokens))
    mnn.drop(0)
    singly = np.concatenate([feed(mnn, 0, [token]) for token in tokens])
    assert_near(singly, every)
    mnn.drop(0)
    assert feed(mnn, 0, tokens[:5], 0).shape == (0, N_VOCAB)
    assert_near(feed(mnn, 0, tokens[5:], 3), every[-3:])
    assert mnn.length(0) == len(tokens)
    mnn.drop(0)
    assert_near(feed(mnn, 0, tokens), every[-1:])


def test_trims_in_any_number_are_as_if_the_tail_had_never_been(mnn: MnnBackend) -> None:
    """B2: MNN remembers one cut until its next step; a second one, or a drop, replaces it."""
    tokens = prompt(mnn)
    expected = feed(mnn, 0, tokens)
    for cuts in ((10,), (12, 7), (len(tokens), 1), (9, 0)):
        feed(mnn, 0, tokens[:6])
        for length in cuts:
            mnn.trim(0, length)
        assert mnn.length(0) == cuts[-1]
        assert_near(feed(mnn, 0, tokens[cuts[-1] :]), expected)


def test_the_history_decides_every_row(mnn: MnnBackend) -> None:
    """B1: a lost, doubled or reordered token shows in the logits."""
    tokens = prompt(mnn)
    expected = feed(mnn, 0, tokens)
    swapped = [*tokens[:3], tokens[4], tokens[3], *tokens[5:]]
    for changed in (tokens[1:], [tokens[0], *tokens], swapped):
        mnn.drop(0)
        assert float(np.abs(feed(mnn, 0, changed) - expected).max()) > 100 * NEAR


def test_a_failed_step_changes_nothing(mnn: MnnBackend) -> None:
    """SPEC Q12: what no model of MNN's computes is refused before it reaches native code."""
    tokens = prompt(mnn)
    feed(mnn, 0, tokens[:5])
    for item in (
        PlanItem(0, 5, [N_VOCAB], 1),
        PlanItem(0, 5, [-1], 1),
        PlanItem(0, 4, [1], 1),
        PlanItem(0, 5, [], 0),
        PlanItem(1, 0, [1], 1),
    ):
        with pytest.raises(StepFailedError):
            mnn.launch(BatchPlan((item,)))
    feed(mnn, 0, tokens * 7, 0)
    filled = mnn.length(0)
    for _ in range((512 - filled) // 100):
        feed(mnn, 0, [65] * 100, 0)
    with pytest.raises(PoolFullError):
        feed(mnn, 0, [65] * 100)
    mnn.trim(0, 5)
    after = feed(mnn, 0, tokens[5:])
    mnn.drop(0)
    assert_near(after, feed(mnn, 0, tokens))


def test_a_step_that_fails_in_native_code_changes_nothing(
    mnn: MnnBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC Q12: MNN says so by its status, and what it returns then must not be read."""
    tokens = prompt(mnn)
    feed(mnn, 0, tokens[:5])

    class Failing:
        """As native code whose graph could not be computed: the second part of a step."""

        def __init__(self, native: object) -> None:
            self._native, self._steps = native, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._native, name)

        def forward(self, tokens: list[int]) -> object:
            self._steps += 1
            return self._native.forward(tokens)

        def get_context(self) -> dict[str, int]:
            return {"status": 4 if self._steps == 2 else 0}

    model = mnn._model
    with monkeypatch.context() as patched:
        patched.setattr(model, "native", Failing(model.native))
        with pytest.raises(StepFailedError, match="status 4"):
            feed(mnn, 0, tokens[5:], 3)
    assert mnn.length(0) == 5
    after = feed(mnn, 0, tokens[5:])
    mnn.drop(0)
    assert_near(after, feed(mnn, 0, tokens))


def test_it_says_what_it_can_and_refuses_the_rest(mnn: MnnBackend, spec: ModelSpec) -> None:
    """SPEC K7, X2: one sequence whatever was asked for, no sharing, and typed refusals by name."""
    found = mnn.capabilities
    assert (found.num_sequences, found.can_trim, found.can_fork) == (1, True, False)
    assert (found.n_ctx, found.num_cells, found.n_batch) == (512, 512, 128)
    assert found.label.startswith("MNN · ")
    assert mnn.memory()["kv"] == 512 * 2 * 2 * 32 * 4
    with pytest.raises(UnsupportedError, match="1 sequence"):
        mnn.fork(0, 0, 1)
    for changes, name in (
        ({"adapters": (AdapterSpec(name="a", path="a.gguf"),)}, "LoRA"),
        ({"kv_type": "q8_0"}, "q8_0"),
        ({"draft_path": "x"}, "draft"),
        ({"flash_attention": FlashAttention.OFF}, "flash_attention off"),
    ):
        asked = ModelSpec(id="tiny", path=spec.path, **changes)
        with pytest.raises(UnsupportedError, match=name):
            mnn_backend.refuse_unsupported(asked)


@pytest.mark.parametrize(
    "what",
    [
        contract.test_text_comes_back_from_its_tokens,
        contract.test_the_added_bos_is_what_every_text_begins_with,
        contract.test_what_is_no_text_or_token_is_refused,
        contract.test_tokens_that_end_a_generation_add_no_text,
    ],
)
def test_its_vocabulary_keeps_the_contract(mnn: MnnBackend, what: object) -> None:
    """B3, SPEC D4, S3: as of every other backend."""
    what(mnn)


def test_control_tokens_are_read_only_where_they_may_be(mnn: MnnBackend) -> None:
    """X2: MNN's tokenizer reads them anywhere; a NUL, at which it would end the text, is refused."""
    vocabulary = mnn.vocabulary
    for text in ("<|im_end|>", "a<|im_end|>b", "<|im_<|im_end|>end|>", "x " * 3000 + "<|im_end|>"):
        read = vocabulary.tokenize(text, add_special=False, parse_special=True)
        plain = vocabulary.tokenize(text, add_special=False, parse_special=False)
        assert read.count(IM_END) == 1
        assert IM_END not in plain
        assert b"".join(map(vocabulary.special_piece, plain)).decode() == text
        assert b"".join(map(vocabulary.special_piece, read)).decode() == text
    with pytest.raises(InvalidRequestError, match="NUL at character 1"):
        vocabulary.tokenize("a\0b", add_special=False, parse_special=False)


def test_long_texts_are_the_tokens_of_the_whole(mnn: MnnBackend) -> None:
    """X2: a text goes to the native code in pieces, cut before words; fewer tokens than promised are none."""
    vocabulary = mnn.vocabulary
    for text in ("some w300 words w310, and " * 400, "w" * 9000, "é" * 5000):
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
        assert tokens == mnn._model.native.tokenizer_encode(text)
        assert 0 < vocabulary.least_tokens(text, 10**6) <= len(tokens)
        assert vocabulary.least_tokens(text, 10) > 10


def test_sentencepiece_reads_long_texts_as_a_whole(tmp_path: Path, spec: ModelSpec) -> None:
    """B3, X2: it puts a blank before each text it is given, so the one at a cut is left to it."""
    path = tiny_mnn_folder(tmp_path / "pieces", form=0)
    with closing(mnn_backend.load(MnnFolder.open(path), spec)) as backend:
        vocabulary = backend.vocabulary
        for text in ("naïve 🙂 words", "some words, and " * 400):
            tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
            assert tokens == backend._model.native.tokenizer_encode(text)
            assert b"".join(map(vocabulary.piece, tokens)).decode() == f" {text}"
            assert vocabulary.least_tokens(text, 10**6) <= len(tokens)


def test_greedy_text_is_mnns_own_response(mnn: MnnBackend) -> None:
    """X2: what MNN's own loop answers to the same texts, with the model that it has loaded for us."""
    native = mnn._model.native
    native.set_config(json.dumps({"max_new_tokens": 16}))
    for text in ("hello there", "w300 w301", "42"):
        mnn.drop(0)
        tokens, _ = greedy(mnn, 0, feed(mnn, 0, prompt_of(mnn, text))[0], 16)
        mnn.drop(0)
        native.reset()
        said = native.response(text, False)
        assert said == b"".join(map(mnn.vocabulary.piece, tokens)).decode()
    native.reset()


def test_a_load_is_tried_in_a_child_once(
    folder: Path, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC R9, X2: what went well is remembered for these files; what they say is told as it goes on."""
    told: list[float] = []
    context = LoadContext(on_progress=told.append, cache_dir=tmp_path)
    with closing(MnnReader(folder).load(spec, context)) as backend:
        assert feed(backend, 0, [65, 66]).shape == (1, N_VOCAB)
        native = backend._model.native
    backend.close()
    gc.collect()
    assert not [one for one in gc.get_referrers(native) if one is not sys._getframe()]
    with pytest.raises(NotReadyError):
        backend.vocabulary.tokenize("a", add_special=True, parse_special=True)
    assert (told[0], told[-1]) == (0.0, 1.0)
    (known,) = json.loads((tmp_path / trial.MEMORY_FILE).read_bytes()).values()
    assert known["load_s"] > 0
    assert min(known["token_s"], known["batch_s"]) > 0
    monkeypatch.setattr(trial, "in_child", lambda *_: pytest.fail("it was tried before"))
    trial.tried(MnnFolder.open(folder), spec, tmp_path, lambda: None)
    (tmp_path / trial.MEMORY_FILE).write_text("no JSON")
    monkeypatch.setattr(trial, "in_child", lambda *_: trial.Trial(load_s=1.0, batch_s=3.2))
    with closing(MnnReader(folder).load(spec, context)) as backend:
        assert backend.capabilities.n_batch == 20  # 2 s of a model that takes 0.1 s a token


def test_what_would_stop_the_engine_for_long_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: while MNN loads, nothing else in the engine runs, and who is silent counts as hung."""
    said = json.dumps({"load_s": 8.5, "token_s": 0.1}).encode()
    done = trial.subprocess.CompletedProcess([], 0, stdout=b"MNN says\n" + said, stderr=b"")
    monkeypatch.setattr(trial, "run_child", lambda *_: done)
    with pytest.raises(ModelLoadError, match=r"8.5 s to load .* 8 s are borne") as caught:
        trial.in_child(MnnFolder.open(folder), 1)
    assert caught.value.details["load_s"] == 8.5


@pytest.mark.parametrize("damage", ["numbers", "crash"])
def test_a_folder_that_mnn_cannot_compute_is_an_error_of_the_child(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    """SPEC R9: logits that are no numbers, and an end of the process that reads them."""
    if damage == "numbers":  # embeddings without end
        broken = tiny_mnn_folder(tmp_path / "broken")
        size = (broken / "embeddings_bf16.bin").stat().st_size
        (broken / "embeddings_bf16.bin").write_bytes(b"\x80\x7f" * (size // 2))
        with pytest.raises(ModelLoadError, match="not finite"):
            trial.in_child(MnnFolder.open(broken), 1)
    else:  # attentions whose parameters are of another kind
        broken = tiny_mnn_folder(tmp_path / "broken", main=97)
        with pytest.raises(LoadCrashedError, match="SIGSEGV"):
            trial.in_child(MnnFolder.open(broken), 1)
