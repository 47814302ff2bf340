"""Where a model lies, as callers ask for it: settings of all and of one, a load by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stoker.client.models.specs import ModelSource
from stoker.errors import InvalidRequestError
from stoker.ipc.model import FlashAttention, ModelSpec, PlacementSpec, SplitMode
from stoker.runtime import Runtime
from stoker.settings import EngineSettings
from stoker.tasks.fields import load_fields, spec_changes

SPEC = ModelSpec(id="m", path="m", kv_type="f16", placement=PlacementSpec(device=("CUDA0",), mmap=False))


def changed(**fields: Any) -> ModelSpec:
    """What a load with these fields makes of the spec."""
    return spec_changes(load_fields(fields)).applied(SPEC)


def test_a_load_changes_what_it_names_and_leaves_the_rest() -> None:
    """SPEC R11: by the names of the settings."""
    assert changed(slots=2).placement == SPEC.placement
    found = changed(gpu_layers="20", split_mode="row", tensor_split=[3, 1], device=["CUDA0", 1])
    assert found.placement == PlacementSpec(
        gpu_layers=20, device=("CUDA0", "1"), split_mode=SplitMode.ROW, tensor_split=(3.0, 1.0), mmap=False
    )
    assert (found.kv_type, found.flash_attention) == ("f16", FlashAttention.AUTO)
    assert changed(flash_attention="off").flash_attention is FlashAttention.OFF


@pytest.mark.parametrize(("num_bits", "kv_type"), [(4, "q4_0"), (8, "q8_0"), (16, "")])
def test_bits_of_a_cell_are_its_type_by_another_name(num_bits: int, kv_type: str) -> None:
    """SPEC R11: `kv_bits`."""
    assert changed(kv_bits=num_bits).kv_type == kv_type


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"kv_bits": 5}, "kv_bits", "5 is none of 4, 8, 16"),
        ({"kv_bits": 8, "kv_type": "q4_0"}, "kv_bits", "kv_bits and kv_type say different things"),
        ({"gpu_layers": -1}, "gpu_layers", "gpu_layers"),
        ({"main_gpu": "first"}, "main_gpu", "'first'"),
        ({"gpu_layer": 3}, "gpu_layer", "did you mean 'gpu_layers'?"),
    ],
)
def test_a_load_that_cannot_be_meant_is_refused_by_name(fields: Any, param: str, text: str) -> None:
    """SPEC R11, I2: before anything is loaded."""
    with pytest.raises(InvalidRequestError, match=re.escape(text)) as caught:
        changed(**fields)
    assert caught.value.param == param


async def test_one_model_lies_otherwise_than_the_others(tmp_path: Path) -> None:
    """SPEC R11: its table beats what is said of all; a model that is not served is a mistake."""
    settings = EngineSettings(
        models=("fake:id=a", "fake:id=b"),
        gpu_layers=4,
        kv_type="q8_0",
        placement={"b": {"gpu_layers": "all", "kv_offload": False}},
        run_dir=tmp_path,
    )
    first, second = (model.spec for model in ModelSource.read(settings).served)
    assert (first.placement.gpu_layers, first.kv_type, first.placement.kv_offload) == (4, "q8_0", True)
    assert (second.placement.gpu_layers, second.kv_type, second.placement.kv_offload) == (
        "all",
        "q8_0",
        False,
    )
    with pytest.raises(InvalidRequestError, match="placement: no model 'c' is served; there are: a, b"):
        ModelSource.read(settings.replace(placement={"c": {"gpu_layers": 1}}))


async def test_a_program_says_where_a_model_is_loaded(tmp_path: Path) -> None:
    """SPEC R11: at a load, which replaces the model that lay elsewhere."""
    folders = {"cache_dir": tmp_path / "cache", "run_dir": tmp_path / "run"}
    model = "fake:id=m,weights_mib=10,device=asked-a+asked-b"
    async with Runtime(model, isolation="thread", device_lease=False, memory_margin=0, **folders) as runtime:
        assert (await runtime.load_model("m", device="asked-b")).label == "fake · asked-b"
        assert (
            await runtime.load_model("m", split_mode="layer", device=())
        ).label == "fake · asked-a + asked-b"
        with pytest.raises(InvalidRequestError, match="there are 0 asked-a"):
            await runtime.load_model("m", device="CUDA0")
        assert runtime.models[0].label == "fake · asked-a + asked-b"


async def test_a_program_that_loads_otherwise_what_fills_a_card_gets_it_there(tmp_path: Path) -> None:
    """SPEC L5, R11: whoever asked waits until it is in again, and is not told that it went for that."""
    folders = {"cache_dir": tmp_path / "cache", "run_dir": tmp_path / "run"}
    model = "fake:id=m,weights_mib=300,device=refilled,device_mib=500"
    async with Runtime(model, isolation="thread", device_lease=False, memory_margin=0, **folders) as runtime:
        for slots in (2, 3):
            found = await runtime.load_model("m", slots=slots)
            assert (found.num_slots, found.label, found.degraded) == (slots, "fake · refilled", [])
