"""How short memory is: normal, warning or critical (SPEC M3).

Owns the level of each sample, with hysteresis. Pure: time comes with the sample. `monitor` measures, `ladder`
decides what is given up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.machine.monitor import DeviceSample, Sample

WARNING_FROM = 0.70
CRITICAL_FROM = 0.85
HYSTERESIS = 0.05
EVENT_HOLD_S = 5.0
"""How long an OS event counts: its cause may be over before the next sample shows it. Where later samples are
normal it counts as a warning, so that nothing is parked for what is over."""

PSI_WARNING = 10.0
"""Percent of time that processes waited for memory: from a tenth on, steps take noticeably longer."""
PSI_CRITICAL = 40.0
"""systemd-oomd kills at 60 (its default limit)."""
EASED_FROM = 0.5
"""Stalls count in full only where memory that this process shares is half full. Else the stalled process is
at a limit of its own, such as another container's, and memory freed here would not reach it."""


class Pressure(StrEnum):
    """How short memory is."""

    NORMAL = "normal"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for normal, more for worse."""
        return list(Pressure).index(self)


@dataclass(frozen=True, slots=True)
class PressureReading:
    """The level of a sample.

    Attributes:
        level: with hysteresis.
        fraction: of the worst source, from 0; over 1 where a limit is passed.
        source: footprint, system, cgroup, psi, event or the id of a device.
    """

    level: Pressure
    fraction: float
    source: str


class PressureMeter:
    """Turns samples into levels; each source is a fraction, the worst one counts."""

    def __init__(self) -> None:
        self._level = Pressure.NORMAL
        self._event_s = -math.inf

    def __repr__(self) -> str:
        return f"<PressureMeter {self._level}>"

    def update(self, sample: Sample) -> PressureReading:
        """Take the next sample; its time must not be before the last one's."""
        fraction, source = fullest(sample)
        self._level = Pressure.CRITICAL if sample.is_os_event else self._settle(fraction)
        if sample.is_os_event:
            self._event_s = sample.at_s
        elif sample.at_s - self._event_s >= EVENT_HOLD_S:
            return PressureReading(self._level, fraction, source)
        if self._level is Pressure.NORMAL:
            return PressureReading(Pressure.WARNING, max(fraction, WARNING_FROM), "event")
        return PressureReading(Pressure.CRITICAL, max(fraction, CRITICAL_FROM), "event")

    def _settle(self, fraction: float) -> Pressure:
        """The level of a fraction; the present level is left only `HYSTERESIS` lower."""
        for level, mark in ((Pressure.CRITICAL, CRITICAL_FROM), (Pressure.WARNING, WARNING_FROM)):
            if fraction >= mark - (HYSTERESIS if self._level.rank >= level.rank else 0.0):
                return level
        return Pressure.NORMAL


def fullest(sample: Sample) -> tuple[float, str]:
    """The fraction of a sample's worst source, and its name."""
    return max(_fractions(sample))


def is_ours_to_ease(sample: Sample) -> bool:
    """Whether memory freed here may help processes that wait for memory.

    Where models read experts from disk as they need them, they are who waits: nothing freed here helps.
    """
    return not sample.streams and max(fraction for fraction, _ in _filled(sample)) >= EASED_FROM


def _fractions(sample: Sample) -> Iterator[tuple[float, str]]:
    yield from _filled(sample)
    for device in sample.devices:
        if device.own_bytes:  # where it holds nothing there is nothing to give back
            yield device_fraction(device), device.id
    if sample.psi_some_avg10 is not None and not sample.streams:
        most = 100.0 if is_ours_to_ease(sample) else PSI_WARNING
        yield psi_fraction(min(most, sample.psi_some_avg10)), "psi"


def _filled(sample: Sample) -> Iterator[tuple[float, str]]:
    yield _part(sample.footprint_bytes, sample.limit_bytes), "footprint"
    yield 1.0 - _part(sample.system_available_bytes, sample.total_bytes), "system"
    if sample.cgroup_used_bytes is not None and sample.cgroup_limit_bytes is not None:
        yield _part(sample.cgroup_used_bytes, sample.cgroup_limit_bytes), "cgroup"


def _part(size_bytes: int, of_bytes: int) -> float:
    return size_bytes / of_bytes if of_bytes > 0 else 1.0


def device_fraction(device: DeviceSample) -> float:
    """How short an accelerator's memory is, on the scale of the other fractions.

    Models take theirs when they are loaded and leave the margin, or less where their library takes more than
    its buffers: what they hold is no pressure. Others are. While the margin is free it is their part of what
    models leave, less than `WARNING_FROM`. From there on, linear to 1, it is the part of the margin that they
    have taken: a step needs some of it.
    """
    others = device.other_bytes or 0
    if others == 0:
        return 0.0
    left_bytes = device.margin_bytes if device.left_bytes is None else device.left_bytes
    margin_bytes = min(device.margin_bytes, left_bytes)
    left = device.free_bytes / margin_bytes if margin_bytes else float(device.free_bytes > 0)
    if left < 1.0:
        return 1.0 - (1.0 - WARNING_FROM) * left
    return min(WARNING_FROM - HYSTERESIS, others / (others + device.free_bytes))


def psi_fraction(some_avg10: float) -> float:
    """Stalled time in percent, on the scale of the other fractions.

    Piecewise linear: 0 at 0, `WARNING_FROM` at `PSI_WARNING`, `CRITICAL_FROM` at `PSI_CRITICAL`, 1 at 100.
    """
    marks = ((0.0, 0.0), (PSI_WARNING, WARNING_FROM), (PSI_CRITICAL, CRITICAL_FROM), (100.0, 1.0))
    for (start, low), (end, high) in pairwise(marks):
        if some_avg10 <= end:
            return low + (high - low) * max(0.0, some_avg10 - start) / (end - start)
    return 1.0
