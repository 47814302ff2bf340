"""Every request and group of this program by its id, and what of them outlives the program.

Owns the records: of live requests, and of those that were taken up from a former program and have no client.
These run, and what they deliver is kept until it was attached to and read, or ENDED_KEPT_S after their end.
Owns also when the files of suspended requests are written and removed; what is in them is `store.file`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.client.requests.record import EventSink, RequestRecord
from stoker.client.store.file import DamagedFile, KeptFile, KeptFolder, KeptRequest
from stoker.errors import InvalidRequestError, KeptRequestDamagedError, RequestNotFoundError
from stoker.ipc.events import Failed, Finished, RequestEvent
from stoker.ipc.request import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from pathlib import Path

    from stoker.client.requests.group import RequestGroup
    from stoker.ipc.status import GroupStatus

log = logging.getLogger(__name__)

ENDED_KEPT_S = 600.0
MAX_ENDED = 512
"""Ended requests without a client; past this the oldest goes."""


class RequestTable:
    """The records, and the files of suspended requests.

    Args:
        folder: where the files lie; None: none are written.
        now: seconds on a monotonic clock.

    Attributes:
        groups: calls of several requests that have not ended, by their ids, the oldest first.
    """

    def __init__(self, folder: Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.groups: dict[str, RequestGroup] = {}
        self._files = KeptFolder(folder) if folder else None
        self._now = now
        self._records: dict[str, RequestRecord] = {}
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<RequestTable of {len(self._records)}, {len(self.kept())} without a client, {self._files!r}>"

    def __len__(self) -> int:
        return len(self._records)

    # ------------------------------------------------------------ requests and groups

    def check_free(self, request_id: str) -> None:
        """Raises InvalidRequestError where a request or a group has that id."""
        if request_id in self._records or request_id in self.groups:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")

    def add(self, record: RequestRecord) -> None:
        """Another request. Raises InvalidRequestError where its id is in use."""
        self.check_free(record.request_id)
        self._records[record.request_id] = record
        if record.group is not None:
            record.group.members[record.request_id] = record

    @contextmanager
    def grouped(self, group: RequestGroup) -> Iterator[None]:
        """Know a group while the block runs. Raises InvalidRequestError where its id is in use."""
        self.check_free(group.id)
        self.groups[group.id] = group
        try:
            yield
        finally:
            del self.groups[group.id]

    def live(self) -> Iterator[RequestRecord]:
        """Those that have not ended, in order of submission."""
        return (record for record in list(self._records.values()) if not record.is_ended)

    def find(self, request_id: str) -> RequestRecord | None:
        """The live request of that id."""
        record = self._records.get(request_id)
        return None if record is None or record.is_ended else record

    def record(self, request_id: str) -> RequestRecord | None:
        """The request of that id, also one that has just ended or is kept."""
        return self._records.get(request_id)

    def owner_of(self, request_id: str) -> str:
        """Digest of the API key that a request or a group came with; empty: none, or there is no such one."""
        found = self._records.get(request_id) or self.groups.get(request_id)
        return found.owner if found else ""

    def deliver(self, event: RequestEvent) -> RequestRecord | None:
        """Give an event to its request's sinks; after the terminal one the request is forgotten, or kept.

        Returns:
            The request, if it is there.
        """
        record = self._records.get(event.request_id)
        if record is None:
            return None
        if isinstance(event, Finished | Failed):
            if record.group is not None:
                record.group.ended(record.request_id, event if isinstance(event, Finished) else None)
            if record.has_client:
                self._forget(record)
            else:
                self._keep_ended(record)
        for sink in list(record.sinks):
            sink(event)
        return record

    def _forget(self, record: RequestRecord) -> None:
        self._records.pop(record.request_id, None)
        if self._files and record.has_file and not self._is_closing:
            self._files.remove(record.request_id)

    def with_client(self) -> list[KeptRequest | GroupStatus]:
        """Live requests that have a client, then groups; those of a group are not listed beside it."""
        alone = [one.kept() for one in self.live() if one.has_client and one.group is None]
        return [*alone, *(group.status() for group in self.groups.values())]

    # ------------------------------------------------------------ requests without a client

    def kept(self) -> list[KeptRequest]:
        """Every request that has no client of its own, the oldest first."""
        self._expire()
        return [record.kept() for record in self._records.values() if not record.has_client]

    def attach(self, name: str, owner: str, sink: EventSink) -> str:
        """Show `sink` everything of a kept request, from its beginning; returns its id.

        Args:
            name: its id, or what else it is known by.
            owner: digest of the caller's API key.
            sink: called with what there is now, merged, and then with what comes; last the terminal event.

        Raises:
            RequestNotFoundError: there is none of that name, or it is another owner's.
        """
        self._expire()
        for record in self._records.values():
            if record.is_known_as(name) and not record.has_client and record.owner == owner:
                for event in record.shown():
                    sink(event)
                record.sinks.append(sink)
                return record.request_id
        raise RequestNotFoundError(f"no request without a client is known as {name!r}", param="request_id")

    def detach(self, request_id: str, sink: EventSink, *, has_read_all: bool) -> None:
        """An attached reader leaves; what was read to its end is kept no longer."""
        record = self._records.get(request_id)
        if record is None or sink not in record.sinks:
            return
        record.sinks.remove(sink)
        if has_read_all:
            self._forget(record)

    def _keep_ended(self, record: RequestRecord) -> None:
        record.ended_s = self._now()
        ended = [one for one in self._records.values() if one.ended_s is not None]
        for oldest in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._forget(oldest)

    def _expire(self) -> None:
        for record in list(self._records.values()):
            if record.ended_s is None or record.sinks:
                continue
            if self._now() - record.ended_s > ENDED_KEPT_S:
                self._forget(record)

    # ------------------------------------------------------------ suspension

    async def keep(self) -> None:
        """The engine is suspended: write every live request down. Does not raise."""
        if (files := self._files) is None:
            return
        kept = []
        for record in self.live():
            # Of a group only its caller could read it; one that is not ready has delivered nothing.
            if record.group is not None or not record.is_ready:
                continue
            record.has_file = True
            kept.append(record.file(self._now()))
        await _in_thread(lambda: files.write_all(kept))
        for file in kept:
            if file.submit.request_id not in self._records:  # it ended while it was written
                files.remove(file.submit.request_id)

    async def release(self) -> None:
        """The engine comes back: what has a client here needs no file. Does not raise."""
        if (files := self._files) is None:
            return
        ids = [record.request_id for record in self._records.values() if record.has_client]
        await _in_thread(lambda: files.remove(*ids))

    async def take_up(self, models: Container[str]) -> list[RequestRecord]:
        """What a former program has left for these models; to be submitted."""
        if (files := self._files) is None:
            return []
        found = await asyncio.to_thread(lambda: list(files.take(models)))
        for damaged in found:
            if isinstance(damaged, DamagedFile):
                self._add_damaged(damaged)
        return [RequestRecord.taken_up(file, self._now()) for file in found if isinstance(file, KeptFile)]

    def _add_damaged(self, damaged: DamagedFile) -> None:
        """Keep an end for it, so that a client that attaches gets the error."""
        label = damaged.label
        request = GenerateRequest(prompt="", model=label.model, n=label.n, is_chat=label.is_chat)
        record = RequestRecord(label.id, request, self._now(), names=label.names, owner=label.owner)
        text = f"what was kept of request {label.id} is damaged, it does not go on: {damaged.reason}"
        record.failed(KeptRequestDamagedError(text).info())
        record.has_client = False
        self._records[label.id] = record
        self._keep_ended(record)

    def begin_closing(self) -> None:
        """The program ends: whatever ends from here on leaves its file where it is."""
        self._is_closing = True

    def close(self) -> None:
        """Leave what is kept to the next program."""
        if self._files:
            self._files.close()
        self._records.clear()


async def _in_thread(work: Callable[[], None]) -> None:
    """Run what reads or writes files beside the event loop, or on it where no thread can be started."""
    try:
        await asyncio.to_thread(work)
    except RuntimeError as error:
        log.warning("no thread for the files of suspended requests: %s", error)
        work()
