"""Which native stream holds which sequence, where each stream is a sequence's own cells.

A step is cheapest where its sequences lie in consecutive streams: llama.cpp computes the next token of
consecutive streams in one forward pass, and cuts the step at every gap. So sequences that begin take streams
beside those that run, and what only keeps something there goes out of their way. Other gaps are closed by
copying streams, as soon as the passes that they have cost took as long as all the copies will. Pure
bookkeeping: what lies in the streams, and how it is copied, is the backend's.

A step of prompts of several lengths is cut where each of them ends. `evened` says how long they have to be
for few passes: what is computed in vain costs less than the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import lt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MOST_COPIES = 8
"""Copies that `close_gaps` makes before one step; the rest are made before the next ones."""
COPIES_A_PASS = 8
"""Streams that are copied in the time of a pass: 0.7 to 1 ms each on an H100 and an H200, where a pass of
prompts takes 7 to 18 ms, and one of decode rows, whose graph is another each time, 5."""
COPIES_A_NEWCOMER = 4
"""Streams that are copied for each sequence that begins, at most."""
PASSES_TO_COME = 4
"""What is apart when it begins costs so many passes, about, before the gap would be closed."""
_ROUND = 8
"""Rows of a step are computed in multiples of this where there are more, so that a newcomer finds a place."""


def span(streams: Sequence[int], last: range, num_streams: int) -> range:
    """Consecutive streams to compute a token of: one pass, and mostly the shape of the last step.

    A graph for another number of rows is built anew, which takes a device's library as long as a step; a row
    in vain costs next to nothing. So the last span stays while three quarters of it are
    wanted, and a new one has a third more than is wanted at the most.

    Args:
        streams: those that are wanted, ascending, at least one.
        last: the span of the last step; empty: it had none.
        num_streams: how many there are.

    Returns:
        The span; empty where these lie too far apart for one.
    """
    first, stop = streams[0], streams[-1] + 1
    if last.start <= first and stop <= last.stop and 4 * len(streams) >= 3 * len(last):
        return last
    wide = first + max(stop - first, -(-len(streams) // _ROUND) * _ROUND)
    for end in (min(wide, num_streams), stop):
        if 3 * (end - first) <= 4 * len(streams):
            return range(first, end)
    return range(0)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy all of stream `src` to stream `dst`; `src` is free then."""

    src: int
    dst: int


def num_passes(counts: Mapping[int, int], n_ubatch: int) -> int:
    """Forward passes that llama.cpp makes of so many tokens by stream, `n_ubatch` in each at most.

    Each takes the first of the streams that have tokens left and those next to it without a gap, and as many
    tokens of each as the shortest has (`llama_batch_allocr::split_equal`).
    """
    left, found = dict(sorted(counts.items())), 0
    while left:
        streams = _first_run(left)
        taken = min(max(1, n_ubatch // len(streams)), *(left[stream] for stream in streams))
        for stream in streams:
            left[stream] -= taken
            if not left[stream]:
                del left[stream]
        found += 1
    return found


PASS_TOKENS = 256
"""Tokens that take about as long as one pass more: 5 to 8 ms for the graph of another shape, measured on an
H100 that reads 50,000 tokens a second."""
_UNITS = (16, 64, 256)


def evened(counts: Mapping[int, int], rooms: Mapping[int, int], n_ubatch: int, most: int) -> dict[int, int]:
    """Lengths for a step that is computed sooner, although it has more tokens.

    Args:
        counts: tokens of the step by stream.
        rooms: tokens that each stream has room for.
        n_ubatch: tokens of a pass.
        most: tokens of a step.

    Returns:
        As many tokens as there are, or more, by stream; a single token stays one.
    """
    best, least = dict(counts), _cost(counts, n_ubatch)
    for unit in (*_UNITS, max(counts.values())):
        wanted = {
            stream: count if count == 1 else max(count, min(-(-count // unit) * unit, rooms[stream]))
            for stream, count in counts.items()
        }
        if sum(wanted.values()) <= most and (cost := _cost(wanted, n_ubatch)) < least:
            best, least = wanted, cost
    return best


def _cost(counts: Mapping[int, int], n_ubatch: int) -> int:
    """Of a step, in tokens."""
    return sum(counts.values()) + PASS_TOKENS * num_passes(counts, n_ubatch)


def _runs(streams: Iterable[int]) -> Iterator[list[int]]:
    """Ascending streams, parted at every gap."""
    run: list[int] = []
    for stream in streams:
        if run and stream != run[-1] + 1:
            yield run
            run = []
        run.append(stream)
    if run:
        yield run


def _first_run(streams: Iterable[int]) -> list[int]:
    """The first of ascending streams, at least one, and those that follow it without a gap."""
    return next(_runs(streams))


class StreamMap:
    """The streams of `num_sequences` sequences. There is one more: a copy finds a free one at any time.

    Args:
        num_sequences: how many there may be.
        n_ubatch: tokens of a pass.
        copies_a_pass: streams that are copied in the time of a pass.

    Attributes:
        streams: that of each sequence which has one; read only.
        num_changes: how often a stream has changed hands.
    """

    def __init__(self, num_sequences: int, n_ubatch: int, copies_a_pass: int = COPIES_A_PASS) -> None:
        self._n_ubatch, self._copies_a_pass = n_ubatch, copies_a_pass
        self.streams: dict[int, int] = {}
        self.num_changes = 0
        self._free = set(range(num_sequences + 1))
        self._last: frozenset[int] = frozenset()  # streams of the last step
        self._seqs: frozenset[int] = frozenset()  # sequences of the last step
        self._is_gathered = False  # these are consecutive, and no stream has changed hands since
        self._in_order: list[int] = []  # sequences that were in the order of their streams, likewise
        self._num_wasted = 0  # passes that gaps have cost these
        self._had_gaps = False  # these ran with gaps in an earlier step

    def __repr__(self) -> str:
        return f"<StreamMap {self.streams}, {len(self._free)} free>"

    def stream(self, seq: int) -> int:
        """The stream of a sequence; one that has none gets the free one with most neighbours that run."""
        found = self.streams.get(seq)
        if found is None:
            found = min(self._free, key=lambda free: (-self._num_neighbours(free), free))
            self._take(seq, found)
        return found

    def _take(self, seq: int, stream: int) -> None:
        self._free.remove(stream)
        self.streams[seq] = stream
        self._changed()

    def _take_adjacent(self, seqs: Sequence[int]) -> None:
        """Give sequences that have no stream consecutive ones, if there are so many free."""
        starts = [
            start for start in self._free if all(start + place in self._free for place in range(1, len(seqs)))
        ]
        if not starts:
            return
        width = len(seqs)
        first = min(starts, key=lambda at: (-(at - 1 in self._last) - (at + width in self._last), at))
        for stream, seq in enumerate(seqs, start=first):
            self._take(seq, stream)

    def _num_neighbours(self, stream: int) -> int:
        return (stream - 1 in self._last) + (stream + 1 in self._last)

    @property
    def a_free_one(self) -> int:
        """A stream that no sequence has."""
        return min(self._free)

    def forget(self, seq: int) -> None:
        """Free the sequence's stream, if it has one."""
        stream = self.streams.pop(seq, None)
        if stream is not None:
            self._free.add(stream)
            self._changed()

    def ran(self, seqs: Iterable[int]) -> None:
        """A step of these sequences needed no gap closed; newcomers get streams beside theirs."""
        self._last = frozenset(self.streams[seq] for seq in seqs)

    def _changed(self) -> None:
        self.num_changes += 1
        self._is_gathered, self._in_order = False, []

    def order(self, seqs: Iterable[int]) -> Sequence[int]:
        """The places of these sequences in the order of their streams; a range where they are in order."""
        asked = list(seqs)
        places = range(len(asked))
        if asked == self._in_order:
            return places
        newcomers = [seq for seq in asked if seq not in self.streams]
        if len(newcomers) > 1:
            self._take_adjacent(newcomers)
        streams = [self.stream(seq) for seq in asked]
        if all(map(lt, streams, streams[1:])):
            self._in_order = asked
            return places
        return sorted(places, key=streams.__getitem__)

    def begin(self, seqs: Sequence[int]) -> list[Copy]:
        """What to copy, in order, before a step of these, so that those that begin make no gap.

        It counts as done. Those that begin have nothing to be copied: they take whatever streams the fewest
        copies make free.
        """
        newcomers = [seq for seq in seqs if seq not in self.streams]
        if not newcomers or len(seqs) == 1:
            return []
        running = frozenset(self.streams[seq] for seq in seqs if seq in self.streams)
        window, copies = self._gathered(running, len(newcomers))
        num_saved = PASSES_TO_COME * (self._num_apart(running, len(newcomers)) - 1)
        each = min(self._copies_a_pass, COPIES_A_NEWCOMER)
        if len(copies) > min(self._copies_a_pass * num_saved, each * len(newcomers)):
            return []
        for copy in copies:
            self._moved(copy)
        for seq, stream in zip(newcomers, sorted(self._free.intersection(window)), strict=True):
            self._take(seq, stream)
        return copies

    def _num_apart(self, running: frozenset[int], num_new: int) -> int:
        """Into how many parts these streams fall, and so many free ones, chosen for few, without copies."""
        taken = set(running)
        for run in sorted(_runs(sorted(self._free)), key=len, reverse=True):
            taken.update(run[: num_new - (len(taken) - len(running))])
        return len(list(_runs(sorted(taken))))

    def close_gaps(self, counts: Mapping[int, int]) -> list[Copy]:
        """What to copy, in order, before a step of so many tokens by sequence; counted as done.

        Nothing as long as the gaps have cost less time than all the copies take; in the first step with
        gaps, as long as they cost fewer passes than there are copies.
        """
        if self._is_gathered and counts.keys() == self._seqs:
            return []
        seqs = frozenset(counts)
        if not (seqs <= self._seqs or self._seqs <= seqs):
            self._num_wasted, self._had_gaps = 0, False  # others take turns, and what pays may not for them
        self._seqs = seqs
        by_stream = {self.stream(seq): count for seq, count in counts.items()}
        self._last = frozenset(by_stream)
        self._is_gathered = len(_first_run(sorted(by_stream))) == len(by_stream)
        if self._is_gathered:
            self._num_wasted, self._had_gaps = 0, False
            return []
        _, copies = self._gathered(self._last)
        places = {copy.src: copy.dst for copy in copies}
        gathered = {places.get(stream, stream): count for stream, count in by_stream.items()}
        num_saved = num_passes(by_stream, self._n_ubatch) - num_passes(gathered, self._n_ubatch)
        if num_saved <= 0:
            return []
        self._num_wasted += num_saved
        worth = max(1, self._copies_a_pass) if self._had_gaps else 1
        self._had_gaps = True
        if self._num_wasted * worth < len(copies):
            return []
        del copies[MOST_COPIES:]
        for copy in copies:
            self._moved(copy)
        self._last = frozenset(self.streams[seq] for seq in counts)
        return copies

    def _gathered(self, running: frozenset[int], num_new: int = 0) -> tuple[range, list[Copy]]:
        """Where these streams, and so many that hold nothing, follow each other after the fewest copies."""
        width, num_streams = len(running) + num_new, len(self.streams) + len(self._free)
        windows = (range(start, start + width) for start in range(num_streams - width + 1))
        window = min(windows, key=lambda window: self._num_copies(window, running))
        outside = sorted(running.difference(window))
        holes = [stream for stream in window if stream not in running]
        spare = sorted(self._free.difference(window))
        copies: list[Copy] = []
        for hole in sorted(holes, key=lambda hole: hole not in self._free):
            if hole not in self._free:  # what waits there goes elsewhere first
                copies.append(Copy(hole, spare.pop()))
            if outside:
                copies.append(Copy(outside.pop(), hole))
                spare.append(copies[-1].src)
        return window, copies

    def _num_copies(self, window: range, running: frozenset[int]) -> int:
        """One for each that comes in, and one for each that has to leave before."""
        kept = [stream for stream in window if not (stream in running or stream in self._free)]
        return len(kept) + sum(stream not in window for stream in running)

    def _moved(self, copy: Copy) -> None:
        seq = next(seq for seq, stream in self.streams.items() if stream == copy.src)
        self.streams[seq] = copy.dst
        self._free.remove(copy.dst)
        self._free.add(copy.src)
        self._changed()

    def check(self) -> None:
        """Assert that every stream is free or one sequence's."""
        held = list(self.streams.values())
        assert len(held) == len(set(held)), f"two sequences in one stream: {self!r}"
        assert not self._free & set(held), f"a stream in use is free: {self!r}"
        assert self._free, f"no stream is free: {self!r}"
