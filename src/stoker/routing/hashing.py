"""Hashes of what prompts begin with, and consistent hashing of them to machines.

`prefix_chain` gives a prompt one hash a part: its first is the same for all that share a system prompt, the
next for all turns of a conversation. `Ring` has several points a machine on a circle of 64 bits, and a key
belongs to the machine of the next point. A machine that comes takes only its own share of the keys, one that
goes leaves only its own (Karger et al., "Consistent Hashing and Random Trees", STOC 1997).

The hashes are the same in every process and release: several doors of a site agree without talking.
Pure.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from hashlib import blake2b

HASH_BYTES = 8
MIN_SYSTEM_BYTES = 1024
"""A shorter system prompt, some 250 tokens, is no reason to keep its conversations together."""
POINTS_PER_SLOT = 16
MIN_POINTS = 64
MAX_POINTS = 512
"""A machine's share of the keys follows its slots between these; the bound of its load goes on from there."""
_POINTS_PER_DIGEST = 8
_DIGEST = struct.Struct(f"<{_POINTS_PER_DIGEST}Q")


def prefix_chain(namespace: bytes, parts: Sequence[bytes]) -> tuple[int, ...]:
    """One 64-bit hash a part, each of the namespace and every part up to it.

    Args:
        namespace: what keeps prompts apart that are never shared: the model, the key's own salt.
        parts: what the prompt is made of in its order; empty ones are left out.
    """
    chain = []
    before = blake2b(namespace, digest_size=HASH_BYTES, person=b"stoker.ns").digest()
    for part in parts:
        if part:
            before = blake2b(part, digest_size=HASH_BYTES, key=before).digest()
            chain.append(int.from_bytes(before, "little"))
    return tuple(chain)


def conversation_parts(system: bytes, turns: Sequence[bytes]) -> tuple[bytes, ...]:
    """The parts of a conversation for `prefix_chain`; a short system prompt counts to the first turn.

    Conversations that share next to nothing are spread over the machines from their first turn on.
    """
    if system and turns and len(system) < MIN_SYSTEM_BYTES:
        return (struct.pack("<Q", len(system)) + system + turns[0], *turns[1:])
    return (system, *turns)


def name_key(name: str) -> int:
    """The place on a ring of something that has a name, such as a session."""
    digest = blake2b(name.encode(), digest_size=HASH_BYTES, person=b"stoker.name").digest()
    return int.from_bytes(digest, "little")


class Ring:
    """Points of machines on a circle, and whose the next ones after a key are."""

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: dict[int, str] = {}
        self._members: dict[str, list[int]] = {}
        self._is_sorted = True

    def __repr__(self) -> str:
        return f"<Ring of {len(self._members)}, {len(self._owners)} points>"

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def add(self, name: str, num_slots: int) -> None:
        """A machine comes, with a share by its slots; one that is there is replaced."""
        self.remove(name)
        own = [point for point in _points(name, num_slots) if point not in self._owners]
        self._members[name] = own
        self._owners.update(dict.fromkeys(own, name))
        self._points += own
        self._is_sorted = False

    def remove(self, name: str) -> None:
        """A machine goes; nothing if it is not there."""
        own = self._members.pop(name, None)
        if own is None:
            return
        self._sort()
        for point in own:
            del self._owners[point]
            del self._points[bisect_left(self._points, point)]

    def places(self, key: int) -> Iterator[str]:
        """Every machine once, from the one that the key belongs to."""
        self._sort()
        seen: set[str] = set()
        points, owners = self._points, self._owners
        first = bisect_right(points, key)
        for at in range(first, first + len(points)):
            name = owners[points[at % len(points)]]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self._members):
                    return

    def _sort(self) -> None:
        if not self._is_sorted:
            self._points.sort()
            self._is_sorted = True


def _points(name: str, num_slots: int) -> list[int]:
    """Where a machine of so many slots is on the circle: one with more has the points of one with fewer."""
    num = min(max(POINTS_PER_SLOT * num_slots, MIN_POINTS), MAX_POINTS)
    points: list[int] = []
    for at in range(0, num, _POINTS_PER_DIGEST):
        digest = blake2b(f"{at}:{name}".encode(), digest_size=_DIGEST.size, person=b"stoker.ring").digest()
        points += _DIGEST.unpack(digest)
    return points[:num]
