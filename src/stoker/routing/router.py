"""Which machine takes a request: the one that has its beginning, while its load is within a bound.

Bounded-load consistent hashing (Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads",
SODA 2018), with two bounds of the mean load a slot. What goes on from a beginning that a machine has stays
there up to the larger. What is new takes the next place on the ring of its beginning that is within the
smaller: a prefix that everybody uses fills the first of its own places, then the next of its own, and the
room between the bounds is kept for the conversations that others have there. While there are slots for all
whom it would wait for (a person for people, a job for everybody) it waits at none of these places for one, if
another has one free; nor does a job that goes on. Each class is bounded by its own load.

A request that waits is never refused here while a machine could hold it in its line: machines that are hot,
full or silent are the last resort, and an error is raised only where no machine may take it.
Pure: the same requests and states give the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from enum import StrEnum
from itertools import islice

import msgspec

from stoker.errors import ModelNotFoundError, NoMachineError, StokerError
from stoker.ipc.request import Priority
from stoker.routing.hashing import name_key
from stoker.routing.load import PeerLimits, PeerState, closed, reluctance
from stoker.routing.peers import PeerPool, Peers, RouteRequest

MAX_DEPTH = 8
"""Ends of a chain that are looked for: the last turns, and an edited one among them."""
NAMED_IN_MESSAGE = 8
RETRY_AFTER_S = 5.0
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiples of it are spread evenly over the ring (Knuth, TAOCP 3, 6.4)."""


class Reason(StrEnum):
    """Why a machine was chosen."""

    WARM = "warm"
    PLACE = "place"
    SPILLED = "spilled"
    LEAST_LOADED = "least_loaded"
    LAST_RESORT = "last_resort"
    LOADS = "loads"


class Route(msgspec.Struct, frozen=True):
    """A machine and why; `is_warm`: it is known to have a part of the prompt, beyond what many share."""

    peer: str
    reason: Reason
    is_warm: bool = False


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far load may be from even.

    Attributes:
        new_bound: times the mean load that a machine has at most to be given what is new.
        warm_bound: the same for what goes on from a beginning that it has.
        warm_slots: share of its slots up to which it takes what goes on, whatever the mean is.
        num_places: machines that are looked at for one beginning.
        limits: what makes a machine the last resort.
    """

    new_bound: float = 1.1
    warm_bound: float = 1.25
    warm_slots: float = 0.5
    num_places: int = 8
    limits: PeerLimits = PeerLimits()

    def __post_init__(self) -> None:
        if not 1.0 <= self.new_bound <= self.warm_bound:
            raise ValueError(
                f"new_bound is {self.new_bound}, warm_bound {self.warm_bound}: 1 <= new_bound <= warm_bound"
            )
        if self.warm_slots < 0 or self.num_places < 1:
            raise ValueError(
                f"warm_slots is {self.warm_slots}, num_places {self.num_places}: 0 and 1 at the least"
            )


class Router:
    """Chooses machines; it has no state but its settings."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()

    def __repr__(self) -> str:
        return f"<Router {self.settings}>"

    def choose(self, request: RouteRequest, peers: Peers, now: float, exclude: Container[str] = ()) -> Route:
        """The machine that is to take a request.

        Args:
            request: what it is routed by.
            peers: the machines of the site.
            now: on the clock of their states.
            exclude: names of machines that must not, as one that has just failed at it.

        Raises:
            ModelNotFoundError: every machine answers, and none has the model.
            NoMachineError: none may take it; details say of each why not.
        """
        if peers.pool(request.model) is not None:
            look = _Look(self.settings, request, peers, now, exclude)
            choice = look.warm() or look.placed() or look.least_loaded()
            if choice is not None:
                return choice
        choice = self._loads(request, peers, now, exclude)
        if choice is None:
            raise _refused(request, peers, exclude)
        return choice

    def _loads(
        self, request: RouteRequest, peers: Peers, now: float, exclude: Container[str]
    ) -> Route | None:
        """Where none has the model in memory: the one that it fits best, the same until that changes."""
        best: tuple[bool, float, str] | None = None
        for name in peers.available(request.model):
            state = peers.state(name)
            fit = state.available[request.model]
            if name in exclude or closed(state) or fit < 0:
                continue
            is_last = bool(reluctance(state, request, now, self.settings.limits))
            key = (is_last, -fit, name)
            best = key if best is None or key < best else best
        return None if best is None else Route(best[2], Reason.LOADS)


class _Look:
    """One request that is looked at: who may take it, in which order."""

    def __init__(
        self,
        settings: RouterSettings,
        request: RouteRequest,
        peers: Peers,
        now: float,
        exclude: Container[str],
    ) -> None:
        pool = peers.pool(request.model)
        assert pool is not None, f"no machine has {request.model} in memory"
        self._settings = settings
        self._request = request
        self._peers = peers
        self._pool = pool
        self._now = now
        self._exclude = exclude
        self._slot_load = (pool.load(request.priority) + 1) / pool.num_slots
        self._has_enough = _num_before(request, pool) < pool.num_slots
        self._places: list[str] | None = None

    # ------------------------------------------------------------ in order of preference

    def warm(self) -> Route | None:
        """A machine that has more of the prompt than others: where this door sent it, or one that says so."""
        keys = self._warm_keys()
        for key in (*keys, *self._request.chain[:1]):
            for name in self._peers.homes(key):
                if name in self._pool.ring and name not in self._exclude and self._takes_warm(name):
                    return Route(name, Reason.WARM, is_warm=True)
        places = self.places() if keys else []
        for key in keys:
            for name in places:
                if key in self._peers.state(name).prefixes and self._takes_warm(name):
                    return Route(name, Reason.WARM, is_warm=True)
        return None

    def placed(self) -> Route | None:
        """The first place on the ring of the beginning that is within the bound of what is new."""
        request, settings = self._request, self._settings
        if not request.chain and not request.session:
            return None
        for at, name in enumerate(self.places()):
            is_below = self._is_within(name, settings.new_bound) and not self._waits_in_vain(name)
            if is_below and not self._is_last_resort(name):
                held = self._peers.state(name).prefixes
                return Route(name, Reason.SPILLED if at else Reason.PLACE, self._is_in(held))
        return None

    def least_loaded(self) -> Route | None:
        """The one with the least to do for its slots; those of last resort after all others."""
        names = self.places()
        open_ones = [name for name in names if not self._is_last_resort(name)]
        if not open_ones:
            names = [name for name in self._pool.ring if name not in self._exclude]
            open_ones = [name for name in names if not self._is_last_resort(name)]
        among = open_ones or names
        if not among:
            return None
        reason = Reason.LEAST_LOADED if open_ones else Reason.LAST_RESORT
        name = min(among, key=self._busyness)
        return Route(name, reason, self._is_in(self._peers.state(name).prefixes))

    # ------------------------------------------------------------ what they ask

    def places(self) -> list[str]:
        """Machines that are looked at: the places of what many share, then those of the conversation."""
        if self._places is None:
            num, names = self._settings.num_places, dict[str, None]()
            for key in self._ring_keys():
                may = (name for name in self._pool.ring.places(key) if name not in self._exclude)
                names.update(dict.fromkeys(islice(may, num)))
            self._places = list(names)
        return self._places

    def _ring_keys(self) -> Iterator[int]:
        request = self._request
        if request.chain:
            yield from request.chain[:2]
        elif request.session:
            yield name_key(request.session)
        else:
            yield (self._peers.num_begun + 1) * _GOLDEN % 2**64

    def _warm_keys(self) -> list[int]:
        """What to look for, the longest first; having the first part is no sign if more follow."""
        request = self._request
        chain = request.chain
        keys = list(chain[:0:-1][:MAX_DEPTH]) if len(chain) > 1 else list(chain)
        if len(chain) > MAX_DEPTH + 1:
            keys.append(chain[1])
        if request.session:
            keys.append(name_key(request.session))
        return keys

    def _takes_warm(self, name: str) -> bool:
        settings = self._settings
        if self._request.priority is Priority.BACKGROUND and self._waits_in_vain(name):
            return False  # nobody looks on while a job computes its beginning anew
        least = int(settings.warm_slots * self._peers.state(name).num_slots)
        return self._is_within(name, settings.warm_bound, least) and not self._is_last_resort(name)

    def _is_within(self, name: str, times: float, least: int = 0) -> bool:
        """Whether a machine has fewer of the class than `least`, or than so many times the mean load."""
        load = self._peers.load(name, self._request.priority)
        return load < least or load < math.ceil(times * self._slot_load * self._peers.state(name).num_slots)

    def _waits_in_vain(self, name: str) -> bool:
        """Whether every slot there is taken while all machines have enough for all that it waits for."""
        return self._has_enough and self._waits_for(name) >= self._peers.state(name).num_slots

    def _waits_for(self, name: str) -> int:
        """Requests there that it would wait for: a person for people alone, a job for everybody."""
        load = self._peers.load(name, self._request.priority)
        return load + (self._people(name) if self._request.priority is Priority.BACKGROUND else 0)

    def _is_last_resort(self, name: str) -> bool:
        request, state = self._request, self._peers.state(name)
        if request.priority is Priority.BACKGROUND and self._people(name) >= state.num_slots:
            return True  # a job would be parked at once, and its cells are those of people
        why = reluctance(state, request, self._now, self._settings.limits)
        return bool(why)

    def _people(self, name: str) -> int:
        return self._peers.load(name, Priority.INTERACTIVE)

    def _busyness(self, name: str) -> tuple[float, float, float]:
        state = self._peers.state(name)
        own = self._peers.load(name, self._request.priority)
        return self._waits_for(name) / state.num_slots, own / state.num_slots, state.interactive_wait_s

    def _is_in(self, prefixes: frozenset[int]) -> bool:
        return not prefixes.isdisjoint(self._request.chain)


def _num_before(request: RouteRequest, pool: PeerPool) -> int:
    """Requests of all machines that it would wait for, as `_Look._waits_for` counts those of one."""
    is_job = request.priority is Priority.BACKGROUND
    return pool.load(request.priority) + (pool.load(Priority.INTERACTIVE) if is_job else 0)


def _refused(request: RouteRequest, peers: Peers, exclude: Container[str]) -> StokerError:
    """The error that says of every machine why it cannot take the request."""
    reasons = {state.name: _why_not(request, state, exclude) for state in peers}
    told = [f"{name}: {why}" for name, why in sorted(reasons.items())]
    shown = "; ".join(told[:NAMED_IN_MESSAGE])
    rest = f"; and {len(told) - NAMED_IN_MESSAGE} more" if len(told) > NAMED_IN_MESSAGE else ""
    if peers and all(why == _LACKS for why in reasons.values()):
        return ModelNotFoundError(
            f"None of {len(peers)} machines has the model {request.model!r}: {shown}{rest}",
            param="model",
            machines=reasons,
        )
    waits = [state.interactive_wait_s for state in peers if state.is_up]
    return NoMachineError(
        f"None of {len(peers)} machines can take a request for {request.model!r} now"
        f"{': ' if shown else ''}{shown}{rest}",
        retry_after_s=max(RETRY_AFTER_S, min(waits, default=0.0)),
        machines=reasons,
    )


_LACKS = "it does not have the model"


def _why_not(request: RouteRequest, state: PeerState, exclude: Container[str]) -> str:
    why = closed(state)
    if why:
        return why
    if request.model not in state.models:
        fit = state.available.get(request.model)
        if fit is None:
            return _LACKS
        if fit < 0:
            return f"the model does not fit there: {-fit:.0f} bytes are missing"
    if state.name in exclude:
        return "it has failed at this request"
    raise AssertionError(f"{state.name} could have taken {request}")
