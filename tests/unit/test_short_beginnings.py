"""What a template puts before each first message is computed once, although it is a few tokens only."""

import pytest

import stepping
from stepping import alone
from stoker.backends.fake.backend import FakeBackend
from stoker.cache.prefix_cache import CacheLimits
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource
from stoker.kv.cells import CellPool, SchedulerLimits
from stoker.kv.ops import Schedule
from stoker.kv.slots import FEW_TOKENS, FIRST_CELLS, SlotPlacement, SlotTable

HEADER = [60 + at for at in range(20)]
SPACE, OTHER = b"a" * 32, b"b" * 32


class Machine(stepping.Machine):
    """Eight slots, in one pool where the test says nothing else; nothing is stored without `ram_bytes`."""

    def __init__(self, ram_bytes=0, num_sequences=24, **limits):
        backend = FakeBackend(num_sequences=num_sequences, num_cells=4096, n_batch=FIRST_CELLS)
        defaults = {"num_slots": 8, "target_step_s": 1000.0, "background_patience_s": 10_000.0}
        super().__init__(backend, CacheLimits(ram_bytes=ram_bytes, disk_bytes=0), **defaults | limits)

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


@pytest.mark.parametrize(("num_common", "num_cached"), [(FEW_TOKENS - 1, 0), (FEW_TOKENS, FEW_TOKENS)])
def test_texts_that_only_begin_with_the_same_token_share_nothing(num_common, num_cached):
    """SPEC C13: nobody is told of a hit that saved him nothing."""
    machine = Machine()
    machine.chat("x", header=HEADER[:num_common])
    machine.finish()
    second = machine.chat("y", header=HEADER[:num_common])
    machine.finish()
    assert second.num_cached == num_cached


@pytest.mark.parametrize("num_common", [32, 40, 51])
def test_a_crowd_with_more_in_common_than_the_header_computes_that_once(num_common):
    """SPEC C4: that a few of its tokens are at hand is no reason to compute the rest many times."""
    machine = Machine()
    machine.chat("x")
    machine.finish()
    before = int(machine.scheduler.prefix_statistics.stats()["prompt_tokens_computed_total"])
    common = [*HEADER, *[64] * (num_common - len(HEADER))]
    for letter in b"abcdefgh":
        machine.enter_prompt([*common, *[letter] * 8], namespace=SPACE)
    machine.finish()
    after = int(machine.scheduler.prefix_statistics.stats()["prompt_tokens_computed_total"])
    assert after - before == num_common - len(HEADER) + 8 * 8


def test_a_stored_state_that_has_more_is_used_although_a_few_are_at_hand():
    """SPEC C5: a state of thirty-two tokens is worth it beside twenty in cells."""
    machine = Machine(ram_bytes=2**24)
    first = machine.enter_prompt([*HEADER, *b"twelve more!"], 1, namespace=SPACE)
    machine.finish()
    turn = Schedule()
    assert machine.scheduler.allocator.evict_oldest(turn.ops)
    machine.carry_out(turn)
    machine.chat("x")
    machine.finish()
    again = machine.enter_prompt([*first.tokens, *b"go on"], namespace=SPACE)
    machine.finish()
    assert (again.num_cached, again.cache_source) == (32, CacheSource.RAM)


def test_the_only_place_is_stored_before_a_few_of_its_tokens_stay():
    """SPEC C6: a conversation that its own slot is taken from for another is not lost."""
    machine = Machine(ram_bytes=2**24, num_slots=1, num_sequences=1)
    header = range(100, 131)
    first = machine.enter_prompt([*header, *b"a short question"], namespace=SPACE)
    machine.finish()
    machine.chat("y", header=header)
    machine.finish()
    again = machine.enter_prompt([*first.tokens, *b"and then?"], namespace=SPACE)
    machine.finish()
    assert again.num_cached == first.num_computed < 62


def test_what_idle_slots_keep_is_counted_anew_where_a_part_of_it_is_shared(monkeypatch):
    """SPEC Q10: whoever asks next in the turn is judged by what is true then."""
    machine = Machine()
    machine.chat("x")
    machine.finish()
    machine.begin(machine.enter_prompt([33] * 40, 100))
    allocator, num_checked = machine.scheduler.allocator, 0
    admit = allocator.admit

    def checked(*args):
        nonlocal num_checked
        told = admit(*args)
        if allocator._demand is not None:
            assert allocator._demand.num_kept == allocator._demand_now().num_kept
        num_checked += 1
        return told

    monkeypatch.setattr(allocator, "admit", checked)
    machine.begin(*[machine.chat(letter, 30) for letter in "ab"])
    assert num_checked == 2


@pytest.mark.parametrize(("shares_cells", "slot"), [(True, 1), (False, 0)])
def test_a_slot_is_gone_on_in_for_a_few_tokens_where_to_share_them_is_to_copy(shares_cells, slot):
    """SPEC Q10: choices of one request have the few tokens of its prompt in common."""
    limits = SchedulerLimits(num_slots=2, num_cells=100, n_batch=8, shares_cells=shares_cells)
    slots = SlotTable(limits, CellPool(100))
    slots[0].keep(HEADER)
    assert slots.place((slots[0], 5)) == SlotPlacement(slot, 0, 5)


@pytest.mark.parametrize(
    ("num_others", "num_cached"),
    [
        (FIRST_CELLS // 2, len(HEADER)),
        (FIRST_CELLS - len(HEADER), len(HEADER)),
        (FIRST_CELLS - len(HEADER) + 1, 0),
        (FIRST_CELLS, 0),
    ],
)
def test_a_header_far_back_in_the_pool_is_computed_anew(num_others, num_cached):
    """SPEC C3: while it is in use each step would walk up to it, also when nothing else is there."""
    machine = Machine()
    machine.enter_prompt([33] * num_others, 1, namespace=SPACE)
    machine.finish()
    assert machine.scheduler.cells.used == num_others
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


@pytest.mark.parametrize("limits", [{"has_streams": True}, {"can_trim": False}, {}])
def test_where_sharing_copies_or_is_not_possible_it_is_computed(limits):
    """SPEC C3, C15."""
    machine = Machine(shares_cells=False, **limits)
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
