"""A device that costs nothing but time: every step takes the same, its rows are there before it.

What remains of a step is Stoker's own. The plan is checked and laid out as for llama.cpp, so that this is
part of what is measured; nothing is computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends import registry
from stoker.backends.device import Device, DeviceMemory
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.backends.llama.batch import NONE, TokenBatch, passes
from stoker.backends.protocol.backend import Candidates, Capabilities, Lengths
from stoker.backends.protocol.extensions import Extensions
from stoker.ipc.model import KVLayout, ModelClass
from stoker.models.memory_estimate.fit import Estimate
from stoker.models.reader import ModelDescription

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.backends.protocol.backend import BatchPlan, Buffer, Rows
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator
    from stoker.models.reader import LoadContext

SCHEME = "steady:"
N_BATCH = 2048
NUM_CANDIDATES = 64
_PLENTY = DeviceMemory(2**40, 2**40)


@dataclass(slots=True)
class Lap:
    """One step on the clock and on the thread's own: launched, asked for, and there."""

    num_tokens: int
    num_rows: int
    num_candidates: int = 0
    launched_s: float = 0.0
    launched_cpu_s: float = 0.0
    asked_s: float = 0.0
    asked_cpu_s: float = 0.0
    there_s: float = 0.0
    there_cpu_s: float = 0.0


@dataclass(slots=True, eq=False)
class _InFlight:
    device: SteadyDevice
    lap: Lap
    is_over: bool = False

    def rows(self) -> Rows:
        if not self.is_over:
            self.is_over = True
            self.lap.asked_s, self.lap.asked_cpu_s = time.perf_counter(), time.thread_time()
            while time.perf_counter() < self.lap.launched_s + self.device.step_s:
                time.sleep(0)  # as a driver waits: the core stays awake, the lock is free
            self.lap.there_s, self.lap.there_cpu_s = time.perf_counter(), time.thread_time()
        return self.device.logits[: self.lap.num_rows - self.lap.num_candidates]

    def candidates(self) -> Candidates:
        return self.device.best[: self.lap.num_candidates]


class _Letters(FakeVocabulary):
    """The fake's tokens; there are more rows of logits than those."""

    def special_piece(self, token: int) -> bytes:
        """Empty for a row that no token has."""
        return super().special_piece(token) if token < N_VOCAB else b""


class SteadyDevice:
    """See the module.

    Args:
        token_bytes: of a token's state; with 0 states cannot be had, and sequences lie in one pool.

    Attributes:
        laps: of every step so far.
        logits: float32 (num_sequences, n_vocab); each row has one clear maximum, a letter.
        best: the largest of each row.
    """

    def __init__(self, spec: ModelSpec, n_vocab: int, step_s: float, token_bytes: int = 0) -> None:
        self.step_s, self._token_bytes = step_s, token_bytes
        self.laps: list[Lap] = []
        num_sequences, n_batch = max(2 * spec.num_slots, spec.num_slots + 8), spec.n_batch or N_BATCH
        self.logits = np.zeros((num_sequences, n_vocab), np.float32)
        self.logits[range(num_sequences), [ord("a") + at % 26 for at in range(num_sequences)]] = 9.0
        ids = np.tile(np.arange(NUM_CANDIDATES, dtype=np.int32) + ord("a"), (num_sequences, 1))
        self.best = Candidates(ids, np.sort(np.random.default_rng(1).random(ids.shape, np.float32))[:, ::-1])
        self.vocabulary = _Letters()
        self.capabilities = Capabilities(
            model_class=ModelClass.DECODER,
            architecture="steady",
            description="a device that computes nothing",
            label="steady",
            n_vocab=n_vocab,
            n_ctx=spec.most_tokens,
            n_ctx_train=spec.most_tokens,
            num_cells=spec.pool_cells,
            n_batch=n_batch,
            num_sequences=num_sequences,
            num_params=0,
            size_bytes=0,
            kv_type="none",
            flash_attention="off",
            can_trim=True,
            can_fork=True,
            is_async=True,
            kv_layout=KVLayout.STREAMS if token_bytes else KVLayout.POOL,
        )
        self._lengths = Lengths(num_sequences, n_vocab, n_batch)
        self._batch = TokenBatch(n_batch)

    def __repr__(self) -> str:
        return f"<SteadyDevice {len(self.laps)} steps of {self.step_s * 1e3:g} ms>"

    @property
    def extensions(self) -> Extensions:
        """It gives candidates, and states if these take bytes."""
        return Extensions(draws=self, states=self if self._token_bytes else None)

    @property
    def num_candidates(self) -> int:
        """Candidates of a row."""
        return NUM_CANDIDATES

    def launch(self, plan: BatchPlan) -> _InFlight:
        """What comes before a native call."""
        num_candidates = sum([item.num_logits for item in plan.items if item.takes_candidates])
        lap = Lap(plan.num_tokens, plan.num_rows, num_candidates)
        self._lengths.check(plan)
        self._batch.fill(passes(plan, {}, NONE, range(len(plan.items)))[0].plan)
        self._lengths.advance(plan)
        self.laps.append(lap)
        lap.launched_s, lap.launched_cpu_s = time.perf_counter(), time.thread_time()
        return _InFlight(self, lap)

    def fork(self, src: int, dst: int, length: int) -> None:  # noqa: ARG002 - nothing is copied
        """Count only."""
        self._lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Count only."""
        self._lengths[seq] = length

    def drop(self, seq: int) -> None:
        """Count only."""
        self._lengths[seq] = 0

    def export_state(self, seq: int) -> bytes:
        """Zeros."""
        return bytes(self._lengths[seq] * self._token_bytes)

    def import_state(self, seq: int, data: Buffer) -> None:
        """Count only."""
        self._lengths[seq] = memoryview(data).nbytes // self._token_bytes

    def length(self, seq: int) -> int:
        """Tokens the sequence would hold."""
        return self._lengths[seq]

    def memory(self) -> dict[str, int]:
        """Its states."""
        return {"weights": 0, "kv": self._token_bytes * self.capabilities.num_cells, "compute": 0}

    def close(self) -> None:
        """Nothing is held."""


class SteadyReader:
    """The model "steady:VOCABULARY,STEP_MS" or "...,TOKEN_BYTES"; `made` is the one loaded last."""

    fingerprint = ""
    made: SteadyDevice

    def __init__(self, path: str) -> None:
        n_vocab, step_ms, *token_bytes = path.removeprefix(SCHEME).split(",")
        self._n_vocab, self._step_s = int(n_vocab), float(step_ms) / 1e3
        self._token_bytes = int(token_bytes[0]) if token_bytes else 0

    def describe(self) -> ModelDescription:
        """A decoder."""
        return ModelDescription(
            model_class=ModelClass.DECODER, architecture="steady", n_ctx_train=2**20, n_vocab=self._n_vocab
        )

    def estimator(self) -> Estimator:
        """Nothing."""
        return lambda spec: Estimate(lines={"weights": 0, "kv": 0, "compute": 0}, n_ctx=spec.pool_cells)

    def devices(self) -> tuple[Device, ...]:
        """An accelerator."""
        return (Device("steady", "Steady", "steady", lock="steady", read=lambda: _PLENTY),)

    def devices_for(self, spec: ModelSpec) -> tuple[Device, ...]:  # noqa: ARG002 - there is one
        """The same."""
        return self.devices()

    def load(self, spec: ModelSpec, context: LoadContext) -> SteadyDevice:
        """Make it."""
        context.on_progress(1.0)
        type(self).made = SteadyDevice(spec, self._n_vocab, self._step_s, self._token_bytes)
        return self.made

    def try_out(self, context: LoadContext) -> None:
        """It has no native code."""


open_model: Callable[[str], SteadyReader] = SteadyReader


def register() -> None:
    """Let "steady:" name such models in this process."""
    registry.BACKENDS = (registry.BackendEntry("steady", __name__, scheme=SCHEME), *registry.BACKENDS)
