"""A backend without a model: deterministic, exact and quick, with failures on order.

It ships, so that everything above a backend can be tried and tested where no model is. The logits of a
position are a function of the whole token history of its sequence, hence any lost, doubled or reordered
token changes all that follows. Cells are accounted exactly, shared ones once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import struct
import threading
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.cell_map import CellMap
from stoker.backends.fake.devices import NUM_LAYERS
from stoker.backends.fake.faults import FakeFaults
from stoker.backends.fake.history import (
    GOLDEN,
    MIX_1,
    MIX_2,
    STATE_LAYOUT,
    FakeHistory,
    hidden_of,
    salt_of,
    state_of,
    tensors_of,
    unpacked,
)
from stoker.backends.fake.scoring import FakeScoring
from stoker.backends.fake.script import FakeScript
from stoker.backends.fake.vision import RATE_HZ, FakeVision, seen_tokens
from stoker.backends.fake.vocabulary import CHATML, EOS, N_VOCAB, NUM_BYTES, FakeVocabulary
from stoker.backends.protocol.backend import (
    PLAIN,
    BatchPlan,
    Candidates,
    Capabilities,
    Computed,
    Conditioning,
    Lengths,
    PlanItem,
)
from stoker.backends.protocol.extensions import Extensions
from stoker.backends.protocol.scoring import ScoringLane
from stoker.errors import (
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    StepAbortedError,
    StepFailedError,
    StepMemoryError,
    UnsupportedError,
)
from stoker.ipc.model import ANYWHERE, ModelClass
from stoker.ipc.request import Picture, Sound
from stoker.models.memory_estimate.fit import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.protocol.backend import Buffer, InFlight, Placed, Rows
    from stoker.backends.protocol.extensions import Drafter
    from stoker.ipc.model import AdapterSpec, ModelSpec, PlacementSpec
    from stoker.ipc.usage import Tensor
    from stoker.models.memory_estimate.fit import Estimator

_MAGIC = b"STKF"
_HEADER = struct.Struct("<4sII")
_NUM_CELLS = 16384
_CERTAIN = 1000.0
"""The logit of a token beside which no other is drawn."""
MOVED_TOKENS = 16
"""Tokens that are moved at a time: few, so that tests see stretches cut."""


def _bias() -> Rows:
    """Favour what reads as text, so that greedy output is printable and control tokens are rare."""
    bias = np.zeros(N_VOCAB, np.float32)
    bias[ord("a") : ord("z") + 1] = 5.0
    bias[[ord(" "), ord("."), ord(",")]] = 5.0
    bias[NUM_BYTES:] = -20.0
    return bias


class _FakeInFlight:
    """A step that is over some time after its launch; its rows turn to NaN at the next one."""

    def __init__(self, compute: Callable[[], Computed], takes_s: float) -> None:
        self._compute = compute
        self._over_s = time.monotonic() + takes_s
        self._found: Computed | None = None
        self.is_collected = False

    def rows(self) -> Rows:
        if not self.is_collected:
            self.is_collected = True
            time.sleep(max(0.0, self._over_s - time.monotonic()))
            found = self._compute()
            self._found = Computed(found.found.copy(), found.best)
        return self._collected().rows()

    def candidates(self) -> Candidates:
        return self._collected().candidates()

    def _collected(self) -> Computed:
        assert self._found is not None, "the rows of a step that failed, or that was not waited for"
        return self._found

    def expire(self) -> None:
        if self._found is not None:
            self._found.found.fill(np.nan)
            self._found.best.logits.fill(np.nan)


class _FakeDraws:
    """The largest logits of rows; see `Draws`."""

    num_candidates = 64

    def best_of(self, rows: Rows) -> Candidates:
        """The largest of each row; equal ones by higher id first, as a device may order them."""
        backwards = np.argsort(-rows[:, ::-1], axis=1, kind="stable")[:, : self.num_candidates]
        ids = (rows.shape[1] - 1 - backwards).astype(np.int32)
        logits = np.take_along_axis(rows, ids, axis=1)
        logits[np.isnan(rows).any(axis=1), 0] = np.nan
        return Candidates(ids, logits)


class _FakeAbort(threading.Event):
    """Ends steps, which have changed nothing then; see `StepAbort`."""

    abort_step, allow_steps = threading.Event.set, threading.Event.clear


class FakeBackend:
    """See the module. One thread drives it, as any backend.

    Args:
        num_sequences: sequences that may exist at once.
        num_cells: tokens all of them may hold, shared ones counted once.
        n_ctx: tokens one of them may hold; None: `num_cells`.
        n_batch: tokens one step may carry.
        faults: failures to order.
        adapters: what its sequences may be adapted by: names and paths are enough.
        placement: which of the ordered devices it lies on.
    """

    def __init__(  # noqa: PLR0913 - a stand-in with a knob for each limit
        self,
        *,
        num_sequences: int = 16,
        num_cells: int = 16384,
        n_ctx: int | None = None,
        n_batch: int = 512,
        faults: FakeFaults | None = None,
        adapters: Sequence[AdapterSpec] = (),
        placement: PlacementSpec = ANYWHERE,
    ) -> None:
        self.faults = faults or FakeFaults()
        self.num_threads = 1
        self.num_steps = 0
        self._script = FakeScript.read(self.faults.script) if self.faults.script else None
        template = self._script.chat_template if self._script else CHATML
        self._vocabulary = FakeVocabulary(template, self.faults.shift)
        found = _capabilities(num_sequences, num_cells, n_ctx or num_cells, n_batch, self.faults, placement)
        fingerprints = tuple((spec.name, _digest(spec.path)) for spec in adapters)
        self._capabilities = dataclasses.replace(found, adapters=fingerprints)
        self._lengths = Lengths(num_sequences, N_VOCAB, n_batch)
        self._cells = CellMap(num_cells)
        self._histories = [FakeHistory() for _ in range(num_sequences)]
        self._rows = np.empty((n_batch, N_VOCAB), np.float32)
        self._bias = _bias()
        self._vision = _projector(self.faults)
        self._conditionings: dict[int, Conditioning] = {}
        self._drafter: Drafter | None = None
        self._draws = _FakeDraws() if self.faults.draws else None
        self._in_flight: _FakeInFlight | None = None
        self._abort = _FakeAbort() if self.faults.aborts else None
        self._is_closed = False
        self._by_device = self.faults.devices.share(self.memory(), placement)
        self.faults.devices.take(self, self._by_device)

    def __repr__(self) -> str:
        return f"<FakeBackend {self._lengths!r} {self._cells!r}>"

    @property
    def capabilities(self) -> Capabilities:
        """A decoder that can do everything with sequences, or a recurrent model."""
        return self._capabilities

    @property
    def vocabulary(self) -> FakeVocabulary:
        """Bytes and four control tokens."""
        return self._vocabulary

    @property
    def num_cells_used(self) -> int:
        """Cells in use, shared ones once."""
        return self._cells.num_used

    def tokens(self, seq: int) -> tuple[int, ...]:
        """The history of a sequence, for tests."""
        return tuple(self._histories[seq].tokens)

    @property
    def drafter(self) -> Drafter | None:
        """The model that guesses for it; a test may put one there."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def vision(self) -> FakeVision | None:
        """Its projector; None: it takes no images."""
        return self._vision

    @property
    def extensions(self) -> Extensions:
        """All there are; a recurrent state where the model has one."""
        return Extensions(
            conditioner=self,
            states=self,
            recurrent=self if self._capabilities.state_layout else None,
            hidden=self,
            scorer=self,
            vision=self._vision,
            drafter=self._drafter,
            threads=self,
            aborts=self._abort,
            compaction=self,
            devices=self if self.faults.devices.names else None,
            draws=self._draws,
        )

    def launch(self, plan: BatchPlan) -> InFlight:
        """Append the plan's tokens; rows are overwritten by the next step, as a native backend's are."""
        assert not self._is_closed, "a step after close"
        self._assert_idle()
        self._lengths.check(plan)
        self._cells.check_free(plan.num_tokens)
        self.faults.devices.meet_loss(self._by_device)
        if 0 < self.faults.most_tokens < plan.num_tokens:
            raise StepMemoryError(f"{plan.num_tokens} tokens are more than the memory that was ordered")
        takes_s = self.faults.step_delay_s + plan.num_tokens * self.faults.token_delay_s
        if not self.faults.is_async:
            if self._abort is None:
                found = self._compute(plan)
                time.sleep(takes_s)
                return found
            if self._abort.wait(takes_s):
                raise StepAbortedError(f"a step of {plan.num_tokens} tokens was ended")
            return self._compute(plan)
        if self._in_flight is not None:
            self._in_flight.expire()
        self._in_flight = _FakeInFlight(partial(self._compute, plan), takes_s)
        return self._in_flight

    def _compute(self, plan: BatchPlan) -> Computed:
        for item in plan.items:
            self._meet_faults(item)
        seen = {item.seq: seen_tokens(item, self._pictures(item.seq)) for item in plan.items}
        self._close_up(plan)
        wanted: list[int] = []
        scripted: list[int] = []
        for item in plan.items:
            history = self._histories[item.seq]
            self._cells.append(item.seq, len(item.tokens))
            history.append(seen[item.seq])
            first = len(history.hashes) - item.num_logits
            wanted.extend(history.hashes[first:])
            if self._script:
                ends = range(first + 1, len(history.tokens) + 1)
                scripted += [self._script.next_token(history.tokens[:end]) for end in ends]
        self._lengths.advance(plan)
        self.num_steps += 1
        rows = self._logits(wanted)
        if scripted:
            rows[range(len(scripted)), scripted] = _CERTAIN
        return self._sorted_out(plan, rows)

    def _sorted_out(self, plan: BatchPlan, rows: Rows) -> Computed:
        """The rows of the items that want them, the best of all others."""
        takes = [item.takes_candidates for item in plan.items]
        if not any(takes):
            return Computed(rows)
        assert self._draws is not None, "candidates asked of a backend without Draws"
        is_taken = np.repeat(takes, [item.num_logits for item in plan.items])
        return Computed(rows[~is_taken], self._draws.best_of(rows[is_taken]))

    def _assert_idle(self) -> None:
        """Nothing but `rows` may be called while a step is in flight."""
        assert self._in_flight is None or self._in_flight.is_collected, "a step is in flight"

    def condition(self, seq: int, conditioning: Conditioning) -> None:
        """Compute the sequence's next tokens with this; UnsupportedError for what the model cannot do."""
        self._assert_idle()
        unknown = {name for name, _ in conditioning.adapters} - dict(self._capabilities.adapters).keys()
        if unknown or conditioning.source or (conditioning.pictures and not self._vision):
            raise UnsupportedError("the fake model cannot be conditioned so")
        self._histories[seq].salt = salt_of(conditioning.adapters)
        self._conditionings[seq] = conditioning

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty `dst` share the first `length` tokens of `src`."""
        self._assert_idle()
        assert self._lengths[dst] == 0, f"sequence {dst} is not empty"
        assert 0 < length <= self._lengths[src], f"{length} of {self._lengths[src]} tokens to share"
        if not self._capabilities.can_fork:
            raise UnsupportedError("the fake recurrent model keeps a state that cannot be shared")
        self._histories[dst] = self._histories[src].prefix(length)
        self._cells.fork(src, dst, length)
        self._lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens. Raises UnsupportedError where the model cannot go back."""
        self._assert_idle()
        held = self._lengths[seq]
        assert 0 <= length <= held, f"{length} of {held} tokens to keep"
        if 0 < length < held and not self._capabilities.can_trim:
            raise UnsupportedError(f"the fake recurrent model cannot go back from {held} to {length} tokens")
        self._histories[seq].cut(length)
        self._cells.trim(seq, length)
        self._lengths[seq] = length

    def drop(self, seq: int) -> None:
        """Forget the sequence."""
        self.trim(seq, 0)

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """Nothing depends on where its tokens lie; `check` wants them to lie as if it did."""
        self._close_up(plan)
        return range(len(plan.items))

    def _close_up(self, plan: BatchPlan) -> None:
        for stretch in self._cells.loose((item.seq for item in plan.items), MOVED_TOKENS):
            self._cells.moved(stretch)

    def length(self, seq: int) -> int:
        """Tokens the sequence holds."""
        return self._lengths[seq]

    def export_state(self, seq: int) -> Buffer:
        """The tokens and where they began: all else follows from them."""
        self._assert_idle()
        payload = self._histories[seq].packed()
        return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload

    def import_state(self, seq: int, data: Buffer) -> None:
        """Put an exported sequence into the empty sequence `seq`."""
        self._assert_idle()
        assert self._lengths[seq] == 0, f"sequence {seq} is not empty"
        history, tokens = _history_of(data)
        self._cells.append(seq, len(tokens))
        history.append(tokens)
        self._histories[seq] = history
        self._lengths[seq] = len(tokens)

    def read_state(self, seq: int) -> list[Tensor]:
        """The hash of the history, as tensors of `STATE_LAYOUT`."""
        self._assert_idle()
        self._refuse_without_state()
        return tensors_of(self._histories[seq].state)

    def write_state(self, seq: int, tensors: Sequence[Tensor]) -> None:
        """Let the empty sequence `seq` begin from that hash."""
        self._assert_idle()
        self._refuse_without_state()
        assert self._lengths[seq] == 0, f"sequence {seq} is not empty"
        self._histories[seq].start = state_of(tensors)

    def last_hidden(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """Eight numbers that follow from the history."""
        held = self._lengths[seq]
        assert held in {len(tokens), len(tokens) - 1}, f"sequence {seq} holds {held} of {len(tokens)} tokens"
        if held < len(tokens):
            self.launch(BatchPlan((PlanItem(seq, held, tokens[-1:], 0),))).rows()
        return hidden_of(self._histories[seq].state)

    def scoring(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        namespace: bytes = b"",  # noqa: ARG002 - each scoring computes everything
        lane: ScoringLane = ScoringLane.CHOICES,  # noqa: ARG002 - likewise
    ) -> FakeScoring:
        """How likely texts are after a prompt, by the same logits as ever."""
        self._assert_idle()
        return FakeScoring(prompt, texts, self._logits, self._meet_call)

    def _meet_call(self, tokens: list[int]) -> None:
        self._meet_faults(PlanItem(-1, 0, tokens, 0))
        if self.faults.step_delay_s:
            time.sleep(self.faults.step_delay_s)

    def memory(self) -> dict[str, int]:
        """As if: what was ordered for weights and cells."""
        return _sizes(self.faults, self._capabilities.num_cells, self._capabilities.n_batch)

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What lies on each device that was there at the load; see `OnDevices`."""
        return self._by_device

    def set_threads(self, num_threads: int) -> None:
        """Remembered only."""
        self.num_threads = num_threads

    def close(self) -> None:
        """No step may follow."""
        self._is_closed = True
        self.faults.devices.release(self)

    def check(self) -> None:
        """Assert that lengths, histories and cells agree, and that no sequence lies out of order."""
        self._cells.check()
        for seq, history in enumerate(self._histories):
            num_cells = len(self._cells.cells(seq))
            assert self._lengths[seq] == len(history.tokens) == len(history.hashes) == num_cells
            assert self._cells.is_in_order(seq), f"sequence {seq} lies in the cells {self._cells.cells(seq)}"

    def _refuse_without_state(self) -> None:
        if not self._capabilities.state_layout:
            raise UnsupportedError("the fake model is a decoder: it has no recurrent state", param="state")

    def _pictures(self, seq: int) -> tuple[Placed, ...]:
        return self._conditionings.get(seq, PLAIN).pictures

    def _meet_faults(self, item: PlanItem) -> None:
        if not self.faults.abort_tokens.isdisjoint(item.tokens):
            os.abort()
        if not self.faults.bus_tokens.isdisjoint(item.tokens):
            signal.raise_signal(signal.SIGBUS)
        if item.seq in self.faults.bad_sequences or not self.faults.bad_tokens.isdisjoint(item.tokens):
            raise StepFailedError(f"a fault was ordered for sequence {item.seq}", seq=item.seq)

    def _logits(self, hashes: list[int]) -> Rows:
        """float32 (len(hashes), n_vocab): splitmix64 seeded with the hashes, in [0, 10), plus the bias."""
        rows = self._rows[: len(hashes)]
        seeds = np.array(hashes, np.uint64)[:, None]
        values = seeds + np.arange(1, N_VOCAB + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
        rows[:] = (values >> np.uint64(40)).astype(np.float32) * np.float32(10 / 2**24)
        rows += self._bias
        if self.faults.eog_period:
            rows[[value % self.faults.eog_period == 0 for value in hashes], EOS] = 30.0
        return rows


def load(spec: ModelSpec, on_progress: Callable[[float], None] | None = None) -> FakeBackend:
    """The backend that a path "fake:" asks for.

    Faults may follow: "fake:abort_tokens=7+9,step_delay_s=0.01" (names and meaning as in `FakeFaults`).
    """
    faults = _faults(spec.path)
    _take_time(faults, on_progress or (lambda _: None))
    return FakeBackend(
        num_sequences=max(2 * spec.num_slots, spec.num_slots + 8),
        num_cells=spec.pool_cells or _NUM_CELLS,
        n_ctx=spec.most_tokens or None,
        n_batch=spec.call_tokens,
        faults=faults,
        adapters=spec.adapters,
        placement=spec.placement,
    )


def estimator(path: str) -> Estimator:
    """What the backend that a path "fake:" asks for would take; exact."""
    faults = _faults(path)

    def estimate(spec: ModelSpec) -> Estimate:
        num_cells = spec.pool_cells or _NUM_CELLS
        lines = _sizes(faults, num_cells, spec.call_tokens)
        is_placed = spec.placement.gpu_layers != "auto"
        on_devices = faults.devices.share(lines, spec.placement) if is_placed else {}
        return Estimate(lines=lines, n_ctx=num_cells, on_devices=on_devices, num_layers=NUM_LAYERS)

    return estimate


def _faults(path: str) -> FakeFaults:
    scheme, _, order = path.partition(":")
    if scheme != "fake":
        raise ModelFileError(f"{path!r} is not of the form fake:[fault=value,...]")
    return FakeFaults.parse(order)


def _sizes(faults: FakeFaults, num_cells: int, n_batch: int) -> dict[str, int]:
    kv_bytes = int(faults.cell_kib * 1024) * num_cells
    return {"weights": faults.weights_mib * 2**20, "kv": kv_bytes, "compute": 4 * n_batch * N_VOCAB}


def _take_time(faults: FakeFaults, on_progress: Callable[[float], None]) -> None:
    if faults.load_aborts:
        os.write(2, b"fake.cpp:1: ASSERT(!load_aborts) failed\n")
        os.abort()
    begun = time.monotonic()
    while (spent := time.monotonic() - begun) < faults.load_s:
        on_progress(spent / faults.load_s)
        time.sleep(min(0.02, faults.load_s))
    if faults.load_fails:
        raise ModelLoadError("a load that fails was ordered")
    on_progress(1.0)


def _history_of(data: Buffer) -> tuple[FakeHistory, list[int]]:
    if len(data) >= _HEADER.size:
        magic, size, crc = _HEADER.unpack_from(data)
        payload = bytes(memoryview(data)[_HEADER.size :])
        if magic == _MAGIC and size == len(payload) and crc == zlib.crc32(payload):
            return unpacked(payload)
    raise InvalidRequestError(f"{len(data)} bytes are not an exported state of this model", param="state")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _capabilities(  # noqa: PLR0913, PLR0917 - likewise
    num_sequences: int,
    num_cells: int,
    n_ctx: int,
    n_batch: int,
    faults: FakeFaults,
    placement: PlacementSpec,
) -> Capabilities:
    is_recurrent, kind = faults.recurrent, f"fake {faults.recurrent} {faults.eog_period} {faults.script}"
    return Capabilities(
        model_class=ModelClass.RECURRENT if is_recurrent else ModelClass.DECODER,
        architecture="fake",
        description="deterministic stand-in",
        label=f"fake · {faults.devices.label(placement)}",
        n_vocab=N_VOCAB,
        n_ctx=min(n_ctx, num_cells),
        n_ctx_train=n_ctx,
        num_cells=num_cells,
        n_batch=n_batch,
        num_sequences=num_sequences,
        num_params=0,
        size_bytes=0,
        kv_type="none",
        flash_attention="off",
        is_async=faults.is_async,
        trial_token_s=faults.token_delay_s if placement.gpu_layers in range(1, NUM_LAYERS) else 0.0,
        can_trim=not is_recurrent,
        can_fork=not is_recurrent,
        shares_cells=not is_recurrent,
        fingerprint=_digest(kind),
        state_layout=STATE_LAYOUT if is_recurrent else (),
        has_vision=faults.vision > 0,
        hears_hz=RATE_HZ if faults.hearing else 0,
        pairing="ready" if faults.vision or faults.hearing else "",
    )


def _projector(faults: FakeFaults) -> FakeVision | None:
    takes = (*((Picture,) if faults.vision else ()), *((Sound,) if faults.hearing else ()))
    return FakeVision(max(faults.vision, faults.hearing), faults.step_delay_s, takes) if takes else None
