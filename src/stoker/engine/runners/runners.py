"""The models in memory, and whose turn it is (SPEC Q13).

A model with interactive requests steps first. Among other models, one whose background has waited longer than
its patience gets one turn in ten meanwhile (SPEC Q7). How equals share the time is `turns`'; which models
there are is decided by residency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.protocol.encoding import Encoder
from stoker.engine.runners.oneshot import OneShotRunner
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.turns import ModelTurns
from stoker.scheduler.aging import ONE_STEP_IN
from stoker.scheduler.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.backends.protocol.backend import Backend
    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.loading import Load
    from stoker.engine.runners.runner import ModelRunner
    from stoker.engine.threads.pace import Pace


class Runners:
    """Loaded models by id, in the order of their last turn.

    Args:
        pace: surrounds their steps.
        cache: what they share of finished work.
        jobs: the engine's requests.
    """

    def __init__(self, pace: Pace, cache: PrefixCache, jobs: JobTable) -> None:
        self._pace = pace
        self._cache = cache
        self._jobs = jobs
        self._models: dict[str, ModelRunner] = {}
        self._throttle = Throttle()
        self._turns = ModelTurns()
        self._turns_since_owed = 0

    def __repr__(self) -> str:
        return f"<Runners {list(self._models.values())}>"

    def __iter__(self) -> Iterator[ModelRunner]:
        return iter(tuple(self._models.values()))

    @property
    def has_work(self) -> bool:
        """Whether any model has something to compute."""
        return any(runner.has_work for runner in self._models.values())

    @property
    def has_unstored(self) -> bool:
        """Whether any model keeps in cells what is stored nowhere else yet."""
        return any(runner.has_unstored for runner in self._models.values())

    def find(self, model: str) -> ModelRunner | None:
        """The loaded model of that id."""
        return self._models.get(model)

    def add(self, load: Load, backend: Backend | Encoder) -> ModelRunner:
        """Take a loaded model in."""
        assert load.offer is not None, f"{load!r} was loaded without an offer"
        spec = load.offer.spec
        runner: ModelRunner
        if isinstance(backend, Encoder):
            runner = OneShotRunner(spec, backend, self._pace, self._jobs)
        else:
            runner = SlotRunner(spec, backend, self._pace, self._cache, self._jobs)
        runner.load, runner.degraded = load, load.offer.degraded
        runner.hold_back(self._throttle)
        self._models[runner.spec.id] = runner
        return runner

    def remove(self, model: str) -> ModelRunner | None:
        """Let a model go; the caller closes it."""
        self._turns.forget(model)
        return self._models.pop(model, None)

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some requests run, in every model that is or comes into memory (SPEC M4, M6)."""
        self._throttle = throttle
        for runner in self._models.values():
            runner.hold_back(throttle)

    def next_with_work(self, now: float) -> ModelRunner | None:
        """The model to step next; it goes to the end of its equals. `served` hears what the turn took."""
        working = [runner for runner in self._models.values() if runner.has_work]
        if not working:
            return None
        chosen = self._choose(working, now)
        name = chosen.spec.id
        self._models[name] = self._models.pop(name)
        return chosen

    def served(self, runner: ModelRunner, took_s: float) -> None:
        """A turn of that model took so many seconds."""
        if runner.spec.id in self._models:
            self._turns.served(runner.spec.id, took_s)

    def _choose(self, working: list[ModelRunner], now: float) -> ModelRunner:
        people = [runner for runner in working if runner.has_people]
        owed = [runner for runner in working if runner not in people and runner.is_owed(now)]
        self._turns_since_owed += 1
        contenders = [runner.contender() for runner in people or working]
        if owed and (not people or self._turns_since_owed >= ONE_STEP_IN):
            self._turns_since_owed = 0
            chosen = owed[0]
        else:
            chosen = self._models[self._turns.choose(contenders)]
        chosen.allowance_s = self._turns.allowance_s(contenders)
        return chosen

    def close(self, is_used: Callable[[PrepContext], bool]) -> None:
        """Free every model, but for those that a worker still reads: the process ends with them."""
        for runner in self._models.values():
            if not is_used(runner.prep):
                runner.close()
        self._models.clear()
