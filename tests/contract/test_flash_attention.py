"""Attention as one operation or as products of matrices: what each can, and that states stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.backends.llama import state
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.binding import accelerators
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.model import FlashAttention, ModelSpec, Repeatable
from stoker.sync import Runtime
from tiny_models import TINY

pytestmark = pytest.mark.skipif(bool(accelerators()), reason="an accelerator has keys of its own")
PROMPT = tuple(range(3, 103))
NUM_BESIDE = 40


def opened(path: Path, folder: Path, flash_attention: FlashAttention, **fields: Any) -> LlamaBackend:
    """The model with that kind of attention."""
    given = {"n_ctx": 1024, "num_slots": 2, "n_batch": 256, "num_threads": 1} | fields
    given.setdefault("repeatable", Repeatable.AUTO)
    spec = ModelSpec(id="m", path=str(path), flash_attention=flash_attention, **given)
    return load(spec, cache_dir=folder)


def beside_each_other(backend: LlamaBackend) -> np.ndarray:
    """The last rows of two texts that grow in the same steps, so that the cells of each lie apart."""
    starts = (PROMPT, PROMPT[50:])
    backend.launch(BatchPlan(tuple(PlanItem(seq, 0, text, 0) for seq, text in enumerate(starts)))).rows()
    for at in range(NUM_BESIDE):
        items = tuple(PlanItem(seq, len(text) + at, (7 + at,), 1) for seq, text in enumerate(starts))
        rows = backend.launch(BatchPlan(items)).rows()
    return rows.copy()


def test_without_it_a_model_computes_the_same_but_for_rounding(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC C21: and says so; texts are not called repeatable."""
    with opened(tiny_decoder, smoke_dir, FlashAttention.OFF) as off:
        found = off.capabilities
        assert (found.flash_attention, found.kv_type, found.is_repeatable) == ("off", "f16", False)
        rows = beside_each_other(off)
    with opened(tiny_decoder, smoke_dir, FlashAttention.AUTO, repeatable=Repeatable.OFF) as on:
        assert on.capabilities.flash_attention == "on"
        expected = beside_each_other(on)
    assert not np.array_equal(rows, expected)
    assert np.abs(rows - expected).max() < 0.01 * np.abs(expected).max()


def test_states_of_cells_that_lie_apart_come_back_bit_exactly(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC C21, B2: values lie by channel then, and a token's are as many pieces."""
    with opened(tiny_decoder, smoke_dir, FlashAttention.OFF) as backend:
        beside_each_other(backend)
        lengths = [backend.length(seq) for seq in range(2)]
        states = [bytes(backend.export_state(seq)) for seq in range(2)]
        for seq in range(2):
            backend.drop(seq)
        for seq in range(2):
            backend.import_state(seq, states[seq])
        assert [backend.length(seq) for seq in range(2)] == lengths
        assert [bytes(backend.export_state(seq)) for seq in range(2)] == states


def test_states_of_the_other_kind_are_refused(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC C21, C1: their values lie otherwise."""
    with opened(tiny_decoder, smoke_dir, FlashAttention.OFF) as off:
        beside_each_other(off)
        state = bytes(off.export_state(0))
    with (
        opened(tiny_decoder, smoke_dir, FlashAttention.AUTO, repeatable=Repeatable.OFF) as on,
        pytest.raises(InvalidRequestError, match="another model or build"),
    ):
        on.import_state(0, state)


def test_a_model_without_attention_stays_as_it_is(tmp_path: Path, smoke_dir: Path) -> None:
    """SPEC C21: its states on disk are of use whatever is set for all models."""
    path = TINY["rwkv7"](tmp_path / "m.gguf")
    found = []
    for each in FlashAttention:
        with opened(path, smoke_dir, each, repeatable=Repeatable.ON) as backend:
            found.append((backend.capabilities.fingerprint, backend.capabilities.flash_attention))
    assert found[0] == found[1]


def test_a_hidden_state_is_computed_once_more_in_the_same_way(
    tmp_path: Path, smoke_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC C21, D8: of a model that cannot go back, in a context of its own."""
    made: list[FlashAttention] = []

    def noted(model: LlamaModel, options: ContextOptions) -> LlamaContext:
        made.append(options.flash_attention)
        return LlamaContext(model, options)

    monkeypatch.setattr(state, "LlamaContext", noted)
    path = TINY["gemma3"](tmp_path / "m.gguf")
    for each in FlashAttention:
        with opened(path, smoke_dir, each, repeatable=Repeatable.OFF) as backend:
            backend.launch(BatchPlan((PlanItem(0, 0, PROMPT, 0),))).rows()
            backend.last_hidden(0, PROMPT)
    assert made == list(FlashAttention)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"kv_type": "q8_0"},
            "flash_attention is off, and kv_type q8_0 needs it: set it to auto, or kv_type to f16",
        ),
        ({"repeatable": Repeatable.ON}, "flash_attention is off, and repeatable answers need it"),
    ],
)
def test_what_takes_it_is_refused_without(
    tiny_decoder: Path, smoke_dir: Path, fields: dict[str, Any], words: str
) -> None:
    """SPEC C21: with what to set instead."""
    with pytest.raises(UnsupportedError, match=words) as caught:
        opened(tiny_decoder, smoke_dir, FlashAttention.OFF, **fields)
    assert caught.value.param == "flash_attention"


def test_a_model_in_memory_that_is_asked_for_otherwise_stays_as_it_is(
    tiny_decoder: Path, tmp_path: Path
) -> None:
    """SPEC C21, L5: what contradicts itself, or what holds already, is refused, and no engine ends of it."""
    folders = {"cache_dir": tmp_path, "models_dir": tmp_path}
    with Runtime(str(tiny_decoder), isolation="thread", slots=2, ctx_size=512, **folders) as runtime:
        model = runtime.models[0].id
        with pytest.raises(UnsupportedError, match="kv_type q8_0 needs it: set it to auto"):
            runtime.load_model(model, flash_attention="off", kv_type="q8_0")
        assert runtime.status().restarts == 0
        assert runtime.ask("a", max_tokens=4).usage.completion_tokens == 4
        runtime.load_model(model, flash_attention="off")
        with pytest.raises(UnsupportedError, match="kv_type q8_0 needs it: set it to auto"):
            runtime.load_model(model, kv_type="q8_0")
        assert runtime.models[0].flash_attention == "off"
        assert runtime.ask("a", max_tokens=4).usage.completion_tokens == 4
