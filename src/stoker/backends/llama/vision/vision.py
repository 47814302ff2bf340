"""A projector of llama.cpp (mtmd): what images and recordings take of a prompt, and their embeddings.

SPEC V1 to V3, V9. Owns the native projector and what it says of its model. `slices` cuts an encode into
slices of time, `bitmaps` hands media over; the engine places the embeddings.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from stoker.backends.llama.binding import capture_log, error_text, vision_library
from stoker.backends.llama.shortage import load_error
from stoker.backends.llama.vision.bitmaps import Blank, Given, Silence, described, native_bitmap
from stoker.backends.llama.vision.slices import SlicedEncode, SliceGate
from stoker.backends.protocol.backend import Grid, PicturePart
from stoker.errors import InvalidRequestError, StepFailedError, StokerError, UnsupportedError
from stoker.ipc.model import Pairing
from stoker.ipc.request import Sound
from stoker.models.fingerprint import fingerprint
from stoker.models.projector import check_heard, check_served, pairing_of, read_projector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.request import Medium
    from stoker.models.gguf.header import GgufHeader

log = logging.getLogger(__name__)

_TEXT, _IMAGE, _AUDIO = 0, 1, 2  # enum mtmd_input_chunk_type
_TXYZ, _TYXZ = "txyz", (0, 2, 1, 3)  # struct mtmd_decoder_pos, and the order in which a batch has its fields
_PROBED_EDGE = 224  # pixels of a picture of which only the positions are looked at
_COMPUTE = re.compile(r"compute buffer size = +([\d.]+) MiB")
_MAX_LENGTHS = 256
"""Lengths of recordings whose tokens are known: the library makes a spectrogram to count them."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tokenised image or recording: ids of the text around it, or a native piece to encode."""

    kind: int
    tokens: tuple[int, ...]
    handle: int
    num_tokens: int

    @property
    def is_encoded(self) -> bool:
        return self.kind != _TEXT


@dataclass(frozen=True, slots=True)
class VisionContext:
    """A model's projector, if it has one that works, and how the two stand (SPEC V1)."""

    vision: LlamaVision | None
    pairing: Pairing


BLIND = VisionContext(None, Pairing.NONE)
"""Of a model that is not meant to see."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What a model's steps are computed with: CPU threads, and tokens of one call."""

    num_threads: int
    num_tokens: int


def open_vision(spec: ModelSpec, model: LlamaModel, header: GgufHeader, limits: CallLimits) -> VisionContext:
    """Load the projector that goes with a model; where that fails, the model is served for text alone."""
    if spec.projector is None:
        return VisionContext(None, pairing_of(header, None).pairing)
    try:
        return VisionContext(LlamaVision(Path(spec.projector.path), model, limits), Pairing.READY)
    except StokerError as error:
        log.warning("%s is served without its projector: %s", spec.id, error)
        return VisionContext(None, Pairing.BROKEN)


class LlamaVision:
    """A projector beside `model`, whose embeddings it makes. Close it before the model.

    `layout` may be called on any thread; everything else on the one that drives the model.

    Attributes:
        n_embd: width of an embedding.
        size_bytes: of its file.
        num_threads: CPU threads of an encode.
        sees: it takes images.
        hears_hz: samples a second at which it takes recordings; 0: it takes none.

    Raises:
        ModelFileError: the file is no sound projector.
        ModelLoadError: llama.cpp refused the file, e.g. because it belongs to another model.
        UnsupportedError: it sees and hears nothing, or in a way that is not served; the message says which.
    """

    def __init__(self, path: Path, model: LlamaModel, limits: CallLimits) -> None:
        self._is_closed = True  # nothing to close until it is open
        self.path = path
        self.num_threads = _threads_beside(limits.num_threads)
        self._call_tokens = limits.num_tokens
        self.n_embd = model.n_embd_inp
        self.fingerprint = fingerprint(path)
        self.size_bytes = path.stat().st_size
        self._model = model
        self._library = vision_library()
        self._gate = SliceGate()
        self._opening = threading.Lock()  # a layout must not meet a projector that is opened anew
        self._encoding: SlicedEncode | None = None
        self._handle: int | None = None
        self._opened_threads = 0
        self._compute_bytes = 0
        self._sound_layouts: dict[int, Layout] = {}  # by number of samples
        self._header = read_projector(path)
        check_served(self._header)
        self._open()
        self._is_closed = False
        self.sees = bool(self._library.mtmd_support_vision(self._handle))
        hears = self._library.mtmd_support_audio(self._handle)
        self.hears_hz = int(self._library.mtmd_get_audio_sample_rate(self._handle)) if hears else 0
        try:
            self._refuse_foreign_kinds()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, model: LlamaModel, limits: CallLimits) -> Self:
        """Load the projector at `path`; errors are those of the class."""
        return cls(path, model, limits)

    def __repr__(self) -> str:
        return f"<LlamaVision {self.path.name} {self._encoding or 'idle'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1)

    def layout(self, medium: Medium) -> Layout:
        """What stands for it: ids of tokens around it, and numbers of embeddings; nothing is encoded.

        Raises:
            InvalidRequestError: the projector cannot take an image of this shape or a recording of this
                length or rate, or its tokens see each other and are more than a call may have.
            UnsupportedError: it takes no such media.
            ModelLoadError: its file has gone since it was opened first.
        """
        if isinstance(medium, Sound):
            return self._sound_layout(medium)
        if not self.sees:
            text = f"the projector {self.path.name} hears, and takes no pictures"
            raise UnsupportedError(text, param="messages")
        return self._layout(Blank(medium.width, medium.height))

    def num_tokens(self, width: int, height: int) -> int:
        """Embeddings that an image of this size becomes; InvalidRequestError as for `layout`."""
        parts = self._layout(Blank(width, height))
        return sum(part.num_tokens for part in parts if isinstance(part, PicturePart))

    def begin(self, medium: Medium) -> SlicedEncode:
        """Encode in slices, one at a time: not before the one before is done or cancelled."""
        former = self._encoding
        assert former is None or former.is_over, f"{former!r} is not over"
        self._encoding = SlicedEncode(self._gate, lambda ready: self._encode(medium, ready), former)
        return self._encoding

    def encode(self, medium: Medium) -> Rows:
        """Encode at once: float32 (num_tokens, n_embd). Raises StepFailedError."""
        encoding = self.begin(medium)
        while not encoding.run(float("inf")):
            pass
        return encoding.result()

    def memory(self) -> dict[str, int]:
        """Bytes of weights and buffers, as the library reported them."""
        return {"projector": self.size_bytes + self._compute_bytes}

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """All of it on the first accelerator, as the library has it; see `OnDevices`."""
        first = self._model.devices[:1]
        return {each.id: self.memory() for each in first if not each.is_integrated}

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next encode on.

        The library fixes the number when it opens a projector, so the next encode opens it again first.
        """
        self.num_threads = _threads_beside(num_threads)

    def close(self) -> None:
        """Give up what is being encoded and free everything; idempotent."""
        self._is_closed = True
        if self._encoding is not None:
            self._encoding.cancel()
            self._encoding.join()
        with self._opening:
            self._free()

    # ------------------------------------------------------------ the native projector

    def _open(self) -> None:
        library = self._library
        params = library.mtmd_context_params_default()
        params.use_gpu = bool(self._model.devices)
        params.print_timings = False
        params.n_threads = self.num_threads
        params.warmup = True  # lays out its buffers and computes nothing
        if not self._model.devices:  # an accelerator takes milliseconds, and stopping at each operation costs
            params.cb_eval = self._gate.native
        with capture_log() as lines:
            handle = library.mtmd_init_from_file(str(self.path).encode(), self._model.handle, params)
        if handle is None:
            what = f"the projector {self.path.name} for {self._model.path.name}"
            raise load_error(what, lines, self._model.devices, path=str(self.path))
        found = (_COMPUTE.search(line.text) for line in lines)
        self._compute_bytes = sum(int(float(match[1]) * 2**20) for match in found if match)
        self._handle, self._opened_threads = handle, params.n_threads

    def _free(self) -> None:
        if self._handle is not None:
            self._library.mtmd_free(self._handle)
            self._handle = None

    def _refuse_foreign_kinds(self) -> None:
        library = self._library
        assert self.sees or self.hears_hz > 0, "a projector that neither sees nor hears"
        if self.sees and library.mtmd_decode_use_mrope(self._handle):
            self._layout(Blank(_PROBED_EDGE, _PROBED_EDGE))

    # ------------------------------------------------------------ images and recordings

    def _layout(self, medium: Blank | Silence) -> Layout:
        with self._opening:
            if self._handle is None:  # it could not be opened anew
                self._open()
            with self._tokenised(medium) as chunks:
                return tuple(self._part(chunk) if chunk.is_encoded else chunk.tokens for chunk in chunks)

    def _sound_layout(self, sound: Sound) -> Layout:
        check_heard(self._header, sound, self.hears_hz)
        found = self._sound_layouts.get(sound.num_samples)
        if found is None:
            found = self._layout(Silence(sound.num_samples))
            if len(self._sound_layouts) < _MAX_LENGTHS:
                self._sound_layouts[sound.num_samples] = found
        return found

    def _part(self, chunk: _Chunk) -> PicturePart:
        """How the tokens of a piece are computed."""
        library = self._library
        is_mutual = bool(library.mtmd_decode_use_non_causal(self._handle, chunk.handle))
        if is_mutual and chunk.num_tokens > self._call_tokens:
            raise InvalidRequestError(
                f"a picture of {chunk.num_tokens} tokens that see each other has to be computed in one call,"
                f" which may have {self._call_tokens} tokens here (n_batch)",
                param="messages",
            )
        has_grid = library.mtmd_decode_use_mrope(self._handle)
        return PicturePart(chunk.num_tokens, self._grid(chunk) if has_grid else None, is_mutual)

    def _grid(self, chunk: _Chunk) -> Grid:
        if chunk.kind == _AUDIO:  # as text has them, in each dimension
            offsets = np.tile(np.arange(chunk.num_tokens, dtype=np.int32), len(_TXYZ))
            return Grid(chunk.num_tokens, offsets.tobytes())
        library = self._library
        tokens = library.mtmd_input_chunk_get_tokens_image(chunk.handle)
        found = []
        for start in (0, 1):
            places = (library.mtmd_decoder_pos * chunk.num_tokens)()
            library.mtmd_helper_image_get_decoder_pos(tokens, start, places)
            found.append(np.frombuffer(places, np.int32).reshape(-1, len(_TXYZ)).T[list(_TYXZ)])
        if not np.array_equal(found[1][:3], found[0][:3] + 1):
            raise UnsupportedError(
                f"{self._model.description} gives the tokens of a picture positions that do not count from"
                " its first one, which is not served; text without pictures is",
                path=str(self.path),
            )
        return Grid(library.mtmd_input_chunk_get_n_pos(chunk.handle), found[0].tobytes())

    def _encode(self, medium: Medium, ready: Callable[[], None]) -> Rows:
        """On the encoding's own thread; from `ready` on while it is granted time."""
        with self._opening:
            if self._opened_threads != self.num_threads:
                self._free()
            if self._handle is None:
                self._open()
        with self._tokenised(medium) as chunks:
            ready()
            return np.concatenate([self._encode_chunk(chunk) for chunk in chunks if chunk.is_encoded])

    def _encode_chunk(self, chunk: _Chunk) -> Rows:
        library = self._library
        with capture_log() as lines:
            code = library.mtmd_encode_chunk(self._handle, chunk.handle)
        if code != 0:
            what = "recording" if chunk.kind == _AUDIO else "picture"
            raise StepFailedError(
                f"the projector {self.path.name} failed on a {what}: {error_text(lines)}", native_code=code
            )
        pointer = library.mtmd_get_output_embd(self._handle)
        return np.ctypeslib.as_array(pointer, (chunk.num_tokens, self.n_embd)).copy()

    @contextmanager
    def _tokenised(self, medium: Given) -> Iterator[list[_Chunk]]:
        """The parts of a medium, which are freed afterwards; those of blank media have sizes only."""
        library = self._library
        bitmap = native_bitmap(library, medium)
        chunks = library.mtmd_input_chunks_init()
        try:
            marker = library.mtmd_default_marker()
            text = library.mtmd_input_text(marker, len(marker), False, True)
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            with capture_log() as lines:
                code = library.mtmd_tokenize(self._handle, chunks, ctypes.byref(text), bitmaps, 1)
            if code != 0:
                what = described(medium)
                raise InvalidRequestError(
                    f"the projector {self.path.name} cannot take {what}: {error_text(lines)}",
                    param="messages",
                )
            yield [self._chunk(chunks, index) for index in range(library.mtmd_input_chunks_size(chunks))]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)

    def _chunk(self, chunks: Any, index: int) -> _Chunk:
        library = self._library
        handle = library.mtmd_input_chunks_get(chunks, index)
        kind = library.mtmd_input_chunk_get_type(handle)
        assert kind in {_TEXT, _IMAGE, _AUDIO}, f"a chunk of type {kind} in a medium"
        size = library.mtmd_input_chunk_get_n_tokens(handle)
        if kind != _TEXT:
            return _Chunk(kind, (), handle, size)
        count = ctypes.c_size_t()
        tokens = library.mtmd_input_chunk_get_tokens_text(handle, ctypes.byref(count))
        return _Chunk(kind, tuple(tokens[: count.value]), handle, size)


def _threads_beside(num_threads: int) -> int:
    """Threads of an encode, where steps have so many: with as many again, both teams would wait for cores.

    GNU's OpenMP lets waiting threads sleep once there are more of them than cores, and each of the many short
    operations of a step then pays for waking them: steps took twice their time beside an idle encode.
    """
    return max(1, num_threads // 2)
