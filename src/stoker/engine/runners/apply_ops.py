"""Carries the scheduler's orders out on a backend, and tells the room how exports and imports ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.cache.entry import EntryState
from stoker.errors import InvalidRequestError, StokerError, UnsupportedError
from stoker.kv.ops import Begin, Drop, Export, Fork, Import, KVOp, Trim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.extensions import StateTransfer
    from stoker.cache.entry import Entry
    from stoker.kv.allocator import KVAllocator
    from stoker.kv.sequence import Sequence

log = logging.getLogger(__name__)


def carry_out(ops: Iterable[KVOp], backend: Backend, allocator: KVAllocator) -> None:
    """Run the orders in their order. A state that cannot be had costs its sequence time, not its tokens."""
    for op in ops:
        match op:
            case Fork(src, dst, length):
                backend.fork(src, dst, length)
            case Trim(seq, length):
                backend.trim(seq, length)
            case Drop(seq):
                backend.drop(seq)
            case Export():
                _export(op, backend, allocator)
            case Import():
                _import(op, backend, allocator)
            case Begin(seq, sequence):
                _begin(seq, sequence, backend)


def _export(order: Export, backend: Backend, allocator: KVAllocator) -> None:
    entry = order.entry
    if entry.state is EntryState.RAM:
        return  # another order of this turn has brought it
    if entry.state is not EntryState.PENDING:  # another order of this turn has failed
        allocator.not_exported(entry, order.sequence)
        return
    try:
        data = _states_of(backend).export_state(order.seq)
    except (StokerError, MemoryError) as error:
        log.warning("no snapshot of %d tokens, they will be computed again: %s", entry.num_tokens, error)
        allocator.not_exported(entry, order.sequence)
    else:
        allocator.exported(entry, data)


def _import(order: Import, backend: Backend, allocator: KVAllocator) -> None:
    entry, sequence = order.entry, order.sequence
    if not sequence.is_importing:
        return  # it ended in the turn that admitted it
    if entry.data is None:  # its export has failed in this very turn
        _start_anew(order, backend, allocator)
        return
    try:
        _states_of(backend).import_state(order.seq, entry.data)
        _check_length(backend.length(order.seq), entry)
        if order.length < entry.num_tokens:
            backend.trim(order.seq, order.length)
    except (StokerError, MemoryError) as error:
        log.warning("the state of %r was not taken, its tokens are computed again: %s", sequence, error)
        _start_anew(order, backend, allocator)
        if isinstance(error, InvalidRequestError):
            allocator.cache.damaged(entry)
    else:
        allocator.imported(sequence)


def _check_length(length: int, entry: Entry) -> None:
    if length != entry.num_tokens:
        raise InvalidRequestError(f"a state of {length} tokens was kept as one of {entry.num_tokens}")


def _start_anew(order: Import, backend: Backend, allocator: KVAllocator) -> None:
    """The state could not be had: the sequence begins with its first token, here if it still runs here."""
    sequence = order.sequence
    backend.drop(order.seq)
    allocator.lost(sequence)
    if sequence.slot == order.seq and sequence.initial_state is not None:
        _begin(order.seq, sequence, backend)


def _begin(seq: int, sequence: Sequence, backend: Backend) -> None:
    recurrent = backend.extensions.recurrent
    assert recurrent is not None, f"{sequence!r} begins from a state that {backend!r} has not"
    recurrent.write_state(seq, sequence.initial_state or [])


def _states_of(backend: Backend) -> StateTransfer:
    states = backend.extensions.states
    if states is None:
        raise UnsupportedError(f"{backend.capabilities.description} gives no states to keep")
    return states
