"""Stored responses (SPEC W4): files of their owner alone, bounded in number, bytes and age.

Owns the format and the names. Who asks is part of a file's name, so what was made with another API key is not
there. One thread reads and writes, in the order of the calls: a response is there as soon as its client was
told of it. Several servers may use one folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stoker.private import make_folder, write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_PENDING = 64
"""Responses that may wait to be written; further ones are not stored: a disk that slow would fill memory."""
SPOOLED_BYTES = 64 * 1024
"""Of the items of a response that waits; larger ones lie on the disk meanwhile."""
_SUFFIX = ".response"
_MAGIC = b"STKRSP\x00\x01"
_MAX_ID_CHARS = 256

Item = dict[str, Any]
T = TypeVar("T")


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response and what it answers.

    Attributes:
        response: the object as its client has it.
        items: the whole input, earlier turns included, each with an id.
    """

    response: dict[str, Any]
    items: list[Item]

    @property
    def conversation(self) -> list[Item]:
        """The items that a next turn begins with."""
        return [*self.items, *self.response["output"]]


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """What is kept at most; the oldest go first. A count of 0 keeps nothing."""

    count: int
    size_bytes: int
    age_s: float


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode
_decode_items = msgspec.msgpack.Decoder(list[Item]).decode


class ItemSpool:
    """Items of a response that waits: they are on the disk where they are large, as pictures are.

    Args:
        folder: of the store; the file has no name in it, and is gone with this object.
        items: what is kept. It blocks while they are written.
    """

    def __init__(self, folder: Path, items: list[Item]) -> None:
        make_folder(folder)
        self._file = tempfile.SpooledTemporaryFile(SPOOLED_BYTES, dir=str(folder))  # noqa: SIM115 - as long as this
        weakref.finalize(self, self._file.close)  # where its response does not come
        self._file.write(_encode(items))

    def items(self) -> list[Item]:
        """What was kept; called once."""
        with self._file:
            self._file.seek(0)
            return _decode_items(self._file.read())


class ResponseStore:
    """The stored responses of a server.

    Args:
        folder: made when the first one is written.
        bounds: of what is in it.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, bounds: StoreBounds, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._bounds = bounds
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stoker-responses")
        self._places = threading.BoundedSemaphore(MAX_PENDING)

    def __repr__(self) -> str:
        return f"<ResponseStore {self._folder}, {self._bounds}>"

    def spooled(self, items: list[Item]) -> ItemSpool:
        """The items until their response has come. Blocks. Raises OSError where the folder is no good."""
        return ItemSpool(self._folder, items)

    @property
    def is_on(self) -> bool:
        """Whether anything is stored."""
        return self._bounds.count > 0

    def keep(self, owner: str, response: dict[str, Any], items: Callable[[], list[Item]]) -> None:
        """Store a response; where that fails a warning says so.

        Args:
            owner: digest of the API key that may read it; empty: it came without one.
            response: as its client has it; not to be changed any more.
            items: gives its input; called in the thread.
        """
        if not self._places.acquire(blocking=False):
            log.warning("a response is not stored: %d wait to be written already", MAX_PENDING)
            return
        self._thread.submit(self._write, self._path(owner, response["id"]), response, items)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of that id and owner; None: there is none, or it is too old."""
        return await self._run(self._read, self._path(owner, response_id))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False: there is none."""
        return await self._run(self._remove, self._path(owner, response_id))

    def close(self) -> None:
        """Write what is pending, and nothing after it. Idempotent."""
        self._thread.shutdown()

    async def _run(self, work: Callable[[Path], T], path: Path) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, path)

    def _path(self, owner: str, response_id: str) -> Path:
        """Of our making: ids come from outside."""
        text = response_id[:_MAX_ID_CHARS].encode("utf-8", "replace")
        name = hashlib.blake2b(text, key=owner.encode()[:64], digest_size=20, person=b"stoker-response")
        return self._folder / f"{name.hexdigest()}{_SUFFIX}"

    # ------------------------------------------------------------ in the thread

    def _write(self, path: Path, response: dict[str, Any], items: Callable[[], list[Item]]) -> None:
        try:
            data = _encode(StoredResponse(response=response, items=items()))
            if len(data) > self._bounds.size_bytes:
                log.warning("a response of %d bytes is over the bound of the store", len(data))
                return
            write_bytes(path, _MAGIC + hashlib.sha256(data).digest() + data)
            self._trim()
        except OSError as error:
            log.warning("a response is not stored: %s", error)
        except Exception:
            log.exception("a response is not stored")
        finally:
            self._places.release()

    def _read(self, path: Path) -> StoredResponse | None:
        try:
            data = path.read_bytes()
            is_old = path.stat().st_mtime < self._clock() - self._bounds.age_s
        except OSError:
            return None
        head, body = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
        if is_old or head != _MAGIC + hashlib.sha256(body).digest():
            self._remove(path)
            return None
        return _decode(body)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True

    def _trim(self) -> None:
        """Remove what is too old or over the bounds, the oldest first."""
        found = []
        for file in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another server has removed it
                stat = file.stat()
                found.append((stat.st_mtime, stat.st_size, file))
        found.sort(reverse=True)
        num_bytes, oldest = 0, self._clock() - self._bounds.age_s
        for index, (changed_s, size_bytes, file) in enumerate(found):
            num_bytes += size_bytes
            if index >= self._bounds.count or num_bytes > self._bounds.size_bytes or changed_s < oldest:
                self._remove(file)
