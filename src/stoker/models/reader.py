"""A model before it is loaded: what its file says, and how its backend estimates and loads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stoker.backends.device import Device
    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.ipc.model import ModelClass, ModelSpec
    from stoker.models.gguf.header import GgufHeader
    from stoker.models.memory_estimate.fit import Estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a file says of its model, whatever its format; empty where the format does not say.

    Attributes:
        id: the name it is served under; empty: that of its file.
        name: for people.
        n_ctx_train: tokens of context it was trained for.
        has_fixed_context: whether it takes no longer context than that.
        quantisation: label such as Q4_K_M.
        chat_template: its file's, or its family's.
        outputs: labels of a reranker's classifier in their order, empty where unnamed.
        max_slots: sequences that its backend computes side by side at the most; 0: as many as are asked for.
        pairing, pairing_reason: how it stands with a projector (SPEC V1), as in `ModelInfo`.
        gives_states: as in `ModelInfo`.
        header: the header of a GGUF file, which adapters and projectors are matched with.
    """

    model_class: ModelClass
    architecture: str
    n_ctx_train: int
    id: str = ""
    name: str = ""
    has_fixed_context: bool = True
    num_params: int = 0
    size_bytes: int = 0
    n_vocab: int = 0
    n_embd: int = 0
    quantisation: str = ""
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
    pooling: str = ""
    outputs: tuple[str, ...] = ()
    max_slots: int = 0
    pairing: str = ""
    pairing_reason: str = ""
    gives_states: bool = True
    header: GgufHeader | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a load is given beside its spec.

    Attributes:
        on_progress: called with the fraction of the weights loaded; what it raises ends the load.
        cache_dir: where a backend remembers what it found out about this machine.
    """

    on_progress: Callable[[float], None]
    cache_dir: Path | None = None


class ModelReader(Protocol):
    """One model of one backend, not loaded; making and describing one loads no native code."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; another file under the same path has another one. Empty: nothing to tell apart.

        Raises:
            ModelFileError: there is no such file, or it is not complete.
        """
        ...

    def describe(self) -> ModelDescription:
        """What the file says.

        Raises:
            ModelFileError: the file is missing, truncated, corrupt or foreign.
            UnsupportedError: it holds no model that is served.
        """
        ...

    def estimator(self) -> Estimator:
        """What the model takes, for any way to load it. Raises as `describe`."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """What its backend could compute on here, accelerators first; may load native code."""
        ...

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """What the model computes on where it is loaded as `spec` says, some of `devices()`."""
        ...

    def load(self, spec: ModelSpec, context: LoadContext) -> Backend | Encoder:
        """Load it.

        Raises:
            ModelFileError: the file is missing, truncated, corrupt or foreign.
            UnsupportedError: it is asked for what the backend does not do.
            ModelLoadError: the native code refuses it, or crashes on it.
        """
        ...

    def try_out(self, spec: ModelSpec, context: LoadContext) -> None:
        """Find out, without risk for this process, whether it loads: an engine has ended over it.

        Raises:
            ModelLoadError: it does not.
        """
        ...
