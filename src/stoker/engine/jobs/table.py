"""Every request of the engine, by id and by model, and what is done to any of them.

Owns each job from its arrival to its one terminal event (SPEC L6). Pause, resume, cancel, timeout, failure
and the way back to the pending ones are written here once for whatever holds the job. Used by the loop's
thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker.engine.jobs.job import Job
from stoker.errors import RequestTimeoutError
from stoker.ipc.events import Event, Failed, Parked, Paused, Resumed, Waiting
from stoker.ipc.request import FinishReason
from stoker.kv.sequence import ParkForm, SequenceState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from stoker.engine.jobs.job import JobQueue
    from stoker.engine.runners.runner import ModelRunner
    from stoker.errors import StokerError
    from stoker.kv.sequence import Sequence

PUBLISH_EVERY_S = 1.0
_NO_DEADLINE = float("inf")


class Place(NamedTuple):
    """A queued sequence, its position, and seconds until it runs (None: not known)."""

    sequence: Sequence
    position: int
    eta_s: float | None


def places(queue: JobQueue) -> list[Place]:
    """Every sequence of a queue with its place, next first."""
    sequences = list(queue.queue)
    etas_s = queue.etas_s() if sequences else []
    found = enumerate(zip(sequences, etas_s, strict=True))
    return [Place(sequence, position, eta_s) for position, (sequence, eta_s) in found]


class JobTable:
    """Requests between arrival and terminal event.

    Attributes:
        events: what has happened in the engine, for the loop to publish.
        num_changes: how often a request was entered, or has gone.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_changes = 0
        self._jobs: dict[str, Job] = {}
        self._pending: dict[str, dict[str, Job]] = {}
        self._placed: dict[str, dict[str, Job]] = {}
        self._published_s: dict[str, float] = {}
        self._expire_s = _NO_DEADLINE  # no deadline passes before

    def __repr__(self) -> str:
        return f"<JobTable {list(self._jobs.values())}>"

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __getitem__(self, request_id: str) -> Job:
        return self._jobs[request_id]

    # ------------------------------------------------------------ questions

    def get(self, request_id: str) -> Job | None:
        """The request of that id, None if it has ended."""
        return self._jobs.get(request_id)

    def speculates(self, request_id: str) -> bool:
        """Whether that request has not ended and may have its next tokens guessed."""
        job = self._jobs.get(request_id)
        return job is not None and job.request.speculate

    def pending(self, model: str) -> Collection[Job]:
        """The requests for that model that no runner holds, in order of arrival."""
        return self._pending.get(model, {}).values()

    def placed(self, model: str) -> Collection[Job]:
        """The requests that its runner holds, in the order it took them."""
        return self._placed.get(model, {}).values()

    def num_leases(self, model: str) -> int:
        """Requests that need the model in memory: placed ones that are not paused."""
        return sum(not job.is_paused for job in self.placed(model))

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs; paused ones are not counted."""
        return any(not job.is_paused for job in self._jobs.values())

    @property
    def num_present(self) -> int:
        """Requests that wait or run; paused ones are not counted."""
        return sum(not job.is_paused for job in self._jobs.values())

    def next_deadline_s(self) -> float | None:
        """When the first request passes its deadline."""
        return min((at for job in self._jobs.values() if (at := job.deadline_s) is not None), default=None)

    # ------------------------------------------------------------ coming

    def add(self, job: Job) -> None:
        """Enter a pending request."""
        self.num_changes += 1
        self._jobs[job.request_id] = job
        self._pending.setdefault(job.model, {})[job.request_id] = job
        if job.deadline_s is not None:
            self._expire_s = min(self._expire_s, job.deadline_s)

    def place(self, job: Job, queue: JobQueue, runner: ModelRunner, now: float) -> None:
        """Put a prepared request in `queue`; it takes the place of its pending record.

        One whose choices have all ended before, as a restart has it, ends at once.
        """
        self._forget(job.request_id)
        self.add(job)
        del self._pending[job.model][job.request_id]
        self._placed.setdefault(job.model, {})[job.request_id] = job
        job.queue, job.runner, job.is_paused = queue, runner, False
        if not job.choices:
            self.finish(job, now)
            return
        positions = [queue.enqueue(choice.sequence, now) for choice in job.choices.values()]
        self.events.append(job.placed_at(positions[0], queue.eta_s(positions[0]), now))

    def publish_positions(self, model: str, queues: Iterable[JobQueue], now: float) -> None:
        """Events for those whose place, or estimate, has changed, at most once a second (SPEC Q14)."""
        if now - self._published_s.get(model, 0.0) < PUBLISH_EVERY_S:
            return
        for queue in queues:
            for sequence, position, eta_s in places(queue):
                self._published_s[model] = now
                job = self._jobs[sequence.key.request_id]
                has_begun = sequence.state is not SequenceState.QUEUED or job.admitted_s is not None
                if not has_begun and sequence is job.leader and job.is_news(position, eta_s, now):
                    self.events.append(job.placed_at(position, eta_s, now))

    def publish_hindrances(self, hindered: Iterable[Sequence]) -> None:
        """Events for those that wait for another reason than was published."""
        for sequence in hindered:
            why = sequence.hindrance
            if why is not None:  # else it was admitted since
                self.events.append(
                    Waiting(
                        request_id=sequence.key.request_id,
                        index=sequence.key.index,
                        reason=why.reason,
                        by=why.by or None,
                        is_for_prefix=why.is_prefix,
                    )
                )

    # ------------------------------------------------------------ what callers want; unknown ids are ignored

    def _settled(self, request_id: str, now: float) -> Job | None:
        """The request, after what a step in flight has computed; that may have ended it."""
        job = self._jobs.get(request_id)
        if job is not None and job.runner is not None:
            job.runner.settle(now)
        return self._jobs.get(request_id)

    def pause(self, request_id: str, now: float) -> None:
        """Let a request stand still (SPEC Q17)."""
        job = self._settled(request_id, now)
        if job is None:
            return
        job.is_paused = True
        if job.queue is not None:
            for choice in job.choices.values():
                if choice.sequence.state is not SequenceState.PAUSED:
                    job.queue.pause(choice.sequence, now)
        if job.preparation is None:  # else the event comes where it enters the queue
            self.events.append(Paused(request_id))

    def resume(self, request_id: str, now: float) -> None:
        """Let a paused request go on."""
        job = self._settled(request_id, now)
        if job is None:
            return
        job.is_paused = False
        if job.queue is not None:
            for choice in job.choices.values():
                if choice.sequence.state is SequenceState.PAUSED:
                    job.queue.resume(choice.sequence, now)
        if job.preparation is None:
            self.events.append(Resumed(request_id))

    def cancel(self, request_id: str, now: float) -> None:
        """End every open choice of a request with `cancelled`."""
        job = self._settled(request_id, now)
        if job is None:
            return
        for index in job.open_choices:
            if job.queue is not None:
                job.queue.retire(job.choices[index].sequence, FinishReason.CANCELLED, now)
            self.events.append(job.ended(index, FinishReason.CANCELLED))
        self.finish(job, now)

    def cancel_all(self, now: float) -> None:
        """End every request with `cancelled`."""
        for request_id in tuple(self._jobs):
            self.cancel(request_id, now)

    def expire(self, now: float) -> None:
        """End every request that is past its deadline, wherever it is (SPEC Q6)."""
        if now < self._expire_s:
            return
        for request_id, job in tuple(self._jobs.items()):
            if job.deadline_s is not None and job.deadline_s <= now and self._settled(request_id, now):
                self.time_out(self._jobs[request_id], now)
        self._expire_s = min((at for job in self if (at := job.deadline_s) is not None), default=_NO_DEADLINE)

    def time_out(self, job: Job, now: float) -> None:
        """End a request whose time has passed."""
        text = f"the request took {now - job.arrival_s:.1f} s of its timeout_s {job.request.timeout_s}"
        if job.queue is None:
            how = "waiting" if job.preparation is None else "being tokenised"
            text = f"{text}, {how} for {job.model}"
        self.fail(job, RequestTimeoutError(text, param="timeout_s"), now)

    # ------------------------------------------------------------ going back

    def evacuate(self, model: str, reason: str, now: float) -> None:
        """Its runner has to go: every request on it is pending again, to go on from the tokens it has.

        What was computed of them stays in cells for `rest` to store. Running ones get `Parked` (SPEC M4, L5).
        """
        for job in tuple(self.placed(model)):
            if (settled := self._settled(job.request_id, now)) is not None:
                self._send_back(settled, reason, now)

    def evacuate_waiting(self, model: str, reason: str, now: float) -> None:
        """The same for requests of which nothing runs."""
        for job in tuple(self.placed(model)):
            settled = self._settled(job.request_id, now)
            if settled is not None and not settled.is_running:
                self._send_back(settled, reason, now)

    def _send_back(self, job: Job, reason: str, now: float) -> None:
        submit = job.resubmit(now)
        for index, choice in job.choices.items():
            if choice.sequence.is_running:
                parked = Parked(request_id=job.request_id, index=index, form=ParkForm.TOKENS, reason=reason)
                self.events.append(parked)
            if job.queue is not None:
                job.queue.retire(choice.sequence, FinishReason.PREEMPTED, now)
        job.close()
        self._forget(job.request_id)
        self.add(Job(submit, job.arrival_s))

    def drop_all(self, now: float) -> None:
        """Forget every request without an event: the client keeps them for the next engine (SPEC L2)."""
        num_events = len(self.events)
        for model in tuple(self._placed):
            self.evacuate(model, "suspended", now)
        del self.events[num_events:]
        for job in self:
            job.close()
            self._forget(job.request_id)

    # ------------------------------------------------------------ endings

    def end_choice(self, job: Job, index: int, reason: FinishReason, now: float) -> None:
        """A choice ends without a further token, and with the last of them its request."""
        if job.queue is not None:
            job.queue.retire(job.choices[index].sequence, reason, now)
        self.events.append(job.ended(index, reason))
        self.finish_if_done(job, now)

    def finish_if_done(self, job: Job, now: float) -> None:
        """End a request of which no choice runs any more."""
        if not job.choices:
            self.finish(job, now)

    def finish(self, job: Job, now: float) -> None:
        """The terminal event of a request that has all it asked for, or was cancelled."""
        self._forget(job.request_id)
        job.close()
        self.events.append(job.finished(now))

    def fail(self, job: Job, error: StokerError, now: float) -> None:
        """The request's terminal event is an error; its open choices end with it."""
        self._forget(job.request_id)
        for choice in job.choices.values():
            if job.queue is not None and choice.sequence.state is not SequenceState.DONE:
                job.queue.retire(choice.sequence, FinishReason.ERROR, now)
        job.close()
        self.events.append(Failed(job.request_id, error.info()))

    def _forget(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        self.num_changes += 1
        if job is not None:
            self._pending.get(job.model, {}).pop(request_id, None)
            self._placed.get(job.model, {}).pop(request_id, None)
