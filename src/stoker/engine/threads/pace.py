"""The pace of native steps: how long they take, and with how many threads they run (SPEC M7, L3).

Joins the step clock (what the watchdog reads), the models' step-time models and the thread keeper, which is
one for all models of the engine: they share the cores. Used on the loop's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.engine.threads.controller import ThreadController

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.backends.protocol.extensions import Threads
    from stoker.engine.threads.governor import Decision
    from stoker.engine.threads.timer import StepTimer
    from stoker.scheduler.cost import StepCost


@dataclass(frozen=True, slots=True)
class Runner:
    """A model that steps: its threads, if the machine's load moves them, and what its steps cost."""

    threads: Threads | None
    cost: StepCost
    max_threads: int


class Pace:
    """Surrounds every native step of one engine.

    Attributes:
        in_flight: waits for the step that a device computes; None: there is none. `begin` calls it.
    """

    def __init__(self, clock: StepTimer) -> None:
        self.in_flight: Callable[[], None] | None = None
        self._clock = clock
        self._runners: list[Runner] = []
        self._controller: ThreadController | None = None

    def __repr__(self) -> str:
        return f"<Pace {self._clock!r} {self._controller!r}>"

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

    def join(self, backend: Backend | Encoder, cost: StepCost) -> Runner:
        """A model was loaded; on a CPU its threads follow the machine from now on."""
        threads = backend.extensions.threads
        num_threads = threads.num_threads if threads is not None else 0
        cost.use_threads(num_threads)
        runner = Runner(threads if backend.capabilities.computes_on_cpu else None, cost, num_threads)
        if runner.threads is not None:
            self._runners.append(runner)
            self._renew()
        return runner

    def leave(self, runner: Runner) -> None:
        """A model goes."""
        if runner in self._runners:
            self._runners.remove(runner)
            self._renew()

    def _renew(self) -> None:
        """The most threads may have changed: a keeper for that number, beginning with all of them."""
        most = max((runner.max_threads for runner in self._runners), default=0)
        if self._controller is not None and self._controller.governor.max_threads == most:
            self._use(self._controller.governor.num_threads)
            return
        self.close()
        if most:
            self._controller = ThreadController(most)
            self._use(most)

    def close(self) -> None:
        """Give threads their cores back; idempotent."""
        if self._controller is not None:
            self._controller.close()
            self._controller = None

    # ------------------------------------------------------------ steps

    def begin(self, num_tokens: int) -> None:
        """A native step over `num_tokens` starts; one in flight is waited for."""
        self.collect()
        if self._controller is not None:
            self._follow(self._controller.begin())
        self._clock.begin(num_tokens)

    def collect(self) -> None:
        """Wait for the step in flight, if there is one."""
        if self.in_flight is not None:
            self.in_flight()

    def end(self, runner: Runner, num_tokens: int) -> float:
        """It succeeded; returns the seconds it took. A quiet machine's steps teach what steps cost."""
        took_s = self._clock.end(num_tokens)
        keeper = self._controller
        if keeper is None or runner.threads is None:
            runner.cost.learn(num_tokens, took_s)
            return took_s
        predicted_s = runner.cost.predict(num_tokens)
        decision = keeper.end(runner.threads.num_threads, predicted_s)
        if predicted_s is None or not keeper.governor.is_disturbed:
            runner.cost.learn(num_tokens, took_s)
        self._follow(decision)
        return took_s

    def abandon(self) -> None:
        """It failed: its time says nothing."""
        self._clock.abandon()
        if self._controller is not None:
            self._controller.abandon()

    def _follow(self, decision: Decision | None) -> None:
        if decision is not None:
            self._use(decision.num_threads)

    def _use(self, num_threads: int) -> None:
        for runner in self._runners:
            own = min(runner.max_threads, num_threads)
            if runner.threads is not None and own != runner.threads.num_threads:
                runner.threads.set_threads(own)
            if own != runner.cost.num_threads:  # of several runners of one backend, each has its own
                runner.cost.use_threads(own)
