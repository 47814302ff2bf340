"""Models of the fake backend: "fake:" and orders, such as "fake:id=small,eog_period=0"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.device import CPU
from stoker.backends.fake.devices import FakeDevices
from stoker.backends.fake.script import FakeScript
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.ipc.model import ModelClass
from stoker.models.placement import chosen_devices
from stoker.models.reader import ModelDescription

if TYPE_CHECKING:
    from stoker.backends.device import Device
    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext

_CONTEXT = 4096


class FakeReader:
    """What a path orders; there is no file."""

    fingerprint = ""

    def __init__(self, path: str) -> None:
        self._path = path
        self._orders = dict(order.partition("=")[::2] for order in path.partition(":")[2].split(","))
        self._is_encoder = self._orders.get("encoder") == "1"

    def __repr__(self) -> str:
        return f"<FakeReader {self._path}>"

    def describe(self) -> ModelDescription:
        """A decoder, or an encoder; `id=NAME` among the orders names it. It takes any context.

        Raises ModelFileError for a script that cannot be read.
        """
        script = self._orders.get("script")
        vocabulary = FakeVocabulary(FakeScript.read(script).chat_template) if script else FakeVocabulary()
        return ModelDescription(
            model_class=ModelClass.ENCODER if self._is_encoder else ModelClass.DECODER,
            architecture="fake",
            n_ctx_train=_CONTEXT,
            id=self._orders.get("id", "fake"),
            has_fixed_context=False,
            n_vocab=N_VOCAB,
            chat_template=vocabulary.chat_template,
            bos_text=vocabulary.bos_text,
            eos_text=vocabulary.eos_text,
        )

    def estimator(self) -> Estimator:
        """What it would take; exact. Raises ModelFileError for an order that is not known."""
        from stoker.backends.fake import backend, encoder  # noqa: PLC0415 - the client computes nothing

        return encoder.estimator(self._path) if self._is_encoder else backend.estimator(self._path)

    def devices(self) -> tuple[Device, ...]:
        """The CPU, or the accelerators that are ordered; see `devices`. Raises ModelFileError."""
        return FakeDevices.parse(self._orders).devices()

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:
        """Those that its placement names, or the CPU. Raises InvalidRequestError for others."""
        return chosen_devices(spec.placement, self.devices()) or (CPU,)

    def load(self, spec: ModelSpec, context: LoadContext) -> Backend | Encoder:
        """Load it. Raises ModelFileError, ModelLoadError as ordered."""
        from stoker.backends.fake import backend, encoder  # noqa: PLC0415 - the client computes nothing

        if self._is_encoder:
            return encoder.load(spec, context.on_progress)
        return backend.load(spec, context.on_progress)

    def try_out(self, spec: ModelSpec, context: LoadContext) -> None:
        """It has no native code; its load alone does what was ordered."""


def open_model(path: str) -> FakeReader:
    """The model that a path orders; unknown orders are refused when it is sized or loaded."""
    return FakeReader(path)
