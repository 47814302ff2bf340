"""The disk tier's threads: they run the prefix cache's operations and post the outcomes (SPEC C9).

Owns the folder while the engine lives. It reads no state of the cache: an operation carries what it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.cache.disk.files import FOLDER_NAME, PrefixFolder
from stoker.cache.disk.prefix_file import NewPrefix, PrefixFile
from stoker.cache.disk.tier import (
    DiskFound,
    DiskLost,
    DiskOp,
    DiskOutcome,
    DiskRead,
    DiskWritten,
    Read,
    Remove,
    Write,
)
from stoker.cache.entry import Entry
from stoker.errors import CacheFileError, EngineError, StokerError

log = logging.getLogger(__name__)


class DiskThreads:
    """Prefix files in a folder below `cache_dir`, of at most `limit_bytes`; 0: none are read or written.

    `post` takes the outcomes, on the threads.
    """

    def __init__(self, post: Callable[[DiskOutcome], None], cache_dir: Path, limit_bytes: int) -> None:
        self._post = post
        self._folder = PrefixFolder(cache_dir / FOLDER_NAME, limit_bytes)
        self._is_on = limit_bytes > 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stoker-disk-writes")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="stoker-disk-reads")  # requests wait for it

    def __repr__(self) -> str:
        return f"<DiskThreads {self._folder!r}>"

    def open(self) -> None:
        """Scan the folder; posts DiskFound."""
        if self._is_on:
            self._submit(
                self._writer,
                lambda: DiskFound([_entry(file) for file in self._folder.open()]),
                lambda error: DiskFound([], error.message),
            )

    def remove_stale(self, source: str, model: str) -> None:
        """Remove the files of what the model at a path was before; posts DiskLost."""
        if self._is_on:
            self._submit(
                self._writer, lambda: DiskLost(self._folder.remove_stale(source, model)), _none_removed
            )

    def run(self, ops: Iterable[DiskOp]) -> None:
        """Run operations, one after the other; posts DiskWritten and DiskRead."""
        for op in ops:
            match op:
                case Write(entry):
                    self._write(entry)
                case Read(entry):
                    self._read(entry)
                case Remove(file):
                    self._submit(self._writer, lambda file=file: self._remove(file), _none_removed)  # type: ignore[misc]

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

        def write() -> DiskOutcome:
            written = self._folder.write(new, data)
            return DiskWritten(entry, written.file.name, written.file.size_bytes, removed=written.removed)

        def failed(error: StokerError) -> DiskOutcome:
            is_its_own = isinstance(error, CacheFileError)
            return DiskWritten(entry, problem="" if is_its_own else error.message)

        self._submit(self._writer, write, failed)

    def _read(self, entry: Entry) -> None:
        file, namespace, key = entry.file, entry.namespace, entry.key
        assert file is not None, f"{entry!r} has no file to read"
        self._submit(
            self._reader,
            lambda: DiskRead(entry, self._folder.read(file, namespace, key)),
            lambda error: DiskRead(entry, None, error.message, is_gone="is_gone" in error.details),
        )

    def _remove(self, file: str) -> DiskOutcome:
        self._folder.remove(file)
        return DiskLost([])

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[], DiskOutcome],
        failed: Callable[[StokerError], DiskOutcome],
    ) -> None:
        def run() -> None:
            try:
                self._post(work())
            except StokerError as error:
                self._post(failed(error))
            except Exception as error:  # noqa: BLE001 - a bug here must cost the disk tier, not the loop
                self._post(failed(EngineError(f"{type(error).__name__}: {error}")))

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


def _none_removed(error: StokerError) -> DiskOutcome:
    log.warning("%s", error)
    return DiskLost([])
