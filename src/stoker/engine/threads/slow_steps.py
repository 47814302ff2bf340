"""Why a step took many times its prediction (SPEC M7): each reason found is logged once a minute.

`why_slow` is pure. `HindranceCounters` reads what the machine counts, the caller logs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.machine.cores import SPARE_CORES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.engine.threads.governor import StepSample

MANY_TIMES = 8.0
"""A step that many times over its prediction is explained."""
MIN_SLOW_S = 0.05
"""A shorter step is never explained, whatever was predicted."""
AGAIN_AFTER_S = 60.0
"""How long a reason that was told is not told again."""
NOTE_EVERY_S = 1.0
"""How often counters are read at most, beside long steps."""
LONG_STEP_S = 0.5
"""A step as long as that is known at its end: most of the last reading fell into it."""
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


class HindranceCounters:
    """Reads the counters when called; what this system does not count stays 0."""

    def __init__(self) -> None:
        self._stat_files = [file for file in _candidates() if file.is_file()]

    def __call__(self) -> Hindrances:
        """The counters now."""
        return Hindrances(_num_faults(), _throttled_s(self._stat_files), _slept_s())


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


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step many times over its prediction, and why."""

    sample: StepSample
    reason: SlowReason
    others_cores: float | None

    def text(self, num_cores: int) -> str:
        """A line for the log."""
        sample, others = self.sample, self.others_cores
        got = sample.cpu_s / sample.wall_s
        used = "" if others is None else f", others use {others:.1f}"
        return (
            f"a step took {sample.wall_s:.2f} s instead of {sample.predicted_s or 0.0:.3f} s: {self.reason} "
            f"({sample.num_threads} threads got {got:.1f} of {num_cores} cores{used})"
        )


class SlowSteps:
    """Finds the reason of each slow step and tells each reason once a minute.

    What others use is known a quarter of a second at a time, so a shorter step is judged with what is known
    after the next reading.

    Args:
        num_cores: cores this process may use.
        read: reads the counters; another one in tests.
    """

    def __init__(self, num_cores: int, read: Callable[[], Hindrances] | None = None) -> None:
        self._num_cores = num_cores
        self._read = read or HindranceCounters()
        self._noted = (0.0, self._read())
        self._waiting: tuple[SlowStep, Hindrances] | None = None
        self._told_at_s: dict[SlowReason, float] = {}

    def __repr__(self) -> str:
        return f"<SlowSteps told {', '.join(reason.name for reason in self._told_at_s) or 'nothing'}>"

    def begin(self, now_s: float) -> None:
        """A step begins: note the counters, at most every NOTE_EVERY_S."""
        if now_s - self._noted[0] >= NOTE_EVERY_S:
            self._noted = now_s, self._read()

    def end(self, sample: StepSample, others_cores: float | None, read_at_s: float) -> SlowStep | None:
        """A step ended; returns a slow one, this or one before it, once it can be judged.

        Args:
            sample: the step.
            others_cores: cores that others used lately; None: not known.
            read_at_s: when that was read.
        """
        bound_s = None if sample.predicted_s is None else max(MIN_SLOW_S, MANY_TIMES * sample.predicted_s)
        is_slow = bound_s is not None and sample.wall_s >= bound_s
        if is_slow and self._waiting is None:
            met = self._read().since(self._noted[1])
            self._waiting = SlowStep(sample, SlowReason.UNKNOWN, others_cores), met
        if self._waiting is None:
            return None
        (found, met) = self._waiting
        is_judged = found.sample.wall_s >= LONG_STEP_S or read_at_s > found.sample.at_s
        if not is_judged and others_cores is not None:
            return None
        self._waiting = None
        others = max((used for used in (found.others_cores, others_cores) if used is not None), default=None)
        return SlowStep(found.sample, why_slow(found.sample, met, self._num_cores, others), others)

    def tell(self, slow: SlowStep) -> str | None:
        """The line to log; None if its reason was told less than AGAIN_AFTER_S ago."""
        now_s = slow.sample.at_s
        if now_s - self._told_at_s.get(slow.reason, -math.inf) < AGAIN_AFTER_S:
            return None
        self._told_at_s[slow.reason] = now_s
        return slow.text(self._num_cores)


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


def _candidates() -> Iterator[Path]:
    """Where the groups this process is in may tell how often they were held back."""
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
