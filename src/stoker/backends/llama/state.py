"""A sequence as bytes: llama.cpp's own state behind a header that tells foreign or damaged bytes apart.

Native code never sees bytes that fail the header or the checksum.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.llama.binding import LIBRARY_VERSION, llama
from stoker.errors import EngineError, InvalidRequestError, PoolFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from stoker.backends.llama.context import LlamaContext
    from stoker.backends.llama.model import LlamaModel

_MAGIC = b"STKL"
_HEADER = struct.Struct("<4s16sIQI")  # magic, fingerprint, tokens, payload bytes, CRC-32 of the payload
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)


class SequenceStates:
    """Exports and imports sequences of one context."""

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._context = context
        self._fingerprint = _fingerprint(model, context)

    def __repr__(self) -> str:
        return f"<SequenceStates {self._fingerprint.hex()}>"

    def export(self, seq: int) -> bytes:
        """The state of `seq`, bit-exact."""
        num_tokens = self._context.lengths[seq]
        payload = self._payload(seq) if num_tokens else np.empty(0, np.uint8)
        checksum = zlib.crc32(payload.data)
        header = _HEADER.pack(_MAGIC, self._fingerprint, num_tokens, len(payload), checksum)
        return b"".join((header, payload.data))

    def restore(self, seq: int, data: bytes) -> None:
        """Put an exported state into the empty sequence `seq`.

        Raises:
            InvalidRequestError: the bytes are damaged, or of another model or build.
            PoolFullError: its cells do not fit; nothing changed.
        """
        assert self._context.lengths[seq] == 0, f"sequence {seq} is not empty"
        num_tokens = self._checked_tokens(data)
        if num_tokens == 0:
            return
        if not self._put(seq, np.frombuffer(data, np.uint8, offset=_HEADER.size)):
            self._context.drop(seq)
            raise PoolFullError(
                f"no cells for the {num_tokens} tokens of a saved state", num_tokens=num_tokens
            )
        self._context.lengths[seq] = num_tokens

    def lay_anew(self, seqs: Sequence[int]) -> None:
        """Take these sequences out and put them back one after the other, each in the order of its tokens.

        Raises:
            EngineError: one did not go back; what it held is lost.
        """
        held = [(seq, self._context.lengths[seq], self._payload(seq)) for seq in seqs]
        for seq, _, _ in held:
            self._context.drop(seq)
        for seq, num_tokens, payload in held:
            if not self._put(seq, payload):
                raise EngineError(f"sequence {seq} of {num_tokens} tokens could not be moved", seq=seq)
            self._context.lengths[seq] = num_tokens

    def _payload(self, seq: int) -> npt.NDArray[np.uint8]:
        """llama.cpp's own bytes of a sequence."""
        size = llama.llama_state_seq_get_size(self._context.handle, seq)
        payload = np.empty(size, np.uint8)
        target = ctypes.cast(payload.ctypes.data, _BYTES_P)
        written = llama.llama_state_seq_get_data(self._context.handle, target, size, seq)
        if written != size:
            raise EngineError(f"the state of sequence {seq} came as {written} of {size} bytes", seq=seq)
        return payload

    def _put(self, seq: int, payload: npt.NDArray[np.uint8]) -> bool:
        source = ctypes.cast(payload.ctypes.data, _BYTES_P)
        return bool(llama.llama_state_seq_set_data(self._context.handle, source, len(payload), seq))

    def _checked_tokens(self, data: bytes) -> int:
        """Tokens the state holds, if it is one of this model and whole."""
        if len(data) < _HEADER.size or data[:4] != _MAGIC:
            raise InvalidRequestError(f"{len(data)} bytes are not an exported state", param="state")
        _, fingerprint, num_tokens, size, crc = _HEADER.unpack_from(data)
        if fingerprint != self._fingerprint:
            raise InvalidRequestError("the state was made by another model or build", param="state")
        payload = memoryview(data)[_HEADER.size :]
        if len(payload) != size or zlib.crc32(payload) != crc:
            raise InvalidRequestError(
                f"the state is damaged: {len(payload)} of {size} bytes, or its checksum differs",
                param="state",
            )
        return int(num_tokens)


def _fingerprint(model: LlamaModel, context: LlamaContext) -> bytes:
    """Sixteen bytes that differ between models and between layouts of the cache."""
    parts = (
        LIBRARY_VERSION,
        model.description,
        model.metadata("general.name"),
        model.shape,
        context.flash_attention,
        context.key_type,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
