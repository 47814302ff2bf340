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
    import numpy.typing as npt

    from stoker.backends.llama.context import LlamaContext
    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import Buffer

    Bytes = npt.NDArray[np.uint8]

_MAGIC = b"STKL"
_HEADER = struct.Struct("<4s16sI?QI")
"""Magic, fingerprint, tokens, whether an initial state came before them, bytes and CRC-32 of the payload."""
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)


class SequenceStates:
    """Exports and imports sequences of one context.

    Args:
        file_fingerprint: what tells the model's file from every other and from its own later versions.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, file_fingerprint: str) -> None:
        self._context = context
        self._fingerprint = _fingerprint(model, context, file_fingerprint)

    def __repr__(self) -> str:
        return f"<SequenceStates {self.fingerprint}>"

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; differs between files, libraries and layouts of the cache."""
        return self._fingerprint.hex()

    def export(self, seq: int) -> memoryview:
        """The state of `seq`, bit-exact, in memory of its own."""
        num_tokens = self._context.lengths[seq]
        has_initial_state = seq in self._context.with_initial_state
        is_empty = num_tokens == 0 and not has_initial_state
        data = np.empty(_HEADER.size, np.uint8) if is_empty else self.payload(seq, _HEADER.size)
        payload = data[_HEADER.size :]
        checksum = zlib.crc32(payload.data)
        head = (_MAGIC, self._fingerprint, num_tokens, has_initial_state, len(payload), checksum)
        _HEADER.pack_into(data.data, 0, *head)
        return data.data

    def restore(self, seq: int, data: Buffer) -> None:
        """Put an exported state into the empty sequence `seq`.

        Raises:
            InvalidRequestError: the bytes are damaged, or of another model or build.
            PoolFullError: its cells do not fit; nothing changed.
        """
        assert self._context.lengths[seq] == 0, f"sequence {seq} is not empty"
        num_tokens, has_initial_state = self._checked(data)
        payload = np.frombuffer(data, np.uint8)[_HEADER.size :]
        if len(payload) == 0:
            return
        self.put(seq, payload, num_tokens)
        self._context.received(seq, num_tokens)
        if has_initial_state:
            self._context.with_initial_state.add(seq)

    def put(self, seq: int, payload: Bytes, num_tokens: int) -> None:
        """Put llama.cpp's own bytes of `num_tokens` tokens into the empty sequence `seq`.

        Raises:
            PoolFullError: its cells do not fit; nothing changed.
        """
        source = ctypes.cast(payload.ctypes.data, _BYTES_P)
        if not llama.llama_state_seq_set_data(self._context.handle, source, len(payload), seq):
            self._context.drop(seq)
            raise PoolFullError(
                f"no cells for the {num_tokens} tokens of a saved state", num_tokens=num_tokens
            )

    def payload(self, seq: int, num_before: int = 0) -> Bytes:
        """llama.cpp's own bytes of a sequence, after `num_before` bytes for the caller."""
        size = llama.llama_state_seq_get_size(self._context.handle, seq)
        data = np.empty(num_before + size, np.uint8)
        target = ctypes.cast(data.ctypes.data + num_before, _BYTES_P)
        written = llama.llama_state_seq_get_data(self._context.handle, target, size, seq)
        if written != size:
            raise EngineError(f"the state of sequence {seq} came as {written} of {size} bytes", seq=seq)
        return data

    def _checked(self, data: Buffer) -> tuple[int, bool]:
        """Tokens of the state and whether it began from an initial one, if it is this model's and whole."""
        if len(data) < _HEADER.size or bytes(data[:4]) != _MAGIC:
            raise InvalidRequestError(f"{len(data)} bytes are not an exported state", param="state")
        _, fingerprint, num_tokens, has_initial_state, size, crc = _HEADER.unpack_from(data)
        if fingerprint != self._fingerprint:
            raise InvalidRequestError("the state was made by another model or build", param="state")
        payload = memoryview(data)[_HEADER.size :]
        if len(payload) != size or zlib.crc32(payload) != crc:
            raise InvalidRequestError(
                f"the state is damaged: {len(payload)} of {size} bytes, or its checksum differs",
                param="state",
            )
        return int(num_tokens), bool(has_initial_state)


def _fingerprint(model: LlamaModel, context: LlamaContext, file_fingerprint: str) -> bytes:
    """Sixteen bytes that differ between models and between layouts of the cache."""
    parts = (
        file_fingerprint,
        LIBRARY_VERSION,
        model.description,
        model.metadata("general.name"),
        model.shape,
        context.flash_attention,
        context.key_type,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
