"""What a model computes on: its name, its memory now, and the lease that keeps other processes off it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.machine.device_lease import DeviceLease, lease_note
from stoker.machine.limits import DEFAULTS, effective_limit, read_limits, tier_of
from stoker.machine.monitor import DeviceSample
from stoker.machine.nvml import CardReading, Nvml
from stoker.machine.thermal import card_heat


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device now, whoever uses it, in bytes."""

    free_bytes: int
    total_bytes: int


ReadMemory = Callable[[], DeviceMemory | None]
"""Reads a device's own memory, from any thread; None: not known, or the machine's own."""


@dataclass(frozen=True, slots=True)
class Device:
    """A processor with its memory.

    Attributes:
        name: for people, such as "NVIDIA H200".
        kind: of its native backend: "CPU", "CUDA", "Vulkan", "Metal".
        id: as its backend calls it and as settings name it, such as "CUDA0"; unique in a backend.
        index: its place among the accelerators of its backend.
        lock: tells it from every other accelerator of this machine; empty: processes may share it.
        bus_id: its PCI address, such as "0000:c1:00.0"; empty: not known.
        is_integrated: its memory is the machine's own, and counts once, as host memory.
        read: see `memory`.
    """

    name: str
    kind: str = "CPU"
    id: str = ""
    index: int = 0
    lock: str = ""
    bus_id: str = ""
    is_integrated: bool = False
    read: ReadMemory = field(default=lambda: None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Kind and name, for people: "CUDA NVIDIA H200"."""
        return self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"

    def memory(self) -> DeviceMemory | None:
        """Its own memory now; None: it has none (a CPU, an integrated device), or does not say."""
        found = None if self.is_integrated else self.read()
        return found if found is not None and found.total_bytes > 0 else None


CPU = Device("CPU", id="CPU")


@dataclass(frozen=True, slots=True)
class AllocatorLimits:
    """What a native allocator may take of this machine, by its size (SPEC M2), in bytes.

    Attributes:
        most_bytes: in use.
        cache_bytes: freed, and kept for what is allocated next.
    """

    most_bytes: int
    cache_bytes: int


def allocator_limits() -> AllocatorLimits:
    """Those of this machine; a limit that the user set is the engine's to watch."""
    found = read_limits()
    defaults = DEFAULTS[tier_of(found.effective_bytes)]
    return AllocatorLimits(effective_limit(found), defaults.allocator_cache_bytes)


class HeldDevices:
    """The devices that the models of one engine compute on, and those that they could.

    An accelerator is leased before the first load on it and until the engine ends (SPEC R6).

    Args:
        folder: of the lock files; None: accelerators are shared with whoever uses them.
        margin_bytes: how much of each a load has to leave.
        driver: what tells more of NVIDIA's cards.
    """

    def __init__(self, folder: Path | None, margin_bytes: int = 0, driver: Nvml | None = None) -> None:
        self._folder = folder
        self._margin_bytes = margin_bytes
        self._driver = driver or Nvml()
        self._known: tuple[Device, ...] = ()
        self._taken: tuple[Device, ...] = ()
        self._leases: list[DeviceLease] = []
        self._held: Mapping[str, Mapping[str, int]] = {}
        self._is_settled = True  # no model is half loaded or half freed
        self._left_bytes: dict[str, int] = {}  # free once the last model was loaded there

    def __repr__(self) -> str:
        return f"<HeldDevices {', '.join(device.label for device in self._taken) or 'none'}>"

    @property
    def known(self) -> tuple[Device, ...]:
        """Every device that is measured."""
        return self._known

    def is_taken(self, device: Device) -> bool:
        """Whether models were loaded on it."""
        return device in self._taken

    def holder(self, device: Device) -> str:
        """Another process that has the lease on a device, for people; empty: none has."""
        if self._folder is None or not device.lock or device in self._taken:
            return ""
        note = lease_note(device.lock, self._folder)
        return note.holder if note else ""

    def know(self, devices: Iterable[Device]) -> None:
        """Measure these from now on, whether they are taken or not."""
        self._known = tuple(dict.fromkeys((*self._known, *devices)))

    def take(self, devices: Iterable[Device], model: str = "") -> None:
        """Have the right to compute on these for a model, all of them or none more than before.

        Raises:
            DeviceBusyError: another process holds one of them.
            MachineSetupError: the folder of the locks cannot be written.
        """
        wanted = tuple(devices)
        self.know(wanted)
        fresh = [device for device in wanted if device not in self._taken]
        locks = [device.lock for device in fresh if device.lock]
        lease = DeviceLease(locks, self._folder) if locks and self._folder is not None else None
        self._taken = (*self._taken, *fresh)  # before the lease: the loop's thread looks its devices up
        self._leases += [lease] if lease else []
        self._note({device.id: [*self._models_on(device.id), model] for device in wanted if model})

    def hold(self, held: Mapping[str, Mapping[str, int]] | None) -> None:
        """What the engine's models hold now, in bytes by model and by id of the device.

        None: a model is half loaded or half freed, and what it has taken is not told from what others have.
        """
        self._is_settled = held is not None
        if held is not None:
            fresh = [sizes for model, sizes in held.items() if model not in self._held]
            for device_id in {each for sizes in fresh for each in sizes}:
                self._left_bytes.pop(device_id, None)
            self._held = held
            self._note({device.id: self._models_on(device.id) for device in self._taken})

    def samples(self) -> tuple[DeviceSample, ...]:
        """Memory, heat and power of each device that is known and has memory of its own; from any thread."""
        found = ((device, self._driver.read(device.bus_id)) for device in self._known)
        samples = (self._sample(device, card or CardReading()) for device, card in found)
        return tuple(sample for sample in samples if sample is not None)

    def close(self) -> None:
        """Let others have them; idempotent."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.close()

    def _sample(self, device: Device, card: CardReading) -> DeviceSample | None:
        memory = self._memory(device, card)
        if memory is None:
            return None
        own_bytes = self._own_bytes(device, card)
        if own_bytes:
            self._left_bytes.setdefault(device.id, memory.free_bytes)
        return DeviceSample(
            id=device.id,
            free_bytes=memory.free_bytes,
            total_bytes=memory.total_bytes,
            own_bytes=own_bytes,
            margin_bytes=self._margin_bytes,
            left_bytes=self._left_bytes.get(device.id),
            heat=card_heat(device.id, card),
            power_w=card.power_w,
            processes=tuple(each for each in card.processes if each.pid != os.getpid()),
        )

    def _memory(self, device: Device, card: CardReading) -> DeviceMemory | None:
        """By the driver where no model is: to ask a native library takes some of a card's memory itself."""
        if device in self._taken or card.free_bytes is None or card.total_bytes is None:
            return device.memory()
        return DeviceMemory(card.free_bytes, card.total_bytes)

    def _own_bytes(self, device: Device, card: CardReading) -> int | None:
        """What models hold; of a card whose driver tells processes apart all that this one has."""
        if not self._is_settled:
            return None
        by_driver = sum(each.used_bytes for each in card.processes if each.pid == os.getpid())
        return max(by_driver, sum(sizes.get(device.id, 0) for sizes in self._held.values()))

    def _models_on(self, device_id: str) -> list[str]:
        return [model for model, sizes in self._held.items() if device_id in sizes]

    def _note(self, models: Mapping[str, Sequence[str]]) -> None:
        """Have the lock files say which models they are held for."""
        notes = {device.lock: (device.label, models.get(device.id)) for device in self._taken}
        for lease in self._leases:
            for lock in lease.names:
                label, names = notes[lock]
                if names is not None:
                    lease.note(lock, label, list(dict.fromkeys(names)))
