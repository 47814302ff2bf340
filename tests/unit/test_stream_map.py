"""Which stream a sequence gets, and when gaps between the streams of a step are closed."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING

import pytest

from stoker.backends.stream_map import (
    COPIES_A_NEWCOMER,
    COPIES_A_PASS,
    MOST_COPIES,
    PASSES_TO_COME,
    Copy,
    StreamMap,
    evened,
    num_passes,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

N_UBATCH = 512


class Native:
    """Streams with a text each, copied as the map says; a step makes passes as llama.cpp does."""

    def __init__(self, num_sequences: int) -> None:
        self.map = StreamMap(num_sequences, N_UBATCH)
        self.contents: list[int | None] = [None] * (num_sequences + 1)

    def begin(self, seq: int) -> None:
        """The sequence gets its first token."""
        stream = self.map.stream(seq)
        assert self.contents[stream] in {None, seq}, f"stream {stream} is not free"
        self.contents[stream] = seq

    def drop(self, seq: int) -> None:
        """It is forgotten."""
        if seq in self.map.streams:
            self.contents[self.map.stream(seq)] = None
        self.map.forget(seq)

    def step(self, counts: dict[int, int]) -> tuple[int, int]:
        """Copies and passes of a step."""
        copies = self.map.begin(list(counts))
        self._carry_out(copies)
        for seq in counts:
            self.begin(seq)
        closing = self.map.close_gaps(counts)
        self._carry_out(closing)
        copies += closing
        self.check()
        by_stream = {self.map.stream(seq): count for seq, count in counts.items()}
        return len(copies), num_passes(by_stream, N_UBATCH)

    def _carry_out(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            assert self.contents[copy.dst] is None, f"{copy} overwrites {self.contents[copy.dst]}"
            assert self.contents[copy.src] is not None, f"{copy} copies nothing"
            self.contents[copy.dst], self.contents[copy.src] = self.contents[copy.src], None

    def check(self) -> None:
        """Each sequence's text is where the map says."""
        self.map.check()
        for seq, stream in self.map.streams.items():
            assert self.contents[stream] == seq, f"{self.map!r} but {self.contents}"


@pytest.mark.parametrize(
    ("counts", "passes"),
    [
        ({3: 1}, 1),
        ({0: 1, 1: 1, 2: 1}, 1),
        ({2: 1, 0: 1, 1: 1}, 1),
        ({0: 1, 2: 1}, 2),
        ({0: 1, 1: 1, 4: 1, 5: 1, 7: 1}, 3),
        ({0: 1, 1: 1, 2: 100}, 2),
        ({0: 1, 1: 1, 7: 100}, 2),
        ({0: 100, 1: 100, 2: 1}, 2),
        ({0: 100, 1: 50, 2: 1}, 3),
        ({0: 100, 1: 1, 2: 100}, 3),
        ({0: 1, 1: 600}, 3),
        ({0: 400, 1: 400}, 2),
    ],
)
def test_the_next_tokens_of_consecutive_streams_are_one_pass(counts: dict[int, int], passes: int) -> None:
    """SPEC C15: what the native library makes of a step is known before it; contract tests compare them."""
    assert num_passes(counts, N_UBATCH) == passes


def test_a_sequence_that_begins_takes_a_stream_beside_those_that_run() -> None:
    """SPEC C15: so most gaps never come to be."""
    native = Native(8)
    native.step(dict.fromkeys(range(6), 1))
    native.drop(1)
    native.drop(4)
    native.step({2: 1, 3: 1})
    native.begin(6)
    assert native.map.stream(6) == 1
    native.begin(7)
    assert native.map.stream(7) == 4
    assert native.step(dict.fromkeys((2, 3, 6, 7), 1)) == (0, 1)


def test_a_gap_is_closed_once_it_has_cost_as_many_passes_as_copies() -> None:
    """SPEC C15: one pass too many, then one copy, then none."""
    native = Native(4)
    native.step(dict.fromkeys(range(4), 1))
    native.drop(1)
    assert native.step({0: 1, 2: 1, 3: 1}) == (1, 1)
    native.drop(2)
    native.begin(1)  # where it is no neighbour it may wait
    assert native.step({0: 1, 3: 1}) == (0, 1)


def test_what_waits_in_a_gap_makes_way_when_that_pays() -> None:
    """SPEC C15: two copies for one gap, so after two steps of two passes."""
    native = Native(5)
    native.step(dict.fromkeys(range(5), 1))
    assert [native.step(dict.fromkeys((0, 1, 3, 4), 1)) for _ in range(3)] == [(0, 2), (2, 1), (0, 1)]


def test_a_prompt_apart_from_the_decode_rows_is_not_copied() -> None:
    """SPEC C15: its slice is a pass of its own in any case."""
    native = Native(6)
    native.step(dict.fromkeys(range(6), 1))
    for seq in (2, 3, 4):
        native.drop(seq)
    assert [native.step({0: 1, 1: 1, 5: 64}) for _ in range(9)] == [(0, 2)] * 9


def test_steps_that_take_turns_do_not_copy_in_each() -> None:
    """SPEC C15: what a step would gain, the next one with other sequences would lose."""
    native = Native(8)
    native.step(dict.fromkeys(range(8), 1))
    told = [native.step({0: 1, 2: 1, 4: 1, 5 + turn % 3: 1}) for turn in range(60)]
    assert sum(copies for copies, _ in told) <= MOST_COPIES
    assert max(passes for _, passes in told) <= 4


def test_no_step_waits_for_more_than_a_few_copies() -> None:
    """SPEC C15: many gaps are closed over several steps."""
    native = Native(64)
    native.step(dict.fromkeys(range(64), 1))
    for seq in range(0, 64, 2):
        native.drop(seq)
    told = [native.step(dict.fromkeys(range(1, 64, 2), 1)) for _ in range(6)]
    assert max(copies for copies, _ in told) == MOST_COPIES
    assert told[-1] == (0, 1)
    assert [passes for _, passes in told] == sorted((passes for _, passes in told), reverse=True)


@pytest.mark.parametrize("seed", range(30))
def test_no_text_is_lost_whatever_comes_and_goes(seed: int) -> None:
    """SPEC C15: random sequences begin, run in any company and end; copies overwrite nothing."""
    random = Random(seed)
    native = Native(random.randint(1, 12))
    num_sequences = len(native.contents) - 1
    for _ in range(400):
        seqs = random.sample(range(num_sequences), random.randint(1, num_sequences))
        if random.random() < 0.4:
            native.drop(seqs[0])
            native.check()
        else:
            native.step({seq: random.choice([1, 1, 1, 5, 40]) for seq in seqs})


def test_the_same_step_comes_to_one_pass() -> None:
    """SPEC C15: whatever was before it, and with as few copies as sequences."""
    for seed in range(40):
        random = Random(seed)
        native = Native(10)
        for seq in random.sample(range(10), 10):
            native.begin(seq)
        for seq in random.sample(range(10), 4):
            native.drop(seq)
        running = dict.fromkeys(random.sample(sorted(native.map.streams), 4), 1)
        told = [native.step(running) for _ in range(10)]
        assert told[-1] == (0, 1)
        assert sum(copies for copies, _ in told) <= 2 * len(running)


def test_sequences_that_begin_together_take_consecutive_streams() -> None:
    """SPEC C17: beside those that run, and not in the gaps between them."""
    native = Native(16)
    native.step(dict.fromkeys(range(6), 1))
    native.drop(1)
    native.drop(3)
    native.step({0: 1, 2: 1, 4: 1, 5: 1})
    native.map.order([0, 2, 4, 5, 10, 11, 12, 13])
    assert [native.map.stream(seq) for seq in range(10, 14)] == [6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_only_kept_makes_way_for_those_that_begin(seed: int) -> None:
    """SPEC C15: a crowd among streams that keep something was a pass for each gap, in every step."""
    random, native = Random(seed), Native(72)
    for seq in random.sample(range(72), 72):
        native.begin(seq)
    running: list[int] = []
    for _ in range(12):
        kept = [seq for seq in range(72) if seq not in running]
        newcomers = random.sample(kept, random.randrange(1, min(len(kept), 30) + 1))
        for seq in newcomers:
            native.drop(seq)
        left_apart = passes_without_copies(native, running + newcomers)
        num_copies, _ = native.step(dict.fromkeys(running + newcomers, 1))
        bound = min(COPIES_A_PASS * PASSES_TO_COME * (left_apart - 1), COPIES_A_NEWCOMER * len(newcomers))
        assert num_copies <= bound + MOST_COPIES
        running += newcomers
        for _ in range(2 * MOST_COPIES):
            num_copies, num_passes_ = native.step(dict.fromkeys(running, 1))
        assert (num_copies, num_passes_) == (0, 1)
        running = random.sample(running, random.randrange(len(running) + 1))


def test_two_halves_of_a_crowd_come_together_in_a_few_steps() -> None:
    """SPEC C15: 32 rows of which 15 are apart were two passes for as many steps as there were copies."""
    native = Native(72)
    for seq in range(72):
        native.begin(seq)
    running = dict.fromkeys([*range(17), *range(40, 55)], 1)
    told = [native.step(running) for _ in range(8)]
    assert sum(passes > 1 for _, passes in told) <= 6
    assert told[-1] == (0, 1)
    assert max(copies for copies, _ in told) <= MOST_COPIES


def passes_without_copies(native: Native, seqs: Sequence[int]) -> int:
    """Of a token of each of these, where those that have no stream take whatever is free."""
    streams = deepcopy(native.map)
    streams.order(seqs)
    return num_passes({streams.stream(seq): 1 for seq in seqs}, N_UBATCH)


def test_many_that_begin_beside_others_are_one_pass_as_well() -> None:
    """SPEC C15: four passes of 16 ms each for 35 prompts, on an H200, where their copies take 12 in all."""
    for seed in range(50):
        random, native = Random(seed), Native(72)
        running = list(range(15))
        for seq in [*running, *random.sample(range(15, 72), 57)]:
            native.begin(seq)
        newcomers = random.sample(range(15, 72), 35)
        for seq in newcomers:
            native.drop(seq)
        assert passes_without_copies(native, newcomers) > 3
        assert native.step(dict.fromkeys(newcomers, 1))[1] == 1


def test_those_that_begin_wait_for_as_many_copies_as_their_gaps_are_worth_and_no_more() -> None:
    """SPEC C15: a gap is a pass in this step, and in those to come until it is closed."""
    most = COPIES_A_PASS * PASSES_TO_COME
    for num_between, num_passes_ in ((most, 1), (most + 1, 2)):
        native = Native(100 + num_between)
        native.step(dict.fromkeys(range(100 + num_between), 1))
        newcomers = [*range(50), *range(50 + num_between, 100 + num_between)]
        for seq in newcomers:
            native.drop(seq)
        assert native.step(dict.fromkeys(newcomers, 1))[1] == num_passes_


def test_eight_that_begin_among_72_kept_streams_are_one_pass() -> None:
    """SPEC C15: five passes of the prompts, and of each of the first steps after them, on an H100."""
    for seed in range(50):
        random, native = Random(seed), Native(72)
        for seq in random.sample(range(72), 72):
            native.begin(seq)
        newcomers = random.sample(range(72), 8)
        for seq in newcomers:
            native.drop(seq)
        num_copies, num_passes_ = native.step(dict.fromkeys(newcomers, 66))
        assert num_copies <= MOST_COPIES
        assert num_passes_ == 2, "528 tokens in calls of 512"


def test_where_no_free_streams_are_consecutive_newcomers_take_those_there_are() -> None:
    """SPEC C17: gaps are closed later."""
    native = Native(6)
    native.step(dict.fromkeys(range(6), 1))
    for seq in (0, 2, 4):
        native.drop(seq)
    native.map.order([7, 8, 9])
    assert sorted(native.map.stream(seq) for seq in (7, 8, 9)) == [0, 2, 4]
    native.map.check()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([66, 84, 70], [84, 84, 84]),
        ([66], [66]),
        ([1, 1, 70, 84], [1, 1, 84, 84]),
        ([70, 2000], [70, 2000]),
        ([512, 512], [512, 512]),
        ([60, 64, 400, 390], [64, 64, 400, 400]),
    ],
)
def test_prompts_are_brought_to_lengths_of_few_passes(counts: list[int], expected: list[int]) -> None:
    """SPEC C17: unless what is computed in vain costs more than the passes; a next token is one token."""
    by_stream = dict(enumerate(counts))
    found = evened(by_stream, dict.fromkeys(by_stream, 4096), N_UBATCH, 8192)
    assert num_passes(found, N_UBATCH) == num_passes(dict(enumerate(expected)), N_UBATCH)
    assert sum(found.values()) <= sum(expected) + 32
    assert all(found[stream] >= count for stream, count in by_stream.items())


def test_64_prompts_of_66_to_84_tokens_take_11_passes_and_not_one_each() -> None:
    """SPEC C17: as many as prompts of 84 tokens."""
    random = Random(1)
    counts = {stream: random.randint(66, 84) for stream in range(64)}
    assert num_passes(counts, N_UBATCH) > 50
    assert num_passes(evened(counts, dict.fromkeys(counts, 4096), N_UBATCH, 8192), N_UBATCH) == 11


@pytest.mark.parametrize("seed", range(100))
def test_no_stream_is_brought_beyond_its_room_nor_the_step_beyond_its_own(seed: int) -> None:
    """SPEC C17: and none comes out shorter."""
    random = Random(seed)
    counts = {stream: random.choice([1, random.randint(2, 300)]) for stream in range(random.randint(1, 20))}
    rooms = {stream: count + random.randint(0, 40) for stream, count in counts.items()}
    most = sum(counts.values()) + random.randint(0, 500)
    found = evened(counts, rooms, N_UBATCH, most)
    assert sum(found.values()) <= most
    assert all(counts[stream] <= found[stream] <= rooms[stream] for stream in counts)
    assert num_passes(found, N_UBATCH) <= num_passes(counts, N_UBATCH)


def test_a_newcomer_gets_a_stream_beside_those_of_the_last_step() -> None:
    """SPEC C15: also where that step needed no gap closed; the rows in vain are where a newcomer is then."""
    streams = StreamMap(12, N_UBATCH)
    for seq in range(8):
        streams.stream(seq)
    for seq in (1, 2, 3, 6):
        streams.forget(seq)
    streams.ran([4, 5, 7])
    assert [streams.stream(seq) for seq in (8, 9)] == [6, 3]
    streams.check()


NO_SPAN = range(0)


@pytest.mark.parametrize(
    ("streams", "last", "expected"),
    [
        (range(64), NO_SPAN, range(64)),
        ([*range(20), *range(21, 64)], range(64), range(64)),
        (range(16, 64), range(64), range(64)),
        (range(17, 64), range(64), range(17, 65)),
        ([1, 2, 3, 5], NO_SPAN, range(1, 6)),
        ([0, 4], NO_SPAN, NO_SPAN),
        ([0], range(2), range(1)),
        (range(7), NO_SPAN, range(8)),
        (range(33), NO_SPAN, range(40)),
        (range(66, 73), NO_SPAN, range(66, 73)),
    ],
    ids=[
        "a crowd is its own",
        "one that ended is filled",
        "as long as three quarters go on",
        "then it is smaller, in whole eights",
        "a gap is filled",
        "two far apart have none",
        "one of two is alone",
        "a newcomer finds a place",
        "as long as it is not too many",
        "and there are so many streams",
    ],
)
def test_the_span_of_a_step(streams: Sequence[int], last: range, expected: range) -> None:
    """SPEC C15: the last one while most of it is wanted, else one that is little wider than it has to be."""
    assert span(list(streams), last, 73) == expected


@pytest.mark.parametrize("seed", range(200))
def test_a_span_holds_all_that_is_wanted_and_little_else(seed: int) -> None:
    """SPEC C15: in any history of rows that come and go."""
    random, last = Random(seed), NO_SPAN
    for _ in range(30):
        count = random.randint(1, 40)
        first = random.randint(0, 40 - count)
        streams = sorted(random.sample(range(first, 40), max(1, count - random.randint(0, 6))))
        found = span(streams, last, 40)
        if len(found):
            assert set(streams) <= set(found)
            assert 3 * len(found) <= 4 * len(streams)
            assert found.stop <= 40
        else:
            assert 3 * (streams[-1] - streams[0] + 1) > 4 * len(streams)
        last = found
