"""What llama.cpp's backend adds to the contract: classes, refusals, cancelled loads, recurrent models."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from stoker.backends.llama.backend import LlamaBackend, _context_options, load
from stoker.backends.llama.binding import accelerators, llama
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.threads import num_physical_cores
from stoker.errors import (
    EngineError,
    InsufficientMemoryError,
    ModelFileError,
    ModelLoadError,
    NotReadyError,
    PoolFullError,
    StepAbortedError,
    StepFailedError,
    UnsupportedError,
)
from stoker.ipc.model import KVLayout, ModelClass, ModelSpec
from tiny_models import write_bert

OpenLlama = Callable[[Path], LlamaBackend]
TinyModel = Callable[[str], Path]


def test_smollm2_completes_the_capital_of_france(smollm2: LlamaBackend) -> None:
    """The embedded model answers."""
    vocabulary = smollm2.vocabulary
    tokens = vocabulary.tokenize("The capital of France is", add_special=True, parse_special=True)
    rows = smollm2.launch(BatchPlan((PlanItem(0, 0, tokens, 1),))).rows()
    assert vocabulary.piece(int(rows[0].argmax())) == b" Paris"


def test_smollm2_reports_its_resolved_limits(smollm2: LlamaBackend) -> None:
    """SPEC K1, K7: class from the header, limits from the context that was made."""
    found = smollm2.capabilities
    assert found.model_class is ModelClass.DECODER
    assert found.architecture == "llama"
    assert found.label.startswith("llama.cpp · ")
    assert found.n_ctx_train == 8192
    assert found.num_params == 134_515_008
    assert found.flash_attention in {"on", "off"}
    assert "<|im_start|>" in (smollm2.vocabulary.chat_template or "")
    memory = smollm2.memory()
    assert memory["kv"] == 512 * 30 * 2 * 3 * 64 * 2  # cells, layers, K and V, heads, width, f16
    assert memory["weights"] > 90_000_000
    assert memory["compute"] > 0


@pytest.mark.long
def test_keys_in_bf16_make_steps_of_any_shape_bit_exact(smollm2_path: Path) -> None:
    """E1: one token at a time, batched or as one prompt, the logits are the same bits on a CPU."""
    model = LlamaModel(ModelOptions(path=smollm2_path, use_extra_bufts=False))
    options = ContextOptions(
        num_cells=1024, n_batch=1024, num_sequences=3, num_threads=1, key_type=KeyType.BF16
    )
    context = LlamaContext(model, options)
    try:
        if accelerators():
            pytest.skip("an accelerator adds up in its own ways")
        tokens = list(range(1000, 1300))
        at_once = context.step(BatchPlan((PlanItem(0, 0, tokens, 1),))).copy()
        for index, token in enumerate(tokens):
            items = tuple(PlanItem(seq, index, [token], 1) for seq in (1, 2))
            rows = context.step(BatchPlan(items)).copy()
        assert np.array_equal(rows[0], rows[1])
        assert np.array_equal(rows[0], at_once[0])
    finally:
        context.close()
        model.close()


def test_a_step_that_is_computed_in_parts_gives_the_rows_of_the_whole(tiny_decoder: Path) -> None:
    """Q19: a device's steps carry more tokens than its buffers are made for; rows keep their order."""
    model = LlamaModel(ModelOptions(path=tiny_decoder, use_extra_bufts=False))
    plan = BatchPlan(tuple(PlanItem(seq, 0, [seq + 3] * 70, 2) for seq in range(3)))
    found, compute_bytes = [], []
    try:
        for n_ubatch in (0, 32):
            options = ContextOptions(
                num_cells=512,
                n_batch=256,
                n_ubatch=n_ubatch,
                num_sequences=3,
                num_threads=1,
                key_type=KeyType.BF16,
            )
            context = LlamaContext(model, options)
            try:
                assert (context.n_batch, context.n_ubatch) == (256, n_ubatch or 256)
                found.append(context.step(plan).copy())
                compute_bytes.append(context.memory()["compute"])
            finally:
                context.close()
    finally:
        model.close()
    assert compute_bytes[1] < compute_bytes[0]
    assert found[0].shape == (6, found[0].shape[1])
    assert np.allclose(found[0], found[1], atol=1e-4)
    assert not np.allclose(found[0][0], found[0][2], atol=1e-4)


class Placed:
    """What is asked of a loaded model for its context's options."""

    n_ctx_train = 4096
    keeps_every_cell = True
    is_recurrent = False

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices


@pytest.mark.parametrize(
    ("n_batch", "expected"), [(0, (8192, 2048)), (128, (128, 128)), (4096, (4096, 4096))]
)
def test_steps_on_a_device_are_larger_where_nothing_else_was_asked_for(
    n_batch: int, expected: tuple[int, int]
) -> None:
    """Q19: 8,192 tokens in streams, in calls of 2,048; in a pool 2,048 and 512; or what was asked for."""
    spec = ModelSpec(id="m", path="m.gguf", n_batch=n_batch)
    layout = KVLayout.STREAMS
    found = _context_options(spec, cast("LlamaModel", Placed(("card",))), layout)
    assert (found.n_batch, found.n_ubatch) == expected
    in_pool = _context_options(spec, cast("LlamaModel", Placed(("card",))), KVLayout.POOL)
    assert (in_pool.n_batch, in_pool.n_ubatch) == (n_batch or 2048, n_batch or 512)
    on_cpu = _context_options(spec, cast("LlamaModel", Placed(())), KVLayout.POOL)
    assert (on_cpu.n_batch, on_cpu.n_ubatch) == (n_batch or 512, n_batch or 512)


def test_special_tokens_are_read_only_where_asked(smollm2: LlamaBackend) -> None:
    """S8: text of a user cannot forge the template's control tokens."""
    vocabulary = smollm2.vocabulary
    control = vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=True)
    text = vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=False)
    assert len(control) == 1
    assert vocabulary.is_eog(control[0])
    assert len(text) > 1
    assert b"".join(map(vocabulary.piece, text)) == b"<|im_end|>"


def test_a_step_that_was_ended_in_its_midst_is_computed_again_as_if_it_had_not_been(
    tiny_decoder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC Q27: also what earlier parts of the same native call have computed is taken back."""
    model = LlamaModel(ModelOptions(path=tiny_decoder, use_extra_bufts=False))
    options = ContextOptions(num_cells=512, n_batch=256, n_ubatch=32, num_sequences=2, num_threads=1)
    first, rest = PlanItem(0, 0, list(range(3, 103)), 1), PlanItem(0, 100, list(range(3, 203)), 1)
    calls = [0, 0]  # how often the library has asked, and at which time it is told to end

    def ends(_: object) -> bool:
        calls[0] += 1
        return calls[0] == calls[1]

    callback = llama.ggml_abort_callback(ends)
    with closing(LlamaContext(model, options)) as context, closing(model), caplog.at_level(logging.INFO):
        llama.llama_set_abort_callback(context.handle, callback, None)
        context.step(BatchPlan((first,)))
        calls[0] = 0
        expected = context.step(BatchPlan((rest,))).copy()
        num_asked = calls[0]
        for at in (1, num_asked // 4, num_asked // 2, num_asked - 1):
            context.trim(0, 100)
            calls[:] = 0, at
            with pytest.raises(StepAbortedError):
                context.step(BatchPlan((rest,)))
            assert context.lengths[0] == 100
            again = context.step(BatchPlan((rest,)))
            assert np.array_equal(again, expected)
    assert not caplog.records


def test_another_thread_ends_a_step(smollm2: LlamaBackend) -> None:
    """SPEC Q27: and the next one, until steps are allowed again; a model on a device has no such thing."""
    aborts = smollm2.extensions.aborts
    assert (aborts is None) == bool(accelerators())
    if aborts is None:
        pytest.skip("only a CPU's steps can be ended")
    plan = BatchPlan((PlanItem(0, 0, list(range(1000, 1100)), 1),))
    expected = smollm2.launch(plan).rows().copy()
    smollm2.drop(0)

    def again_and_again() -> None:
        for _ in range(50):
            smollm2.launch(plan)
            smollm2.drop(0)

    other = threading.Thread(target=aborts.abort_step)
    other.start()
    with pytest.raises(StepAbortedError):
        again_and_again()
    other.join()
    with pytest.raises(StepAbortedError):
        smollm2.launch(plan)
    assert smollm2.length(0) == 0
    aborts.allow_steps()
    assert np.array_equal(smollm2.launch(plan).rows(), expected)


@pytest.mark.parametrize(("code", "error"), [(1, PoolFullError), (2, StepFailedError), (-3, StepFailedError)])
def test_a_native_failure_after_some_work_is_undone(
    smollm2: LlamaBackend, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """SPEC Q12: whatever llama_decode returns, tokens it had computed by then are taken back."""
    tokens = smollm2.vocabulary.tokenize("The capital of France is", add_special=False, parse_special=True)
    smollm2.launch(BatchPlan((PlanItem(0, 0, tokens[:-1], 0), PlanItem(1, 0, tokens[:-1], 0)))).rows()
    decode = llama.llama_decode
    monkeypatch.setattr(llama, "llama_decode", lambda context, batch: decode(context, batch) or code)
    with pytest.raises(error):
        smollm2.launch(BatchPlan((PlanItem(0, len(tokens) - 1, [5, 6, 7], 1), PlanItem(2, 0, [5], 1)))).rows()
    monkeypatch.undo()
    assert [smollm2.length(seq) for seq in range(3)] == [len(tokens) - 1, len(tokens) - 1, 0]
    plan = [PlanItem(seq, len(tokens) - 1, tokens[-1:], 1) for seq in (0, 1)]
    rows = smollm2.launch(BatchPlan(tuple(plan))).rows()
    assert np.array_equal(rows[0], rows[1])
    assert (
        int(rows[0].argmax())
        == smollm2.vocabulary.tokenize(" Paris", add_special=False, parse_special=False)[0]
    )


@pytest.mark.long
def test_a_step_leaves_the_library_quiet(
    smollm2: LlamaBackend, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Native text goes to Python's logging, errors as warnings, never to the terminal."""
    with caplog.at_level(logging.DEBUG):
        for seq in range(4):
            smollm2.launch(BatchPlan((PlanItem(seq, 0, [5] * 128, 0),))).rows()
        with pytest.raises(PoolFullError):
            smollm2.launch(BatchPlan((PlanItem(5, 0, [5], 0),))).rows()
    assert capfd.readouterr() == ("", "")
    assert any("memory slot" in record.getMessage() for record in caplog.records)


def test_progress_rises_to_one_and_an_exception_in_it_cancels(smollm2_path: Path) -> None:
    """SPEC L1: loading reports its fraction; what the listener raises comes out, nothing stays loaded."""
    fractions: list[float] = []
    LlamaModel(ModelOptions(path=smollm2_path, on_progress=fractions.append)).close()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0

    def cancel(fraction: float) -> None:
        if fraction > 0.3:
            raise NotReadyError("cancelled")

    with pytest.raises(NotReadyError, match="cancelled"):
        LlamaModel(ModelOptions(path=smollm2_path, on_progress=cancel))


def test_a_backend_that_is_closed_twice_or_forgotten_says_so(
    open_llama: OpenLlama, tiny_decoder: Path
) -> None:
    """B1: close is idempotent, and a leaked backend warns with its story."""
    backend = open_llama(tiny_decoder)
    backend.close()
    backend.close()
    forgotten = open_llama(tiny_decoder)
    reference = weakref.ref(forgotten)
    with pytest.warns(ResourceWarning, match="never closed"):
        forgotten.__del__()
    forgotten.close()
    del forgotten
    gc.collect()
    assert reference() is None


def test_a_pool_may_be_larger_than_the_trained_context(tiny_decoder: Path, smoke_dir: Path) -> None:
    """SPEC K7, I2: the pool is what all slots share; one request has the trained context at most."""
    spec = ModelSpec(id="m", path=str(tiny_decoder), num_slots=300, n_ctx=4096, n_batch=64, num_threads=1)
    with load(spec, cache_dir=smoke_dir) as backend:
        found = backend.capabilities
        assert found.num_cells == 4096
        assert found.n_ctx == found.n_ctx_train < 4096
        assert found.num_sequences == 255  # of 256; cells are moved through the last one


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7"])
def test_a_recurrent_model_steps_and_says_what_it_cannot(
    open_llama: OpenLlama, tiny_model: TinyModel, name: str
) -> None:
    """SPEC K1, K5: no partial trim, no fork; rows in plan order; state goes on bit-exactly."""
    with open_llama(tiny_model(name)) as backend:
        found = backend.capabilities
        assert (found.model_class, found.can_trim, found.can_fork) == (ModelClass.RECURRENT, False, False)
        text = list(range(30, 46))
        plan = (PlanItem(3, 0, text, 1), PlanItem(0, 0, text[:5], 1), PlanItem(1, 0, text[:9], 1))
        together = backend.launch(BatchPlan(plan)).rows().copy()
        for seq, (row, part) in enumerate(zip(together, (text, text[:5], text[:9]), strict=True), start=5):
            alone = backend.launch(BatchPlan((PlanItem(seq, 0, part, 1),))).rows()
            assert np.abs(alone[0] - row).max() < 1e-2
        with pytest.raises(UnsupportedError):
            backend.trim(3, 4)
        with pytest.raises(UnsupportedError):
            backend.fork(3, 4, 4)
        data = backend.export_state(3)
        expected = backend.launch(BatchPlan((PlanItem(3, 16, [50], 1),))).rows().copy()
        backend.drop(3)
        backend.import_state(3, data)
        assert np.array_equal(backend.launch(BatchPlan((PlanItem(3, 16, [50], 1),))).rows(), expected)


def test_a_recurrent_state_that_is_lost_is_no_quiet_failure(
    open_llama: OpenLlama, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC Q12: a state that cannot go back is reported as the engine's error, so that it restarts."""
    with open_llama(tiny_model("rwkv7")) as backend:
        backend.launch(BatchPlan((PlanItem(0, 0, [40, 41], 0),))).rows()
        decode = llama.llama_decode
        monkeypatch.setattr(llama, "llama_decode", lambda context, batch: decode(context, batch) or -3)
        with pytest.raises(EngineError, match="lost") as caught:
            backend.launch(BatchPlan((PlanItem(0, 2, [42], 1),))).rows()
        assert not isinstance(caught.value, StepFailedError)


def test_an_encoder_is_refused_by_its_class(open_llama: OpenLlama, tmp_path: Path) -> None:
    """SPEC K1: a class that does not generate is a typed error that names it, before any native load."""
    with pytest.raises(UnsupportedError, match="encoder"):
        open_llama(write_bert(tmp_path / "encoder.gguf"))


def test_files_that_are_no_models_are_refused(open_llama: OpenLlama, tmp_path: Path) -> None:
    """SPEC R1: missing and foreign files are typed errors."""
    with pytest.raises(ModelFileError):
        open_llama(tmp_path / "absent.gguf")
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(b"no model" * 100)
    with pytest.raises(ModelFileError):
        open_llama(foreign)
    with pytest.raises(ModelLoadError, match="invalid magic"):
        LlamaModel(ModelOptions(path=foreign))
    with pytest.raises(ModelFileError):
        LlamaModel(ModelOptions(path=tmp_path / "absent.gguf"))


def test_the_default_thread_count_is_the_cores_this_process_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """M7: two spinning threads on one core are slow; a quota bounds the cores, at least one is used."""
    found = num_physical_cores()
    assert found >= 1
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr("stoker.backends.threads._CGROUP_DIR", tmp_path)
    monkeypatch.setattr("stoker.backends.threads._cores_in_mask", lambda: 8)
    assert num_physical_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_physical_cores() == 8


def test_the_backend_stays_within_its_share_of_a_step(
    smollm2: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work around llama_decode touches each item once, and makes no view it has already."""
    views: list[int] = []
    make = np.ctypeslib.as_array

    def counted(*given: Any) -> Any:
        views.append(1)
        return make(*given)

    monkeypatch.setattr(np.ctypeslib, "as_array", counted)
    for start in range(4):
        smollm2.launch(BatchPlan(tuple(PlanItem(seq, start, [5], 1) for seq in range(8)))).rows()
    assert len(views) <= 1
    assert isinstance(smollm2, LlamaBackend)


def test_a_context_that_the_machine_cannot_hold_is_no_native_text(smollm2_path: Path) -> None:
    """SPEC R12: the library of this machine, asked for more cells than there is memory."""
    with closing(LlamaModel(ModelOptions(path=smollm2_path, use_extra_bufts=False))) as model:
        options = ContextOptions(num_cells=2**23, n_batch=32, num_sequences=1, num_threads=1)
        with pytest.raises(InsufficientMemoryError, match="the machine's memory") as caught:
            LlamaContext(model, options)
    assert caught.value.details["needed"] > 2**36
