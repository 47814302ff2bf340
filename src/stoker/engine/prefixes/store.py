"""The engine's prefix cache joined with its disk: orders go one way, answers the other.

Owns when the disk is tended to and what the end of the engine still saves. What is stored and what has to go
is the cache's own business.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.inbox import DiskFound, DiskLost, DiskRead, DiskWritten
from stoker.engine.prefixes.disk import PrefixDisk
from stoker.machine.ledger import Ledger

if TYPE_CHECKING:
    from stoker.engine.inbox import DiskPost, Inbox
    from stoker.settings import EngineSettings

log = logging.getLogger(__name__)

PART_OF_LIMIT = 4


class PrefixStore:
    """What was computed, for every model of the engine.

    Args:
        inbox: where the disk's answers arrive.
        settings: the engine's.
        limit_bytes: memory that the engine may take in all; stored prefixes get a quarter at most.
    """

    def __init__(self, inbox: Inbox, settings: EngineSettings, limit_bytes: int) -> None:
        keeps = settings.cache_mode in {"snapshot", "live+snapshot"} and settings.cache_ram_bytes > 0
        disk_bytes = settings.cache_disk_bytes if keeps else 0
        ram_bytes = min(settings.cache_ram_bytes, limit_bytes // PART_OF_LIMIT) if keeps else 0
        self._limits = CacheLimits(ram_bytes=ram_bytes, disk_bytes=disk_bytes)
        self.ledger = Ledger()
        self.cache = PrefixCache(self._limits, self.ledger)
        self._disk = PrefixDisk(inbox, settings.cache_dir, disk_bytes)

    def __repr__(self) -> str:
        return f"<PrefixStore {self.cache!r} {self._disk!r}>"

    def open(self) -> None:
        """Have the disk looked through; what it holds is used as soon as that has ended."""
        self._disk.open()

    def model_loaded(self, path: str, fingerprint: str) -> None:
        """What the file at that path held before is of no use any more (SPEC C1)."""
        self._disk.forget_stale(path, fingerprint)

    def handle(self, post: DiskPost, now: float) -> None:
        """Take in how something on disk ended."""
        match post:
            case DiskFound(entries, problem):
                self.cache.found(entries, now)
                if problem:
                    self._give_up_on_disk(problem)
            case DiskLost(files):
                self.cache.files_lost(files)
            case DiskWritten():
                self._written(post)
            case DiskRead(entry, data, reason):
                if data is not None:
                    self.cache.fetched(entry, data, now)
                else:
                    log.warning("a stored prefix of %d tokens is lost: %s", entry.num_tokens, reason)
                    self.cache.unreadable(entry)

    def _written(self, post: DiskWritten) -> None:
        if post.file is not None:
            self.cache.written(post.entry, post.file, post.file_bytes)
            self.cache.files_lost(post.removed)
            return
        self.cache.unwritten(post.entry, post.problem)
        if post.problem:
            self._give_up_on_disk(post.problem)

    def _give_up_on_disk(self, problem: str) -> None:
        log.warning("prefixes are kept in memory only: %s", problem)
        self.cache.disk.disable(problem)

    def tend(self, now: float, *, is_busy: bool = False) -> None:
        """Order what is due; called each turn, costs next to nothing."""
        self.cache.tend(now, is_busy=is_busy)
        self.send_orders()

    def send_orders(self) -> None:
        """Pass on what the cache wants done."""
        if orders := self.cache.disk.take_orders():
            self._disk.carry_out(orders)

    def next_due_s(self) -> float | None:
        """When there is something to tend to."""
        return self.cache.disk.next_due_s()

    @property
    def is_saved(self) -> bool:
        """Whether everything that should be on disk is."""
        return self.cache.disk.is_idle

    def hold(self, now: float) -> int:
        """Memory is short: drop what is stored there, and store nothing until `release` (SPEC M4, C14).

        Returns:
            Bytes that gave back.
        """
        freed_bytes = self.cache.shed(self.cache.ram_bytes, now)
        self.cache.limits = replace(self._limits, ram_bytes=0)
        return freed_bytes

    def release(self) -> None:
        """There is memory again."""
        self.cache.limits = self._limits

    def hurry(self) -> None:
        """The engine ends: everything is due now."""
        self.cache.disk.hurry()

    def close(self) -> None:
        """Let go of the disk; idempotent."""
        self._disk.close()
