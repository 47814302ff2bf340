"""Which format a recording has, by its first bytes. Owns what is known before any decoder sees them."""

from __future__ import annotations

from stoker.errors import InvalidRequestError, UnsupportedError

WAV, FLAC, MP3, OGG = "WAV", "FLAC", "MP3", "Ogg"
TAKEN = "WAV, FLAC, MP3 and Ogg"

_FOREIGN = {
    b"\x1aE\xdf\xa3": "a WebM or Matroska file",
    b"FORM": "an AIFF file",
    b"RF64": "a WAV file of more than 4 GiB (RF64)",
    b"#!AMR": "an AMR file",
    b"%PDF-": "a PDF document",
    b"\x89PNG": "a PNG picture",
    b"PK\x03\x04": "a ZIP archive",
}
_SYNC_MASK, _LAYER_MASK = 0xE0, 0x06
_ADTS = 0x00  # where MPEG audio names its layer


def format_of(data: bytes, param: str) -> str:
    """The format of an encoded recording, by its content.

    Args:
        data: the whole of it.
        param: names the recording in errors.

    Raises:
        InvalidRequestError: it is no recording that is known.
        UnsupportedError: it is one of another format.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return WAV
    if data[:4] == b"fLaC":
        return FLAC
    if data[:4] == b"OggS":
        return OGG
    if data[:3] == b"ID3":
        return MP3
    if len(data) > 1 and data[0] == 0xFF and data[1] & _SYNC_MASK == _SYNC_MASK:  # noqa: PLR2004 - a frame's begin
        if data[1] & _LAYER_MASK != _ADTS:
            return MP3
        raise _not_taken("an AAC stream", param)
    if data[4:8] == b"ftyp":
        raise _not_taken("an MP4 or M4A file", param)
    name = next((name for start, name in _FOREIGN.items() if data.startswith(start)), None)
    if name is not None:
        raise _not_taken(name, param)
    what = "nothing" if not data else "this"
    raise InvalidRequestError(f"{param}: {what} is no recording that is taken: {TAKEN}", param=param)


def _not_taken(name: str, param: str) -> UnsupportedError:
    return UnsupportedError(f"{param}: {name} is not taken: {TAKEN} are", param=param)
