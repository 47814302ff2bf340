"""A recording that an application gives: a path, bytes, or a `data:` URI.

Owns telling these apart. `decode` checks, mixes and resamples.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TypeAlias

from stoker.audio.formats import FLAC, MP3, OGG, WAV, format_of
from stoker.audio.limits import DEFAULT_LIMITS, AudioLimits, AudioReport
from stoker.base64_text import from_base64
from stoker.errors import InvalidRequestError
from stoker.ipc.request import Sound

_Source: TypeAlias = "str | os.PathLike[str] | bytes"
_DATA = "data:"
_NAMES = {WAV: "wav", FLAC: "flac", MP3: "mp3", OGG: "ogg"}  # as OpenAI's API calls them


class Audio:
    """One recording; nothing is read before `sound` is called.

    Args:
        source: a path, the bytes of an encoded recording, a `data:` URI in base64, or another Audio.
        name: what errors call it; None: its file name, or "audio".
    """

    def __init__(self, source: _Source | Audio, *, name: str | None = None) -> None:
        self._source: _Source = source.source if isinstance(source, Audio) else source
        self.name = name or _name_of(self._source)

    def __repr__(self) -> str:
        return f"Audio({self.name})"

    @property
    def source(self) -> _Source:
        """What it was made of."""
        return self._source

    def sound(self, rate_hz: int, limits: AudioLimits = DEFAULT_LIMITS) -> tuple[Sound, AudioReport]:
        """The recording as a model is to hear it, and what it was.

        Args:
            rate_hz: samples a second that the model hears.
            limits: bounds on bytes and seconds.

        Raises:
            InvalidRequestError: it cannot be read, is broken, too short or too long.
            UnsupportedError: it is of a format that is not taken, or that needs the extra `audio`.
        """
        from stoker.audio.decode import decoded  # noqa: PLC0415 - imports numpy

        return decoded(self.encoded(limits), limits, rate_hz, self.name)

    def encoded(self, limits: AudioLimits = DEFAULT_LIMITS) -> bytes:
        """The encoded recording as it is.

        Raises:
            InvalidRequestError: it cannot be read.
        """
        source = self._source
        if isinstance(source, bytes):
            return source
        if isinstance(source, str) and source[: len(_DATA)].lower() == _DATA:
            _, comma, body = source.partition(",")
            if not comma:
                raise InvalidRequestError(f"{self.name}: the data URI has no comma", param=self.name)
            return bytes_of_base64(body, limits, self.name)
        try:
            with Path(source).expanduser().open("rb") as file:
                return file.read(limits.max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            text = f"{source}: the recording cannot be read: {reason}"
            raise InvalidRequestError(text, param="audio") from None

    def input_audio(self, limits: AudioLimits = DEFAULT_LIMITS) -> dict[str, str]:
        """Data and format as OpenAI's `input_audio` parts have them. Raises as `encoded` and `sound` do."""
        data = self.encoded(limits)
        kind = _NAMES[format_of(data, self.name)]
        return {"data": base64.b64encode(data).decode("ascii"), "format": kind}


def bytes_of_base64(text: str, limits: AudioLimits, param: str) -> bytes:
    """The bytes of base64, bounded before they are decoded. Raises InvalidRequestError."""
    if len(text) // 4 * 3 - 2 > limits.max_bytes:
        about = len(text) // 4 * 3
        what = f"{param}: the recording has about {about} bytes, at most {limits.max_bytes} are taken"
        raise InvalidRequestError(what, param=param)
    try:
        return from_base64(text)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: the recording is not base64: {error}", param=param) from None


def _name_of(source: _Source) -> str:
    if isinstance(source, bytes):
        return "audio"
    text = os.fspath(source)
    return "audio" if text[: len(_DATA)].lower() == _DATA else Path(text).name
