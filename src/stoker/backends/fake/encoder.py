"""An encoder without a model: deterministic, exact and quick, with the failures of `fake`.

A text's vector follows from its tokens and their order alone. The path "fake:encoder=1" asks for it; further
orders may follow ("fake:encoder=1,bad_tokens=7,step_delay_s=0.01", "pooling=rank").
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.fake.devices import NUM_LAYERS
from stoker.backends.fake.faults import FakeFaults
from stoker.backends.fake.history import FakeHistory, hidden_of
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.backends.protocol.backend import Capabilities
from stoker.backends.protocol.encoding import check_texts
from stoker.backends.protocol.extensions import Extensions
from stoker.errors import ModelFileError, ModelLoadError, StepFailedError
from stoker.ipc.model import ANYWHERE, ModelClass, Pooling
from stoker.models.memory_estimate.fit import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.protocol.backend import Rows
    from stoker.ipc.model import ModelSpec, PlacementSpec
    from stoker.models.memory_estimate.fit import Estimator

N_EMBD = 8
NUM_TEXTS = 16
N_CTX_TRAIN = 512
_MARK = "encoder=1"


class FakeEncoder:
    """See the module. One thread drives it, as any encoder.

    Attributes:
        calls: the number of texts of each call that succeeded.
    """

    def __init__(
        self,
        *,
        n_ctx: int = N_CTX_TRAIN,
        n_batch: int = 512,
        pooling: str = "mean",
        faults: FakeFaults,
        placement: PlacementSpec = ANYWHERE,
    ) -> None:
        self.pooling = pooling
        self.n_embd = N_EMBD
        self.num_threads = 1
        self.faults = faults
        self.calls: list[int] = []
        self.is_closed = False
        self._vocabulary = FakeVocabulary()
        self._capabilities = _capabilities(n_ctx, n_batch, faults.devices.label(placement))
        self._by_device = faults.devices.share(self.memory(), placement)
        faults.devices.take(self, self._by_device)

    def __repr__(self) -> str:
        return f"<FakeEncoder {self.pooling} {len(self.calls)} calls>"

    @property
    def capabilities(self) -> Capabilities:
        """An encoder that takes sixteen texts a call."""
        return self._capabilities

    @property
    def vocabulary(self) -> FakeVocabulary:
        """Bytes and four control tokens."""
        return self._vocabulary

    @property
    def extensions(self) -> Extensions:
        """A number of threads; memory of devices that are ordered."""
        return Extensions(threads=self, devices=self if self.faults.devices.names else None)

    def encode(self, texts: Sequence[Sequence[int]]) -> Rows:
        """Eight numbers in [-1, 1) a text, which follow from its tokens; the first alone for "rank"."""
        assert not self.is_closed, "a call after close"
        check_texts(texts, self._capabilities)
        for text in texts:
            self._meet_faults(text)
        if self.faults.step_delay_s:
            time.sleep(self.faults.step_delay_s)
        self.calls.append(len(texts))
        width = 1 if self.pooling == Pooling.RANK else N_EMBD
        return np.stack([vector_of(text)[:width] for text in texts])

    def memory(self) -> dict[str, int]:
        """As if: what was ordered for weights."""
        return _sizes(self.faults, self._capabilities.n_batch)

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What lies on each device that was there at the load; see `OnDevices`."""
        return self._by_device

    def set_threads(self, num_threads: int) -> None:
        """Remembered only."""
        self.num_threads = num_threads

    def close(self) -> None:
        """No call may follow."""
        self.is_closed = True
        self.faults.devices.release(self)

    def _meet_faults(self, text: Sequence[int]) -> None:
        if not self.faults.abort_tokens.isdisjoint(text):
            os.abort()
        if not self.faults.bad_tokens.isdisjoint(text):
            raise StepFailedError("a fault was ordered for a text")


def vector_of(tokens: Sequence[int]) -> Rows:
    """The vector of a text, float32 (8,)."""
    history = FakeHistory()
    history.append(tokens)
    return np.frombuffer(hidden_of(history.state).data, "<f4").astype(np.float32)


def asks_for_encoder(path: str) -> bool:
    """Whether a path is one of the fake encoder's."""
    scheme, _, order = path.partition(":")
    return scheme == "fake" and _MARK in order.split(",")


def load(spec: ModelSpec, on_progress: Callable[[float], None] | None = None) -> FakeEncoder:
    """The encoder that a path "fake:encoder=1" asks for.

    Raises:
        ModelFileError: it is no such path, or one of its orders is unknown.
        ModelLoadError: a load that fails was ordered.
    """
    pooling, faults = _orders(spec.path)
    begun, tell = time.monotonic(), on_progress or (lambda _: None)
    while (spent := time.monotonic() - begun) < faults.load_s:
        tell(spent / faults.load_s)
        time.sleep(min(0.02, faults.load_s))
    if faults.load_fails:
        raise ModelLoadError("a load that fails was ordered")
    tell(1.0)
    n_ctx = min(spec.n_ctx or N_CTX_TRAIN, N_CTX_TRAIN)
    return FakeEncoder(
        n_ctx=n_ctx, n_batch=spec.call_tokens, pooling=pooling, faults=faults, placement=spec.placement
    )


def estimator(path: str) -> Estimator:
    """What the encoder of that path would take; exact. Raises ModelFileError."""
    _, faults = _orders(path)

    def estimate(spec: ModelSpec) -> Estimate:
        n_ctx = min(spec.n_ctx or N_CTX_TRAIN, N_CTX_TRAIN)
        lines = _sizes(faults, spec.call_tokens)
        is_placed = spec.placement.gpu_layers != "auto"
        on_devices = faults.devices.share(lines, spec.placement) if is_placed else {}
        return Estimate(lines=lines, n_ctx=n_ctx, on_devices=on_devices, num_layers=NUM_LAYERS)

    return estimate


def _orders(path: str) -> tuple[str, FakeFaults]:
    """The pooling and the faults that a path asks for."""
    if not asks_for_encoder(path):
        raise ModelFileError(f"{path!r} is not of the form fake:encoder=1[,fault=value,...]")
    orders = [order for order in path.partition(":")[2].split(",") if order != _MARK]
    poolings = [order.partition("=")[2] for order in orders if order.startswith("pooling=")] or ["mean"]
    if poolings[0] not in tuple(Pooling):
        raise ModelFileError(f"the fake encoder pools by {', '.join(Pooling)}, not by {poolings[0]!r}")
    faults = ",".join(order for order in orders if not order.startswith("pooling="))
    return poolings[0], FakeFaults.parse(faults)


def _sizes(faults: FakeFaults, n_batch: int) -> dict[str, int]:
    return {"weights": faults.weights_mib * 2**20, "compute": 4 * n_batch * N_EMBD}


def _capabilities(n_ctx: int, n_batch: int, device: str) -> Capabilities:
    return Capabilities(
        model_class=ModelClass.ENCODER,
        architecture="fake",
        description="deterministic stand-in for an encoder",
        label=f"fake · {device}",
        n_vocab=N_VOCAB,
        n_ctx=n_ctx,
        n_ctx_train=N_CTX_TRAIN,
        num_cells=0,
        n_batch=n_batch,
        num_sequences=min(NUM_TEXTS, n_batch),
        num_params=0,
        size_bytes=0,
        kv_type="none",
        flash_attention="off",
        can_trim=False,
        can_fork=False,
        fingerprint=hashlib.blake2b(b"fake encoder", digest_size=16).hexdigest(),
    )
