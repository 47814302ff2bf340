"""Projectors (mmproj files): the header of one, whether it fits a model, and what it takes (SPEC V1, V9, R1).

Read with bounds before any native code sees the file. The backend loads it and encodes
images and recordings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError, ModelFileError, StokerError, UnsupportedError
from stoker.ipc.model import ModelClass, Pairing, ProjectorSpec
from stoker.models.gguf.bounded_file import GgufArray
from stoker.models.gguf.header import read_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.ipc.request import Sound
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

_CUT_KINDS = frozenset(
    {"ultravox", "qwen2a", "qwen2.5o", "voxtral", "meralion", "musicflamingo", "glma", "qwen3a"}
)
"""Those whose recordings the library cuts into windows of 30 s and less; others take one as a whole."""
_STACKED_KINDS = frozenset({"ultravox", "voxtral", "meralion"})
_VOICE_KINDS = frozenset({"qwen3tts_spkenc", "pockettts_spkenc"})
"""What makes a voice of a recording, for models that speak."""
_RATES_HZ = {"mimo_audio": 24_000}
_RATE_HZ = 16_000
_WINDOW_FRAMES, _FRAMES_S = 3000, 100
"""Of a spectrogram: those of a window, and those of a second."""
_WINDOW_POSITIONS = _WINDOW_FRAMES // 2
_SHORT_WINDOW_POSITIONS = 13
_MOST_WHOLE_S = 60
"""Of a recording that is taken as a whole: attention to each other takes memory by the square of it."""
_LEAST_HEARD = 10
"""Recordings of less than a tenth of a second are refused: the library ends the process at some."""
_MAX_HEADS, _MAX_MELS = 1024, 1024
_KERNEL = 3
_SPECTRUM_COPIES = 4  # the recording's, its windows', the encoder's, and as much again of samples


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """A pairing, and why it is none that is ready."""

    pairing: Pairing
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """The part of a projector that listens.

    Attributes:
        kind: its graph, e.g. "qwen2a".
        rate_hz: samples a second that it takes.
        most_s: seconds of one recording; 0: any number, as it is cut into windows.
        num_mels: bands of its spectrogram.
        width: of its encoder's tokens.
        feed_forward: the widest they get.
        num_heads: of its attention.
    """

    kind: str
    rate_hz: int
    most_s: float
    num_mels: int
    width: int
    feed_forward: int
    num_heads: int

    @property
    def compute_bytes(self) -> int:
        """The most that encoding a window takes beside the weights (tests/real/test_kinds_of_hearing.py)."""
        tokens, frames = _WINDOW_POSITIONS, _WINDOW_FRAMES
        widest = max(self.feed_forward + _HIDDEN_COPIES * self.width, _ATTENTION_COPIES * self.width)
        layer = tokens * widest * _FLOAT_BYTES + self.num_heads * tokens * tokens * _FLOAT_BYTES
        first = frames * (_KERNEL * (self.num_mels + self.width) + 2 * self.width) * _FLOAT_BYTES
        spectrum = _SPECTRUM_COPIES * 2 * frames * self.num_mels * _FLOAT_BYTES
        return int(_FRAGMENTS * max(layer, first)) + spectrum + _OTHER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorHeader:
    """What a projector's file says of itself.

    Attributes:
        path: the file.
        kind: its graph, e.g. "mlp".
        has_vision: it looks at images.
        hearing: what it needs to listen; None: it does not.
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
    hearing: Hearing | None = None
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
            path=str(self.path),
            size_bytes=self.size_bytes,
            compute_bytes=self.compute_bytes,
            has_vision=self.has_vision,
            hears_hz=self.hearing.rate_hz if self.hearing else 0,
            hearing=self.hearing.kind if self.hearing else "",
        )

    @property
    def compute_bytes(self) -> int:
        """The most that encoding takes beside the weights; both parts keep their buffers."""
        seeing = self._seeing_bytes if self.has_vision else 0
        return seeing + (self.hearing.compute_bytes if self.hearing else 0)

    @property
    def _seeing_bytes(self) -> int:
        """The most that encoding an image takes (tests/real/test_vision_backend.py)."""
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
        hearing=_hearing(path, metadata, tensors),
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
        UnsupportedError: it sees and hears nothing, or the model is none that does.
        ModelFileError: it is another model's; the message names both.
    """
    check_served(projector)
    if model.model_class is not ModelClass.DECODER:
        raise UnsupportedError(
            f"{model.path.name} is of class {model.model_class}: only decoders see and hear"
        )
    if projector.n_embd_out and projector.n_embd_out != model.embedding_length:
        raise _broken(
            projector.path,
            f"its embeddings have {projector.n_embd_out} numbers, those of {model.path.name}"
            f" {model.embedding_length}: it is another model's",
        )


def check_served(projector: ProjectorHeader) -> None:
    """Raises UnsupportedError where a projector neither sees nor hears, or makes voices of recordings."""
    name, path = projector.path.name, str(projector.path)
    if projector.hearing is not None and projector.hearing.kind in _VOICE_KINDS:
        what = "makes a voice of a recording, for a model that speaks"
        raise UnsupportedError(f"the projector {name} {what}: that is not served", path=path)
    if not projector.has_vision and projector.hearing is None:
        raise UnsupportedError(f"the projector {name} has no encoder of images or of sound", path=path)


def check_heard(projector: ProjectorHeader, sound: Sound, rate_hz: int) -> None:
    """Refuse a recording that a projector cannot take.

    Args:
        projector: its header.
        sound: the recording.
        rate_hz: samples a second that it takes, as the library says; 0: it takes none.

    Raises:
        UnsupportedError: it does not hear.
        InvalidRequestError: the recording is too short, too long, or of another rate.
    """
    name, hearing = projector.path.name, projector.hearing
    if hearing is None or not rate_hz:
        raise UnsupportedError(f"the projector {name} sees, and takes no recordings", param="messages")
    if sound.rate_hz != rate_hz:
        text = f"the projector {name} takes {rate_hz} samples a second, the recording has {sound.rate_hz}"
        raise InvalidRequestError(text, param="messages")
    if sound.num_samples < rate_hz // _LEAST_HEARD:
        least = rate_hz // _LEAST_HEARD
        text = f"a recording of {sound.num_samples} samples is too short: {least} are the least"
        raise InvalidRequestError(text, param="messages")
    if hearing.most_s and sound.duration_s > hearing.most_s:
        raise InvalidRequestError(
            f"the recording has {sound.duration_s:.1f} s, and projectors of the kind {hearing.kind} take one"
            f" as a whole: at most {hearing.most_s:g} s",
            param="messages",
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


def _width_out(kind: str, metadata: Mapping[str, Scalar | GgufArray], tensors: tuple[TensorInfo, ...]) -> int:
    """Width of an embedding; 0 where only the native library knows."""
    if kind in _OUTPUTS:
        name, dimension = _OUTPUTS[kind]
        shapes = [tensor.shape for tensor in tensors if tensor.name == name]
        return shapes[0][dimension] if shapes and len(shapes[0]) > dimension else 0
    told = metadata.get("clip.vision.projection_dim")
    is_told_truly = kind in {"gemma3", "idefics3", "internvl"}
    return told if is_told_truly and isinstance(told, int) else 0


def _hearing(
    path: Path, metadata: Mapping[str, Scalar | GgufArray], tensors: tuple[TensorInfo, ...]
) -> Hearing | None:
    """What the header says of listening. Raises ModelFileError for what would end the library's process."""
    if metadata.get("clip.has_audio_encoder") is not True:
        return None
    kind = str(metadata.get("clip.projector_type") or metadata.get("clip.audio.projector_type", ""))[:64]
    positions = [tensor.shape[-1] for tensor in tensors if tensor.name == "a.position_embd.weight"]
    most_s = 0.0
    if kind in _CUT_KINDS:
        least = _SHORT_WINDOW_POSITIONS if kind == "qwen3a" else _WINDOW_POSITIONS
        if not positions or positions[0] < least:
            raise _broken(path, f"it has {(positions or [0])[0]} positions for sound, {least} are the least")
        _check_stacks(path, metadata, kind)
    else:
        frames = 2 * positions[0] if positions else _MOST_WHOLE_S * _FRAMES_S
        most_s = min(_MOST_WHOLE_S, frames / _FRAMES_S)

    def number(name: str, most: int) -> int:
        return _number(path, metadata, name, most, "audio")

    return Hearing(
        kind=kind,
        rate_hz=_RATES_HZ.get(kind, _RATE_HZ),
        most_s=most_s,
        num_mels=number("num_mel_bins", _MAX_MELS),
        width=number("embedding_length", _MAX_WIDTH),
        feed_forward=number("feed_forward_length", _MAX_WIDTH),
        num_heads=number("attention.head_count", _MAX_HEADS),
    )


def _check_stacks(path: Path, metadata: Mapping[str, Scalar | GgufArray], kind: str) -> None:
    """Refuse a projector that stacks tokens to another number than the library counts: it ends the process.

    The library pads a window's tokens as if their width were a power of two, and counts them as if it cut.
    """
    if kind not in _STACKED_KINDS:
        return
    factor = _number(path, metadata, "projector.stack_factor", _WINDOW_POSITIONS, "audio")
    stride = _number(path, metadata, "embedding_length", _MAX_WIDTH, "audio") * factor
    num_numbers = _WINDOW_POSITIONS * stride // factor
    num_made = ((num_numbers + stride - 1) & -stride) // stride  # GGML_PAD
    num_counted = -(-_WINDOW_FRAMES // factor) // 2
    if num_made != num_counted:
        raise _broken(path, f"it stacks {factor} tokens to {num_made}, where {num_counted} are counted")


def _number(
    path: Path, metadata: Mapping[str, Scalar | GgufArray], name: str, most: int, part: str = "vision"
) -> int:
    value = metadata.get(f"clip.{part}.{name}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise _broken(path, f"clip.{part}.{name} is {value!r}, 1 to {most} are possible")
    return value


def _broken(path: Path, why: str) -> ModelFileError:
    return ModelFileError(f"{path}: {why}", path=str(path))
