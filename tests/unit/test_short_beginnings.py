"""What a template puts before each first message is computed once, although it is a few tokens only."""

import pytest

import stepping
from stepping import alone
from stoker.backends.fake.backend import FakeBackend
from stoker.cache.prefix_cache import CacheLimits
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource
from stoker.kv.cells import CellPool
from stoker.kv.slots import FIRST_CELLS

HEADER = [60 + at for at in range(20)]
SPACE, OTHER = b"a" * 32, b"b" * 32


class Machine(stepping.Machine):
    """Eight slots, in one pool where the test says nothing else; nothing is stored."""

    def __init__(self, **limits):
        backend = FakeBackend(num_sequences=24, num_cells=4096, n_batch=FIRST_CELLS)
        defaults = {"num_slots": 8, "target_step_s": 1000.0, "background_patience_s": 10_000.0}
        super().__init__(backend, CacheLimits(ram_bytes=0, disk_bytes=0), **defaults | limits)

    def chat(self, letter, num_tokens=3, namespace=SPACE, header=tuple(HEADER)):
        """A first message of its own, forty letters, after the template's header."""
        return self.enter_prompt([*header, *[ord(letter)] * 40], num_tokens, namespace=namespace)

    def begin(self, *sequences):
        """Step until these decode."""
        while not all(sequence.num_generated for sequence in sequences):
            self.step()

    def finish(self):
        """Step until all have ended, each with the text that it has alone."""
        while self.scheduler.has_work:
            self.step()
        for sequence in self.sequences:
            prompt = tuple(sequence.tokens[: sequence.num_prompt])
            assert sequence.tokens == alone(prompt, sequence.num_wanted), sequence


def test_a_first_message_goes_on_from_the_header_of_one_that_has_ended():
    """SPEC C3, C13: all but its own words is at hand."""
    machine = Machine()
    machine.chat("x")
    machine.finish()
    second = machine.chat("y")
    machine.finish()
    assert (second.num_cached, second.cache_source) == (len(HEADER), CacheSource.LIVE)


def test_one_that_runs_shares_it_too():
    """SPEC C3: its cells are read, not copied."""
    machine = Machine()
    machine.begin(machine.chat("x", 60))
    used = machine.scheduler.cells.used
    second = machine.chat("y", 1)
    machine.begin(second)
    assert (second.num_cached, second.cache_source) == (len(HEADER), CacheSource.SHARED)
    assert machine.scheduler.cells.used - used < 40 + 10
    machine.finish()


def test_a_conversation_keeps_all_of_its_own():
    """SPEC C6: what only begins like it does not take its place."""
    machine = Machine()
    first = machine.chat("x")
    machine.finish()
    machine.chat("y")
    machine.finish()
    third = machine.enter_prompt([*first.tokens, *b"and then?"], namespace=SPACE)
    machine.finish()
    assert third.num_cached == first.num_computed > 60


@pytest.mark.parametrize(("num_others", "num_cached"), [(FIRST_CELLS // 2, len(HEADER)), (FIRST_CELLS, 0)])
def test_a_header_far_back_in_the_pool_is_computed_anew(num_others, num_cached):
    """SPEC C3: while it is in use each step would walk up to it, also when nothing else is there."""
    machine = Machine()
    machine.begin(machine.enter_prompt([33] * num_others))
    machine.chat("x")
    machine.finish()
    second = machine.chat("y")
    machine.finish()
    assert second.num_cached == num_cached


def test_one_shared_from_far_back_lies_there_still():
    """SPEC C3: its cells are where they were, whoever has them now and whatever was before it has gone."""
    machine = Machine()
    machine.begin(machine.enter_prompt([33] * FIRST_CELLS))
    long_header = (*HEADER, *range(200, 212))
    machine.begin(machine.chat("x", 400, header=long_header))
    second = machine.chat("y", 400, header=long_header)
    machine.begin(second)
    assert second.num_cached == len(long_header), "from thirty-two tokens on it is worth it wherever it lies"
    machine.scheduler.retire(machine.sequences[1], FinishReason.CANCELLED, machine.now)
    third = machine.chat("z")
    machine.begin(third)
    assert third.num_cached == 0


def test_what_is_apart_stays_apart():
    """SPEC C10: another key's header tells nothing."""
    machine = Machine()
    machine.chat("x")
    machine.finish()
    second = machine.chat("y", namespace=OTHER)
    machine.finish()
    assert second.num_cached == 0


@pytest.mark.parametrize("limits", [{"has_streams": True}, {"can_trim": False}, {"can_fork": False}])
def test_where_sharing_copies_or_is_not_possible_it_is_computed(limits):
    """SPEC C3, C15."""
    machine = Machine(**limits)
    machine.chat("x")
    machine.finish()
    second = machine.chat("y")
    machine.finish()
    assert second.num_cached == 0


def test_the_pool_knows_what_lies_before_a_sequence():
    """SPEC C3: in whatever parts it was taken, split and shared."""
    pool = CellPool(100)
    pool.extend(0, 10)
    pool.extend(1, 5)
    pool.extend(0, 10)
    pool.fork(1, 2, 3)
    pool.extend(2, 4)
    pool.drop(0)
    assert [pool.num_before(seq) for seq in range(4)] == [0, 10, 10, 0]
    pool.drop(1)
    assert pool.num_before(2) == 10
    pool.check()
