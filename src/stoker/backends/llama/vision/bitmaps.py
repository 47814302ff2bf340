"""Images and recordings as the library takes them (mtmd_bitmap), and blank ones to ask for sizes.

Apart because the projector knows no pixels and no samples.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.ipc.request import Picture, Sound

_BYTES_P = ctypes.POINTER(ctypes.c_uint8)
_FLOATS_P = ctypes.POINTER(ctypes.c_float)
_FULL_SCALE = np.float32(2**15)


@dataclass(frozen=True, slots=True)
class Blank:
    """A picture without pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Silence:
    """A recording without samples."""

    num_samples: int


Given = Picture | Sound | Blank | Silence


def native_bitmap(library: Any, medium: Given) -> int:
    """The library's own copy of a medium; to be freed with `mtmd_bitmap_free`."""
    match medium:
        case Picture(width, height, rgb):
            pixels = ctypes.cast(ctypes.c_char_p(rgb), _BYTES_P)
            return int(library.mtmd_bitmap_init(width, height, pixels))
        case Blank(width, height):
            return int(library.mtmd_bitmap_init(width, height, None))
        case Silence(num_samples):
            return int(library.mtmd_bitmap_init_from_audio(num_samples, None))
        case Sound(_, pcm):
            samples = np.frombuffer(pcm, "<i2").astype(np.float32) / _FULL_SCALE
            return int(library.mtmd_bitmap_init_from_audio(len(samples), samples.ctypes.data_as(_FLOATS_P)))


def described(medium: Given) -> str:
    """What it is, for messages."""
    if isinstance(medium, Picture | Blank):
        return f"a picture of {medium.width} x {medium.height} pixels"
    return f"a recording of {medium.num_samples} samples"
