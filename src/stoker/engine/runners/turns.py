"""The models in memory, and which has its turn (SPEC Q13).

A model with interactive requests steps first. Among other models, one whose background has waited longer than
its patience gets one turn in ten meanwhile (SPEC Q7). Which models there are is decided by residency.

Models on devices of their own do not keep each other from computing: the next is whose step is over first.

Equals get equal time, however long their steps are: each model has a virtual time, the seconds it was
computed for, and the one that has the least is next. A model that comes from idle begins at the least of
those that stayed: it is served soon and has saved nothing up. Beside a model whose readers read along an
encoder's seconds count several times, its calls are to be a small part of a step, and no two of them follow
each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from stoker.engine.runners.runner import Contender
from stoker.scheduler.queue import ONE_STEP_IN, Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.runners.runner import ModelRunner
    from stoker.engine.threads.timer import StepTimer


SHARE_OF_STEP = 0.15
"""An encoder's call beside readers may take this part of one of their steps: their 95th
percentile between two tokens is to rise by less than a quarter, and calls may take longer than foreseen."""
PRICE_BESIDE_READERS = 1 / SHARE_OF_STEP
"""What a second of an encoder counts there: a full call as much as the step before it."""
FOLLOW = 0.2

HeldUntil: TypeAlias = "Callable[[ModelRunner], float]"
"""Until when a model with work is to wait, by the engine's clock; in the past: it is not."""


def _not_held(_runner: ModelRunner) -> float:
    return 0.0


class ModelTurns:
    """The virtual times, and which model has its turn."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._step_s: dict[str, float] = {}  # of those with readers: what a step of theirs takes
        self._contending: frozenset[str] = frozenset()
        self._last_s = 0.0  # virtual time of the last choice, unloaded or not
        self._chosen = Contender("")
        self._price = 1.0
        self._alone = ""

    def __repr__(self) -> str:
        served = ", ".join(f"{name} {served_s:.3f}" for name, served_s in self._served_s.items())
        return f"<ModelTurns {served}>"

    def allowance_s(self, contenders: Sequence[Contender]) -> float | None:
        """Seconds that a call of an encoder may take beside those; None: as long as it likes.

        A first text goes whole, however long it is: its price keeps the encoder waiting afterwards.
        """
        steps_s = [self._step_s.get(each.name, 0.0) for each in contenders if each.has_readers]
        return SHARE_OF_STEP * min(steps_s) if steps_s else None

    def alone(self, name: str) -> None:
        """There is no other model: it is the next. Its time goes to `served`."""
        if self._alone == name:
            return
        self._alone, self._chosen, self._price = name, Contender(name), 1.0
        self._enter((self._chosen,))

    def choose(self, contenders: Sequence[Contender]) -> str:
        """The name of the next model; among equals the first. Its time goes to `served`."""
        self._alone = ""
        self._enter(contenders)
        has_readers = any(contender.has_readers for contender in contenders)
        candidates = list(contenders)
        if has_readers and self._chosen.is_encoder:  # the step of a reader's model comes between
            candidates = [contender for contender in contenders if not contender.is_encoder]
        self._chosen = min(candidates, key=lambda contender: self._served_s[contender.name])
        self._price = PRICE_BESIDE_READERS if has_readers and self._chosen.is_encoder else 1.0
        return self._chosen.name

    def take(self, chosen: Contender, contenders: Sequence[Contender]) -> None:
        """One of them is next for another reason; its time goes to `served`."""
        self._alone = ""
        self._enter(contenders)
        self._chosen, self._price = chosen, 1.0

    def _enter(self, contenders: Sequence[Contender]) -> None:
        """What did not contend last time begins where the others are, unless it is ahead of them."""
        if len(contenders) == len(self._contending) == 1 and contenders[0].name in self._contending:
            return
        stayed = [contender.name for contender in contenders if contender.name in self._contending]
        least_s = min((self._served_s[name] for name in stayed), default=self._last_s)
        for contender in contenders:
            if contender.name not in self._contending:
                own_s = self._served_s.get(contender.name, 0.0)
                self._served_s[contender.name] = max(own_s, least_s)
        self._contending = frozenset(contender.name for contender in contenders)

    def served(self, name: str, took_s: float) -> None:
        """A turn of that model took so long; one that `choose` had not chosen costs what it took."""
        is_chosen = name == self._chosen.name
        price = self._price if is_chosen else 1.0
        self._served_s[name] = self._served_s.get(name, 0.0) + took_s * price
        if is_chosen:
            self._last_s = self._served_s[name]
        if is_chosen and self._chosen.has_readers:
            usual_s = self._step_s.get(name, took_s)
            self._step_s[name] = usual_s + FOLLOW * (took_s - usual_s)

    def forget(self, name: str) -> None:
        """The model is gone."""
        self._served_s.pop(name, None)
        self._step_s.pop(name, None)
        self._alone = ""
        self._contending -= {name}


class Runners:
    """Loaded models by id, in the order of their last turn.

    Attributes:
        timer: surrounds their steps.
        cache: what they share of finished work.
        throttle: how they are held back; set by `hold_back`.
    """

    def __init__(self, timer: StepTimer, cache: PrefixCache) -> None:
        self.timer = timer
        self.cache = cache
        self._models: dict[str, ModelRunner] = {}
        self.throttle = Throttle()
        self._turns = ModelTurns()
        self._turns_since_owed = 0

    def __repr__(self) -> str:
        return f"<Runners {list(self._models.values())}>"

    def __iter__(self) -> Iterator[ModelRunner]:
        return iter(tuple(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def has_work(self) -> bool:
        """Whether any model has something to compute."""
        for runner in self._models.values():  # noqa: SIM110 - asked twice a turn, without a generator each time
            if runner.has_work:
                return True
        return False

    @property
    def has_unstored(self) -> bool:
        """Whether any model keeps in cells what is stored nowhere else yet."""
        return any(runner.has_unstored for runner in self._models.values())

    def find(self, model: str) -> ModelRunner | None:
        """The loaded model of that id."""
        return self._models.get(model)

    def add(self, runner: ModelRunner) -> None:
        """Take a loaded model in."""
        runner.hold_back(self.throttle)
        self._models[runner.spec.id] = runner

    def remove(self, model: str) -> ModelRunner | None:
        """Let a model go; the caller closes it."""
        self._turns.forget(model)
        return self._models.pop(model, None)

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some requests run, in every model that is or comes into memory (SPEC M4, M6)."""
        self.throttle = throttle
        for runner in self._models.values():
            runner.hold_back(throttle)

    def next_with_work(self, now: float, held_until_s: HeldUntil = _not_held) -> ModelRunner | None:
        """The model to step next; it goes to the end of its equals. Its time goes to `served`.

        Args:
            now: the engine's clock, in seconds.
            held_until_s: asked where nothing else is on the model's devices; None is next until then, unless
                the step of another is over sooner.
        """
        if len(self._models) == 1:
            return self._only(next(iter(self._models.values())), now, held_until_s)
        working = [runner for runner in self._models.values() if runner.has_work]
        if not working:
            return None
        if _are_apart(working):
            chosen = self._first_over(working, now, held_until_s)
        elif len(working) == 1 and held_until_s(working[0]) > now:
            chosen = None
        else:
            chosen = self._choose(working, now)
        if chosen is None:
            return None
        name = chosen.spec.id
        self._models[name] = self._models.pop(name)
        return chosen

    def _first_over(
        self, working: list[ModelRunner], now: float, held_until_s: HeldUntil
    ) -> ModelRunner | None:
        """The one whose step is over first, or that has none under way; people's before others'.

        None: it is held, and until then no other's is over.
        """
        held = {runner.spec.id: held_until_s(runner) for runner in working}
        chosen = min(
            working,
            key=lambda runner: (max(runner.flight.due_s, held[runner.spec.id]), not runner.has_people),
        )
        if held[chosen.spec.id] > now:
            return None
        self._turns.take(chosen.contender(), [runner.contender() for runner in working])
        return chosen

    def _only(self, runner: ModelRunner, now: float, held_until_s: HeldUntil) -> ModelRunner | None:
        """The only model, if it has work and is not held."""
        if not runner.has_work or held_until_s(runner) > now:
            return None
        self._turns.alone(runner.spec.id)
        runner.allowance_s = None
        return runner

    def served(self, runner: ModelRunner, took_s: float) -> None:
        """A turn of that model took so many seconds."""
        if runner.spec.id in self._models:
            self._turns.served(runner.spec.id, took_s)

    def _choose(self, working: list[ModelRunner], now: float) -> ModelRunner:
        interactive = [runner for runner in working if runner.has_people]
        owed = [runner for runner in working if runner not in interactive and runner.is_owed(now)]
        self._turns_since_owed += 1
        contenders = [runner.contender() for runner in interactive or working]
        if owed and (not interactive or self._turns_since_owed >= ONE_STEP_IN):
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


def _are_apart(runners: Sequence[ModelRunner]) -> bool:
    """Whether there are several, and each computes on devices of its own."""
    taken: set[str] = set()
    for runner in runners:
        place = runner.flight.place
        if not place or not taken.isdisjoint(place):
            return False
        taken |= place
    return len(runners) > 1
