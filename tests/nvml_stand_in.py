# ruff: noqa: N802 - the names are those of NVML
"""A stand-in for the module `pynvml`: cards by PCI address, and what its driver does not tell."""

from __future__ import annotations

from types import SimpleNamespace


class NvmlStandIn:
    """Answers as NVML does, and raises its error for what is not in a card.

    Attributes:
        cards: by address: memory (free, total), processes (pid, bytes, path), power_mw, celsius, slowdown_c,
            shutdown_c, in_parts; is_old: its driver lacks what the binding wants to ask of programs.
        num_opened: calls of nvmlInit.
        is_there: whether there is a driver.
    """

    class NVMLError(Exception):
        """As NVML's own."""

    class NVMLLibraryMismatchError(Exception):
        """As the binding's own, which is no NVMLError."""

    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = "slowdown_c"
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = "shutdown_c"
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self):
        self.cards = {}
        self.num_opened = 0
        self.is_there = True

    def nvmlInit(self):
        """Opens it."""
        self.num_opened += 1
        if not self.is_there:
            raise self.NVMLError("NVML Shared Library Not Found")

    def _field(self, card, name):
        if card.get(name) is None:
            raise self.NVMLError("Not Supported")
        return card[name]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        """The card."""
        return self._field(self.cards, bus_id.decode())

    def nvmlDeviceGetTemperature(self, card, _sensor):
        """In degrees Celsius."""
        return self._field(card, "celsius")

    def nvmlDeviceGetTemperatureThreshold(self, card, which):
        """In degrees Celsius."""
        return self._field(card, which)

    def nvmlDeviceGetPowerUsage(self, card):
        """In milliwatts."""
        return self._field(card, "power_mw")

    def nvmlDeviceGetMigMode(self, card):
        """Now, and after the next reset."""
        return [self._field(card, "in_parts")] * 2

    def nvmlDeviceGetMemoryInfo(self, card):
        """In bytes."""
        free, total = self._field(card, "memory")
        return SimpleNamespace(free=free, total=total)

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        """Of whatever user may be seen."""
        if card.get("is_old"):
            raise self.NVMLLibraryMismatchError("Unversioned function called and the pyNVML version is newer")
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size, _ in self._field(card, "processes")
        ]

    def nvmlSystemGetProcessName(self, pid):
        """Its path."""
        found = {each[0]: each[2] for card in self.cards.values() for each in card.get("processes", ())}
        return self._field(found, pid)
