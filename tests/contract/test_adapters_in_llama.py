"""LoRA adapters in llama.cpp's backend, against models into whose weights the same adapters are merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.backends.llama import row_tiles
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.binding import llama
from stoker.backends.protocol.backend import PLAIN, BatchPlan, Conditioning, PlanItem
from stoker.errors import ModelFileError, PoolFullError, StepFailedError, UnsupportedError
from stoker.ipc.model import AdapterSpec, ModelSpec
from tiny_adapters import EMBEDDINGS, TinyAdapter, write_adapter, write_merged
from tiny_models import WIDTH, write_llama, write_mamba

TEXT = tuple(range(5, 60))
NUM_CELLS = 512
TOLERANCE = 1e-4
"""Logits reach 30; adding B A x to W x rounds otherwise than (W + B A) x."""
ROUNDING = 2e-2
"""What a key, a value or a query may do that comes to lie on the other side of a rounding, as a last bit
decides: a few rows in a hundred meet one, on each processor others. By roundings to f16, which the cells have
here, rows moved up to 9e-3; by those to bf16 one moved 3e-2, which is no bound.
A scale wrong by a hundredth moves each row by 4e-2, one by a thousandth most by more than `TOLERANCE`."""
BATCH_TOLERANCE = 5e-3
"""Products in f32 depend on the shape of the batch (docs/adr/0006)."""

Adapted = Callable[..., Conditioning]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and adapters lie."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A plain decoder in f32."""
    return write_llama(folder / "base.gguf")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, TinyAdapter]:
    """Two adapters of it; the second names no alpha."""
    return {
        "red": write_adapter(folder / "red.gguf", 1),
        "blue": write_adapter(folder / "blue.gguf", 2, alpha=0.0),
    }


@pytest.fixture(scope="module")
def open_tiny(smoke_dir: Path) -> Callable[..., LlamaBackend]:
    """A function that loads a tiny model with few cells."""

    def open_path(path: Path, adapters: dict[str, TinyAdapter] | None = None) -> LlamaBackend:
        given = tuple(AdapterSpec(name=name, path=str(a.path)) for name, a in (adapters or {}).items())
        spec = ModelSpec(
            id="m",
            path=str(path),
            num_slots=4,
            n_ctx=NUM_CELLS,
            n_batch=128,
            num_threads=1,
            adapters=given,
            kv_type="f16",
        )
        return load(spec, cache_dir=smoke_dir)

    return open_path


@pytest.fixture(scope="module")
def loaded(
    open_tiny: Callable[..., LlamaBackend], base: Path, adapters: dict[str, TinyAdapter]
) -> Iterator[LlamaBackend]:
    """The base with both adapters."""
    with open_tiny(base, adapters) as backend:
        yield backend


@pytest.fixture
def backend(loaded: LlamaBackend) -> LlamaBackend:
    """The same, empty and unconditioned."""
    for seq in range(loaded.capabilities.num_sequences):
        loaded.drop(seq)
        loaded.condition(seq, PLAIN)
    return loaded


def adapted(*pairs: tuple[str, float]) -> Conditioning:
    """Conditioned by these adapters."""
    return Conditioning(adapters=tuple(sorted(pairs)))


@pytest.fixture(autouse=True)
def _no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of attention for all steps: what is compared here to TOLERANCE is by which weights they are."""
    monkeypatch.setattr(row_tiles, "LEAST_GAIN", math.inf)


def rows_of(backend: LlamaBackend, seq: int = 0, text: tuple[int, ...] = TEXT) -> np.ndarray:
    """Rows after the whole text but its last token, and after that in a step of its own."""
    begun = backend.launch(BatchPlan((PlanItem(seq, 0, text[:-1], 1),))).rows().copy()
    last = backend.launch(BatchPlan((PlanItem(seq, len(text) - 1, text[-1:], 1),))).rows().copy()
    return np.concatenate([begun, last])


def rows_of_short_texts(backend: LlamaBackend) -> np.ndarray:
    """Both rows of every four neighbours in the text: what rounds otherwise in one is not seen by others."""
    found = []
    for start in range(len(TEXT) - 3):
        backend.drop(0)
        found.append(rows_of(backend, 0, TEXT[start : start + 4]))
    return np.concatenate(found)


def check_are_alike(found: np.ndarray, expected: np.ndarray) -> None:
    """Rows of short texts: the same but for the few that meet a rounding."""
    errors = np.abs(found - expected).max(axis=1)
    assert np.quantile(errors, 0.9) < TOLERANCE
    assert errors.max() < ROUNDING


@pytest.mark.parametrize(
    "pairs",
    [[("red", 1.0)], [("red", 0.4)], [("blue", -1.5)], [("blue", 0.5), ("red", 0.7)]],
    ids=["whole", "scaled", "without alpha", "two at once"],
)
def test_an_adapter_is_as_if_merged_into_the_weights(
    pairs: list[tuple[str, float]],
    backend: LlamaBackend,
    adapters: dict[str, TinyAdapter],
    open_tiny: Callable[..., LlamaBackend],
    base: Path,
) -> None:
    """SPEC K6: W + scale * alpha / rank * B A, computed independently of llama.cpp."""
    parts = ((adapters[name], scale) for name, scale in pairs)
    with open_tiny(write_merged(base.with_name("merged.gguf"), base, *parts)) as reference:
        expected = rows_of_short_texts(reference)
    plain = rows_of_short_texts(backend)
    backend.drop(0)
    backend.condition(0, adapted(*pairs))
    found = rows_of_short_texts(backend)
    check_are_alike(found, expected)
    assert np.abs(found - plain).max(axis=1).min() > 1.0


def test_sequences_of_several_adapters_step_together_as_alone(backend: LlamaBackend) -> None:
    """SPEC K6: rows come back in the plan's order, whatever passes it is cut into."""
    sets = [adapted(("red", 1.0)), PLAIN, adapted(("blue", 1.0)), adapted(("red", 1.0)), PLAIN]
    texts = [tuple(range(5 + seq, 15 + 3 * seq)) for seq in range(len(sets))]
    alone = []
    for seq, (conditioning, text) in enumerate(zip(sets, texts, strict=True)):
        backend.condition(seq, conditioning)
        alone.append(rows_of(backend, seq, text))
        backend.drop(seq)
    prefill = BatchPlan(tuple(PlanItem(seq, 0, text[:-1], 1 + (seq == 2)) for seq, text in enumerate(texts)))
    rows = backend.launch(prefill).rows().copy()
    assert len(rows) == 6
    together = np.delete(rows, 2, axis=0)  # the third has asked for the row before its last as well
    decode = BatchPlan(
        tuple(PlanItem(seq, len(text) - 1, text[-1:], 1) for seq, text in reversed([*enumerate(texts)]))
    )
    decoded = backend.launch(decode).rows()[::-1]
    for seq, expected in enumerate(alone):
        assert np.abs(together[seq] - expected[0]).max() < BATCH_TOLERANCE
        assert np.abs(decoded[seq] - expected[1]).max() < BATCH_TOLERANCE


def test_what_adapters_computed_is_shared_and_stored(backend: LlamaBackend) -> None:
    """SPEC K6, C1: forked cells and an exported state go on as if the sequence had computed them."""
    red = adapted(("red", 1.0))
    backend.condition(0, red)
    expected = rows_of(backend)[1]
    state = bytes(backend.export_state(0))
    backend.fork(0, 1, len(TEXT) - 1)
    backend.condition(1, red)
    forked = backend.launch(BatchPlan((PlanItem(1, len(TEXT) - 1, TEXT[-1:], 1),))).rows()[0].copy()
    assert np.abs(forked - expected).max() < TOLERANCE
    backend.drop(0)
    backend.drop(1)
    backend.import_state(2, state)
    backend.condition(2, red)
    backend.trim(2, len(TEXT) - 1)
    restored = backend.launch(BatchPlan((PlanItem(2, len(TEXT) - 1, TEXT[-1:], 1),))).rows()[0]
    assert np.abs(restored - expected).max() < TOLERANCE


def test_the_hidden_state_is_the_adapted_ones(backend: LlamaBackend) -> None:
    """SPEC D8, K6: by the same weights as the text."""
    plain = np.frombuffer(backend.last_hidden(0, TEXT[:1]).data, "<f4").copy()
    backend.condition(1, adapted(("red", 1.0)))
    found = np.frombuffer(backend.last_hidden(1, TEXT[:1]).data, "<f4")
    assert found.shape == (WIDTH,)
    assert np.abs(found - plain).max() > 1e-3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_pass_that_fails_takes_the_earlier_ones_back(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """SPEC Q12: a step that raises changed nothing, also where some of it was computed."""
    sets = [PLAIN, adapted(("red", 1.0)), adapted(("blue", 1.0))]
    for seq, conditioning in enumerate(sets):
        backend.condition(seq, conditioning)
        backend.launch(BatchPlan((PlanItem(seq, 0, TEXT[:20], 1),))).rows()
    plan = BatchPlan(tuple(PlanItem(seq, 20, TEXT[20:30], 1) for seq in range(3)))
    expected = backend.launch(plan).rows().copy()
    for seq in range(3):
        backend.trim(seq, 20)
    calls, decode = [], llama.llama_decode

    def fail_once(handle: object, batch: object) -> int:
        calls.append(batch)
        return -3 if len(calls) == failing + 1 else int(decode(handle, batch))

    monkeypatch.setattr(llama, "llama_decode", fail_once)
    with pytest.raises(StepFailedError):
        backend.launch(plan).rows()
    assert [backend.length(seq) for seq in range(3)] == [20, 20, 20]
    assert np.abs(backend.launch(plan).rows() - expected).max() < TOLERANCE


def test_a_full_pool_in_a_later_pass_changes_nothing(backend: LlamaBackend) -> None:
    """SPEC Q12: cells that earlier passes took are free again."""
    backend.condition(1, adapted(("red", 1.0)))
    text = tuple(TEXT[index % len(TEXT)] for index in range(NUM_CELLS))
    for begin in range(0, NUM_CELLS - 128, 128):
        backend.launch(BatchPlan((PlanItem(0, begin, text[:128], 0),))).rows()
    backend.launch(BatchPlan((PlanItem(1, 0, text[:64], 0),))).rows()
    at = NUM_CELLS - 128
    with pytest.raises(PoolFullError):
        backend.launch(BatchPlan((PlanItem(0, at, text[:40], 1), PlanItem(1, 64, text[:40], 1)))).rows()
    assert (backend.length(0), backend.length(1)) == (at, 64)
    backend.launch(BatchPlan((PlanItem(0, at, text[:40], 1), PlanItem(1, 64, text[:24], 1)))).rows()


def test_whole_prompts_are_not_scored_by_weights_of_another(backend: LlamaBackend) -> None:
    """SPEC D6, K6: every row of a prompt is the adapted model's."""
    backend.condition(0, adapted(("red", 1.0)))
    every = backend.launch(BatchPlan((PlanItem(0, 0, TEXT, len(TEXT)),))).rows().copy()
    backend.drop(0)
    assert np.abs(every[[-2, -1]] - rows_of(backend)).max() < TOLERANCE


def test_what_it_has_is_told(backend: LlamaBackend, adapters: dict[str, TinyAdapter]) -> None:
    """SPEC K7, R1: names, fingerprints that differ, bytes."""
    found = dict(backend.capabilities.adapters)
    assert list(found) == ["red", "blue"]
    assert len(set(found.values())) == 2
    size = sum(a.nbytes + b.nbytes for adapter in adapters.values() for a, b in adapter.factors.values())
    assert backend.memory()["adapters"] == size


def test_an_unknown_adapter_is_refused_by_name(backend: LlamaBackend) -> None:
    """SPEC K6: with those there are."""
    with pytest.raises(UnsupportedError, match="no adapter 'green'; there are: red, blue"):
        backend.condition(0, adapted(("green", 1.0)))


def test_a_model_without_adapters_says_so(open_tiny: Callable[..., LlamaBackend], base: Path) -> None:
    """SPEC K6: never a silent answer of the base."""
    with open_tiny(base) as plain, pytest.raises(UnsupportedError, match="loaded without adapters"):
        plain.condition(0, adapted(("red", 1.0)))


def test_an_adapter_of_another_base_fails_the_load_by_both_names(
    open_tiny: Callable[..., LlamaBackend], base: Path, tmp_path: Path
) -> None:
    """SPEC K6: before llama.cpp sees either."""
    wide = write_adapter(tmp_path / "wide.gguf", targets={"blk.0.attn_q.weight": (2 * WIDTH, WIDTH)})
    with pytest.raises(ModelFileError, match=r"wide\.gguf does not fit base\.gguf.*attn_q"):
        open_tiny(base, {"wide": wide})


def test_embeddings_are_adapted_where_they_are_no_output_matrix_as_well(
    open_tiny: Callable[..., LlamaBackend], base: Path, tmp_path: Path
) -> None:
    """SPEC K6: where they are, llama.cpp would end the process, so that is refused."""
    words = write_adapter(tmp_path / "words.gguf", targets=EMBEDDINGS)
    with open_tiny(write_merged(tmp_path / "merged.gguf", base, (words, 0.7))) as reference:
        expected = rows_of_short_texts(reference)
    with open_tiny(base, {"words": words}) as backend:
        plain = rows_of_short_texts(backend)
        backend.drop(0)
        backend.condition(0, adapted(("words", 0.7)))
        found = rows_of_short_texts(backend)
    check_are_alike(found, expected)
    assert np.abs(found - plain).max(axis=1).min() > 1.0
    with pytest.raises(UnsupportedError, match=r"words\.gguf .* tied\.gguf: .* output matrix"):
        open_tiny(write_llama(tmp_path / "tied.gguf", is_tied=True), {"words": words})


def test_a_model_that_cannot_go_back_refuses_adapters(
    open_tiny: Callable[..., LlamaBackend], tmp_path: Path
) -> None:
    """SPEC K6: a recurrent model, with the reason."""
    path = write_mamba(tmp_path / "mamba.gguf")
    targets = {"blk.0.ssm_out.weight": (WIDTH, 2 * WIDTH)}
    adapter = write_adapter(tmp_path / "a.gguf", architecture="mamba", targets=targets)
    with pytest.raises(UnsupportedError, match=r"mamba\.gguf is a model of class recurrent"):
        open_tiny(path, {"a": adapter})
