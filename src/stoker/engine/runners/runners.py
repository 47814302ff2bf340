"""The models in memory, and whose turn it is (SPEC Q13).

A model that somebody waits for steps first. Among other models, one whose background has waited over its
patience gets one turn in ten meanwhile (SPEC Q7). How equals share the time is `fair_turns`'; which models
there are is decided by residency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stoker.engine.runners.oneshot import EncoderResident
from stoker.engine.runners.slots import Resident
from stoker.engine.runners.turns import Contender, FairTurns
from stoker.ipc.model import ModelClass
from stoker.scheduler.aging import ONE_STEP_IN
from stoker.scheduler.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.residency.loading import Load
    from stoker.engine.threads.pace import Pace


AnyResident = Resident | EncoderResident
"""A model in memory: one that generates, or one that makes vectors of texts."""


class Residents:
    """Loaded models by id, in the order of their last turn.

    Args:
        pace: surrounds their steps.
        cache: what they share of finished work.
    """

    def __init__(self, pace: Pace, cache: PrefixCache) -> None:
        self._pace = pace
        self._cache = cache
        self._models: dict[str, AnyResident] = {}
        self._throttle = Throttle()
        self._turns = FairTurns()
        self._turns_since_owed = 0

    def __repr__(self) -> str:
        return f"<Residents {list(self._models.values())}>"

    def __iter__(self) -> Iterator[AnyResident]:
        return iter(tuple(self._models.values()))

    @property
    def has_work(self) -> bool:
        """Whether any model has something to compute."""
        return any(resident.has_work for resident in self._models.values())

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits or runs in any model."""
        return any(resident.has_requests for resident in self._models.values())

    @property
    def has_unstored(self) -> bool:
        """Whether any model keeps in cells what is stored nowhere else yet."""
        return any(resident.has_unstored for resident in self._models.values())

    def find(self, model: str) -> AnyResident | None:
        """The loaded model of that id."""
        return self._models.get(model)

    def add(self, load: Load, backend: Backend | Encoder) -> AnyResident:
        """Take a loaded model in."""
        assert load.offer is not None, f"{load!r} was loaded without an offer"
        spec = load.offer.spec
        resident: AnyResident
        if backend.capabilities.model_class is ModelClass.ENCODER:
            resident = EncoderResident(spec, cast("Encoder", backend), self._pace)
        else:
            resident = Resident(spec, cast("Backend", backend), self._pace, self._cache)
        resident.load, resident.degraded = load, load.offer.degraded
        resident.hold_back(self._throttle)
        self._models[resident.spec.id] = resident
        return resident

    def remove(self, model: str) -> AnyResident | None:
        """Let a model go; the caller closes it."""
        self._turns.forget(model)
        return self._models.pop(model, None)

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some requests run, in every model that is or comes into memory (SPEC M4, M6)."""
        self._throttle = throttle
        for resident in self._models.values():
            resident.hold_back(throttle)

    def next_with_work(self, now: float) -> AnyResident | None:
        """The model to step next; it goes to the end of its equals. `served` hears what the turn took."""
        working = [resident for resident in self._models.values() if resident.has_work]
        if not working:
            return None
        chosen = self._choose(working, now)
        name = chosen.spec.id
        self._models[name] = self._models.pop(name)
        return chosen

    def served(self, resident: AnyResident, took_s: float) -> None:
        """A turn of that model took so many seconds."""
        if resident.spec.id in self._models:
            self._turns.served(resident.spec.id, took_s)

    def _choose(self, working: list[AnyResident], now: float) -> AnyResident:
        people = [resident for resident in working if resident.has_people]
        owed = [resident for resident in working if resident not in people and resident.is_owed(now)]
        self._turns_since_owed += 1
        contenders = [_contender(resident) for resident in people or working]
        if owed and (not people or self._turns_since_owed >= ONE_STEP_IN):
            self._turns_since_owed = 0
            chosen = owed[0]
        else:
            chosen = self._models[self._turns.choose(contenders)]
        if isinstance(chosen, EncoderResident):
            chosen.allowance_s = self._turns.allowance_s(contenders)
        return chosen

    def next_deadline_s(self) -> float | None:
        """When the first paused request passes its deadline."""
        deadlines = [at for r in self._models.values() if (at := r.next_deadline_s()) is not None]
        return min(deadlines, default=None)

    def close(self, is_used: Callable[[PrepContext], bool]) -> None:
        """Free every model, but for those that a worker still reads: the process ends with them."""
        for resident in self._models.values():
            if not is_used(resident.prep):
                resident.close()
        self._models.clear()


def _contender(resident: AnyResident) -> Contender:
    is_encoder = isinstance(resident, EncoderResident)
    has_readers = isinstance(resident, Resident) and resident.has_readers
    return Contender(resident.spec.id, is_encoder=is_encoder, has_readers=has_readers)
