"""The engine's inbox: commands from the client and posts from the workers, in order of arrival.

Any thread puts, only the loop takes. Unbounded on purpose: what arrives here is bounded at its source
(the client's requests by `max_queue`, the workers' posts by the commands that caused them).
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from threading import Event

from stoker.backends.protocol.backend import Backend
from stoker.backends.protocol.encoding import Encoder
from stoker.cache.store import StoreOutcome
from stoker.engine.jobs.job import Job
from stoker.engine.jobs.prepare import PrepContext
from stoker.engine.jobs.vocabulary import VocabularyDigests
from stoker.engine.moving import StateRead
from stoker.engine.threads.interrupt import Interrupt
from stoker.errors import StokerError
from stoker.ipc.commands import Command
from stoker.ipc.events import Reply
from stoker.ipc.model import ModelSpec
from stoker.machine.monitor import Sample
from stoker.models.memory_estimate.fit import Estimator


class Closed(Enum):
    """The client is gone."""

    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Worker's post: a request is tokenised and ready for the queue of the model it was tokenised for."""

    job: Job
    context: PrepContext


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    """Worker's post: a request cannot be run as asked."""

    request_id: str
    error: StokerError
    context: PrepContext


class Released(Enum):
    """Worker's post: a preparation that was given up has ended; its model, if unloaded, may be freed."""

    RELEASED = "released"


class LoadStop(Event):
    """One load, to compare posts by; set, it is to end."""


@dataclass(frozen=True, slots=True)
class Sized:
    """Worker's post: a model's file was looked at, and nothing loaded.

    Attributes:
        estimator: what it would take.
        fingerprint: of the file.
        spec: how it is to be loaded, with the ids of the devices that there are.
        missing: devices that were lost and are not used.
        held: devices that are left to other processes, by their ids who has each, for people.
    """

    load: LoadStop
    estimator: Estimator
    fingerprint: str
    spec: ModelSpec | None = None
    missing: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadMoved:
    """Worker's post: a load came to `fraction` of `stage`."""

    load: LoadStop
    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """Worker's post: the model at `path` is in memory.

    Attributes:
        vocabulary: what tells its tokens from those of others.
    """

    load: LoadStop
    path: str
    backend: Backend | Encoder
    vocabulary: VocabularyDigests


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Worker's post: a model could not be loaded, or its load was stopped."""

    load: LoadStop
    error: StokerError


@dataclass(frozen=True, slots=True)
class Measured:
    """Monitor's post: how memory and heat are; the newest counts."""

    sample: Sample


LoadPost = Sized | LoadMoved | Loaded | LoadFailed
Posted = StoreOutcome | LoadPost | Prepared | PrepareFailed | Released | Measured | Reply | StateRead
Item = Command | Posted | Closed


class Inbox(queue.SimpleQueue[Item]):
    """Thread-safe; closing it makes the loop end at once.

    Whoever puts what somebody waits for does so inside `interrupt.arrival()`, which ends a long step. Put
    without it is what the engine itself wants to know (`StoreOutcome`, `LoadMoved`, `Released`, `Measured`),
    and `GetStatus` and `Watch`: the client shows meanwhile what it knows.

    Attributes:
        interrupt: ends a long step at an arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self.interrupt = Interrupt()

    def close(self) -> None:
        """Tell the loop that the client is gone."""
        with self.interrupt.arrival():
            self.put(Closed.CLOSED)

    def take(self, wait_s: float | None) -> list[Item]:
        """Everything that has arrived; waits up to `wait_s` for the first (None: for ever, 0: not)."""
        items: list[Item] = []
        if wait_s != 0:
            with suppress(queue.Empty):
                items.append(self.get(timeout=wait_s))
        if self.interrupt.has_arrived:
            self.interrupt.looked()
        while not self.empty():  # the loop alone takes
            items.append(self.get_nowait())
        return items
