"""Keeps requests over a suspension and over the end of the program, until somebody takes what they deliver.

Owns the record of each live request (what its client was shown), the files of suspended ones, and those
that were taken up from a former program and have no client: they run, and what they deliver is kept until it
was attached to and read, or ENDED_KEPT_S after their end. The engine's side of a request is the host's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from stoker.client.requests.transcript import Transcript
from stoker.client.store.file import DamagedFile, KeptFile, KeptFolder
from stoker.client.store.kept import KeptRequest
from stoker.errors import InvalidRequestError, KeptRequestDamagedError, RequestNotFoundError
from stoker.ipc.events import Failed, Finished, RequestEvent
from stoker.ipc.request import GenerateRequest

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.ipc.commands import Submit

log = logging.getLogger(__name__)

ENDED_KEPT_S = 600.0
MAX_ENDED = 512
"""Ended requests without a client; past this the oldest goes."""

Sink = Callable[[RequestEvent], None]


class _Record:
    """One request: what it is known by, what was shown of it, and who is shown the rest."""

    __slots__ = ("ended_at_s", "has_client", "names", "owner", "request", "request_id", "sinks", "transcript")

    def __init__(self, request_id: str, request: GenerateRequest, names: Sequence[str], owner: str) -> None:
        self.request_id = request_id
        self.request = request
        self.names = list(names)
        self.owner = owner
        self.transcript = Transcript(request_id)
        self.sinks: list[Sink] = []
        self.has_client = True
        self.ended_at_s: float | None = None

    def is_known_as(self, name: str) -> bool:
        return name == self.request_id or name in self.names

    def shown(self) -> KeptRequest:
        return KeptRequest(
            id=self.request_id,
            names=self.names,
            is_chat=self.request.is_chat,
            model=self.request.model,
            n=self.request.n,
            note=self.request.note,
            owner=self.owner,
            state="ended" if self.transcript.is_ended else "running",
            num_tokens=self.transcript.num_tokens,
        )


class RequestStore:
    """Every request's record, and the files of those that are suspended.

    Args:
        folder: where the files lie.
        now: seconds on a monotonic clock.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = KeptFolder(folder)
        self._now = now
        self._records: dict[str, _Record] = {}
        self._is_closing = False

    def __repr__(self) -> str:
        return (
            f"<RequestStore of {len(self._records)}, {len(self.kept())} without a client, {self._folder!r}>"
        )

    def __len__(self) -> int:
        return len(self._records)

    # ------------------------------------------------------------ requests with a client

    def open(
        self, request_id: str, request: GenerateRequest, names: Sequence[str], owner: str, sink: Sink
    ) -> Sink:
        """Record a new request; returns the sink that the host is to have in place of `sink`.

        Raises:
            InvalidRequestError: a live or kept request has that id.
        """
        if request_id in self._records:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        record = self._records[request_id] = _Record(request_id, request, names, owner)
        record.sinks.append(sink)
        return lambda event: self._take(record, event)

    def owner_of(self, request_id: str) -> str:
        """Digest of the API key that a recorded request came with; empty: none, or it is not recorded."""
        record = self._records.get(request_id)
        return record.owner if record else ""

    def discard(self, request_id: str) -> None:
        """The host has refused it."""
        self._records.pop(request_id, None)

    def _take(self, record: _Record, event: RequestEvent) -> None:
        if not record.transcript.take(event):
            return
        if isinstance(event, Finished | Failed):
            if record.has_client:
                self._forget(record)
            else:
                self._ended(record)
        for sink in list(record.sinks):
            sink(event)

    def _forget(self, record: _Record) -> None:
        self._records.pop(record.request_id, None)
        if not self._is_closing:
            self._folder.remove(record.request_id)

    # ------------------------------------------------------------ requests without a client

    def kept(self) -> list[KeptRequest]:
        """Every request that has no client of its own, the oldest first."""
        self._expire()
        return [record.shown() for record in self._records.values() if not record.has_client]

    def attach(self, name: str, owner: str, sink: Sink) -> str:
        """Show `sink` everything of a kept request, from its beginning; returns its id.

        Args:
            name: its id, or what else it is known by.
            owner: digest of the caller's API key.
            sink: called with what there is now, merged, and then with what comes; last the terminal event.

        Raises:
            RequestNotFoundError: there is none of that name, or it is somebody else's.
        """
        self._expire()
        for record in self._records.values():
            if record.is_known_as(name) and not record.has_client and record.owner == owner:
                for event in record.transcript.shown():
                    sink(event)
                record.sinks.append(sink)
                return record.request_id
        raise RequestNotFoundError(f"no request without a client is known as {name!r}", param="request_id")

    def detach(self, request_id: str, sink: Sink, *, has_read_all: bool) -> None:
        """Somebody who was attached leaves; what was read to its end need not be kept any more."""
        record = self._records.get(request_id)
        if record is None or sink not in record.sinks:
            return
        record.sinks.remove(sink)
        if has_read_all:
            self._forget(record)

    def _ended(self, record: _Record) -> None:
        record.ended_at_s = self._now()
        ended = [one for one in self._records.values() if one.ended_at_s is not None]
        for oldest in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._forget(oldest)

    def _expire(self) -> None:
        for record in list(self._records.values()):
            if record.ended_at_s is None or record.sinks:
                continue
            if self._now() - record.ended_at_s > ENDED_KEPT_S:
                self._forget(record)

    # ------------------------------------------------------------ suspension

    async def keep(self, requests: list[Submit]) -> None:
        """Write all of these down."""
        files = [kept for submit in requests if (kept := self._file(submit)) is not None]
        await _in_thread(lambda: self._write(files))
        for kept in files:  # ended while it was written
            if kept.submit.request_id not in self._records:
                self._folder.remove(kept.submit.request_id)

    def _file(self, submit: Submit) -> KeptFile | None:
        record = self._records.get(submit.request_id)
        if record is None:
            return None
        return KeptFile(
            submit=submit, shown=record.transcript.shown(), names=record.names, owner=record.owner
        )

    def _write(self, files: list[KeptFile]) -> None:
        for number, kept in enumerate(files):
            try:
                self._folder.write(kept)
            except OSError as error:
                log.warning(
                    "%d of %d suspended requests are not written and lost if this program ends: %s",
                    len(files) - number,
                    len(files),
                    error,
                )
                return

    async def release(self) -> None:
        """The engine comes back: what has a client here needs no file."""
        ids = [record.request_id for record in self._records.values() if record.has_client]
        await _in_thread(lambda: self._remove(ids))

    def _remove(self, ids: list[str]) -> None:
        for request_id in ids:
            self._folder.remove(request_id)

    async def take_up(self, models: Container[str]) -> list[tuple[Submit, Sink]]:
        """What a former program has left for these models, each with the sink for the host."""
        files = await asyncio.to_thread(lambda: list(self._folder.take(models)))
        for damaged in files:
            if isinstance(damaged, DamagedFile):
                self._note_damaged(damaged)
        return [self._take_up(kept) for kept in files if isinstance(kept, KeptFile)]

    def _note_damaged(self, damaged: DamagedFile) -> None:
        """Keep an end for it, so that a client that attaches gets the error."""
        label = damaged.label
        request = GenerateRequest(prompt="", model=label.model, n=label.n, is_chat=label.is_chat)
        record = _Record(label.id, request, label.names, label.owner)
        text = f"what was kept of request {label.id} is damaged, it does not go on: {damaged.reason}"
        record.transcript.take(Failed(label.id, KeptRequestDamagedError(text).info()))
        record.has_client = False
        self._records[label.id] = record
        self._ended(record)

    def _take_up(self, kept: KeptFile) -> tuple[Submit, Sink]:
        record = _Record(kept.submit.request_id, kept.submit.request, kept.names, kept.owner)
        record.transcript = Transcript(record.request_id, kept.shown)
        record.has_client = False
        self._records[record.request_id] = record
        return kept.submit, lambda event: self._take(record, event)

    def begin_closing(self) -> None:
        """The program ends: whatever ends from here on leaves its file where it is."""
        self._is_closing = True

    def close(self) -> None:
        """Leave what is kept to the next program."""
        self._folder.close()
        self._records.clear()


async def _in_thread(work: Callable[[], None]) -> None:
    """Run what reads or writes files beside the event loop, or on it where no thread can be started."""
    try:
        await asyncio.to_thread(work)
    except RuntimeError as error:
        log.warning("no thread for the files of suspended requests: %s", error)
        work()
