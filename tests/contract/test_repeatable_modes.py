"""Repeatable texts are a choice: what each mode computes with, and how "auto" decides (docs/adr/0029)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Runtime, Sampling
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.binding import accelerators
from stoker.backends.llama.cells import OrderedPool
from stoker.backends.llama.row_tiles import MOST, TILED, RowTiles
from stoker.backends.llama.smoke import smoke
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem
from stoker.errors import InvalidRequestError
from stoker.ipc.model import FlashAttention, KVLayout, ModelSpec, Repeatable
from stoker.models.gguf.header import GgufHeader

pytestmark = pytest.mark.skipif(bool(accelerators()), reason="an accelerator has keys of its own")
PROMPT = tuple(range(3, 103))


def opened(path: Path, folder: Path, mode: str, **fields: Any) -> LlamaBackend:
    """The model in a mode."""
    given = {"n_ctx": 512, "num_slots": 2, "n_batch": 128, "num_threads": 1, **fields}
    return load(ModelSpec(id="m", path=str(path), repeatable=Repeatable(mode), **given), cache_dir=folder)


def chosen(path: Path, folder: Path, mode: str, **fields: Any) -> tuple[str, bool, bool]:
    """Its type of cells, whether it says that it is repeatable, and whether its cells are kept in order."""
    with opened(path, folder, mode, **fields) as backend:
        found = backend.capabilities
        return found.kv_type, found.is_repeatable, isinstance(backend._context._cells, OrderedPool)


@pytest.fixture
def files(tiny_decoder: Path, smoke_dir: Path) -> tuple[Path, Path]:
    """A model, and where it is remembered that it works."""
    return tiny_decoder, smoke_dir


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What further trials are to measure."""
    measured: list[Any] = []
    run = smoke._run_trial

    def counted(*given: Any) -> Any:
        measured.append(given[4] if len(given) > 4 else ())
        return run(*given)

    monkeypatch.setattr(smoke, "_run_trial", counted)
    return measured


def remember(folder: Path, prefill: float, decode: float, half_tile: float = 0.7) -> None:
    """Have it measured as that."""
    file = folder / smoke.TRIALS_FILE
    known = json.loads(file.read_text())
    (key,) = (key for key in known if key.startswith("keys:"))
    file.write_text(json.dumps(known | {key: {"prefill": prefill, "decode": decode, "half_tile": half_tile}}))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (("on", ""), ("bf16/f16", True, True)),
        (("off", ""), ("f16", False, False)),
        (("auto", "bf16"), ("bf16/f16", True, True)),
        (("off", "bf16"), ("bf16/f16", False, False)),
        (("auto", "f16"), ("f16", False, False)),
    ],
)
def test_a_mode_decides_the_keys_and_their_order(
    files: tuple[Path, Path], trials: list[Any], how: tuple[str, str], expected: tuple[str, bool, bool]
) -> None:
    """SPEC E2, K7: and nothing is measured where the mode or the type of cells is said."""
    mode, kv_type = how
    assert chosen(*files, mode, kv_type=kv_type) == expected
    assert smoke.KEY_COST not in trials


def test_repeatable_texts_over_cells_that_cannot_give_them_are_warned_of(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC E2: both were asked for."""
    assert chosen(*files, "on", kv_type="f16") == ("f16", False, False)
    assert "its texts are not repeatable, with f16 cells of a decoder and weights in F32" in caplog.text


def test_weights_that_are_multiplied_in_tiles_are_never_called_repeatable(
    tiny_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC E2, E3: K-quants; "auto" measures none, as it would be paid for nothing."""
    monkeypatch.setattr(GgufHeader, "tensor_types", frozenset({"F32", "Q4_K"}))
    assert chosen(tiny_decoder, tmp_path, "auto") == ("f16", False, False)
    assert not any(key.startswith("keys:") for key in json.loads((tmp_path / "smoke.json").read_text()))
    assert not caplog.records
    assert chosen(tiny_decoder, tmp_path, "on") == ("bf16/f16", False, True)
    assert (
        "its texts are not repeatable, with bf16/f16 cells of a decoder and weights in F32, Q4_K"
        in caplog.text
    )


def test_auto_measures_a_model_once_and_takes_repeatable_texts_under_five_percent(
    tiny_decoder: Path, tmp_path: Path, trials: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC E3: in a child process, remembered beside the verdict; the dearer of prompt and answer counts."""
    with caplog.at_level(logging.INFO):
        first = chosen(tiny_decoder, tmp_path, "auto")
    assert f"repeatable is {'on' if first[1] else 'off'}, it takes " in caplog.text
    assert trials == [(), smoke.KEY_COST]
    assert chosen(tiny_decoder, tmp_path, "auto") == first
    remember(tmp_path, 0.049, -0.1)
    assert chosen(tiny_decoder, tmp_path, "auto") == ("bf16/f16", True, True)
    without = chosen(tiny_decoder, tmp_path, "auto", flash_attention=FlashAttention.OFF)
    assert without == ("f16", False, False)
    for layout in (KVLayout.POOL, KVLayout.STREAMS):
        given = {"flash_attention": FlashAttention.OFF, "kv_type": "bf16", "kv_layout": layout}
        assert chosen(tiny_decoder, tmp_path, "auto", **given) == ("bf16/f16", False, False)
    remember(tmp_path, 0.01, 0.051)
    assert chosen(tiny_decoder, tmp_path, "auto") == ("f16", False, False)
    with opened(tiny_decoder, tmp_path, "auto") as backend:
        assert backend.capabilities.repeatable_cost == 0.051
    assert trials == [(), smoke.KEY_COST]


@pytest.mark.parametrize(("half_tile", "by_row"), [(0.2, TILED), (9.0, MOST)])
def test_where_prompts_are_padded_is_as_the_same_trial_has_measured(
    tiny_decoder: Path, tmp_path: Path, half_tile: float, by_row: float
) -> None:
    """Q24: how much dearer attention is row by row is the processor's: 5 and 11 times were met."""
    chosen(tiny_decoder, tmp_path, "auto")
    file = tmp_path / smoke.TRIALS_FILE
    (cost,) = (value for key, value in json.loads(file.read_text()).items() if key.startswith("keys:"))
    assert cost["half_tile"] > 0.0
    remember(tmp_path, 0.5, 0.5, half_tile)
    with opened(tiny_decoder, tmp_path, "auto") as backend:
        tiles = backend.extensions.tiles
        assert isinstance(tiles, RowTiles)
        assert tiles.by_row == pytest.approx(by_row)


@pytest.mark.long
def test_where_measuring_fails_auto_is_off_and_measures_again_at_the_next_start(
    tiny_decoder: Path, tmp_path: Path, trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC E3: it costs no load; nothing is remembered of it."""
    smoke.verdict_for(tiny_decoder, tmp_path)
    monkeypatch.setenv("STOKER_SMOKE_FAULT", "segv-always")
    assert chosen(tiny_decoder, tmp_path, "auto") == ("f16", False, False)
    monkeypatch.delenv("STOKER_SMOKE_FAULT")
    with opened(tiny_decoder, tmp_path, "auto") as backend:
        assert backend.capabilities.repeatable_cost is not None
    assert trials == [(), smoke.KEY_COST, smoke.KEY_COST]


@pytest.mark.long
@pytest.mark.parametrize(("name", "measured"), [("gemma3", [smoke.KEY_COST]), ("rwkv7", [])])
def test_a_model_that_cannot_be_repeatable_is_found_out_once_at_most(
    tiny_model: Any, tmp_path: Path, trials: list[Any], name: str, measured: list[Any]
) -> None:
    """SPEC E3: of one with a sliding window the child tells; a recurrent one is told by its header."""
    for _ in range(2):
        assert chosen(tiny_model(name), tmp_path, "auto") == ("f16", False, False)
    assert trials == [(), *measured]


def test_states_of_one_mode_are_refused_in_the_other(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC E2, C1: their keys have other types; a prefix store looks for its own fingerprint alone."""
    with (
        opened(tiny_decoder, smoke_dir, "on") as on,
        opened(tiny_decoder, smoke_dir, "off") as off,
    ):
        assert on.capabilities.fingerprint != off.capabilities.fingerprint
        on.launch(BatchPlan((PlanItem(0, 0, PROMPT, 1),))).rows()
        with pytest.raises(InvalidRequestError, match="another model or build"):
            off.import_state(0, on.export_state(0))


@pytest.mark.long
async def test_what_one_mode_stored_is_computed_anew_in_the_other(tiny_decoder: Path, tmp_path: Path) -> None:
    """SPEC E2, C9: a change of the mode between two starts is a miss, and no error."""
    cached = []
    for mode in ("on", "on", "off", "off"):
        folders = {name: tmp_path / name for name in ("cache_dir", "run_dir", "states_dir")}
        limits = {"slots": 2, "ctx_size": 512, "threads": 1}
        async with Runtime(str(tiny_decoder), repeatable=mode, **limits, **folders) as runtime:
            answer = await runtime.ask(PROMPT, max_tokens=4, sampling=Sampling(temperature=0.0))
            cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, True, False, True]


def test_scores_of_a_prompt_are_the_same_in_both_modes(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC E2, D6: `echo` with `logprobs` is computed whole by llama.cpp's defaults, however it comes."""
    found = []
    for mode in ("on", "off"):
        with opened(tiny_decoder, smoke_dir, mode) as backend:
            backend.condition(0, Conditioning(asked=PROMPT))
            for begin in range(0, len(PROMPT), 20):  # as slices beside others are
                item = PlanItem(0, begin, PROMPT[begin : begin + 20], 20)
                found.append(np.array(backend.launch(BatchPlan((item,))).rows()))
    assert np.array_equal(found[:5], found[5:])
