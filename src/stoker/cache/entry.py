"""Stored prefixes: one entry each, and which there are by namespace and tokens.

An `Entry` is the tokens it stands for, its state as bytes, and where these are; it owns its state table (SPEC
C7). `EntryIndex`, a radix tree a namespace, answers what an entry serves and what it adds to the others (SPEC
C1, C2). The prefix cache decides what is stored and what is evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from stoker.cache.eviction import Candidate
from stoker.cache.radix import RadixTree, num_tokens

Snapshot: TypeAlias = bytes | bytearray | memoryview


class EntryState(StrEnum):
    """Where the bytes are."""

    PENDING = "pending"  # on their way out of the backend, in this very turn
    RAM = "ram"
    DISK = "disk"
    READING = "reading"  # on their way from disk
    SHARED = "shared"  # in a store of several machines; it is no entry of ours yet
    GONE = "gone"


_E = EntryState
MOVES: dict[EntryState, frozenset[EntryState]] = {
    _E.PENDING: frozenset({_E.RAM, _E.DISK, _E.GONE}),
    _E.RAM: frozenset({_E.DISK, _E.GONE}),
    _E.DISK: frozenset({_E.PENDING, _E.READING, _E.GONE}),
    _E.READING: frozenset({_E.RAM, _E.DISK, _E.GONE}),
    _E.SHARED: frozenset({_E.READING, _E.GONE}),
    _E.GONE: frozenset(),
}


class Line(StrEnum):
    """The ledger's lines for what entries hold."""

    CACHE = "cache"
    PARKED = "parked"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """A file in a shared store that an entry is read from; whoever needs it waits `wait_s` at most."""

    name: str
    wait_s: float


_numbers = itertools.count(1)


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
        is_shareable: other machines may have it, where there is a shared store (SPEC C19).
        copy: what it is read from there; None: it came from elsewhere.
        used_s: when it was used last.
        num_hits: how often it was used since this program has it.
        number: of this entry alone, in this program.
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
    is_shareable: bool = False
    copy: StoreCopy | None = None
    used_s: float = 0.0
    num_hits: int = 0
    number: int = field(default_factory=_numbers.__next__)
    state: EntryState = EntryState.PENDING

    def __repr__(self) -> str:
        where = f"{self.state}{' saved' if self.file else ''}"
        return f"<Entry {self.num_tokens} tokens, {self.size_bytes} bytes, {where}, leases {self.leases}>"

    @property
    def id(self) -> str:
        """Its name for those who are shown what is stored."""
        return f"{self.namespace.hex()[:8]}-{self.number}"

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


MIN_TOKENS = 32
"""Tokens below which nothing is stored or reused: computing them again is as quick (SPEC C2)."""
MIN_NEW_PART = 8
"""A branch is worth storing if it adds an eighth of its tokens: its state repeats those before them."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored prefix that serves the first `num_tokens` of what was asked for."""

    entry: Entry
    num_tokens: int


class EntryIndex:
    """Every entry that others may use."""

    def __init__(self) -> None:
        self._trees: dict[bytes, RadixTree[Entry]] = {}

    def __repr__(self) -> str:
        return f"<EntryIndex {len(self)} entries in {len(self._trees)} namespaces>"

    def __len__(self) -> int:
        return sum(map(len, self._trees.values()))

    def __iter__(self) -> Iterator[Entry]:
        for tree in self._trees.values():
            yield from tree

    def get(self, namespace: bytes, key: bytes) -> Entry | None:
        """The entry of just these tokens."""
        tree = self._trees.get(namespace)
        return None if tree is None else tree.get(key)

    def of(self, namespace: bytes) -> list[Entry]:
        """Every entry of a namespace."""
        return list(self._trees.get(namespace, ()))

    def num_of(self, namespace: bytes) -> int:
        """How many entries a namespace has."""
        return len(self._trees.get(namespace, ()))

    def insert(self, entry: Entry) -> None:
        """Take in an entry whose tokens have none yet."""
        known = self._trees.setdefault(entry.namespace, RadixTree()).insert(entry.key, entry)
        assert known is None, f"{entry!r} replaces {known!r}"

    def remove(self, entry: Entry) -> None:
        """Take an entry out."""
        tree = self._trees[entry.namespace]
        assert tree.remove(entry.key) is entry, f"{entry!r} was not there"
        if not len(tree):
            del self._trees[entry.namespace]

    # ------------------------------------------------------------ questions

    def find(self, namespace: bytes, key: bytes, *, is_exact: bool) -> list[Hit]:
        """Entries that save tokens of `key`, all but the last at most, the most first (SPEC C2, C5)."""
        tree = self._trees.get(namespace)
        if tree is None or tree.num_shared(key) < MIN_TOKENS:
            return []
        most = num_tokens(key) - 1
        hits = [Hit(entry, length) for length, entry in reversed(tree.on_path(key)) if length <= most]
        if not is_exact:
            match = tree.longest_shared(key)
            nearest = sorted(match.values, key=lambda entry: (not entry.is_in_ram, entry.num_tokens))
            hits = [Hit(entry, min(match.num_tokens, most)) for entry in nearest] + hits
        return [hit for hit in hits if hit.num_tokens >= MIN_TOKENS]

    def is_worth_it(self, new: Entry) -> bool:
        """Whether a new entry adds enough to what is stored; one that goes on from another always does."""
        tree = self._trees.get(new.namespace)
        if tree is None or new.is_exact:
            return True
        match = tree.longest_shared(new.key)
        if match.num_tokens == new.num_tokens:
            return False  # one that is stored goes on from it
        grows = any(entry.num_tokens == match.num_tokens for entry in match.values)
        least = 1 if grows else max(MIN_TOKENS, new.num_tokens // MIN_NEW_PART)
        return new.num_tokens - match.num_tokens >= least

    def superseded_by(self, entry: Entry) -> list[Entry]:
        """Shorter entries that are superfluous now: a model that can go back takes the longer one."""
        if entry.is_private or entry.is_exact:
            return []
        on_path = self._trees[entry.namespace].on_path(entry.key)
        return [shorter for _, shorter in on_path if shorter is not entry and shorter.is_free]

    def beside(self, entry: Entry) -> list[Entry]:
        """Entries that alone would save more, were this one not there: of models that can go back."""
        return self._trees[entry.namespace].beside(entry.key)

    def above(self, entry: Entry) -> list[tuple[int, Entry | None]]:
        """Lengths at which others part from an entry or end, with what is stored of these; shortest first."""
        return self._trees[entry.namespace].above(entry.key)

    def figures(self, entry: Entry, now: float) -> Candidate:
        """What eviction weighs an entry by: tokens that only it saves, its bytes, how long it was idle."""
        tree = self._trees[entry.namespace]
        own = tree.own_tokens_exact(entry.key) if entry.is_exact else tree.own_tokens(entry.key)
        idle_s = max(0.0, now - entry.used_s)
        return Candidate(own, max(1, entry.size_bytes), idle_s, entry.is_background)

    def check(self) -> None:
        """Assert that every tree is sound and none is empty."""
        for tree in self._trees.values():
            tree.check()
            assert len(tree), "an empty tree"
