"""Carries the scheduler's orders out on a backend, and tells the room how exports and imports ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.errors import StokerError
from stoker.scheduler.effects import Drop, Effect, Export, Fork, Import, Trim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol import Backend
    from stoker.scheduler.room import Room

log = logging.getLogger(__name__)


def carry_out(effects: Iterable[Effect], backend: Backend, room: Room) -> None:
    """Run the orders in their order. A snapshot that fails costs its sequence time, not its tokens.

    Holes that they leave are closed up, before a running sequence grows into one (docs/adr/0006).
    """
    has_freed = False
    for effect in effects:
        match effect:
            case Fork(src, dst, length):
                backend.fork(src, dst, length)
            case Trim(seq, length):
                backend.trim(seq, length)
                has_freed = True
            case Drop(seq):
                backend.drop(seq)
                has_freed = True
            case Export():
                _export(effect, backend, room)
            case Import():
                _import(effect, backend, room)
    if has_freed and (seqs := room.movable()):
        try:
            backend.close_up(seqs)
        except MemoryError:
            log.warning("no memory to close up %d sequences: last bits of their logits may differ", len(seqs))


def _export(order: Export, backend: Backend, room: Room) -> None:
    try:
        data = backend.export_state(order.seq)
    except (StokerError, MemoryError) as error:
        log.warning("no snapshot of %r, its tokens will be computed again: %s", order.sequence, error)
        room.lost(order.sequence)
    else:
        room.exported(order.sequence, data)


def _import(order: Import, backend: Backend, room: Room) -> None:
    sequence = order.sequence
    if sequence.snapshot is None:  # its export failed in this very turn
        room.lost(sequence)
        return
    try:
        backend.import_state(order.seq, sequence.snapshot)
    except (StokerError, MemoryError) as error:
        log.warning("the snapshot of %r was not taken, its tokens are computed again: %s", sequence, error)
        backend.drop(order.seq)
        room.lost(sequence)
    else:
        room.imported(sequence)
