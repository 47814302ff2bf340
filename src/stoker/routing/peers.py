"""The machines of a site as a door knows them: their last states, what was sent to each, where prefixes went.

A door counts what it sends and what ends, so that its figures are right between two states of a machine: the
load of a machine is what it told, and what this door began and ended since. Each model has a pool: the ring
of the machines that take new work for it, their slots and their load. Every change keeps it up to date, so
that nobody adds up a thousand machines for a request.
Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from stoker.ipc.request import Priority
from stoker.routing.hashing import Ring, name_key
from stoker.routing.load import PeerState, closed

MAX_REMEMBERED = 2**17
"""Beginnings of prompts of which it is known where they went: some 30 MB, and the oldest are forgotten."""
MAX_HOMES = 2
"""Machines that are remembered for one beginning."""


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is routed by.

    Attributes:
        model: its name, as machines tell it.
        priority: its class.
        chain: of `prefix_chain`; empty: it has no prompt that others could share.
        session: what its caller names a conversation by; empty: nothing.
        num_prompt_tokens: about how many it has; 0: not known.
    """

    model: str
    priority: Priority = Priority.INTERACTIVE
    chain: tuple[int, ...] = ()
    session: str = ""
    num_prompt_tokens: int = 0

    def homes_of(self) -> tuple[int, ...]:
        """Keys by which the machine that gets it is found again: its end, its first turn, its session.

        The first part alone is no key if more follow: it is that of everybody with this system prompt.
        """
        first_turn = self.chain[1:2]
        keys = first_turn if first_turn == self.chain[-1:] else (*self.chain[-1:], *first_turn)
        return (*keys, name_key(self.session)) if self.session else keys


class PeerPool:
    """The machines that take new work for one model.

    Attributes:
        ring: of these.
        num_slots: of all of them.
    """

    def __init__(self) -> None:
        self.ring = Ring()
        self.num_slots = 0
        self.loads = [0, 0]

    def __repr__(self) -> str:
        return f"<PeerPool of {len(self.ring)}, {self.num_slots} slots>"

    def load(self, priority: Priority) -> int:
        """Requests of a class, on all of them."""
        return self.loads[priority is Priority.BACKGROUND]


class _Peer:
    """One machine; figures by class, people's first.

    Attributes:
        state: the last that it told.
        live: requests of this door.
        loads: what it told and what changed here since, never less than what is known here.
        pools: those that it is in.
    """

    __slots__ = ("_ahead", "live", "loads", "pools", "state")

    def __init__(self, state: PeerState, live: list[int]) -> None:
        self.state = state
        self.live = live
        self.loads = [0, 0]
        self.pools: list[PeerPool] = []
        self._ahead = [0, 0]
        self.told(state)

    def told(self, state: PeerState) -> None:
        """It has told how it is."""
        self.state = state
        running, waiting = state.running, state.waiting
        told = (running.interactive + waiting.interactive, running.background + waiting.background)
        for rank in (0, 1):
            self._ahead[rank] = told[rank] - self.live[rank]
            self.weigh(rank)

    def count(self, rank: int, by: int) -> None:
        """This door has begun or ended a request of that class."""
        self.live[rank] += by
        assert self.live[rank] >= 0, f"{self.state.name} ended more requests than it began"
        self.weigh(rank)

    def weigh(self, rank: int) -> None:
        """Work out the load of a class, in the pools too."""
        live = self.live[rank]
        ahead = self._ahead[rank]
        load = live + ahead if ahead > 0 else live
        by = load - self.loads[rank]
        if by:
            self.loads[rank] = load
            for pool in self.pools:
                pool.loads[rank] += by


class Peers:
    """Every machine of the site by name.

    Args:
        max_remembered: beginnings of prompts whose machine is remembered.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._peers: dict[str, _Peer] = {}
        self._gone: dict[str, list[int]] = {}  # what is live on machines that are no part of the site now
        self._pools: dict[str, PeerPool] = {}
        self._available: dict[str, set[str]] = {}
        self._homes: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._max_remembered = max_remembered
        self.num_begun = 0

    def __repr__(self) -> str:
        return f"<Peers {len(self._peers)}, {len(self._pools)} models, {len(self._homes)} remembered>"

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[PeerState]:
        return (peer.state for peer in self._peers.values())

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    # ------------------------------------------------------------ what changes

    def update(self, state: PeerState) -> None:
        """A machine is new, or has told how it is now."""
        peer = self._peers.get(state.name)
        if peer is None:
            live = self._gone.pop(state.name, [0, 0])
            self._peers[state.name] = peer = _Peer(state, live)
            self._enter(peer)
            return
        before = peer.state
        is_same = before.num_slots == state.num_slots and before.models == state.models
        if not is_same or closed(before) != closed(state):
            self._leave(peer)
            peer.told(state)
            self._enter(peer)
            return
        peer.told(state)
        self._offer(before, state)

    def remove(self, name: str) -> None:
        """A machine is no part of the site any more."""
        peer = self._peers.pop(name)
        self._leave(peer)
        if any(peer.live):
            self._gone[name] = peer.live

    def began(self, request: RouteRequest, name: str) -> None:
        """This door has sent a request to that machine."""
        self.num_begun += 1
        self._peers[name].count(request.priority is Priority.BACKGROUND, 1)
        for key in request.homes_of():
            known = self._homes.get(key, ())
            if known[:1] != (name,):
                self._homes[key] = (name, *(home for home in known if home != name))[:MAX_HOMES]
            self._homes.move_to_end(key)
        while len(self._homes) > self._max_remembered:
            self._homes.popitem(last=False)

    def ended(self, request: RouteRequest, name: str) -> None:
        """A request that this door had sent to that machine has ended there, or gone on elsewhere."""
        rank = request.priority is Priority.BACKGROUND
        if name in self._peers:
            self._peers[name].count(rank, -1)
            return
        self._gone[name][rank] -= 1
        if not any(self._gone[name]):
            del self._gone[name]

    # ------------------------------------------------------------ what is asked

    def state(self, name: str) -> PeerState:
        """The last state of a machine."""
        return self._peers[name].state

    def live(self, name: str, priority: Priority) -> int:
        """Requests of a class that this door has on a machine."""
        return self._peers[name].live[priority is Priority.BACKGROUND]

    def load(self, name: str, priority: Priority) -> int:
        """Requests of a class on a machine."""
        return self._peers[name].loads[priority is Priority.BACKGROUND]

    def pool(self, model: str) -> PeerPool | None:
        """Machines with that model in memory that take new work; None: there are none."""
        return self._pools.get(model)

    def available(self, model: str) -> list[str]:
        """Names of machines that could load that model, sorted."""
        return sorted(self._available.get(model, ()))

    def homes(self, key: int) -> tuple[str, ...]:
        """Where a beginning went, the newest first."""
        return self._homes.get(key, ())

    # ------------------------------------------------------------ pools

    def _enter(self, peer: _Peer) -> None:
        self._offer(None, peer.state)
        if closed(peer.state):
            return
        for model in peer.state.models:
            pool = self._pools.setdefault(model, PeerPool())
            pool.ring.add(peer.state.name, peer.state.num_slots)
            pool.num_slots += peer.state.num_slots
            for rank in (0, 1):
                pool.loads[rank] += peer.loads[rank]
            peer.pools.append(pool)

    def _leave(self, peer: _Peer) -> None:
        self._offer(peer.state, None)
        if closed(peer.state):
            return
        peer.pools.clear()
        for model in peer.state.models:
            pool = self._pools[model]
            pool.ring.remove(peer.state.name)
            pool.num_slots -= peer.state.num_slots
            for rank in (0, 1):
                pool.loads[rank] -= peer.loads[rank]
            if not pool.ring:
                del self._pools[model]

    def _offer(self, before: PeerState | None, after: PeerState | None) -> None:
        """What a machine could load has changed."""
        old = before.available if before else {}
        new = after.available if after else {}
        if old is new or old == new:
            return
        name = (before or after).name  # type: ignore[union-attr]
        for model in old.keys() - new.keys():
            self._available[model].discard(name)
        for model in new.keys() - old.keys():
            self._available.setdefault(model, set()).add(name)
