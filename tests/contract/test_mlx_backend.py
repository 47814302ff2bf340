"""What is MLX's own: failed passes, rows that come and go, few bits, adapters, candidates, ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_backend_contract import feed

import model_folders
from model_folders import HEADS, WIDTH, tiny_folder
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem, Rows
from stoker.errors import (
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    PoolFullError,
    StepFailedError,
    UnsupportedError,
)
from stoker.ipc.model import AdapterSpec, FlashAttention, KVLayout, ModelSpec
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext

pytest.importorskip("mlx_lm", reason="MLX is not installed (the mlx extra)")

import mlx.core as mx
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from stoker.backends.mlx import native, self_test, step
from stoker.backends.mlx.backend import MlxBackend
from stoker.backends.mlx.model import load_backend

Loaded = Callable[[str], MlxBackend]
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 250, 40)]


def loaded(path: Path, **fields: Any) -> MlxBackend:
    """A folder's model with few cells."""
    spec = ModelSpec(id="m", path=str(path), num_slots=4, n_ctx=512, n_batch=128, num_threads=1, **fields)
    return load_backend(ModelFolder.open(path), spec, LoadContext(lambda _: None))


@pytest.fixture(params=["llama", "gemma3_text", "mamba"])
def tiny(request: pytest.FixtureRequest, loaded_mlx: Loaded) -> MlxBackend:
    """Tiny models with every sequence empty."""
    return emptied(loaded_mlx(request.param))


@pytest.fixture
def llama(loaded_mlx: Loaded) -> MlxBackend:
    """One that can go back."""
    return emptied(loaded_mlx("llama"))


def emptied(backend: MlxBackend) -> MlxBackend:
    """The same with every sequence empty."""
    for seq in range(backend.capabilities.num_sequences):
        backend.drop(seq)
    return backend


def rows(backend: MlxBackend, tokens: dict[int, list[int]]) -> Rows:
    """A step of so many more tokens of some sequences."""
    items = tuple(PlanItem(seq, backend.length(seq), more, 1) for seq, more in tokens.items())
    return backend.launch(BatchPlan(items)).rows().copy()


@pytest.mark.parametrize("where", ["graph", "evaluation"])
def test_a_pass_that_fails_half_way_costs_no_sequence_anything(
    tiny: MlxBackend, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """SPEC F8, Q12: rows, and a prompt's own caches, are computed again from their tokens."""
    for seq in range(3):
        feed(tiny, seq, TOKENS[: 10 + 5 * seq], 0)
        feed(tiny, seq + 5, TOKENS[: 10 + 5 * seq], 0)
    rows(tiny, {0: [7], 1: [8], 2: [9]})
    rows(tiny, {5: [7], 6: [8], 7: [9]})

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device has gone")

    network = tiny._network
    if where == "graph":
        forward = network.forward
        calls = [fail, forward]

        def in_turn(*args: Any) -> Any:
            return calls.pop()(*args)

        monkeypatch.setattr(network, "forward", in_turn)
    else:
        monkeypatch.setattr(step.mx, "eval", fail)
    with pytest.raises(StepFailedError, match="gone"):
        tiny.launch(BatchPlan((PlanItem(0, 11, [4], 1), PlanItem(1, 16, [4], 1), PlanItem(3, 0, TOKENS, 1))))
    monkeypatch.undo()
    tiny.check()
    assert [tiny.length(seq) for seq in range(4)] == [11, 16, 21, 0]
    again = rows(tiny, {0: [4], 1: [4], 2: [4]})
    assert np.abs(again - rows(tiny, {5: [4], 6: [4], 7: [4]})).max() < 1e-4


def test_rows_come_and_go_and_hold_what_they_would_alone(tiny: MlxBackend) -> None:
    """SPEC F8, E1: in any company, in any order, after others were dropped, parked or written out."""
    random = np.random.default_rng(5)
    histories: dict[int, list[int]] = {seq: TOKENS[: 6 + 4 * seq] for seq in range(5)}
    for seq, history in histories.items():
        feed(tiny, seq, history, 0)
    for turn in range(14):
        members = sorted(int(seq) for seq in random.choice(list(histories), 3, replace=False))
        more = {seq: [int(random.integers(3, 250))] for seq in members}
        found = rows(tiny, more)
        for seq in members:
            histories[seq] = histories[seq] + more[seq]
        if turn % 4 == 3:
            seq = members[0]
            state = tiny.export_state(seq)
            tiny.drop(seq)
            tiny.import_state(seq, state)
        tiny.check()
        feed(tiny, 9, histories[members[1]][:-1], 0)
        assert np.abs(found[1] - feed(tiny, 9, histories[members[1]][-1:])[0]).max() < 5e-3
        tiny.drop(9)


def test_guesses_of_several_lengths_are_rows_of_one_pass(
    llama: MlxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC D9: what fills up shorter rows is not seen; a row goes back alone."""
    for seq in (0, 1, 2):
        feed(llama, seq, TOKENS[: 9 + seq], 0)
    passes = []
    forward = llama._network.forward
    monkeypatch.setattr(
        llama._network, "forward", lambda *args: passes.append(args[0].shape) or forward(*args)
    )
    guesses = {0: TOKENS[20:23], 1: TOKENS[20:21], 2: TOKENS[20:24]}
    items = tuple(PlanItem(seq, 9 + seq, more, len(more)) for seq, more in guesses.items())
    found = llama.launch(BatchPlan(items)).rows().copy()
    assert passes == [(3, 4)]
    llama.trim(2, 12)
    llama.check()
    after = rows(llama, {0: [5], 1: [5], 2: [5]})
    monkeypatch.undo()
    alone = [feed(llama, 5 + seq, [*TOKENS[: 9 + seq], *more], len(more)) for seq, more in guesses.items()]
    assert np.abs(found - np.concatenate(alone)).max() < 1e-4
    assert np.abs(after[2] - feed(llama, 8, [*TOKENS[:11], TOKENS[20], 5])[0]).max() < 1e-4


def test_forks_that_part_are_bounded_by_a_full_pool(llama: MlxBackend) -> None:
    """SPEC Q12: copies of what was shared are counted; freed ones make room."""
    for begin in range(0, 384, 128):
        feed(llama, 0, [41] * 128, 0)
        assert llama.length(0) == begin + 128
    for seq in range(1, 6):
        llama.fork(0, seq, 384 - seq)
    with pytest.raises(PoolFullError, match="copies"):
        rows(llama, {1: [5]})
    llama.drop(0)
    assert rows(llama, {1: [5]}).shape[0] == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_compute_and_narrow_heads_refuse_few_bits(tmp_path: Path, bits: int) -> None:
    """SPEC K1: MLX's groups in the folder give what mlx-lm itself makes of them."""
    folder = tiny_folder(tmp_path / "m", "qwen2", bits=bits)
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        loaded(folder, kv_type=f"q{bits}_0")
    backend = loaded(folder)
    assert f"{bits}-bit" in backend.capabilities.description
    theirs, _ = load_model(folder)
    assert np.abs(feed(backend, 0, TOKENS)[0] - np.array(theirs(mx.array([TOKENS]))[0, -1])).max() < 1e-4
    backend.close()


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_cells_of_few_bits_take_less_and_go_on_alike_in_rows_and_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv_type: str
) -> None:
    """SPEC K7: of a model whose heads are wide enough; one row, rows, a fork and an imported state agree."""
    monkeypatch.setattr(model_folders, "HEAD_WIDTH", 32)
    monkeypatch.setitem(model_folders._HEADED, "head_dim", 32)
    path = tiny_folder(tmp_path / "wide")
    plain, backend = loaded(path), loaded(path, kv_type=kv_type)
    assert backend.capabilities.kv_type == kv_type
    assert backend.memory()["kv"] < plain.memory()["kv"] / 2
    for seq in (0, 1, 2):
        feed(backend, seq, TOKENS, 0)
    backend.import_state(3, backend.export_state(0))
    backend.fork(1, 4, len(TOKENS))
    found = rows(backend, {0: [7], 1: [7], 3: [7], 4: [7]})
    assert np.abs(found - feed(backend, 2, [7])).max() < 1e-4
    feed(plain, 0, TOKENS, 0)
    assert 1e-6 < np.abs(found[0] - feed(plain, 0, [7])[0]).max() < 2
    plain.close()
    backend.close()


def written_adapter(folder: Path, seed: int, scale: float = 4.0, name: str = "q_proj") -> Path:
    """A LoRA adapter as mlx-lm writes it, of one matrix of each layer."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn.{name}"
        tensors[f"{stem}.lora_a"] = random.standard_normal((WIDTH, 4), np.float32)
        tensors[f"{stem}.lora_b"] = random.standard_normal((4, HEADS * 16), np.float32) * np.float32(0.1)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": 4, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "num_layers": 3, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_rows_with_and_without_adapters_share_a_step_and_keep_apart(tmp_path: Path) -> None:
    """SPEC K6: each row is what mlx-lm's own LoRA layers make of it; the plain ones are the plain model's."""
    path, names = tiny_folder(tmp_path / "m"), ("one", "two")
    specs = tuple(
        AdapterSpec(name=name, path=str(written_adapter(tmp_path / name, seed)))
        for seed, name in enumerate(names)
    )
    backend, plain = loaded(path, adapters=specs), loaded(path)
    used = {0: (), 1: (("one", 1.0),), 2: (("one", 1.0),), 3: (("two", 0.5),), 4: ()}
    for seq, adapters in used.items():
        backend.condition(seq, Conditioning(adapters=adapters))
        feed(backend, seq, TOKENS, 0)
    found = rows(backend, {seq: [9] for seq in used})
    feed(plain, 0, TOKENS, 0)
    own = feed(plain, 0, [9])[0]
    assert np.abs(found[[0, 4]] - own).max() < 1e-4
    assert np.abs(found[1] - found[2]).max() < 1e-4
    theirs, _ = load_model(path)
    tuned = load_adapters(theirs, specs[0].path)
    expected = np.array(tuned(mx.array([[*TOKENS, 9]]))[0, -1])
    assert np.abs(found[1] - expected).max() < 1e-3
    assert min(np.abs(found[at] - own).max() for at in (1, 3)) > 0.01
    with pytest.raises(UnsupportedError, match="three"):
        backend.condition(0, Conditioning(adapters=(("three", 1.0),)))
    assert backend.memory()["adapters"] > 0
    plain.close()
    backend.close()


def test_adapters_of_other_models_and_kinds_are_refused_by_name(tmp_path: Path) -> None:
    """SPEC K6, R1: with the matrix, or the kind, that does not fit."""
    path = tiny_folder(tmp_path / "m")
    foreign = written_adapter(tmp_path / "foreign", 1, name="other_proj")
    dora = written_adapter(tmp_path / "dora", 1)
    (dora / "adapter_config.json").write_text('{"fine_tune_type": "dora", "lora_parameters": {"scale": 1}}')
    for folder, error, words in ((foreign, ModelFileError, "other_proj"), (dora, UnsupportedError, "dora")):
        with pytest.raises(error, match=words):
            loaded(path, adapters=(AdapterSpec(name="a", path=str(folder)),))


def test_what_is_missing_is_refused_by_name(tmp_path: Path, llama: MlxBackend) -> None:
    """SPEC K1: a layout, layers by number, cells of another type, code of the folder's own, images."""
    path = tiny_folder(tmp_path / "m")
    with pytest.raises(UnsupportedError, match="streams"):
        loaded(path, kv_layout=KVLayout.STREAMS)
    with pytest.raises(UnsupportedError, match="no flash_attention off"):
        loaded(path, flash_attention=FlashAttention.OFF)
    with pytest.raises(UnsupportedError, match="f32, q8_0, q4_0"):
        loaded(path, kv_type="f16")
    with pytest.raises(UnsupportedError, match="nothing beside"):
        llama.condition(0, Conditioning(source=(1, 2)))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    with pytest.raises(UnsupportedError, match="Python file"):
        loaded(path)
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 95}))
    with pytest.raises(ModelLoadError, match="llama"):
        loaded(path)


def test_candidates_are_the_largest_logits_and_nan_shows(llama: MlxBackend) -> None:
    """SPEC B6: found on the device, best first, beside rows of other items."""
    items = (
        PlanItem(0, 0, TOKENS, 2, True),
        PlanItem(1, 0, TOKENS[:9], 1),
        PlanItem(2, 0, TOKENS[:7], 1, True),
    )
    launched = llama.launch(BatchPlan(items))
    whole, best = launched.rows(), launched.candidates()
    assert whole.shape[0] == 1
    assert best.ids.shape == (3, step.NUM_CANDIDATES)
    expected = feed(llama, 3, TOKENS, 2)
    for found, row in zip(best.logits, expected, strict=False):
        assert np.abs(found - np.sort(row)[::-1][: len(found)]).max() < 1e-4
    ids, logits = step._largest(mx.array([[1.0, float("nan"), *range(70)]]))
    assert np.isnan(np.array(logits)[0, 0])
    assert int(ids[0, 1]) > 1


def test_a_state_of_another_model_is_refused(loaded_mlx: Loaded, llama: MlxBackend) -> None:
    """SPEC Q4: by its fingerprint, before anything native sees it."""
    other = emptied(loaded_mlx("qwen2"))
    feed(other, 0, TOKENS, 0)
    with pytest.raises(InvalidRequestError, match="another model"):
        llama.import_state(0, other.export_state(0))


def test_openblas_takes_the_place_of_the_reference_library() -> None:
    """It multiplies where its wheel is installed, and right."""
    pytest.importorskip("scipy_openblas32", reason="scipy-openblas32 is not installed (the mlx extra)")
    assert native.BLAS is not None
    assert "OpenBLAS" in native.BLAS.name
    left, right = (np.random.default_rng(seed).standard_normal((90, 90), np.float32) for seed in (1, 2))
    assert np.abs(np.array(mx.array(left) @ mx.array(right)) - left @ right).max() < 1e-3


def test_a_process_ends_in_order_whose_thread_still_computes() -> None:
    """SPEC L1: open streams of MLX would abort it."""
    code = (
        "import threading, mlx.core as mx\n"
        "from stoker.backends.mlx import native\n"
        "def compute():\n"
        "    native.enter_thread()\n"
        "    for _ in range(200): mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))\n"
        "threading.Thread(target=compute, daemon=True).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_self_test_finds_mlx_in_order_and_tells_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC R9: what `stoker doctor` shows; a trial that fails says how."""
    assert [name for name, is_good, _ in self_test.self_test() if not is_good] == []
    monkeypatch.setattr(self_test, "_TOLERANCE", -1.0)
    failed, *_ = [text for _, is_good, text in self_test.self_test() if not is_good]
    assert "logits are off" in failed
