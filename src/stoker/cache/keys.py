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


def key_of(tokens: Sequence[int]) -> bytes:
    """The key of some tokens; a prefix of them has a prefix of it."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def num_tokens(key: bytes) -> int:
    """How many tokens a key stands for."""
    return len(key) // TOKEN_BYTES


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
