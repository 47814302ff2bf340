"""Sequences of a model and the steps that grow them: the native context, its cells and its logits.

Knows sequence numbers and token ids; `model` has the weights, `cells` where tokens lie, `state` the bytes of
a saved sequence.
"""

from __future__ import annotations

import ctypes
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from stoker.backends.llama.batch import (
    NONE,
    AdapterSet,
    EmbeddingBatch,
    PartRows,
    Pass,
    TokenBatch,
    passes,
)
from stoker.backends.llama.binding import buffer_bytes, capture_log, llama, settle_graphs
from stoker.backends.llama.cells import DecodeRows, DevicePool, OrderedPool, Pool, Streams, TiledPool
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.llama.graph.abort import AbortFlag
from stoker.backends.llama.graph.draws import open_draws
from stoker.backends.llama.row_tiles import TILE, RowTiles
from stoker.backends.llama.shortage import load_error
from stoker.backends.llama.vision.places import PicturePlaces
from stoker.backends.protocol.backend import (
    NO_CANDIDATES,
    BatchPlan,
    Candidates,
    Computed,
    Lengths,
    PlanItem,
)
from stoker.backends.protocol.vision import embeddings_of
from stoker.errors import (
    PoolFullError,
    StepAbortedError,
    StepFailedError,
    StepMemoryError,
    UnsupportedError,
)
from stoker.ipc.model import FlashAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from stoker.backends.llama.adapters import Adapters
    from stoker.backends.llama.binding import LogLine
    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import InFlight, Placed, Rows

    Bytes = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)

_NO_MEMORY = -2  # llama_decode: a graph could not be given memory
_ABORTED = 2  # llama_decode: its abort callback said so; only the tokens of the last n_ubatch were taken back
_NO_CELLS = 1  # llama_decode: could not find a KV slot for the batch
_FLASH_ATTENTION = re.compile(r"Flash Attention (enabled|disabled|not supported)")  # its resolve_fused_ops


class LlamaContext:
    """Sequences of `model`. One thread drives it; close it before the model.

    Attributes:
        adapters: what its sequences may be computed with; None: nothing.
        has_streams: each sequence has cells of its own.
        is_in_order: the cells of a sequence lie in the order of its tokens.
        is_off_host: reading a state takes time.
        flash_attention: "on", "off", or "auto" where the library did not say.
        capacity: tokens that one sequence may hold.
        num_cells: tokens that all may hold together.
        n_batch, n_ubatch: tokens of a step, and of those that are computed at once.
        with_initial_state: sequences that began from a state put there, and not from the model's own.
        places: where pictures lie that are not computed as text is.
        draws: finds the largest logits of rows; None: rows are read whole.
        tiles: what prompts cost, where they are padded to tiles; None: they are not.
        abort_flag: ends a step; None: devices compute steps, which cannot be ended.

    Raises:
        InsufficientMemoryError: there is too little memory for it.
        ModelLoadError: llama.cpp could not make it.
    """

    def __init__(self, model: LlamaModel, options: ContextOptions, adapters: Adapters | None = None) -> None:
        self._model = model
        self.adapters = adapters
        self._sets: dict[int, AdapterSet] = {}
        self._current = NONE
        self._pictures: dict[int, tuple[Placed, ...]] = {}
        self.places = PicturePlaces()
        self._embeddings: EmbeddingBatch | None = None
        self.num_sequences = options.num_sequences
        self.num_threads = options.num_threads
        self.key_type = options.key_type
        params, n_vocab = options.native_params(), model.vocabulary.n_vocab
        self._samplers = self.draws = open_draws(params.n_seq_max, n_vocab) if options.draws else None
        if model.devices:
            settle_graphs(model.path.name, is_marked=options.is_marked and self.draws is not None)
        self._max_rows: int | None = None
        if self.draws is not None:
            self.draws.attach_to(params)
            self._max_rows = self.draws.max_rows
        self.handle: int | None
        self.handle, lines = _opened(model, params, options.num_cells)
        self.abort_flag = None if model.devices else AbortFlag()
        if self.abort_flag is not None:
            self.abort_flag.attach_to(self.handle)
        self.has_streams, self.is_off_host = options.has_streams, options.is_off_host
        self.is_in_order = options.keeps_order or options.has_streams
        self.capacity: int = llama.llama_n_ctx_seq(self.handle)
        self.num_cells = self.capacity * (options.num_sequences if options.has_streams else 1)
        self.n_batch: int = min(options.n_batch, llama.llama_n_batch(self.handle))
        self.n_ubatch: int = min(self.n_batch, llama.llama_n_ubatch(self.handle))
        self.lengths = Lengths(options.num_sequences, model.vocabulary.n_vocab, self.n_batch)
        self.flash_attention = _flash_attention(options, lines)
        self._buffers = buffer_bytes(lines, model.devices)
        self.tiles = self._row_tiles() if options.pads_prompts and not options.keeps_order else None
        self._cells = self._open_cells(options)
        # A state that no token made needs a position of its own; recurrent models do not look at positions.
        self._first_position = 1 if model.is_recurrent else 0
        self.with_initial_state: set[int] = set()
        self._batch = TokenBatch(self.n_batch, self._first_position)
        self._n_vocab = model.vocabulary.n_vocab
        self._rows = np.empty((0, self._n_vocab), np.float32)
        self._rows_address = 0
        try:
            self._try_draws()
        except BaseException:
            self.close()
            raise

    @property
    def has_plain_states(self) -> bool:
        """Whether states are of one cache alone, as `Streams` takes them apart; asked while all are empty."""
        return self._cells.has_plain_states

    def _open_cells(self, options: ContextOptions) -> Pool:
        assert self.handle is not None, "a context without a handle"
        if options.has_streams:
            cell_bytes = self.memory()["kv"] // (self.capacity * (options.num_sequences + 1))
            pads = options.is_off_host
            return Streams(self.handle, options.num_sequences, self.n_ubatch, cell_bytes, pads=pads)
        if options.keeps_order:
            cell_bytes = -(-self.memory()["kv"] // self.num_cells)
            return OrderedPool(self.handle, options.num_sequences, self.num_cells, cell_bytes)
        if self.tiles is not None:
            return TiledPool(self.handle, options.num_sequences, self.tiles)
        return (DevicePool if options.is_off_host else Pool)(self.handle, options.num_sequences)

    def _row_tiles(self) -> RowTiles | None:
        """Where attention is computed on the CPU, with tiles, in one pool, and tokens may be taken back."""
        model, is_on_cpu = self._model, self.abort_flag is not None and not self.has_streams
        reads_tiles = self.flash_attention == "on" and self.key_type is KeyType.F16
        if not (is_on_cpu and reads_tiles and self.n_ubatch >= TILE and model.keeps_every_cell):
            return None
        embedded = model.vocabulary.n_vocab * model.n_embd
        return RowTiles.of(model.num_params, embedded, model.n_embd, model.num_layers, model.half_tile)

    def __repr__(self) -> str:
        return f"<LlamaContext of {self._model!r}, {self.num_cells} cells, {self.lengths!r}>"

    @property
    def row_width(self) -> int:
        """Numbers that the library keeps of a token whose output is asked: logits and hidden state."""
        return self._n_vocab + self._model.n_embd

    def step(self, plan: BatchPlan) -> Rows:
        """One forward pass, waited for; see `Backend.launch`."""
        return self.launch(plan).rows()

    def launch(self, plan: BatchPlan) -> InFlight:
        """Begin one forward pass; see `Backend.launch`. Several native calls are waited for."""
        self.lengths.check(plan)
        if plan.is_rows and self._takes_rows:
            return self._computed_rows(plan)
        if (rows := self._decode_rows(plan)) is not None:
            return self._launch_rows(plan, rows)
        native = plan
        is_pictured = bool(self._pictures) or bool(self.places) or plan.has_pictures
        if is_pictured:
            self._check_pictures(plan)
            native = self.places.laid_out(plan, self._pictures)
            if not native.items:  # of pictures that are computed with their last tokens
                self.lengths.advance(plan)
                return self._parts(plan).computed()
        cut = passes(native, self._sets, self._current, self._cells.prepare(native), self._max_rows)
        if is_pictured:
            cut = [part for each in cut for part in self.places.apart(each)]
        if len(cut) > 1:
            return self._step_in_passes(plan, cut)
        self._compute(cut[0])
        self.lengths.advance(plan)
        collect = self._collect if cut[0].is_in_order else partial(self._collect_in_order, plan)
        return _Decoding(partial(collect, cut[0]))

    def _decode_rows(self, plan: BatchPlan) -> DecodeRows | None:
        return None if self._sets or self._current != NONE else self._cells.decode_rows(plan)

    def _launch_rows(self, plan: BatchPlan, rows: DecodeRows) -> InFlight:
        """One native call of as many rows as the plan has, or more."""
        draws, cells, shape = self.draws, self._cells, rows.shape
        assert draws is not None, "rows were filled up that are read whole"
        assert isinstance(cells, Streams), f"rows of {cells!r} were filled up"
        draws.prepare_rows(self._handle, shape.span)
        self._batch.fill_rows(shape.span, rows.tokens, rows.starts)
        code = llama.llama_decode(self.handle, self._batch.native)
        cells.empty(rows)
        if code != 0 or draws.error is not None:
            self._undo(plan, code)
        cells.computed(plan)
        self.lengths.advance(plan)
        return _Decoding(partial(draws.collect_rows, self._handle, len(shape.span), shape.places))

    @property
    def _takes_rows(self) -> bool:
        """Whether decode rows go as they are into one call, which has computed them when it returns."""
        is_on_cpu = self.abort_flag is not None
        is_bare = not (self.has_streams or self._sets or self.places) and self.draws is None
        return is_on_cpu and is_bare and self._current == NONE

    def _computed_rows(self, plan: BatchPlan) -> Computed:
        """One native call of decode rows, the common case: nothing is cut or brought into another order."""
        self._cells.prepare(plan)
        self._batch.fill(plan, self._cells.natives)
        code = llama.llama_decode(self.handle, self._batch.native)
        if code != 0:
            self._undo(plan, code)
        self._cells.computed(plan)
        self.lengths.advance(plan)
        return Computed(self._logits(len(plan.items)))

    def _check_pictures(self, plan: BatchPlan) -> None:
        """Before anything is computed: not every model can take a pass back."""
        for item in plan.items:
            if item.tokens[0] < 0:
                embeddings_of(item, self._pictures.get(item.seq, ()))

    def _try_draws(self) -> None:
        """Go on without draws where their candidates are wrong, of two tokens of the last sequence."""
        if self.draws is None:
            return
        seq, reason = self.num_sequences - 1, "what the device found are not the largest"
        try:
            with self.draws.probing():
                self.step(BatchPlan((PlanItem(seq, 0, (0, 1), 2, takes_candidates=True),)))
                is_right = self.draws.is_right(self._handle, 2)
            self.drop(seq)
        except StepFailedError as error:
            is_right, reason = False, error.message
        if not is_right:
            _log.warning("rows of logits are read whole: %s", reason)
            self.draws.detach_from(self._handle)
            self.draws = None
        elif isinstance(self._cells, Streams):
            self._cells.fills = True

    def _step_in_passes(self, plan: BatchPlan, cut: list[Pass]) -> Computed:
        """One native call after the other; where one fails, those before it are taken back."""
        parts = self._parts(plan)
        for number, each in enumerate(cut):
            try:
                self._compute(each)
            except (PoolFullError, StepFailedError):
                for done in cut[:number]:
                    self._take_back(done.plan)
                raise
            parts.put(each, *self._collect(each))
        self.lengths.advance(plan)
        return parts.computed()

    def _compute(self, each: Pass) -> None:
        """One native call; one that fails has changed nothing."""
        if each.adapters != self._current and self.adapters:
            self.adapters.apply(self.handle, each.adapters)
            self._current = each.adapters
        draws = self.draws
        if draws is not None:
            draws.prepare(self._handle, each.plan.items, self._cells.natives)
        if each.is_pictured and self.places.has(each.plan.items[0]):
            code = self._decode_picture(each.plan.items[0])
        else:
            code = llama.llama_decode(self.handle, self._laid_out(each))
        if code != 0 or (draws is not None and draws.error is not None):
            self._undo(each.plan, code)
        self._cells.computed(each.plan)
        for item in each.plan.items if each.is_pictured else ():
            self.places.computed(item)

    def _decode_picture(self, item: PlanItem) -> int:
        """Native calls for the tokens of a picture that has a place; the return code of the last."""
        code = 0
        for call in self.places.calls(item, self._pictures[item.seq], self.n_batch):
            assert not call.is_mutual or len(call.embeddings) <= self.n_ubatch, f"in calls of {self.n_ubatch}"
            self._embedding_batch.fill_grid(call, self._cells.natives)
            llama.llama_set_causal_attn(self.handle, not call.is_mutual)
            try:
                code = llama.llama_decode(self.handle, self._embedding_batch.native)
            finally:
                llama.llama_set_causal_attn(self.handle, True)
            if code != 0:
                break
        return code

    @property
    def _embedding_batch(self) -> EmbeddingBatch:
        if self._embeddings is None:  # most contexts never need one
            self._embeddings = EmbeddingBatch(self.n_batch, self._model.n_embd_inp, self._first_position)
        return self._embeddings

    def _laid_out(self, each: Pass) -> object:
        """The pass as the native library takes it."""
        if not each.is_pictured:
            most = min(self.n_batch, self.num_cells - self.lengths.total)
            self._batch.fill(self._cells.padded(each.plan, most), self._cells.natives)
            return self._batch.native
        rows = [embeddings_of(item, self._pictures.get(item.seq, ())) for item in each.plan.items]
        self._embedding_batch.fill(each.plan, rows, self._cells.natives)
        return self._embedding_batch.native

    def see(self, seq: int, pictures: tuple[Placed, ...]) -> None:
        """Where the sequence's tokens are numbers of these images, compute their embeddings."""
        if pictures:
            self._pictures[seq] = pictures
        else:
            self._pictures.pop(seq, None)

    def adapt(self, seq: int, adapters: AdapterSet) -> None:
        """Compute the sequence's next tokens with these adapters; UnsupportedError for unknown ones."""
        if not adapters:
            self._sets.pop(seq, None)
            return
        if self.adapters is None:
            raise UnsupportedError(f"{self._model.description} was loaded without adapters", param="lora")
        self.adapters.check(adapters)
        self._sets[seq] = adapters

    def is_adapted(self, seq: int) -> bool:
        """Whether the sequence's tokens are computed with adapters."""
        return seq in self._sets

    def step_hidden(self, seq: int, token: int) -> npt.NDArray[np.float32]:
        """Append a token; what the model made of it, float32 (width,), a copy.

        Raises:
            PoolFullError: no cell for it; nothing changed.
            StepFailedError: the native decode failed; nothing changed.
        """
        llama.llama_set_embeddings(self.handle, True)
        try:
            self.step(BatchPlan((PlanItem(seq, self.lengths[seq], (token,), 1),)))
            pointer = llama.llama_get_embeddings_ith(self.handle, 0)
        finally:
            llama.llama_set_embeddings(self.handle, False)
        if not pointer:
            raise UnsupportedError(f"{self._model.description} gives no hidden state")
        return np.ctypeslib.as_array(pointer, (self._model.n_embd,)).copy()

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`."""
        assert self.lengths[dst] == 0, f"sequence {dst} is not empty"
        assert 0 < length <= self.lengths[src], f"{length} of {self.lengths[src]} tokens to share"
        if not self._model.keeps_every_cell:
            raise UnsupportedError(f"{self._model.description} keeps a state that cannot be shared")
        if native := self.places.fork(src, dst, length):
            self._cells.fork(src, dst, native)
        self.lengths[dst] = length

    def trim(self, seq: int, length: int) -> None:
        """Keep the first `length` tokens. Raises UnsupportedError where the model cannot go back."""
        held = self.lengths[seq]
        assert 0 <= length <= held, f"{length} of {held} tokens to keep"
        if length == 0:
            self.drop(seq)
        if length in {0, held}:
            return
        if not self._model.keeps_every_cell:
            raise UnsupportedError(
                f"{self._model.description} cannot go back from {held} to {length} tokens, only to none"
            )
        self._cells.remove(seq, self.places.trim(seq, length))
        self.lengths[seq] = length

    def drop(self, seq: int) -> None:
        """Forget the sequence and free its cells, also such as a failed import may have left."""
        self._cells.remove(seq, 0)
        self.places.drop(seq)
        self.with_initial_state.discard(seq)
        self.lengths[seq] = 0

    def export_s(self, seq: int) -> float:
        """Seconds that reading the sequence's state takes, about."""
        length = self.places.native(seq, self.lengths[seq])
        return self._cells.export_s(seq, length) if length else 0.0

    def read_state(self, seq: int, num_before: int = 0) -> Bytes:
        """llama.cpp's own bytes of a sequence in a pool, after `num_before` bytes for the caller."""
        return self._cells.read_state(seq, num_before)

    def write_state(self, seq: int, payload: Bytes, num_tokens: int) -> None:
        """Put such bytes of `num_tokens` tokens into the empty sequence `seq`.

        Raises:
            PoolFullError: its cells do not fit; nothing changed.
        """
        if not self._cells.write_state(seq, payload):
            self.drop(seq)
            raise PoolFullError(
                f"no cells for the {num_tokens} tokens of a saved state", num_tokens=num_tokens
            )
        self._cells.received(seq, self.places.native(seq, num_tokens))
        self.lengths[seq] = num_tokens

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """See `Compaction`."""
        return self._cells.arrange(plan)

    def set_threads(self, num_threads: int) -> None:
        """Use that many CPU threads from the next step on."""
        self.num_threads = num_threads
        llama.llama_set_n_threads(self.handle, num_threads, num_threads)

    def memory(self) -> dict[str, int]:
        """Bytes of `kv` and `compute` buffers, as the library reported them when it made the context."""
        return {line: sum(held.get(line, 0) for held in self._buffers.values()) for line in ("kv", "compute")}

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """Those that lie on accelerators, by their ids; see `OnDevices`."""
        return {owner: dict(held) for owner, held in self._buffers.items() if owner}

    def close(self) -> None:
        """Free cells and buffers; idempotent."""
        if self.handle is not None:
            llama.llama_free(self.handle)
            self.handle = None
            if self._samplers is not None:
                self._samplers.close()
            self._rows = np.empty((0, self._n_vocab), np.float32)

    @property
    def _handle(self) -> int:
        assert self.handle is not None, "used after close"
        return self.handle

    def _collect(self, each: Pass) -> tuple[Rows, Candidates]:
        """Wait for the last native call, that of a pass; its rows and candidates, in the pass's order."""
        if self.draws is None:
            return self._logits(len(each.rows)), NO_CANDIDATES
        return self.draws.collect(self._handle, each.plan.items)

    def _collect_in_order(self, plan: BatchPlan, each: Pass) -> tuple[Rows, Candidates]:
        """Likewise, as copies, in the order of the plan that the pass was made of."""
        parts = self._parts(plan)
        parts.put(each, *self._collect(each))
        return parts.rows, parts.best

    def _parts(self, plan: BatchPlan) -> PartRows:
        return PartRows(plan, self._n_vocab, 0 if self.draws is None else self.draws.num_candidates)

    def _logits(self, num_rows: int) -> Rows:
        """A view of the library's own rows, in the order of the batch; made anew only if it moved."""
        if num_rows == 0:
            return np.empty((0, self._n_vocab), np.float32)
        pointer = llama.llama_get_logits(self.handle)
        address = ctypes.addressof(pointer.contents)
        if address != self._rows_address or num_rows != len(self._rows):
            self._rows = np.ctypeslib.as_array(pointer, (num_rows, self._n_vocab))
            self._rows_address = address
        return self._rows

    def _undo(self, plan: BatchPlan, code: int) -> NoReturn:
        """Take every sequence back to where it was and raise what the return code means."""
        self._take_back(plan)
        if self.draws is not None:
            self.draws.failed()
            if self.draws.error is not None:
                raise StepFailedError(f"a graph could not be built: {self.draws.error!r}")
        if code == _NO_CELLS:
            raise PoolFullError(
                f"no cells for {plan.num_tokens} more tokens among {self.num_cells}",
                num_tokens=plan.num_tokens,
                num_cells=self.num_cells,
            )
        if code == _ABORTED:
            raise StepAbortedError(f"a step of {plan.num_tokens} tokens was ended")
        kind = StepMemoryError if code == _NO_MEMORY else StepFailedError
        raise kind(
            f"llama_decode returned {code} for {plan.num_tokens} tokens of {len(plan.items)} sequences",
            native_code=code,
        )

    def _take_back(self, plan: BatchPlan) -> None:
        """Remove the tokens of a plan, which is by native positions, from their sequences."""
        for item in plan.items:
            is_begun = item.start > 0 or item.seq in self.with_initial_state
            self._cells.remove(item.seq, item.start + self._first_position if is_begun else 0)
            self.places.taken_back(item)


@dataclass(slots=True)
class _Decoding:
    """A native call whose rows were not asked for: asking waits for the device."""

    collect: Callable[[], tuple[Rows, Candidates]]
    found: tuple[Rows, Candidates] | None = None

    def rows(self) -> Rows:
        if self.found is None:
            self.found = self.collect()
        return self.found[0]

    def candidates(self) -> Candidates:
        assert self.found is not None, "not waited for"
        return self.found[1]


def _flash_attention(options: ContextOptions, lines: list[LogLine]) -> str:
    """Whether it is used; quantised cells leave the library no choice, of which it then says nothing."""
    if options.flash_attention is FlashAttention.OFF:
        return "off"
    if options.key_type.is_quantised:
        return "on"
    for line in lines:
        if found := _FLASH_ATTENTION.search(line.text):
            return "on" if found[1] == "enabled" else "off"
    return "auto"


def _opened(model: LlamaModel, params: Any, num_cells: int) -> tuple[int, list[LogLine]]:
    """A native context and what the library said; the vocabulary's tables are read meanwhile.

    Raises:
        InsufficientMemoryError, ModelLoadError: as `load_error` finds.
    """
    model.vocabulary.read_ahead()
    with capture_log() as lines:
        handle = llama.llama_init_from_model(model.handle, params)
    if handle is None:
        what = f"a context of {num_cells} cells for {model.path.name}"
        raise load_error(what, lines, model.devices, num_cells=num_cells)
    return int(handle), lines
