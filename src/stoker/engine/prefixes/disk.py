"""The disk tier's threads: they carry the prefix cache's orders out, and post how these ended (SPEC C9).

Owns the folder while the engine lives. It holds nothing of the cache: an order carries what it needs.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from stoker.cache.disk.files import FOLDER_NAME, PrefixFolder
from stoker.cache.disk.prefix_file import NewPrefix, PrefixFile
from stoker.cache.disk.tier import DiskOrder, Read, Remove, Write
from stoker.cache.entry import Entry
from stoker.engine.inbox import DiskFound, DiskLost, DiskRead, DiskWritten
from stoker.errors import CacheFileError, EngineError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from stoker.engine.inbox import Inbox, Posted

log = logging.getLogger(__name__)


class PrefixDisk:
    """Prefix files in a folder below `cache_dir`, of at most `limit_bytes`; 0: none are read or written."""

    def __init__(self, inbox: Inbox, cache_dir: Path, limit_bytes: int) -> None:
        self._inbox = inbox
        self._folder = PrefixFolder(cache_dir / FOLDER_NAME, limit_bytes)
        self._is_on = limit_bytes > 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stoker-disk-writes")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="stoker-disk-reads")  # somebody waits for it

    def __repr__(self) -> str:
        return f"<PrefixDisk {self._folder!r}>"

    def open(self) -> None:
        """Look what is there; posts DiskFound."""
        if self._is_on:
            self._post(
                self._writer, lambda: DiskFound([_entry(file) for file in self._folder.open()]), _not_opened
            )

    def forget_stale(self, source: str, model: str) -> None:
        """A model was loaded: files of what its path held before are removed; posts DiskLost."""
        if self._is_on:
            self._post(
                self._writer, lambda: DiskLost(self._folder.remove_stale(source, model)), _nothing_lost
            )

    def carry_out(self, orders: Iterable[DiskOrder]) -> None:
        """Do what was ordered, one after the other; posts DiskWritten and DiskRead."""
        for order in orders:
            match order:
                case Write(entry):
                    self._write(entry)
                case Read(entry):
                    self._read(entry)
                case Remove(file):
                    self._post(self._writer, lambda file=file: self._remove(file), _nothing_lost)  # type: ignore[misc]

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def _write(self, entry: Entry) -> None:
        data = entry.data
        assert data is not None, f"{entry!r} has no bytes to write"
        new = NewPrefix(
            namespace=entry.namespace,
            model=entry.model,
            source=entry.source,
            tokens=entry.key,
            is_background=entry.is_background,
            is_exact=entry.is_exact,
        )

        def failed(error: StokerError) -> Posted:
            is_its_own = isinstance(error, CacheFileError)
            return DiskWritten(entry, problem="" if is_its_own else error.message)

        def write() -> Posted:
            written = self._folder.write(new, data)
            return DiskWritten(entry, written.file.name, written.file.size_bytes, removed=written.removed)

        self._post(self._writer, write, failed)

    def _read(self, entry: Entry) -> None:
        file, namespace, key = entry.file, entry.namespace, entry.key
        assert file is not None, f"{entry!r} has no file to read"

        def failed(error: StokerError) -> Posted:
            return DiskRead(entry, None, error.message)

        self._post(self._reader, lambda: DiskRead(entry, self._folder.read(file, namespace, key)), failed)

    def _remove(self, file: str) -> DiskLost:
        self._folder.remove(file)
        return DiskLost([])

    def _post(
        self, pool: ThreadPoolExecutor, work: Callable[[], Posted], failed: Callable[[StokerError], Posted]
    ) -> None:
        def run() -> None:
            try:
                self._inbox.put(work())
            except StokerError as error:
                self._inbox.put(failed(error))
            except Exception as error:  # noqa: BLE001 - a bug here must cost the disk tier, not the loop
                self._inbox.put(failed(EngineError(f"{type(error).__name__}: {error}")))

        pool.submit(run)


def _entry(file: PrefixFile) -> Entry:
    return Entry(
        namespace=file.namespace,
        model=file.model,
        source=file.source,
        key=file.tokens,
        size_bytes=file.payload_bytes,
        file=file.name,
        file_bytes=file.size_bytes,
        is_exact=file.is_exact,
        is_background=file.is_background,
        used_s=time.monotonic() - max(0.0, time.time() - file.used_s),
    )


def _not_opened(error: StokerError) -> DiskFound:
    return DiskFound([], error.message)


def _nothing_lost(error: StokerError) -> DiskLost:
    log.warning("%s", error)
    return DiskLost([])
