"""What idle cells and stored states stand for each other, and what becomes of both when somebody comes."""

from test_single_flight import OTHER, SPACE, Machine

from stoker.ipc.request import FinishReason, Priority
from stoker.kv.ops import Import
from stoker.kv.sequence import SequenceState


def kept(machine):
    """Tokens that idle slots keep, by namespace."""
    return {slot.last.namespace: len(slot.kept) for slot in machine.scheduler.slots.slots if slot.kept}


def finished(machine):
    """One conversation that has ended, with its cells kept and, at rest, stored."""
    machine.enter(200, 100)
    machine.finish()
    machine.step()
    assert kept(machine) == {SPACE: 210}
    assert len(machine.cache) == 1


def test_cells_that_a_stored_state_stands_for_go_when_a_stranger_comes():
    """C7, adr/0006: attention walks over them, and the state comes back in a moment."""
    machine = Machine()
    finished(machine)
    machine.enter(40, 101, namespace=OTHER)
    machine.step()
    assert SPACE not in kept(machine)
    again = machine.enter(200, 102)
    machine.finish()
    assert again.num_cached == 200


def test_cells_whose_stored_state_has_gone_stay_and_are_stored_before_they_go():
    """C7: memory was short; nothing is given up for a copy that is no more."""
    machine = Machine()
    finished(machine)
    machine.cache.shed(2**30, machine.now)
    assert len(machine.cache) == 0
    machine.enter(40, 101, namespace=OTHER)
    machine.step()
    assert kept(machine)[SPACE] == 210
    machine.finish()
    machine.drop_cells()
    assert any(entry.namespace == SPACE for entry in machine.cache.index)


def test_a_sequence_that_ends_in_the_turn_that_admitted_it_leaves_nothing_in_its_slot():
    """Q4, L6: its state was ordered and does not come."""
    machine = Machine()
    finished(machine)
    machine.drop_cells()
    late = machine.enter(200, 101)
    machine.now += 1
    turn = machine.scheduler.schedule(machine.now)
    assert any(isinstance(effect, Import) for effect in turn.ops)
    machine.scheduler.retire(late, FinishReason.PREEMPTED, machine.now)
    machine.carry_out(turn)
    machine.check()
    again = machine.enter(200, 102)
    machine.finish(again)
    assert again.num_cached == 200


def test_nobody_gives_way_to_one_who_cannot_be_placed():
    """Q3, C4: the places of those who follow a leader are theirs."""
    machine = Machine(num_slots=3, n_batch=64)
    job = machine.enter(40, 100, num_tokens=50, priority=Priority.BACKGROUND, namespace=OTHER)
    machine.until(lambda: job.num_generated > 0)
    leader = machine.enter(500, 101)
    machine.step()
    followers = [machine.enter(500, tail) for tail in (102, 103)]
    machine.enter_prompt([7] * 40)
    machine.step()
    assert leader.state is SequenceState.PREFILL
    assert all(follower.follows is not None for follower in followers)
    assert job.is_running
    assert job.num_preemptions == 0


def test_two_that_memory_cannot_both_hold_do_not_store_each_other_away_for_ever():
    """C6, C7: at rest each is weighed once."""
    machine = Machine(ram_bytes=2500)
    for tail, space in ((100, SPACE), (101, OTHER)):
        machine.enter(200, tail, namespace=space)
        machine.finish()
    for _ in range(20):
        machine.step()
    assert not machine.scheduler.allocator.has_unstored
