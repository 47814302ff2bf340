"""Summaries that an engine posts while somebody watches it: steps, memory, what is stored (SPEC O3).

They are asked for by `Watch`, and cost nothing while nobody does.
"""

from __future__ import annotations

import msgspec

from stoker.ipc.status import (
    CacheStatus,
    DeviceStatus,
    MachineStatus,
    MemoryStatus,
    ModelStatus,
    PrefixStatus,
)


class StepFigures(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The steps of one model since the last such summary, at most four a second.

    Attributes:
        num_steps: steps in the span; 0: it has fallen idle.
        span_s: seconds since the last summary, or since the first step after it was idle.
        step_ms, longest_ms: of a step, on average and of the longest.
        target_ms: what a step beside readers is to take.
        rows: sequences that wrote, a step, on average.
        prompt_tokens: of prompts, computed in the span.
        tokens: drawn in the span.
        num_prefill, num_decode: sequences in slots now that read and that write.
        threads, threads_reason: what steps on the CPU use now, and why that is fewer than set.
    """

    model: str
    num_steps: int
    span_s: float
    step_ms: float
    longest_ms: float
    target_ms: float
    rows: float
    prompt_tokens: int
    tokens: int
    num_prefill: int
    num_decode: int
    threads: int = 0
    threads_reason: str = ""


class MemoryFigures(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Memory, devices and models, at most once a second, when a figure has moved.

    `physical` are the bytes of the machine's memory.
    """

    memory: MemoryStatus
    physical: int
    devices: list[DeviceStatus]
    models: list[ModelStatus]


class CacheFigures(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What is stored of prompts, at most once in two seconds, when that has changed.

    Attributes:
        prefixes: the longest stored ones.
        cells_used, cells_total: of all models in memory.
        queries_total, hits_total: prompt tokens asked for, and those of them that were not computed.
        hit_rate: of the last minute; None: nothing was asked for.
    """

    cache: CacheStatus
    prefixes: list[PrefixStatus]
    cells_used: int
    cells_total: int
    queries_total: int
    hits_total: int
    hit_rate: float | None


class MachineFigures(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The machines of a gate, once a second."""

    machines: list[MachineStatus]


Figures = StepFigures | MemoryFigures | CacheFigures | MachineFigures
