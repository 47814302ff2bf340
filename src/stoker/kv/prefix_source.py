"""What is stored of one model's sequences, and what they go on from (SPEC C2, C6, C8).

Owns the lease that a sequence has on a stored state: its own while it is parked, or another's that is read
for it or put into its slot. Which entries there are and which are evicted is the prefix cache's.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.cache.entry import MIN_TOKENS, Entry, EntryState, Hit
from stoker.cache.prefix_cache import PrefixCache
from stoker.cache.radix import key_of
from stoker.ipc.usage import CacheSource
from stoker.kv.cells import SchedulerLimits
from stoker.kv.checkpoints import Checkpoints
from stoker.kv.sequence import ParkForm, Sequence

MIN_GAIN = 16
"""The least that this may be; a copy to a device takes longer than computing so few, see `KVAllocator`."""
ComputeTime = Callable[[int], float | None]
"""Seconds that computing so many tokens takes; None: nothing was measured."""


def unknown(num_tokens: int) -> float | None:
    """Of a machine on which nothing was measured."""
    del num_tokens
    return None


MAX_IMPORT = 64
"""How many times as long as what is used of it a state may be: a copied token costs a hundredth."""


class PrefixSource:
    """Stored states of one model.

    Attributes:
        now: the time of the turn, set by the allocator.
        least_gain: tokens more that a stored state has to save than cells at hand; set by the allocator.
        compute_s: what computing tokens takes; set by the allocator.
        prefix_statistics: what prompts cost and what was saved of it.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache) -> None:
        self.limits = limits
        self.cache = cache
        self.now = 0.0
        self.least_gain = MIN_GAIN
        self.compute_s: ComputeTime = unknown
        self.prefix_statistics = PrefixStatistics()
        self._asked: tuple[list[int], int, bytes] = ([], 0, b"")

    def __repr__(self) -> str:
        return f"<PrefixSource {self.cache!r}>"

    # ------------------------------------------------------------ going on from

    def find(self, sequence: Sequence, num_live: int, num_cells: Callable[[], int]) -> Hit | None:
        """A stored state of at most `num_cells()` tokens that saves more than `num_live` tokens in cells."""
        mode = self.limits.cache_mode
        if not (mode.keeps_snapshots and sequence.shares) or sequence.wants_prompt_logits:
            return None
        key, is_exact = self._key(sequence.tokens), not self.limits.can_trim
        least = num_live + self.least_gain if num_live >= MIN_TOKENS else max(num_live, self.least_gain)
        for hit in self.cache.index.find(sequence.namespace, key, is_exact=is_exact):
            if hit.num_tokens < least:
                return None
            most = min(num_cells(), hit.num_tokens * MAX_IMPORT)
            if hit.entry.num_tokens <= most and self.cache.can_fetch(hit.entry):
                return hit
        return None

    def find_shared(self, sequence: Sequence, num_known: int, num_cells: Callable[[], int]) -> Hit | None:
        """A state in the shared store that is got quicker than computed; each sequence waits for one at most.

        Args:
            sequence: that is about to begin.
            num_known: tokens of it that are at hand.
            num_cells: the most tokens that such a state may have.
        """
        shared, is_asked = self.cache.shared, sequence.has_asked_store
        if shared is None or is_asked or not self.limits.cache_mode.keeps_snapshots:
            return None
        if sequence.wants_prompt_logits or not sequence.shares:
            return None
        key, is_exact = self._key(sequence.tokens), not self.limits.can_trim
        hit = shared.find(sequence.namespace, key, num_known, self.compute_s, is_exact=is_exact)
        if hit is None or hit.entry.num_tokens > min(num_cells(), hit.num_tokens * MAX_IMPORT):
            return None
        entry = hit.entry
        is_known = self.cache.index.get(entry.namespace, entry.key) is not None
        if is_known or not self.cache.can_fetch(entry) or not self.can_store:
            return None
        entry.source = self.limits.source
        return hit

    def _key(self, tokens: list[int]) -> bytes:
        """The key of a whole prompt, kept for the next call: an admission asks several times in a row."""
        asked, length, key = self._asked
        if asked is not tokens or length != len(tokens):  # tokens are only ever added to a list
            key = key_of(tokens)
            self._asked = tokens, len(tokens), key
        return key

    def lease(self, sequence: Sequence, entry: Entry | None) -> None:
        """Lease the state it is about to go on from; None: it needs none."""
        if entry is None:
            if sequence.form is not ParkForm.SNAPSHOT:
                self.release(sequence)  # what it had fetched is superfluous by now
            return
        is_fetched = sequence.entry is entry
        fetched_from = CacheSource.DISK if entry.copy is None else CacheSource.STORE
        self.note_source(sequence, fetched_from if is_fetched else CacheSource.RAM)
        entry.lease(sequence.key)
        if not is_fetched:
            self.release(sequence)
        sequence.entry = entry

    @staticmethod
    def num_to_import(sequence: Sequence) -> int:
        """Cells its stored state takes while it is put back: all of it goes in before it is cut."""
        return 0 if sequence.entry is None else sequence.entry.num_tokens

    def release(self, sequence: Sequence) -> None:
        """It needs its stored state no longer."""
        entry, sequence.entry = sequence.entry, None
        if entry is not None:
            self.cache.settle(entry, sequence.key, self.now)

    def used(self, sequence: Sequence) -> None:
        """Its stored state is in its slot."""
        if sequence.entry is not None:
            self.cache.used(sequence.entry, self.now)
        self.release(sequence)

    def lost(self, sequence: Sequence) -> None:
        """Its stored state is lost; if it was to begin with it, nothing was saved."""
        self.release(sequence)
        if sequence.started_s == self.now:
            self.prefix_statistics.taken_back(sequence)
            sequence.num_cached, sequence.cache_source = 0, None

    def fetch(self, sequence: Sequence, entry: Entry) -> None:
        """Have a state read for it, from disk or the shared store; it waits in the queue until then."""
        self.release(sequence)
        sequence.has_asked_store |= entry.state is EntryState.SHARED
        sequence.entry = entry
        self.cache.fetch(entry, sequence.key)

    @staticmethod
    def is_fetching(sequence: Sequence) -> bool:
        """Whether its state is still being read."""
        return sequence.entry is not None and sequence.entry.state is EntryState.READING

    @staticmethod
    def note_source(sequence: Sequence, source: CacheSource) -> None:
        """Remember where the first tokens it did not compute came from (SPEC C13)."""
        if sequence.started_s is None:
            sequence.cache_source = source

    # ------------------------------------------------------------ keeping

    def may_store(self, sequence: Sequence) -> bool:
        """Whether its states may be kept for others."""
        return self.can_store and sequence.shares

    @property
    def can_store(self) -> bool:
        """Whether states are stored at all."""
        limits = self.limits
        return limits.cache_mode.keeps_snapshots and limits.can_export and self.cache.limits.ram_bytes > 0

    def store(self, sequence: Sequence, num_tokens: int) -> Entry | None:
        """An entry for its first tokens, to be filled; None: it may not be stored or is not worth it."""
        if not self.may_store(sequence):
            return None
        return self.cache.store(self._new_entry(sequence, num_tokens), self.now)

    def can_park(self, sequence: Sequence) -> bool:
        """Whether a state of what it has computed would be kept while it waits."""
        size = self.cache.parked_bytes + self.limits.snapshot_bytes(sequence.num_computed)
        is_worth_it = sequence.num_computed >= MIN_TOKENS and self.limits.can_export
        return is_worth_it and size <= self.limits.park_bytes

    def park(self, sequence: Sequence) -> Entry | None:
        """An entry for what a parked sequence has computed, leased by it; None: only its tokens are kept."""
        if sequence.num_computed < MIN_TOKENS or not self.limits.can_export:
            return None
        new = self._new_entry(sequence, sequence.num_computed)
        return self.cache.park(new, sequence.key, self.limits.park_bytes, self.now)

    def begin_checkpoints(self, sequence: Sequence) -> None:
        """Plan checkpoints, where the model cannot go back (SPEC C8)."""
        if not self.limits.can_trim and (self.may_store(sequence) or sequence.is_to_embed):
            sequence.checkpoints = Checkpoints.spread(sequence.num_prompt)

    def mark(self, leader: Sequence, num_tokens: int) -> bool:
        """Add a checkpoint where another sequence will go on; False: it may not be stored."""
        if not self.may_store(leader):
            return False
        if leader.checkpoints is None:
            leader.checkpoints = Checkpoints()
        leader.checkpoints.mark(num_tokens)
        return True

    def checkpoint(self, sequence: Sequence) -> Entry | None:
        """An entry for its state now, to be filled before it moves on, if it is at a checkpoint."""
        checkpoints, at = sequence.checkpoints, sequence.num_computed
        if checkpoints is None or not checkpoints.is_at(at):
            return None
        if at < MIN_TOKENS or not self.may_store(sequence):
            return None
        new = self._new_entry(sequence, at)
        entry = self.cache.store(new, self.now, is_wanted=checkpoints.is_marked(at))
        if entry is not None:
            for dropped in checkpoints.left(at):
                self.cache.drop(sequence.namespace, key_of(sequence.tokens[:dropped]))
        return entry

    def _new_entry(self, sequence: Sequence, num_tokens: int) -> Entry:
        return Entry(
            namespace=sequence.namespace,
            model=self.limits.model,
            source=self.limits.source,
            key=key_of(sequence.tokens[:num_tokens]),
            size_bytes=self.limits.snapshot_bytes(num_tokens),
            is_private=not (sequence.shares and self.limits.cache_mode.keeps_snapshots),
            is_exact=not self.limits.can_trim,
            is_background=sequence.is_background,
            is_shareable=True,
        )


class PrefixStatistics:
    """Prompt tokens by what became of them, since the model was loaded."""

    def __init__(self) -> None:
        self._num_prompt_tokens = 0
        self._num_computed = 0
        self._num_misses = 0
        self._num_hits = dict.fromkeys(CacheSource, 0)
        self._num_cached = dict.fromkeys(CacheSource, 0)

    def __repr__(self) -> str:
        return f"<PrefixStatistics {self._num_computed} of {self._num_prompt_tokens} prompt tokens computed>"

    def admitted(self, sequence: Sequence) -> None:
        """A sequence got its first slot, with what could be reused; of several choices the first counts."""
        if sequence.leader is None:
            self._num_prompt_tokens += sequence.num_prompt
            self._count(sequence, 1)

    def taken_back(self, sequence: Sequence) -> None:
        """What it was admitted with is lost."""
        if sequence.leader is None:
            self._count(sequence, -1)
            self._num_misses += 1

    def _count(self, sequence: Sequence, times: int) -> None:
        source = sequence.cache_source
        if source is None:
            self._num_misses += times
        else:
            self._num_hits[source] += times
            self._num_cached[source] += times * (sequence.num_cached or 0)

    def computed(self, sequence: Sequence, count: int) -> None:
        """Count the next `count` tokens of a sequence, before it counts them itself."""
        self._num_computed += max(0, min(count, sequence.num_prompt - sequence.num_computed))

    def stats(self) -> dict[str, float]:
        """Every count."""
        counts: dict[str, float] = {
            "prompt_tokens_total": self._num_prompt_tokens,
            "prompt_tokens_computed_total": self._num_computed,
            "cache_misses_total": self._num_misses,
        }
        for source in CacheSource:
            counts[f"cache_hits_{source}_total"] = self._num_hits[source]
            counts[f"cached_tokens_{source}_total"] = self._num_cached[source]
        return counts
