"""One call of a caller that is several requests of the engine: texts to embed, documents to score.

Owns its id and how far it is. A cancel, a pause and a deadline hold for all of its requests, those still to
come included. The requests themselves are the table's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.client.requests.call_moves import CallMoves
from stoker.client.requests.meter import tokens_per_second
from stoker.client.requests.moves import LOADING, ShownState
from stoker.client.requests.record import RequestRecord, request_id_of
from stoker.errors import RequestCancelledError, RequestTimeoutError
from stoker.ipc.events import Finished
from stoker.ipc.request import FinishReason
from stoker.ipc.status import CallKind, GroupStatus, RequestStatus
from stoker.ipc.usage import Timings, Usage, total_usage

if TYPE_CHECKING:
    from stoker.client.requests.stream import StreamEvent
    from stoker.errors import ErrorInfo
    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import WaitStatus


_KNOWN_AS = ("request_id", "names", "owner", "route")


@dataclass(frozen=True, slots=True)
class KnownAs:
    """What a caller's group of requests is known by.

    Attributes:
        request_id: unique among live requests and groups; None: one is made up.
        names: what else it is known by.
        owner: digest of the API key that it came with; empty: none.
        route: path of the HTTP route that it came by, or "library".
    """

    request_id: str | None = None
    names: tuple[str, ...] = ()
    owner: str = ""
    route: str = "library"

    @classmethod
    def taken_from(cls, fields: dict[str, Any]) -> KnownAs:
        """What of it is among the keyword arguments of a call; taken out of them."""
        own = {name: fields.pop(name) for name in _KNOWN_AS if name in fields}
        return cls(**(own | {"names": tuple(own.get("names", ()))}))


Run = Callable[["RequestRecord"], AsyncGenerator["StreamEvent", None]]
"""Runs a request as one of a group."""


@dataclass(slots=True, eq=False, repr=False)
class RequestGroup:
    """The requests of one call.

    Attributes:
        kind: what the call computes.
        request: its first one; model, class and timeout of all are its.
        num_members: how many there will be.
        known_as: names and owner of the call.
        run: runs one of its requests.
        id: that of `known_as`, or one that is made up.
        members: those that are live, by id, in order of submission.
        is_paused, is_cancelled: what its caller wants of all of them.
        num_done: those that have ended with what they were for.
        moves: what it went through, as others are shown it.
        told_s: when subscribers were last told how far it is, on the clock of the meters.
    """

    kind: CallKind
    request: GenerateRequest
    num_members: int
    known_as: KnownAs
    run: Run
    id: str = field(init=False)
    members: dict[str, RequestRecord] = field(default_factory=dict)
    is_paused: bool = False
    is_cancelled: bool = False
    num_done: int = 0
    moves: CallMoves = field(init=False)
    told_s: float = 0.0
    _tag: str = field(default_factory=lambda: secrets.token_hex(3))  # an id may be used again at once
    _num_begun: int = 0
    _usage: Usage = field(default_factory=Usage)
    _timings: Timings | None = None
    _begun_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _stopped_s: float | None = None
    _arrived_at: float = field(default_factory=time.time)
    _first_token_s: float | None = None
    _num_parks: int = 0
    _parked_s: float = 0.0
    _waited_for: str = ""
    _num_restarts: int = 0

    def __post_init__(self) -> None:
        self.id = request_id_of(self.known_as.request_id)
        self.moves = CallMoves(self._arrived_at)

    @property
    def owner(self) -> str:
        """Digest of the API key that it came with; empty: none."""
        return self.known_as.owner

    def __repr__(self) -> str:
        return f"<RequestGroup {self.id} {self.kind} {self.num_done} of {self.num_members} done>"

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """The events of one more request of the group, which gets what is left of the group's time.

        Raises:
            RequestCancelledError: the group was cancelled before it began.
            RequestTimeoutError: the group's time is over.
            StokerError: it was refused or failed.
        """
        if self.is_cancelled:
            raise self.cancelled_error()
        request = self._with_time_left(request)
        request_id = f"{self.id}-{self._tag}-{self._num_begun}"
        self._num_begun += 1
        record = RequestRecord(
            request_id,
            request,
            time.monotonic(),
            names=(self.id, *self.known_as.names),
            owner=self.owner,
            group=self,
            route=self.known_as.route,
        )
        async with aclosing(self.run(record)) as events:
            async for event in events:
                yield event

    def _with_time_left(self, request: GenerateRequest) -> GenerateRequest:
        left_s = self._left_s()
        if left_s is None:
            return request
        if left_s <= 0:
            text = f"the requests of {self.id} took longer than their timeout_s {self.request.timeout_s}"
            raise RequestTimeoutError(text, param="timeout_s")
        return msgspec.structs.replace(request, timeout_s=left_s)

    def _left_s(self) -> float | None:
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else timeout_s - self._age_s()

    def _age_s(self) -> float:
        now = asyncio.get_running_loop().time() if self._stopped_s is None else self._stopped_s
        return now - self._begun_s

    def cancelled_error(self) -> RequestCancelledError:
        """What its call ends with once it was cancelled."""
        text = f"{self.id} was cancelled with {self.num_done} of {self.num_members} done"
        return RequestCancelledError(text)

    # ------------------------------------------------------------ what the table says

    def ended(self, request_id: str, end: Finished | None) -> None:
        """One of its requests has ended; None: it failed."""
        self.moves.member_ended(request_id)
        self._note(self.members.pop(request_id).status(time.monotonic()))
        if end is None or self.is_cancelled:
            return
        self.num_done += 1
        self._usage = total_usage([self._usage, end.usage])
        before, new = self._timings, end.timings
        self._timings = (
            new
            if before is None
            else Timings(
                queue_s=before.queue_s,
                prefill_s=before.prefill_s + new.prefill_s,
                decode_s=before.decode_s + new.decode_s,
                num_preemptions=before.num_preemptions + new.num_preemptions,
            )
        )

    def _note(self, ended: RequestStatus) -> None:
        """Add what a request of it went through."""
        self._num_parks += ended.num_parks
        self._parked_s += ended.parked_s
        self._waited_for = self._waited_for or ended.waited_for
        self._num_restarts = max(self._num_restarts, ended.num_restarts)
        if self._first_token_s is None and ended.first_token_s is not None:
            self._first_token_s = ended.arrived_at + ended.first_token_s - self._arrived_at

    def ended_as(self, end: FinishReason | ErrorInfo) -> RequestStatus:
        """What the call was and what it took, now that it has ended so."""
        reason = str(end) if isinstance(end, FinishReason) else end.code
        self.moves.all_move(ShownState.ENDED, self._arrived_at + self._age_s(), reason)
        return msgspec.structs.replace(
            self.request_status(),
            state="ended",
            waits_for="",
            finish_reason=end if isinstance(end, FinishReason) else None,
            error=None if isinstance(end, FinishReason) else end,
        )

    @property
    def _waits_for(self) -> str:
        """Why it does not compute, with how far the load of its model is."""
        why = self.moves.waits_for
        first = next(iter(self.members.values()), None)
        fraction = first.meter.load_fraction if first else 0.0
        return f"{why}, {fraction:.0%}" if why == LOADING and fraction else why

    def request_status(self) -> RequestStatus:
        """The call as a request: what it is and how far it has come."""
        timings = self._timings or Timings(queue_s=self._age_s())
        decode_s = 0.0 if self._first_token_s is None else timings.decode_s
        return RequestStatus(
            request_id=self.id,
            owner=self.owner,
            model=self.request.model,
            priority=self.request.priority,
            kind=self.kind,
            route=self.known_as.route,
            arrived_at=self._arrived_at,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            completion_tokens=self._usage.completion_tokens,
            max_tokens=self.request.max_tokens,
            queue_s=timings.queue_s,
            first_token_s=self._first_token_s,
            decode_s=decode_s,
            tokens_per_second=tokens_per_second(self._usage.completion_tokens, 1, decode_s - self._parked_s),
            num_parks=self._num_parks,
            parked_s=self._parked_s,
            waited_for=self._waited_for,
            state=str(self.moves.state),
            waits_for=self._waits_for,
            cache_source=self._usage.cache_source,
            end_to_end_s=self._age_s(),
            num_restarts=self._num_restarts,
            moves=self.moves.listed,
            num_moves=self.moves.num_moves,
            num_members=max(self.num_members, self.num_done + len(self.members)),
            num_done=self.num_done,
        )

    def stop(self) -> None:
        """The engine is suspended: its time stands still until `postpone`."""
        self._stopped_s = asyncio.get_running_loop().time()

    def postpone(self, slept_s: float) -> None:
        """The engine was suspended for so long: that time does not count."""
        self._stopped_s = None
        self._begun_s += min(slept_s, self._age_s())

    def status(self, queue: Iterable[WaitStatus] = ()) -> GroupStatus:
        """How far it is; `queue` is the engine's, which knows its place."""
        is_running = any(member.num_running for member in self.members.values())
        first = next((waiting for waiting in queue if waiting.request_id in self.members), None)
        if is_running or self.is_paused:
            first = None
        return GroupStatus(
            id=self.id,
            names=tuple(self.known_as.names),
            owner=self.owner,
            kind=self.kind,
            model=self.request.model,
            priority=self.request.priority,
            state="paused" if self.is_paused else "running" if is_running else "queued",
            num_members=max(self.num_members, self.num_done + len(self.members)),
            num_done=self.num_done,
            position=first.position if first else None,
            eta_s=first.eta_s if first else None,
            deadline_s=self._left_s(),
            age_s=self._age_s(),
            waits_for=self._waits_for,
            moves=self.moves.listed,
            usage=self._usage,
            timings=self._timings or Timings(),
        )
