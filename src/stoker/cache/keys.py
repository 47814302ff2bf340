"""What a stored prefix is found by: its namespace, and its token ids as bytes, four each, little-endian.

Ids are non-negative. An image's place in a prompt is taken by negative numbers made of its content (SPEC
C11), as many as it takes tokens: the same image matches itself and nothing else.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

TOKEN_BYTES = 4
_FIRST_LOOK = 32


def key_of(tokens: Sequence[int]) -> bytes:
    """The key of some tokens; a prefix of them has a prefix of it."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def num_tokens(key: bytes) -> int:
    """How many tokens a key stands for."""
    return len(key) // TOKEN_BYTES


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many leading tokens, or bytes of keys, are the same; of the first `limit`.

    Bisection over slice comparisons, which run in C; most pairs differ at a first look.
    """
    most = min(len(left), len(right), len(left) if limit is None else limit)
    low, high = 0, min(most, _FIRST_LOOK)
    if left[:high] == right[:high]:
        low, high = high, most
        if left[low:high] == right[low:high]:
            return high
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def image_ids(content: bytes, count: int) -> list[int]:
    """Negative numbers for the `count` tokens of an image with these bytes."""
    stream = hashlib.shake_128(content).digest(count * TOKEN_BYTES)
    numbers = array("I", stream)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [-1 - (number >> 1) for number in numbers]


DIGEST_BYTES = 32


@dataclass(frozen=True)
class Namespace:
    """Requests that may share what was computed (SPEC C1): of one model, adapter, initial state and salt.

    Attributes:
        model: fingerprint of the file and of how its state is laid out.
        adapter: name and digest of what changes the weights; empty: nothing.
        initial_state: digest of the state a recurrent model begins from; empty: its own.
        salt: what the caller chose to be apart.
    """

    model: str
    adapter: str = ""
    initial_state: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Names it in the tree and on disk, where a salt must not be readable."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"stoker-space")
        for part in (self.model, self.adapter, self.initial_state, self.salt):
            text = part.encode()
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return digest.digest()
