"""The live requests of one loaded model, by id, and the ways they end.

A choice that ends leaves the scheduler, a request whose last choice has ended is told so, and each request
gets exactly one terminal event (SPEC L6). What the events of a request say is `live`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.events import Event, Failed
from stoker.ipc.request import FinishReason
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.engine.jobs.job import Job
    from stoker.errors import StokerError
    from stoker.scheduler.scheduler import Scheduler


class JobTable:
    """Requests between arrival and terminal event.

    Args:
        scheduler: what their sequences leave when they end.

    Attributes:
        events: what has happened, for the loop to publish.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._requests: dict[str, Job] = {}

    def __repr__(self) -> str:
        return f"<JobTable {list(self._requests)}>"

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._requests.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Job:
        return self._requests[request_id]

    def get(self, request_id: str) -> Job | None:
        """The request of that id, None if it has ended."""
        return self._requests.get(request_id)

    def add(self, live: Job) -> None:
        """A request has arrived."""
        self._requests[live.request_id] = live

    def remove(self, live: Job) -> None:
        """It goes on elsewhere: no terminal event."""
        live.close()
        del self._requests[live.request_id]

    def end_choice(self, live: Job, index: int, reason: FinishReason, now: float) -> None:
        """A choice ends without a further token, and with the last of them its request."""
        self._scheduler.retire(live.choices[index].sequence, reason, now)
        self.events.append(live.ended(index, reason))
        self.finish_if_done(live, now)

    def finish_if_done(self, live: Job, now: float) -> None:
        """End a request of which no choice runs any more."""
        if not live.choices:
            self.finish(live, now)

    def finish(self, live: Job, now: float) -> None:
        """The terminal event of a request that has all it asked for."""
        del self._requests[live.request_id]
        self.events.append(live.finished(now))

    def fail(self, live: Job, error: StokerError, now: float) -> None:
        """The request's terminal event is an error; its other choices end with it."""
        del self._requests[live.request_id]
        for choice in live.choices.values():
            if choice.sequence.state is not SequenceState.DONE:
                self._scheduler.retire(choice.sequence, FinishReason.ERROR, now)
        live.close()
        self.events.append(Failed(live.request_id, error.info()))
