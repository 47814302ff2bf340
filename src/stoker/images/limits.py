"""What the images of a request may cost, and what was done to one (SPEC V2, V3).

Values only. `decode` holds to them and imports Pillow, which is loaded with the first image.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from stoker.settings import EngineSettings

DEFAULT_EDGE_PX = 448


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Bounds of the images of one request.

    Attributes:
        edge_px: the longer edge that a larger image is shrunk to (SPEC V3, M2).
        max_images: images of one request.
        max_bytes: of one encoded image.
        max_pixels: of one image, by its header.
        roots: folders that files may be read from; none: no files.
        can_fetch: http and https addresses are fetched.
    """

    noun: ClassVar[str] = "picture"
    accept: ClassVar[str] = "image/*"

    edge_px: int = DEFAULT_EDGE_PX
    max_images: int = 16
    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    roots: tuple[Path, ...] = ()
    can_fetch: bool = False

    @classmethod
    def of(cls, settings: EngineSettings, edge_px: int = DEFAULT_EDGE_PX) -> ImageLimits:
        """As the settings say; `edge_px` is what the machine's tier says where they say nothing."""
        return cls(
            edge_px=settings.image_edge or edge_px,
            max_images=settings.max_images,
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            roots=tuple(Path(root).expanduser() for root in settings.image_roots),
            can_fetch=settings.allow_http_images,
        )


DEFAULT_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What was done to an image.

    Attributes:
        width, height: as it was given, upright.
        format: by its content, such as PNG; empty: it came as pixels.
        shrunk_to: width and height that the model sees; None: as given.
    """

    width: int
    height: int
    format: str = ""
    shrunk_to: tuple[int, int] | None = None
