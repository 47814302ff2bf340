"""Alarms of the kernel about memory: the pressure-stall trigger, and counters of control groups (SPEC M3)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stoker.machine.cgroups import ControlGroup
from stoker.machine.pressure import CRITICAL_FROM, HYSTERESIS

TRIGGER = b"some 150000 2000000\0"
"""Processes waited for memory for 150 ms of any 2 s; a window of 2 s needs no privilege."""


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
