"""How many threads a step should use while other processes come and go (SPEC M7).

Pure: time and measurements are arguments, a change is a value. Threads of a step wait for each other, by
spinning, at every operation of the model. A core that has to be shared therefore slows all of them: on two
cores with one busy, two threads are several times slower than one (docs/threads.md has figures).

What tells: with a core each, threads that spin use as much processor time as wall time, all together
`num_threads` times as much. What is missing of that was lost to others. Cores that others use show it
and, since a single thread loses nothing, they alone say when the cores are free again. Where they are
not known, or do not explain the loss, more threads are tried again after a growing while.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from stoker.machine.cores import SPARE_CORES, threads_that_fit

WINDOW_S = 0.5
"""How much of the latest step time is judged."""
EVIDENCE_S = 0.3
"""Step time that is enough to lower: a burst shorter than this passes."""
LOST_CORES = 0.4
"""Mean loss from which others are in the way. A quiet machine was seen to lose 0.0 to 0.1, a robbed one 0.5
to 1.0; half a core lost on two is also about where one thread begins to be the quicker choice."""
DISTURBED_CORES = 0.25
"""Mean loss from which steps take visibly longer than on a quiet machine."""
BLIND_EVIDENCE_S = 0.45
"""Step time that is enough to lower where others do not explain the loss."""
LAG_S = 0.3
"""What is known of others is that old, or a little less."""
BLIND_LOST_CORES = 0.5
BLIND_SLOWDOWN = 1.3
"""Without an explanation, steps must also be that many times over their prediction."""
HOLD_S = 0.25
"""How long the cores have to be free before more threads are used, at first."""
MAX_HOLD_S = 2.0
HOLD_GROWTH = 4
RELAPSE_S = 1.5
"""Cores lost again so soon were not free: next time they have to be so for HOLD_GROWTH times as long."""
TRIAL_S = 0.12
TRIAL_STEPS = 3
FIRST_TRIAL_AFTER_S = 1.0
MAX_TRIAL_AFTER_S = 30.0
GAP_S = 2.0
"""After so long without a step, what was seen before says nothing."""
TAKEN_CORES = 0.75
"""Cores short in a pause from which the step after it begins with fewer threads."""

_OTHERS_TEXT = "other processes use {:.1f} of {} cores"


@dataclass(frozen=True, slots=True)
class StepSample:
    """One native step.

    Attributes:
        at_s: when it ended, on a monotonic clock.
        wall_s: how long it took.
        cpu_s: processor time that this process used meanwhile, all threads together.
        predicted_s: what such a step takes with so many threads on a quiet machine, if known.
        num_threads: what it ran with.
    """

    at_s: float
    wall_s: float
    cpu_s: float
    predicted_s: float | None
    num_threads: int

    @property
    def lost_cores(self) -> float:
        """Cores that its threads should have had and did not get."""
        return self.num_threads - self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Use that many threads from the next step on."""

    num_threads: int
    reason: str


class _Window:
    """The latest steps with one number of threads, with running sums."""

    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque()
        self.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self.wall_s = self._lost_s = self._foreseen_s = self._predicted_s = 0.0

    def add(self, sample: StepSample) -> None:
        self._samples.append(sample)
        self._count(sample, 1)
        while self.wall_s - self._samples[0].wall_s >= WINDOW_S:
            self._count(self._samples.popleft(), -1)

    def _count(self, sample: StepSample, sign: int) -> None:
        self.wall_s += sign * sample.wall_s
        self._lost_s += sign * sample.lost_cores * sample.wall_s
        if sample.predicted_s:
            self._foreseen_s += sign * sample.wall_s
            self._predicted_s += sign * sample.predicted_s

    @property
    def lost_cores(self) -> float:
        """Mean over the time in steps."""
        return self._lost_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_slow(self) -> bool | None:
        """Whether this took much longer than predicted; None where nothing was predicted."""
        if self._predicted_s <= 0:
            return None
        return self._foreseen_s >= BLIND_SLOWDOWN * self._predicted_s


@dataclass(slots=True)
class _Trials:
    """Trying more threads where nothing tells whether the cores are free."""

    fallback: int
    next_at_s: float
    is_running: bool = False


class ThreadGovernor:
    """Follows the free cores, between 1 and `max_threads`.

    Args:
        max_threads: what steps use when nothing is in the way: the user's number, or the physical cores.
        num_cores: cores this process may use; as many as threads if not given.
    """

    def __init__(self, max_threads: int, num_cores: int | None = None) -> None:
        self.max_threads = max_threads
        self.num_cores = num_cores or max_threads
        self._num_threads = max_threads
        self._reason = ""
        self._window = _Window()
        self._last_s: float | None = None
        self._is_crowded = False
        self._free_since_s: float | None = None
        self._lost_since_s: float | None = None
        self._hold_s = HOLD_S
        self._raised_at_s = -math.inf
        self._trials: _Trials | None = None
        self._trial_after_s = FIRST_TRIAL_AFTER_S
        self._trial_kept_at_s = -math.inf

    def __repr__(self) -> str:
        why = f" ({self._reason})" if self._reason else ""
        return f"<ThreadGovernor {self._num_threads} of {self.max_threads} threads{why}>"

    @property
    def num_threads(self) -> int:
        """What steps should use now."""
        return self._num_threads

    @property
    def reason(self) -> str:
        """Why that is less than `max_threads`; empty if it is not."""
        return self._reason

    @property
    def is_disturbed(self) -> bool:
        """Whether steps now take longer than on a quiet machine, so that their times teach nothing."""
        return self._is_crowded or self._window.lost_cores >= DISTURBED_CORES

    def forget(self) -> None:
        """Drop what was seen of steps: something has been done about it."""
        self._window.clear()
        self._free_since_s = self._lost_since_s = None

    def observe(
        self, sample: StepSample, others_cores: float | None, beside_cores: float | None = None
    ) -> Decision | None:
        """Judge a step that ended.

        Args:
            sample: the step; one that ran with another number of threads than decided says nothing.
            others_cores: cores that other processes used lately; None: not known.
            beside_cores: cores that they used while steps ran, by which more threads may fit; None: as many.

        Returns:
            What to change, or None.
        """
        started_s = sample.at_s - sample.wall_s
        woken = self.wake(started_s, others_cores)
        self._last_s = sample.at_s
        if woken is not None:
            return woken
        if sample.num_threads != self._num_threads:
            return None
        self._window.add(sample)
        if self._trials is not None and self._trials.is_running:
            return self._judge_trial(sample.at_s)
        lowered = self._lower(sample, others_cores)
        if others_cores is not None and beside_cores is not None:
            others_cores = min(others_cores, beside_cores)
        return lowered or self._raise(sample, others_cores)

    def wake(self, now_s: float, others_cores: float | None) -> Decision | None:
        """A step begins, perhaps after a pause: then raise at once if the cores have become free.

        Args:
            now_s: when it begins.
            others_cores: as for `observe`, over the pause.
        """
        if self._last_s is None or now_s - self._last_s <= GAP_S:
            return None
        self._last_s = now_s
        self.forget()
        if others_cores is None or self._trials is not None:
            return None
        fitting = self._fitting(others_cores)
        return self._raise_to(fitting, now_s) if fitting > self._num_threads else None

    def start(self, now_s: float, others_cores: float) -> Decision | None:
        """The first step begins, of all or after a pause: lower where others have plainly taken cores.

        No step has shown a loss lately, so this takes more than `_lower` does: a step of a long prompt on
        cores that are taken lasts many times as long as with fewer threads.

        Args:
            now_s: when it begins.
            others_cores: cores that other processes used over the last seconds.
        """
        if not self.is_short(others_cores):
            return None
        return self._lower_to(self._fitting(others_cores), now_s, self._others_text(others_cores))

    def take_back(self, now_s: float, others_cores: float) -> Decision | None:
        """The step for which `start` lowered did not take place: raise where others have gone meanwhile."""
        fitting = self._fitting(others_cores)
        return self._raise_to(fitting, now_s) if fitting > self._num_threads else None

    def is_short(self, others_cores: float) -> bool:
        """Whether so many cores are missing, where others use these, that no step has to show it."""
        is_taken = self._num_threads + others_cores >= self.num_cores + TAKEN_CORES
        return is_taken and self._fitting(others_cores) < self._num_threads

    def waits_for_cores(self, others_cores: float) -> bool:
        """Whether threads were given up, and more of them would not fit beside such others."""
        is_less = self._num_threads < min(self.max_threads, self.num_cores)
        return is_less and self._fitting(others_cores) <= self._num_threads

    # ------------------------------------------------------------ fewer

    def _lower(self, sample: StepSample, others_cores: float | None) -> Decision | None:
        lost = self._window.lost_cores
        self._is_crowded = False
        if others_cores is not None:
            self._is_crowded = self._num_threads + others_cores > self.num_cores + SPARE_CORES
            fitting = self._fitting(others_cores)
            if fitting < self._num_threads:
                if self._window.wall_s < EVIDENCE_S or lost < LOST_CORES:
                    return None
                return self._lower_to(fitting, sample.at_s, self._others_text(others_cores))
        if not self._is_lost_without_reason(sample, others_cores):
            return None
        got = self._num_threads - lost
        reason = f"this process gets {got:.1f} of {self._num_threads} cores"
        return self._lower_blindly(max(1, int(got + 1 - BLIND_LOST_CORES)), sample.at_s, reason)

    def _is_lost_without_reason(self, sample: StepSample, others_cores: float | None) -> bool:
        """Whether cores are lost that no process uses, for longer than a reading of others may lag."""
        window = self._window
        is_lost = window.wall_s >= BLIND_EVIDENCE_S and window.lost_cores >= BLIND_LOST_CORES
        is_slow = window.is_slow
        if is_slow is None:  # cold weights that come from the disk look the same, on a machine at rest
            is_slow = others_cores is None
        if self._num_threads == 1 or not is_lost or not is_slow:
            self._lost_since_s = None
            return False
        if self._lost_since_s is None:
            self._lost_since_s = sample.at_s - sample.wall_s
        return others_cores is None or sample.at_s - self._lost_since_s >= LAG_S

    def _lower_to(self, num_threads: int, now_s: float, reason: str) -> Decision:
        is_relapse = now_s - self._raised_at_s < RELAPSE_S
        self._hold_s = min(MAX_HOLD_S, HOLD_GROWTH * self._hold_s) if is_relapse else HOLD_S
        self._trials = None
        return self._change(num_threads, reason)

    def _lower_blindly(self, num_threads: int, now_s: float, reason: str) -> Decision:
        is_relapse = now_s - self._trial_kept_at_s < RELAPSE_S
        self._trial_after_s = self._next_trial_after_s() if is_relapse else FIRST_TRIAL_AFTER_S
        self._trials = _Trials(fallback=num_threads, next_at_s=now_s + self._trial_after_s)
        return self._change(num_threads, reason)

    # ------------------------------------------------------------ more

    def _raise(self, sample: StepSample, others_cores: float | None) -> Decision | None:
        now_s = sample.at_s
        if self._num_threads >= min(self.max_threads, self.num_cores):
            return None
        fitting = None if others_cores is None else self._fitting(others_cores)
        if others_cores is not None and fitting is not None and fitting <= self._num_threads:
            self._free_since_s = self._trials = None  # from now on this tells when to raise
            self._reason = self._others_text(others_cores)
            return None
        if fitting is None or self._trials is not None:
            return self._try_more(now_s)
        if self._free_since_s is None:
            self._free_since_s = now_s - sample.wall_s
        if now_s - self._free_since_s < self._hold_s:
            return None
        return self._raise_to(fitting, now_s)

    def _raise_to(self, num_threads: int, now_s: float) -> Decision:
        self._raised_at_s = now_s
        self._change(num_threads, self._reason if num_threads < self.max_threads else "")
        return Decision(num_threads, "the cores are free again")

    # ------------------------------------------------------------ trials

    def _try_more(self, now_s: float) -> Decision | None:
        if self._trials is None:  # others were known when threads were lowered, and are no more
            self._trials = _Trials(fallback=self._num_threads, next_at_s=now_s + self._trial_after_s)
        if now_s < self._trials.next_at_s:
            return None
        self._trials.is_running = True
        reason = self._reason
        self._change(min(self.max_threads, self.num_cores), reason)
        return Decision(self._num_threads, "a trial: nothing tells whether the cores are free")

    def _judge_trial(self, now_s: float) -> Decision | None:
        window, trials = self._window, self._trials
        assert trials is not None
        is_over = window.wall_s >= EVIDENCE_S or (window.wall_s >= TRIAL_S and len(window) >= TRIAL_STEPS)
        if not is_over:
            return None
        lost = window.lost_cores
        if lost < LOST_CORES or window.is_slow is False:
            self._trials = None
            self._reason = "" if self._num_threads == self.max_threads else self._reason
            self._trial_kept_at_s = now_s
            return None
        self._trial_after_s = self._next_trial_after_s()
        trials.is_running = False
        trials.next_at_s = now_s + self._trial_after_s
        num_threads = max(trials.fallback, int(self._num_threads - lost + 1 - BLIND_LOST_CORES))
        return self._change(min(num_threads, self._num_threads - 1), self._reason)

    def _next_trial_after_s(self) -> float:
        return min(MAX_TRIAL_AFTER_S, 2 * self._trial_after_s)

    # ------------------------------------------------------------ both

    def _fitting(self, others_cores: float) -> int:
        return threads_that_fit(self.max_threads, self.num_cores, others_cores)

    def _others_text(self, others_cores: float) -> str:
        if self._fitting(0.0) == self._fitting(others_cores):
            return f"there are {self.num_cores} cores"
        return _OTHERS_TEXT.format(others_cores, self.num_cores)

    def _change(self, num_threads: int, reason: str) -> Decision:
        self._num_threads = num_threads
        self._reason = reason
        self.forget()
        return Decision(num_threads, reason)
