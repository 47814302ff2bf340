"""GGUF files as models: described and estimated by their headers, loaded by the class that these say."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from stoker.backends.device import CPU
from stoker.ipc.model import ModelClass
from stoker.models.chat_templates import family_template
from stoker.models.fingerprint import fingerprint
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate.estimate import estimator
from stoker.models.placement import chosen_devices
from stoker.models.projector import pairing_of
from stoker.models.reader import ModelDescription
from stoker.models.shards import refuse_partial

if TYPE_CHECKING:
    from stoker.backends.device import Device
    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.ipc.model import ModelSpec
    from stoker.models.gguf.header import GgufHeader
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext


class GgufReader:
    """A model file; its header is read when it is first asked for, by whichever thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading = Lock()

    def __repr__(self) -> str:
        return f"<GgufReader {self._path}>"

    @cached_property
    def fingerprint(self) -> str:
        """Of the file and its shards, as they were when this was first asked. Raises ModelFileError."""
        refuse_partial(self._path)
        return fingerprint(self._path)

    @property
    def header(self) -> GgufHeader:
        """Its header. Raises ModelFileError, UnsupportedError."""
        with self._reading:  # several ask while an engine starts
            return self._header

    @cached_property
    def _header(self) -> GgufHeader:
        return read_header(self._path)

    def describe(self) -> ModelDescription:
        """What the header says."""
        header = self.header
        name = header.metadata.get("general.name")
        return ModelDescription(
            model_class=header.model_class,
            architecture=header.architecture,
            n_ctx_train=header.n_ctx_train,
            name=name if isinstance(name, str) else "",
            num_params=header.num_params,
            size_bytes=header.size_bytes,
            n_vocab=header.n_vocab,
            n_embd=header.embedding_length,
            quantisation=header.quantisation,
            chat_template=header.chat_template or _family_template(header),
            bos_text=header.bos_text,
            eos_text=header.eos_text,
            pooling=header.pooling,
            outputs=header.outputs,
            pairing=str(pairing_of(header, None).pairing),
            header=header,
        )

    def estimator(self) -> Estimator:
        """What the model takes, for any way to load it."""
        return estimator(self.header)

    def devices(self) -> tuple[Device, ...]:
        """The accelerators that the library can use, or the CPU."""
        from stoker.backends.llama.binding import devices  # noqa: PLC0415 - the client computes nothing

        return devices()

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """Those that its placement names, or the CPU. Raises InvalidRequestError for others."""
        return chosen_devices(spec.placement, self.devices()) or (CPU,)

    def load(self, spec: ModelSpec, context: LoadContext) -> Backend | Encoder:
        """Load it, after a smoke decode in a child process where none is remembered (SPEC R9, K1)."""
        match self.header.model_class:
            case ModelClass.ENCODER:
                from stoker.backends.llama.oneshot.encoder import load as load_encoder  # noqa: PLC0415

                return load_encoder(spec, context.on_progress, context.cache_dir, self.header)
            case ModelClass.ENCODER_DECODER:
                from stoker.backends.llama.seq2seq import load as load_seq2seq  # noqa: PLC0415

                return load_seq2seq(spec, context.on_progress, context.cache_dir, self.header)
        from stoker.backends.llama.backend import load  # noqa: PLC0415 - the client reads headers only

        return load(spec, context.on_progress, context.cache_dir, self.header)

    def try_out(self, spec: ModelSpec, context: LoadContext) -> None:
        """Have a child process load and run this very file."""
        from stoker.backends.llama.smoke.smoke import try_in_child  # noqa: PLC0415

        try_in_child(spec, self.header, context.on_progress, context.cache_dir)


def open_model(path: str) -> GgufReader:
    """The model of a file."""
    return GgufReader(Path(path))


def _family_template(header: GgufHeader) -> str | None:
    if header.model_class in {ModelClass.ENCODER, ModelClass.ENCODER_DECODER}:
        return None
    return family_template(header.architecture, header.eos_text)
