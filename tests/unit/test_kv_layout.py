"""Which layout of cells a model gets, and what it takes: a pool that is shared, or streams."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stoker.cli import serve_screen
from stoker.ipc.model import KVLayout, ModelInfo, ModelSpec, PlacementSpec
from stoker.models.memory_estimate.estimate import estimator_of, num_sequences, stream_cells
from stoker.models.memory_estimate.fit import DeviceBudget, Fit, FittedSpec, MemoryBudget, weigh
from stoker.settings import EngineSettings
from tiny_models import TINY, write_llama

AMPLE = 2**40
SLOTS, N_CTX = 16, 4096


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder."""
    return write_llama(tmp_path_factory.mktemp("models") / "decoder.gguf", context=N_CTX)


def spec_of(path: Path, **changes: object) -> ModelSpec:
    """On the one device there is, as far as nothing else is said."""
    spec = ModelSpec(
        id="m", path=str(path), num_slots=SLOTS, n_ctx=N_CTX, placement=PlacementSpec(device=("CUDA0",))
    )
    return msgspec.structs.replace(spec, **changes)


def weighed(spec: ModelSpec, device_bytes: int = AMPLE) -> FittedSpec:
    """Within so much of it."""
    device = DeviceBudget(id="CUDA0", free_bytes=device_bytes, limit_bytes=device_bytes, margin_bytes=0)
    devices = (device,) if spec.placement.has_devices and spec.placement.device else ()
    budget = MemoryBudget(free_bytes=AMPLE, limit_bytes=AMPLE, margin_bytes=0, devices=devices)
    return weigh(spec, estimator_of(spec.path), budget)


def test_each_request_has_its_context_where_the_device_holds_it(decoder: Path) -> None:
    """SPEC C15: streams if they fit to the byte, with one byte less a pool; neither is degraded."""
    ample = weighed(spec_of(decoder))
    assert (ample.spec.kv_layout, ample.estimate.kv_layout) == (KVLayout.STREAMS, KVLayout.STREAMS)
    assert (ample.estimate.n_ctx, ample.fit, ample.degraded) == (N_CTX, Fit.FITS, ())
    needed = ample.estimate.device_bytes("CUDA0")
    assert weighed(spec_of(decoder), needed).estimate.kv_layout is KVLayout.STREAMS
    short = weighed(spec_of(decoder), needed - 1)
    assert (short.estimate.kv_layout, short.estimate.n_ctx, short.degraded) == (KVLayout.POOL, N_CTX, ())


def test_all_layers_by_their_number_are_as_all(decoder: Path) -> None:
    """SPEC C15, R11: also by a larger one, such as the 99 that other programs are given."""
    for count in (3, 99):
        asked = spec_of(decoder, placement=PlacementSpec(device=("CUDA0",), gpu_layers=count))
        assert weighed(asked).estimate.kv_layout is KVLayout.STREAMS


def test_streams_take_the_cells_of_every_sequence(decoder: Path) -> None:
    """SPEC R1, C15: of slots, of few spare ones, and of the one that others are copied through."""
    estimate = estimator_of(decoder)
    pool = estimate(spec_of(decoder, kv_layout=KVLayout.POOL)).lines["kv"]
    streams = estimate(spec_of(decoder, kv_layout=KVLayout.STREAMS)).lines["kv"]
    assert num_sequences(SLOTS, KVLayout.STREAMS) == SLOTS + 2
    assert streams == pool * (SLOTS + 2 + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": PlacementSpec(device=())},
        {"placement": PlacementSpec(device=("CUDA0",), gpu_layers=1)},
        {"placement": PlacementSpec(device=("CUDA0",), kv_offload=False)},
        {"num_cells": SLOTS * N_CTX // 2},
        {"kv_layout": KVLayout.POOL},
    ],
    ids=["on a CPU", "some layers on it", "cells on it", "fewer cells than slots may use", "asked for"],
)
def test_a_pool_stays_where_streams_would_not_help(decoder: Path, changes: dict[str, object]) -> None:
    """SPEC C15: host memory is short, and who says that there are fewer cells says that they are shared."""
    assert weighed(spec_of(decoder, **changes)).estimate.kv_layout is KVLayout.POOL


def test_many_slots_have_shorter_streams_before_they_share_a_pool(tmp_path: Path) -> None:
    """SPEC R2, C15: four shares of the pool each, two, or one, which is told; few slots share as before."""
    decoder = write_llama(tmp_path / "wide.gguf", context=SLOTS * 4096)
    wide = spec_of(decoder, n_ctx=SLOTS * 4096)
    for share in (4, 2, 1):
        shorter = msgspec.structs.replace(wide, kv_layout=KVLayout.STREAMS, n_ctx=share * 4096)
        found = weighed(wide, estimator_of(decoder)(shorter).device_bytes("CUDA0"))
        assert (found.spec.kv_layout, found.spec.n_ctx) == (KVLayout.STREAMS, share * 4096)
        assert found.degraded == (f"context {share * 4096} instead of {SLOTS * 4096}",)
    few = msgspec.structs.replace(wide, num_slots=SLOTS - 1)
    least = estimator_of(decoder)(msgspec.structs.replace(few, kv_layout=KVLayout.POOL))
    assert weighed(few, least.device_bytes("CUDA0")).spec.kv_layout is not KVLayout.STREAMS


def test_streams_that_are_asked_for_get_a_shorter_context_where_memory_is_short(decoder: Path) -> None:
    """SPEC R2, C15: and say so."""
    asked = spec_of(decoder, kv_layout=KVLayout.STREAMS)
    needed = weighed(asked).estimate.device_bytes("CUDA0")
    found = weighed(asked, needed * 3 // 4)
    assert (found.fit, found.estimate.kv_layout) == (Fit.DEGRADED, KVLayout.STREAMS)
    assert found.degraded


def test_no_cells_are_made_for_more_than_the_model_reads(decoder: Path) -> None:
    """SPEC C15: a context that it was not trained on is no request's."""
    asked = weighed(spec_of(decoder, n_ctx=16 * N_CTX))
    assert (asked.estimate.kv_layout, asked.estimate.n_ctx) == (KVLayout.STREAMS, N_CTX)
    assert asked.estimate.lines["kv"] == weighed(spec_of(decoder)).estimate.lines["kv"]


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3"])
def test_models_that_cannot_go_back_have_a_pool(tmp_path: Path, name: str) -> None:
    """SPEC C15: whatever is asked for; the estimate counts what they get."""
    path = TINY[name](tmp_path / "model.gguf")
    estimate = estimator_of(path)
    asked, pool = (estimate(spec_of(path, kv_layout=each)) for each in (KVLayout.STREAMS, KVLayout.POOL))
    assert asked == pool


def test_as_many_cells_as_the_slots_may_use_are_streams(decoder: Path) -> None:
    """SPEC C15: who counts them so wants every slot to have its context."""
    assert weighed(spec_of(decoder, num_cells=SLOTS * N_CTX)).estimate.kv_layout is KVLayout.STREAMS


def test_cells_that_were_counted_are_dealt_out(decoder: Path) -> None:
    """SPEC C15: where streams are forced the slots have so many in all."""
    forced = spec_of(decoder, kv_layout=KVLayout.STREAMS, num_cells=SLOTS * 512)
    assert stream_cells(forced, N_CTX) == 512
    assert estimator_of(decoder)(forced).n_ctx == 512


@pytest.mark.parametrize(
    ("layout", "shown"),
    [("streams", "each with all of a model's context"), ("pool", "sharing 16,384 tokens")],
)
def test_the_start_of_a_server_says_what_a_slot_has(layout: str, shown: str) -> None:
    """SPEC C15, T12: a context of its own, or a share of the pool."""
    info = msgspec.structs.replace(ModelInfo.bare(ModelSpec(id="m", path="")), kv_layout=layout)
    assert serve_screen._context(EngineSettings(), [info]) == shown
