"""What a model computes on: its name, its memory now, and the lease that keeps other processes off it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.machine.device_lease import DeviceLease
from stoker.machine.monitor import DeviceSample


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
        is_integrated: its memory is the machine's own, and counts once, as host memory.
        read: see `memory`.
    """

    name: str
    kind: str = "CPU"
    id: str = ""
    index: int = 0
    lock: str = ""
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


class HeldDevices:
    """The devices that the models of one engine compute on.

    An accelerator is leased before the first load on it and until the engine ends (SPEC R6).

    Args:
        folder: of the lock files.
        margin_bytes: how much of each a load has to leave.

    Attributes:
        own_bytes: what the engine's models hold, by id of the device; None: a model is half loaded or half
            freed, and what it has taken is not told from what others have.
    """

    def __init__(self, folder: Path, margin_bytes: int = 0) -> None:
        self.own_bytes: Mapping[str, int] | None = {}
        self._folder = folder
        self._margin_bytes = margin_bytes
        self._known: tuple[Device, ...] = ()
        self._devices: tuple[Device, ...] = ()
        self._leases: list[DeviceLease] = []

    def __repr__(self) -> str:
        return f"<HeldDevices {', '.join(self.names) or 'none'}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the devices, for people, in the order of their first use."""
        return tuple(device.label for device in self._devices)

    def take(self, devices: Iterable[Device]) -> None:
        """Have the right to compute on these, all of them or none more than before.

        Raises:
            DeviceBusyError: another process holds one of them.
            MachineSetupError: the folder of the locks cannot be written.
        """
        wanted = tuple(devices)
        self.know(wanted)
        fresh = [device for device in wanted if device not in self._devices]
        if locks := [device.lock for device in fresh if device.lock]:
            self._leases.append(DeviceLease(locks, self._folder))
        self._devices = (*self._devices, *fresh)

    def know(self, devices: Iterable[Device]) -> None:
        """Measure these from now on, whether they are taken or not."""
        self._known = tuple(dict.fromkeys((*self._known, *devices)))

    def samples(self) -> tuple[DeviceSample, ...]:
        """Memory of each device that is known and has some of its own; from any thread."""
        own_bytes = self.own_bytes
        return tuple(
            DeviceSample(
                id=device.id,
                free_bytes=memory.free_bytes,
                total_bytes=memory.total_bytes,
                own_bytes=None if own_bytes is None else own_bytes.get(device.id, 0),
                margin_bytes=self._margin_bytes,
            )
            for device in self._known
            if (memory := device.memory()) is not None
        )

    def close(self) -> None:
        """Let others have them; idempotent."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.close()
