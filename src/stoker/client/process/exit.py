"""Why an engine ended: by the work it was doing, or from outside.

Reads exit statuses and the kernel's out-of-memory counters. Requests are charged in `requests.replay`, models
in `models.registry`.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.registry import open_model
from stoker.errors import EngineCrashedError, ModelReadError, StokerError
from stoker.ipc.commands import LostDevices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.client.process.transport import ExitReport

SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
OOM_KILL = "oom_kill"
_BUS_ERROR = getattr(signal, "SIGBUS", None)
"""What the kernel sends where it cannot give a page: its disk fails, or the file has been cut since."""
MAX_UNCHARGED = 4
"""Losses of one device past which the work is charged: leaving it out has not helped."""
_DEVICE_ERROR = re.compile(r"\b([A-Za-z]+) error: ([^|]*)\|[^|]*current device: (\w+)")


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How one engine instance ended.

    Attributes:
        reason: one phrase for logs and errors.
        is_blamable: the work it was doing may have caused it.
        was_killed: by the watchdog, or by the kernel for want of memory.
        said: its last lines, for errors that quote native code; may be empty.
        besides: work that may have caused it, other than requests: loads and questions.
        lost_device: id of the device whose end it was; empty: of none.
        is_unread: a page of a mapped file could not be read.
        first: the reason of the first exit for which the same files could not be read.
    """

    reason: str
    is_blamable: bool
    was_killed: bool = False
    said: str = ""
    besides: tuple[str, ...] = ()
    lost_device: str = ""
    is_unread: bool = False
    first: str = ""

    def beside(self, *work: str) -> EngineExit:
        """The same, with further work that may have caused it."""
        return replace(self, besides=self.besides + work)

    def error(self, text: str, crashes: int) -> StokerError:
        """What work ends with that this exit has convicted; `text` says which work and how often."""
        if self.is_unread:
            return ModelReadError(f"{text}: {self.reason}", crashes=crashes, first=self.first)
        return EngineCrashedError(f"{text}: {self.reason}", crashes=crashes)

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
    if end.status < 0 and (device := lost_device(end.said)):
        return EngineExit(
            f"lost the device {device} ({end})", is_blamable=False, said=end.said, lost_device=device
        )
    if -end.status == _BUS_ERROR:
        reason = f"ended with {end}: a page of a mapped file could not be read"
        return EngineExit(reason, is_blamable=True, said=end.said, is_unread=True)
    is_blamable = end.status > 0 or (end.status < 0 and -end.status not in SENT_FROM_OUTSIDE)
    return EngineExit(f"ended with {end}", is_blamable=is_blamable, said=end.said)


def lost_device(said: str) -> str:
    """Id of the device that native code could not go on with, by its last words; empty: it was none.

    A device without memory is there, and the work may be at fault.
    """
    found = _DEVICE_ERROR.search(said)
    if found is None or "out of memory" in found[2].lower():
        return ""
    return f"{found[1]}{found[3]}" if found[3].isdecimal() else found[3]


class UnreadFiles:
    """What is known of files of which engines could not read a page (SIGBUS)."""

    def __init__(self) -> None:
        self._first = ""

    def __repr__(self) -> str:
        return f"<UnreadFiles {self._first!r}>"

    def explain(self, end: EngineExit, mapped: Mapping[str, str]) -> EngineExit:
        """The exit with the files that it may have been; one that is not whole any more is named alone.

        Args:
            end: any exit; one for another reason stays as it is.
            mapped: paths of the mapped files by model.
        """
        if not end.is_unread:
            return end
        broken = [text for path in mapped.values() if (text := _what_is_wrong(path))]
        whole = [f"{path} of {model}" for model, path in mapped.items()]
        if whole and not broken:
            broken = [f"{', '.join(whole)} is as long as it should be: see the system's log of its disk"]
        reason = f"{end.reason}; {'; '.join(broken) or 'no model is mapped'}"
        self._first = self._first or reason
        return replace(end, reason=reason, first=self._first)


def _what_is_wrong(path: str) -> str:
    """With a model's file; empty: its header can be read, and it is as long as that says."""
    try:
        open_model(path).describe()
    except StokerError as error:
        return error.message
    return ""


class DeviceLosses:
    """The devices that have ended engines since they were last forgiven.

    The driver says whether a lost device is still there, so it is used again; one that is lost twice is left
    out. Neither a request nor a load is charged, unless losses go on all the same.
    """

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<DeviceLosses {dict(self._times)}>"

    def note(self, end: EngineExit) -> EngineExit:
        """Count an exit; returns it as it is to be charged."""
        if not end.lost_device:
            return end
        self._times[end.lost_device] += 1
        is_too_often = self._times[end.lost_device] > MAX_UNCHARGED
        return replace(end, is_blamable=True) if is_too_often else end

    def tell(self, send: Callable[[LostDevices], object]) -> None:
        """Have an engine know them, if there are any."""
        if self._times:
            send(LostDevices(dict(self._times)))

    def forgive(self) -> None:
        """The machine has slept: a device may be back."""
        self._times.clear()
