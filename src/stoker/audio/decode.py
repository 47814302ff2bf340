"""Encoded bytes to a recording: one channel at the rate that a model hears (SPEC V9).

WAV is read here; what is compressed by libsndfile, through the extra `audio`. Everything goes block by block,
so that no more is held than the bytes, one block, and the result.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.audio import wav
from stoker.audio.formats import WAV, format_of
from stoker.audio.limits import AudioLimits, AudioReport
from stoker.audio.resample import resampled
from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.request import Sound

if TYPE_CHECKING:
    from stoker.audio.resample import Samples

LEAST_S = 0.1
"""A shorter recording says nothing, and some projectors end the process at it."""
LEAST_HZ, MOST_HZ = 4_000, 192_000
MOST_CHANNELS = 8
_BLOCK_FRAMES = 2**18
_FULL_SCALE = 2**15


def decoded(
    data: bytes, limits: AudioLimits, rate_hz: int, param: str = "audio"
) -> tuple[Sound, AudioReport]:
    """The recording that encoded bytes hold.

    Args:
        data: the whole file.
        limits: bounds.
        rate_hz: samples a second that the model hears.
        param: names the recording in errors.

    Raises:
        InvalidRequestError: it is no recording, is broken, too short or too long.
        UnsupportedError: it is of a format that is not taken, or that needs the extra `audio`.
    """
    check_bytes(len(data), limits, param)
    kind = format_of(data, param)
    if kind == WAV:
        header = wav.read_header(data, param)
        _check(header.num_frames, header.rate_hz, header.num_channels, limits, param)
        given, from_hz, num_channels = wav.blocks(data, header), header.rate_hz, header.num_channels
    else:
        given, from_hz, num_channels = _compressed(data, kind, limits, param)
    counted = _Counted(given, int((limits.max_s - limits.used_s) * from_hz), param)
    pcm = b"".join(_as_pcm(block) for block in resampled(_mono(counted), from_hz, rate_hz))
    duration_s = counted.num_frames / from_hz
    if duration_s < LEAST_S:
        text = f"{param}: a recording of {duration_s:.3f} s is too short, {LEAST_S} s are the least"
        raise InvalidRequestError(text, param=param)
    return Sound(rate_hz, pcm), AudioReport(duration_s, from_hz, num_channels, kind)


def check_bytes(num_bytes: int, limits: AudioLimits, param: str) -> None:
    """Raises InvalidRequestError where a recording has too many bytes."""
    if num_bytes > limits.max_bytes:
        text = f"{param}: the recording has {num_bytes} bytes, at most {limits.max_bytes} are taken"
        raise InvalidRequestError(text, param=param)


def _check(num_frames: int, rate_hz: int, num_channels: int, limits: AudioLimits, param: str) -> None:
    """Refuse what a header says, before a sample is decoded."""
    if not LEAST_HZ <= rate_hz <= MOST_HZ:
        text = f"{param}: {rate_hz} samples a second are not taken, {LEAST_HZ} to {MOST_HZ} are"
        raise InvalidRequestError(text, param=param)
    if num_channels > MOST_CHANNELS:
        text = f"{param}: the recording has {num_channels} channels, at most {MOST_CHANNELS} are taken"
        raise InvalidRequestError(text, param=param)
    duration_s = limits.used_s + num_frames / rate_hz
    if duration_s > limits.max_s:
        text = f"{param}: with {duration_s:.1f} s the recordings are too long, {limits.max_s} s are taken"
        raise InvalidRequestError(f"{text} in one request", param=param)


class _Counted:
    """Blocks of frames that are counted as they pass; more than the bound raise InvalidRequestError."""

    def __init__(self, blocks: Iterable[Samples], max_frames: int, param: str) -> None:
        self._blocks = blocks
        self._max_frames = max_frames
        self._param = param
        self.num_frames = 0

    def __iter__(self) -> Iterator[Samples]:
        for block in self._blocks:
            self.num_frames += len(block)
            if self.num_frames > self._max_frames:
                text = f"{self._param}: the recording has more than {self._max_frames} frames"
                raise InvalidRequestError(f"{text}, which is the longest that is taken", param=self._param)
            yield block


def _mono(blocks: Iterable[Samples]) -> Iterator[Samples]:
    for block in blocks:
        mean = block.mean(axis=1, dtype=np.float32) if block.shape[1] > 1 else block[:, 0]
        yield np.nan_to_num(mean, nan=0.0, posinf=1.0, neginf=-1.0)


def _as_pcm(samples: Samples) -> bytes:
    return np.clip(np.rint(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype("<i2").tobytes()


# ---------------------------------------------------------------- what is compressed


def _compressed(
    data: bytes, kind: str, limits: AudioLimits, param: str
) -> tuple[Iterator[Samples], int, int]:
    """Blocks of frames, frames a second, and channels."""
    try:
        import soundfile  # noqa: PLC0415 - an extra
    except (ImportError, OSError):  # OSError: it is there without its library
        text = f"{param}: {kind} needs the extra `audio` here (pip install stoker[audio]); WAV does not"
        raise UnsupportedError(text, param=param) from None
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise _broken(kind, error, param) from None
    _check(file.frames, file.samplerate, file.channels, limits, param)
    return _blocks_of(file, soundfile.SoundFileError, kind, param), file.samplerate, file.channels


def _blocks_of(file: Any, failure: type[Exception], kind: str, param: str) -> Iterator[Samples]:
    with file:
        try:
            while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                yield block
        except (failure, RuntimeError) as error:
            raise _broken(kind, error, param) from None


def _broken(kind: str, error: Exception, param: str) -> InvalidRequestError:
    reason = str(error)[:120] or type(error).__name__
    return InvalidRequestError(f"{param}: the {kind} recording cannot be read: {reason}", param=param)
