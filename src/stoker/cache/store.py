"""The prefix cache joined with its disk and a shared store: operations go one way, outcomes come back.

Owns when entries are written and what is still saved when the engine ends. Which prefixes are stored and
which are evicted is `prefix_cache`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cache.disk.threads import DiskThreads
from stoker.cache.disk.tier import DiskFound, DiskLost, DiskOutcome, DiskRead, DiskWritten
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.machine.ledger import Ledger

if TYPE_CHECKING:
    from stoker.cache.shared.threads import SharedThreads
    from stoker.cache.shared.tier import SharedOutcome, SharedTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FromShared:
    """How an operation on the shared store ended."""

    outcome: SharedOutcome


StoreOutcome = DiskOutcome | FromShared


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where a store is that several machines share, and its limits; see `StoreLimits`."""

    url: str
    size_bytes: int
    ttl_s: float


class PrefixStore:
    """The stored prefixes of every model of the engine.

    Args:
        post: takes what the disk's threads report, from any thread; `handle` gets it on the engine's own.
        cache_dir: the prefix folder lies below it.
        limits: bytes in host memory and on disk.
        place: the shared store; None: there is none.
    """

    def __init__(
        self,
        post: Callable[[StoreOutcome], None],
        cache_dir: Path,
        limits: CacheLimits,
        place: SharedPlace | None = None,
    ) -> None:
        self._limits = limits
        self.ledger = Ledger()
        self._shared: tuple[SharedTier, SharedThreads] | None = None
        if place is not None and limits.ram_bytes:
            self._shared = _opened(place, post)
        self.cache = PrefixCache(limits, self.ledger, self._shared[0] if self._shared else None)
        self._disk = DiskThreads(post, cache_dir, limits.disk_bytes)

    def __repr__(self) -> str:
        return f"<PrefixStore {self.cache!r} {self._disk!r}>"

    def open(self) -> None:
        """Begin to scan the folder; what it holds is used as soon as that has ended."""
        self._disk.open()

    def model_loaded(self, path: str, fingerprint: str, apart: str = "") -> None:
        """Remove the files of what the model file at `path` held before (SPEC C1).

        `apart` keeps machines apart in a shared store whose states are not the same bit for bit.
        """
        self._disk.remove_stale(path, fingerprint)
        if self._shared is not None:
            self._shared[0].model_loaded(fingerprint, apart)

    def handle(self, outcome: StoreOutcome, now: float) -> None:
        """Apply how an operation on disk, or on the shared store, ended."""
        match outcome:
            case FromShared(told):
                self._handle_shared(told, now)
                return
            case DiskFound(entries, problem):
                self.cache.found(entries, now)
                if problem:
                    self.cache.disk.disable(problem)
            case DiskLost(files):
                self.cache.files_lost(files)
                return
            case DiskWritten(entry, None, problem=problem):
                self.cache.disk.write_failed(entry, problem)
            case DiskWritten(entry, str(file), file_bytes, removed=removed):
                self.cache.written(entry, file, file_bytes)
                self.cache.files_lost(removed)
                return
            case DiskRead(entry, data, reason, is_gone=is_gone):
                if data is None:
                    level = logging.INFO if is_gone else logging.WARNING
                    log.log(level, "a stored prefix of %d tokens is lost: %s", entry.num_tokens, reason)
                    self.cache.unreadable(entry, is_damaged=not is_gone)
                else:
                    self.cache.fetched(entry, data, now)
                return
        if problem:
            log.warning("prefixes are kept in memory only: %s", problem)

    def _handle_shared(self, outcome: SharedOutcome, now: float) -> None:
        assert self._shared is not None, f"{outcome!r} of no store"
        tier, before = self._shared[0], self._shared[0].problem
        got = tier.handle(outcome, now)
        if got is not None and got.data is not None:
            self.cache.fetched(got.entry, got.data, now)
        elif got is not None:
            self.cache.unreadable(got.entry, is_damaged=False)
        _tell(before, tier.problem)

    def tend(self, now: float, *, is_busy: bool = False) -> None:
        """Begin what is due; called each turn, costs next to nothing."""
        self.cache.tend(now, is_busy=is_busy)
        if ops := self.cache.disk.take_ops():
            self._disk.run(ops)
        if self._shared is not None:
            self._tend_shared(*self._shared, now, is_busy=is_busy)

    def _tend_shared(self, tier: SharedTier, threads: SharedThreads, now: float, *, is_busy: bool) -> None:
        before = tier.problem
        for entry in tier.late(now):
            self.cache.unreadable(entry, is_damaged=False)
        tier.tend(now, is_busy=is_busy)
        if ops := tier.take_ops():
            threads.run(ops)
        _tell(before, tier.problem)

    def next_due_s(self, rest_s: float = 0.0) -> float | None:
        """When the next write is due, or the shared store is to be looked at; None: neither.

        Until `rest_s` the engine is busy: what is written all the same is looked at when something comes.
        """
        tiers = (self.cache.disk, self._shared[0]) if self._shared else (self.cache.disk,)
        due = [tier.next_due_s(rest_s) for tier in tiers]
        return min((at for at in due if at is not None), default=None)

    @property
    def is_saved(self) -> bool:
        """Whether everything that should be on disk is, and in the shared store."""
        return self.cache.disk.is_idle and (self._shared is None or self._shared[0].is_idle)

    def hold(self, now: float) -> int:
        """Memory is short: drop what is stored there, and store nothing until `release` (SPEC M4, C14).

        Returns:
            Bytes freed.
        """
        freed_bytes = self.cache.shed(self.cache.ram_bytes, now)
        self.cache.limits = replace(self._limits, ram_bytes=0)
        return freed_bytes

    def release(self) -> None:
        """Store again, after `hold`."""
        self.cache.limits = self._limits

    def hurry(self) -> None:
        """The engine ends: every write is due now."""
        self.cache.disk.hurry()
        if self._shared is not None:
            self._shared[0].hurry()

    def close(self) -> None:
        """End the disk's threads; those of the shared store are left alone. Idempotent."""
        self._disk.close()
        if self._shared is not None:
            self._shared[1].close()


def _tell(before: str, problem: str) -> None:
    if problem and not before:
        log.warning("the shared store of prefixes is left alone for a while: %s", problem)
    elif before and not problem:
        log.info("the shared store of prefixes is used again")


def _opened(place: SharedPlace, post: Callable[[StoreOutcome], None]) -> tuple[SharedTier, SharedThreads]:
    from stoker.cache.shared.files import shown_url  # noqa: PLC0415 - none of it without the setting
    from stoker.cache.shared.names import StoreLimits  # noqa: PLC0415
    from stoker.cache.shared.threads import SharedThreads  # noqa: PLC0415
    from stoker.cache.shared.tier import SharedTier  # noqa: PLC0415

    limits = StoreLimits(place.size_bytes, place.ttl_s)
    threads = SharedThreads(lambda outcome: post(FromShared(outcome)), place.url, limits)
    return SharedTier(limits, shown_url(place.url)), threads
