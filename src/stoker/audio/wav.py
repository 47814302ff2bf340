"""WAV files: their header, and their samples block by block (PCM of 8 to 32 bits, floats of 32 and 64).

Owns reading them within bounds; what is said of a length is believed as far as there are bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import InvalidRequestError, UnsupportedError

Samples = npt.NDArray[np.float32]

_PCM, _FLOAT, _EXTENSIBLE = 0x0001, 0x0003, 0xFFFE
_NAMES = {0x0002: "ADPCM", 0x0006: "A-law", 0x0007: "mu-law", 0x0011: "ADPCM", 0x0031: "GSM", 0x0055: "MP3"}
_HEAD, _FORMAT = struct.Struct("<4sI"), struct.Struct("<HHIIHH")
_RIFF_BYTES = 12
_EXTENSIBLE_BYTES = 40
_SUBFORMAT_AT = 24
_MAX_CHUNKS = 1024
_WIDE_BYTES = 3
_BLOCK_FRAMES = 2**18
_TYPES = {(_PCM, 16): "<i2", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8", (_PCM, 8): "u1"}


@dataclass(frozen=True, slots=True)
class WavHeader:
    """What a WAV file says of itself.

    Attributes:
        coding: 1 is PCM, 3 floats.
        num_channels: samples of a frame.
        rate_hz: frames a second.
        num_bits: of a sample.
        start: bytes before the first frame.
        num_frames: as many as there are bytes for.
    """

    coding: int
    num_channels: int
    rate_hz: int
    num_bits: int
    start: int
    num_frames: int

    @property
    def frame_bytes(self) -> int:
        """Of one frame."""
        return self.num_channels * self.num_bits // 8


def read_header(data: bytes, param: str) -> WavHeader:
    """The header of a WAV file.

    Raises:
        InvalidRequestError: it is broken; `param` names the recording.
        UnsupportedError: its samples are coded in another way.
    """
    at, form = _RIFF_BYTES, None
    for _ in range(_MAX_CHUNKS):
        if at + _HEAD.size > len(data):
            break
        name, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if name == b"fmt ":
            form = _form(data[at : at + min(size, _EXTENSIBLE_BYTES)], param)
        elif name == b"data" and form is not None:
            _, num_channels, _, num_bits = form
            # Who writes into a pipe does not know the length, and says 0 or the most.
            num_bytes = len(data) - at if size == 0 else min(size, len(data) - at)
            return WavHeader(*form, at, num_bytes // (num_channels * num_bits // 8))
        at += size + size % 2
    raise InvalidRequestError(f"{param}: the WAV recording is broken: it has no samples", param=param)


def _form(chunk: bytes, param: str) -> tuple[int, int, int, int]:
    """Coding, channels, rate and bits of a sample."""
    if len(chunk) < _FORMAT.size:
        raise InvalidRequestError(f"{param}: the WAV recording is broken: its header ends early", param=param)
    coding, num_channels, rate_hz, _, _, num_bits = _FORMAT.unpack_from(chunk)
    if coding == _EXTENSIBLE and len(chunk) >= _EXTENSIBLE_BYTES:
        coding = int.from_bytes(chunk[_SUBFORMAT_AT : _SUBFORMAT_AT + 2], "little")
    if (coding, num_bits) not in _TYPES and (coding, num_bits) != (_PCM, _WIDE_BYTES * 8):
        name = _NAMES.get(coding, f"coding {coding}" if coding not in {_PCM, _FLOAT} else "")
        text = f"{param}: a WAV recording of {f'{name}, ' if name else ''}{num_bits} bits is not taken:"
        raise UnsupportedError(f"{text} PCM of 8, 16, 24 or 32 bits and floats of 32 or 64 are", param=param)
    if not num_channels:
        raise InvalidRequestError(f"{param}: the WAV recording is broken: it has no channels", param=param)
    return coding, num_channels, rate_hz, num_bits


def blocks(data: bytes, header: WavHeader) -> Iterator[Samples]:
    """The frames in blocks, float32 (frames, channels) of about -1 to 1."""
    size = header.frame_bytes
    for first in range(0, header.num_frames, _BLOCK_FRAMES):
        start = header.start + first * size
        end = start + min(_BLOCK_FRAMES, header.num_frames - first) * size
        yield _scaled(memoryview(data)[start:end], header).reshape(-1, header.num_channels)


def _scaled(raw: memoryview, header: WavHeader) -> Samples:
    if header.num_bits == _WIDE_BYTES * 8:
        wide = np.zeros((len(raw) // _WIDE_BYTES, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, _WIDE_BYTES)
        return wide.view("<i4").ravel().astype(np.float32) / np.float32(2**31)
    samples = np.frombuffer(raw, _TYPES[header.coding, header.num_bits])
    if header.coding == _FLOAT:
        return samples.astype(np.float32)
    if header.num_bits == 8:  # noqa: PLR2004 - the only size without a sign
        return (samples.astype(np.float32) - np.float32(128)) / np.float32(128)
    return samples.astype(np.float32) / np.float32(2 ** (header.num_bits - 1))
