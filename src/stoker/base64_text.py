"""Base64 of many megabytes to bytes, a slice at a time.

A decoder holds the interpreter's lock, and with it every other thread, until it is done: for 27 MiB a
tenth of a second.
"""

from __future__ import annotations

import base64
import binascii

_SLICE_CHARS = 2**20
_PLAIN = str.maketrans({" ": None, "\t": None, "\r": None, "\n": None, "-": "+", "_": "/"})
_IGNORED = " \t\r\n"
_MAX_PADDING = 2


def from_base64(text: str) -> bytes:
    """The bytes of base64, of either alphabet, with or without padding, white space ignored.

    Raises:
        ValueError: it holds anything else.
    """
    body = text.rstrip("=" + _IGNORED)
    if text.count("=", len(body)) > _MAX_PADDING:
        raise binascii.Error("there is too much padding")
    parts: list[bytes] = []
    held = ""
    for start in range(0, len(body), _SLICE_CHARS):
        piece = held + body[start : start + _SLICE_CHARS].translate(_PLAIN)
        if "=" in piece:
            raise binascii.Error("there is data behind the padding")
        num_whole = len(piece) // 4 * 4
        parts.append(base64.b64decode(piece[:num_whole], validate=True))
        held = piece[num_whole:]
    parts.append(base64.b64decode(held + "=" * (-len(held) % 4), validate=True))
    return b"".join(parts)
