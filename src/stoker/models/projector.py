"""Projectors (mmproj files): the header of one, whether it fits a model, and what it takes (SPEC V1, R1).

Read with bounds before any native code sees the file. The backend loads it and encodes
images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import ModelFileError, StokerError, UnsupportedError
from stoker.ipc.model import ModelClass, Pairing, ProjectorSpec
from stoker.models.gguf.bounded_file import GgufArray
from stoker.models.gguf.header import read_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.models.gguf.bounded_file import Scalar
    from stoker.models.gguf.header import GgufHeader, TensorInfo

_MAX_SIDE = 8192  # clip.cpp takes no larger images
_MAX_WIDTH = 2**16
_SEEING_ARCHITECTURES = frozenset({"chameleon", "cogvlm", "qwen2vl", "qwen3vl", "qwen3vlmoe", "hunyuan_vl"})
_SEEING_TAGS = frozenset({"image-text-to-text", "image-to-text", "visual-question-answering", "vision"})
_SEEING_TEMPLATE = ("<__media__>", "image_url", "'image'", '"image"')
_OUTPUTS = {"mlp": ("mm.2.weight", 1), "mlp_norm": ("mm.3.bias", 0)}
"""The tensor whose dimension is the width of an embedding, where the header does not tell it truly."""
_FIXED_SIZES = frozenset({"mlp", "mlp_norm", "ldp", "ldpv2", "gemma3", "idefics3", "internvl", "janus_pro"})

_FLOAT_BYTES, _CHANNELS = 4, 3
_FRAGMENTS = 1.06  # of a compute buffer, lost between tensors
_HIDDEN_COPIES = 3  # beside the feed forward part: the residual stream, its norm and the sum
_ATTENTION_COPIES = 8
_LARGEST_PATCHES = 92 * 92  # llama.cpp reserves so many where the size of an image is free
_OTHER_BYTES = 8 * 2**20  # the library's part that sees, threads, tables


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """A pairing, and why it is none that is ready."""

    pairing: Pairing
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorHeader:
    """What a projector's file says of itself.

    Attributes:
        path: the file.
        kind: its graph, e.g. "mlp".
        has_vision: it looks at images; others listen.
        n_embd_out: width of its embeddings; 0: the header does not tell.
        image_size: pixels of a side that it sees.
        patch_size: pixels of a side that become one token of its encoder.
        width: of its encoder's tokens.
        feed_forward: the widest they get.
        size_bytes: of its tensors.
    """

    path: Path
    kind: str
    has_vision: bool
    n_embd_out: int
    image_size: int
    patch_size: int
    width: int
    feed_forward: int
    size_bytes: int

    @property
    def spec(self) -> ProjectorSpec:
        """How it is loaded beside a model."""
        return ProjectorSpec(
            path=str(self.path), size_bytes=self.size_bytes, compute_bytes=self.compute_bytes
        )

    @property
    def compute_bytes(self) -> int:
        """The most that encoding an image takes beside the weights (tests/real/test_vision_backend.py)."""
        patches = (self.image_size // self.patch_size) ** 2 + 1
        pixels = self.image_size**2
        if self.kind not in _FIXED_SIZES:
            patches = max(patches, _LARGEST_PATCHES)
            pixels = max(pixels, patches * self.patch_size**2)
        widest = max(self.feed_forward + _HIDDEN_COPIES * self.width, _ATTENTION_COPIES * self.width)
        layer = patches * widest * _FLOAT_BYTES
        first = 2 * pixels * _CHANNELS * _FLOAT_BYTES + patches * self.width * 2 * _FLOAT_BYTES
        products = patches * self.feed_forward * _FLOAT_BYTES
        image = 2 * pixels * _CHANNELS * _FLOAT_BYTES
        return int(_FRAGMENTS * max(layer, first)) + products + image + _OTHER_BYTES


def read_projector(path: str | Path) -> ProjectorHeader:
    """Read and check the header of a projector.

    Raises:
        ModelFileError: missing, truncated, corrupt, or something else than a projector.
    """
    path = Path(path)
    metadata, tensors = read_tables(path)
    if metadata.get("general.architecture") != "clip":
        raise _broken(path, f"it is a {str(metadata.get('general.architecture'))[:64]!r}, no projector")
    kind = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type", ""))
    has_vision = metadata.get("clip.has_vision_encoder") is True
    image_size = _number(path, metadata, "image_size", _MAX_SIDE) if has_vision else 1
    patch_size = _number(path, metadata, "patch_size", _MAX_SIDE) if has_vision else 1
    if patch_size > image_size:
        raise _broken(
            path, f"its patches of {patch_size} pixels are larger than its pictures of {image_size}"
        )
    return ProjectorHeader(
        path=path,
        kind=str(kind)[:64],
        has_vision=has_vision,
        n_embd_out=_width_out(str(kind), metadata, tensors) if has_vision else 0,
        image_size=image_size,
        patch_size=patch_size,
        width=_number(path, metadata, "embedding_length", _MAX_WIDTH) if has_vision else 0,
        feed_forward=_number(path, metadata, "feed_forward_length", _MAX_WIDTH) if has_vision else 0,
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
    )


def is_projector(path: str | Path) -> bool:
    """Whether a file is a sound projector: it belongs beside a model, and is none."""
    try:
        read_projector(path)
    except StokerError:
        return False
    return True


def check_pair(projector: ProjectorHeader, model: GgufHeader) -> None:
    """Compare a projector with a model, as far as headers tell; loading it tells the rest.

    Raises:
        UnsupportedError: it sees nothing, or the model sees in a way that is not served.
        ModelFileError: it is another model's; the message names both.
    """
    name = projector.path.name
    if not projector.has_vision:
        raise UnsupportedError(f"the projector {name} has no vision encoder", path=str(projector.path))
    if model.model_class is not ModelClass.DECODER:
        raise UnsupportedError(
            f"{model.path.name} is of class {model.model_class}: only decoders see pictures"
        )
    if _has_sections(model):
        raise UnsupportedError(
            f"{model.path.name} gives the tokens of a picture positions in two dimensions (M-RoPE),"
            " which is not served"
        )
    if projector.n_embd_out and projector.n_embd_out != model.embedding_length:
        raise _broken(
            projector.path,
            f"its embeddings have {projector.n_embd_out} numbers, those of {model.path.name}"
            f" {model.embedding_length}: it is another model's",
        )


def pairing_of(model: GgufHeader, projector: str | Path | None) -> PairVerdict:
    """How a model stands with the projector given for it, or with none."""
    if projector is None:
        return PairVerdict(Pairing.NEEDS_PROJECTOR if _is_made_to_see(model) else Pairing.NONE)
    try:
        check_pair(read_projector(projector), model)
    except StokerError as error:
        return PairVerdict(Pairing.BROKEN, error.message)
    return PairVerdict(Pairing.READY)


def _is_made_to_see(model: GgufHeader) -> bool:
    """Whether its architecture, its tags or its chat template speak of images."""
    tags = model.metadata.get("general.tags")
    named = tags.values if isinstance(tags, GgufArray) and tags.values is not None else ()
    texts = {text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in named}
    template = model.chat_template or ""
    return (
        model.architecture in _SEEING_ARCHITECTURES
        or bool(texts & _SEEING_TAGS)
        or any(mark in template for mark in _SEEING_TEMPLATE)
    )


def _has_sections(model: GgufHeader) -> bool:
    """Whether its positions have more than one dimension."""
    sections = model.metadata.get(f"{model.architecture}.rope.dimension_sections")
    return isinstance(sections, GgufArray) and any(sections.values or ())


def _width_out(kind: str, metadata: Mapping[str, Scalar | GgufArray], tensors: tuple[TensorInfo, ...]) -> int:
    """Width of an embedding; 0 where only the native library knows."""
    if kind in _OUTPUTS:
        name, dimension = _OUTPUTS[kind]
        shapes = [tensor.shape for tensor in tensors if tensor.name == name]
        return shapes[0][dimension] if shapes and len(shapes[0]) > dimension else 0
    told = metadata.get("clip.vision.projection_dim")
    is_told_truly = kind in {"gemma3", "idefics3", "internvl"}
    return told if is_told_truly and isinstance(told, int) else 0


def _number(path: Path, metadata: Mapping[str, Scalar | GgufArray], name: str, most: int) -> int:
    value = metadata.get(f"clip.vision.{name}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise _broken(path, f"clip.vision.{name} is {value!r}, 1 to {most} are possible")
    return value


def _broken(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path}: {why}", path=str(path))
