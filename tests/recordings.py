"""Recordings as files: WAV of every coding that is taken, written by hand."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def tone(duration_s: float = 0.5, rate_hz: int = 16_000, hertz: float = 440.0) -> npt.NDArray[np.float64]:
    """A sine of half the full scale."""
    return np.sin(2 * np.pi * hertz * np.arange(int(duration_s * rate_hz)) / rate_hz) / 2


def wav_of(
    samples: npt.NDArray[np.float64],
    rate_hz: int = 16_000,
    num_bits: int = 16,
    *,
    coding: int = _PCM,
    is_extensible: bool = False,
) -> bytes:
    """A WAV file of samples, (frames,) or (frames, channels)."""
    frames = samples.reshape(len(samples), -1)
    num_channels, size = frames.shape[1], num_bits // 8
    data = _coded(frames, num_bits, is_float=coding == _FLOAT)
    told = _EXTENSIBLE if is_extensible else coding
    head = struct.pack(
        "<HHIIHH", told, num_channels, rate_hz, rate_hz * num_channels * size, num_channels * size, num_bits
    )
    if is_extensible:
        head += struct.pack("<HHIH", 22, num_bits, 0, coding) + b"\x00" * 14
    chunks = b"fmt " + struct.pack("<I", len(head)) + head
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\x00"  # an odd one, with its padding
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _coded(frames: npt.NDArray[np.float64], num_bits: int, *, is_float: bool) -> bytes:
    if is_float:
        return frames.astype(f"<f{num_bits // 8}").tobytes()
    scaled = np.clip(np.rint(frames * 2 ** (num_bits - 1)), -(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)
    if num_bits == 8:
        return (scaled + 128).astype("u1").tobytes()
    if num_bits == 24:
        return scaled.astype("<i4").reshape(-1, 1).view("u1")[:, :3].tobytes()
    return scaled.astype(f"<i{num_bits // 8}").tobytes()
