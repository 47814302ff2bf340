"""A scheduler in numbers, for status pages and bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.kv.sequence import SequenceState

if TYPE_CHECKING:
    from stoker.scheduler.scheduler import Scheduler


def counters(scheduler: Scheduler) -> dict[str, float]:
    """Every counter of it."""
    running = scheduler.slots.running
    return {
        "num_waiting": len(scheduler.line),
        "num_parked": sum(s.state is SequenceState.PARKED for s in scheduler.line),
        "num_paused": len(scheduler.paused),
        "num_running": len(running),
        "num_prefill": sum(s.state is SequenceState.PREFILL for s in running),
        "num_slots": scheduler.limits.num_slots,
        "cells_total": scheduler.cells.total,
        "cells_used": scheduler.cells.used,
        "num_preemptions_total": scheduler.num_parked_total,
        "num_retired_total": scheduler.num_retired_total,
        "num_owed": sum(s.is_owed for s in (*scheduler.line, *running)),
        "num_owed_steps_total": scheduler.num_owed_steps_total,
        **scheduler.prefix_statistics.stats(),
    }
