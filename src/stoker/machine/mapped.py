"""Files that are mapped: what of them is in memory here, giving that back, and how quickly they are read.

Only pages in the tables of this process are counted and dropped. What the kernel keeps of a file besides is
its page cache: it takes that back by itself when the machine or a control group needs memory. Linux alone
tells; elsewhere nothing is found, and everything is left to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8  # of a page in /proc/self/pagemap
_ABSENT = bytes(range(0x80))  # of an entry's last byte: its highest bit says that the page is there
_CHUNK_PAGES = 2**18
_MADV_DONTNEED = 4
BLOCK_BYTES = 2**20
"""About what one expert's weights of one matrix take."""
MAX_BLOCKS = 64
BUDGET_S = 0.5
"""No further block is begun after it."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The first byte after them."""
        return self.start + self.size_bytes

    def parts(self, size_bytes: int) -> Iterator[FileRange]:
        """The same in parts of that size, the last one of what is left."""
        for start in range(self.start, self.end, size_bytes):
            yield FileRange(self.path, start, min(size_bytes, self.end - start))


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Where bytes of a file lie in this process."""

    address: int
    offset: int
    size_bytes: int


class MappedRange:
    """A range of a file as it is mapped here, rounded to the whole pages within it.

    Args:
        file: the range.
        address: of its first byte.
    """

    def __init__(self, file: FileRange, address: int) -> None:
        self.file = file
        begin = -(-address // PAGE) * PAGE
        self._address = begin
        self._start = file.start + begin - address
        self._num_pages = max(0, (address + file.size_bytes - begin) // PAGE)

    def __repr__(self) -> str:
        return f"<MappedRange {self.file.path.name} {self.file.start}+{self.file.size_bytes}>"

    def resident_bytes(self) -> int:
        """What of it is in memory here; from any thread."""
        with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
            return PAGE * sum(self._num_present(table.fileno()))

    def _num_present(self, table: int) -> Iterator[int]:
        first = self._address // PAGE
        for at in range(0, self._num_pages, _CHUNK_PAGES):
            count = min(_CHUNK_PAGES, self._num_pages - at)
            entries = os.pread(table, count * _ENTRY_BYTES, (first + at) * _ENTRY_BYTES)
            yield len(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _ABSENT))

    def drop(self) -> None:
        """Take it out of this process, and ask the kernel to drop it; it is read again when needed."""
        if not self._num_pages:
            return
        size = self._num_pages * PAGE
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _MADV_DONTNEED)
        with suppress(OSError):
            file = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, self._start, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


_libc = ctypes.CDLL(None, use_errno=True)


def find_mapped(ranges: Sequence[FileRange], root: Path = Path("/")) -> tuple[MappedRange, ...]:
    """Where these ranges are mapped in this process; those that are not are left out.

    Args:
        ranges: of files.
        root: where `/proc` is found.
    """
    maps = {path: _mappings(path, root) for path in {each.path for each in ranges}}
    found = []
    for each in ranges:
        for place in maps[each.path]:
            if place.offset <= each.start and each.end <= place.offset + place.size_bytes:
                found.append(MappedRange(each, place.address + each.start - place.offset))
                break
    return tuple(found)


def _mappings(path: Path, root: Path) -> list[_Mapping]:
    """Those of one file, told by its device and inode: names may have changed."""
    try:
        stat = path.stat()
        lines = (root / "proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
    found = []
    for line in lines:
        span, _, offset, its_device, inode, *_ = line.split(maxsplit=5)
        if int(inode) == stat.st_ino and its_device == device:
            first, last = (int(each, 16) for each in span.split("-"))
            found.append(_Mapping(first, int(offset, 16), last - first))
    return found


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What this process has read from storage so far.

    Attributes:
        num_faults: page faults that had to wait for storage.
        size_bytes: read from storage, by whatever way; 0 where the system does not tell.
    """

    num_faults: int = 0
    size_bytes: int = 0

    @classmethod
    def now(cls) -> ReadCounts:
        """Of all threads."""
        import resource  # noqa: PLC0415 - not every system has it

        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        try:
            lines = Path("/proc/self/io").read_bytes().splitlines()
            size = next(int(line.split()[1]) for line in lines if line.startswith(b"read_bytes:"))
        except (OSError, StopIteration, ValueError):
            size = 0
        return cls(num_faults, size)

    def since(self, before: ReadCounts) -> ReadCounts:
        """What has been added since."""
        return ReadCounts(self.num_faults - before.num_faults, self.size_bytes - before.size_bytes)


def read_speed(path: str | Path) -> float:
    """Bytes a second of reads of 1 MiB, one after the other, evenly spaced in the file; 0: not known.

    They go past the page cache. Where the system or the file's place (such as a folder in memory) has no such
    reads, nothing is known, as what is cached would be measured.
    """
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | direct) if direct else -1
    except OSError:
        return 0.0
    if file < 0:
        return 0.0
    try:
        with closing(mmap.mmap(-1, BLOCK_BYTES)) as buffer:  # direct reads want whole pages
            return _measured(file, buffer)
    except OSError:
        return 0.0
    finally:
        os.close(file)


def _measured(file: int, buffer: mmap.mmap) -> float:
    blocks = os.fstat(file).st_size // BLOCK_BYTES
    num_read, begun_s = 0, time.monotonic()
    for number in range(min(blocks, MAX_BLOCKS)):
        at = number * blocks // MAX_BLOCKS if blocks > MAX_BLOCKS else number
        num_read += os.preadv(file, [buffer], at * BLOCK_BYTES)
        if time.monotonic() - begun_s > BUDGET_S:
            break
    took_s = time.monotonic() - begun_s
    return num_read / took_s if num_read and took_s > 0 else 0.0
