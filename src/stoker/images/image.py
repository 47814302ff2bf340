"""An image that an application gives: a path, bytes, a data URI or a Pillow image.

Owns telling these apart. An application is trusted with its own files; what comes over HTTP is read by
`sources` alone. `decode` checks and shrinks.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stoker.errors import InvalidRequestError
from stoker.images.limits import DEFAULT_EDGE_PX, DEFAULT_LIMITS, ImageLimits, ImageReport
from stoker.images.sources import Encoded, read_reference
from stoker.ipc.request import Picture

if TYPE_CHECKING:
    from PIL import Image as Pillow
    from typing_extensions import TypeIs

__all__ = ["Image", "ImageLike", "ImageReport", "images_of"]

_Source: TypeAlias = "str | os.PathLike[str] | bytes | Pillow.Image"
_URIS = ("data:", "http:", "https:", "file:")


class Image:
    """One image; nothing is read before `picture` is called.

    Args:
        source: a path, the bytes of an encoded image, a Pillow image, a `data:` URI, or another Image.
        name: what errors call it; None: its file name, or "image".
    """

    def __init__(self, source: _Source | Image, *, name: str | None = None) -> None:
        self._source: _Source = source.source if isinstance(source, Image) else source
        self.name = name or _name_of(self._source)

    def __repr__(self) -> str:
        return f"Image({self.name})"

    @property
    def source(self) -> _Source:
        """What it was made of."""
        return self._source

    def picture(
        self, edge_px: int = DEFAULT_EDGE_PX, limits: ImageLimits = DEFAULT_LIMITS
    ) -> tuple[Picture, ImageReport]:
        """The image as a model is to see it, and what was done to it.

        Args:
            edge_px: a longer edge is shrunk to it; nothing is enlarged.
            limits: bounds on bytes and pixels; its own edge does not count here.

        Raises:
            InvalidRequestError: it cannot be read, is no image that is taken, too small or too large.
        """
        limits = dataclasses.replace(limits, edge_px=edge_px)
        if _is_pixels(self._source):
            return self._of_pixels(self._source, limits)
        from stoker.images.decode import decoded  # noqa: PLC0415 - imports Pillow

        given = self.encoded(limits)
        return decoded(given.data, given.declared, limits, self.name)

    def encoded(self, limits: ImageLimits = DEFAULT_LIMITS) -> Encoded:
        """The encoded image as it is; a Pillow image becomes a PNG.

        Raises:
            InvalidRequestError: it cannot be read, or is over `max_bytes`.
        """
        source = self._source
        if _is_pixels(source):
            return Encoded(_as_png(source), "image/png")
        if isinstance(source, bytes):
            return Encoded(source)
        if isinstance(source, str) and source[:6].lower().startswith(_URIS):
            return read_reference(source, limits, self.name)
        return Encoded(self._of_path(Path(source), limits))

    def data_uri(self, limits: ImageLimits = DEFAULT_LIMITS) -> str:
        """The encoded image as a `data:` URI, for a request to a server. Raises as `encoded` does."""
        given = self.encoded(limits)
        declared = given.declared or "application/octet-stream"
        return f"data:{declared};base64,{base64.b64encode(given.data).decode('ascii')}"

    def _of_path(self, path: Path, limits: ImageLimits) -> bytes:
        try:
            with path.expanduser().open("rb") as file:
                return file.read(limits.max_bytes + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(
                f"{path}: the picture cannot be read: {reason}", param="image"
            ) from None

    def _of_pixels(self, image: Pillow.Image, limits: ImageLimits) -> tuple[Picture, ImageReport]:
        from stoker.images.decode import rendered  # noqa: PLC0415 - imports Pillow

        try:
            return rendered(image.copy() if image.readonly else image, limits, self.name)
        except (OSError, ValueError) as error:
            text = f"{self.name}: the picture cannot be used: {error}"
            raise InvalidRequestError(text, param=self.name) from None


ImageLike: TypeAlias = "_Source | Image"
"""What `Image` takes."""


def images_of(given: ImageLike | Sequence[ImageLike]) -> list[Image]:
    """One image, or each of a list, as an Image."""
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    return [one if isinstance(one, Image) else Image(one) for one in several]


def _name_of(source: object) -> str:
    if isinstance(source, bytes) or _is_pixels(source):
        return "image"
    text = os.fspath(source) if isinstance(source, os.PathLike) else str(source)
    return "image" if text[:6].lower().startswith(_URIS) else Path(text).name


def _is_pixels(source: object) -> TypeIs[Pillow.Image]:
    """Whether it is a Pillow image; a program that has not imported Pillow has none."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(source, pillow.Image)


def _as_png(image: Pillow.Image) -> bytes:
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()
