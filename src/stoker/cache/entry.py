"""One stored prefix: the tokens it stands for, its state as bytes, and where these are (SPEC C7).

Owns the state table of an entry. Which entries there are and which are evicted is the prefix cache's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from stoker.cache.keys import num_tokens

Snapshot: TypeAlias = bytes | bytearray | memoryview


class EntryState(StrEnum):
    """Where the bytes are."""

    PENDING = "pending"  # on their way out of the backend, in this very turn
    RAM = "ram"
    DISK = "disk"
    READING = "reading"  # on their way from disk
    GONE = "gone"


_E = EntryState
MOVES: dict[EntryState, frozenset[EntryState]] = {
    _E.PENDING: frozenset({_E.RAM, _E.DISK, _E.GONE}),
    _E.RAM: frozenset({_E.DISK, _E.GONE}),
    _E.DISK: frozenset({_E.PENDING, _E.READING, _E.GONE}),
    _E.READING: frozenset({_E.RAM, _E.DISK, _E.GONE}),
    _E.GONE: frozenset(),
}


class Line(StrEnum):
    """The ledger's lines for what entries hold."""

    CACHE = "cache"
    PARKED = "parked"
    DISK = "disk"


@dataclass(slots=True, eq=False)
class Entry:
    """A prefix of `namespace` and its state.

    Attributes:
        namespace: digest of who may share it.
        model: fingerprint of the model it belongs to.
        source: path of that model's file.
        key: its tokens, four bytes each.
        data: the state, while it is in host memory.
        size_bytes: what that takes, or is estimated to take.
        file: its name on disk, if it is saved.
        file_bytes: what the file takes.
        leases: holders that need it where it is; an entry with a lease neither moves nor goes.
        line: where the ledger counts what it takes in host memory.
        is_private: it is in no tree: only its holder uses it.
        is_exact: its model cannot go back, so it serves only prompts with all of its tokens.
        is_background: it was made for background.
        used_s: when it was used last.
    """

    namespace: bytes
    model: str
    source: str
    key: bytes
    size_bytes: int
    data: Snapshot | None = None
    file: str | None = None
    file_bytes: int = 0
    leases: set[Hashable] = field(default_factory=set)
    line: Line = Line.CACHE
    is_private: bool = False
    is_exact: bool = False
    is_background: bool = False
    used_s: float = 0.0
    state: EntryState = EntryState.PENDING

    def __repr__(self) -> str:
        where = f"{self.state}{' saved' if self.file else ''}"
        return f"<Entry {self.num_tokens} tokens, {self.size_bytes} bytes, {where}, leases {self.leases}>"

    @property
    def num_tokens(self) -> int:
        """Tokens it stands for."""
        return num_tokens(self.key)

    @property
    def is_in_ram(self) -> bool:
        """Whether its bytes are in host memory, or are about to be before anything else happens."""
        return self.state in {EntryState.RAM, EntryState.PENDING}

    @property
    def is_free(self) -> bool:
        """Whether it may move or go."""
        return not self.leases and self.state in {EntryState.RAM, EntryState.DISK}

    def lease(self, holder: Hashable) -> None:
        """Keep it where it is until the cache's `settle`."""
        assert self.state is not EntryState.GONE, f"{self!r} cannot be leased"
        self.leases.add(holder)

    def move(self, state: EntryState) -> None:
        """Change state; an AssertionError with what it was if the table has no such move."""
        assert state in MOVES[self.state], f"{self!r} cannot become {state}"
        self.state = state

    def check(self) -> None:
        """Assert that its parts fit its state."""
        assert (self.state is EntryState.RAM) == (self.data is not None), repr(self)
        assert self.state is not EntryState.DISK or self.file, repr(self)
        assert self.data is None or memoryview(self.data).nbytes == self.size_bytes, repr(self)
