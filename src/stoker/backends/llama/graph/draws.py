"""The largest logits of each row, found in the graph of the step, so that rows stay on the device (SPEC B6).

llama.cpp lets a sampler of a sequence add operations to the graph of each step and copies what these leave of
a row to the host. `DeviceDraws` is such a sampler for every sequence. It finds the best of all rows of the
step at once, sorting as little as it can, and each sequence takes its row of the result: logits, ids, and the
sum of the whole row, which a NaN anywhere in it makes a NaN. A sequence that needs its whole row keeps that.
Of a step of decode rows the first sequence takes the result of all: each that takes one is a copy of its own.

The choice is built into the graph, and the library builds none where it thinks that the last one will do: by
sequences and numbers of tokens. Where a sequence changes its choice meanwhile its sampler is changed for
another one, which makes the library begin anew. Each graph is marked for what CUDA captures of it.
"""

from __future__ import annotations

import ctypes
import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.backends.llama.binding import keeping_lock, llama
from stoker.backends.llama.graph.ggml import F32, I32, GraphTensor, ggml, is_layout_known
from stoker.backends.llama.graph.marks import GraphMarks, LogitRows
from stoker.backends.protocol.backend import NO_CANDIDATES, Candidates
from stoker.errors import EngineError, StepFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from stoker.backends.llama.batch import Natives
    from stoker.backends.protocol.backend import PlanItem, Rows

NUM_CANDIDATES = 64
GROUP = 16
"""Values of a row of which the largest stands for all of them."""
SORTED = NUM_CANDIDATES * GROUP
"""Values that are sorted at a time: what one block of threads of a GPU sorts."""
WIDTH = 2 * NUM_CANDIDATES + 1
"""Numbers of a row's result: logits, ids, sum."""
MIN_VOCAB = 2 * WIDTH
"""A smaller vocabulary's rows are hardly longer than their candidates."""
MAX_VOCAB = 2**24
"""The ids of a larger one are not exact in float32."""
_MIN_ADDED, _MAX_ADDED = 64, 4096
"""Logits that one block of threads adds, of which a whole number makes a row."""

_LOW = -3e38
"""Lower maxima are as good as this one: what is drawn from is never among them."""
_DESCENDING, _MAX = 1, 0  # enum ggml_sort_order, ggml_op_pool
_count_of_row = keeping_lock(llama.llama_get_sampled_logits_count_ith)  # of a call that was waited for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Level:
    """The logits of rows, or the largest of each group of the level below.

    Attributes:
        values: address of a contiguous tensor (num, number of rows), float32.
        num: values of a row.
        margin: so many at each end are of no group, and lower than all that are.
    """

    values: int
    num: int
    margin: int = 0

    def above(self, context: int) -> _Level:
        """Adds the level above; one that will have another above it is made of whole groups."""
        make, num = ggml(), self.num // GROUP
        margin = -num % (2 * GROUP) // 2 if num > SORTED else 0
        values = make.pool_2d(context, self.values, _MAX, GROUP, 1, GROUP, 1, 0, 0)
        if margin:  # which a pool fills with the least of all numbers
            values = make.clamp(context, values, _LOW, math.inf)
            values = make.pool_2d(context, values, _MAX, 1, 1, 1, 1, margin, 0)
        return _Level(values, num + 2 * margin, margin)

    def places(self, context: int) -> int:
        """Adds the number of each value below, float32: of its group, or its id where nothing is below."""
        return ggml().arange(context, -self.margin, self.num - self.margin, 1)


def _best_of(context: int, logits: int, num_vocab: int, num_rows: int) -> int:
    """Adds what finds the best of rows; the address of a tensor of `WIDTH` numbers a row.

    The best of a row are in the groups with the largest maxima, as many as there are best, and these are
    found in the same way among all maxima. Each operation costs more to begin than for what it computes.

    Args:
        context: the graph's ggml_context.
        logits: address of a contiguous tensor, float32.
        num_vocab: its first dimension.
        num_rows: its second.
    """
    make, count = ggml(), NUM_CANDIDATES
    missing = -num_vocab % (2 * GROUP) if num_vocab > SORTED else 0
    bottom = top = _Level(_padded(context, logits, missing, num_rows), num_vocab + missing)
    below = []
    while top.num > SORTED:
        below.append(top)
        top = top.above(context)
    values, num = top.values, top.num
    best = _best_places(context, values, num, num_rows)
    ids = make.cast(context, best, F32) if top is bottom else make.cont(context, best)
    for level in reversed(below):
        shape, num = (GROUP, level.num // GROUP), SORTED
        groups = make.reshape_3d(context, level.values, *shape, num_rows)
        values = make.get_rows(context, groups, make.reshape_2d(context, ids, count, num_rows))
        places = make.reshape_2d(context, level.places(context), *shape)
        ids = make.get_rows(context, places, make.reshape_2d(context, ids, count * num_rows, 1))
        best = _best_places(context, values, num, num_rows)
        ids = make.get_rows(context, make.reshape_3d(context, ids, 1, num, num_rows), best)
        if level is not bottom:
            ids = make.cast(context, ids, I32)
    found = make.get_rows(context, make.reshape_3d(context, values, 1, num, num_rows), best)
    parts = [make.reshape_2d(context, each, count, num_rows) for each in (found, ids)]
    found = make.concat(context, *parts, 0)
    return make.concat(context, found, _sums(context, logits, num_vocab, num_rows), 0)


def _best_places(context: int, values: int, num: int, num_rows: int) -> int:
    """Adds a sort of rows of `num`: an int32 view (`NUM_CANDIDATES`, num_rows) of where the largest are."""
    make = ggml()
    order = make.argsort(context, make.reshape_2d(context, values, num, num_rows), _DESCENDING)
    return make.view_3d(context, order, NUM_CANDIDATES, num_rows, 1, 4 * num, 4 * num * num_rows, 0)


def _sums(context: int, logits: int, num_vocab: int, num_rows: int) -> int:
    """Adds the sum of each row; of a long one first of parts, as one block of threads adds one of them."""
    make, num = ggml(), _num_added(num_vocab)
    if num < num_vocab:
        parts = make.reshape_2d(context, logits, num, num_vocab // num * num_rows)
        logits = make.reshape_2d(context, make.sum_rows(context, parts), num_vocab // num, num_rows)
    return make.sum_rows(context, logits)


@cache
def _num_added(num_vocab: int) -> int:
    """Logits of a part that is added at a time: the most that divide a row, unless they are too few."""
    parts = (num for num in range(min(num_vocab, _MAX_ADDED), _MIN_ADDED - 1, -1) if num_vocab % num == 0)
    return next(parts, num_vocab)


def _padded(context: int, rows: int, missing: int, num_rows: int) -> int:
    """Rows with so many logits more, of -inf."""
    if not missing:
        return rows
    make = ggml()
    nothing = make.scale_bias(context, make.arange(context, 0, missing, 1), 0, -math.inf)
    return make.concat(context, rows, make.repeat_4d(context, nothing, missing, num_rows, 1, 1), 0)


class DeviceDraws:
    """The samplers of one native context. Made before it, attached by its parameters, closed after it.

    Args:
        num_sequences: of the context.
        num_vocab: logits of a row.

    Attributes:
        num_candidates: as in `Draws`.
        max_rows: rows that a native call may compute.
        error: why a graph of the last call could not be built.
    """

    def __init__(self, num_sequences: int, num_vocab: int) -> None:
        self.num_candidates = NUM_CANDIDATES
        self.max_rows = num_sequences
        self._num_vocab = num_vocab
        self._whole = {num_sequences - 1}  # the first graphs, by which buffers are sized, hold both kinds
        self._is_probing = False
        self._last: tuple[Sequence[int], Sequence[int]] = (), ()  # sequences, and tokens of each
        self._last_whole: set[int] = set()
        self._found = np.empty((0, num_vocab), np.float32)
        self._found_address = 0
        self._nothing = np.empty((0, num_vocab), np.float32)
        self._gathers = False  # the first of the rows computed now has what was found of all
        self._are_rows = False  # decode rows alone are computed now
        self._has_gathered = False  # the last graph was built for those
        self._views: dict[int, int] = {}
        self._table = 0
        self._marks = GraphMarks()
        self._is_marked = False
        self._handle: int | None = None
        self._is_unsure = False
        self._is_fresh = True
        self.error: Exception | None = None
        self._interface = llama.llama_sampler_i(
            name=llama.llama_sampler_i_name(lambda _sampler: b"best"),
            apply=llama.llama_sampler_i_apply(lambda _sampler, _candidates: None),
            backend_init=llama.llama_sampler_i_backend_init(lambda _sampler, _type, _count: True),
            backend_apply=llama.llama_sampler_i_backend_apply(self._apply),
        )
        self._resetting = llama.llama_sampler_i.from_buffer_copy(self._interface)
        self._resetting.backend_reset = llama.llama_sampler_i_backend_reset(self._begin_graph)
        self._chains = [self._new_chain(seq) for seq in range(num_sequences)]
        self._replaced: list[int] = []
        self._configs = (llama.llama_sampler_seq_config * num_sequences)()

    def __repr__(self) -> str:
        return f"<DeviceDraws of {len(self._chains)} sequences, whole rows for {sorted(self._whole)}>"

    def attach_to(self, params: Any) -> None:
        """Have a context that is made of these parameters use the samplers."""
        for seq, chain in enumerate(self._chains):
            self._configs[seq].seq_id, self._configs[seq].sampler = seq, chain
        params.samplers, params.n_samplers = self._configs, len(self._configs)
        params.n_outputs_max = params.n_outputs_max_per_seq = self.max_rows

    def detach_from(self, handle: int) -> None:
        """Have the context compute without them."""
        for seq in range(len(self._chains)):
            llama.llama_set_sampler(handle, seq, None)

    def prepare(self, handle: int, items: Sequence[PlanItem], natives: Natives) -> None:
        """Before a native call that computes these items; `natives`: the library's numbers of sequences."""
        self._handle = handle
        seqs = [natives[item.seq] for item in items]
        pairs = list(zip(seqs, items, strict=True))
        whole = {seq for seq, item in pairs if item.num_logits and not item.takes_candidates}
        asked = [(seq, len(item.tokens)) for seq, item in pairs if item.num_logits]
        if self._has_gathered and len(items) > 1 and any(item.num_logits > 1 for item in items):
            self._is_unsure = True  # rows of a sequence are computed apart, and the library changes places
        self._choose_graph(handle, asked, whole, seqs[0])
        self._last = seqs, [len(item.tokens) for item in items]
        self._gathers, self._are_rows = False, all(len(item.tokens) == 1 for item in items)

    def prepare_rows(self, handle: int, span: range) -> None:
        """Likewise, of a token of each of these sequences of the library, whose candidates are wanted."""
        if self._last_whole or self._replaced or self._is_unsure:
            self._choose_graph(handle, zip(span, repeat(1), strict=False), set(), span.start)
        else:
            self._is_fresh, self.error = False, None
        if span != self._last[0]:
            self._last = span, [1] * len(span)
        self._gathers, self._are_rows = len(span) * WIDTH <= self._num_vocab, True

    def _choose_graph(
        self, handle: int, asked: Iterable[tuple[int, int]], whole: set[int], first: int
    ) -> None:
        """Have a graph built for these choices, if the library might use one of others for them."""
        _free(self._replaced)  # no graph knows them any more
        self._replaced, self.error = [], None
        if self._is_unsure or (whole != self._last_whole and self._is_changed(asked, whole)):
            self._begin_anew(handle, first)
        self._is_fresh = self._is_unsure or whole != self._last_whole
        self._whole = self._last_whole = whole
        self._is_unsure = False

    def _is_changed(self, asked: Iterable[tuple[int, int]], whole: set[int]) -> bool:
        """Whether the last graph may be used for a sequence whose choice it does not hold.

        It is not used where one that decoded begins a prompt: the library sees that.
        """
        changed = whole ^ self._last_whole
        last = zip(*self._last, strict=True)
        before = {seq: count for seq, count in last if seq in changed}
        return any(seq in before and not before[seq] == 1 < count for seq, count in asked)

    def _begin_anew(self, handle: int, seq: int) -> None:
        """Have the next graph built: by another sampler of one sequence, which leaves no graph behind."""
        self._replaced = [self._chains[seq]]
        self._chains[seq] = self._new_chain(seq)
        if not llama.llama_set_sampler(handle, seq, _pointer(self._chains[seq])):
            raise EngineError(f"llama.cpp did not take the sampler of sequence {seq}")

    def failed(self) -> None:
        """The call failed: which graph it has left is not known."""
        self._is_unsure = True

    def collect(self, handle: int, items: Sequence[PlanItem]) -> tuple[Rows, Candidates]:
        """Wait for the call; whole rows and candidates of its items, valid until the next one.

        Raises:
            StepFailedError: the context has not taken the samplers.
        """
        num_rows = sum([item.num_logits for item in items])
        if not num_rows:
            llama.llama_synchronize(handle)
            return self._nothing, NO_CANDIDATES
        rows, counts = self._each_row(handle, self._rows(handle, num_rows))
        if self._is_fresh:
            self._check_counts(items, counts)
        if not self._last_whole:
            return self._nothing, _candidates(rows[:, :WIDTH])
        takes = np.repeat([item.takes_candidates for item in items], [item.num_logits for item in items])
        if not takes.any():
            return rows, NO_CANDIDATES
        return rows[~takes], _candidates(rows[takes, :WIDTH])

    def collect_rows(
        self, handle: int, num_rows: int, places: npt.NDArray[np.intp] | None
    ) -> tuple[Rows, Candidates]:
        """As `collect`, of so many rows of which only candidates are wanted; `places`: of these alone."""
        rows = self._rows(handle, num_rows)
        count = _count_of_row(handle, -num_rows)
        if count == num_rows * WIDTH:
            best = _gathered(rows, num_rows)
        else:  # the graph of other rows beside these was used again
            rows, counts = self._each_row(handle, rows)
            assert counts == [WIDTH] * num_rows, f"{self!r}: rows of {counts} numbers"
            best = rows[:, :WIDTH]
        return self._nothing, _candidates(best if places is None else best[places])

    def _rows(self, handle: int, num_rows: int) -> Rows:
        """Wait for the call; a view of what it left, made anew only if that moved."""
        pointer = llama.llama_get_sampled_logits_ith(handle, -num_rows)
        if not pointer:
            raise StepFailedError("llama.cpp has taken no samplers")
        address = ctypes.addressof(pointer.contents)
        if address != self._found_address or num_rows != len(self._found):
            self._found = np.ctypeslib.as_array(pointer, (num_rows, self._num_vocab))
            self._found_address = address
        return self._found

    def _each_row(self, handle: int, rows: Rows) -> tuple[Rows, list[int]]:
        """The same rows, each in its own place, and how many numbers of each count.

        Where a graph of decode rows was used again, its first row has the results of all.
        """
        num_rows = len(rows)
        counts = [_count_of_row(handle, row) for row in range(-num_rows, 0)]
        if 0 not in counts:
            return rows, counts
        apart, widths = np.empty_like(rows), list(counts)
        firsts = [row for row, count in enumerate(counts) if count]
        for row, after in pairwise([*firsts, num_rows]):
            num_gathered = after - row
            if num_gathered == 1:
                apart[row] = rows[row]
                continue
            assert counts[row] == num_gathered * WIDTH, f"{self!r}: rows of {counts} numbers"
            apart[row:after, :WIDTH] = _gathered(rows[row:], num_gathered)
            widths[row:after] = [WIDTH] * num_gathered
        return apart, widths

    def _check_counts(self, items: Sequence[PlanItem], counts: list[int]) -> None:
        """Assert that the graph was built for these choices."""
        expected = [
            WIDTH if each.takes_candidates else self._num_vocab
            for each in items
            for _ in range(each.num_logits)
        ]
        assert counts == expected, f"{self!r}: rows of {counts} numbers"
        self._is_fresh = False

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Graphs that are built meanwhile leave the whole row beside the candidates."""
        self._is_probing = True
        try:
            yield
        finally:
            self._is_probing = False

    def is_right(self, handle: int, num_rows: int) -> bool:
        """Whether the candidates that a probe left are the largest of the rows it left beside them."""
        shape = (num_rows, self._num_vocab)
        whole = np.ctypeslib.as_array(llama.llama_get_sampled_probs_ith(handle, -num_rows), shape)
        found = np.ctypeslib.as_array(llama.llama_get_sampled_logits_ith(handle, -num_rows), shape)
        best = _candidates(found[:, :WIDTH])
        is_broken = np.isnan(whole).any(axis=1)
        if not np.array_equal(is_broken, np.isnan(best.logits[:, 0])) or (best.ids >= self._num_vocab).any():
            return False
        best, whole = best[np.flatnonzero(~is_broken)], whole[~is_broken]
        expected = np.sort(whole, axis=1)[:, : -NUM_CANDIDATES - 1 : -1]
        has_own = np.array_equal(np.take_along_axis(whole, best.ids, axis=1), best.logits)
        is_distinct = all(len(set(row)) == NUM_CANDIDATES for row in best.ids.tolist())
        return has_own and is_distinct and np.array_equal(best.logits, expected)

    def close(self) -> None:
        """Free the samplers; idempotent."""
        chains, self._chains, self._replaced = self._chains + self._replaced, [], []
        _free(chains)

    def _new_chain(self, seq: int) -> int:
        interface = self._interface if seq else self._resetting  # one of them tells when a graph begins
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        sampler = llama.llama_sampler_init(ctypes.byref(interface), ctypes.c_void_p(seq + 1))
        llama.llama_sampler_chain_add(chain, sampler)
        return ctypes.cast(chain, ctypes.c_void_p).value or 0

    def _begin_graph(self, _sampler: object) -> None:
        self._views.clear()
        self._table = 0
        self._is_marked = False
        self._has_gathered = self._gathers

    def _apply(self, sampler: Any, context: int, graph: int, data: Any) -> None:
        """Called by the library for each row of each sequence, once a graph."""
        try:
            self._choose(sampler.contents.ctx - 1, context, graph, data.contents)
        except Exception as error:  # noqa: BLE001 - raised again once native code has returned
            self.error = error

    def _choose(self, seq: int, context: int, graph: int, row: Any) -> None:
        view = GraphTensor.from_address(row.logits)
        if not view.view_src:  # it counts the operations that a sampler may add
            logits = ggml().reshape_2d(context, row.logits, view.ne[0], 1)
            row.logits = _best_of(context, logits, view.ne[0], 1)
            return
        rows = view.view_src.contents  # those of the step and one more, which is padding
        num_rows = rows.ne[1] - 1
        if not self._is_marked:
            num_reused = llama.llama_perf_context(self._handle).n_reused if self._handle else 0
            self._marks.add(context, graph, LogitRows(num_rows, are_alone=self._are_rows), num_reused)
            self._is_marked = True
        if num_rows == 0:
            row.logits = None
            return
        if seq in self._whole:
            return
        if self._is_probing:
            row.probs = row.logits
        at = view.view_offs // rows.nb[1]
        if self._gathers and at:
            row.logits = None  # the first row has it
            return
        if at not in self._views:
            if not self._table:
                source = _contiguous(context, rows.src[0].contents)
                self._table = _best_of(context, source, rows.ne[0], num_rows)
            count = WIDTH * (num_rows if self._gathers else 1)
            self._views[at] = ggml().view_1d(context, self._table, count, 4 * WIDTH * at)
        row.logits = self._views[at]


def _pointer(chain: int) -> Any:
    return ctypes.cast(chain, llama.llama_sampler_p_ctypes)


def _free(chains: Sequence[int]) -> None:
    for chain in chains:
        llama.llama_sampler_free(_pointer(chain))


def _contiguous(context: int, tensor: GraphTensor) -> int:
    address = ctypes.addressof(tensor)
    return address if tensor.nb[1] == 4 * tensor.ne[0] else ggml().cont(context, address)


def _gathered(rows: Rows, num_rows: int) -> Rows:
    """What the first of adjacent rows has of so many."""
    return rows.reshape(-1)[: num_rows * WIDTH].reshape(num_rows, WIDTH)


def _candidates(found: Rows) -> Candidates:
    """What the graph left of some rows, float32 (num_rows, WIDTH)."""
    found = found.copy()  # the next call writes there; rows may lie far apart, and each is touched once
    logits, sums = found[:, :NUM_CANDIDATES], found[:, -1]
    if (is_broken := np.isnan(sums)).any():
        logits[is_broken, 0] = np.nan
    return Candidates(found[:, NUM_CANDIDATES:-1].astype(np.int32), logits)


def open_draws(num_sequences: int, num_vocab: int) -> DeviceDraws | None:
    """The samplers of a context that is to be made; None: its rows are read whole."""
    if not MIN_VOCAB <= num_vocab <= MAX_VOCAB:
        return None
    try:
        if is_layout_known():
            return DeviceDraws(num_sequences, num_vocab)
    except AttributeError as error:  # a function is missing
        _log.warning("rows of logits are read whole: %s", error)
    else:
        _log.warning("rows of logits are read whole: tensors of this llama.cpp are not known")
    return None
