"""What a model computes on: its name, its memory now, and the lease that keeps other processes off it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.machine.device_lease import DeviceLease

ReadMemory = Callable[[], tuple[int, int] | None]
"""Free and total bytes; None: not known, or the machine's own."""


@dataclass(frozen=True, slots=True)
class Device:
    """A processor with its memory.

    Attributes:
        name: for people, such as "CUDA NVIDIA H200".
        lock: tells it from every other accelerator of this machine; empty: processes may share it.
        memory: reads what its own memory holds, from any thread.
    """

    name: str
    lock: str = ""
    memory: ReadMemory = field(default=lambda: None, compare=False)


CPU = Device("CPU")


class HeldDevices:
    """The devices that the models of one engine compute on.

    An accelerator is leased before the first load on it and until the engine ends (SPEC R6).

    Args:
        folder: of the lock files.

    Attributes:
        own_bytes: what the engine's models hold of accelerators; None: a model is half loaded or half freed.
    """

    def __init__(self, folder: Path) -> None:
        self.own_bytes: int | None = 0
        self._folder = folder
        self._devices: tuple[Device, ...] = ()
        self._leases: list[DeviceLease] = []

    def __repr__(self) -> str:
        return f"<HeldDevices {', '.join(self.names) or 'none'}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the devices, in the order of their first use."""
        return tuple(device.name for device in self._devices)

    def take(self, devices: Iterable[Device]) -> None:
        """Have the right to compute on these, all of them or none more than before.

        Raises:
            DeviceBusyError: another process holds one of them.
            MachineSetupError: the folder of the locks cannot be written.
        """
        fresh = [device for device in devices if device not in self._devices]
        if locks := [device.lock for device in fresh if device.lock]:
            self._leases.append(DeviceLease(locks, self._folder))
        self._devices = (*self._devices, *fresh)

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the accelerators together; None: none says, or a model is on its way.

        What the engine's own models hold counts as free: they take it at their load and need no more later.
        So only what other processes take is pressure (SPEC M3).
        """
        own_bytes = self.own_bytes
        found = [memory for device in self._devices if (memory := device.memory()) and memory[1] > 0]
        if own_bytes is None or not found:
            return None
        total = sum(memory[1] for memory in found)
        return min(total, sum(memory[0] for memory in found) + own_bytes), total

    def close(self) -> None:
        """Let others have them; idempotent."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.close()
