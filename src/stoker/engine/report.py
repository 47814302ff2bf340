"""What an engine says of itself: its whole status when asked, and short figures while somebody watches.

Owns how often which figures are posted, and what counts as news. The loop asks `tend` between steps; with
nobody watching that is one comparison.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.cache.prefix_tree import Reader
from stoker.cache.radix import key_of
from stoker.engine.residency.pressure import device_status
from stoker.engine.runners.status import waiting_status
from stoker.ipc.figures import CacheFigures, MemoryFigures, StepFigures
from stoker.ipc.status import EngineStatus, PrefixStatus
from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from stoker.backends.device import HeldDevices
    from stoker.cache.store import PrefixStore
    from stoker.engine.jobs.table import JobTable
    from stoker.engine.residency.pending import PendingRequests
    from stoker.engine.residency.pressure import PressureHandler
    from stoker.engine.residency.residency import Residency
    from stoker.engine.runners.runner import ModelRunner
    from stoker.engine.runners.turns import Runners
    from stoker.engine.threads.timer import StepTimer, Stopwatch
    from stoker.ipc.commands import Watch
    from stoker.machine.monitor import Sample

STEPS_EVERY_S = 0.25
MEMORY_EVERY_S = 1.0
CACHE_EVERY_S = 2.0
NEWS_SHARE = 0.01
"""A figure of memory that moved by less, of the limit, is no news."""
RATE_S = 60.0
"""Time over which the share of cached prompt tokens is told."""
NUM_PREFIXES = 64
"""Stored prefixes that are shown: the longest."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of, as far as it is reported."""

    clock: Stopwatch
    timer: StepTimer
    devices: HeldDevices
    store: PrefixStore
    jobs: JobTable
    runners: Runners
    pending: PendingRequests
    residency: Residency
    pressure: PressureHandler
    take_sample: Callable[[], Sample]


class EngineReport:
    """The status and the figures of one engine."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._is_watched = False
        self._steps_s: dict[str, float] = {}
        self._busy: set[str] = set()
        self._memory_s = self._cache_s = self._due_s = self._next_steps_s = math.inf
        self._memory: MemoryFigures | None = None
        self._cache_mark: tuple[object, ...] = ()
        self._prompts: deque[tuple[float, int, int]] = deque(maxlen=int(RATE_S / CACHE_EVERY_S) + 1)

    def __repr__(self) -> str:
        return f"<EngineReport {'watched' if self._is_watched else 'asleep'}>"

    # ------------------------------------------------------------ figures

    def watch(self, wanted: Watch, now: float) -> None:
        """Post figures from now on, all of them at first, or no longer."""
        self._is_watched = wanted.is_watched
        if not wanted.is_watched:
            self._due_s = self._next_steps_s = math.inf
            return
        self._memory, self._cache_mark = None, ()
        self._memory_s = self._cache_s = self._due_s = self._next_steps_s = now
        self._steps_s = {runner.spec.id: now for runner in self._parts.runners}
        self._prompts.clear()
        for runner in self._parts.runners:
            runner.tally.taken()

    def next_due_s(self) -> float | None:
        """When `tend` has something to do though nothing is computed; None: it has not."""
        return self._due_s if self._is_watched else None

    def tend(self, now: float) -> None:
        """Post what is due."""
        if now < self._due_s and not (now >= self._next_steps_s and self._parts.runners.has_work):
            return
        self._next_steps_s = now + STEPS_EVERY_S
        for runner in self._parts.runners:
            self._tend_steps(runner, now)
        if now >= self._memory_s:
            self._memory_s = now + MEMORY_EVERY_S
            self._tend_memory(now)
        if now >= self._cache_s:
            self._cache_s = now + CACHE_EVERY_S
            self._tend_cache(now)
        self._due_s = min(now + STEPS_EVERY_S if self._busy else math.inf, self._memory_s, self._cache_s)

    def _tend_steps(self, runner: ModelRunner, now: float) -> None:
        name = runner.spec.id
        since_s = self._steps_s.get(name, now)
        if now - since_s < STEPS_EVERY_S:
            self._steps_s.setdefault(name, now)
            return
        self._steps_s[name] = now
        tally = runner.tally.taken()
        if tally.num_steps:
            self._busy.add(name)
        elif name not in self._busy or runner.has_work:
            return  # it was idle, or is in a long step
        else:
            self._busy.discard(name)
        num_steps = tally.num_steps or 1
        num_prefill, num_decode = runner.num_computing
        self._parts.jobs.events.append(
            StepFigures(
                model=name,
                num_steps=tally.num_steps,
                span_s=round(now - since_s, 4),
                step_ms=round(tally.took_s / num_steps * 1000.0, 3),
                longest_ms=round(tally.longest_s * 1000.0, 3),
                target_ms=runner.spec.target_step_ms,
                rows=round(tally.num_rows / num_steps, 2),
                prompt_tokens=tally.num_prompt_tokens,
                tokens=tally.num_drawn,
                num_prefill=num_prefill,
                num_decode=num_decode,
                threads=self._parts.timer.num_threads,
                threads_reason=self._parts.timer.reason,
            )
        )

    def _tend_memory(self, now: float) -> None:
        parts, sample = self._parts, self._parts.take_sample()
        found = MemoryFigures(
            memory=parts.pressure.status(sample, parts.store.ledger.lines()),
            physical=sample.total_bytes,
            devices=device_status(parts.devices, sample.devices, parts.store.ledger.device_lines()),
            models=parts.residency.status(now),
        )
        if self._memory is None or _has_moved(self._memory, found):
            self._memory = found
            parts.jobs.events.append(found)

    def _tend_cache(self, now: float) -> None:
        parts = self._parts
        asked, saved = self._prompt_tokens()
        self._prompts.append((now, asked, saved))
        _, asked_before, saved_before = self._prompts[0]
        num_asked = asked - asked_before
        used, total = self._cells()
        status = parts.store.cache.status()
        mark = (status, asked, saved, used * 100 // max(1, total), total)
        if mark == self._cache_mark:
            return
        self._cache_mark = mark
        parts.jobs.events.append(
            CacheFigures(
                cache=status,
                prefixes=self._prefixes(now),
                cells_used=used,
                cells_total=total,
                queries_total=asked,
                hits_total=saved,
                hit_rate=(saved - saved_before) / num_asked if num_asked else None,
            )
        )

    def _prompt_tokens(self) -> tuple[int, int]:
        """Prompt tokens that were asked for, and those of them that were cached, of all models."""
        asked = saved = 0.0
        for runner in self._parts.runners:
            counts = runner.stats()
            asked += counts.get("prompt_tokens_total", 0.0)
            saved += sum(value for name, value in counts.items() if name.startswith("cached_tokens_"))
        return int(asked), int(saved)

    def _cells(self) -> tuple[int, int]:
        cells = [runner.num_cells for runner in self._parts.runners]
        return sum(used for _, used in cells), sum(total for total, _ in cells)

    def _prefixes(self, now: float) -> list[PrefixStatus]:
        readers = [
            Reader(sequence.key.request_id, sequence.namespace, key_of(sequence.tokens))
            for runner in self._parts.runners
            for sequence in runner.running
        ]
        names = {runner.spec.path: runner.spec.id for runner in self._parts.runners}
        return self._parts.store.cache.prefixes(NUM_PREFIXES, readers, names, now)

    # ------------------------------------------------------------ all of it

    def status(self, num_turns: int) -> EngineStatus:
        """Everything that `/v1/runtime` shows of the engine."""
        parts = self._parts
        runners, now, sample = list(parts.runners), parts.clock.now(), parts.take_sample()
        counters = {
            "num_turns": float(num_turns),
            "num_steps": float(parts.clock.num_steps),
            "step_busy_s": parts.clock.busy_s,
            "num_preparing": float(sum(job.preparation is not None for job in parts.jobs)),
        }
        for runner in runners:
            for name, value in runner.stats().items():
                counters[name] = counters.get(name, 0.0) + value
        counters |= parts.store.cache.stats()
        counters["step_target_ms"] = max((r.spec.target_step_ms for r in runners), default=0.0)
        waiting = waiting_status(runners, now)
        used, total = self._cells()
        return EngineStatus(
            slots=[status for runner in runners for status in runner.slot_status(now)],
            queue=[*waiting[SequenceState.QUEUED], *parts.pending.waiting_status()],
            parked=waiting[SequenceState.PARKED],
            paused=[*waiting[SequenceState.PAUSED], *parts.pending.paused_status()],
            num_threads=parts.timer.num_threads,
            threads_reason=parts.timer.reason,
            devices=device_status(parts.devices, sample.devices, parts.store.ledger.device_lines()),
            counters=counters,
            cache=parts.store.cache.status(),
            models=parts.residency.status(now),
            memory=parts.pressure.status(sample, parts.store.ledger.lines()),
            kv_cells_total=total,
            kv_cells_used=used,
            activity={r.spec.id: figures for r in runners if (figures := r.activity(now))},
            prefixes=self._prefixes(now),
            rooms={r.spec.id: room for r in runners if (room := r.room()) is not None},
        )


def _has_moved(before: MemoryFigures, now: MemoryFigures) -> bool:
    """Whether a figure moved by as much as is news, or anything that is no figure."""
    if _marks(before) != _marks(now):
        return True
    least = NEWS_SHARE * max(1, now.memory.limit)
    if any(abs(new - old) >= least for old, new in zip(_bytes(before), _bytes(now), strict=True)):
        return True
    pairs = zip(before.devices, now.devices, strict=True)
    return any(abs(new.free - old.free) >= NEWS_SHARE * max(1, new.total) for old, new in pairs)


def _marks(figures: MemoryFigures) -> tuple[object, ...]:
    memory = figures.memory
    models = [
        (one.id, one.state, one.leases, one.is_pinned, one.keep_alive_s, one.unload_in_s is None)
        for one in figures.models
    ]
    devices = [(device.id, device.held_by, sorted(device.lines)) for device in figures.devices]
    return memory.pressure, memory.heat, memory.limit, memory.rungs, sorted(memory.lines), models, devices


def _bytes(figures: MemoryFigures) -> list[int]:
    memory = figures.memory
    lines = [size for _, size in sorted(memory.lines.items())]
    return [memory.footprint, memory.available, *lines]
