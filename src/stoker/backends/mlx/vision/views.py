"""From a picture to the squares that a tower takes, as preprocessor_config.json says.

Owns what the processors of transformers do for the families that are served (CLIP's and SigLIP's for whole
pictures, Idefics3's for tiles): sizes, cuts, colours. Reading what a folder says imports no imaging library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stoker.backends.protocol.backend import PicturePart
from stoker.models.folders.json_file import broken, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from PIL.Image import Image

    from stoker.backends.mlx.vision.families import TowerShape
    from stoker.backends.protocol.backend import Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.request import Picture

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_RESAMPLING = range(6)
_BICUBIC, _LANCZOS = 3, 1
_MAX_EDGE = 1 << 14
_MOST_PIXELS = 4096  # of the longer edge before it is cut into tiles, as transformers has it
_DEFAULT_EDGES = 4  # squares along the longer edge of a picture that is cut into tiles
_MAX_SCALE = 1e6
_CHANNELS = 3
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Views(Protocol):
    """How the pictures of one model are cut."""

    def layout(self, width: int, height: int, tokenize: Callable[[str], list[int]]) -> Layout:
        """What stands for a picture of this size in a prompt."""
        ...

    def cut(self, picture: Picture) -> list[Image]:
        """The squares that the tower takes of it, one after the other."""
        ...

    @property
    def colours(self) -> Colours:
        """From their pixels to what it takes."""
        ...


def read_views(folder: Path, shape: TowerShape) -> Views:
    """How a folder's pictures are cut. Raises ModelFileError where what it says cannot be done."""
    path, document = _document(folder)
    said = _Said(path, document)
    if shape.is_tiled:
        return _tiles(said, shape)
    return _whole_view(said, shape)


def _document(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """The file that says it, and what it says: one of its own, or a part of that of the whole processor."""
    path = folder / PREPROCESSOR
    if path.exists():
        return path, read_object(path)
    path = folder / PROCESSOR
    part = read_object(path).get("image_processor") if path.exists() else None
    if not isinstance(part, dict):
        raise broken(folder, f"it has no {PREPROCESSOR}, which says how pictures are cut")
    return path, part


@dataclass(frozen=True, slots=True)
class _Said:
    """What a file says of pictures."""

    path: Path
    document: Mapping[str, Any]

    def flag(self, name: str, *, usually: bool) -> bool:
        value = self.document.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._broken(name, value, "true or false")
        return usually if value is None else value

    def edge(self, name: str, part: Mapping[str, Any] | None = None) -> int:
        value = (self.document if part is None else part).get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_EDGE:
            raise self._broken(name, value, f"a number of 1 to {_MAX_EDGE}")
        return value

    def edges(self, name: str, usually: Mapping[str, int]) -> dict[str, int]:
        """An object of edges, or one number that is both edges."""
        value = self.document.get(name)
        if isinstance(value, int):
            return dict.fromkeys(("height", "width"), self.edge(name))
        if value is None:
            return dict(usually)
        if not isinstance(value, dict) or not value:
            raise self._broken(name, value, "an object of edges")
        return {each: self.edge(each, value) for each in value if value[each] is not None}

    def resampling(self, usually: int) -> int:
        value = self.document.get("resample")
        if value is None:
            return usually
        if isinstance(value, bool) or value not in _RESAMPLING:
            raise self._broken("resample", value, "a number of 0 to 5")
        return int(value)

    def colours(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Colours:
        is_scaled = self.flag("do_rescale", usually=True)
        scale = self._numbers("rescale_factor", (1 / 255,))[0] if is_scaled else 1.0
        if not self.flag("do_normalize", usually=True):
            return Colours(scale, (0.0,) * _CHANNELS, (1.0,) * _CHANNELS)
        stds = self._numbers("image_std", std)
        if min(stds) <= 0:
            raise self._broken("image_std", stds, "numbers above 0")
        return Colours(scale, self._numbers("image_mean", mean), stds)

    def _numbers(self, name: str, usually: tuple[float, ...]) -> tuple[float, ...]:
        value = self.document.get(name)
        if value is None:
            return usually
        found = value if isinstance(value, list) else [value] * len(usually)
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in found)
        if len(found) != len(usually) or not are_numbers or not all(abs(each) < _MAX_SCALE for each in found):
            raise self._broken(name, value, f"{len(usually)} numbers")
        return tuple(map(float, found))

    def _broken(self, name: str, value: object, possible: str) -> Exception:
        return broken(self.path, f"{name} is {str(value)[:64]}, {possible} is possible")


@dataclass(frozen=True, slots=True)
class Colours:
    """From bytes to what a tower takes: `(byte * scale - mean) / std`, by channel."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def of(self, image: Image) -> Rows:
        """float32 (height, width, 3)."""
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        scaled: Rows = np.asarray(image, np.float32) * np.float32(self.scale)
        found: Rows = (scaled - mean) / std
        return found


def _opened(picture: Picture) -> Image:
    from PIL import Image  # noqa: PLC0415 - who describes a model needs no pictures

    return Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)


def _resized(image: Image, size: tuple[int, int], resampling: int) -> Image:
    """An image of this width and height."""
    from PIL import Image  # noqa: PLC0415 - likewise

    return image.resize(size, Image.Resampling(resampling))


# ---------------------------------------------------------------- whole pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeView:
    """A picture as one square.

    Attributes:
        num_tokens: that it becomes.
        edge: of the square.
        shortest: to what the shorter edge is resized; 0: the picture becomes the square, whatever its shape.
        resampling: as Pillow numbers it.
        colours: of its pixels.
    """

    num_tokens: int
    edge: int
    shortest: int
    resampling: int
    colours: Colours

    def layout(self, width: int, height: int, tokenize: Callable[[str], list[int]]) -> Layout:  # noqa: ARG002
        """See `Views`: nothing stands around it."""
        return (PicturePart(self.num_tokens),)

    def cut(self, picture: Picture) -> list[Image]:
        """See `Views`: the middle of it where it is cut."""
        image, edge = _opened(picture), self.edge
        if not self.shortest:
            return [_resized(image, (edge, edge), self.resampling)]
        short, long = sorted((picture.width, picture.height))
        longest = int(self.shortest * long / short)
        size = (self.shortest, longest) if picture.width == short else (longest, self.shortest)
        image = _resized(image, size, self.resampling)
        left, top = ((each - edge) // 2 for each in size)
        return [image.crop((left, top, left + edge, top + edge))]


def _whole_view(said: _Said, shape: TowerShape) -> WholeView:
    size = said.edges("size", {"shortest_edge": shape.edge})
    if not said.flag("do_resize", usually=True):
        raise broken(said.path, "do_resize is false: pictures of any size would not fit the tower")
    shortest, found = size.get("shortest_edge", 0), (size.get("height"), size.get("width"))
    if said.flag("do_center_crop", usually=bool(shortest)) and shortest:
        crop = said.edges("crop_size", dict.fromkeys(("height", "width"), shape.edge))
        found = (crop.get("height"), crop.get("width"))
        if shortest < min(filter(None, found), default=0):
            raise broken(said.path, f"pictures of {shortest} pixels are cut to {found[0]} x {found[1]}")
    if found != (shape.edge, shape.edge):
        text = f"pictures become {found[1]} x {found[0]} pixels, the tower takes {shape.edge} x {shape.edge}"
        raise broken(said.path, text)
    return WholeView(
        num_tokens=shape.num_tokens,
        edge=shape.edge,
        shortest=shortest,
        resampling=said.resampling(_BICUBIC),
        colours=said.colours(_CLIP_MEAN, _CLIP_STD),
    )


# ---------------------------------------------------------------- tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledView:
    """A picture as rows of squares, and the whole of it as one more; a small one as that one alone.

    Attributes:
        num_tokens: that a square becomes.
        edge: of a square.
        longest: to what the longer edge is resized; 0: it stays.
        is_split: whether there are rows of squares at all.
        resampling: as Pillow numbers it.
        colours: of its pixels.
    """

    num_tokens: int
    edge: int
    longest: int
    is_split: bool
    resampling: int
    colours: Colours

    def layout(self, width: int, height: int, tokenize: Callable[[str], list[int]]) -> Layout:
        """See `Views`: each square has tokens around it that say where it is."""
        rows, columns = self._grid(*self._sizes(width, height)[-1])
        found: list[tuple[int, ...] | PicturePart] = []
        before = ""
        for row in range(rows):
            for column in range(columns):
                found.append(tuple(tokenize(f"{before}{_AROUND}<row_{row + 1}_col_{column + 1}>")))
                found.append(PicturePart(self.num_tokens))
                before = ""
            before = "\n"
        before = before and f"{before}\n"
        found.append(tuple(tokenize(f"{before}{_AROUND}{_WHOLE}")))
        return (*found, PicturePart(self.num_tokens), tuple(tokenize(_AROUND)))

    def cut(self, picture: Picture) -> list[Image]:
        """See `Views`: rows from the top, the whole picture last."""
        image, edge = _opened(picture), self.edge
        sizes = self._sizes(picture.width, picture.height)
        for size in sizes:
            image = _resized(image, size, self.resampling)
        rows, columns = self._grid(*sizes[-1])
        places = [(column * edge, row * edge) for row in range(rows) for column in range(columns)]
        tiles = [image.crop((left, top, left + edge, top + edge)) for left, top in places]
        return [*tiles, _resized(image, (edge, edge), self.resampling)]

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Widths and heights that it takes one after the other; the last is one of whole squares."""
        found = []
        if self.longest:
            width, height = _bounded(*_lengthened(width, height, self.longest))
            found.append((width, height))
        if not self.is_split:
            return [*found, (self.edge, self.edge)]
        ratio = width / height
        if width >= height:
            width = _upward(width, self.edge)
            height = _upward(int(width / ratio), self.edge)
        else:
            height = _upward(height, self.edge)
            width = _upward(int(height * ratio), self.edge)
        return [*found, (width, height)]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of squares; none where it is one square."""
        rows, columns = height // self.edge, width // self.edge
        return (rows, columns) if rows * columns > 1 else (0, 0)


def _lengthened(width: int, height: int, longest: int) -> tuple[int, int]:
    """With the longer edge so long, the other one even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return longest, max(1, short + short % 2)
    short = int(longest * ratio)
    return max(1, short + short % 2), longest


def _bounded(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _MOST_PIXELS:
        return _MOST_PIXELS, max(1, int(_MOST_PIXELS / ratio))
    if height > width and height > _MOST_PIXELS:
        return max(1, int(_MOST_PIXELS * ratio)), _MOST_PIXELS
    return width, height


def _upward(length: int, edge: int) -> int:
    return max(1, math.ceil(length / edge)) * edge


def _tiles(said: _Said, shape: TowerShape) -> TiledView:
    square = said.edges("max_image_size", {"longest_edge": shape.edge}).get("longest_edge")
    if square != shape.edge:
        raise broken(
            said.path, f"pictures are cut into squares of {square} pixels, the tower takes {shape.edge}"
        )
    size = said.edges("size", {"longest_edge": _DEFAULT_EDGES * shape.edge})
    if "longest_edge" not in size:
        raise broken(said.path, "size has no longest_edge, to which pictures are resized")
    return TiledView(
        num_tokens=shape.num_tokens,
        edge=shape.edge,
        longest=size["longest_edge"] if said.flag("do_resize", usually=True) else 0,
        is_split=said.flag("do_image_splitting", usually=True),
        resampling=said.resampling(_LANCZOS),
        colours=said.colours(_HALF, _HALF),
    )
