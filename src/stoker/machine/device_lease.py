"""The right of one process to use an accelerator (SPEC R6).

Owns the lock files, and what stands in them: who holds a device, and for which models. Which devices there
are, and which a model needs, is the backends' to know.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import platformdirs
import psutil

from stoker.errors import DeviceBusyError, MachineSetupError
from stoker.private import make_folder

_log = logging.getLogger(__name__)
_REMEDY = "name another with --device, or share it with --no-device-lease"
_FOLDER_REMEDY = "set XDG_STATE_HOME to a folder that can be written, or share it with --no-device-lease"
_MAX_NOTE_BYTES = 64 * 2**10
_TICK_S = 1.0
"""Start times of processes and times of files may differ by so much in how they are counted."""


def lease_folder() -> Path:
    """Where the lock files of all programs of this user are, whatever folders each of them was given.

    It is this machine's own: several may share a home, and cards of two have the same names.
    """
    return platformdirs.user_state_path("stoker") / "devices" / platform.node()


class LeaseNote(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a device, as its lock file says.

    Attributes:
        pid: the process.
        device: what people call the device.
        models: ids of what it computes there, as far as it said.
    """

    pid: int
    device: str
    models: list[str] = []

    @property
    def holder(self) -> str:
        """For people: "process 4711 (model qwen)"."""
        names = ", ".join(self.models)
        plural = "s" if len(self.models) > 1 else ""
        return f"process {self.pid}{f' (model{plural} {names})' if names else ''}"


class DeviceLease:
    """Holds every named device, or none of them.

    Each device is an advisory lock on a file that stays open, so the system ends the lease of a process that
    dies. The files themselves stay: removing one would let two processes lock two files of one name.

    Args:
        names: of the devices; none for a CPU alone, and then nothing is locked.
        folder: where the lock files are; processes that share devices have to name the same one.

    Raises:
        DeviceBusyError: another process holds one of them; details carry `device` and, if known, `pid` and
            `models`.
        MachineSetupError: the folder cannot be written or locks do not work there.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = tuple(sorted(set(names)))
        self._folder = folder
        self._files: dict[str, int] = {}
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

    def note(self, name: str, device: str, models: Sequence[str]) -> None:
        """Write down what the device is called and which models it is held for, for those who ask who has it.

        A disk that is full costs them the answer, and not the lease.
        """
        text = msgspec.json.encode(LeaseNote(pid=os.getpid(), device=device, models=list(models)))
        try:
            os.pwrite(self._files[name], text, 0)
            os.truncate(self._files[name], len(text))
        except OSError as error:
            _log.warning("who holds %s cannot be written down: %s", device, error.strerror)

    def close(self) -> None:
        """Let others have the devices; nothing happens the second time."""
        files, self._files = self._files, {}
        for file in files.values():
            os.truncate(file, 0)  # this process may live on and hold it no more
            os.close(file)

    def _lock(self, name: str) -> None:
        path = _path(name, self._folder)
        try:
            make_folder(self._folder)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            message = f"cannot open the lock file {path}: {error.strerror}; {_FOLDER_REMEDY}"
            raise MachineSetupError(message) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(file, _MAX_NOTE_BYTES, 0)
            os.close(file)
            raise _busy(name, text) from None
        except OSError as error:
            os.close(file)
            raise MachineSetupError(f"cannot lock {path}: {error.strerror}") from None
        self._files[name] = file
        self.note(name, name, ())


def lease_note(name: str, folder: Path) -> LeaseNote | None:
    """Who holds a device, by its file in `folder`; None: nobody who is alive. Nothing is locked for it."""
    path = _path(name, folder)
    try:
        note, written_s = _read(path.read_bytes()), path.stat().st_mtime
        is_its = note is not None and psutil.Process(note.pid).create_time() <= written_s + _TICK_S
    except (OSError, psutil.Error):
        return None
    return note if is_its else None


def _path(name: str, folder: Path) -> Path:
    return folder / f"device-{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.lock"


def _read(text: bytes) -> LeaseNote | None:
    try:
        return msgspec.json.decode(text, type=LeaseNote)
    except msgspec.DecodeError:
        return None  # it is being written


def _busy(name: str, text: bytes) -> DeviceBusyError:
    """Who holds it, as the holder wrote into its file."""
    note = _read(text)
    if note is None:
        return DeviceBusyError(f"another process holds the device {name}; {_REMEDY}", device=name)
    message = f"{note.holder} holds the device {note.device}; {_REMEDY}"
    return DeviceBusyError(message, device=note.device, pid=note.pid, models=note.models)
