"""Folders of MNN's language models: described and estimated by their files, loaded by MNN's own engine."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.backends.device import CPU
from stoker.backends.mnn.estimate import estimate
from stoker.backends.mnn.folder import MnnFolder
from stoker.ipc.model import ModelClass
from stoker.models.chat_templates import family_template
from stoker.models.placement import chosen_devices
from stoker.models.reader import ModelDescription

if TYPE_CHECKING:
    from stoker.backends.device import Device
    from stoker.backends.mnn.backend import MnnBackend
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext


class MnnReader:
    """A folder; its files are read when they are first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<MnnReader {self._path}>"

    @cached_property
    def folder(self) -> MnnFolder:
        """What it holds. Raises ModelFileError, UnsupportedError."""
        return MnnFolder.open(self._path)

    @property
    def fingerprint(self) -> str:
        """Of all of its files, as they were when this was first asked. Raises ModelFileError."""
        return self.folder.fingerprint

    def describe(self) -> ModelDescription:
        """What the files say; a model that sees is served as one that reads.

        Few say for how many tokens it was trained: then that is 0, and what is asked for counts.
        """
        folder = self.folder
        return ModelDescription(
            model_class=ModelClass.DECODER,
            architecture=folder.architecture,
            max_slots=1,
            n_ctx_train=folder.context_length,
            name=folder.path.name,
            has_fixed_context=bool(folder.context_length),
            size_bytes=folder.size_bytes,
            n_vocab=folder.n_vocab,
            n_embd=folder.width,
            quantisation=folder.quantisation,
            chat_template=folder.chat_template or family_template(folder.architecture, folder.eos_text),
            bos_text=folder.bos_text,
            eos_text=folder.eos_text,
            pairing=str(folder.pairing),
            pairing_reason=folder.pairing_reason,
            gives_states=False,
        )

    def estimator(self) -> Estimator:
        """What the model takes, by the sizes of its files."""
        folder = self.folder
        return lambda spec: estimate(folder, spec)

    def devices(self) -> tuple[Device, ...]:
        """The CPU: the packages of MNN compute on nothing else."""
        return (CPU,)

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """The same. Raises InvalidRequestError where others are named."""
        return chosen_devices(spec.placement, ()) or (CPU,)

    def load(self, spec: ModelSpec, context: LoadContext) -> MnnBackend:
        """Load it, after a trial in a child process where none is remembered.

        Raises:
            ModelFileError, UnsupportedError: as `describe`; it is asked for what MNN's binding does not do.
            ModelLoadError: MNN refuses it, crashes on it, or takes too long.
        """
        from stoker.backends.mnn import backend, trial  # noqa: PLC0415 - the client computes nothing

        folder = self.folder
        backend.refuse_unsupported(spec)
        context.on_progress(0.0)
        if context.cache_dir is not None:  # else nothing is remembered: whoever loads it is a trial itself
            found = trial.tried(folder, spec, context.cache_dir, lambda: context.on_progress(0.0))
            spec = replace(spec, n_batch=found.step_tokens(spec.call_tokens))
        loaded = backend.load(folder, spec)
        try:
            context.on_progress(1.0)
        except BaseException:
            loaded.close()
            raise
        return loaded

    def try_out(self, spec: ModelSpec, context: LoadContext) -> None:
        """Have a child process load and run this very folder, whatever is remembered."""
        from stoker.backends.mnn import trial  # noqa: PLC0415 - as above

        trial.in_child(self.folder, spec.num_threads, lambda: context.on_progress(0.0))


def open_model(path: str) -> MnnReader:
    """The model of a folder."""
    return MnnReader(Path(path))
