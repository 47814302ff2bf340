"""The prefix cache joined with its disk: operations go one way, outcomes come back.

Owns when entries are written and what is still saved when the engine ends. Which prefixes are stored and
which are evicted is `prefix_cache`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stoker.cache.disk.threads import DiskThreads
from stoker.cache.disk.tier import DiskFound, DiskLost, DiskOutcome, DiskRead, DiskWritten
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.machine.ledger import Ledger

log = logging.getLogger(__name__)


class PrefixStore:
    """The stored prefixes of every model of the engine.

    Args:
        post: takes what the disk's threads report, from any thread; `handle` gets it on the engine's own.
        cache_dir: the prefix folder lies below it.
        limits: bytes in host memory and on disk.
    """

    def __init__(self, post: Callable[[DiskOutcome], None], cache_dir: Path, limits: CacheLimits) -> None:
        self._limits = limits
        self.ledger = Ledger()
        self.cache = PrefixCache(limits, self.ledger)
        self._disk = DiskThreads(post, cache_dir, limits.disk_bytes)

    def __repr__(self) -> str:
        return f"<PrefixStore {self.cache!r} {self._disk!r}>"

    def open(self) -> None:
        """Begin to scan the folder; what it holds is used as soon as that has ended."""
        self._disk.open()

    def model_loaded(self, path: str, fingerprint: str) -> None:
        """Remove the files of what the model file at `path` held before (SPEC C1)."""
        self._disk.remove_stale(path, fingerprint)

    def handle(self, outcome: DiskOutcome, now: float) -> None:
        """Apply how an operation on disk ended."""
        match outcome:
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

    def tend(self, now: float, *, is_busy: bool = False) -> None:
        """Begin what is due; called each turn, costs next to nothing."""
        self.cache.tend(now, is_busy=is_busy)
        if ops := self.cache.disk.take_ops():
            self._disk.run(ops)

    def next_due_s(self) -> float | None:
        """When the next write is due; None: none is."""
        return self.cache.disk.next_due_s()

    @property
    def is_saved(self) -> bool:
        """Whether everything that should be on disk is."""
        return self.cache.disk.is_idle

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

    def close(self) -> None:
        """End the disk's threads; idempotent."""
        self._disk.close()
