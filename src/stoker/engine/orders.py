"""Carries the scheduler's orders out on a backend, and tells the room how exports and imports ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.cache.entry import EntryState
from stoker.errors import InvalidRequestError, StokerError
from stoker.scheduler.effects import Begin, Drop, Effect, Export, Fork, Import, Trim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol import Backend
    from stoker.scheduler.room import Room

log = logging.getLogger(__name__)


def carry_out(effects: Iterable[Effect], backend: Backend, room: Room) -> None:
    """Run the orders in their order. A state that cannot be had costs its sequence time, not its tokens.

    Holes that they leave are closed up, before a running sequence grows into one (docs/adr/0006).
    """
    has_freed = False
    for effect in effects:
        match effect:
            case Fork(src, dst, length):
                if length:
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
                has_freed |= _import(effect, backend, room)
            case Begin(seq, sequence):
                backend.write_state(seq, sequence.initial_state or [])
    if has_freed and (seqs := room.movable()):
        try:
            backend.close_up(seqs)
        except MemoryError:
            log.warning("no memory to close up %d sequences: last bits of their logits may differ", len(seqs))


def _export(order: Export, backend: Backend, room: Room) -> None:
    entry = order.entry
    if entry.state is EntryState.RAM:
        return  # another order of this turn has brought it
    try:
        if entry.state is not EntryState.PENDING:
            raise StokerError("it was given up in this very turn")
        data = backend.export_state(order.seq)
    except (StokerError, MemoryError) as error:
        log.warning("no snapshot of %d tokens, they will be computed again: %s", entry.num_tokens, error)
        room.not_exported(entry, order.sequence)
    else:
        room.exported(entry, data)


def _import(order: Import, backend: Backend, room: Room) -> bool:
    """Returns whether cells were freed, as of a state only a part is kept."""
    data, sequence = order.entry.data, order.sequence
    try:
        if data is None:
            raise StokerError("it was not exported")
        backend.import_state(order.seq, data)
        is_cut = order.length < order.entry.num_tokens
        if is_cut:
            backend.trim(order.seq, order.length)
    except (StokerError, MemoryError) as error:
        log.warning("the state of %r was not taken, its tokens are computed again: %s", sequence, error)
        backend.drop(order.seq)
        room.lost(sequence)
        if isinstance(error, InvalidRequestError):
            room.cache.damaged(order.entry)
        if sequence.initial_state is not None:
            backend.write_state(order.seq, sequence.initial_state)
        return False
    room.imported(sequence)
    return is_cut
