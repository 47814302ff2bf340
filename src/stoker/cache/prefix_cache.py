"""Every stored prefix of every model: which there are, where their bytes are, what is evicted (SPEC C).

Pure and synchronous: time is an argument; operations on disk leave as values, and how they ended comes back
by `written`, `fetched` and their like. Owns the entries, their trees and what the ledger counts of them. An
entry that is used or moves is leased, and neither moves nor goes. What parked sequences go on from is an
entry too, leased by them and counted apart (SPEC Q4).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker.cache.disk.tier import DiskTier
from stoker.cache.entry import MIN_TOKENS, Entry, EntryIndex, EntryState, Line, Snapshot
from stoker.cache.eviction import VictimRanking, Worth, victim, worth
from stoker.cache.prefix_tree import Reader, prefix_tree
from stoker.ipc.model import CacheMode
from stoker.ipc.status import CacheStatus, PrefixStatus
from stoker.machine.ledger import Ledger

if TYPE_CHECKING:
    from stoker.cache.shared.tier import SharedTier

MAX_ENTRIES = 256
"""Entries of a namespace (SPEC C7)."""


PART_OF_ENGINE = 4
"""Stored prefixes take at most a quarter of the memory that the engine may take in all."""


"""Enough of a namespace's digest to tell it from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What stored prefixes may take, in bytes; 0: nothing is kept there."""

    ram_bytes: int = 0
    disk_bytes: int = 0

    @classmethod
    def within(cls, engine_bytes: int, *, mode: CacheMode, ram_bytes: int, disk_bytes: int) -> CacheLimits:
        """What the settings ask for, where the engine may take `engine_bytes` of memory."""
        if not mode.keeps_snapshots or ram_bytes <= 0:
            return cls()
        return cls(ram_bytes=min(ram_bytes, engine_bytes // PART_OF_ENGINE), disk_bytes=disk_bytes)


class PrefixCache:
    """The stored prefixes of one engine, over all its models.

    Attributes:
        shared: a store that other machines use too; None: there is none.
    """

    def __init__(self, limits: CacheLimits, ledger: Ledger, shared: SharedTier | None = None) -> None:
        self.limits = limits
        self.shared = shared
        self.disk = DiskTier(limits.disk_bytes, ledger)
        self._absent: set[str] = set()  # models of which nothing is kept in host memory that is on disk
        self._ledger = ledger
        self.index = EntryIndex()
        self._private: set[Entry] = set()
        self._now = 0.0
        self._rankings: dict[bytes | None, VictimRanking[Entry]] = {}  # of a namespace; None: of host memory
        self._ranked_s = 0.0
        self._num_stored_total = 0
        self._num_evicted_total = 0
        self._num_damaged_total = 0

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} entries, {self.ram_bytes} bytes, {self.disk!r}>"

    def __len__(self) -> int:
        return len(self.index)

    # ------------------------------------------------------------ questions

    @property
    def ram_bytes(self) -> int:
        """Host memory of what is stored, parked sequences not counted."""
        return self._ledger.used(Line.CACHE)

    @property
    def parked_bytes(self) -> int:
        """Host memory of what parked sequences go on from."""
        return self._ledger.used(Line.PARKED)

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        return {
            "cache_stored_total": self._num_stored_total,
            "cache_evicted_total": self._num_evicted_total,
            "cache_damaged_total": self._num_damaged_total,
            "parked_bytes": self.parked_bytes,
            **(self.shared.stats() if self.shared is not None else {}),
        }

    def status(self) -> CacheStatus:
        """What it holds now."""
        entries = list(self.index)
        return CacheStatus(
            num_entries=len(entries),
            ram_bytes=self.ram_bytes,
            ram_limit_bytes=self.limits.ram_bytes,
            disk_bytes=self.disk.used_bytes,
            disk_limit_bytes=self.limits.disk_bytes,
            num_ram=sum(entry.is_in_ram for entry in entries),
            num_disk=sum(entry.file is not None for entry in entries),
            num_unsaved=sum(self.disk.wants(entry) for entry in entries),
            disk_problem=self.disk.problem,
            shared=None if self.shared is None else self.shared.status(),
        )

    # ------------------------------------------------------------ storing

    def store(self, new: Entry, now: float, *, is_wanted: bool = False) -> Entry | None:
        """Take in an entry whose bytes are about to come (`filled`, `failed`).

        Args:
            new: what is known of it.
            now: the time.
            is_wanted: a sequence waits for it, so it is taken however little it adds.

        Returns:
            The entry to fill; None: it is there already, is not worth its bytes, or does not fit.
        """
        self._now = now
        if new.num_tokens < MIN_TOKENS or new.size_bytes > self.limits.ram_bytes:
            return None
        known = self.index.get(new.namespace, new.key)
        if known is not None and known.state is not EntryState.DISK:
            known.used_s = now
            return None
        if known is None and not is_wanted and not self.index.is_worth_it(new):
            return None
        if not self._make_room(new.size_bytes):
            return None
        return self._take_in(new, known, Line.CACHE)

    def park(self, new: Entry, holder: Hashable, limit_bytes: int, now: float) -> Entry | None:
        """Take in what a parked sequence goes on from, leased by `holder`; `limit_bytes` bounds all such.

        Returns:
            An entry to fill, or one that has the bytes already; None: it does not fit.
        """
        self._begin(now)
        known = None if new.is_private else self.index.get(new.namespace, new.key)
        if known is not None and known.is_in_ram:
            known.leases.add(holder)
            known.used_s = now
            return known
        if self.parked_bytes + new.size_bytes > limit_bytes:
            return None
        if known is not None and known.state is EntryState.READING:
            known, new.is_private = None, True
        entry = self._take_in(new, known, Line.PARKED)
        entry.leases.add(holder)
        return entry

    def _take_in(self, new: Entry, known: Entry | None, line: Line) -> Entry:
        if known is not None:  # it is on disk: its bytes come from the backend sooner than from there
            known.move(EntryState.PENDING)
            known.size_bytes, new = new.size_bytes, known
        elif new.is_private:
            self._private.add(new)
        else:
            self._keep_count(new.namespace)
            self.index.insert(new)
            self._rank(new)
        new.line, new.used_s = line, self._now
        self._ledger.add(line, new.size_bytes)
        return new

    def filled(self, entry: Entry, data: Snapshot, now: float) -> None:
        """Its bytes have come; those of shorter entries that it stands for too are freed."""
        self._begin(now)
        self._recount(entry, memoryview(data).nbytes)
        entry.data = data
        entry.move(EntryState.RAM)
        self._num_stored_total += 1
        for shorter in self.index.superseded_by(entry):
            if shorter.state is EntryState.RAM:
                self._let_go_of_bytes(shorter)
        self._note(entry, now)
        self._make_room(0)

    def failed(self, entry: Entry) -> None:
        """Its bytes do not come."""
        self._begin(self._now)
        self._let_go_of_bytes(entry)

    def settle(self, entry: Entry, holder: Hashable, now: float) -> None:
        """End a holder's lease; what was parked becomes an ordinary entry, if it fits."""
        self._begin(now)
        entry.leases.discard(holder)
        if entry.line is not Line.PARKED or entry.leases or entry.state is not EntryState.RAM:
            return
        is_of_use = not entry.is_private and entry.num_tokens >= MIN_TOKENS
        if not (is_of_use and self._make_room(entry.size_bytes)):
            self._let_go_of_bytes(entry)
            return
        self._ledger.add(entry.line, -entry.size_bytes)
        entry.line, entry.used_s = Line.CACHE, now
        self._ledger.add(entry.line, entry.size_bytes)
        self._begin(now)  # it is one of those that may go
        self._note(entry, now)

    def _note(self, entry: Entry, now: float) -> None:
        """It is in host memory: it is to be saved."""
        self.disk.note(entry, now)
        if self.shared is not None:
            self.shared.note(entry, now)

    def used(self, entry: Entry, now: float) -> None:
        """It was used."""
        self._now = entry.used_s = now
        entry.num_hits += 1

    def prefixes(
        self, count: int, readers: Iterable[Reader], models: Mapping[str, str], now: float
    ) -> list[PrefixStatus]:
        """So many stored prefixes, the longest, as a tree; no token of any.

        Args:
            count: the most that are shown.
            readers: requests that compute now.
            models: ids by the paths of their files.
            now: the time.
        """
        found = prefix_tree(self.index, count, readers, now)
        return [msgspec.structs.replace(each, model=models.get(each.source, "")) for each in found]

    def drop(self, namespace: bytes, key: bytes) -> None:
        """Forget an entry that others make superfluous, unless it is leased."""
        entry = self.index.get(namespace, key)
        if entry is not None and entry.is_free:
            self._forget(entry)

    def damaged(self, entry: Entry) -> None:
        """The backend refused its bytes: they are not offered again."""
        self._num_damaged_total += 1
        entry.leases.clear()
        if entry.state in {EntryState.RAM, EntryState.DISK}:
            self._forget(entry)

    # ------------------------------------------------------------ disk

    def found(self, entries: Iterable[Entry], now: float) -> None:
        """Take in what the folder held; of a known entry only the file."""
        self._begin(now)
        for entry in entries:
            assert entry.file is not None, f"{entry!r} was not found on disk"
            file, size = entry.file, entry.file_bytes
            entry.file, entry.file_bytes = None, 0
            if entry.size_bytes > self.limits.ram_bytes:
                continue  # of a server with more memory
            if (known := self.index.get(entry.namespace, entry.key)) is not None:
                self._take_over(known, file, size)
                continue
            self._keep_count(entry.namespace)
            self.index.insert(entry)
            entry.move(EntryState.DISK)
            self.disk.added(entry, file, size)
            self._rank(entry)

    def _take_over(self, known: Entry, file: str, size: int) -> None:
        """A known entry has a file already: it need not be written, unless that is under way."""
        if known.file is None and not self.disk.is_writing(known):
            self.disk.forget(known)
            self.disk.added(known, file, size)
        elif known.file not in {None, file}:
            self.disk.remove_file(file)

    def tend(self, now: float, *, is_busy: bool = False) -> None:
        """Begin the next write, if one is due; while something is computed, and memory lasts, it waits."""
        self._begin(now)
        can_wait = is_busy and 2 * self.ram_bytes < self.limits.ram_bytes
        while (entry := self.disk.next_to_write(now, is_busy=can_wait)) is not None:
            going = self._giving_way_to(entry)
            if going is None:
                self.disk.put_off(entry, now)
                continue
            for other in going:
                self._let_go_of_file(other)
            self.disk.write(entry)

    def _giving_way_to(self, entry: Entry) -> list[Entry] | None:
        """Entries whose files would be removed for it, if each is worth less; None: some is not."""
        excess = self.disk.used_bytes + entry.size_bytes - self.disk.limit_bytes
        others = [other for other in self.index if other.file is not None and other.is_free]
        going: list[Entry] = []
        while excess > 0:
            chosen = self._least((*others, entry))
            if chosen is None or chosen is entry:
                return None
            others.remove(chosen)
            going.append(chosen)
            excess -= chosen.file_bytes
        return going

    def can_fetch(self, entry: Entry) -> bool:
        """Whether its bytes fit beside those that are in use."""
        if entry.state not in {EntryState.DISK, EntryState.SHARED}:
            return True
        return self._in_use_bytes() + entry.size_bytes <= self.limits.ram_bytes

    def fetch(self, entry: Entry, holder: Hashable) -> None:
        """Have its bytes read for `holder`; `fetched` or `unreadable` ends the wait."""
        self._begin(self._now)
        entry.leases.add(holder)
        if entry.state is EntryState.SHARED:
            self._get(entry)
        elif entry.state is EntryState.DISK:
            self._make_room(entry.size_bytes)
            self._ledger.add(entry.line, entry.size_bytes)
            entry.copy = None
            self.disk.read(entry)

    def _get(self, entry: Entry) -> None:
        """Take in an entry whose bytes are in the shared store, and have them read."""
        assert self.shared is not None, f"{entry!r} is in no store"
        self._keep_count(entry.namespace)
        self._make_room(entry.size_bytes)
        self.index.insert(entry)
        self._ledger.add(entry.line, entry.size_bytes)
        entry.move(EntryState.READING)
        self.shared.get(entry, self._now)

    def written(self, entry: Entry, file: str, file_bytes: int) -> None:
        """A write has succeeded; shorter entries that it stands for too are forgotten."""
        self._begin(self._now)
        self.disk.write_ended(entry)
        self.disk.added(entry, file, file_bytes)
        if entry.state is EntryState.GONE:
            self.disk.remove(entry)
            return
        if entry.model in self._absent and entry.is_free:
            self._let_go_of_bytes(entry)
        for shorter in self.index.superseded_by(entry):
            self._forget(shorter)

    def model_gone(self, model: str) -> None:
        """A model, by its fingerprint, was unloaded: of saved entries only files stay, the rest is due."""
        self._absent.add(model)
        of_it = [e for e in self.index if e.model == model and e.is_free and e.state is EntryState.RAM]
        self.disk.press(of_it)
        for entry in of_it:
            if entry.file is not None:
                self._let_go_of_bytes(entry)

    def model_back(self, model: str) -> None:
        """It is loaded again: its entries may be in memory too."""
        self._absent.discard(model)

    def files_lost(self, files: Iterable[str]) -> None:
        """These files are gone: removed here or by another process."""
        names = set(files)
        for entry in [entry for entry in self.index if entry.file in names]:
            self.disk.lost(entry)
            if entry.state is EntryState.DISK:
                self._take_out(entry)

    def fetched(self, entry: Entry, data: Snapshot, now: float) -> None:
        """Its bytes came from disk, or from the shared store."""
        self._begin(now)
        self._recount(entry, memoryview(data).nbytes)
        entry.data, entry.used_s = data, now
        entry.move(EntryState.RAM)
        self._note(entry, now)  # its file may have gone meanwhile, or its copy be old

    def unreadable(self, entry: Entry, *, is_damaged: bool = True) -> None:
        """Its file is damaged, or gone, or not to be had in time."""
        self._num_damaged_total += is_damaged
        self._ledger.add(entry.line, -entry.size_bytes)
        self.disk.lost(entry)
        self._take_out(entry)

    # ------------------------------------------------------------ room

    def shed(self, size_bytes: int, now: float) -> int:
        """Free about so many bytes of host memory, saved ones first (SPEC C14); returns how many it was."""
        self._begin(now)
        before = self.ram_bytes
        while before - self.ram_bytes < size_bytes and self._evict_one():
            pass
        return before - self.ram_bytes

    def _in_use_bytes(self) -> int:
        """What entries take that cannot go now."""
        return sum(e.size_bytes for e in self.index if self._is_counted(e) and not e.is_free)

    def _make_room(self, size_bytes: int) -> bool:
        """Make so much room, if what is in use leaves it; otherwise evict nothing."""
        while (excess := self.ram_bytes + size_bytes - self.limits.ram_bytes) > 0:
            chosen = self._ranked(None).least()
            is_enough = chosen is not None and chosen.size_bytes >= excess
            if not is_enough and self.ram_bytes - self._in_use_bytes() < excess:
                return False
            assert chosen is not None, f"{self!r} has nothing to give up, and {excess} bytes too many"
            self._evict(chosen)
        return True

    def _evict_one(self) -> bool:
        """Free the bytes of least value: of entries on disk too, else of any (SPEC C7)."""
        chosen = self._ranked(None).least()
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def _evict(self, entry: Entry) -> None:
        self._num_evicted_total += 1
        self._let_go_of_bytes(entry)

    def _keep_count(self, namespace: bytes) -> None:
        """Make room for one more entry of a namespace."""
        while self.index.num_of(namespace) >= MAX_ENTRIES:
            chosen = self._ranked(namespace).least()
            if chosen is None:
                return
            self._num_evicted_total += 1
            self._forget(chosen)

    def _begin(self, now: float) -> None:
        """Something other than a store happens: it may change what many entries are worth."""
        self._now = now
        self._rankings.clear()

    def _ranked(self, namespace: bytes | None) -> VictimRanking[Entry]:
        """Who goes first, of a namespace or (None) of what takes host memory.

        A crowd has many states stored at one time, for which as many others go.
        """
        if self._ranked_s != self._now:
            self._rankings.clear()
            self._ranked_s = self._now
        ranking = self._rankings.get(namespace)
        if ranking is None:
            ranking = (
                VictimRanking(self.index, self._worth_in_ram)
                if namespace is None
                else VictimRanking(self.index.of(namespace), self._worth)
            )
            self._rankings[namespace] = ranking
        return ranking

    def _rank(self, new: Entry) -> None:
        """A new entry may go too, and what it shares with others is not saved by these alone any more."""
        if new.is_exact:
            self._rankings.clear()
            return
        for scope in (new.namespace, None):
            if (ranking := self._rankings.get(scope)) is not None:
                for entry in (new, *self.index.beside(new)):
                    ranking.enter(entry)

    def _worth(self, entry: Entry) -> Worth | None:
        """What it counts for; None: it may not go."""
        return worth(self.index.figures(entry, self._now)) if entry.is_free else None

    def _worth_in_ram(self, entry: Entry) -> Worth | None:
        """The same of those that take host memory, where those on disk too go first."""
        if not (entry.is_free and self._is_counted(entry)):
            return None
        return entry.file is None, *worth(self.index.figures(entry, self._now))

    def _least(self, entries: Iterable[Entry]) -> Entry | None:
        """The one of least value."""
        return victim((entry, self.index.figures(entry, self._now)) for entry in entries)

    # ------------------------------------------------------------ bookkeeping

    @staticmethod
    def _is_counted(entry: Entry) -> bool:
        """Whether it takes host memory of the cache, or is about to."""
        return entry.line is Line.CACHE and entry.state not in {EntryState.DISK, EntryState.GONE}

    def _recount(self, entry: Entry, size_bytes: int) -> None:
        self._ledger.add(entry.line, size_bytes - entry.size_bytes)
        entry.size_bytes = size_bytes

    def _let_go_of_bytes(self, entry: Entry) -> None:
        """Free its host memory; without a file it is gone."""
        self._ledger.add(entry.line, -entry.size_bytes)
        self.disk.forget(entry)
        entry.data, entry.line = None, Line.CACHE
        if entry.file is not None:
            entry.move(EntryState.DISK)
        else:
            self._take_out(entry)

    def _let_go_of_file(self, entry: Entry) -> None:
        self.disk.remove(entry)
        if entry.state is EntryState.DISK:
            self._take_out(entry)
        else:
            self.disk.note(entry, self._now)

    def _forget(self, entry: Entry) -> None:
        """Remove it from memory and disk."""
        self.disk.remove(entry)
        if entry.state is EntryState.RAM:
            self._let_go_of_bytes(entry)
        else:
            self._take_out(entry)

    def _take_out(self, entry: Entry) -> None:
        entry.move(EntryState.GONE)
        entry.data = None
        if entry.is_private:
            self._private.discard(entry)
            return
        self.index.remove(entry)

    # ------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that entries, trees, tiers and ledger agree."""
        self.index.check()
        entries = [*self.index, *self._private]
        for entry in entries:
            assert entry.is_private or self.index.get(entry.namespace, entry.key) is entry, repr(entry)
            entry.check()
        for line in (Line.CACHE, Line.PARKED):
            held = sum(e.size_bytes for e in entries if e.line is line and e.state is not EntryState.DISK)
            assert self._ledger.used(line) == held, f"{self!r} {line} {held}"
        self.disk.check(entries)
        for namespace, ranking in self._rankings.items() if self._ranked_s == self._now else ():
            worth_of = self._worth_in_ram if namespace is None else self._worth
            of_it = self.index if namespace is None else self.index.of(namespace)
            worths = [known for known in map(worth_of, of_it) if known is not None]
            least = ranking.least()
            assert (least and worth_of(least)) == min(worths, default=None), f"{least!r} is not worth least"
