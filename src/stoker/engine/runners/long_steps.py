"""Steps that arrivals end: of prompts alone, longer than `max_step_ms`, and young ones (SPEC Q27).

On a CPU large slices of a prompt are quicker, and while nobody else is there nobody waits for the end of one.
A long step of several prompts has equally many tokens of each, and ends no later than the shortest of them.
The tokens of one prompt lie together then. In short steps they are mixed: 64 tokens of eight prompts attend
over the cells of all eight, and each row that decodes later finds its own cells among those of the others.

A step that was ended has changed nothing: its tokens are planned again. Its time is lost, so steps are
bounded by `max_step_ms` until all that was lost is a small part of what was computed since. The first step
that was ended while it was young is begun anew as long.

Of requests that come at once the first to arrive would have a step to itself, read ahead of the others and
make each of their slices wait for its rows. So an arrival ends a step of prompts that has just begun too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import StepAbortedError
from stoker.kv.sequence import SequenceState
from stoker.scheduler.queue import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.extensions import StepAbort
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.threads.timer import StepTimer
    from stoker.scheduler.plan import StepPlan
    from stoker.scheduler.scheduler import Scheduler

ALONE_S = 1.0
"""After others decoded beside a prompt, or a long step was ended that was not young, steps are bounded for so
long."""
BOUNDED_TIMES = 9.0
"""And for so many times what the ended step has lost: a tenth of the time at most."""
QUIET_TIMES = 1.5
"""Where steps take more than that many times their quiet time others have the cores, and threads follow that
between steps only."""
YOUNG_SHARE = 0.1
"""A step of prompts is begun anew, with those that have arrived, within this part of its time."""
YOUNG_FROM_S = 0.1
"""But not one that takes less than that."""


class LongSteps:
    """When a step may be long, and what became of those.

    Args:
        aborts: ends a step of the backend.
        scheduler: of that model.
        jobs: all requests of the engine.
        timer: has the interrupt that all models share.
    """

    def __init__(self, aborts: StepAbort, scheduler: Scheduler, jobs: JobTable, timer: StepTimer) -> None:
        self._aborts = aborts
        self._scheduler = scheduler
        self._jobs = jobs
        self._timer = timer
        self._not_before_s = 0.0
        self._paid_s = 0.0  # when what was lost is a tenth of the time since
        self._young_s: float | None = None  # when the step was first begun that is begun anew
        self._num_total = 0
        self._num_ended_total = 0
        self._lost_s = 0.0

    def __repr__(self) -> str:
        return f"<LongSteps {self._num_total}, {self._num_ended_total} of them ended>"

    def stats(self) -> dict[str, float]:
        """Long steps, those of them that were ended, and the seconds lost by that."""
        return {
            "num_long_steps_total": self._num_total,
            "num_ended_steps_total": self._num_ended_total,
            "ended_steps_s_total": self._lost_s,
        }

    def run(self, plan: StepPlan, launch: Callable[[StepPlan, float], None], now: float) -> bool:
        """Launch `plan`, or a longer step in its place, where arrivals may end it; it may have been ended.

        Returns:
            False: no step was launched and none was ended, `plan` is as it was.
        """
        if plan.is_rows:
            self._young_s = None
            if len(plan.parts) > 1:
                self._not_before_s = max(self._not_before_s, now + ALONE_S)
            return False
        longer = self._lengthened(plan, now)
        if longer is None or not self._timer.interrupt.watch(self._aborts):
            return self._run_young(plan, launch, now)
        self._num_total += 1
        young_until_s, self._young_s = self._young_until_s(longer, now), None
        if self._has_ended(longer, launch, now):
            is_young = young_until_s is not None and self._timer.now() <= young_until_s
            self._pay(now, is_young=is_young)
        return True

    def _pay(self, begun_s: float, *, is_young: bool) -> None:
        """A long step was ended: the next one waits, but for the first that was still young."""
        ended_s, was_paid = self._timer.now(), begun_s >= self._paid_s
        self._paid_s = max(self._paid_s, ended_s) + BOUNDED_TIMES * (ended_s - begun_s)
        if not is_young:
            self._not_before_s = max(self._paid_s, ended_s + ALONE_S)
        elif not was_paid:
            self._not_before_s = max(self._paid_s, self._not_before_s)

    def _run_young(self, plan: StepPlan, launch: Callable[[StepPlan, float], None], now: float) -> bool:
        """The same of a step that arrivals end while it is young, where they may join it."""
        until_s = self._young_until_s(plan, now)
        if until_s is None:
            self._young_s = None
            return False
        timer = self._timer
        if not timer.interrupt.watch(self._aborts, lambda: timer.now() <= until_s):
            return timer.interrupt.has_arrived  # which is taken first; else the engine is about to end
        if not self._has_ended(plan, launch, now):
            self._young_s = None
        return True

    def _young_until_s(self, plan: StepPlan, now: float) -> float | None:
        """Until when it is; None: it is not, or nobody could join it."""
        scheduler = self._scheduler
        if any(part.sequence.state is not SequenceState.PREFILL for part in plan.parts):
            return None
        quiet_s = scheduler.cost.predict(plan.num_tokens)
        if quiet_s is None or len(scheduler.slots.running) >= scheduler.limits.num_slots:
            return None
        takes_s = quiet_s * scheduler.cost.slowdown.times
        if self._young_s is None:
            self._young_s = now
        until_s = self._young_s + YOUNG_SHARE * takes_s
        return until_s if takes_s >= YOUNG_FROM_S and now < until_s else None

    def _has_ended(self, plan: StepPlan, launch: Callable[[StepPlan, float], None], now: float) -> bool:
        """Launch a step that is watched; returns whether an arrival has ended it."""
        try:
            launch(plan, now)
        except StepAbortedError:
            self._num_ended_total += 1
            self._lost_s += self._timer.now() - now
            return True
        finally:
            self._timer.interrupt.unwatch()
        return False

    def _lengthened(self, plan: StepPlan, now: float) -> StepPlan | None:
        """The longer step; None: it would not be longer, or must not be."""
        running = self._scheduler.slots.running
        if len(running) == 1 and len(plan.parts[0].item.tokens) == 1:
            return None  # a row that decodes, the common case
        if len(running) > 1 and any(each.state is not SequenceState.PREFILL for each in running):
            self._not_before_s = max(self._not_before_s, now + ALONE_S)
            return None
        requests = {part.sequence.key.request_id for part in plan.parts}
        are_all = len(requests) == len(running) == self._jobs.num_present  # else others wait, or come
        if not are_all or now < self._not_before_s or self._is_held_back(now):
            return None
        return self._scheduler.planner.lengthened(plan)

    def _is_held_back(self, now: float) -> bool:
        """Whether memory, heat, threads or a deadline are to be minded before a long step would end."""
        scheduler, deadline_s = self._scheduler, self._jobs.next_deadline_s()
        if scheduler.throttle != Throttle() or scheduler.cost.slowdown.times > QUIET_TIMES:
            return True
        return deadline_s is not None and deadline_s < now + scheduler.planner.budget.longest_alone_s
