"""How hot the machine is: nominal, fair, serious or critical (SPEC M6).

Owns the sources of heat (sensors of Linux, thermal pressure of macOS, accelerators, a recorded trace) and the
hysteresis.
The engine's pressure handler acts on it. A machine without sensors counts as nominal.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from stoker.errors import MachineSetupError
from stoker.machine.nvml import CardReading

LEAVE_AFTER_S = 10.0
"""A level is entered at once and left after so long below it."""
FAIR_BELOW_K = 10.0
DEFAULT_HIGH_C = 97.0
DEFAULT_CRITICAL_C = 105.0
"""Where a sensor has no thresholds; some processors without any run at 95 by design."""
STEP_K = 5.0
"""Between high and critical where a sensor has only one of them, or the same for both."""

_THRESHOLDS_C = (45.0, 130.0)  # other values stand for "not known" in firmware
_READINGS_C = (1.0, 150.0)
_FOREIGN = ("nvme", "drivetemp", "iwlwifi", "ath", "mt7", "bat", "ucsi", "spd", "jc42")
"""Chips that computing does not heat: drives, radios, batteries, memory modules."""


class Heat(StrEnum):
    """How hot the machine is."""

    NOMINAL = "nominal"
    FAIR = "fair"
    SERIOUS = "serious"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for nominal, more for hotter."""
        return list(Heat).index(self)


@dataclass(frozen=True, slots=True)
class HeatReading:
    """A level, its sensor (empty: none), and degrees Celsius where the sensor has them."""

    level: Heat = Heat.NOMINAL
    sensor: str = ""
    celsius: float | None = None


HeatSource = Callable[[], HeatReading]
"""Reads heat now; takes milliseconds at most and never raises."""


def heat_source(trace: Path | None = None) -> HeatSource:
    """The recorded trace if given, else the sensors of this machine; without any it is nominal.

    Raises:
        MachineSetupError: the trace cannot be read or a line of it is wrong.
    """
    if trace is not None:
        return RecordedTrace(trace).read
    if sys.platform == "darwin":
        return MacThermalState().read
    return hottest_sensor if hasattr(psutil, "sensors_temperatures") else HeatReading


# ---------------------------------------------------------------- Linux


def level_of(celsius: float, high_c: float = DEFAULT_HIGH_C, critical_c: float = DEFAULT_CRITICAL_C) -> Heat:
    """The level of a temperature, given the thresholds of its sensor."""
    if celsius >= critical_c:
        return Heat.CRITICAL
    if celsius >= high_c:
        return Heat.SERIOUS
    return Heat.FAIR if celsius >= high_c - FAIR_BELOW_K else Heat.NOMINAL


def hottest_sensor(read_sensors: Callable[[], Mapping[str, Iterable[Any]]] | None = None) -> HeatReading:
    """The worst level of the kernel's temperature sensors, each by its own thresholds, with its sensor.

    Args:
        read_sensors: sensors by chip, each with label, current, high and critical in degrees Celsius; None:
            this machine's.
    """
    try:
        chips = (read_sensors or psutil.sensors_temperatures)()
    except (OSError, ValueError, psutil.Error):
        return HeatReading()
    readings = [
        HeatReading(
            level_of(sensor.current, *_thresholds(sensor.high, sensor.critical)),
            _name(chip, sensor),
            sensor.current,
        )
        for chip, sensors in chips.items()
        if not chip.lower().startswith(_FOREIGN)
        for sensor in sensors
        if _is_within(sensor.current, _READINGS_C)
    ]
    return hottest(readings)


def hottest(readings: Iterable[HeatReading]) -> HeatReading:
    """The worst level, and the hottest of that."""
    return max(readings, key=lambda one: (one.level.rank, one.celsius or 0.0), default=HeatReading())


def card_heat(name: str, card: CardReading) -> HeatReading:
    """The level of an accelerator: serious where it slows down, critical where it would end.

    Args:
        name: of its sensor.
        card: as its driver says; a temperature that it does not tell is nominal.
    """
    if card.celsius is None or not _is_within(card.celsius, _READINGS_C):
        return HeatReading()
    high_c, critical_c = _thresholds(card.slowdown_c, card.shutdown_c)
    return HeatReading(level_of(card.celsius, high_c, critical_c), name, card.celsius)


def _name(chip: str, sensor: Any) -> str:
    return f"{chip} {sensor.label}".strip()


def _is_within(celsius: float | None, bounds: tuple[float, float]) -> bool:
    return celsius is not None and bounds[0] <= celsius <= bounds[1]


def _thresholds(*told_c: float | None) -> tuple[float, float]:
    """High and critical; psutil copies the one that a sensor has into the other's place."""
    named = [float(one) for one in told_c if one is not None and _is_within(one, _THRESHOLDS_C)]
    if not named:
        return DEFAULT_HIGH_C, DEFAULT_CRITICAL_C
    low, top = named[0], named[-1]
    return low if low < top else top - STEP_K, top


# ---------------------------------------------------------------- macOS

_PRESSURE_NAME = b"com.apple.system.thermalpressurelevel"
_LEVELS = (Heat.NOMINAL, Heat.FAIR, Heat.SERIOUS, Heat.CRITICAL)  # nominal, moderate, heavy, trapping


class MacThermalState:
    """The thermal pressure that macOS publishes (OSThermalNotification.h). Not tried on a Mac yet.

    Args:
        library: libSystem, or a stand-in for it.
    """

    def __init__(self, library: Any | None = None) -> None:
        self._library = library if library is not None else ctypes.CDLL(None)
        self._token = ctypes.c_int(0)
        try:
            status = self._library.notify_register_check(_PRESSURE_NAME, ctypes.byref(self._token))
        except AttributeError:  # no such function: not macOS
            status = 1
        self._is_registered = status == 0

    def __repr__(self) -> str:
        return f"<MacThermalState {'registered' if self._is_registered else 'not available'}>"

    def read(self) -> HeatReading:
        """The level published last."""
        state = ctypes.c_uint64(0)
        if not self._is_registered or self._library.notify_get_state(self._token, ctypes.byref(state)) != 0:
            return HeatReading()
        return HeatReading(_LEVELS[min(state.value, len(_LEVELS) - 1)], "thermal pressure")


# ---------------------------------------------------------------- recorded


class RecordedTrace:
    """Heat from a file, played from the first reading on; nominal before, the last line stays.

    Each line is `seconds,level` or `seconds,degrees`, in order of time; `#` begins a comment.

    Args:
        path: the file.
        clock: seconds on a monotonic clock.

    Raises:
        MachineSetupError: it cannot be read, is empty, or a line of it is wrong.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._points = _read_trace(path)
        self._started_s: float | None = None

    def __repr__(self) -> str:
        return f"<RecordedTrace {self._path} with {len(self._points)} lines>"

    def read(self) -> HeatReading:
        """The line for the time since the first reading."""
        now_s = self._clock()
        if self._started_s is None:
            self._started_s = now_s
        passed_s = now_s - self._started_s
        past = [reading for at_s, reading in self._points if at_s <= passed_s]
        return past[-1] if past else HeatReading(sensor="trace")


def _read_trace(path: Path) -> list[tuple[float, HeatReading]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineSetupError(f"cannot read the heat trace {path}: {reason}", param="heat_trace") from None
    points: list[tuple[float, HeatReading]] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            at_s, reading = _parse_point(text)
            if points and at_s < points[-1][0]:
                raise ValueError(f"{at_s:g} s comes before the line above")  # noqa: TRY301 - one place says where
        except ValueError as error:
            message = f"heat trace {path}, line {number}: {error}"
            raise MachineSetupError(message, param="heat_trace", line=number) from None
        points.append((at_s, reading))
    if not points:
        raise MachineSetupError(f"the heat trace {path} has no line", param="heat_trace")
    return points


def _parse_point(text: str) -> tuple[float, HeatReading]:
    at, _, heat = (part.strip() for part in text.partition(","))
    try:
        at_s = float(at)
        if heat in list(Heat):
            reading = HeatReading(Heat(heat), "trace")
        else:
            reading = HeatReading(level_of(float(heat)), "trace", float(heat))
    except ValueError:
        at_s, reading = math.nan, HeatReading()
    if not math.isfinite(at_s) or not math.isfinite(reading.celsius or 0.0):
        raise ValueError(f"{text!r} is not `seconds,level` or `seconds,degrees`")
    return at_s, reading


# ---------------------------------------------------------------- hysteresis


class HeatMeter:
    """Adds hysteresis: a level is entered at once and left after `LEAVE_AFTER_S` below it."""

    def __init__(self) -> None:
        self._below_since_s = dict.fromkeys(Heat, -math.inf)

    def __repr__(self) -> str:
        return f"<HeatMeter below since {self._below_since_s}>"

    def update(self, reading: HeatReading, now_s: float) -> HeatReading:
        """The reading with the level that counts; sensor and degrees are those of `reading`.

        Args:
            reading: how hot it is.
            now_s: when that was read, on a monotonic clock.
        """
        for level in Heat:
            if level.rank <= reading.level.rank:
                self._below_since_s[level] = math.inf  # not below it
            else:
                self._below_since_s[level] = min(self._below_since_s[level], now_s)
        held = [level for level in Heat if now_s - self._below_since_s[level] < LEAVE_AFTER_S]
        return HeatReading(max(held, key=lambda level: level.rank), reading.sensor, reading.celsius)
