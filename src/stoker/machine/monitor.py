"""Measuring memory and heat, once and then each second (SPEC M3, M6).

Owns the sample, the thread that takes it, and the kernel's alarms: stalls, and cuts of control groups.
The loop that gets a sample decides by `pressure` and `ladder`.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from stoker.machine.cgroups import ControlGroup, limited_groups
from stoker.machine.ladder import LONGEST_DESCENT_S
from stoker.machine.limits import Tier, effective_limit, limits_of, tier_of
from stoker.machine.nvml import CardProcess
from stoker.machine.pressure import CRITICAL_FROM, HYSTERESIS, Pressure, PressureMeter, is_ours_to_ease
from stoker.machine.thermal import LEAVE_AFTER_S, Heat, HeatMeter, HeatReading, HeatSource, hottest

EVERY_S = 1.0
LINGER_S = LONGEST_DESCENT_S + LEAVE_AFTER_S
TRIGGER = b"some 150000 2000000\0"
"""Processes waited for memory for 150 ms of any 2 s; a window of 2 s needs no privilege."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """The own memory of one accelerator at one moment, in bytes.

    Attributes:
        id: as its backend calls it, such as "CUDA0".
        free_bytes, total_bytes: whoever uses it.
        own_bytes: what models of this engine hold of it; None: one is half loaded or half freed, and what it
            has taken is not told from what others have.
        margin_bytes: how much of it a load has to leave.
        left_bytes: how much was free once the last model was loaded: a library takes more than its buffers.
        heat: of its processor, as far as its driver tells.
        power_w: what it takes; None: not known.
        processes: others that compute on it, as far as its driver tells.
    """

    id: str
    free_bytes: int
    total_bytes: int
    own_bytes: int | None = 0
    margin_bytes: int = 0
    left_bytes: int | None = None
    heat: HeatReading = field(default_factory=HeatReading)
    power_w: float | None = None
    processes: tuple[CardProcess, ...] = ()

    @property
    def other_bytes(self) -> int | None:
        """What others hold of it: other programs, and the driver; None: not known now."""
        if self.own_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory and heat at one moment, in bytes.

    Attributes:
        at_s: when, on the monotonic clock.
        footprint_bytes: RSS of the watched processes, less pages of files that may go at any time.
        limit_bytes: the effective limit (SPEC M1), the tier's included.
        available_bytes: usable now without swapping, inside every limit.
        total_bytes: RAM of the machine.
        system_available_bytes: available on the machine, whatever limits this process has.
        cgroup_used_bytes, cgroup_limit_bytes: of the fullest control group; None: no group has a limit.
        psi_some_avg10: percent of the last 10 s in which processes waited for memory; None: not known.
        devices: of each accelerator that has memory of its own; what others have counts once, above.
        tier: by machine, groups and user's limit, without the tier's own.
        streams: models read experts from disk as they need them, which counts as a stall of memory (PSI).
        heat: the worst of sensors and accelerators; of a `MemoryMonitor` with hysteresis.
        is_os_event: the kernel raised an alarm since the last sample.
    """

    at_s: float
    footprint_bytes: int
    limit_bytes: int
    available_bytes: int
    total_bytes: int
    system_available_bytes: int
    cgroup_used_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    psi_some_avg10: float | None = None
    devices: tuple[DeviceSample, ...] = ()
    tier: Tier = Tier.HIGH
    heat: HeatReading = field(default_factory=HeatReading)
    is_os_event: bool = False
    streams: bool = False


DeviceReader = Callable[[], tuple[DeviceSample, ...]]
"""Reads the accelerators' memory; called by the monitor's thread."""


def no_devices() -> tuple[DeviceSample, ...]:
    """A machine without accelerators."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is measured.

    Attributes:
        memory_limit: the user's own limit in bytes; None: not set.
        pids: processes whose memory counts; the children of the last one count too.
        heat: reads heat.
        devices: reads the accelerators' memory.
        mapped_bytes: reads how much of the processes' memory are pages of mapped files that are read again
            when they are needed; the kernel takes them back where memory is short.
        is_mapping: whether such a file is being mapped, so that all pages of files count as these.
        root: where `/proc` and `/sys` are found.
    """

    memory_limit: int | None = None
    pids: tuple[int, ...] = field(default_factory=lambda: (os.getpid(),))
    heat: HeatSource = HeatReading
    devices: DeviceReader = no_devices
    mapped_bytes: Callable[[], int] = int
    is_mapping: Callable[[], bool] = bool
    root: Path = Path("/")


def measure(sources: Sources) -> Sample:
    """Take one sample now, without hysteresis of heat and without OS events.

    Raises:
        OSError, psutil.Error: the machine does not report its memory.
    """
    mapped_bytes = _mapped_bytes(sources)
    return _sample(sources, _limited_groups(sources, mapped_bytes), mapped_bytes)


def _mapped_bytes(sources: Sources) -> int:
    """Pages of mapped files that may go at any time."""
    return file_bytes_of(sources.pids) if sources.is_mapping() else sources.mapped_bytes()


def _limited_groups(sources: Sources, mapped_bytes: int) -> list[ControlGroup]:
    """Control groups with limits, their use without such pages."""
    return [group.without(mapped_bytes) for group in limited_groups(sources.root)]


def _sample(sources: Sources, groups: Sequence[ControlGroup], mapped_bytes: int) -> Sample:
    system = psutil.virtual_memory()
    footprint = max(0, footprint_of(sources.pids) - mapped_bytes)
    limits = replace(limits_of(system.total, system.available, groups), user_bytes=sources.memory_limit)
    limit = effective_limit(limits)
    fullest = max(groups, key=lambda group: group.fraction, default=None)
    devices = sources.devices()
    return Sample(
        at_s=time.monotonic(),
        footprint_bytes=footprint,
        limit_bytes=limit,
        available_bytes=min(limits.available_bytes, max(0, limit - footprint)),
        total_bytes=system.total,
        system_available_bytes=system.available,
        cgroup_used_bytes=fullest.used_bytes if fullest else None,
        cgroup_limit_bytes=fullest.limit_bytes if fullest else None,
        psi_some_avg10=_read_psi(sources.root),
        devices=devices,
        tier=tier_of(limits.effective_bytes),
        heat=hottest([sources.heat(), *(device.heat for device in devices)]),
        streams=mapped_bytes > 0,
    )


def footprint_of(pids: Sequence[int]) -> int:
    """Resident bytes of these processes and the children of the last one; 0 for one that has ended."""
    return sum(map(_resident_bytes, {*pids, *(_children(pids[-1]) if pids else ())}))


def file_bytes_of(pids: Sequence[int]) -> int:
    """Resident pages of files, of the same processes; 0 where the system does not tell."""
    return sum(map(_file_bytes, {*pids, *(_children(pids[-1]) if pids else ())}))


def _file_bytes(pid: int) -> int:
    try:
        return int(getattr(psutil.Process(pid).memory_info(), "shared", 0))
    except psutil.Error:
        return 0


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _children(pid: int) -> list[int]:
    """Direct and indirect children, from the kernel's lists where it has them: quicker than every process."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    try:
        if not lists:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        found = [int(child) for path in lists for child in path.read_text(encoding="ascii").split()]
    except (OSError, psutil.Error):
        return []  # it has ended
    return found + [grandchild for child in found for grandchild in _children(child)]


def _read_psi(root: Path) -> float | None:
    """The `some avg10` of the machine's memory pressure stalls, 0 to 100."""
    try:
        lines = (root / "proc/pressure/memory").read_text(encoding="ascii").splitlines()
        fields = dict(
            pair.split("=") for line in lines if line.startswith("some ") for pair in line.split()[1:]
        )
        return float(fields["avg10"])
    except (OSError, ValueError, KeyError):
        return None


class StallTrigger:
    """A trigger on the machine's memory pressure stalls (PSI); poll its `fd` for `select.POLLPRI`.

    Args:
        root: where `/proc` is found.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.fd: int | None = None
        try:
            fd = os.open(root / "proc/pressure/memory", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # no PSI here, or not for us
        try:
            os.write(fd, TRIGGER)
        except OSError:
            os.close(fd)
        else:
            self.fd = fd

    def __repr__(self) -> str:
        return f"<StallTrigger {'off' if self.fd is None else 'on'}>"

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


class CutWatch:
    """Whether a control group came up against its limit since the last reading.

    The kernel also counts a cut that only dropped file cache. So a cut counts only where the working set is
    near the limit; a killed process always counts.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, ControlGroup] = {}

    def __repr__(self) -> str:
        return f"<CutWatch over {len(self._seen)} groups>"

    def has_risen(self, groups: Sequence[ControlGroup]) -> bool:
        """Compare the groups with the last reading; a group without one counts from now on."""
        before, self._seen = self._seen, {group.folder: group for group in groups}
        return any(_is_alarming(before[group.folder], group) for group in groups if group.folder in before)


def _is_alarming(before: ControlGroup, now: ControlGroup) -> bool:
    is_cut = now.num_cuts > before.num_cuts and now.fraction >= CRITICAL_FROM - HYSTERESIS
    return is_cut or now.num_kills > before.num_kills


class MemoryMonitor:
    """Samples in a thread of its own and posts the samples that could change a decision.

    These are the first, those that `poke` asks for, OS events at once, and all while pressure or heat is
    above its lowest level and for `LINGER_S` after, until the ladder is undone. Otherwise an idle engine
    sleeps.

    Args:
        post: takes a sample; called by the monitor's thread, must not block.
        sources: what is measured.
        every_s: seconds between two samples.
    """

    def __init__(self, post: Callable[[Sample], None], sources: Sources, every_s: float = EVERY_S) -> None:
        self._post = post
        self._sources = sources
        self._every_s = every_s
        self._trigger = StallTrigger(sources.root)
        self._cuts = CutWatch()
        self._pressure = PressureMeter()
        self._heat = HeatMeter()
        self._is_first = True
        self._raised_s = -math.inf
        self._has_failed = False
        self._is_poked = threading.Event()
        self._is_closing = threading.Event()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._wake_reader, self._wake_writer = os.fdopen(reader, "rb", 0), os.fdopen(writer, "wb", 0)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "stopped"
        return f"<MemoryMonitor {state}, {self._trigger!r}>"

    def start(self) -> None:
        """Begin; the first sample is posted as soon as it is taken."""
        self._thread.start()

    def poke(self) -> None:
        """Sample now and post it."""
        self._is_poked.set()
        self._wake()

    def close(self) -> None:
        """Stop and join the thread; no sample is posted afterwards. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self._trigger.close()
        self._wake_writer.close()
        self._wake_reader.close()

    def _wake(self) -> None:
        """A full pipe wakes as well."""
        if not self._wake_writer.closed:
            self._wake_writer.write(b"\0")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        if self._trigger.fd is not None:
            poll.register(self._trigger.fd, select.POLLPRI)
        is_stalled = False
        while not self._is_closing.is_set():
            next_s = time.monotonic() + self._every_s
            self._take(is_stalled=is_stalled)
            is_stalled = self._wait(poll, next_s)

    def _wait(self, poll: select.poll, until_s: float) -> bool:
        """Sleep until the next sample is due; True: the kernel's trigger ended the sleep."""
        ready = dict(poll.poll(max(0.0, until_s - time.monotonic()) * 1000))
        if self._wake_reader.fileno() in ready:
            self._wake_reader.read(4096)
        stalls = ready.get(self._trigger.fd, 0) if self._trigger.fd is not None else 0
        if stalls & (select.POLLERR | select.POLLNVAL) and self._trigger.fd is not None:
            poll.unregister(self._trigger.fd)
            self._trigger.close()
            return False
        return bool(stalls)

    def _take(self, *, is_stalled: bool) -> None:
        is_poked = self._is_poked.is_set()
        self._is_poked.clear()
        try:
            mapped_bytes = _mapped_bytes(self._sources)
            groups = _limited_groups(self._sources, mapped_bytes)
            sample = _sample(self._sources, groups, mapped_bytes)
        except (OSError, ValueError, psutil.Error) as error:
            if not self._has_failed:
                _log.warning("memory cannot be measured: %s", error)
            self._has_failed = True
            return
        self._has_failed = False
        is_event = self._cuts.has_risen(groups) or (is_stalled and is_ours_to_ease(sample))
        heat = self._heat.update(sample.heat, sample.at_s)
        sample = replace(sample, heat=heat, is_os_event=is_event)
        may_matter = self._may_matter(sample)
        if (is_poked or may_matter) and not self._is_closing.is_set():
            self._post(sample)

    def _may_matter(self, sample: Sample) -> bool:
        """Whether it is the first sample, or pressure or heat are, or were lately, above the lowest."""
        is_first, self._is_first = self._is_first, False
        level = self._pressure.update(sample).level
        if level is not Pressure.NORMAL or sample.heat.level is not Heat.NOMINAL:
            self._raised_s = sample.at_s
        return is_first or sample.at_s - self._raised_s <= LINGER_S
