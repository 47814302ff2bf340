"""Encoded pictures for tests: good ones, and such as somebody made to do harm."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image as Pillow

from stoker.ipc.request import Picture


def encoded(image: Pillow.Image, kind: str = "PNG", **how: Any) -> bytes:
    """The image as a file."""
    target = io.BytesIO()
    image.save(target, kind, **how)
    return target.getvalue()


def plain(width: int = 40, height: int = 30, colour: Any = (200, 30, 40)) -> bytes:
    """A PNG of one colour."""
    return encoded(Pillow.new("RGB", (width, height), colour))


def uri(data: bytes, declared: str = "image/png") -> str:
    """As a data URI."""
    return f"data:{declared};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG of a few bytes whose header promises that many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def first_pixel(picture: Picture) -> tuple[int, ...]:
    """Red, green and blue at the upper left."""
    return tuple(picture.rgb[:3])
