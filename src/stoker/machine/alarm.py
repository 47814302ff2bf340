"""What the kernel says of memory without being asked: the OS events of SPEC M3.

Owns the pressure-stall trigger and the watch over the counters of control groups. When they are looked at
and what they lead to is the gauge's business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stoker.machine.groups import Group
from stoker.machine.pressure import CRITICAL_FROM, HYSTERESIS

TRIGGER = b"some 150000 2000000\0"
"""Tell when somebody waited for memory for 150 ms of any 2 s: with windows of 2 s no privilege is needed."""


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
        """Give it back; nothing happens the second time."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


class CutWatch:
    """Whether a control group was up against its limit since the last look.

    The kernel counts a cut also where it only had to drop file cache, which costs nothing. So cuts count only
    where the working set comes near the limit; a killed process always does.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Group] = {}

    def __repr__(self) -> str:
        return f"<CutWatch over {len(self._seen)} groups>"

    def has_risen(self, groups: Sequence[Group]) -> bool:
        """Take the next reading of the groups; the first of each only begins the count."""
        before, self._seen = self._seen, {group.folder: group for group in groups}
        return any(_is_alarming(before[group.folder], group) for group in groups if group.folder in before)


def _is_alarming(before: Group, now: Group) -> bool:
    is_cut = now.num_cuts > before.num_cuts and now.fraction >= CRITICAL_FROM - HYSTERESIS
    return is_cut or now.num_kills > before.num_kills
