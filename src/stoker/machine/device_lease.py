"""The right of one process to use an accelerator (SPEC R6).

Owns the lock files. Which devices there are, and which a model needs, is the backends' to know.
"""

from __future__ import annotations

import fcntl
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.errors import DeviceBusyError, MachineSetupError
from stoker.private import make_folder


class DeviceLease:
    """Holds every named device, or none of them.

    Each device is an advisory lock on a file that stays open, so the system ends the lease of a process that
    dies. The files themselves stay: removing one would let two processes lock two files of one name.

    Args:
        names: of the devices; none for a CPU alone, and then nothing is locked.
        folder: where the lock files are; processes that share devices have to name the same one.

    Raises:
        DeviceBusyError: another process holds one of them; details carry `device` and, if known, `pid`.
        MachineSetupError: the folder cannot be written or locks do not work there.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = tuple(sorted(set(names)))
        self._folder = folder
        self._files: list[int] = []
        try:
            for name in self.names:
                self._lock(name)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<DeviceLease {', '.join(self.names) or 'of nothing'}{'' if self._files else ', not held'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_files", None):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def close(self) -> None:
        """Let others have the devices; nothing happens the second time."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _lock(self, name: str) -> None:
        path = self._folder / f"device-{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.lock"
        try:
            make_folder(self._folder)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise MachineSetupError(f"cannot open the lock file {path}: {error.strerror}") from None
        self._files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(name, file) from None
        except OSError as error:
            raise MachineSetupError(f"cannot lock {path}: {error.strerror}") from None
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)


def _busy(name: str, file: int) -> DeviceBusyError:
    """Who holds it, as the holder wrote into its file."""
    text = os.pread(file, 32, 0).decode(errors="replace").strip()
    if text.isdigit():
        return DeviceBusyError(f"process {text} holds the device {name}", device=name, pid=int(text))
    return DeviceBusyError(f"another process holds the device {name}", device=name)
