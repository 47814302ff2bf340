"""The weights: loading a model file, what it says of itself, and freeing it.

Sequences and steps are `context`'s, text is `vocabulary`'s.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.backends.llama.binding import (
    accelerators,
    buffer_bytes,
    capture_log,
    llama,
    start,
)
from stoker.backends.llama.placement import NativePlacement
from stoker.backends.llama.shortage import load_error
from stoker.backends.llama.text.vocabulary import LlamaVocabulary
from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import ANYWHERE, PlacementSpec
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.shares import device_of_tied, read_parts
from stoker.models.placement import chosen_devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stoker.models.gguf.header import GgufHeader

_TEXT_BYTES = 4096
_GRID_ROPE_TYPES = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to load.

    Attributes:
        path: the GGUF file.
        use_extra_bufts: let the CPU repack weights for its special instructions; see `smoke`.
        offloads: use accelerators, as far as there are any and the placement names them.
        placement: where it lies; devices that are not there are left out.
        header: of the file, where it was read already.
        token_s: what a token takes so, as a trial has measured it; 0: it was not measured.
        repeatable_cost: how much longer a step over bf16 keys takes, as a fraction; None: not measured.
        half_tile: see `RowTiles.of`.
        on_progress: told the fraction loaded, 0 to 1, on the loading thread; what it raises ends the load.
    """

    path: Path
    use_extra_bufts: bool = True
    offloads: bool = True
    placement: PlacementSpec = ANYWHERE
    header: GgufHeader | None = None
    token_s: float = 0.0
    repeatable_cost: float | None = None
    half_tile: float = 0.0
    on_progress: Callable[[float], None] | None = None


class _Progress:
    """The native progress callback: carries an exception out of the native frames."""

    def __init__(self, on_progress: Callable[[float], None] | None) -> None:
        self._on_progress = on_progress
        self.error: BaseException | None = None
        self.native = llama.llama_progress_callback(self._report)

    def _report(self, fraction: float, _user_data: object) -> bool:
        if self._on_progress is not None:
            try:
                self._on_progress(min(1.0, max(0.0, fraction)))
            except BaseException as error:  # noqa: BLE001 - raised again once native code has returned
                self.error = error
                return False
        return True


class LlamaModel:
    """A model file, loaded. Close it after every context of it.

    Raises:
        ModelFileError: there is no such file.
        InsufficientMemoryError: there is too little memory for it.
        ModelLoadError: llama.cpp refused it; the message carries its own reason.
        UnsupportedError: it is no model that generates step by step.
    """

    def __init__(self, options: ModelOptions) -> None:
        self.path = options.path
        self.uses_extra_bufts = options.use_extra_bufts
        self.devices = chosen_devices(options.placement, accelerators()) if options.offloads else ()
        self.placement = options.placement
        self.token_s = options.token_s
        self.repeatable_cost = options.repeatable_cost
        self.half_tile = options.half_tile
        if not self.path.is_file():
            raise ModelFileError(f"there is no model file {self.path}", path=str(self.path))
        self.handle: int | None = self._load(options)
        try:
            self._refuse_foreign_kinds()
            self.vocabulary = LlamaVocabulary(self.handle)
        except BaseException:
            llama.llama_model_free(self.handle)
            raise
        self.description = self._text(llama.llama_model_desc)
        self.n_embd: int = llama.llama_model_n_embd(self.handle)
        self.n_embd_inp: int = llama.llama_model_n_embd_inp(self.handle)
        self.n_ctx_train: int = llama.llama_model_n_ctx_train(self.handle)
        self.num_layers: int = llama.llama_model_n_layer(self.handle)
        self.num_params: int = llama.llama_model_n_params(self.handle)
        self.size_bytes: int = llama.llama_model_size(self.handle)
        self.is_recurrent: bool = llama.llama_model_is_recurrent(self.handle)
        self.is_hybrid: bool = llama.llama_model_is_hybrid(self.handle)

    def __repr__(self) -> str:
        return f"<LlamaModel {self.path.name} {'open' if self.handle else 'closed'}>"

    @property
    def keeps_every_cell(self) -> bool:
        """Whether any prefix of a sequence can be had back: no recurrent state, no sliding window."""
        return not (self.is_recurrent or self.is_hybrid or llama.llama_model_n_swa(self.handle) > 0)

    @property
    def has_grids(self) -> bool:
        """Whether an image's tokens have positions in more than one dimension (M-RoPE)."""
        return llama.llama_model_rope_type(self.handle) in _GRID_ROPE_TYPES

    @property
    def has_encoder(self) -> bool:
        """Whether it is an encoder-decoder: its decoder steps only once its encoder has read a source."""
        return bool(llama.llama_model_has_encoder(self.handle))

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers that differ between models: vocabulary, width, layers, parameters, bytes."""
        return (
            self.vocabulary.n_vocab,
            self.n_embd,
            self.num_layers,
            self.num_params,
            self.size_bytes,
        )

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None if it is not there."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        size = llama.llama_model_meta_val_str(self.handle, key.encode(), buffer, _TEXT_BYTES)
        return None if size < 0 else buffer.value.decode(errors="replace")

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """Bytes of weights on each accelerator that is computed on, by their ids; see `OnDevices`."""
        return {
            each.id: dict(self._buffers.get(each.id, {})) for each in self.devices if not each.is_integrated
        }

    def close(self) -> None:
        """Free the weights; idempotent."""
        if self.handle is not None:
            self.vocabulary.close()
            llama.llama_model_free(self.handle)
            self.handle = None

    def _load(self, options: ModelOptions) -> int:
        start()
        progress = _Progress(options.on_progress)
        params = llama.llama_model_default_params()
        # beside devices it is not said tensor by tensor what the CPU may lay out anew
        keeps_all = options.placement.streams_experts and bool(self.devices)
        params.use_extra_bufts = options.use_extra_bufts and not keeps_all
        place = NativePlacement(options.placement, self.devices, self._device_of_tied(options))
        place.apply(params)
        params.progress_callback = progress.native
        with capture_log() as lines:
            handle = llama.llama_model_load_from_file(str(options.path).encode(), params)
        if progress.error is not None:
            if handle is not None:
                llama.llama_model_free(handle)
            raise progress.error
        self._buffers = buffer_bytes(lines, self.devices)
        if handle is None:
            raise load_error(options.path.name, lines, self.devices, path=str(options.path))
        return int(handle)

    def _device_of_tied(self, options: ModelOptions) -> str:
        """Id of the device that has tied embeddings too, of every load of the file alike; empty: none has."""
        if not self.devices:
            return ""
        return device_of_tied(read_parts(options.header or read_header(self.path)), options.placement)

    def _refuse_foreign_kinds(self) -> None:
        if llama.llama_model_has_encoder(self.handle) and not llama.llama_model_has_decoder(self.handle):
            raise UnsupportedError(f"{self.path.name} is an encoder of a kind that is not served")
        if llama.llama_model_is_diffusion(self.handle):
            raise UnsupportedError(f"{self.path.name} is a diffusion model: only decoders are served")

    def _text(self, function: Callable[..., int]) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        function(self.handle, buffer, _TEXT_BYTES)
        return buffer.value.decode(errors="replace")
