"""Where a model can lie so that it fits the devices: in what order that is tried (SPEC R11). Pure.

A form is a spec whose placement is concrete: ids of devices, a number of layers, parts. First come all
layers, on the one device that has most memory free, then on several; where "auto" lets it, then all but
experts, all but some layers, and the CPU. What a form takes is the estimator's to say, `fit` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.ipc.model import NO_DEVICE, ModelSpec, PlacementSpec, SplitMode
from stoker.wording import count_text

if TYPE_CHECKING:
    from stoker.models.memory_estimate.fit import DeviceBudget, Estimate, Estimator, MemoryBudget


@dataclass(frozen=True, slots=True)
class Placing:
    """The forms of one model within one budget.

    Attributes:
        estimate: what a form takes.
        budget: what there is of each device.
    """

    estimate: Estimator
    budget: MemoryBudget

    def forms(self, spec: ModelSpec) -> Iterator[ModelSpec]:
        """Everything else as in `spec`, best first; without devices `spec` itself."""
        yield from self.whole(spec)
        yield from self.parted(spec)

    def whole(self, spec: ModelSpec) -> Iterator[ModelSpec]:
        """As many layers on devices as asked for, all where that is "auto"."""
        if not self.has_devices(spec):
            yield spec
            return
        asked, num_layers = spec.placement.gpu_layers, self.estimate(spec).num_layers
        count = min(asked, num_layers or asked) if isinstance(asked, int) else num_layers
        for place in self._device_sets(spec.placement):
            yield _on(spec, replace(place, gpu_layers=count, cpu_moe=spec.placement.cpu_moe or 0))

    def parted(self, spec: ModelSpec) -> Iterator[ModelSpec]:
        """With less on devices, as far as `spec` leaves that open; at last nothing."""
        if not self.has_devices(spec) or spec.placement.gpu_layers != "auto":
            return
        asked = self.estimate(spec)
        sets = tuple(self._device_sets(spec.placement))
        num_moe = spec.placement.cpu_moe or 0
        if asked.has_experts and spec.placement.cpu_moe is None:
            num_moe = asked.num_layers - 1
            for place in sets:
                found = self._least(num_moe, partial(_without_experts, spec, place, asked.num_layers))
                if found is not None:
                    yield found
        for place in reversed(sets):  # several devices hold more layers than one
            part = replace(place, cpu_moe=num_moe)
            found = self._least(asked.num_layers - 1, partial(_without_layers, spec, part, asked.num_layers))
            if found is not None:
                yield found
        yield on_host(spec)

    def fits_devices(self, found: Estimate) -> bool:
        """Whether every device has room for its part."""
        return not self.short(found)

    def short(self, found: Estimate) -> tuple[DeviceBudget, ...]:
        """The devices that have no room for their part."""
        return tuple(each for each in self.budget.devices if found.device_bytes(each.id) > each.room_bytes)

    @staticmethod
    def has_devices(spec: ModelSpec) -> bool:
        """Whether the spec names devices that it may lie on."""
        return bool(spec.placement.device) and spec.placement.has_devices

    def most_layers(self, spec: ModelSpec) -> int:
        """How many layers would fit the devices as everything else is; 0: none."""
        auto = replace(spec.placement, gpu_layers="auto", cpu_moe=spec.placement.cpu_moe or 0)
        for form in (*self.whole(_on(spec, auto)), *self.parted(_on(spec, auto))):
            if self.fits_devices(self.estimate(form)):
                return form.placement.gpu_layers if isinstance(form.placement.gpu_layers, int) else 0
        return 0

    def _device_sets(self, asked: PlacementSpec) -> Iterator[PlacementSpec]:
        """One device each, the one with most memory free first, then all that have some with their parts."""
        rooms = {each.id: each for each in self.budget.devices}
        ids, mode = asked.device, asked.split_mode
        if mode is None and asked.tensor_split and asked.main_gpu is None:
            mode = SplitMode.LAYER
        if mode in {None, SplitMode.NONE}:
            alone = ids if asked.main_gpu is None else ids[asked.main_gpu : asked.main_gpu + 1]
            yield from map(partial(_alone, asked), sorted(alone, key=lambda each: -_vacant(rooms.get(each))))
        if mode is SplitMode.NONE or (mode is None and asked.main_gpu is not None):
            return
        free = {each: float(_room(rooms.get(each))) for each in ids}
        if not asked.tensor_split and any(
            free.values()
        ):  # one that others have filled is not leased for nothing
            ids = tuple(each for each in ids if free[each])
        if len(ids) > 1:
            parts = asked.tensor_split or tuple(free[each] or 1.0 for each in ids)
            yield replace(
                asked, device=ids, split_mode=mode or SplitMode.LAYER, main_gpu=0, tensor_split=parts
            )
        elif mode is not None:
            yield _alone(asked, ids[0])

    def _least(self, most: int, form: Callable[[int], ModelSpec]) -> ModelSpec | None:
        """The form of the smallest number from 1 to `most` that fits; more take less. None: not even that."""
        low, high = 1, most
        if most < 1 or not self.fits_devices(self.estimate(form(most))):
            return None
        while low < high:
            middle = (low + high) // 2
            if self.fits_devices(self.estimate(form(middle))):
                high = middle
            else:
                low = middle + 1
        return form(low)


def _without_experts(spec: ModelSpec, place: PlacementSpec, num_layers: int, count: int) -> ModelSpec:
    return _on(spec, replace(place, gpu_layers=num_layers, cpu_moe=count))


def _without_layers(spec: ModelSpec, place: PlacementSpec, num_layers: int, count: int) -> ModelSpec:
    return _on(spec, replace(place, gpu_layers=num_layers - count))


def _alone(asked: PlacementSpec, device: str) -> PlacementSpec:
    return replace(asked, device=(device,), split_mode=SplitMode.NONE, main_gpu=0, tensor_split=())


def _vacant(device: DeviceBudget | None) -> int:
    """Bytes of it that nobody has; of one that uses the machine's memory there are none to compare."""
    return 0 if device is None else device.vacant_bytes


def _room(device: DeviceBudget | None) -> int:
    return 0 if device is None else device.room_bytes


def on_host(spec: ModelSpec) -> ModelSpec:
    """On no device."""
    placement = replace(spec.placement, gpu_layers=0, device=(NO_DEVICE,), cpu_moe=0, tensor_split=())
    return _on(spec, replace(placement, split_mode=SplitMode.NONE, main_gpu=0))


def draft_placement(placement: PlacementSpec) -> PlacementSpec:
    """Where a draft model lies beside one with this placement: whole on its first device, if it has one."""
    if not placement.has_devices:
        return placement
    alone = replace(placement, gpu_layers="all", device=placement.device[:1], cpu_moe=0, tensor_split=())
    return replace(alone, split_mode=SplitMode.NONE, main_gpu=0)


def less_on_devices(asked: ModelSpec, form: ModelSpec, num_layers: int) -> list[str]:
    """What lies in host memory that was to lie on devices, for people."""
    given, found = asked.placement, form.placement
    devices = " and ".join(found.device)
    if given.gpu_layers != "auto" or not Placing.has_devices(asked):
        return []
    if found.gpu_layers == 0:
        return [f"on the CPU instead of {' and '.join(given.device)}"]
    phrases = []
    if found.gpu_layers != num_layers:
        phrases.append(f"{found.gpu_layers} of {num_layers} layers on {devices}, the others on the CPU")
    if found.cpu_moe and given.cpu_moe is None:
        phrases.append(f"the experts of {count_text(found.cpu_moe, 'layer')} in host memory")
    return phrases


def _on(spec: ModelSpec, placement: PlacementSpec) -> ModelSpec:
    return replace(spec, placement=placement)
