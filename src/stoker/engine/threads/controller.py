"""What the loop asks around each native step: whether the next ones should use more or fewer threads.

Measures steps and the machine, and acts on what the thread governor decides and slow steps show: it logs,
and moves threads apart that share a core. Setting the backend's thread count is `pace`'s business.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.engine.threads.affinity import ThreadBinder
from stoker.engine.threads.governor import Decision, StepSample, ThreadGovernor
from stoker.engine.threads.slow_steps import HALF_A_CORE, SlowReason, SlowSteps
from stoker.machine.cores import SPARE_CORES, CoreWatch

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

SHARED_S = 0.6
"""Step time with threads on one core after which they are moved apart: by then, what is known of others is
not from before."""
SHARED_SLOWDOWN = 2.0
BOUND_S = 10.0
"""How long they are held apart: the system's scheduler leaves threads that compute where they are."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time is read: seconds on a monotonic clock, and of processor time of this process."""

    wall: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.process_time


class ThreadController:
    """Watches the steps of one engine that computes on the CPU. Used on the loop's thread only.

    Args:
        max_threads: what steps use when nothing is in the way.
        watch: tells what other processes use.
        binder: moves threads apart.
        clocks: other ones in tests.
    """

    def __init__(
        self,
        max_threads: int,
        watch: CoreWatch | None = None,
        binder: ThreadBinder | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._watch = watch or CoreWatch()
        self._binder = binder or ThreadBinder()
        self._clocks = clocks or Clocks()
        self.governor = ThreadGovernor(max_threads, self._watch.num_cores)
        self._slow = SlowSteps(self._watch.num_cores)
        self._begun: tuple[float, float] | None = None
        self._shared_s = 0.0
        self._bound_at_s = 0.0

    def __repr__(self) -> str:
        return f"<ThreadController {self.governor!r} {self._binder!r}>"

    def begin(self) -> Decision | None:
        """A native step is about to start; after a pause, cores that became free are taken at once."""
        now_s = self._clocks.wall()
        self._slow.begin(now_s)
        if now_s - self._bound_at_s >= BOUND_S:
            self._binder.unbind()
        decision = self.governor.wake(now_s, self._watch.read(now_s))
        if decision is not None:
            self._changed(decision)
        self._begun = self._clocks.wall(), self._clocks.cpu()
        return decision

    def abandon(self) -> None:
        """The step failed: its time says nothing."""
        self._begun = None

    def end(self, num_threads: int, predicted_s: float | None) -> Decision | None:
        """It succeeded.

        Args:
            num_threads: what it ran with.
            predicted_s: what it takes with them on a quiet machine; None: not known.

        Returns:
            What to change before the next step, or None.
        """
        assert self._begun is not None, "a step ended that had not begun"
        started_s, spent_s = self._begun
        self._begun = None
        now_s = self._clocks.wall()
        sample = StepSample(
            at_s=now_s,
            wall_s=now_s - started_s,
            cpu_s=self._clocks.cpu() - spent_s,
            predicted_s=predicted_s,
            num_threads=num_threads,
        )
        others = self._watch.read(now_s)
        if self._look_into(sample, others):
            return None
        decision = self.governor.observe(sample, others)
        if decision is not None:
            self._changed(decision)
        return decision

    def close(self) -> None:
        """Give threads back their cores; idempotent."""
        self._binder.unbind()

    def _changed(self, decision: Decision) -> None:
        self._binder.unbind()  # threads that start now would inherit one core
        log.info("%d threads: %s", decision.num_threads, decision.reason)

    def _look_into(self, sample: StepSample, others: float | None) -> bool:
        """Tell about a slow step, mend a shared core; returns whether that has been done."""
        slow = self._slow.end(sample, others, self._watch.read_at_s)
        line = self._slow.tell(slow) if slow else None
        if line:
            log.warning("%s", line)
        if self._binder.is_bound:
            if others is None or others >= SPARE_CORES:
                self._binder.unbind()
        elif slow is not None and slow.reason not in {SlowReason.SHARED_CORE, SlowReason.UNKNOWN}:
            self._shared_s = 0.0
        elif self._shares_a_core(sample, others):
            return self._move_apart(sample)
        return False

    def _shares_a_core(self, sample: StepSample, others: float | None) -> bool:
        """Whether that has been so for SHARED_S of step time."""
        is_slow = sample.predicted_s is not None and sample.wall_s >= SHARED_SLOWDOWN * sample.predicted_s
        is_alone = others is not None and others < SPARE_CORES
        if not (is_slow and is_alone) or sample.lost_cores < HALF_A_CORE:
            self._shared_s = 0.0
            return False
        is_first = self._shared_s == 0.0
        self._shared_s += sample.wall_s
        if self._shared_s >= SHARED_S:
            return True
        if is_first:
            self._binder.note()
        return False

    def _move_apart(self, sample: StepSample) -> bool:
        self._shared_s = 0.0
        if not self._binder.rebind(sample.num_threads):
            return False
        self._bound_at_s = sample.at_s
        self.governor.forget()
        log.info("%d threads shared a core and were moved apart", sample.num_threads)
        return True
