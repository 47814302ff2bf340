"""Why a step took many times its prediction (SPEC M7): each reason found is told once a minute.

`why_slow` is pure. Reading what the machine counts is `read_hindrances`' business, logging the caller's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.memory.cores import SPARE_CORES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.engine.governor import StepSample

MANY_TIMES = 8.0
"""A step that many times over its prediction is told about."""
AGAIN_AFTER_S = 60.0
NOTE_EVERY_S = 0.25
FEW_FAULTS = 16
"""Pages read from the disk that do not explain a slow step."""
THROTTLED_PART = 0.2
HALF_A_CORE = 0.5
ASLEEP_S = 1.0

_CGROUPS = Path("/sys/fs/cgroup")


class SlowReason(StrEnum):
    """What kept a step, as far as can be told."""

    SLEPT = "the machine slept meanwhile"
    THROTTLED = "the control group's processor quota was used up"
    PAGE_FAULTS = "parts of the model had to be read from the disk"
    OTHERS = "other processes took the cores"
    SHARED_CORE = "its threads shared a core while another was free"
    LOST_CORES = "its threads did not get the cores they need, and nothing tells who had them"
    UNKNOWN = "its threads computed all the time; perhaps the processor was slowed down"


@dataclass(frozen=True, slots=True)
class Hindrances:
    """What the machine counts of things that keep a process from computing; or the growth of that.

    Attributes:
        num_faults: pages that this process waited for a disk to bring.
        throttled_s: time that a control group's quota held threads back.
        slept_s: time that the machine was suspended.
    """

    num_faults: int = 0
    throttled_s: float = 0.0
    slept_s: float = 0.0

    def since(self, before: Hindrances) -> Hindrances:
        """The growth from `before` to this."""
        return Hindrances(
            self.num_faults - before.num_faults,
            self.throttled_s - before.throttled_s,
            self.slept_s - before.slept_s,
        )


def read_hindrances() -> Hindrances:
    """Read the counters now; what this system does not count stays 0."""
    return Hindrances(_num_faults(), _throttled_s(_stat_files()), _slept_s())


def why_slow(sample: StepSample, met: Hindrances, num_cores: int, others_cores: float | None) -> SlowReason:
    """What kept a step.

    Args:
        sample: the step.
        met: what was counted while it ran.
        num_cores: cores this process may use.
        others_cores: how many of them others used; None: not known.
    """
    if met.slept_s >= ASLEEP_S:
        return SlowReason.SLEPT
    if met.throttled_s >= THROTTLED_PART * sample.wall_s:
        return SlowReason.THROTTLED
    if sample.lost_cores < HALF_A_CORE:
        return SlowReason.UNKNOWN
    if met.num_faults > FEW_FAULTS:
        return SlowReason.PAGE_FAULTS
    return _who_had_the_cores(sample.num_threads, num_cores, others_cores)


def _who_had_the_cores(num_threads: int, num_cores: int, others_cores: float | None) -> SlowReason:
    if others_cores is None:
        return SlowReason.LOST_CORES
    if num_threads + others_cores > num_cores + SPARE_CORES:
        return SlowReason.OTHERS
    return SlowReason.SHARED_CORE if num_threads > 1 else SlowReason.LOST_CORES


class SlowSteps:
    """Finds the reason of each slow step and tells each reason once a minute.

    Args:
        num_cores: cores this process may use.
        read: reads the counters; another one in tests.
    """

    def __init__(self, num_cores: int, read: Callable[[], Hindrances] = read_hindrances) -> None:
        self._num_cores = num_cores
        self._read = read
        self._noted = (0.0, read())
        self._told_at_s: dict[SlowReason, float] = {}

    def __repr__(self) -> str:
        return f"<SlowSteps told {', '.join(reason.name for reason in self._told_at_s) or 'nothing'}>"

    def begin(self, now_s: float) -> None:
        """A step begins: note the counters, at most every NOTE_EVERY_S."""
        if now_s - self._noted[0] >= NOTE_EVERY_S:
            self._noted = now_s, self._read()

    def find(self, sample: StepSample, others_cores: float | None) -> SlowReason | None:
        """What kept a step that is MANY_TIMES over its prediction; None: it is not, or has none."""
        if sample.predicted_s is None or sample.wall_s < MANY_TIMES * sample.predicted_s:
            return None
        met = self._read().since(self._noted[1])
        return why_slow(sample, met, self._num_cores, others_cores)

    def tell(self, sample: StepSample, reason: SlowReason, others_cores: float | None) -> str | None:
        """The line to log; None if this reason was told less than AGAIN_AFTER_S ago."""
        if sample.at_s - self._told_at_s.get(reason, -math.inf) < AGAIN_AFTER_S:
            return None
        self._told_at_s[reason] = sample.at_s
        got = sample.cpu_s / sample.wall_s
        others = "" if others_cores is None else f", others use {others_cores:.1f}"
        return (
            f"a step took {sample.wall_s:.2f} s instead of {sample.predicted_s or 0.0:.3f} s: {reason} "
            f"({sample.num_threads} threads got {got:.1f} of {self._num_cores} cores{others})"
        )

    def explain(self, sample: StepSample, others_cores: float | None) -> str | None:
        """`find` and `tell` in one: a line to log, or None."""
        reason = self.find(sample, others_cores)
        return None if reason is None else self.tell(sample, reason, others_cores)


# ---------------------------------------------------------------- what the machine counts


def _num_faults() -> int:
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _slept_s() -> float:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _throttled_s(files: list[Path]) -> float:
    """Of the group that was held back most, this process's own or one above it."""
    return max((_read_throttled(file) for file in files), default=0.0)


def _read_throttled(file: Path) -> float:
    """Seconds in a `cpu.stat`, version 2 (`throttled_usec`) or 1 (`throttled_time`, ns); 0 if it has none."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0.0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    if "throttled_usec" in values:
        return int(values["throttled_usec"]) / 1e6
    return int(values.get("throttled_time", 0)) / 1e9


def _stat_files() -> list[Path]:
    return [file for file in _candidates() if file.is_file()]


def _candidates() -> Iterator[Path]:
    yield _CGROUPS / "cpu.stat"
    yield _CGROUPS / "cpu" / "cpu.stat"
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        mount = _CGROUPS / "cpu" if "cpu" in controllers.split(",") else _CGROUPS
        if not controllers or mount != _CGROUPS:
            yield mount / name.lstrip("/") / "cpu.stat"
