"""Why an engine ended: by the work it was doing, or from outside.

Reads exit statuses and the kernel's out-of-memory counters. Requests are charged in `requests.replay`, models
in `models.registry`.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.client.process.transport import ExitReport

SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
OOM_KILL = "oom_kill"


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How one engine instance ended.

    Attributes:
        reason: one phrase for logs and errors.
        is_blamable: the work it was doing may have caused it.
        was_killed: by the watchdog, or by the kernel for want of memory.
        said: its last lines, for errors that quote native code; may be empty.
        besides: work that may have caused it, other than requests: loads and questions.
    """

    reason: str
    is_blamable: bool
    was_killed: bool = False
    said: str = ""
    besides: tuple[str, ...] = ()

    def beside(self, *work: str) -> EngineExit:
        """The same, with further work that may have caused it."""
        return replace(self, besides=self.besides + work)

    @property
    def quoted(self) -> str:
        """The reason, with the engine's last lines."""
        return f"{self.reason}: {self.said}" if self.said else self.reason


class OomCounter:
    """Kills by the kernel for want of memory, on this machine and in this cgroup.

    Args:
        proc: where procfs is mounted; systems without one count nothing.
        cgroups: where cgroup v2 is mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._files = [proc / "vmstat"]
        with contextlib.suppress(OSError):
            for line in (proc / "self/cgroup").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("0::"):
                    self._files.append(cgroups / line[3:].lstrip("/") / "memory.events")
        self._seen: list[int | None] = [None] * len(self._files)
        self._seen = self._read()

    def __repr__(self) -> str:
        return f"<OomCounter seen={self._seen}>"

    def has_risen(self) -> bool:
        """Whether there was such a kill since the last call."""
        before, self._seen = self._seen, self._read()
        pairs = zip(before, self._seen, strict=True)
        return any(then is not None and now is not None and now > then for then, now in pairs)

    def _read(self) -> list[int | None]:
        return [_count(file, seen) for file, seen in zip(self._files, self._seen, strict=True)]


def _count(file: Path, seen: int | None) -> int | None:
    """The counter in `file`; one that cannot be read now, say for want of a descriptor, stays as `seen`."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == OOM_KILL:
                return int(value)
    return seen


def judge(end: ExitReport, hang: str | None, oom: OomCounter) -> EngineExit:
    """The reading of an exit that was not asked for.

    Args:
        end: the exit.
        hang: why the watchdog killed the engine, if it did.
        oom: read in any case, so that its count is up to date for the next exit.
    """
    is_oom = oom.has_risen()
    if hang is not None:
        return EngineExit(f"killed: {hang}", is_blamable=True, was_killed=True, said=end.said)
    if end.status == -signal.SIGKILL and is_oom:
        return EngineExit("killed by the kernel for want of memory", is_blamable=True, was_killed=True)
    is_blamable = end.status > 0 or (end.status < 0 and -end.status not in SENT_FROM_OUTSIDE)
    return EngineExit(f"ended with {end}", is_blamable=is_blamable, said=end.said)
