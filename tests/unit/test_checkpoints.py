"""Where a model that cannot go back leaves its state, and what that saves (SPEC C8)."""

from random import Random

import pytest
from test_single_flight import STEM, Machine

from stoker.cache.radix import key_of
from stoker.ipc.model import CacheMode
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import CacheSource
from stoker.kv.checkpoints import INTERVAL, MAX_SPREAD, Checkpoints


def walk(checkpoints, length, step=1):
    """Places where states stand after `length` tokens, going from place to place by `step` at most."""
    at, standing = 0, set()
    while at < length:
        at = min(length, at + step, checkpoints.next_after(at))
        if checkpoints.is_at(at):
            standing.add(at)
            standing -= set(checkpoints.left(at))
    return standing


def test_checkpoints_stand_every_interval_and_one_token_before_the_end():
    """C8."""
    assert walk(Checkpoints.spread(500), 500) == {128, 256, 384, 499}
    assert walk(Checkpoints.spread(100), 100) == {99}
    assert walk(Checkpoints.spread(129), 129) == {128}
    assert walk(Checkpoints.spread(1), 1) == set()


@pytest.mark.parametrize("length", [128 * 16, 128 * 17, 128 * 40, 128 * 300 + 5])
def test_checkpoints_stay_few_and_spread(length):
    """C8: the interval doubles; the largest gap is one interval, so whoever parts loses as little."""
    standing = walk(Checkpoints.spread(length), length)
    regular = sorted(standing - {length - 1})
    assert len(regular) <= MAX_SPREAD
    interval = INTERVAL
    while length // interval > MAX_SPREAD:
        interval *= 2
    assert regular == list(range(interval, length + 1, interval))
    assert length - 1 in standing


def test_a_place_that_somebody_waits_for_is_left_out_of_no_step_and_never_thinned():
    """C4, C8."""
    checkpoints = Checkpoints.spread(128 * 40)
    checkpoints.mark(300)
    checkpoints.mark(384)
    assert checkpoints.is_marked(300)
    assert not checkpoints.is_marked(256)
    assert checkpoints.next_after(256) == 300
    assert checkpoints.next_after(300) == 384
    standing = walk(checkpoints, 128 * 40, step=100)
    assert {300, 384, 128 * 40 - 1} <= standing


def test_no_place_lies_between_here_and_the_next():
    """C8: a step that goes up to the next place misses none."""
    random = Random(8)
    for _ in range(200):
        checkpoints = Checkpoints.spread(random.randint(1, 3000))
        for _ in range(random.randint(0, 3)):
            checkpoints.mark(random.randint(1, 3000))
        at = random.randint(0, 3000)
        after = checkpoints.next_after(at)
        assert checkpoints.is_at(after)
        assert not any(checkpoints.is_at(between) for between in range(at + 1, after))


@pytest.fixture
def machine():
    """A recurrent model with nothing computed."""
    return Machine(is_recurrent=True)


def stored(machine):
    """Lengths of the entries there are."""
    return sorted(entry.num_tokens for entry in machine.cache.index)


def test_steps_end_at_checkpoints_and_leave_a_state_there(machine):
    """C8: in the middle of a step's budget too; the states are those of just these tokens."""
    sequence = machine.enter_prompt(STEM[:300], 1)
    counts = []
    while sequence.num_generated == 0:
        machine.step()
        counts.append(sequence.num_computed)
    machine.rest()
    assert counts[-1] == 300
    assert {128, 256, 299} <= set(counts)
    assert stored(machine) == [128, 256, 299, 300]
    for entry in machine.cache.index:
        assert entry.key == key_of(STEM[: entry.num_tokens])
        machine.backend.import_state(20, entry.data)
        assert list(machine.backend.tokens(20)) == STEM[: entry.num_tokens]
        machine.backend.drop(20)


def test_two_that_step_together_each_stop_at_their_own_places(machine):
    """C8, Q9."""
    machine.enter_prompt([5000 % 256 + at % 7 for at in range(200)], 1)
    machine.enter_prompt([99 - at % 9 for at in range(333)], 1)
    machine.finish()
    machine.rest()
    assert stored(machine) == sorted([128, 199, 200, 128, 256, 332, 333])


def test_a_conversation_goes_on_from_the_state_at_its_end(machine):
    """C2, C8: the next turn repeats prompt and answer and computes what was added alone."""
    first = machine.enter_prompt(STEM[:300], 40)
    machine.finish()
    history = list(first.tokens)
    before = machine.num_computed
    second = machine.enter_prompt([*history, *STEM[:20]], 3)
    machine.finish()
    assert second.num_cached == len(history) - 1
    assert machine.num_computed == before + 1 + 20
    assert second.cache_source is CacheSource.LIVE
    machine.drop_cells()
    history = list(second.tokens)
    third = machine.enter_prompt([*history, *STEM[:5]], 3)
    machine.finish()
    assert (third.num_cached, third.cache_source) == (len(history) - 1, CacheSource.RAM)


@pytest.mark.parametrize(
    ("parts_at", "num_cached"), [(290, 256), (256, 256), (255, 128), (130, 128), (127, 0)]
)
def test_a_conversation_edited_in_the_middle_goes_on_from_the_last_state_before_the_edit(
    machine, parts_at, num_cached
):
    """C2, C8."""
    machine.enter_prompt(STEM[:300], 20)
    machine.finish()
    edited = machine.enter_prompt([*STEM[:parts_at], 1, 2, 3, 4], 3)
    machine.finish()
    assert edited.num_cached == num_cached
    assert edited.cache_source is (CacheSource.RAM if num_cached else None)


def test_checkpoints_are_left_in_what_is_generated_too(machine):
    """C8: an answer may be long, and be edited."""
    first = machine.enter_prompt(STEM[:100], 200)
    machine.finish()
    machine.rest()
    assert stored(machine) == [99, 128, 256, 299]
    edited = machine.enter_prompt([*first.tokens[:270], 1, 2], 3)
    machine.finish()
    assert edited.num_cached == 256


def test_a_long_prompt_leaves_few_states(machine):
    """C8: superfluous ones are dropped as the interval doubles."""
    prompt = [97 + at % 23 for at in range(128 * 17 + 10)]
    machine.enter_prompt(prompt, 1)
    machine.finish()
    machine.rest()
    standing = set(stored(machine))
    wanted = {*range(256, len(prompt), 256), len(prompt) - 1, len(prompt)}
    assert wanted <= standing
    assert standing - wanted <= {128 * 17}  # the one at which the interval doubled


def test_what_is_dropped_as_superfluous_stays_if_another_needs_it(machine):
    """C7, C8: a lease holds it."""
    prompt = [97 + at % 23 for at in range(128 * 17 + 10)]
    sequence = machine.enter_prompt(prompt, 1)
    machine.until(lambda: sequence.num_computed >= 256)
    machine.step()
    entry = next(entry for entry in machine.cache.index if entry.num_tokens == 128)
    entry.lease("somebody")
    machine.finish()
    assert 128 in stored(machine)
    assert 384 not in stored(machine)


@pytest.mark.parametrize(
    ("mode", "shares"), [(CacheMode.OFF, False), (CacheMode.LIVE, True), (CacheMode.BOTH, False)]
)
def test_no_checkpoints_are_left_where_none_may_be_used(mode, shares):
    """C10."""
    machine = Machine(is_recurrent=True, cache_mode=mode)
    machine.enter_prompt(STEM[:300], 5, shares=shares)
    machine.finish()
    machine.rest()
    assert stored(machine) == []


def test_a_model_that_can_go_back_leaves_none():
    """C8: the state of its end serves all."""
    machine = Machine()
    machine.enter_prompt(STEM[:300], 5)
    machine.finish()
    machine.rest()
    assert stored(machine) == [304]


def test_checkpoints_without_room_cost_nobody_an_answer():
    """C7, C8: where no state fits, all is computed."""
    machine = Machine(is_recurrent=True, ram_bytes=0)
    machine.enter_prompt(STEM[:300], 5)
    follower = machine.enter_prompt([*STEM[:290], 1, 2], 5)
    machine.finish()
    assert follower.num_cached == 0
    assert stored(machine) == []


def test_a_cancelled_prompt_leaves_its_last_state(machine):
    """C6, C8: whoever asks again goes on from there."""
    sequence = machine.enter_prompt(STEM[:500], 5)
    machine.step()
    machine.step()
    computed = sequence.num_computed
    machine.scheduler.retire(sequence, FinishReason.CANCELLED, machine.now)
    machine.rest()
    assert max(stored(machine)) == computed
    again = machine.enter_prompt(STEM[:500], 5)
    machine.finish()
    assert again.num_cached == computed
