"""Applies the scheduler's KV ops to a backend, and reports to the allocator how exports and imports ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from stoker.cache.entry import EntryState
from stoker.errors import InvalidRequestError, StokerError
from stoker.kv.ops import Begin, Drop, Export, Fork, Import, KVOp, Trim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.backend import Backend
    from stoker.cache.entry import Entry
    from stoker.kv.allocator import KVAllocator
    from stoker.kv.sequence import Sequence

log = logging.getLogger(__name__)


def carry_out(
    ops: Iterable[KVOp], backend: Backend, allocator: KVAllocator
) -> list[tuple[Sequence, StokerError]]:
    """Apply ops in op. A snapshot that cannot be had costs its sequence time, not its tokens.

    Returns:
        Sequences whose initial state the backend did not take; the caller ends them.
    """
    failed: list[tuple[Sequence, StokerError]] = []
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
                failed += _import(op, backend, allocator)
            case Begin(seq, sequence):
                failed += _begin(seq, sequence, backend)
    return failed


def _export(op: Export, backend: Backend, allocator: KVAllocator) -> None:
    entry = op.entry
    if entry.state is EntryState.RAM:
        return  # another op of this turn has brought it
    states = backend.extensions.states
    if states is None or entry.state is not EntryState.PENDING:  # another op of this turn has failed
        allocator.not_exported(entry, op.sequence)
        return
    try:
        data = states.export_state(op.seq)
    except (StokerError, MemoryError) as error:
        log.warning("no snapshot of %d tokens, they will be computed again: %s", entry.num_tokens, error)
        allocator.not_exported(entry, op.sequence)
    else:
        allocator.exported(entry, data)


def _import(op: Import, backend: Backend, allocator: KVAllocator) -> list[tuple[Sequence, StokerError]]:
    entry, sequence = op.entry, op.sequence
    if not sequence.is_importing:
        return []  # it ended in the turn that admitted it
    if entry.data is None:  # its export has failed in this very turn
        return _start_anew(op, backend, allocator)
    states = backend.extensions.states
    assert states is not None, f"{backend!r} has exported nothing"
    try:
        states.import_state(op.seq, entry.data)
        _check_length(backend.length(op.seq), entry)
        if op.length < entry.num_tokens:
            backend.trim(op.seq, op.length)
    except (StokerError, MemoryError) as error:
        log.warning("the state of %r was not taken, its tokens are computed again: %s", sequence, error)
        failed = _start_anew(op, backend, allocator)
        if isinstance(error, InvalidRequestError):
            allocator.cache.damaged(entry)
        return failed
    allocator.imported(sequence)
    return []


def _check_length(length: int, entry: Entry) -> None:
    if length != entry.num_tokens:
        raise InvalidRequestError(f"a state of {length} tokens was kept as one of {entry.num_tokens}")


def _start_anew(op: Import, backend: Backend, allocator: KVAllocator) -> list[tuple[Sequence, StokerError]]:
    """The state could not be had: the sequence begins with its first token, here if it still runs here."""
    sequence = op.sequence
    backend.drop(op.seq)
    allocator.lost(sequence)
    if sequence.slot == op.seq and sequence.initial_state is not None:
        return _begin(op.seq, sequence, backend)
    return []


def _begin(seq: int, sequence: Sequence, backend: Backend) -> list[tuple[Sequence, StokerError]]:
    recurrent = backend.extensions.recurrent
    assert recurrent is not None, f"{sequence!r} begins from a state that {backend!r} has not"
    try:
        recurrent.write_state(seq, sequence.initial_state or [])
    except StokerError as error:
        return [(sequence, error)]
    return []
