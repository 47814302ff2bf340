"""Where a model lies so that it fits its devices: pure, with estimates made up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from stoker.errors import InsufficientMemoryError
from stoker.ipc.model import ModelSpec, PlacementSpec, SplitMode
from stoker.models.memory_estimate.fit import DeviceBudget, Estimate, Fit, FittedSpec, MemoryBudget, weigh
from stoker.models.memory_estimate.shares import HOST, places

MIB = 2**20
LAYER = 10 * MIB
EXPERTS = 6 * MIB
CELLS = 4 * MIB
NUM_LAYERS = 11  # ten, and the output
COMPUTE = 20 * MIB
WHOLE = NUM_LAYERS * LAYER + 10 * CELLS + COMPUTE


def estimate(spec: ModelSpec, *, has_experts: bool = False) -> Estimate:
    """Ten layers and an output of 10 MiB, 4 MiB of cells a layer (half of it quantised), 20 MiB a device."""
    cells = CELLS // 2 if spec.kv_type == "q8_0" else CELLS
    where = places(spec.placement, NUM_LAYERS)
    on_devices: dict[str, dict[str, int]] = {}
    for at, device in enumerate(where):
        part = on_devices.setdefault(device, {"weights": 0, "kv": 0, "compute": COMPUTE})
        part["weights"] += LAYER - (EXPERTS if at < (spec.placement.cpu_moe or 0) else 0)
        part["kv"] += cells if at < NUM_LAYERS - 1 else 0
    on_devices.pop(HOST, None)
    devices = COMPUTE * len(on_devices)
    return Estimate(
        lines={"weights": NUM_LAYERS * LAYER, "kv": 10 * cells, "compute": max(COMPUTE, devices)},
        n_ctx=2048,
        smaller_kv_types=() if spec.kv_type else ("q8_0",),
        on_devices=on_devices,
        num_layers=NUM_LAYERS,
        has_experts=has_experts,
    )


def with_experts(spec: ModelSpec) -> Estimate:
    """The same, where 6 MiB of each layer are its experts."""
    return estimate(spec, has_experts=True)


def spec(*devices: str, **placement: Any) -> ModelSpec:
    """A model for these devices."""
    return ModelSpec(id="m", path="m", n_ctx=2048, placement=PlacementSpec(device=devices, **placement))


def budget(*free_mib: float, evictable_mib: float = 0, host_mib: float = 10_000) -> MemoryBudget:
    """Devices A, B, ... with so much free; what could be evicted is of the first."""
    host = int(host_mib * MIB)
    devices = tuple(
        DeviceBudget(
            id="ABC"[at],
            free_bytes=int(mib * MIB),
            limit_bytes=1000 * MIB,
            margin_bytes=0,
            evictable_bytes=int(evictable_mib * MIB) if at == 0 else 0,
        )
        for at, mib in enumerate(free_mib)
    )
    return MemoryBudget(free_bytes=host, limit_bytes=host, margin_bytes=0, devices=devices)


def placed(found: FittedSpec) -> tuple[object, ...]:
    """Layers on devices, the devices, how they share it, layers whose experts are not there."""
    placement = found.spec.placement
    return placement.gpu_layers, placement.device, placement.split_mode, placement.cpu_moe


def test_a_model_lies_whole_on_the_freest_device_that_can_hold_it() -> None:
    """SPEC R11: with two cards and a model on one, the next goes to the other, and neither is split."""
    found = weigh(spec("A", "B"), estimate, budget(500, 600))
    assert placed(found) == (NUM_LAYERS, ("B",), SplitMode.NONE, 0)
    assert (found.fit, found.degraded) == (Fit.FITS, ())
    assert found.estimate.device_bytes("B") == WHOLE
    found = weigh(spec("A", "B"), estimate, budget(700, 400, evictable_mib=400))
    assert placed(found)[1] == ("B",)  # nobody has to go for it


def test_a_model_that_no_device_holds_alone_is_split_by_what_they_have_free() -> None:
    """SPEC R11: by layer, in proportion; that is nothing less than was asked for."""
    found = weigh(spec("A", "B"), estimate, budget(120, 90))
    assert placed(found) == (NUM_LAYERS, ("A", "B"), SplitMode.LAYER, 0)
    assert found.spec.placement.tensor_split == (120 * MIB, 90 * MIB)
    assert found.degraded == ()
    assert 0 < found.estimate.device_bytes("B") < found.estimate.device_bytes("A")


def test_a_device_without_room_has_no_part_of_a_split_model() -> None:
    """SPEC R11, R6: nor is it named, so that it is not leased for nothing."""
    found = weigh(spec("A", "B", "C"), estimate, budget(120, 0, 90))
    assert placed(found) == (NUM_LAYERS, ("A", "C"), SplitMode.LAYER, 0)
    assert found.spec.placement.tensor_split == (120 * MIB, 90 * MIB)
    found = weigh(spec("A", "B", split_mode=SplitMode.LAYER), estimate, budget(0, 500))
    assert placed(found) == (NUM_LAYERS, ("B",), SplitMode.NONE, 0)


def test_cells_are_quantised_before_anything_leaves_the_device() -> None:
    """SPEC R11: all layers, else with quantised cells."""
    found = weigh(spec("A"), estimate, budget(WHOLE / MIB - 1))
    assert (placed(found)[0], found.spec.kv_type) == (NUM_LAYERS, "q8_0")
    assert found.degraded == ("q8_0 cells instead of 16-bit ones",)
    assert found.fit is Fit.DEGRADED


def test_experts_stay_in_host_memory_before_layers_do() -> None:
    """SPEC R11: of as few layers as have to."""
    room = (WHOLE - 3 * EXPERTS) / MIB
    kept = replace(spec("A"), kv_type="f16")
    found = weigh(kept, with_experts, budget(room))
    assert placed(found) == (NUM_LAYERS, ("A",), SplitMode.NONE, 3)
    assert found.degraded == ("the experts of 3 layers in host memory",)
    less = weigh(kept, with_experts, budget(room - 0.5))
    assert placed(less)[3] == 4
    few = weigh(kept, with_experts, budget((COMPUTE + 3 * LAYER) / MIB))
    assert placed(few)[3] == NUM_LAYERS - 1
    assert "layers on A, the others on the CPU" in few.degraded[0]


def test_then_fewer_layers_and_at_last_the_cpu() -> None:
    """SPEC R11: the most that fit, the output first."""
    room = (COMPUTE + 3 * LAYER + 2 * CELLS) / MIB
    found = weigh(spec("A"), estimate, budget(room))
    assert placed(found) == (3, ("A",), SplitMode.NONE, 0)
    assert found.degraded == ("3 of 11 layers on A, the others on the CPU",)
    assert placed(weigh(spec("A"), estimate, budget(room - 1)))[0] == 2
    found = weigh(spec("A"), estimate, budget(25))
    assert placed(found)[:2] == (0, ("none",))
    assert found.degraded == ("on the CPU instead of A",)
    assert found.estimate.on_devices == {}


def test_what_was_asked_for_is_not_made_less() -> None:
    """SPEC R11: all, or a number, of a device; what cannot be is refused with numbers and what could be."""
    assert placed(weigh(spec("A", gpu_layers=4), estimate, budget(500)))[0] == 4
    assert placed(weigh(spec("A", gpu_layers=99), estimate, budget(500)))[0] == NUM_LAYERS
    room = (COMPUTE + 3 * LAYER + 2 * CELLS) / MIB
    with pytest.raises(InsufficientMemoryError) as caught:
        weigh(replace(spec("A", gpu_layers="all"), kv_type="f16"), estimate, budget(room))
    assert caught.value.details == {
        "needed": WHOLE,
        "free": int(room * MIB),
        "margin": 0,
        "device": "A",
        "layers": 3,
    }
    assert "3 of 11 layers would fit: --gpu-layers 3, or auto" in caught.value.message
    with pytest.raises(InsufficientMemoryError, match=re.escape("no layer would fit: --device none")):
        weigh(spec("A", gpu_layers="all"), estimate, budget(1))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"main_gpu": 0}, (("A",), SplitMode.NONE)),
        ({"split_mode": SplitMode.NONE}, (("B",), SplitMode.NONE)),
        ({"split_mode": SplitMode.ROW}, (("A", "B"), SplitMode.ROW)),
        ({"split_mode": SplitMode.LAYER, "tensor_split": (3.0, 1.0)}, (("A", "B"), SplitMode.LAYER)),
        ({"tensor_split": (3.0, 1.0)}, (("A", "B"), SplitMode.LAYER)),
    ],
)
def test_the_devices_that_were_asked_for_are_taken(asked: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """SPEC R11: `main_gpu`, `split_mode` and `tensor_split` decide where they are given."""
    found = weigh(spec("A", "B", **asked), estimate, budget(500, 600))
    assert (found.spec.placement.device, found.spec.placement.split_mode) == expected
    if "tensor_split" in asked:
        assert found.spec.placement.tensor_split == (3.0, 1.0)


def test_a_device_does_not_make_a_machine_larger() -> None:
    """SPEC R1, R11: what lies in host memory has to fit there; a device's part counts on the device alone."""
    on_host = NUM_LAYERS * LAYER + 10 * CELLS + COMPUTE - WHOLE
    assert weigh(spec("A"), estimate, budget(500, host_mib=on_host / MIB)).degraded == ()
    found = weigh(spec("A"), estimate, budget(1, host_mib=100))
    assert found.fit is Fit.TOO_LARGE


def test_layers_are_dealt_out_as_llama_cpp_does() -> None:
    """SPEC R11: the last layers and the output on devices, the parts in order, rounded by layer."""
    both = PlacementSpec(device=("A", "B"), gpu_layers=8, split_mode=SplitMode.LAYER, tensor_split=(3, 1))
    assert places(both, 11) == (HOST,) * 3 + ("A",) * 6 + ("B",) * 2
    assert places(replace(both, gpu_layers="all"), 3) == ("A", "A", "A")
    assert places(replace(both, gpu_layers=0), 3) == (HOST,) * 3
    assert places(replace(both, split_mode=SplitMode.NONE, main_gpu=1), 2) == ("B", "B")
