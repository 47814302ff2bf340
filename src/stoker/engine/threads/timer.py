"""Native steps: how long each takes and may take (SPEC L3), and with how many threads it runs (SPEC M7).

The limit of a step follows the cost per token that was measured, so that a slow machine is not taken for a
hung one. Written by the loop thread, read by the heartbeat thread. `StepTimer` joins it with the models'
step costs and the one thread controller of the engine; it belongs to the loop thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.engine.threads.controller import ThreadController
from stoker.engine.threads.interrupt import Interrupt
from stoker.machine.cores import CoreWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.backends.protocol.extensions import Threads
    from stoker.engine.threads.controller import Clocked
    from stoker.scheduler.cost import StepCost

UNMEASURED_STEP_S = 60.0
"""What the first step may take, before any was measured: weights may still come from the disk."""
SLACK = 10.0
"""A step may take that many times its prediction, and never less than the watchdog's time."""
SLOWEST_DISK = 50e6
"""Bytes a second: a step that may have to read experts from disk may take as long as that takes."""
READ_EVERY_S = 0.5
STALL_S = 1.0
"""A reading this late means that the process stood still: it was stopped, or the whole machine was."""


LEARN_EVERY_S = 0.1
"""Short steps are learned from together: between two of them no cache holds the code of it any more."""
MOST_UNLEARNED = 16

Place = frozenset[str]
"""Ids of the devices that a step computes on."""
EVERYWHERE: Place = frozenset()
"""The place of a step that may compute on anything: no other is under way beside it."""


class Stopwatch:
    """Times native steps, one at a time in each place. Time in which the process stood still does not count.

    Attributes:
        num_steps: steps that succeeded.
        busy_s: seconds spent in them; those of several devices add up.
        reading_s: what any step may take, as a model in memory may have to read its experts from disk.
    """

    def __init__(self, watchdog_s: float) -> None:
        self.watchdog_s = watchdog_s
        self.num_steps = 0
        self.busy_s = 0.0
        self.reading_s = 0.0
        self._token_s: float | None = None
        self._running: dict[Place, tuple[float, float]] = {}
        self._read_s: float | None = None
        self._stalled: dict[float, float] = {}  # by the start of a step, how long it has stood still

    def __repr__(self) -> str:
        return f"<Stopwatch {self.num_steps} steps, {(self._token_s or 0.0) * 1000:.2f} ms a token at most>"

    def begin(self, num_tokens: int, place: Place = EVERYWHERE) -> None:
        """A native step over `num_tokens` starts."""
        predicted_s = UNMEASURED_STEP_S / SLACK if self._token_s is None else num_tokens * self._token_s
        self._running[place] = (self.now(), max(self.watchdog_s, SLACK * predicted_s, self.reading_s))

    def end(self, num_tokens: int, place: Place = EVERYWHERE) -> float:
        """It succeeded; its cost per token is remembered, large ones fade slowly.

        Returns:
            Seconds it took.
        """
        assert place in self._running, "a step ended that had not begun"
        started_s, _ = self._running.pop(place)
        took_s = self._spent_s(started_s, self.now())
        token_s, faded_s = took_s / num_tokens, 0.99 * (self._token_s or 0.0)
        self._token_s = max(token_s, faded_s)
        self.num_steps += 1
        self.busy_s += took_s
        return took_s

    def abandon(self, place: Place = EVERYWHERE) -> None:
        """It failed."""
        self._running.pop(place, None)

    now: Callable[[], float] = staticmethod(time.monotonic)
    """The engine's clock, in seconds."""

    def read(self) -> tuple[float, float]:
        """Seconds the running step has taken and may take, of several the latest one; else (0, watchdog_s).

        Called every READ_EVERY_S by one thread, or never.
        """
        now, running = self.now(), list(self._running.values())
        spent = [(self._spent_s(started_s, now), limit_s) for started_s, limit_s in running]
        self._stalled = {
            started_s: now - started_s - spent_s
            for (started_s, _), (spent_s, _) in zip(running, spent, strict=True)
        }
        self._read_s = now
        return max(spent, key=lambda step: step[0] - step[1], default=(0.0, self.watchdog_s))

    def _spent_s(self, started_s: float, now: float) -> float:
        """How long a step has run: a reading that is overdue shows that the whole process has not."""
        stalled_s = self._stalled.get(started_s, 0.0)
        if self._read_s is not None and (late_s := now - self._read_s - READ_EVERY_S) > STALL_S:
            stalled_s += late_s
        return max(0.0, now - started_s - stalled_s)


@dataclass(slots=True)
class TimedModel:
    """A model that steps: its threads, if the machine's load moves them, and what its steps cost.

    Attributes:
        is_cold: its next step touches memory for the first time, and teaches nothing.
    """

    threads: Threads | None
    cost: StepCost
    max_threads: int
    is_cold: bool = False


@dataclass(slots=True)
class Lap:
    """A step that succeeded, to be learned from.

    Attributes:
        clocked: where threads follow the machine's load.
        is_bound: it took so long at most: it was over when it was asked for.
    """

    model: TimedModel
    num_tokens: int
    took_s: float
    num_threads: int
    clocked: Clocked | None
    is_bound: bool


class StepTimer:
    """Surrounds every native step of one engine.

    Attributes:
        in_flight: waits for the step that devices compute, by these; `begin` calls those in its way.
        interrupt: what ends a long step.
    """

    def __init__(self, clock: Stopwatch, interrupt: Interrupt | None = None) -> None:
        self.interrupt = interrupt or Interrupt()
        self.in_flight: dict[Place, Callable[[], None]] = {}
        self._clock = clock
        self._models: list[TimedModel] = []
        self._readers: list[tuple[TimedModel, float]] = []
        self._controller: ThreadController | None = None
        self._watch = CoreWatch()
        self._watch.read(time.monotonic())  # the first step asks what others used since then
        self._laps: list[Lap] = []
        self._unlearned_s = 0.0
        self._has_new = False

    def __repr__(self) -> str:
        return f"<StepTimer {self._clock!r} {self._controller!r}>"

    @property
    def num_threads(self) -> int:
        """What steps on the CPU use now; 0: no model computes there."""
        return self._controller.governor.num_threads if self._controller else 0

    @property
    def reason(self) -> str:
        """Why that is less than was given; empty if it is not."""
        return self._controller.governor.reason if self._controller else ""

    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self._clock.now()

    # ------------------------------------------------------------ models

    def join(self, backend: Backend | Encoder, cost: StepCost) -> TimedModel:
        """A model was loaded; on a CPU its threads follow the machine from now on."""
        threads = backend.extensions.threads
        num_threads = threads.num_threads if threads is not None else 0
        cost.use_threads(num_threads)
        model = TimedModel(threads if backend.capabilities.computes_on_cpu else None, cost, num_threads)
        if (pages := backend.extensions.pages) is not None:
            self._readers.append((model, pages.stats().size_bytes / SLOWEST_DISK))
            self._clock.reading_s = max(reading_s for _, reading_s in self._readers)
        if model.threads is not None:
            self._models.append(model)
            self._renew()
        return model

    def leave(self, model: TimedModel) -> None:
        """A model goes."""
        self.learn()
        self._readers = [each for each in self._readers if each[0] is not model]
        self._clock.reading_s = max((reading_s for _, reading_s in self._readers), default=0.0)
        if model in self._models:
            self._models.remove(model)
            self._renew()

    def _renew(self) -> None:
        """The most threads may have changed: a controller for that number, beginning with all of them."""
        most = max((model.max_threads for model in self._models), default=0)
        if self._controller is not None and self._controller.governor.max_threads == most:
            self._use(self._controller.governor.num_threads)
            return
        self.close()
        if most:
            self._controller = ThreadController(most, self._watch)
            self._use(most)

    def close(self) -> None:
        """Give threads their cores back; idempotent."""
        if self._controller is not None:
            self._controller.close()
            self._controller = None

    # ------------------------------------------------------------ steps

    def begin(self, num_tokens: int, place: Place = EVERYWHERE) -> None:
        """A native step over `num_tokens` starts; those in flight on one of its devices are waited for."""
        if self.in_flight:
            self.collect(place)
        if self._controller is not None and (decision := self._controller.begin()) is not None:
            self._use(decision.num_threads)
        self._clock.begin(num_tokens, place)

    def collect(self, place: Place = EVERYWHERE) -> None:
        """Wait for the steps in flight on one of those devices."""
        for other, wait in list(self.in_flight.items()):
            if not (place and other) or place & other:
                wait()

    def end(self, model: TimedModel, num_tokens: int) -> float:
        """It succeeded and is learned from; returns the seconds it took."""
        took_s = self.stop(model, num_tokens)
        self.learn()
        return took_s

    def stop(
        self, model: TimedModel, num_tokens: int, place: Place = EVERYWHERE, *, is_bound: bool = False
    ) -> float:
        """It succeeded; returns the seconds it took, or took at most. `learn` follows when there is time."""
        took_s = self._clock.end(num_tokens, place)
        self.note(model, num_tokens, took_s, is_bound=is_bound)
        return took_s

    def note(self, model: TimedModel, num_tokens: int, took_s: float, *, is_bound: bool = False) -> None:
        """A step took so long, or so long at most; the next `learn` takes it in."""
        threads, controller = model.threads, self._controller
        if controller is None or threads is None:
            self._laps.append(Lap(model, num_tokens, took_s, 0, None, is_bound))
        else:
            self._laps.append(
                Lap(model, num_tokens, took_s, threads.num_threads, controller.stop(), is_bound)
            )
        self._unlearned_s += took_s
        self._has_new = self._has_new or not model.cost.knows(num_tokens)

    @property
    def is_behind(self) -> bool:
        """Whether it is time to learn: a long step was noted, one of a new size, or enough others."""
        return self._has_new or self._unlearned_s >= LEARN_EVERY_S or len(self._laps) >= MOST_UNLEARNED

    def learn(self) -> None:
        """Take in every step that was noted, in order."""
        laps, self._laps, self._unlearned_s, self._has_new = self._laps, [], 0.0, False
        for lap in laps:
            self._learn(lap)

    def _learn(self, lap: Lap) -> None:
        """A quiet machine's steps teach what steps cost, others only where nothing else is known.

        How much slower they are now each step tells. One that was asked for late may only tell that it is
        quicker: else it seemed to take as long as it had been left, and was left for as long again.
        """
        model, num_tokens, took_s = lap.model, lap.num_tokens, lap.took_s
        was_cold, model.is_cold = model.is_cold, False
        usual_s = model.cost.predict(num_tokens) if model.cost.knows(num_tokens) else None
        if lap.is_bound and usual_s is not None and took_s >= usual_s:
            return
        if not was_cold:
            model.cost.stepped(num_tokens, took_s)
        controller = self._controller
        if controller is None or lap.clocked is None:
            if not was_cold:
                model.cost.learn(num_tokens, took_s)
            return
        predicted_s = model.cost.predict(num_tokens)
        decision = controller.judge(lap.clocked, lap.num_threads, predicted_s)
        is_disturbed = controller.governor.is_disturbed or lap.num_threads != model.cost.num_threads
        if not was_cold and not (is_disturbed and model.cost.knows(num_tokens)):
            model.cost.learn(num_tokens, took_s)
        if decision is not None:
            self._use(decision.num_threads)

    def abandon(self, place: Place = EVERYWHERE) -> None:
        """It failed: its time says nothing."""
        self._clock.abandon(place)
        if self._controller is not None:
            self._controller.abandon()

    def _use(self, num_threads: int) -> None:
        for model in self._models:
            own = min(model.max_threads, num_threads)
            if model.threads is not None and own != model.threads.num_threads:
                model.threads.set_threads(own)
            if own != model.cost.num_threads:  # of several runners of one backend, each has its own
                model.cost.use_threads(own)
