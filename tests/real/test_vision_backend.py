"""A projector of llama.cpp: what it makes of pictures, in slices, and what its model makes of that."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from real_models import PROJECTOR, READER, REPORTS, needs_reader
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.vision.vision import CallLimits, LlamaVision
from stoker.backends.protocol.backend import (
    BatchPlan,
    Conditioning,
    PicturePart,
    Placed,
    PlanItem,
    Rows,
)
from stoker.client.models.beside import projector_by_model
from stoker.errors import ModelLoadError, StepFailedError, UnsupportedError
from stoker.ipc.model import ModelSpec, ProjectorSpec
from stoker.ipc.request import Picture
from stoker.models.gguf.header import read_header
from stoker.models.store import ModelStore
from tiny_models import write_llama
from tiny_projector import (
    NUM_TOKENS,
    embeddings_in_numpy,
    picture_of,
    projector_weights,
    write_projector,
)

NOW = 1e-9
"""A slice so short that it ends with the operation that it begins."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a tiny projector, and what smoke decodes found."""
    folder = tmp_path_factory.mktemp("seeing")
    write_llama(folder / "m.gguf")
    write_projector(folder / "p.gguf")
    return folder


def load_in(folder: Path, **changes: object) -> LlamaBackend:
    """The tiny model with the tiny projector."""
    fields = {"projector": ProjectorSpec(path=str(folder / "p.gguf")), **changes}
    spec = ModelSpec(
        id="m", path=str(folder / "m.gguf"), n_ctx=512, n_batch=64, num_slots=4, num_threads=1, **fields
    )
    return load(spec, cache_dir=folder)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[LlamaBackend]:
    """Loaded once; each test empties the sequences that it uses."""
    with load_in(folder) as backend:
        yield backend


@pytest.fixture
def vision(backend: LlamaBackend) -> LlamaVision:
    """The projector that is beside it."""
    assert backend.vision is not None
    return backend.vision


def in_slices(vision: LlamaVision, picture: Picture, budget_s: float = NOW) -> tuple[Rows, int]:
    """What an encode in slices gives, and of how many."""
    encoding, count = vision.begin(picture), 1
    while not encoding.run(budget_s):
        count += 1
    return encoding.result(), count


def encode_threads() -> list[threading.Thread]:
    """Those that an encode is on."""
    return [thread for thread in threading.enumerate() if thread.name == "encode"]


def read(backend: LlamaBackend, seq: int, parts: list[list[int]]) -> Rows:
    """Step the empty sequence through the parts, each an item; the last row."""
    for part in parts:
        rows = backend.launch(BatchPlan((PlanItem(seq, backend.length(seq), part, 1),))).rows()
    return rows[-1].copy()


def places(num_tokens: int) -> list[int]:
    """Numbers that stand for a picture."""
    return [-1 - index for index in range(num_tokens)]


# ------------------------------------------------------------ embeddings


def test_a_picture_becomes_what_its_weights_make_of_it(vision: LlamaVision) -> None:
    """SPEC V1: patches, attention and projector as computed in numpy; no resampling at its own size."""
    picture = picture_of(1)
    found, expected = vision.encode(picture), embeddings_in_numpy(projector_weights(), picture)
    assert found.shape == (NUM_TOKENS, vision.n_embd)
    assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()
    assert np.abs(found - vision.encode(picture_of(2))).max() > 0.1 * np.abs(expected).max()


def test_slices_change_nothing(vision: LlamaVision) -> None:
    """SPEC V3: an encode cut after each operation gives the bits of one at once."""
    rows, count = in_slices(vision, picture_of(1))
    assert count > 20
    assert np.array_equal(rows, vision.encode(picture_of(1)))


def test_nothing_is_computed_between_slices(vision: LlamaVision) -> None:
    """SPEC V3: its thread waits; it is gone when the encode is over."""
    encoding = vision.begin(picture_of(1))
    assert not encoding.run(NOW)
    (worker,) = encode_threads()
    assert encoding._granted._value == 0
    while not encoding.run(NOW):
        assert worker.is_alive()
    assert not worker.is_alive()


def test_steps_between_slices_see_nothing_of_it(backend: LlamaBackend, vision: LlamaVision) -> None:
    """SPEC V3: rows of others are to the bit what they are without it, and so are the embeddings."""
    tokens = list(range(10, 30))
    alone = read(backend, 0, [[token] for token in tokens])
    backend.drop(0)
    encoding = vision.begin(picture_of(3))
    for token in tokens:
        assert not encoding.run(NOW)
        beside = read(backend, 0, [[token]])
    while not encoding.run(1.0):
        pass
    backend.drop(0)
    assert np.array_equal(alone, beside)
    assert np.array_equal(encoding.result(), vision.encode(picture_of(3)))


@pytest.mark.parametrize("num_slices", [0, 1, 7])
def test_an_encode_that_is_given_up_leaves_the_next_one_right(vision: LlamaVision, num_slices: int) -> None:
    """SPEC V3, Q6: cancelled before it began, early and on its way; twice is once."""
    before = vision.encode(picture_of(1))
    encoding = vision.begin(picture_of(2))
    for _ in range(num_slices):
        assert not encoding.run(NOW)
    encoding.cancel()
    encoding.cancel()
    assert encoding.is_over
    encoding.join()
    assert not encode_threads()
    assert np.array_equal(vision.encode(picture_of(1)), before)


def test_a_projector_that_fails_says_so_and_goes_on(
    vision: LlamaVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC V3: a typed error of this picture alone."""
    with monkeypatch.context() as patch:
        patch.setattr(vision._library, "mtmd_encode_chunk", lambda *_: 1)
        with pytest.raises(StepFailedError, match="failed on a picture"):
            vision.encode(picture_of(1))
    assert len(vision.encode(picture_of(1))) == NUM_TOKENS


def test_a_picture_of_any_shape_takes_what_was_said(vision: LlamaVision) -> None:
    """SPEC V3: counted without encoding."""
    for width, height in ((16, 16), (40, 12), (9, 300)):
        picture = picture_of(1, width, height)
        assert vision.num_tokens(width, height) == len(vision.encode(picture)) == NUM_TOKENS
        assert vision.layout(picture) == (PicturePart(NUM_TOKENS),)


def test_another_number_of_threads_gives_the_same(vision: LlamaVision) -> None:
    """SPEC M7: from the next encode on; half as many as steps have, whose threads wait meanwhile."""
    before = vision.encode(picture_of(1))
    vision.set_threads(4)
    try:
        assert np.array_equal(vision.encode(picture_of(1)), before)
        assert vision._opened_threads == 2
    finally:
        vision.set_threads(1)


def test_a_projector_that_cannot_be_opened_anew_costs_requests_and_no_engine(tmp_path: Path) -> None:
    """SPEC M7, L6: its file is away when the threads change; once it is back, all is as before."""
    write_llama(tmp_path / "m.gguf")
    write_projector(tmp_path / "p.gguf")
    with load_in(tmp_path) as backend:
        assert backend.vision is not None
        before = backend.vision.encode(picture_of(1))
        (tmp_path / "p.gguf").rename(tmp_path / "away.gguf")
        backend.vision.set_threads(4)
        for _ in range(2):
            with pytest.raises(StepFailedError):
                backend.vision.encode(picture_of(1))
        with pytest.raises(ModelLoadError):
            backend.vision.layout(picture_of(1))
        (tmp_path / "away.gguf").rename(tmp_path / "p.gguf")
        assert backend.vision.num_tokens(picture_of(1).width, picture_of(1).height) == NUM_TOKENS
        assert np.array_equal(backend.vision.encode(picture_of(1)), before)


def test_closing_gives_up_what_is_under_way(folder: Path) -> None:
    """SPEC L1: a model can be unloaded in the middle of an encode."""
    backend = load_in(folder)
    assert backend.vision is not None
    encoding = backend.vision.begin(picture_of(1))
    encoding.run(NOW)
    backend.close()
    backend.close()
    assert encoding.is_over
    encoding.join()
    assert not encode_threads()


# ------------------------------------------------------------ in a sequence


def test_a_picture_in_slices_of_any_size_reads_the_same(backend: LlamaBackend, vision: LlamaVision) -> None:
    """SPEC V3, Q14: embeddings prefilled at once, in parts and one at a time give the same row to the bit."""
    head, tail, rows = [10, 11, 12], [20, 21], vision.encode(picture_of(1))
    backend.condition(0, Conditioning(pictures=(Placed(len(head), rows),)))
    found = []
    for size in (NUM_TOKENS, 5, 1):
        ids = places(NUM_TOKENS)
        parts = [ids[begin : begin + size] for begin in range(0, NUM_TOKENS, size)]
        found.append(read(backend, 0, [head, *parts, tail]))
        backend.drop(0)
    backend.condition(0, Conditioning())
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_picture_beside_other_rows_reads_the_same(backend: LlamaBackend, vision: LlamaVision) -> None:
    """SPEC V3: pictures of two sequences and a decode row in one step, with rows in the plan's order."""
    rows = [vision.encode(picture_of(seed)) for seed in (1, 2)]
    ids, alone = places(NUM_TOKENS), []
    for seq in (0, 1):
        backend.condition(seq, Conditioning(pictures=(Placed(1, rows[seq]),)))
        alone.append(read(backend, seq, [[10], ids]))
        backend.drop(seq)
    alone.append(read(backend, 2, [[30], [31]]))
    backend.drop(2)
    backend.launch(BatchPlan(tuple(PlanItem(seq, 0, [10 if seq < 2 else 30], 0) for seq in range(3)))).rows()
    items = (PlanItem(0, 1, ids, 1), PlanItem(2, 1, [31], 1), PlanItem(1, 1, ids, 1))
    together = backend.launch(BatchPlan(items)).rows()
    assert np.abs(together[[0, 2, 1]] - alone).max() < 1e-3  # weights of f32: other last bits by shape
    assert np.abs(alone[0] - alone[1]).max() > 0.1
    for seq in range(3):
        backend.drop(seq)
        backend.condition(seq, Conditioning())


def test_a_place_without_embeddings_is_refused_and_changes_nothing(backend: LlamaBackend) -> None:
    """SPEC V3: a step that raises leaves all sequences as they were, those of earlier passes too."""
    read(backend, 0, [[10]])
    read(backend, 1, [[10]])
    items = (PlanItem(1, 1, [11], 1), PlanItem(0, 1, places(4), 1))
    with pytest.raises(StepFailedError, match="no embeddings"):
        backend.launch(BatchPlan(items)).rows()
    assert [backend.length(seq) for seq in (0, 1)] == [1, 1]
    read(backend, 1, [[11]])
    for seq in (0, 1):
        backend.drop(seq)


def test_a_model_without_a_projector_refuses_pictures(folder: Path) -> None:
    """SPEC V1, V5: it says that it takes tokens."""
    with load_in(folder, projector=None) as backend:
        assert backend.vision is None
        assert not backend.capabilities.has_vision
        with pytest.raises(UnsupportedError):
            backend.condition(0, Conditioning(pictures=(Placed(0, np.zeros((1, 32), np.float32)),)))


# ------------------------------------------------------------ pairing and memory


def test_a_model_with_its_projector_is_ready(backend: LlamaBackend) -> None:
    """SPEC V1, O1: told in its capabilities, with a line of memory."""
    assert backend.capabilities.has_vision
    assert backend.capabilities.pairing == "ready"
    assert backend.memory()["projector"] > 0


def test_a_model_whose_projector_is_another_models_serves_text(folder: Path, tmp_path: Path) -> None:
    """SPEC V1, V5: broken, with the library's reason in the log; llama.cpp's refusal is typed."""
    foreign = write_projector(tmp_path / "f.gguf", n_embd=48)
    with load_in(folder, projector=ProjectorSpec(path=str(foreign))) as backend:
        assert backend.capabilities.pairing == "broken"
        assert read(backend, 0, [[10, 11]]).size
        with pytest.raises(ModelLoadError, match="mismatch between text model"):
            LlamaVision.open(foreign, backend._model, CallLimits(1, 64))


@pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=needs_reader)])
def test_the_estimate_of_a_projector_is_never_under(folder: Path, *, is_trained: bool) -> None:
    """SPEC R1: weights and buffers of the real and of a tiny projector."""
    path, projector = (READER, PROJECTOR) if is_trained else (folder / "m.gguf", folder / "p.gguf")
    file = ModelStore(folder).resolve(str(path))
    told = projector_by_model(projector, [file])[file.id]
    spec = ModelSpec(id="m", path=str(path), n_ctx=512, num_threads=1, projector=told)
    with load(spec, cache_dir=folder, header=read_header(path)) as backend:
        assert told.size_bytes + told.compute_bytes >= backend.memory()["projector"]


@needs_reader
def test_a_real_report_is_read(folder: Path) -> None:
    """SPEC V4: the picture in slices, then the question; the answer is exact."""
    image = pytest.importorskip("PIL.Image")
    answer = json.loads((REPORTS / "answers.jsonl").read_text().splitlines()[2])
    shown = image.open(REPORTS / answer.pop("file")).convert("RGB")
    picture = Picture(*shown.size, shown.tobytes())
    projector = ProjectorSpec(path=str(PROJECTOR))
    spec = ModelSpec(id="m", path=str(READER), n_ctx=1024, num_threads=1, projector=projector)
    with load(spec, cache_dir=folder) as backend:
        assert backend.vision is not None
        rows, _ = in_slices(backend.vision, picture, 0.01)
        assert greedy(backend, rows) == json.dumps(answer, separators=(",", ":"))


def greedy(backend: LlamaBackend, rows: Rows) -> str:
    """The likeliest answer to the usual question about a picture."""
    texts = (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n",
        "\nRead this report as JSON.<|im_end|>\n<|im_start|>assistant\n",
    )
    vocabulary = backend.vocabulary
    head, tail = (vocabulary.tokenize(text, add_special=False, parse_special=True) for text in texts)
    backend.condition(0, Conditioning(pictures=(Placed(len(head), rows),)))
    row, answer = read(backend, 0, [head, places(len(rows)), tail]), b""
    while not vocabulary.is_eog(token := int(row.argmax())):
        answer += vocabulary.piece(token)
        row = read(backend, 0, [[token]])
    return answer.decode()
