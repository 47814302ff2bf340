"""Loads a folder as a backend."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from stoker.backends.mlx import native
from stoker.backends.mlx.backend import MlxBackend
from stoker.backends.mlx.caches import kinds
from stoker.backends.mlx.network import Network, open_network
from stoker.backends.mlx.text.vocabulary import FolderVocabulary
from stoker.backends.mlx.vision.vision import open_vision
from stoker.backends.protocol.backend import Capabilities
from stoker.backends.threads import num_physical_cores
from stoker.errors import UnsupportedError
from stoker.ipc.model import FlashAttention, KVLayout
from stoker.models.memory_estimate.estimate import num_sequences
from stoker.models.reader import LoadContext

if TYPE_CHECKING:
    from stoker.ipc.model import ModelSpec
    from stoker.models.folders.folder import ModelFolder

DEVICE_BATCH = 2048
"""Tokens of a step on an accelerator where nothing was asked for: it waits for the host once a step."""
_DEFAULT_CELLS = 16384
_LIBRARIES = ("mlx", "mlx-lm")


def load_backend(folder: ModelFolder, spec: ModelSpec, context: LoadContext) -> MlxBackend:
    """Load a folder's model.

    Args:
        folder: sound.
        spec: how; `path` is the folder's.
        context: where progress is told.

    Raises:
        ModelLoadError: mlx-lm does not know the architecture, or the weights do not fit it.
        UnsupportedError: it is asked for what this backend does not do.
        InsufficientMemoryError: there is too little memory.
    """
    _refuse(spec)
    native.enter_thread()
    native.limit_memory()
    num_threads = spec.num_threads or num_physical_cores()
    if native.BLAS is not None:
        native.BLAS.set_threads(num_threads)
    network = open_network(folder, spec.kv_type, spec.adapters, context.on_progress)
    try:
        vocabulary = FolderVocabulary(folder)
        vision, sight = open_vision(folder, vocabulary)
        found = _capabilities(folder, spec, network)
        seeing = replace(
            found,
            has_vision=vision is not None,
            pairing=str(sight.pairing),
            pairing_reason=sight.reason,
        )
        return MlxBackend(network, vocabulary, seeing, num_threads, vision)
    except BaseException:
        network.close()
        raise


def _refuse(spec: ModelSpec) -> None:
    """Raise UnsupportedError for what is asked of a model that MLX does not do here."""
    place = spec.placement
    asked = {
        "images (a projector)": spec.projector is not None,
        "a draft model": bool(spec.draft_path),
        "streams of cells": spec.kv_layout is KVLayout.STREAMS,
        "flash_attention off": spec.flash_attention is FlashAttention.OFF,
        "layers on several devices": isinstance(place.gpu_layers, int) or bool(place.tensor_split),
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise UnsupportedError(f"{spec.id}: models of MLX have no {', no '.join(refused)}")


def _capabilities(folder: ModelFolder, spec: ModelSpec, network: Network) -> Capabilities:
    caches = network.new_caches()
    n_ctx_train, is_on_device = folder.settings.context_length, native.is_on_device()
    num_cells = spec.pool_cells or n_ctx_train or _DEFAULT_CELLS
    asked = spec.n_ctx if spec.num_cells else 0
    can_go_back = kinds.keeps_every_token(caches)
    return Capabilities(
        model_class=kinds.model_class(caches),
        architecture=folder.architecture,
        description=f"{folder.path.name} {folder.quantisation_label}",
        label=native.label(),
        n_vocab=network.n_vocab,
        n_ctx=min(filter(None, (num_cells, n_ctx_train, asked))),
        n_ctx_train=n_ctx_train or num_cells,
        num_cells=num_cells,
        n_batch=spec.n_batch or (DEVICE_BATCH if is_on_device else spec.call_tokens),
        num_sequences=num_sequences(spec.num_slots),
        num_params=network.num_params,
        size_bytes=network.weight_bytes,
        kv_type=network.kv_type,
        flash_attention="on" if is_on_device else "off",
        can_trim=can_go_back,
        can_fork=can_go_back,
        computes_on_cpu=not is_on_device,
        is_async=is_on_device,
        fingerprint=_fingerprint(spec.content or folder.fingerprint, network),
        state_layout=network.layout,
        adapters=tuple(network.adapted.fingerprints.items()),
    )


def _fingerprint(files: str, network: Network) -> str:
    """Differs wherever an exported state would not fit."""
    parts = (files, network.kv_type, network.n_vocab, *map(_version, _LIBRARIES))
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
