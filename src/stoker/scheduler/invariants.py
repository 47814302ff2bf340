"""What is always true of a scheduler between two calls; asserted by tests, after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.kv.sequence import ParkForm, SequenceState

if TYPE_CHECKING:
    from stoker.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert that slots, line, cells and stored states tell one story."""
    scheduler.allocator.check()
    running, line, paused = scheduler.slots.running, scheduler.waiting(), scheduler.paused
    waiting, everybody = [*line, *paused], [*line, *paused, *running]
    assert len({s.key for s in everybody}) == len(everybody), "held twice"
    assert all(s.state in (SequenceState.PREFILL, SequenceState.DECODE) for s in running), running
    assert all(s.state in (SequenceState.QUEUED, SequenceState.PARKED) for s in line), line
    assert all(s.state is SequenceState.PAUSED for s in paused), paused
    for sequence in waiting:
        assert sequence.slot is None, f"{sequence!r} waits with a slot"
        assert (sequence.form is ParkForm.CELLS) == (sequence.home is not None), repr(sequence)
    assert {id(guest) for guest in scheduler.slots.guests()} <= {id(s) for s in waiting}, "a guest is gone"
    for sequence in everybody:
        entry = sequence.entry
        assert entry is None or sequence.key in entry.leases, f"{sequence!r} has no lease"
        assert sequence.form is not ParkForm.SNAPSHOT or entry is not None, repr(sequence)
