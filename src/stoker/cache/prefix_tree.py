"""Stored prefixes as people are shown them: a tree of what begins alike, no token of any (SPEC C14)."""

from __future__ import annotations

import heapq
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from stoker.cache.entry import MIN_TOKENS, Entry, EntryIndex
from stoker.cache.radix import TOKEN_BYTES
from stoker.ipc.status import PrefixStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMESPACE_CHARS = 8
_TAIL_BYTES = 64 * TOKEN_BYTES
JUNCTION = "junction"
"""Where a beginning is that several have in common and that is not stored by itself."""


class Reader(NamedTuple):
    """A request that computes: its namespace, and its tokens as `key_of` makes them."""

    request_id: str
    namespace: bytes
    key: bytes


def prefix_tree(index: EntryIndex, count: int, readers: Iterable[Reader], now: float) -> list[PrefixStatus]:
    """So many prefixes, the longest stored ones and what they have in common, each after its parent.

    Args:
        index: of what is stored.
        count: the most that are shown.
        readers: requests that compute now.
        now: on the clock of the entries.
    """
    used_by: dict[int, list[str]] = {}
    for reader in readers:
        for hit in index.find(reader.namespace, reader.key, is_exact=False)[:1]:
            used_by.setdefault(hit.entry.number, []).append(reader.request_id)
    found: dict[str, PrefixStatus] = {}
    for entry in heapq.nlargest(count, index, key=lambda entry: entry.num_tokens):
        path = [
            (_id_of(entry, num_tokens, stored), num_tokens, stored)
            for num_tokens, stored in index.above(entry)
            if num_tokens >= MIN_TOKENS
        ]
        parent = None
        for node_id, num_tokens, stored in path:
            if node_id not in found:
                found[node_id] = (
                    _junction(entry, node_id, parent, num_tokens)
                    if stored is None
                    else _stored(stored, index, parent, used_by, now)
                )
            parent = node_id
        found.setdefault(entry.id, _stored(entry, index, parent, used_by, now))
        if len(found) >= count:
            break
    return list(found.values())[:count]


def _id_of(entry: Entry, num_tokens: int, stored: Entry | None) -> str:
    """The name of a place above an entry."""
    if stored is not None:
        return stored.id
    end = num_tokens * TOKEN_BYTES
    tail = entry.key[max(0, end - _TAIL_BYTES) : end]
    mark = blake2b(tail, key=entry.namespace[:64], digest_size=4).hexdigest()
    return f"{entry.namespace.hex()[:NAMESPACE_CHARS]}-{num_tokens}-{mark}"


def _junction(entry: Entry, node_id: str, parent: str | None, num_tokens: int) -> PrefixStatus:
    return PrefixStatus(
        id=node_id,
        parent=parent,
        namespace=entry.namespace.hex()[:NAMESPACE_CHARS],
        source=entry.source,
        where=JUNCTION,
        num_tokens=num_tokens,
        own_tokens=0,
        ram_bytes=0,
        disk_bytes=0,
        num_hits=0,
        idle_s=0.0,
        num_leases=0,
        is_background=False,
    )


def _stored(
    entry: Entry, index: EntryIndex, parent: str | None, used_by: dict[int, list[str]], now: float
) -> PrefixStatus:
    return PrefixStatus(
        id=entry.id,
        parent=parent,
        namespace=entry.namespace.hex()[:NAMESPACE_CHARS],
        source=entry.source,
        where=str(entry.state),
        num_tokens=entry.num_tokens,
        own_tokens=index.figures(entry, now).num_saved,
        ram_bytes=entry.size_bytes if entry.is_in_ram else 0,
        disk_bytes=entry.file_bytes,
        num_hits=entry.num_hits,
        idle_s=max(0.0, now - entry.used_s),
        num_leases=len(entry.leases),
        is_background=entry.is_background,
        used_by=used_by.get(entry.number, []),
    )
