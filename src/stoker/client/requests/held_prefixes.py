"""Which beginnings of prompts this machine has, as gates name them; they are told of it and send more there.

A gate gives each request with a chain of hashes (`routing.hashing`). What an engine computed of it, or found,
is in its cells or stored from then on. The newest are kept: a hint that costs a gate nothing to have wrong.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

MAX_HELD = 1024
"""Hashes that are told, the newest: 8 KiB, some hundred conversations of a few turns."""
MAX_CHAIN = 128
"""Hashes of one request; gates make at most half as many."""


class HeldPrefixes:
    """The newest hashes, of the engine that serves now."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._engine = 0

    def __repr__(self) -> str:
        return f"<HeldPrefixes {len(self._held)}>"

    def note(self, chain: Sequence[int], engine: int) -> None:
        """The engine of that process has what these name."""
        self._is_of(engine)
        for key in chain[-MAX_CHAIN:]:
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def packed(self, engine: int) -> bytes:
        """Eight bytes each, little-endian, the newest last; `unpacked` reads it."""
        self._is_of(engine)
        return struct.pack(f"<{len(self._held)}Q", *self._held)

    def _is_of(self, engine: int) -> None:
        """What another engine held is gone with it."""
        if engine != self._engine:
            self._held.clear()
            self._engine = engine


def unpacked(packed: bytes) -> frozenset[int]:
    """The hashes; of bytes that are none of `HeldPrefixes` none."""
    num, rest = divmod(len(packed), 8)
    return frozenset() if rest or num > MAX_HELD else frozenset(struct.unpack(f"<{num}Q", packed))
