"""The folder of the disk tier: prefix files that outlive the server (SPEC C9).

Owns making, reading and removing files, and the bound on what they take together. Several servers may use one
folder: names are never used twice, a file is complete from the moment it has its name, and one that is being
written counts with its full size from the moment it exists. Every call waits for the disk, so it runs on a
worker thread. What is worth keeping is the prefix cache's decision.
"""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from stoker.cache.disk.prefix_file import DamagedError, NewPrefix, PrefixFile, PrefixReader, head_of
from stoker.errors import CacheFileError, MachineSetupError
from stoker.private import make_folder

FOLDER_NAME = "prefixes"
"""Below the cache folder of the settings."""
SUFFIX = ".prefix"
PART_SUFFIX = ".part"
ABANDONED_S = 60.0
"""Age from which an unfinished file that no process holds counts as one whose writer died."""
_PIECE_BYTES = 8 << 20
_NEW_FLAGS = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was made, and the names of those that were removed to make room for it."""

    file: PrefixFile
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a full check of one file found; `problem` is empty if it is sound."""

    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class _Found:
    """A regular file of ours in the folder, by what the system says of it."""

    name: str
    size_bytes: int
    changed_s: float

    @property
    def is_part(self) -> bool:
        return self.name.endswith(PART_SUFFIX)


class PrefixFolder:
    """The prefix files in `folder`, together at most `limit_bytes`.

    Raises, from every method:
        CacheFileError: this one file is damaged, gone or too large.
        MachineSetupError: the folder cannot be used, or the disk is full.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"<PrefixFolder {self.folder}, at most {self.limit_bytes} bytes>"

    def open(self, stale: Callable[[PrefixFile], bool] | None = None) -> list[PrefixFile]:
        """Make the folder ready and say what is in it, the longest unused first.

        Removes what is damaged, foreign or `stale`, what writers that died left, and the longest unused of
        what is over the limit.
        """
        with self._usable("used"):
            make_folder(self.folder)
            if self.folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                self.folder.chmod(0o700)
            self._remove_abandoned(self._now())
            for name, file in self._scan():
                if file is None or (stale is not None and stale(file)):
                    self._unlink(name)
            self._trim()
        return self.files()

    def files(self) -> list[PrefixFile]:
        """What is in the folder and has a sound head, the longest unused first; removes nothing."""
        with self._usable("read"):
            found = [file for _, file in self._scan() if file is not None]
        return sorted(found, key=attrgetter("used_s", "name"))

    def total_bytes(self) -> int:
        """Bytes of all prefix files, sound or not."""
        with self._usable("read"):
            return sum(found.size_bytes for found in self._entries() if not found.is_part)

    def write(self, new: NewPrefix, payload: bytes | bytearray | memoryview) -> Written:
        """Make a file, complete or not at all; the longest unused of the others go if there is no room."""
        data = memoryview(payload).cast("B")
        head = head_of(new, data)
        size = len(head) + data.nbytes
        if size > self.limit_bytes:
            raise CacheFileError(
                f"a prefix of {size} bytes does not fit the disk tier of {self.limit_bytes}",
                size_bytes=size,
                limit_bytes=self.limit_bytes,
            )
        stem = uuid.uuid4().hex
        part, path = self.folder / f"{stem}{PART_SUFFIX}", self.folder / f"{stem}{SUFFIX}"
        with self._usable("written"):
            try:
                removed, used_s = self._fill(part, size, (memoryview(head), data))
                part.rename(path)
                self._sync()
                removed += self._trim(path.name)  # a name that changed while it was looked for was not seen
            except BaseException:
                self._unlink(part.name)
                self._unlink(path.name)
                raise
        made = PrefixFile(
            **asdict(new), name=path.name, size_bytes=size, payload_bytes=data.nbytes, used_s=used_s
        )
        return Written(made, removed)

    def read(self, name: str, expect_namespace: bytes, expect_tokens: bytes) -> bytearray:
        """The state in a file that holds just this; notes its use. A damaged file is removed."""
        path = self._path(name)
        try:
            return self._payload(path, expect_namespace, expect_tokens)
        except DamagedError as error:
            self._unlink(name)
            raise CacheFileError(f"{path}: {error}; removed", path=str(path)) from error
        except FileNotFoundError as error:
            text = f"{path}: somebody else removed it"
            raise CacheFileError(text, path=str(path), is_gone=True) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise CacheFileError(f"{path}: cannot be read: {reason}", path=str(path)) from error

    def remove(self, name: str) -> None:
        """Remove a file; it is no error if it is gone."""
        path = self._path(name)
        with self._usable("written"):
            path.unlink(missing_ok=True)

    def remove_stale(self, source: str, model: str) -> list[str]:
        """Remove what belongs to the model file at `source` as it was before; returns the names."""
        names = [file.name for file in self.files() if file.source == source and file.model != model]
        for name in names:
            self.remove(name)
        return names

    def clear(self) -> list[str]:
        """Remove every prefix file, and what writers that died left; returns the names."""
        with self._usable("written"):
            names = [found.name for found in self._entries() if not found.is_part]
            for name in names:
                (self.folder / name).unlink(missing_ok=True)
            if self.folder.exists():
                self._remove_abandoned(self._now())
        return names

    def verify(self) -> Iterator[FileCheck]:
        """Read every file through; removes nothing. Files that go meanwhile are left out."""
        with self._usable("read"):
            entries = self._entries()
        for found in entries:
            if found.is_part:
                continue
            try:
                with PrefixReader(self._path(found.name)) as reader:
                    reader.verify()
            except FileNotFoundError:
                continue
            except (DamagedError, CacheFileError) as error:
                yield FileCheck(found.name, str(error))
            except OSError as error:
                yield FileCheck(found.name, f"it cannot be read: {error.strerror or error}")
            else:
                yield FileCheck(found.name, "")

    # ------------------------------------------------------------ machinery

    @contextmanager
    def _usable(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineSetupError(
                f"the prefix cache in {self.folder} cannot be {verb}: {error.strerror or error}",
                path=str(self.folder),
            ) from error

    def _path(self, name: str) -> Path:
        if not name.endswith(SUFFIX) or "/" in name or "\0" in name:
            raise CacheFileError(f"{name!r} is no name of a prefix file", name=name)
        return self.folder / name

    def _payload(self, path: Path, namespace: bytes, tokens: bytes) -> bytearray:
        with PrefixReader(path) as reader:
            file = reader.file
            if file.size_bytes > self.limit_bytes:
                raise DamagedError(f"it has {file.size_bytes} bytes, all may take {self.limit_bytes}")
            if (file.namespace, file.tokens) != (namespace, tokens):
                raise DamagedError("it holds another prefix")
            data = reader.payload()
            reader.touch()
            return data

    def _entries(self) -> list[_Found]:
        """Our files in the folder; a folder that is not there has none."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if not entry.name.endswith((SUFFIX, PART_SUFFIX)):
                    continue
                with suppress(FileNotFoundError):  # another server removed it
                    told = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(told.st_mode):
                        found.append(_Found(entry.name, told.st_size, told.st_mtime))
        return found

    def _scan(self) -> Iterator[tuple[str, PrefixFile | None]]:
        """Each prefix file by name, None for one that is not to be believed."""
        for found in self._entries():
            if found.is_part:
                continue
            try:
                with PrefixReader(self.folder / found.name) as reader:
                    yield found.name, reader.file
            except DamagedError:
                yield found.name, None
            except OSError:  # gone, or not ours to read: neither used nor removed
                continue

    def _fill(self, part: Path, size: int, pieces: Iterable[memoryview]) -> tuple[tuple[str, ...], float]:
        """Make the unfinished file; returns the names removed for it and when it was written."""
        fd = os.open(part, os.O_WRONLY | _NEW_FLAGS, 0o600)
        try:
            with suppress(OSError):  # not every file system has locks; then age alone tells who died
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, size)  # from here on it counts for every server that makes room
            self._remove_abandoned(os.fstat(fd).st_mtime)
            removed = self._make_room()
            for piece in pieces:
                start = 0
                while start < piece.nbytes:
                    start += os.write(fd, piece[start : start + _PIECE_BYTES])
            os.fsync(fd)
            return removed, os.fstat(fd).st_mtime
        finally:
            os.close(fd)

    def _make_room(self) -> tuple[str, ...]:
        """As `_trim`, unless unfinished files alone take more than there is."""
        parts_bytes = sum(found.size_bytes for found in self._entries() if found.is_part)
        if parts_bytes > self.limit_bytes:
            raise CacheFileError(
                f"files being written take {parts_bytes} bytes of the {self.limit_bytes} of the disk tier",
                size_bytes=parts_bytes,
                limit_bytes=self.limit_bytes,
            )
        return self._trim()

    def _trim(self, keep: str = "") -> tuple[str, ...]:
        """Remove the longest unused until all fits, unfinished files with it; returns their names."""
        entries = sorted(self._entries(), key=attrgetter("changed_s", "name"))
        excess = sum(found.size_bytes for found in entries) - self.limit_bytes
        removed = []
        for found in entries:
            if excess > 0 and not found.is_part and found.name != keep:
                (self.folder / found.name).unlink(missing_ok=True)
                excess -= found.size_bytes
                removed.append(found.name)
        return tuple(removed)

    def _remove_abandoned(self, now: float) -> None:
        for found in self._entries():
            if found.is_part and now - found.changed_s > ABANDONED_S and not self._is_held(found.name):
                self._unlink(found.name)

    def _is_held(self, name: str) -> bool:
        """Whether a living writer has it."""
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        else:
            return False
        finally:
            os.close(fd)

    def _now(self) -> float:
        """The file system's clock, by a file made for it: that the folder can be written shows as well."""
        probe = self.folder / f"{uuid.uuid4().hex}{PART_SUFFIX}"
        fd = os.open(probe, os.O_WRONLY | _NEW_FLAGS, 0o600)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            self._unlink(probe.name)

    def _sync(self) -> None:
        """Have the names in the folder survive a loss of power."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # what cannot be removed is not used either
            (self.folder / name).unlink()
