"""What NVIDIA's driver says of a card: heat, power, memory, and whose it is.

Owns the way to NVML. Without the library, the driver or a right to ask there is no answer, and no word about
it: most machines have none. The library is loaded with the first question.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

FRESH_S = 0.9
"""Less than the time between two samples of the monitor, so that each of those is new."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A program that computes on a card; 0 bytes: what it holds is not told."""

    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One card now; None: the driver does not say.

    Attributes:
        celsius: of its processor; it slows down from `slowdown_c` on, and ends at `shutdown_c`.
        power_w: what it takes.
        free_bytes, total_bytes: of its memory; of one that is cut in parts (MIG) not known here.
        processes: that compute on it, as far as this user may see them.
    """

    celsius: float | None = None
    slowdown_c: float | None = None
    shutdown_c: float | None = None
    power_w: float | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    processes: tuple[CardProcess, ...] = ()


class Nvml:
    """NVML, opened with the first question; may be asked from any thread.

    Args:
        library: a stand-in for the module `pynvml`; None: that, if it is installed.
        clock: seconds on a monotonic clock.
    """

    def __init__(self, library: Any | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = library
        self._clock = clock
        self._last: dict[str, tuple[float, CardReading | None]] = {}

    def __repr__(self) -> str:
        opened = self.__dict__.get("_library", "not asked")
        return f"<Nvml {'not there' if opened is None else opened}>"

    @cached_property
    def _library(self) -> Any:  # None: there is none
        library = self._given
        try:
            if library is None:
                import pynvml  # noqa: PLC0415 - machines without a card

                library = pynvml
            library.nvmlInit()
        except Exception as error:  # noqa: BLE001 - NVML's own errors have no base before it is there
            _log.debug("NVML cannot be asked: %s", error)
            return None
        return library

    def read(self, bus_id: str) -> CardReading | None:
        """The card at a PCI address such as "0000:c1:00.0"; None: NVML is not there, or knows none there.

        An answer is given again for `FRESH_S`: a driver may take milliseconds for one.
        """
        now_s = self._clock()
        at_s, reading = self._last.get(bus_id, (-math.inf, None))
        if now_s - at_s >= FRESH_S:
            reading = self._read(bus_id)
            self._last[bus_id] = now_s, reading
        return reading

    def _read(self, bus_id: str) -> CardReading | None:
        library = self._library if bus_id else None
        handle = library and self._ask(library.nvmlDeviceGetHandleByPciBusId, bus_id.encode())
        if library is None or handle is None:
            return None
        power_mw = self._ask(library.nvmlDeviceGetPowerUsage, handle)
        memory = None if self._is_in_parts(handle) else self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        return CardReading(
            celsius=self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            slowdown_c=self._threshold(handle, library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            shutdown_c=self._threshold(handle, library.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            power_w=None if power_mw is None else power_mw / 1000,
            free_bytes=memory and memory.free,
            total_bytes=memory and memory.total,
            processes=self._processes(handle),
        )

    def _threshold(self, handle: Any, which: int) -> float | None:
        found: float | None = self._ask(self._library.nvmlDeviceGetTemperatureThreshold, handle, which)
        return found

    def _is_in_parts(self, handle: Any) -> bool:
        library = self._library
        modes = self._ask(library.nvmlDeviceGetMigMode, handle)
        return modes is not None and modes[0] == library.NVML_DEVICE_MIG_ENABLE

    def _processes(self, handle: Any) -> tuple[CardProcess, ...]:
        found = self._ask(self._library.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        return tuple(
            CardProcess(int(each.pid), self._name(each.pid), int(each.usedGpuMemory or 0)) for each in found
        )

    def _name(self, pid: int) -> str:
        name = self._ask(self._library.nvmlSystemGetProcessName, pid) or ""
        return PurePath(name.decode(errors="replace") if isinstance(name, bytes) else str(name)).name

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any | None:
        """The answer; None where this card, driver or user gets none."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - one for an old driver is not of NVML's own kind
            _log.debug("%s: %s", getattr(function, "__name__", function), error)
            return None
