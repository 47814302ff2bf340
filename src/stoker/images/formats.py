"""Which format bytes are, where an image ends in them, and what else they are at the same time.

Owns everything that is known before any decoder sees the bytes; reads them and nothing else. What they
show is left to `decode`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from stoker.errors import InvalidRequestError

PNG, JPEG, WEBP, GIF, BMP, TIFF = "PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"
TAKEN = "PNG, JPEG, WebP, GIF, BMP and TIFF"

_MIME = {
    PNG: {"image/png", "image/apng", "image/x-png"},
    JPEG: {"image/jpeg", "image/jpg", "image/pjpeg"},
    WEBP: {"image/webp"},
    GIF: {"image/gif"},
    BMP: {"image/bmp", "image/x-bmp", "image/x-ms-bmp"},
    TIFF: {"image/tiff", "image/tif"},
}
_UNTOLD = {"", "image/*", "application/octet-stream", "binary/octet-stream"}

_PNG_HEAD = b"\x89PNG\r\n\x1a\n"
_JPEG_HEAD = b"\xff\xd8\xff"
_RIFF_BYTES = 8
_GIF_HEAD_BYTES, _GIF_FRAME_BYTES = 13, 10
_GIF_END, _GIF_EXTENSION, _GIF_FRAME = 0x3B, 0x21, 0x2C
_GIF_HAS_TABLE, _GIF_TABLE_SIZE = 0x80, 0x07
_DIRECTORY_BYTES = 22 + 0xFFFF  # of a ZIP's end record with the longest comment
_FOREIGN = {
    b"%PDF-": "a PDF document",
    b"<?xml": "an SVG or XML document",
    b"<svg": "an SVG document",
    b"<!DOC": "an HTML document",
    b"<html": "an HTML document",
    b"PK\x03\x04": "a ZIP archive",
    b"8BPS": "a Photoshop document",
    b"\x00\x00\x01\x00": "an icon",
    b"\x00\x00\x00\x0cjP": "a JPEG 2000 picture",
}
_BOXES = {
    b"hei": "a HEIC picture",
    b"mif": "a HEIC picture",
    b"msf": "a HEIC picture",
    b"avi": "an AVIF picture",
}
# What makes an image something else as well. Five bytes and more hardly come about by chance in 20 MiB.
_SECOND_NATURES = (
    *(b"%pdf-", b"<script", b"<svg ", b"<svg>", b"<svg\n", b"<html", b"<iframe", b"<!doctype", b"<?php"),
    *(b"rar!\x1a\x07", b"7z\xbc\xaf\x27\x1c", b"\x89png\r\n\x1a\n", b"gif87a", b"gif89a"),
)
_ARCHIVE = re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)|ustar")
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # more 0xFF before it only fill
_START_OF_SCAN, _END_OF_IMAGE, _SEGMENT_BYTES = 0xDA, 0xD9, 2
_PNG_CHUNK_BYTES = 12
_MAX_GAP_BYTES = 2**16
"""Between a JPEG's segments; its decoder looks at each byte there, 100 times slower than at a pixel."""
_SLICE_BYTES = 2**20
# More parts than any real image has: each costs time, and a scan as much as a whole image.
_MAX_SCANS = 64
_MAX_SEGMENTS = 4096
_MAX_CHUNKS = 2**16
_MAX_BLOCKS = 2**18
_MAX_RUNS_BYTES = 2**20
_RUNS = {1, 2}
"""Compressions of a BMP that are unpacked run by run; a header of the short kind has none."""
_SHORT_HEADER_BYTES = 12
_PNG_CHANNELS = {2: 3, 4: 2, 6: 4}  # by colour type; 1 of the others
_PNG_CHECKED_PIXELS = 89_478_485
_DEFLATE_RATIO = 1032  # nothing inflates to more (zlib's own figure)
_PNG_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"}


def format_of(data: bytes, declared: str, param: str) -> str:
    """The format of an encoded image, by its content.

    Args:
        data: the whole of it.
        declared: the MIME type that came with it; empty: none.
        param: names the image in errors.

    Raises:
        InvalidRequestError: no such image is taken, it is not what was declared, it ends too early, or
            it is something else at the same time.
    """
    found = _sniffed(data)
    if found is None:
        raise InvalidRequestError(
            f"{param}: {_foreign_name(data)} is no picture that is taken: {TAKEN}", param=param
        )
    mime = declared.partition(";")[0].strip().lower()
    if mime not in _UNTOLD and mime not in _MIME[found]:
        raise InvalidRequestError(f"{param}: declared as {mime[:60]!r} and is {found}", param=param)
    rest = data[_end_of(data, found, param) :]
    folded = data.lower()
    tail = rest[-_DIRECTORY_BYTES:]  # a clip behind a photo is long, and four bytes come about by chance
    if any(folded.find(start, 1) > 0 for start in _SECOND_NATURES) or _ARCHIVE.search(tail):
        raise InvalidRequestError(f"{param}: the {found} picture holds another kind of file", param=param)
    if found not in {JPEG, TIFF} and rest.strip(b"\x00\r\n "):  # cameras put previews and clips behind a JPEG
        raise InvalidRequestError(f"{param}: {len(rest)} bytes follow the {found} picture", param=param)
    return found


def _sniffed(data: bytes) -> str | None:
    if data.startswith(_PNG_HEAD):
        return PNG
    if data.startswith(_JPEG_HEAD):
        return JPEG
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GIF
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WEBP
    if data.startswith((b"II*\x00", b"MM\x00*")):
        return TIFF
    return BMP if data.startswith(b"BM") else None


def _foreign_name(data: bytes) -> str:
    """What the bytes seem to be, for people."""
    if not data:
        return "nothing"
    head = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if data[4:8] == b"ftyp":
        return _BOXES.get(data[8:11].lower(), "a video or another ISO file")
    folded = head.lower()
    return next((name for start, name in _FOREIGN.items() if folded.startswith(start.lower())), "this")


def _end_of(data: bytes, kind: str, param: str) -> int:
    """Where the image ends, as far as can be told. Raises InvalidRequestError where that is too early."""
    end: int | None = len(data)
    if kind == PNG:
        end = _end_of_png(data)
    elif kind == JPEG:
        end = _end_of_jpeg(data)
    elif kind == WEBP:
        size = int.from_bytes(data[4:8], "little") + _RIFF_BYTES
        end = size if size <= len(data) else None
    elif kind == BMP:
        end = _end_of_bmp(data)
    elif kind == TIFF:  # its parts may lie anywhere; an archive's directory lies at the end
        return max(0, len(data) - _DIRECTORY_BYTES)
    elif kind == GIF:
        end = _end_of_gif(data)
    if end is None:
        raise InvalidRequestError(
            f"{param}: the {kind} picture ends too early, or is cut into too many parts", param=param
        )
    return end


def _end_of_png(data: bytes) -> int | None:
    """Behind the last chunk; None: there is none, or too little data for the pixels that are promised."""
    chunks = list(islice(png_chunks(data), _MAX_CHUNKS))
    if not chunks or chunks[0][0] != b"IHDR" or chunks[-1][0] != b"IEND":
        return None
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    num_bits = data[24] * _PNG_CHANNELS.get(data[25], 1)
    num_packed = sum(stop - start for name, start, stop in chunks if name == b"IDAT")
    is_enough = height * (width * num_bits // 8) <= num_packed * _DEFLATE_RATIO
    # What is over the bound on pixels is for others to refuse, in better words.
    return chunks[-1][2] if is_enough or width * height > _PNG_CHECKED_PIXELS else None


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each whole chunk of a PNG, up to its end."""
    at = len(_PNG_HEAD)
    while at + _PNG_CHUNK_BYTES <= len(data):
        name = data[at + 4 : at + 8]
        end = at + _PNG_CHUNK_BYTES + int.from_bytes(data[at : at + 4])
        if end > len(data):
            return
        yield name, at, end
        if name == b"IEND":
            return
        at = end


def bare_png(data: bytes) -> bytes:
    """The PNG without what its pixels do not need: texts that inflate, profiles, further frames."""
    chunks = list(png_chunks(data))
    if all(name in _PNG_NEEDED for name, _, _ in chunks):
        return data
    kept = (data[start:end] for name, start, end in chunks if name in _PNG_NEEDED)
    return b"".join([_PNG_HEAD, *kept])


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height by a WebP's header, as its decoder makes room before anybody can ask; 0: unknown."""
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 0, 0


def _end_of_bmp(data: bytes) -> int | None:
    """Behind what it says is its size; None: that is not all there, or there are too many runs."""
    size = int.from_bytes(data[2:6], "little") or len(data)  # some writers leave it 0
    is_short = int.from_bytes(data[14:18], "little") == _SHORT_HEADER_BYTES
    has_runs = not is_short and int.from_bytes(data[30:34], "little") in _RUNS
    return size if size <= len(data) and not (has_runs and len(data) > _MAX_RUNS_BYTES) else None


def _end_of_jpeg(data: bytes) -> int | None:
    """Behind the end-of-image marker; None: there is none, or too much before it."""
    at, num_scans = _SEGMENT_BYTES, 0
    for _ in range(_MAX_SEGMENTS):
        found = _next_marker(data, at, len(data) if num_scans else at + _MAX_GAP_BYTES)
        if found is None or num_scans > _MAX_SCANS:
            return None
        marker, at = data[found.end() - 1], found.end()
        if marker == _END_OF_IMAGE:
            return at
        num_scans += marker == _START_OF_SCAN
        # Behind a segment comes the next marker, behind a scan's header its data, which holds no marker.
        at += int.from_bytes(data[at : at + _SEGMENT_BYTES])
    return None


def _next_marker(data: bytes, start: int, stop: int) -> re.Match[bytes] | None:
    """The first marker of a JPEG between two places; searched slice by slice, as a search holds the lock."""
    for at in range(start, min(stop, len(data)), _SLICE_BYTES):
        if found := _JPEG_MARKER.search(data, at, min(at + _SLICE_BYTES, stop) + 1):
            return found
    return None


def _end_of_gif(data: bytes) -> int | None:
    """Behind the trailer; None: there is none, or too much before it."""
    if len(data) < _GIF_HEAD_BYTES:
        return None
    at = _GIF_HEAD_BYTES + _table_bytes(data[10])
    num_left = _MAX_BLOCKS + len(data) // 128
    while at < len(data) and num_left > 0:
        kind = data[at]
        if kind == _GIF_END:
            return at + 1
        if kind == _GIF_FRAME and at + _GIF_FRAME_BYTES < len(data):
            at += _GIF_FRAME_BYTES + _table_bytes(data[at + 9]) + 1  # the least code size
        elif kind == _GIF_EXTENSION:
            at += 2  # and its label
        else:
            return None
        while at < len(data) and data[at] and num_left > 0:
            at += data[at] + 1
            num_left -= 1
        at += 1
        num_left -= 1
    return None


def _table_bytes(flags: int) -> int:
    """Of a palette; 0: there is none."""
    return 3 << (flags & _GIF_TABLE_SIZE) + 1 if flags & _GIF_HAS_TABLE else 0
