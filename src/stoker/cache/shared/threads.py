"""The shared store's threads: they run the tier's operations and post the outcomes (SPEC C19).

A call of a store may never return, so each operation has a daemon thread of its own, which nothing joins; the
tier bounds how many there are. They read no state of the cache: an operation carries what it needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from stoker.cache.disk.prefix_file import NewPrefix
from stoker.cache.shared.files import SharedFiles
from stoker.cache.shared.names import Listed, StoredName, StoreLimits, superfluous
from stoker.cache.shared.tier import (
    Get,
    Got,
    Look,
    Looked,
    Put,
    PutEnded,
    SharedFile,
    SharedOp,
    SharedOutcome,
)
from stoker.errors import CacheFileError, StokerError

log = logging.getLogger(__name__)

MAX_FILES = 4096
"""Files of the models loaded here that are known, the newest: 4 bytes a token are kept of each."""
HEADS_S = 10.0
"""Time of a look for reading heads; those that are left come with the next one."""
_NO_THREAD = "this machine has no thread left for a call of the store"


class SharedThreads:
    """Runs operations on the store at `url`, which is kept within `limits`.

    `post` takes the outcomes, on the threads.
    """

    def __init__(self, post: Callable[[SharedOutcome], None], url: str, limits: StoreLimits) -> None:
        self._post = post
        self._files = SharedFiles(url)
        self._limits = limits
        self._heads: dict[StoredName, NewPrefix | None] = {}  # None: it is not to be believed
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SharedThreads {self._files!r}>"

    def run(self, ops: Iterable[SharedOp]) -> None:
        """Run operations, each on a thread; posts their outcomes."""
        for op in ops:
            match op:
                case Look(models):
                    self._start(lambda models=models: self._look(models), Looked(problem=_NO_THREAD))  # type: ignore[misc]
                case Put(entry):
                    self._start(lambda op=op: self._put(op), PutEnded(entry, None, problem=_NO_THREAD))  # type: ignore[misc]
                case Get(entry):
                    self._start(lambda op=op: self._get(op), Got(entry, None, reason=_NO_THREAD))  # type: ignore[misc]

    def close(self) -> None:
        """Post nothing any more; what runs is left alone."""
        self._is_closed = True

    def _start(self, work: Callable[[], SharedOutcome], failed: SharedOutcome) -> None:
        """Run `work` on a thread; where the system gives none, it has `failed`."""

        def run() -> None:
            outcome = work()
            if not self._is_closed:
                self._post(outcome)

        try:
            threading.Thread(target=run, name="stoker-shared-store", daemon=True).start()
        except RuntimeError:
            self._post(failed)

    def _look(self, models: dict[str, str]) -> Looked:
        try:
            return self._looked(models)
        except Exception as error:  # noqa: BLE001 - a bug here must cost the store, not the engine
            return Looked(problem=_reason(error))

    def _looked(self, models: dict[str, str]) -> Looked:
        listed, now_s = self._files.list(), time.time()
        going = superfluous(listed, now_s, self._limits)
        for name in going:
            self._files.remove(name)
        gone = set(going)
        staying = [file for file in listed if file.name not in gone]
        ours = [file.name for file in staying if file.is_whole and file.name.place in models]
        newest = sorted(ours, reverse=True)[:MAX_FILES]
        call_s = self._read_heads(newest, models)
        files = [
            SharedFile(name, new, max(0.0, now_s - name.written_s))
            for name in reversed(newest)
            if (new := self._heads.get(name)) is not None
        ]
        return Looked(tuple(files), len(staying), _sum_bytes(staying), len(going), call_s)

    def _read_heads(self, names: list[StoredName], models: dict[str, str]) -> float:
        """Read the heads that are not known; returns the mean seconds of one, 0 where none was read."""
        wanted = set(names)
        self._heads = {name: new for name, new in self._heads.items() if name in wanted}
        began_s = now_s = time.monotonic()
        count = 0
        for name in names:
            if name in self._heads:
                continue
            if now_s - began_s > HEADS_S:
                break
            try:
                self._heads[name] = self._files.head(name, models[name.place])
            except CacheFileError as error:
                log.info("%s", error.message)
                self._heads[name] = None
            count, now_s = count + 1, time.monotonic()
        return (now_s - began_s) / count if count else 0.0

    def _put(self, op: Put) -> PutEnded:
        entry, began_s = op.entry, time.monotonic()
        flags = {"is_background": entry.is_background, "is_exact": entry.is_exact}
        new = NewPrefix(entry.namespace, entry.model, "", entry.key, **flags)
        try:
            name = self._files.put(new, op.place, memoryview(op.data).cast("B"))
        except Exception as error:  # noqa: BLE001 - as above
            return PutEnded(entry, None, problem=_reason(error))
        return PutEnded(entry, name, time.monotonic() - began_s)

    def _get(self, op: Get) -> Got:
        entry, began_s = op.entry, time.monotonic()
        try:
            data = self._files.get(op.name, entry.namespace, entry.key)
        except CacheFileError as error:
            level = logging.INFO if "is_gone" in error.details else logging.WARNING
            log.log(level, "a shared prefix of %d tokens is lost: %s", entry.num_tokens, error.message)
            return Got(entry, None, reason=error.message, is_lost=True)
        except Exception as error:  # noqa: BLE001 - as above
            return Got(entry, None, reason=_reason(error))
        return Got(entry, data, op.name.size_bytes, time.monotonic() - began_s)


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"


def _sum_bytes(files: Iterable[Listed]) -> int:
    return sum(file.has_bytes for file in files)
