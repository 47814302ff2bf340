"""Ways to choose a machine: that of `stoker.routing`, and what other gateways do.

All know at the same time which machines take new work; what they do with that is theirs.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from stoker.routing.hashing import Ring
from stoker.routing.load import closed
from stoker.routing.peers import Peers, RouteRequest
from stoker.routing.router import Router, RouterSettings

if TYPE_CHECKING:
    from bench.fleet_trace import Turn
    from stoker.routing.load import PeerState

MODEL = "model"


class Policy(Protocol):
    """Chooses machines, and is told what becomes of that."""

    def update(self, state: PeerState) -> None:
        """A machine has told how it is."""
        ...

    def choose(self, turn: Turn, now: float) -> str:
        """The machine that takes a request, which begins there."""
        ...

    def ended(self, turn: Turn, name: str) -> None:
        """It has ended there, or goes on elsewhere."""
        ...


class Routed:
    """That of Stoker: the same router as gate and door have.

    Args:
        settings: of the router; None: its own.
    """

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self._router = Router(settings)
        self._peers = Peers()

    def update(self, state: PeerState) -> None:
        """Of a machine."""
        self._peers.update(state)

    def choose(self, turn: Turn, now: float) -> str:
        """By its chain."""
        request = RouteRequest(
            model=MODEL,
            priority=turn.conversation.priority,
            chain=turn.chain,
            num_prompt_tokens=turn.num_prompt,
        )
        name = self._router.choose(request, self._peers, now).peer
        self._peers.began(request, name)
        return name

    def ended(self, turn: Turn, name: str) -> None:
        """Its class counts."""
        request = RouteRequest(model=MODEL, priority=turn.conversation.priority)
        self._peers.ended(request, name)


class _Plain:
    """What knows of machines that they are there."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.open: set[str] = set()

    def update(self, state: PeerState) -> None:
        """A machine takes new work, or no longer."""
        is_open = not closed(state)
        if is_open == (state.name in self.open):
            return
        if is_open:
            self.open.add(state.name)
            self.names.append(state.name)
        else:
            self.open.remove(state.name)
            self.names.remove(state.name)
        self.changed()

    def changed(self) -> None:
        """The list is another."""

    def ended(self, turn: Turn, name: str) -> None:
        """Nobody counts."""


class RoundRobin(_Plain):
    """One after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def choose(self, turn: Turn, now: float) -> str:  # noqa: ARG002 - as `Policy` has it
        """The next."""
        self._next = (self._next + 1) % len(self.names)
        return self.names[self._next]


class LeastLoaded(_Plain):
    """The one with the fewest requests, of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._load: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._num = 0

    def changed(self) -> None:
        """Look at all of them again."""
        self._heap = [(self._load.setdefault(name, 0), at, name) for at, name in enumerate(self.names)]
        heapify(self._heap)

    def choose(self, turn: Turn, now: float) -> str:  # noqa: ARG002 - as `Policy` has it
        """The least loaded; of equals the one that was longest without."""
        while True:
            load, _, name = heappop(self._heap)
            if load == self._load[name]:
                self._note(name, 1)
                return name

    def ended(self, turn: Turn, name: str) -> None:  # noqa: ARG002 - as `Policy` has it
        """One less."""
        self._note(name, -1)

    def _note(self, name: str, by: int) -> None:
        self._load[name] += by
        if name in self.open:
            self._num += 1
            heappush(self._heap, (self._load[name], self._num, name))


class SessionAffinity(_Plain):
    """The place on a ring of who asks, without a bound: sticky sessions."""

    def __init__(self) -> None:
        super().__init__()
        self._ring = Ring()

    def changed(self) -> None:
        """Machines have come or gone."""
        for name in set(self._ring) - self.open:
            self._ring.remove(name)
        for name in self.names:
            if name not in self._ring:
                self._ring.add(name, 8)

    def choose(self, turn: Turn, now: float) -> str:  # noqa: ARG002 - as `Policy` has it
        """By the number of the conversation."""
        key = turn.conversation.number * 0x9E3779B97F4A7C15 % 2**64
        return next(self._ring.places(key))


POLICIES = {
    "stoker": Routed,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session": SessionAffinity,
}
