"""Folders as models of MLX: described and estimated by their headers, loaded by mlx-lm's classes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.device import CPU
from stoker.backends.mlx.architectures import check_known
from stoker.backends.mlx.estimate import estimator
from stoker.backends.mlx.vision.families import sight_of
from stoker.ipc.model import ModelClass
from stoker.models.chat_templates import family_template
from stoker.models.folders.classes import class_of
from stoker.models.folders.folder import ModelFolder
from stoker.models.folders.layers import read_layers
from stoker.models.placement import chosen_devices
from stoker.models.reader import ModelDescription

if TYPE_CHECKING:
    from stoker.backends.device import Device
    from stoker.backends.protocol.backend import Backend
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext


class FolderReader:
    """A model's folder; it is read when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<FolderReader {self._path}>"

    @cached_property
    def folder(self) -> ModelFolder:
        """The folder, known to be whole. Raises ModelFileError."""
        return ModelFolder.open(self._path)

    @property
    def fingerprint(self) -> str:
        """Of config, tokenizer and weights, as they were when this was first asked. Raises ModelFileError."""
        return self.folder.fingerprint

    def describe(self) -> ModelDescription:
        """What its files say; recurrent models say no context, which then is 0.

        Raises UnsupportedError where mlx-lm is installed and has no such model.
        """
        folder, settings = self.folder, self.folder.settings
        model_class = class_of(folder.architecture, file=str(folder.path))
        check_known(folder)
        read_layers(folder)
        texts, sight = folder.texts, sight_of(folder)
        return ModelDescription(
            model_class=model_class,
            architecture=folder.architecture,
            name=folder.path.name,
            n_ctx_train=settings.context_length,
            has_fixed_context=bool(settings.context_length) and model_class is not ModelClass.RECURRENT,
            num_params=folder.num_params,
            size_bytes=folder.size_bytes,
            n_vocab=settings.n_vocab,
            n_embd=settings.width,
            quantisation=folder.quantisation_label,
            chat_template=folder.chat_template or family_template(folder.architecture, texts.eos_text),
            bos_text=texts.bos_text,
            eos_text=texts.eos_text,
            pairing=str(sight.pairing),
            pairing_reason=sight.reason,
        )

    def estimator(self) -> Estimator:
        """What the model takes, for any way to load it."""
        return estimator(self.folder)

    def devices(self) -> tuple[Device, ...]:
        """The one that MLX computes on here, or the CPU where MLX is not installed."""
        try:
            from stoker.backends.mlx.native import device  # noqa: PLC0415 - the client computes nothing
        except ModuleNotFoundError:
            return (CPU,)
        return (device(),)

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """The same, or the CPU where its placement says so. Raises InvalidRequestError for others."""
        return chosen_devices(spec.placement, self.devices()) or (CPU,)

    def load(self, spec: ModelSpec, context: LoadContext) -> Backend:
        """Load it."""
        from stoker.backends.mlx.model import load_backend  # noqa: PLC0415 - the client reads headers only

        self.describe()
        return load_backend(self.folder, spec, context)

    def try_out(self, spec: ModelSpec, context: LoadContext) -> None:
        """What ended an engine `backends.trial` finds, which tries a suspect in a child before its load."""


def open_model(path: str) -> FolderReader:
    """The model of a folder."""
    return FolderReader(Path(path))
