"""A projector of llama.cpp (mtmd): what an image takes of a prompt, and its embeddings (SPEC V1 to V3).

Owns the native projector and what it says of its model. `slices` cuts an encode into slices of time; the
engine places the embeddings.
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
from stoker.backends.llama.vision.slices import SlicedEncode, SliceGate
from stoker.errors import InvalidRequestError, StepFailedError, StokerError, UnsupportedError
from stoker.ipc.model import Pairing
from stoker.models.fingerprint import fingerprint
from stoker.models.projector import pairing_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import Rows
    from stoker.backends.protocol.vision import Layout
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.request import Picture
    from stoker.models.gguf.header import GgufHeader

log = logging.getLogger(__name__)

_TEXT, _IMAGE = 0, 1  # enum mtmd_input_chunk_type
_COMPUTE = re.compile(r"compute buffer size = +([\d.]+) MiB")
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tokenised image: ids of the text around it, or a native piece to encode."""

    tokens: tuple[int, ...]
    handle: int
    num_tokens: int

    @property
    def is_picture(self) -> bool:
        return not self.tokens


@dataclass(frozen=True, slots=True)
class VisionContext:
    """A model's projector, if it has one that works, and how the two stand (SPEC V1)."""

    vision: LlamaVision | None
    pairing: Pairing


BLIND = VisionContext(None, Pairing.NONE)
"""Of a model that is not meant to see."""


def open_vision(spec: ModelSpec, model: LlamaModel, header: GgufHeader, num_threads: int) -> VisionContext:
    """Load the projector that goes with a model; where that fails, the model is served for text alone."""
    if spec.projector is None:
        return VisionContext(None, pairing_of(header, None).pairing)
    try:
        return VisionContext(LlamaVision(Path(spec.projector.path), model, num_threads), Pairing.READY)
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

    Raises:
        ModelLoadError: llama.cpp refused the file, e.g. because it belongs to another model.
        UnsupportedError: it sees nothing, or in a way that is not served; the message says which.
    """

    def __init__(self, path: Path, model: LlamaModel, num_threads: int) -> None:
        self._is_closed = True  # nothing to close until it is open
        self.path = path
        self.num_threads = _threads_beside(num_threads)
        self.n_embd = model.n_embd
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
        self._open()
        self._is_closed = False
        try:
            self._refuse_foreign_kinds()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, model: LlamaModel, num_threads: int) -> Self:
        """Load the projector at `path`; errors are those of the class."""
        return cls(path, model, num_threads)

    def __repr__(self) -> str:
        return f"<LlamaVision {self.path.name} {self._encoding or 'idle'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=1)

    def layout(self, picture: Picture) -> Layout:
        """What stands for an image: ids of tokens around it, and numbers of embeddings; computes nothing.

        Raises:
            InvalidRequestError: the projector cannot take an image of this shape.
            ModelLoadError: its file has gone since it was opened first.
        """
        return self._layout(picture.width, picture.height)

    def num_tokens(self, width: int, height: int) -> int:
        """Embeddings that an image of this size becomes; InvalidRequestError as for `layout`."""
        return sum(part for part in self._layout(width, height) if isinstance(part, int))

    def begin(self, picture: Picture) -> SlicedEncode:
        """Encode an image in slices, one at a time: not before the one before is done or cancelled."""
        assert self._encoding is None or self._encoding.is_over, f"{self._encoding!r} is not over"
        self._encoding = SlicedEncode(self._gate, lambda: self._encode(picture))
        return self._encoding

    def encode(self, picture: Picture) -> Rows:
        """Encode an image at once: float32 (num_tokens, n_embd). Raises StepFailedError."""
        encoding = self.begin(picture)
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
        library, name = self._library, self.path.name
        if not library.mtmd_support_vision(self._handle):
            raise UnsupportedError(f"the projector {name} has no vision encoder", path=str(self.path))
        if library.mtmd_decode_use_mrope(self._handle):
            raise UnsupportedError(
                f"{self._model.description} gives the tokens of a picture positions in two dimensions"
                f" (M-RoPE), which is not served; text without pictures is",
                path=str(self.path),
            )
        if library.mtmd_decode_use_non_causal(self._handle, None):
            raise UnsupportedError(
                f"with the projector {name} the tokens of a picture see each other in both directions"
                f" (non-causal attention), which is not served",
                path=str(self.path),
            )

    # ------------------------------------------------------------ images

    def _layout(self, width: int, height: int) -> Layout:
        with self._opening:
            if self._handle is None:  # it could not be opened anew
                self._open()
            with self._tokenised(width, height, None) as chunks:
                return tuple(chunk.num_tokens if chunk.is_picture else chunk.tokens for chunk in chunks)

    def _encode(self, picture: Picture) -> Rows:
        """On the encoding's own thread, while it is granted time."""
        with self._opening:
            if self._opened_threads != self.num_threads:
                self._free()
            if self._handle is None:
                self._open()
        with self._tokenised(picture.width, picture.height, picture.rgb) as chunks:
            return np.concatenate([self._encode_chunk(chunk) for chunk in chunks if chunk.is_picture])

    def _encode_chunk(self, chunk: _Chunk) -> Rows:
        library = self._library
        with capture_log() as lines:
            code = library.mtmd_encode_chunk(self._handle, chunk.handle)
        if code != 0:
            raise StepFailedError(
                f"the projector {self.path.name} failed on a picture: {error_text(lines)}", native_code=code
            )
        pointer = library.mtmd_get_output_embd(self._handle)
        return np.ctypeslib.as_array(pointer, (chunk.num_tokens, self.n_embd)).copy()

    @contextmanager
    def _tokenised(self, width: int, height: int, rgb: bytes | None) -> Iterator[list[_Chunk]]:
        """The parts of an image, which are freed afterwards; without `rgb` only their sizes are true."""
        library = self._library
        pixels = None if rgb is None else ctypes.cast(ctypes.c_char_p(rgb), _BYTES_P)
        bitmap = library.mtmd_bitmap_init(width, height, pixels)
        chunks = library.mtmd_input_chunks_init()
        try:
            marker = library.mtmd_default_marker()
            text = library.mtmd_input_text(marker, len(marker), False, True)
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            with capture_log() as lines:
                code = library.mtmd_tokenize(self._handle, chunks, ctypes.byref(text), bitmaps, 1)
            if code != 0:
                raise InvalidRequestError(
                    f"the projector {self.path.name} cannot take a picture of {width} x {height} pixels: "
                    f"{error_text(lines)}",
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
        assert kind in {_TEXT, _IMAGE}, f"a chunk of type {kind} in a picture"
        size = library.mtmd_input_chunk_get_n_tokens(handle)
        if kind == _IMAGE:
            return _Chunk((), handle, size)
        count = ctypes.c_size_t()
        tokens = library.mtmd_input_chunk_get_tokens_text(handle, ctypes.byref(count))
        return _Chunk(tuple(tokens[: count.value]), handle, size)


def _threads_beside(num_threads: int) -> int:
    """Threads of an encode, where steps have so many: with as many again, both teams would wait for cores.

    GNU's OpenMP lets waiting threads sleep once there are more of them than cores, and each of the many short
    operations of a step then pays for waking them: steps took twice their time beside an idle encode.
    """
    return max(1, num_threads // 2)
