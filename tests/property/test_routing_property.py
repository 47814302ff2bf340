"""Routing over any history of a site (SPEC P)."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ModelNotFoundError, NoMachineError
from stoker.ipc.request import Priority
from stoker.routing.hashing import Ring, name_key
from stoker.routing.load import ByClass, PeerState, closed
from stoker.routing.peers import Peers, RouteRequest
from stoker.routing.router import Reason, Router, RouterSettings

KEYS = [name_key(f"key {number}") for number in range(2000)]


def owners(names, slots):
    """Whose each key is."""
    ring = Ring()
    for name in names:
        ring.add(name, slots[name])
    return [next(ring.places(key)) for key in KEYS]


@given(st.integers(2, 24), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_a_machine_that_comes_or_goes_moves_its_own_share_alone(num, num_slots, salt):
    """P2: no key changes between two machines that stay, and about one in so many moves."""
    names = [f"{salt}-{number}" for number in range(num)]
    slots = dict.fromkeys(names, num_slots)
    before, after = owners(names[1:], slots), owners(names, slots)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert all(new == names[0] for _, new in moved)
    share = 1 / num
    spread = math.sqrt(share / 64 + share / len(KEYS))  # of the points and of the sample
    assert len(moved) / len(KEYS) <= share * 1.1 + 4 * spread * math.sqrt(share)
    assert owners(sorted(names, reverse=True), slots) == after


STATES = st.fixed_dictionaries(
    {},
    optional={
        "is_up": st.booleans(),
        "is_draining": st.booleans(),
        "is_suspended": st.booleans(),
        "heat": st.sampled_from(["nominal", "critical"]),
        "num_slots": st.integers(1, 9),
        "models": st.sampled_from([frozenset(), frozenset("m"), frozenset("mn")]),
        "running": st.builds(ByClass, st.integers(0, 9), st.integers(0, 9)),
        "prefixes": st.frozensets(st.integers(0, 5), max_size=3),
    },
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("tell"), st.integers(0, 5), STATES),
        st.tuples(st.just("go"), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(
            st.just("ask"),
            st.sampled_from(Priority),
            st.lists(st.integers(0, 5), max_size=4),
            st.sampled_from(["", "s"]),
        ),
    ),
    max_size=60,
)


class Site:
    """A history of machines and requests, as it is told."""

    def __init__(self):
        self.peers = Peers(max_remembered=8)
        self.router = Router(RouterSettings())
        self.live = []
        self.choices = []

    def play(self, moves):
        """All of them; what was chosen or refused."""
        for move in moves:
            match move:
                case ("tell", number, fields):
                    self.peers.update(PeerState(name=f"m{number}", **{"models": frozenset("m"), **fields}))
                case ("go", number) if f"m{number}" in self.peers:
                    self.peers.remove(f"m{number}")
                case ("end", number) if self.live:
                    self.peers.ended(*self.live.pop(number % len(self.live)))
                case ("ask", priority, chain, session):
                    self.ask(RouteRequest(model="m", priority=priority, chain=tuple(chain), session=session))
            self.check_pools()
        return self.choices

    def ask(self, request):
        """Choose, hold the bounds and begin."""
        takers = [state for state in self.peers if not closed(state) and "m" in state.models]
        if not takers:
            with pytest.raises((NoMachineError, ModelNotFoundError)) as raised:
                self.router.choose(request, self.peers, 0.0)
            assert raised.value.details["machines"].keys() == {state.name for state in self.peers}
            self.choices.append(raised.value.message)
            return
        choice = self.router.choose(request, self.peers, 0.0)
        assert choice.peer in {state.name for state in takers}
        self.check_bound(request, choice, takers)
        self.choices.append(choice)
        self.peers.began(request, choice.peer)
        self.live.append((request, choice.peer))

    def check_bound(self, request, choice, takers):
        """A warm machine or a place is within its bound, so a cold one is never over the larger."""
        times = {Reason.WARM: 1.25, Reason.PLACE: 1.1, Reason.SPILLED: 1.1}.get(choice.reason)
        if times is None:
            return
        total = sum(self.peers.load(state.name, request.priority) for state in takers) + 1
        slots = sum(state.num_slots for state in takers)
        share = total * self.peers.state(choice.peer).num_slots / slots
        slots = self.peers.state(choice.peer).num_slots
        least = slots // 2 if choice.reason is Reason.WARM else 1
        assert self.peers.load(choice.peer, request.priority) + 1 <= max(least, math.ceil(times * share))
        assert self.peers.state(choice.peer).heat == "nominal"

    def check_pools(self):
        """What is kept up to date is what a count from scratch gives."""
        for model in "mn":
            takers = [state for state in self.peers if not closed(state) and model in state.models]
            pool = self.peers.pool(model)
            if not takers:
                assert pool is None
                continue
            assert set(pool.ring) == {state.name for state in takers}
            assert pool.num_slots == sum(state.num_slots for state in takers)
            for priority in Priority:
                assert pool.load(priority) == sum(self.peers.load(s.name, priority) for s in takers)


@given(MOVES)
@settings(max_examples=150, deadline=None)
def test_bounds_hold_refusals_name_every_machine_and_a_history_repeats(moves):
    """P2, P3, P5: over any history; the same one gives the same choices."""
    played = Site().play(moves)
    assert Site().play(moves) == played


def test_requests_with_nothing_in_common_are_spread_evenly():
    """P3: without a beginning the next is the least loaded of a few, and no machine is left out."""
    peers = Peers()
    for number in range(20):
        peers.update(PeerState(name=f"m{number}", models=frozenset("m"), num_slots=4))
    request, router = RouteRequest(model="m"), Router()
    chosen = Counter()
    for _ in range(400):
        peer = router.choose(request, peers, 0.0).peer
        peers.began(request, peer)
        chosen[peer] += 1
    assert max(chosen.values()) <= 1.25 * 20
    assert len(chosen) == 20
