"""Token ids as the bytes that stand for them in the tree and on disk: four each, little-endian.

Ids are non-negative. A picture's place in a prompt is taken by negative numbers made of its content
(SPEC C11), as many as it takes tokens: the same picture matches itself and nothing else.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4


def key_of(tokens: Sequence[int]) -> bytes:
    """The key of some tokens; a prefix of them has a prefix of it."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def num_tokens(key: bytes) -> int:
    """How many tokens a key stands for."""
    return len(key) // TOKEN_BYTES


def picture_ids(content: bytes, count: int) -> list[int]:
    """Negative numbers for the `count` tokens of a picture with these bytes."""
    stream = hashlib.shake_128(content).digest(count * TOKEN_BYTES)
    numbers = array("I", stream)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [-1 - (number >> 1) for number in numbers]
