"""Reads the documents of conversations: in processes that can be ended, and each of them once.

Owns the processes, the texts that were read, and the bounds of a request's documents together. What a part
may be is `stoker.documents`'.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from stoker.client.worker.jobs import DocumentPages, ReadDocument
from stoker.client.worker.pool import Bounds, WorkerPool
from stoker.documents.document import Document
from stoker.documents.formats import is_pdf, text_of
from stoker.documents.limits import DEFAULT_LIMITS, DocumentLimits
from stoker.documents.turns import GivenDocument, Messages, documents_in, has_documents, with_texts
from stoker.errors import InvalidRequestError, NotReadyError, StokerError, error_from_info
from stoker.images.sources import read_reference

T = TypeVar("T")

_THREADS = 4  # addresses are fetched in them too
_NUM_PLACES, _PLACES_OF_ONE = 3, 2
MAX_READ_BYTES = 384 * 2**20
"""Memory that the reading of one document may take."""
MAX_WAITING = 16
"""Documents of one caller that wait for a process."""
_IDLE_S = 60.0
MAX_KEPT_CHARS = 4 * 2**20
"""Of texts that were read, for the next turns of their conversations."""


@dataclass(frozen=True, slots=True)
class _File:
    """A document's content. `text` is that of one that is text; None: it is a PDF."""

    data: bytes
    digest: bytes
    text: str | None


class DocumentReader:
    """Puts texts in the place of documents.

    Args:
        limits: what the documents of one request may cost.
    """

    def __init__(self, limits: DocumentLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(_THREADS, "stoker-documents")
        self._pool = self._new_pool(limits)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], list[str]] = OrderedDict()
        self._num_kept_chars = 0

    def __repr__(self) -> str:
        return f"DocumentReader({self.stats()})"

    @property
    def limits(self) -> DocumentLimits:
        """What the documents of one request may cost."""
        return self._limits

    def stats(self) -> dict[str, int]:
        """Texts that are kept, their characters, and what its processes do."""
        with self._lock:
            return {"texts": len(self._kept), "chars": self._num_kept_chars, **self._pool.stats()}

    async def read(self, messages: Messages, owner: str = "") -> Messages:
        """The conversation with a text in the place of each document; itself where it has none.

        One after the other: a caller with many of them does not take the places of those with one. Where the
        caller is cancelled, the reading is ended.

        Args:
            messages: with parts as `stoker.documents.turns` knows them.
            owner: digest of the caller's API key: one's documents do not delay another's, and what was read
                for one is not known to another.

        Raises:
            InvalidRequestError: a part is malformed, or a document is damaged, encrypted, empty, or over a
                bound; `param` names it.
            UnsupportedError: it is of a kind that is not read.
            WorkLimitError: reading it takes too long or too much memory.
            MachineError: too many wait, or no process can be started.
        """
        if isinstance(messages, str) or not has_documents(messages):
            return messages
        left = self._limits.max_chars
        texts: dict[str, str] = {}
        for given in documents_in(messages):
            file = await self._in_thread(partial(_content, given, self._limits))
            pages = file.text if file.text is not None else await self._pages(given, file, owner, left)
            left -= len(pages) if isinstance(pages, str) else sum(map(len, pages))
            if left < 0:
                most = self._limits.max_chars
                text = f"{given.label}: the documents have {most - left} characters, {most} are taken"
                raise InvalidRequestError(f"{text} in one request", param=given.param)
            texts[given.where] = given.shown(pages)
        return with_texts(messages, texts)

    def read_now(self, messages: Messages) -> Messages:
        """As `read`, for callers without an event loop; blocks."""
        if not has_documents(messages):
            return messages
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
            return thread.submit(lambda: asyncio.run(self.read(messages))).result()

    def release(self) -> None:
        """End the processes that have nothing to do, and forget the texts."""
        with self._lock:
            self._kept.clear()
            self._num_kept_chars = 0
        self._pool.release()

    def close(self) -> None:
        """End every process; what waits gets NotReadyError. Idempotent; blocks for some milliseconds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    @staticmethod
    def _new_pool(limits: DocumentLimits) -> WorkerPool:
        return WorkerPool(
            Bounds(
                limit_s=limits.max_s,
                max_bytes=MAX_READ_BYTES,
                num_places=_NUM_PLACES,
                max_of_group=_PLACES_OF_ONE,
                max_waiting=MAX_WAITING,
                idle_s=_IDLE_S,
            )
        )

    async def _pages(self, given: GivenDocument, file: _File, owner: str, max_chars: int) -> list[str]:
        """The pages of a PDF, which may have been read before."""
        key = (owner, file.digest)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        limits = self._limits
        job = ReadDocument(
            name=given.name,
            param=given.param,
            data=file.data,
            max_pages=limits.max_pages,
            max_chars=max_chars,
        )
        future = self._pool.submit(job, DocumentPages, group=owner)
        try:
            pages = (await asyncio.wrap_future(future)).pages
        except asyncio.CancelledError:
            self._pool.stop(future)
            raise
        self._keep(key, pages)
        return pages

    def _keep(self, key: tuple[str, bytes], pages: Sequence[str]) -> None:
        num_chars = sum(map(len, pages))
        with self._lock:
            if num_chars > MAX_KEPT_CHARS or key in self._kept:
                return
            self._kept[key] = list(pages)
            self._num_kept_chars += num_chars
            while self._num_kept_chars > MAX_KEPT_CHARS:
                _, oldest = self._kept.popitem(last=False)
                self._num_kept_chars -= sum(map(len, oldest))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError:  # it was shut down
            raise NotReadyError("no more documents are taken: the program is closing") from None


async def num_chars_of(document: Document) -> int:
    """How many characters a model would be shown of a document, which is read for it.

    Raises:
        StokerError: it cannot be read; the message names the file and no place in a request.
    """
    reader = DocumentReader()
    turn = {"role": "user", "content": [document]}
    try:
        read = await reader.read([turn])
    except StokerError as error:
        message = error.message.removeprefix(f"{error.param}: ")
        raise error_from_info(msgspec.structs.replace(error.info(), message=message)) from None
    finally:
        await asyncio.to_thread(reader.close)
    assert not isinstance(read, str), "a conversation stays one"
    return len(read[0]["content"][0]["text"])


def _content(given: GivenDocument, limits: DocumentLimits) -> _File:
    """The content of a document. Raises InvalidRequestError, UnsupportedError."""
    source = given.source
    if isinstance(source, Document):
        encoded = source.encoded(limits)
    else:
        encoded = read_reference(source, limits, given.param)
    data = encoded.data
    if len(data) > limits.max_bytes:
        text = f"{given.label} has over {limits.max_bytes} bytes, which are the most that are taken"
        raise InvalidRequestError(text, param=given.param)
    if is_pdf(data, given.label, given.param):
        return _File(data, hashlib.sha256(data).digest(), None)
    return _File(data, b"", text_of(data, encoded.declared, given.label, given.param))
