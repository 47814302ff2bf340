"""One request on its way over machines: what was delivered of it, and where it is.

A request goes on elsewhere from its tokens: the draw depends on its seed and the token's number alone, and a
machine that is given tokens replays sampler, stop strings and grammar over them (docs/adr/0005).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker.gate.prompts import chain_of, num_tokens_of
from stoker.ipc.commands import Submit
from stoker.ipc.events import (
    Admitted,
    Delta,
    Finished,
    Parked,
    Queued,
    RequestEvent,
)
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, Usage
from stoker.routing.peers import RouteRequest

if TYPE_CHECKING:
    from stoker.errors import StokerError
    from stoker.gate.link import PeerRun

MAX_CHARGES = 3
"""Machines that a request may lose before a token comes of it: the fourth is not given it."""
HOP = ".hop"
"""What parts a request's id from the number of the machine, where that is not the first: two of them may
have it at once for a moment."""


def own_id(request_id: str) -> str:
    """The gate's id of a request, by a machine's."""
    return request_id.rpartition(HOP)[0] or request_id


class Journey:
    """See the module.

    Args:
        submit: what was asked for, with what was delivered before it came here.
        now: on the clock of the event loop.

    Attributes:
        request_id: the gate's.
        request: what was asked for.
        route: what machines are chosen by.
        peer: the machine that has it; None: none.
        run: the request there.
        hop: how many machines it was given to.
        refusals: machines that it is not given to now, and what each said.
        charges: machines that were lost with it since its last token.
        was_accepted: a machine had it in its line: it is not refused any more.
        is_paused: its caller wants it to stand still.
        since: when it was submitted.
        waits_since: since when no machine has it.
        vocabulary: of the machine whose tokens it has.
        carried_at: the hop at which its state is on its way to another machine; 0: it is not.
        goes_to: the machine that has its state, and gets it next; empty: none.
    """

    def __init__(self, submit: Submit, now: float) -> None:
        request = submit.request
        self.request_id, self.request = submit.request_id, request
        self.route = RouteRequest(
            model=request.model,
            priority=request.priority,
            chain=chain_of(request),
            num_prompt_tokens=num_tokens_of(request),
        )
        self.peer: str | None = None
        self.run: PeerRun | None = None
        self.hop = 0
        self.refusals: dict[str, StokerError] = {}
        self.charges = 0
        self.was_accepted = bool(submit.generated)
        self.is_paused = submit.is_paused
        self.since, self.waits_since = now - submit.age_s, now
        self.vocabulary = submit.vocabulary_sample
        self.carried_at, self.goes_to = 0, ""
        self.has_begun_here = False
        self.cut: list[Delta] = []
        self._tokens = [list(tokens) for tokens in submit.generated] or [[] for _ in range(request.n)]
        self._finished = list(submit.is_finished) or [False] * request.n
        self._mu = list(submit.mirostat_mu) or [None] * request.n
        self._shown_wait = False
        self._prompt_tokens = 0

    def __repr__(self) -> str:
        return f"<Journey {self.request_id} hop {self.hop} at {self.peer}, {self.num_tokens} tokens>"

    # ------------------------------------------------------------ questions

    @property
    def num_tokens(self) -> int:
        """That were delivered, over all choices."""
        return sum(map(len, self._tokens))

    @property
    def num_known_tokens(self) -> int:
        """Of its prompt and of what was delivered; 0: it was not admitted yet."""
        return self._prompt_tokens + self.num_tokens if self._prompt_tokens else 0

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(self._finished)

    @property
    def peer_id(self) -> str:
        """Its id at the machine that has it."""
        return self.request_id if self.hop == 1 else f"{self.request_id}{HOP}{self.hop}"

    def left_s(self, now: float) -> float | None:
        """Seconds of its own deadline that are left; None: it has none."""
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else timeout_s - (now - self.since)

    def submit(self, now: float) -> Submit:
        """What the next machine is given."""
        has_tokens = self.num_tokens > 0
        return Submit(
            request_id=self.peer_id,
            request=self.request,
            generated=self._tokens if has_tokens else [],
            is_finished=self._finished if has_tokens else [],
            mirostat_mu=self._mu if has_tokens else [],
            age_s=max(0.0, now - self.since),
            is_paused=self.is_paused and has_tokens,
            vocabulary_sample=self.vocabulary if has_tokens else "",
            chain=self.route.chain,
        )

    # ------------------------------------------------------------ what happens

    def take(self, event: RequestEvent, slot_base: int, peer: str) -> RequestEvent:
        """Note an event of the machine that has it; returns it as the gate's own."""
        match event:
            case Delta():
                return self.take_delta(event)
            case Admitted(slot=slot, reason=reason):
                self._prompt_tokens = event.prompt_tokens
                slot = None if slot is None else slot + slot_base
                reason = f"{reason}, at {peer}" if reason else f"at {peer}"
                event = msgspec.structs.replace(event, slot=slot, reason=reason)
            case Parked(by=str(by), reason=reason):
                reason = reason.replace(by, own_id(by))
                event = msgspec.structs.replace(event, by=own_id(by), reason=reason)
        self.was_accepted = True
        if event.request_id != self.request_id:
            event = msgspec.structs.replace(event, request_id=self.request_id)
        return event

    def take_delta(self, delta: Delta) -> Delta:
        """As `take`, of what comes with every token."""
        index = delta.index
        if delta.token_ids:
            self._tokens[index] += delta.token_ids
            self._mu[index] = delta.mirostat_mu
            self.charges = 0
        if delta.finish_reason is not None:
            self._finished[index] = True
        self.was_accepted = True
        if delta.request_id != self.request_id:
            return msgspec.structs.replace(delta, request_id=self.request_id)
        return delta

    def parked(self, reason: str) -> list[RequestEvent]:
        """What its client is shown while no machine has it, once."""
        if self._shown_wait:
            return []
        self._shown_wait = True
        if not self.num_tokens:
            return [Queued(self.request_id, 0)]
        return [
            Parked(request_id=self.request_id, index=index, form="tokens", reason=reason)
            for index, is_over in enumerate(self._finished)
            if not is_over
        ]

    def gone_on(self) -> None:
        """A machine has it again."""
        self._shown_wait = False

    def cancelled(self) -> list[RequestEvent]:
        """Every open choice ends as cancelled, then the request."""
        ends: list[RequestEvent] = [
            Delta(request_id=self.request_id, index=index, finish_reason=FinishReason.CANCELLED)
            for index, is_over in enumerate(self._finished)
            if not is_over
        ]
        return [*ends, self.finished()]

    def finished(self) -> Finished:
        """The terminal event, where the machine did not live to send it."""
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self.num_tokens)
        return Finished(request_id=self.request_id, usage=usage, timings=Timings())
