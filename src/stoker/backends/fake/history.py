"""What a sequence of the fake backend has seen, folded into one number a token.

The number stands for a model's state: it follows from the tokens and from where they began, and can be
given out and put back as tensors, as a recurrent model's state can.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # increment and multipliers of splitmix64 (Steele, Lea, Flood 2014)
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
SEED = 0x5EED

STATE_LAYOUT: tuple[tuple[str, tuple[int, ...]], ...] = (("layers.0.shift", (4,)), ("layers.0.state", (2, 2)))
_START = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")
_FLOATS = np.dtype("<f4")


@dataclass(slots=True)
class FakeHistory:
    """One sequence: its tokens, and the hash of the history after each of them.

    `start` is the hash before the first token; an initial state puts another there. `salt` stands for what
    tokens are computed with beside themselves.
    """

    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    start: int = SEED
    salt: int = 0

    @property
    def state(self) -> int:
        """The hash after the last token."""
        return self.hashes[-1] if self.hashes else self.start

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with these tokens."""
        state = self.state
        for token in tokens:
            state = _mixed(state ^ self.salt ^ ((token + 1) * GOLDEN & MASK))
            self.hashes.append(state)
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget what follows `length`, with 0 also where it began."""
        del self.tokens[length:], self.hashes[length:]
        if length == 0:
            self.start = SEED

    def prefix(self, length: int) -> FakeHistory:
        """A history of the first `length` tokens."""
        return FakeHistory(self.tokens[:length], self.hashes[:length], start=self.start, salt=self.salt)

    def packed(self) -> bytes:
        """Start, salt and tokens as bytes: all else follows from them."""
        return _HEAD.pack(self.start, self.salt) + np.array(self.tokens, "<i4").tobytes()


def unpacked(payload: bytes) -> tuple[FakeHistory, list[int]]:
    """A history without tokens, and the tokens of `FakeHistory.packed`."""
    start, salt = _HEAD.unpack_from(payload)
    return FakeHistory(start=start, salt=salt), np.frombuffer(payload, "<i4", offset=_HEAD.size).tolist()


def salt_of(adapters: Sequence[tuple[str, float]]) -> int:
    """The salt of a history that is computed with these adapters; 0 without any."""
    digest = hashlib.blake2b(repr(tuple(adapters)).encode(), digest_size=_START.size).digest()
    return int(_START.unpack(digest)[0]) if adapters else 0


def tensors_of(state: int) -> list[Tensor]:
    """The state's bytes as floats from 0 to 255, which any float type holds exactly."""
    values = np.frombuffer(_START.pack(state), np.uint8).astype(_FLOATS)
    return [
        Tensor(name, shape, part.tobytes())
        for (name, shape), part in zip(STATE_LAYOUT, np.split(values, 2), strict=True)
    ]


def state_of(tensors: Sequence[Tensor]) -> int:
    """The state that tensors of `STATE_LAYOUT` hold; floats are rounded to the bytes they stand for."""
    values = np.concatenate([np.frombuffer(tensor.data, _FLOATS) for tensor in tensors])
    bytes_ = np.clip(np.nan_to_num(np.rint(values)), 0, 255).astype(np.uint8)
    (state,) = _START.unpack(bytes_.tobytes())
    return int(state)


def hidden_of(state: int) -> Tensor:
    """Eight numbers in [-1, 1) that follow from the state, as a last hidden state would."""
    seeds = np.array([_mixed(state ^ index) >> 40 for index in range(8)], np.float32)
    return Tensor("hidden", (8,), (seeds * np.float32(2 / 2**24) - np.float32(1)).astype(_FLOATS).tobytes())


def _mixed(value: int) -> int:
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)
