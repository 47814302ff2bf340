"""A model of a machine whose cores are shared: threads that spin at barriers, other processes, a scheduler.

It counts what the real ones show: wall time of steps, processor time of this process and of others. Each
core gives time slices in turn to who runs on it; a step is a row of operations, after each of which every
thread waits, spinning, until all have done their part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.engine.threads.governor import StepSample, ThreadGovernor

TICK_S = 0.0005
READ_EVERY_S = 0.25
ROTATION = 20
"""Ticks in which a shared core serves everybody on it once."""
OTHERS_SHARE = 0.7
"""What another process gets of a core it shares with one of our threads: they also sleep, it does not."""

Noise = Callable[[float], float]


def quiet(_: float) -> float:
    """Nobody else."""
    return 0.0


@dataclass
class Machine:
    """Cores, and steps that take `step_s[n]` seconds with n threads that have a core each.

    Attributes:
        step_s: quiet time of a step by number of threads.
        noise: cores that others would like to use at a time; a fraction means short bursts.
        num_cores: of the machine.
        shows_others: whether the machine tells what others use.
        quota_cores: processor time this process may use in each 0.1 s, in cores.
    """

    step_s: dict[int, float]
    noise: Noise = quiet
    num_cores: int = 2
    shows_others: bool = True
    quota_cores: float | None = None
    now_s: float = 0.0
    num_steps: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)
    steps_at: list[float] = field(default_factory=list)
    _tick: int = 0
    _others_s: float = 0.0
    _last_read: tuple[float, float] = (0.0, 0.0)
    _others: float | None = None
    _period_cpu_s: float = 0.0

    def run(self, until_s: float, governor: ThreadGovernor | None = None, num_threads: int = 1) -> int:
        """Decode until then, governed or with a fixed number of threads; returns the steps made."""
        before = self.num_steps
        while self.now_s < until_s:
            count = governor.num_threads if governor else num_threads
            sample = self.step(count)
            others = self._read_others()
            decision = governor.observe(sample, others) if governor else None
            if decision:
                self.changes.append((self.now_s, decision.num_threads))
        return self.num_steps - before

    def idle(self, until_s: float) -> None:
        """No steps until then."""
        while self.now_s < until_s:
            self._pass(0, [])

    def step(self, num_threads: int) -> StepSample:
        """One step, as the engine would measure it."""
        started_s, cpu_s = self.now_s, 0.0
        num_operations = max(1, round(self.step_s[num_threads] / TICK_S))
        done = [0] * num_threads
        while min(done) < num_operations:
            cpu_s += self._pass(num_threads, done)
        self.num_steps += 1
        self.steps_at.append(self.now_s)
        return StepSample(
            at_s=self.now_s,
            wall_s=self.now_s - started_s,
            cpu_s=cpu_s,
            predicted_s=self.step_s[num_threads],
            num_threads=num_threads,
        )

    def speed(self, start_s: float, end_s: float) -> float:
        """Steps a second between two times."""
        return sum(start_s < at <= end_s for at in self.steps_at) / (end_s - start_s)

    def _pass(self, num_threads: int, done: list[int]) -> float:
        """One tick of every core; returns the processor time that our threads used."""
        others = self._others_on_cores(num_threads)
        behind = min(done, default=0)
        used_s = 0.0
        if self._tick % round(0.1 / TICK_S) == 0:
            self._period_cpu_s = 0.0
        for core in range(self.num_cores):
            if self._tick % ROTATION < others[core] * ROTATION:
                self._others_s += TICK_S
            elif core < num_threads and not self._is_throttled():
                used_s += TICK_S
                self._period_cpu_s += TICK_S
                if done[core] == behind:
                    done[core] += 1
        self._tick += 1
        self.now_s = self._tick * TICK_S
        return used_s

    def _others_on_cores(self, num_threads: int) -> list[float]:
        """The part of each core that others get: idle cores first, then one after the other of ours."""
        wanted = self.noise(self.now_s)
        shares = [0.0] * self.num_cores
        for core in (*range(num_threads, self.num_cores), *reversed(range(num_threads))):
            part = min(1.0, wanted)
            wanted -= part
            shares[core] = part if core >= num_threads else min(part, OTHERS_SHARE)
        return shares

    def _is_throttled(self) -> bool:
        return self.quota_cores is not None and self._period_cpu_s >= 0.1 * self.quota_cores

    def _read_others(self) -> float | None:
        at_s, others_s = self._last_read
        if self.shows_others and self.now_s - at_s >= READ_EVERY_S:
            self._others = (self._others_s - others_s) / (self.now_s - at_s)
            self._last_read = self.now_s, self._others_s
        return self._others
