"""Encoded bytes to an image: upright, on white, eight bits a channel, no larger than asked (SPEC V2, V3).

Owns what Pillow may do: only formats that were recognised (see `formats`), sizes
checked by the header before pixels are decoded, and no second full-size copy of them.
"""

from __future__ import annotations

import dataclasses
import io
import struct

from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from stoker.errors import InvalidRequestError
from stoker.images.formats import JPEG, PNG, TIFF, WEBP, bare_png, format_of, webp_size
from stoker.images.limits import ImageLimits, ImageReport
from stoker.ipc.request import Picture

MIN_EDGE_PX = 8
"""A shorter edge shows nothing; it holds for the image as given and as shrunk."""
_WEBP_WEIGHT = 3
"""What a WebP's pixel counts for: its decoder takes up to 16 bytes for each, others 4 to 6."""
_GAP = 2
"""Cheap shrinking ends at this multiple of the size asked for; the rest is Lanczos."""
_BAND_PIXELS = 2**20
_ORIENTATION = 0x0112
_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
_SIDEWAYS = {5, 6, 7, 8}
_WIDE_GREY = {"I;16", "I;16L", "I;16B", "I;16N"}
_UNSCALED = {"I", "F"}
"""Modes whose values have no known range."""
# What its decoders raise on bytes that somebody made up; which of them depends on the format.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    AttributeError,
    MemoryError,
    RuntimeError,
    struct.error,
    Warning,  # where warnings are errors
)


def decoded(
    data: bytes, declared: str, limits: ImageLimits, param: str = "image"
) -> tuple[Picture, ImageReport]:
    """The image that encoded bytes show.

    Args:
        data: the whole file.
        declared: MIME type that came with it; empty: none.
        limits: bounds and the edge to shrink to.
        param: names the image in errors.

    Raises:
        InvalidRequestError: it is no image that is taken, is broken, too small or too large.
    """
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(
            f"{param}: the picture has {len(data)} bytes, at most {limits.max_bytes} are taken", param=param
        )
    kind = format_of(data, declared, param)
    if kind == WEBP:
        limits = dataclasses.replace(limits, max_pixels=limits.max_pixels // _WEBP_WEIGHT)
        _check_size(webp_size(data), limits, param)
    source = bare_png(data) if kind == PNG else data
    try:
        with Pillow.open(io.BytesIO(source), formats=[kind]) as image:
            _check_size(image.size, limits, param)
            return rendered(image, limits, param, kind)
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning):
        raise InvalidRequestError(_too_many(limits, param), param=param) from None
    except UnidentifiedImageError:
        raise InvalidRequestError(f"{param}: the {kind} picture is broken", param=param) from None
    except InvalidRequestError:
        raise
    except _BROKEN as error:
        reason = str(error)[:120] or type(error).__name__
        text = f"{param}: the {kind} picture cannot be read: {reason}"
        raise InvalidRequestError(text, param=param) from None


def rendered(
    image: Pillow.Image, limits: ImageLimits, param: str = "image", kind: str = ""
) -> tuple[Picture, ImageReport]:
    """The image of an opened image; its file is not closed. Raises what `decoded` raises, and Pillow's."""
    _check_size(image.size, limits, param)
    if kind != JPEG:
        image.load()  # a PNG's EXIF data may come last; a TIFF is turned by this
    turn = _orientation(image)
    width, height = image.size[::-1] if turn in _SIDEWAYS else image.size
    target = _fitting(width, height, limits.edge_px, param)
    wanted = target[::-1] if turn in _SIDEWAYS else target
    if kind == JPEG:
        image.draft(None, (wanted[0] * _GAP, wanted[1] * _GAP))
    image.load()
    small = _shrunk(image, wanted)
    if turn in _TURNS:
        small = small.transpose(_TURNS[turn])
    is_shrunk = target != (width, height)
    report = ImageReport(width, height, kind, shrunk_to=target if is_shrunk else None)
    return Picture(width=small.width, height=small.height, rgb=small.tobytes()), report


def _check_size(size: tuple[int, int], limits: ImageLimits, param: str) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise InvalidRequestError(f"{_too_many(limits, param)} ({width} x {height})", param=param)
    if min(size) < MIN_EDGE_PX:
        text = (
            f"{param}: a picture of {width} x {height} pixels is too small, {MIN_EDGE_PX} is the least edge"
        )
        raise InvalidRequestError(text, param=param)


def _too_many(limits: ImageLimits, param: str) -> str:
    return f"{param}: the picture has too many pixels, at most {limits.max_pixels} are taken"


def _fitting(width: int, height: int, edge_px: int, param: str) -> tuple[int, int]:
    """The size with the longer edge no longer than `edge_px`, aspect kept; never larger."""
    longest = max(width, height)
    if longest <= edge_px:
        return width, height
    fitted = round(width * edge_px / longest), round(height * edge_px / longest)
    if min(fitted) < MIN_EDGE_PX:
        text = f"{param}: {width} x {height} pixels shrunk to {edge_px} are too narrow to be seen"
        raise InvalidRequestError(text, param=param)
    return fitted


def _orientation(image: Pillow.Image) -> int:
    """How it has to be turned, by its EXIF data; 1: not at all, or that data is broken.

    A TIFF's decoder has turned it already.
    """
    if image.format == TIFF:
        return 1
    try:
        turn = image.getexif().get(_ORIENTATION, 1)
    except _BROKEN:
        return 1
    return turn if turn in _TURNS else 1


def _shrunk(image: Pillow.Image, size: tuple[int, int]) -> Pillow.Image:
    """An RGB image of that size; a large one is first reduced by a whole factor, band by band.

    So no second copy of all its pixels is made: they are 4 bytes each, whatever the mode.
    """
    factor = max(1, min(image.width // (size[0] * _GAP), image.height // (size[1] * _GAP)))
    if factor > 1:
        image = _reduced(image, factor)
    rgb = _as_rgb(image)
    return rgb if rgb.size == size else rgb.resize(size, Pillow.Resampling.LANCZOS)


def _reduced(image: Pillow.Image, factor: int) -> Pillow.Image:
    size = -(-image.width // factor), -(-image.height // factor)
    reduced = Pillow.new("RGB", size)
    num_rows = max(1, _BAND_PIXELS // (image.width * factor)) * factor
    for top in range(0, image.height, num_rows):
        band = image.crop((0, top, image.width, min(top + num_rows, image.height)))
        reduced.paste(_as_rgb(band).reduce(factor), (0, top // factor))
    return reduced


def _as_rgb(image: Pillow.Image) -> Pillow.Image:
    """Eight bits a channel on white."""
    if image.mode in _UNSCALED:
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    if image.mode in _WIDE_GREY:
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    upper = image.convert("RGBA")
    white = Pillow.new("RGB", image.size, "white")
    white.paste(upper, mask=upper.getchannel("A"))
    return white
