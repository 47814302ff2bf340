"""Which stored prefixes go to disk, and when (SPEC C7, C9).

An entry is written after a moment in memory: the next turn of a conversation replaces the one before it,
which is then never written. One write runs at a time. Operations leave as values; `threads` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.cache.entry import Entry, EntryState, Line, Snapshot
from stoker.machine.ledger import Ledger

SETTLE_S = 1.0
"""Seconds an entry is in host memory before it is written, while nothing is computed."""
BUSY_SETTLE_S = 10.0
"""The same while something is computed, which a write would slow down."""
RETRY_S = 30.0
"""Seconds after which an entry that was worth less than every file is considered again."""
HOLDER = "disk"


@dataclass(frozen=True, slots=True)
class Write:
    """Write the bytes of `entry`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Read:
    """Read the bytes of `entry`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file."""

    file: str


DiskOp = Write | Read | Remove


@dataclass(frozen=True, slots=True)
class DiskFound:
    """What the folder held; a `problem`: it cannot be used."""

    entries: list[Entry]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DiskLost:
    """These files are gone."""

    files: list[str]


@dataclass(frozen=True, slots=True)
class DiskWritten:
    """A write has ended, with a file or without; with a `problem` no further one can succeed.

    Attributes:
        removed: files that were removed to make room for it.
    """

    entry: Entry
    file: str | None = None
    file_bytes: int = 0
    problem: str = ""
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskRead:
    """A read has ended; without data: for which reason.

    Attributes:
        is_gone: the file is not there; where room was made for others meanwhile, nothing is wrong with that.
    """

    entry: Entry
    data: Snapshot | None
    reason: str = ""
    is_gone: bool = False


DiskOutcome = DiskFound | DiskLost | DiskWritten | DiskRead


class DiskTier:
    """What is saved, what is due, and operations that were not taken yet.

    Attributes:
        limit_bytes: what all files may take.
        problem: why nothing is written although it is wanted; empty: none.
    """

    def __init__(self, limit_bytes: int, ledger: Ledger) -> None:
        self.limit_bytes = limit_bytes
        self.problem = ""
        self._ledger = ledger
        self._ops: list[DiskOp] = []
        self._due_s: dict[Entry, float] = {}
        self._writing: Entry | None = None
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<DiskTier {self.used_bytes} of {self.limit_bytes} bytes, {len(self._due_s)} to write>"

    # ------------------------------------------------------------ questions

    @property
    def used_bytes(self) -> int:
        """What the known files take."""
        return self._ledger.used(Line.DISK)

    @property
    def is_on(self) -> bool:
        """Whether entries are written."""
        return self.limit_bytes > 0 and not self.problem

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and nothing is due later."""
        return self._writing is None and not self._due_s

    def wants(self, entry: Entry) -> bool:
        """Whether an entry is to be saved and is not yet."""
        return entry in self._due_s or entry is self._writing

    def is_writing(self, entry: Entry) -> bool:
        """Whether it is being written."""
        return entry is self._writing

    def next_due_s(self, rest_s: float = 0.0) -> float | None:
        """When the next entry is due, not before `rest_s`; None: none is, or one is being written."""
        if self._writing is not None:
            return None
        return min((max(at, rest_s) for entry, at in self._due_s.items() if not entry.leases), default=None)

    # ------------------------------------------------------------ entries

    def note(self, entry: Entry, now: float) -> None:
        """An entry is in host memory: it becomes due, if it is not saved and can be."""
        is_wanted = entry.file is None and not entry.is_private and entry.line is Line.CACHE
        if self.is_on and not self._is_ending and is_wanted and entry.size_bytes <= self.limit_bytes:
            self._due_s[entry] = now + SETTLE_S

    def forget(self, entry: Entry) -> None:
        """An entry left host memory: it is not written."""
        self._due_s.pop(entry, None)

    def next_to_write(self, now: float, *, is_busy: bool) -> Entry | None:
        """The entry that is due, the first noted first."""
        if self._writing is not None:
            return None
        if is_busy:
            now -= BUSY_SETTLE_S - SETTLE_S
        ready = (entry for entry, at in self._due_s.items() if at <= now and not entry.leases)
        return next(ready, None)

    def hurry(self) -> None:
        """Everything is due now, and nothing later: the engine ends."""
        self._is_ending = True
        self._due_s = {entry: 0.0 for entry in self._due_s if not entry.leases}

    def press(self, entries: Iterable[Entry]) -> None:
        """Those of them that are due later are due now."""
        for entry in entries:
            if entry in self._due_s:
                self._due_s[entry] = 0.0

    def put_off(self, entry: Entry, now: float) -> None:
        """It is worth less than the files that would be removed for it: consider it later."""
        self._due_s.pop(entry, None)
        if not self._is_ending:
            self._due_s[entry] = now + RETRY_S

    # ------------------------------------------------------------ operations

    def take_ops(self) -> list[DiskOp]:
        """What is to be done, in order; taken once."""
        ops, self._ops = self._ops, []
        return ops

    def write(self, entry: Entry) -> None:
        """Begin a write; the entry is leased until it has ended."""
        self._due_s.pop(entry, None)
        self._writing = entry
        entry.leases.add(HOLDER)
        self._ops.append(Write(entry))

    def read(self, entry: Entry) -> None:
        """Begin a read."""
        entry.move(EntryState.READING)
        self._ops.append(Read(entry))

    def remove_file(self, file: str) -> None:
        """Remove a file that no entry needs."""
        self._ops.append(Remove(file))

    def remove(self, entry: Entry) -> None:
        """Remove its file."""
        if entry.file is not None:
            self._ops.append(Remove(entry.file))
            self.lost(entry)

    # ------------------------------------------------------------ outcomes

    def added(self, entry: Entry, file: str, file_bytes: int) -> None:
        """It has a file from now on."""
        entry.file, entry.file_bytes = file, file_bytes
        self._ledger.add(Line.DISK, file_bytes)

    def write_ended(self, entry: Entry) -> None:
        """A write has ended, well or not."""
        self._writing = None
        entry.leases.discard(HOLDER)

    def write_failed(self, entry: Entry, problem: str) -> None:
        """A write has failed; with a `problem` none is tried again."""
        self.write_ended(entry)
        if problem:
            self.disable(problem)

    def lost(self, entry: Entry) -> None:
        """Its file is gone."""
        self._ledger.add(Line.DISK, -entry.file_bytes)
        entry.file, entry.file_bytes = None, 0

    def disable(self, problem: str) -> None:
        """Stop writing: the disk is full, or cannot be written (SPEC C9)."""
        self.problem = problem
        self._due_s.clear()

    def check(self, entries: Sequence[Entry]) -> None:
        """Assert that the ledger counts the files of these, all there are."""
        assert self.used_bytes == sum(entry.file_bytes for entry in entries), repr(self)
        assert all((entry.file is None) == (entry.file_bytes == 0) for entry in entries)
        assert self._due_s.keys() <= {e for e in entries if e.state is EntryState.RAM and e.file is None}
