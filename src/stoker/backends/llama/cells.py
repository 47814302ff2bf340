"""Where the tokens of sequences lie in a native context: in one pool, or each sequence in its own stream.

A `Pool` shares cells between sequences. Where sums depend on it, an `OrderedPool` keeps the cells of each
sequence in the order of its tokens (docs/adr/0019): before a step tokens are taken out as bytes and put back
into free cells before them, which changes no bit. `Streams` keep sequences apart, so that mask and attention
of a step do not grow with what others hold, and a state is one copy a layer (docs/adr/0024).
"""

from __future__ import annotations

import ctypes
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.cell_map import CellMap
from stoker.backends.llama.batch import TokenBatch
from stoker.backends.llama.binding import keeping_lock, llama
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.stream_map import COPIES_A_PASS, StreamMap, evened, span
from stoker.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from stoker.backends.cell_map import Stretch
    from stoker.backends.llama.batch import Natives
    from stoker.backends.llama.row_tiles import RowTiles

    Bytes = npt.NDArray[np.uint8]

MOVED_BYTES = 4 * 2**20
"""Keys and values that are moved at a time, at least one token's: about a millisecond's copying."""
_LEAST_CELL_BYTES = 1024  # where the library did not say what its buffers take
_BYTES_P = ctypes.POINTER(ctypes.c_uint8)
# these only write down what is in which cell
_remove_cells, _last_position = map(keeping_lock, (llama.llama_memory_seq_rm, llama.llama_memory_seq_pos_max))
_TO_THE_END = -1
_PROBED_TOKENS = 32  # 15 ms of 28 layers where each cell lies apart
_BYTE_S = 1 / 4e9  # of a copy off a device, before one was measured
_MEASURED_BYTES = 2**20
_COPY_S, _COPY_BYTE_S, _PASS_S = 0.0008, 1e-12, 0.008
"""What a copy between streams takes a device, and a pass of another shape: measured on H100 and H200."""
_FOLLOW = 0.3


@dataclass(frozen=True, slots=True)
class RowShape:
    """The streams of decode rows, a row of each.

    Attributes:
        num_changes: of the map of streams, when this was made.
        seqs: sequences of the wanted rows, in the order in which they are asked for.
        span: the streams, without a gap.
        items: which of the asked rows each stream has; None: one of which nothing is kept.
        places: of the asked rows among those of the span; None: they are these.
    """

    num_changes: int
    seqs: Sequence[int]
    span: range
    items: Sequence[int | None]
    places: npt.NDArray[np.intp] | None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A step of decode rows, filled up with rows of which nothing is kept.

    Attributes:
        shape: their streams.
        tokens, starts: of each row, in the order of the streams.
        fill: stream and position of each row in vain.
    """

    shape: RowShape
    tokens: Sequence[int]
    starts: Sequence[int]
    fill: Sequence[tuple[int, int]]


class Pool:
    """One pool of cells. Sequences have the same numbers in the library.

    Args:
        handle: the context.
        num_sequences: how many it has.

    Attributes:
        natives: the number of each sequence in the library; of one that holds something.
    """

    def __init__(self, handle: int, num_sequences: int) -> None:
        self.natives: Natives = range(num_sequences)
        self._handle = handle
        self._memory = llama.llama_get_memory(handle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.natives)} sequences>"

    @property
    def has_plain_states(self) -> bool:
        """Whether states are of one kind of cache alone; where it matters, see `Streams`."""
        return True

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """See `Compaction`."""
        return range(len(plan.items))

    def prepare(self, plan: BatchPlan) -> Sequence[int]:
        """What a step of `plan` cannot do without; returns the places of its items in the library's order."""
        return range(len(plan.items))

    def decode_rows(self, plan: BatchPlan) -> DecodeRows | None:
        """A step of decode rows, with others between and after them for its shape; None: it is none."""
        del plan
        return None

    def padded(self, plan: BatchPlan, most: int) -> BatchPlan:
        """The step with tokens after those of its items that `computed` forgets; at most so many in all."""
        del most
        return plan

    def computed(self, plan: BatchPlan) -> None:
        """A step of `plan` was computed."""

    def received(self, seq: int, num_tokens: int) -> None:
        """The state of so many tokens was put into the empty sequence."""

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`."""
        llama.llama_memory_seq_cp(self._memory, src, dst, 0, length)

    def remove(self, seq: int, start: int) -> None:
        """Remove native positions `start` and up."""
        self._remove(seq, seq, start)

    def _remove(self, native: int, seq: int, start: int) -> None:
        if not _remove_cells(self._memory, native, start, _TO_THE_END):
            raise EngineError(f"the state of sequence {seq} before position {start} is lost", seq=seq)

    def export_s(self, seq: int, length: int) -> float:
        """Seconds that reading the state of its `length` tokens takes, about; here next to nothing."""
        del seq, length
        return 0.0

    def read_state(self, seq: int, num_before: int) -> Bytes:
        """llama.cpp's own bytes of a sequence in one pool, after `num_before` bytes for the caller."""
        return self._read(seq, seq, num_before)

    def _read(self, native: int, seq: int, num_before: int) -> Bytes:
        size = llama.llama_state_seq_get_size(self._handle, native)
        data = np.empty(num_before + size, np.uint8)
        target = ctypes.cast(data.ctypes.data + num_before, _BYTES_P)
        written = llama.llama_state_seq_get_data(self._handle, target, size, native)
        if written != size:
            raise EngineError(f"the state of sequence {seq} came as {written} of {size} bytes", seq=seq)
        return data

    def write_state(self, seq: int, payload: Bytes) -> bool:
        """Put such bytes into the empty sequence; False: they do not fit."""
        return self._write(seq, payload)

    def _write(self, native: int, payload: Bytes) -> bool:
        source = ctypes.cast(payload.ctypes.data, _BYTES_P)
        return bool(llama.llama_state_seq_set_data(self._handle, source, len(payload), native))


class TiledPool(Pool):
    """A pool whose prompts are padded to a tile of rows where that is quicker.

    Args:
        handle: the context.
        num_sequences: how many it has.
        tiles: what a step costs with and without.
    """

    def __init__(self, handle: int, num_sequences: int, tiles: RowTiles) -> None:
        super().__init__(handle, num_sequences)
        self._tiles = tiles
        self._num_planned = 0
        self._padding: PlanItem | None = None

    def prepare(self, plan: BatchPlan) -> Sequence[int]:
        """Begins a step. One that failed had its padding taken back with its tokens."""
        self._num_planned, self._padding = plan.num_tokens, None
        return super().prepare(plan)

    def padded(self, plan: BatchPlan, most: int) -> BatchPlan:
        """Tokens after those of its last item, which see no more cells than that does.

        A part of a step stays as it is: the cells of the other parts are not among `most` yet.
        """
        num_missing, last = self._tiles.num_missing(plan), plan.items[-1]
        if not num_missing or plan.num_tokens + num_missing > most or plan.num_tokens < self._num_planned:
            return plan
        self._padding = PlanItem(last.seq, last.start + len(last.tokens), (0,) * num_missing, 0)
        return BatchPlan((*plan.items, self._padding))

    def computed(self, plan: BatchPlan) -> None:
        """The padding is forgotten."""
        del plan
        padding, self._padding = self._padding, None
        if padding is not None:
            self.remove(padding.seq, padding.start)


class DevicePool(Pool):
    """A pool in the memory of a device, where a sequence's cells may lie apart, each to be copied by itself.

    Args:
        handle: the context; it knows one sequence more, which has no other use.
        num_sequences: how many it has without that.
    """

    def __init__(self, handle: int, num_sequences: int) -> None:
        super().__init__(handle, num_sequences)
        self._spare = num_sequences

    def export_s(self, seq: int, length: int) -> float:
        """As long as the tokens in its middle take, for all of them."""
        count = min(length, _PROBED_TOKENS)
        start = (length - count) // 2
        llama.llama_memory_seq_cp(self._memory, seq, self._spare, start, start + count)
        begun_s = time.perf_counter()
        self._read(self._spare, seq, 0)
        took_s = time.perf_counter() - begun_s
        self._remove(self._spare, seq, 0)
        return took_s * length / count


class OrderedPool(Pool):
    """A pool in which the cells of each sequence lie in the order of its tokens.

    Args:
        handle: the context; it knows one sequence more, which has no other use.
        num_sequences: how many it has without that.
        num_cells: how many the pool has.
        cell_bytes: keys and values of one of them, over all layers.
    """

    def __init__(self, handle: int, num_sequences: int, num_cells: int, cell_bytes: int) -> None:
        super().__init__(handle, num_sequences)
        self.map = CellMap(num_cells)
        self._spare = num_sequences
        self._most = max(1, MOVED_BYTES // max(cell_bytes, _LEAST_CELL_BYTES))
        # a token has some bytes beside its keys and values
        self._buffer = np.empty(2 * MOVED_BYTES, np.uint8)

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """Close the gaps before the tokens of the plan's sequences."""
        if self.map.has_hole:
            self.close_up([item.seq for item in plan.items])
        return range(len(plan.items))

    def prepare(self, plan: BatchPlan) -> Sequence[int]:
        """Likewise: a token before those of its own sequence would get other last bits."""
        return self.arrange(plan)

    def close_up(self, seqs: Iterable[int]) -> None:
        """Move the tokens of these sequences that have a free cell before them, shared ones for all owners.

        Raises:
            EngineError: llama.cpp did not take back what it gave.
        """
        if self.map.has_hole:
            for stretch in self.map.loose(seqs, self._most):
                self._move(stretch)
                self.map.moved(stretch)

    def computed(self, plan: BatchPlan) -> None:
        """Its tokens took the lowest free cells."""
        for item in plan.items:
            self.map.append(item.seq, len(item.tokens))

    def received(self, seq: int, num_tokens: int) -> None:
        """So did these."""
        self.map.append(seq, num_tokens)

    def fork(self, src: int, dst: int, length: int) -> None:
        """Let the empty sequence `dst` share the first `length` cells of `src`."""
        super().fork(src, dst, length)
        self.map.fork(src, dst, length)

    def remove(self, seq: int, start: int) -> None:
        """Remove native positions `start` and up; a cell without owners is free."""
        super().remove(seq, start)
        self.map.trim(seq, start)

    def _move(self, stretch: Stretch) -> None:
        start, stop = stretch.start, stretch.stop
        llama.llama_memory_seq_cp(self._memory, stretch.owners[0], self._spare, start, stop)
        size = llama.llama_state_seq_get_size(self._handle, self._spare)
        if size > len(self._buffer):
            self._grow(size, stretch)
        address = ctypes.cast(self._buffer.ctypes.data, _BYTES_P)
        is_out = llama.llama_state_seq_get_data(self._handle, address, size, self._spare) == size
        for seq in (*stretch.owners, self._spare):
            _remove_cells(self._memory, seq, start, stop)
        if not is_out or not llama.llama_state_seq_set_data(self._handle, address, size, self._spare):
            raise EngineError(f"tokens {start} to {stop} of sequences {stretch.owners} could not be moved")
        for seq in stretch.owners:
            llama.llama_memory_seq_cp(self._memory, self._spare, seq, start, stop)
        _remove_cells(self._memory, self._spare, start, stop)

    def _grow(self, size: int, stretch: Stretch) -> None:
        try:
            self._buffer = np.empty(size, np.uint8)
        except MemoryError:  # nothing has moved yet
            _remove_cells(self._memory, self._spare, stretch.start, stretch.stop)
            raise


_STREAM_HEAD = struct.Struct("<IiI")
"""Magic, native number, how many streams; then of each stream the count of its cells."""
_COUNT_BYTES = 4


class Streams(Pool):
    """A stream of cells for each sequence, and one more to copy through.

    Copies between streams are of whole streams, and llama.cpp makes them when it computes next. What reads or
    writes a stream's bytes before that has it compute a token that is forgotten.

    Args:
        handle: the context; it knows one sequence more than `num_sequences`.
        num_sequences: how many it has without that.
        n_ubatch: tokens that it computes at once.
        cell_bytes: keys and values of one cell, over all layers.
        pads: prompts of a step are brought to equal lengths, where a pass more costs much.

    Attributes:
        fills: whether rows of which only candidates are wanted are filled up.
    """

    def __init__(
        self, handle: int, num_sequences: int, n_ubatch: int, cell_bytes: int, *, pads: bool
    ) -> None:
        super().__init__(handle, num_sequences)
        self._pads, self._n_ubatch = pads, n_ubatch
        self._padded: set[int] = set()  # sequences with tokens to forget once the step is computed
        self.fills = False
        self._shape: RowShape | None = None  # of the last step, if it was of decode rows
        self._seen: tuple[BatchPlan, int, RowShape | None] | None = None  # a plan, and how it is laid out
        self._capacity = int(llama.llama_n_ctx_seq(handle))
        copy_s = _COPY_S + self._capacity * cell_bytes * _COPY_BYTE_S
        self.map = StreamMap(num_sequences, n_ubatch, min(COPIES_A_PASS, int(_PASS_S / copy_s)))
        self.natives = self.map.streams
        self._num_streams = num_sequences + 1
        self._to_copy: set[int] = set()  # streams of copies that were not made yet
        self._token = TokenBatch(1)
        self._token_s = _BYTE_S * cell_bytes

    def __repr__(self) -> str:
        return f"<Streams {self.map!r}>"

    @property
    def has_plain_states(self) -> bool:
        """Whether an empty state is the head and the counts of one cache, and not of several."""
        size = llama.llama_state_seq_get_size(self._handle, 0)
        return bool(size == _STREAM_HEAD.size + self._num_streams * _COUNT_BYTES)

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """Close gaps between the streams of the plan's sequences, where that pays.

        Decode rows stay as they are: `decode_rows` fills gaps and has them in the order of their streams.
        """
        if self._shape_of(plan) is not None:
            return range(len(plan.items))
        copies = self.map.begin([item.seq for item in plan.items])
        self.prepare(plan)  # those that begin with no place together get streams all the same
        copies += self.map.close_gaps({item.seq: len(item.tokens) for item in plan.items})
        for copy in copies:
            self._copy(copy.src, copy.dst)
            self._remove(copy.src, copy.src, 0)
        return self.prepare(plan)

    def prepare(self, plan: BatchPlan) -> Sequence[int]:
        """Every sequence gets a stream."""
        return self.map.order(item.seq for item in plan.items)

    def _shape_of(self, plan: BatchPlan) -> RowShape | None:
        """How the plan is laid out, if it is of decode rows whose streams are near each other."""
        seen = self._seen
        if seen is None or seen[0] is not plan or seen[1] != self.map.num_changes:
            shape = self._new_shape(plan) if self.fills else None
            self._seen = seen = plan, self.map.num_changes, shape
        return seen[2]

    def _new_shape(self, plan: BatchPlan) -> RowShape | None:
        seqs = [item.seq for item in plan.items if _is_drawn_row(item)]
        if len(seqs) < len(plan.items):
            return None
        last = self._shape
        if last is not None and last.num_changes == self.map.num_changes and seqs == last.seqs:
            return last
        order = self.map.order(seqs)
        streams = [self.map.streams[seqs[place]] for place in order]
        wide = span(streams, range(0) if last is None else last.span, self._num_streams)
        if not len(wide):
            return None
        items: list[int | None] = [None] * len(wide)
        for place, stream in zip(order, streams, strict=True):
            items[stream - wide.start] = place
        is_plain = items == list(range(len(seqs)))
        places = None if is_plain else np.array([self.map.streams[seq] - wide.start for seq in seqs], np.intp)
        return RowShape(self.map.num_changes, seqs, wide, items, places)

    def decode_rows(self, plan: BatchPlan) -> DecodeRows | None:
        """See `Pool`; their shape is remembered for the next step."""
        shape = self._shape_of(plan)
        if shape is not None and shape is not self._shape:
            self.map.ran(shape.seqs)
        self._shape = shape
        if shape is None:
            return None
        items = plan.items
        if shape.places is None:
            return DecodeRows(shape, [item.tokens[0] for item in items], [item.start for item in items], ())
        tokens, starts, fill = [], [], []
        for stream, place in zip(shape.span, shape.items, strict=True):
            if place is not None:
                tokens.append(items[place].tokens[0])
                starts.append(items[place].start)
                continue
            start = _last_position(self._memory, stream) + 1
            if start >= self._capacity:
                self._shape = None
                return None
            fill.append((stream, start))
            tokens.append(0)
            starts.append(start)
        return DecodeRows(shape, tokens, starts, fill)

    def empty(self, rows: DecodeRows) -> None:
        """Forget what rows in vain have left in their streams; the device may still compute them."""
        for stream, start in rows.fill:
            self._remove(stream, stream, start)

    def padded(self, plan: BatchPlan, most: int) -> BatchPlan:
        """Prompts of lengths that make few passes."""
        self._padded.clear()
        if not self._pads or len(plan.items) == 1 or len(plan.items) == plan.num_tokens:
            return plan
        streams, items = self.map.streams, []
        counts = {streams[item.seq]: len(item.tokens) for item in plan.items}
        rooms = {streams[item.seq]: self._capacity - item.start for item in plan.items}
        lengths = evened(counts, rooms, self._n_ubatch, most)
        for item in plan.items:
            items.append(item)
            count = len(item.tokens)
            if num_missing := lengths[streams[item.seq]] - count:
                items.append(PlanItem(item.seq, item.start + count, (0,) * num_missing, 0))
                self._padded.add(item.seq)
        return BatchPlan(tuple(items))

    def computed(self, plan: BatchPlan) -> None:
        """Whatever was to be copied was copied before; padding goes, which the device may still compute."""
        self._to_copy.clear()
        for item in plan.items if self._padded else ():
            if item.seq in self._padded:
                self._remove(self.map.streams[item.seq], item.seq, item.start + len(item.tokens))
        self._padded.clear()

    def fork(self, src: int, dst: int, length: int) -> None:
        """Give the empty sequence `dst` a copy of the first `length` tokens of `src`."""
        copied = self.map.stream(dst)
        self._copy(self.map.stream(src), copied)
        self._remove(copied, dst, length)

    def _copy(self, src: int, dst: int) -> None:
        llama.llama_memory_seq_cp(self._memory, src, dst, 0, _TO_THE_END)
        self._to_copy |= {src, dst}

    def _settle(self, stream: int) -> None:
        """Have the copies made that read or write this stream."""
        if stream not in self._to_copy:
            return
        free = self.map.a_free_one
        self._token.fill(BatchPlan((PlanItem(free, 0, (0,), 0),)))
        if code := llama.llama_decode(self._handle, self._token.native):
            raise EngineError(f"llama_decode returned {code} where streams were to be copied")
        self._remove(free, free, 0)
        self._to_copy.clear()

    def remove(self, seq: int, start: int) -> None:
        """Remove native positions `start` and up; without any its stream is free."""
        if seq in self.map.streams:
            self._remove(self.map.stream(seq), seq, start)
            if start == 0:
                self.map.forget(seq)

    def export_s(self, seq: int, length: int) -> float:
        """By its size, as it was of the state read last: the library looks through every cell to tell it."""
        del seq
        return self._token_s * length

    def read_state(self, seq: int, num_before: int) -> Bytes:
        """The bytes that llama.cpp would give of one pool: without the counts of the other streams."""
        native = self.map.stream(seq)
        self._settle(native)
        begun_s = time.perf_counter()
        data = self._read(native, seq, num_before)
        if len(data) >= _MEASURED_BYTES:
            took_s = (time.perf_counter() - begun_s) / (_last_position(self._memory, native) + 1)
            self._token_s += _FOLLOW * (took_s - self._token_s)
        num_skipped = native * _COUNT_BYTES
        num_behind = (self._num_streams - 1 - native) * _COUNT_BYTES
        head = _STREAM_HEAD.unpack_from(data.data, num_before)
        assert head[2] == self._num_streams, f"a state of {head[2]} streams among {self._num_streams}"
        data = data[num_skipped : len(data) - num_behind]
        _STREAM_HEAD.pack_into(data.data, num_before, head[0], seq, 1)
        return data

    def write_state(self, seq: int, payload: Bytes) -> bool:
        """Put such bytes into the empty sequence; False: they do not fit."""
        magic, _, num_streams = _STREAM_HEAD.unpack_from(payload.data)
        assert num_streams == 1, f"a state of {num_streams} streams"
        native = self.map.stream(seq)
        self._settle(native)
        head = np.frombuffer(_STREAM_HEAD.pack(magic, native, self._num_streams), np.uint8)
        others = np.zeros((self._num_streams - 1) * _COUNT_BYTES, np.uint8)
        return self._write(native, np.concatenate((head, payload[_STREAM_HEAD.size :], others)))


def _is_drawn_row(item: PlanItem) -> bool:
    tokens = item.tokens
    return item.takes_candidates and item.num_logits == 1 == len(tokens) and tokens[0] >= 0
