"""The scheduler as a pure machine: sequences and times in, effects and plans out."""

import pytest

from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.cache.radix import common_prefix
from stoker.errors import QueueFullError
from stoker.ipc.model import Policy
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.cells import SchedulerLimits
from stoker.kv.ops import Drop, Fork, Trim
from stoker.kv.sequence import IllegalMoveError, ParkForm, Sequence, SequenceKey, SequenceState
from stoker.machine.ledger import Ledger
from stoker.scheduler.cost import StepCost
from stoker.scheduler.plan import Planner, StepBudget, fair_shares
from stoker.scheduler.queue import insert_position
from stoker.scheduler.scheduler import Scheduler

INTERACTIVE, BACKGROUND = Priority.INTERACTIVE, Priority.BACKGROUND


def scheduler(**limits):
    """A small one: 2 slots, 256 cells, batches of 64."""
    cache = PrefixCache(CacheLimits(), Ledger())
    return Scheduler(SchedulerLimits(**{"num_slots": 2, "num_cells": 256, "n_batch": 64} | limits), cache)


def sequence(name, tokens, **fields):
    """A queued sequence; `tokens` is a count or a list."""
    tokens = [*range(tokens)] if isinstance(tokens, int) else list(tokens)
    return Sequence(key=SequenceKey(name, 0), tokens=tokens, num_prompt=len(tokens), **fields)


def step(machine, now=0.0):
    """Schedule and compute one step; draws token 7 for every sequence whose row is due."""
    turn = machine.schedule(now)
    plan = machine.plan()
    if plan is not None:
        machine.computed(plan, now)
        for part in plan.parts:
            if part.sequence.num_pending == 0:
                part.sequence.tokens.append(7)
    machine.check()
    return turn, plan


def test_interactive_goes_before_the_first_waiting_background_and_behind_its_own():
    """Q2."""
    line = [INTERACTIVE, BACKGROUND, BACKGROUND]
    assert insert_position(line, INTERACTIVE) == 1
    assert insert_position(line, BACKGROUND) == 3
    assert insert_position([INTERACTIVE], INTERACTIVE) == 1
    assert insert_position([], BACKGROUND) == 0


def test_the_line_keeps_arrival_order_inside_a_class():
    """Q2."""
    machine = scheduler()
    for name, priority in [("b1", BACKGROUND), ("i1", INTERACTIVE), ("b2", BACKGROUND), ("i2", INTERACTIVE)]:
        machine.enqueue(sequence(name, 4, priority=priority), 0.0)
    assert [s.key.request_id for s in machine.queue] == ["i1", "i2", "b1", "b2"]


def test_rows_that_decode_go_on_undisturbed_until_their_cells_are_taken():
    """Q9, Q12: a pool no larger than a batch is no reason to look at everything before each step."""
    machine = scheduler(num_cells=64, n_batch=64)
    for name in "ab":
        machine.enqueue(sequence(name, 20), 0.0)
    step(machine)
    step(machine)  # what was raised or left behind was looked at
    steps = 0
    while machine.is_steady(0.0):
        plan = machine.plan()
        assert plan.is_rows
        machine.computed(plan, 0.0)
        for part in plan.parts:
            part.sequence.tokens.append(7)
        machine.check()
        steps += 1
    assert machine.cells.free < 2 <= steps, "then one of them has to give way"


def test_a_freed_slot_goes_to_the_head_of_the_line_and_not_to_a_later_arrival():
    """Q5."""
    machine = scheduler(num_slots=1)
    first, second, third = (sequence(name, 4) for name in "abc")
    machine.enqueue(first, 0.0)
    step(machine)
    machine.enqueue(second, 1.0)
    machine.retire(first, FinishReason.STOP, 2.0)
    machine.enqueue(third, 2.0)
    turn, _ = step(machine, 2.0)
    assert turn.admitted == [second]


def test_the_queue_is_bounded_and_background_has_half_the_room():
    """Q11."""
    machine = scheduler(num_slots=1, max_queue=4)
    machine.check_queue(BACKGROUND, 1)  # the slot is idle: whoever arrives does not wait
    machine.enqueue(sequence("running", 4), 0.0)
    step(machine)
    for name in "ab":
        machine.enqueue(sequence(name, 4), 0.0)
    with pytest.raises(QueueFullError, match="2 requests wait and 2 may") as refused:
        machine.check_queue(BACKGROUND, 0)
    assert refused.value.retry_after_s >= 1
    machine.check_queue(INTERACTIVE, 1)
    with pytest.raises(QueueFullError):
        machine.check_queue(INTERACTIVE, 2)


def test_decode_rows_come_first_and_keep_the_order_of_their_slots():
    """Q9: a step of the same rows in the same order is one that a device has a graph for."""
    machine = scheduler(num_slots=4, n_batch=8)
    for name in "abc":
        machine.enqueue(sequence(name, [ord(name)] * 2), 0.0)
    step(machine)
    machine.enqueue(sequence("long", 100), 0.0)
    for _ in range(6):
        _, plan = step(machine)
        assert [len(part.item.tokens) for part in plan.parts] == [1, 1, 1, 5]
        assert [part.item.seq for part in plan.parts[:3]] == [0, 1, 2]


@pytest.mark.parametrize("num_prompts", [0, 1])
def test_decode_rows_that_do_not_all_fit_take_turns(num_prompts):
    """Q9: the lowest slot must not be the only one that decodes."""
    machine = scheduler(num_slots=5, n_batch=2)
    for name in "abc":
        machine.enqueue(sequence(name, [ord(name)] * 2), 0.0)
        step(machine)
        step(machine)
    for _ in range(num_prompts):
        machine.enqueue(sequence("long", 100), 0.0)
    decoded = []
    for _ in range(6):
        _, plan = step(machine)
        rows = [part.sequence for part in plan.parts if part.sequence.state is SequenceState.DECODE]
        decoded += [row.key.request_id for row in rows]
        assert [row.slot for row in rows] == sorted(row.slot for row in rows)
    assert {decoded.count(name) for name in "abc"} == {4 - 2 * num_prompts}


def test_prefills_share_the_budget_fairly_and_nobody_gets_nothing():
    """Q9."""
    assert fair_shares([100, 100], 10) == [5, 5]
    assert fair_shares([2, 100, 100], 12) == [2, 5, 5]
    assert fair_shares([5, 5, 5], 2) == [1, 1, 0]
    assert fair_shares([3, 4], 100) == [3, 4]
    assert sum(fair_shares([7, 1, 9, 30], 31)) == 31


def test_only_the_last_prompt_token_asks_for_logits_unless_all_were_asked():
    """Q9, D6."""
    machine = scheduler(n_batch=16)
    machine.enqueue(sequence("a", 20), 0.0)
    machine.enqueue(sequence("b", range(100, 110), wants_prompt_logits=True), 0.0)
    _, plan = step(machine)
    asked = {part.sequence.key.request_id: part.item.num_logits for part in plan.parts}
    assert asked == {"a": 0, "b": 10}
    _, plan = step(machine)
    asked = {part.sequence.key.request_id: part.item.num_logits for part in plan.parts}
    assert asked == {"a": 1, "b": 1}


def test_a_prompt_whose_every_logit_is_asked_is_not_cut_by_company():
    """D6: its rows do not depend on who else is served; a second one waits for the next step."""
    machine = scheduler(n_batch=16)
    for name in "ab":
        machine.enqueue(sequence(name, [ord(name)] * 12, wants_prompt_logits=True), 0.0)
    sizes = [[len(part.item.tokens) for part in step(machine)[1].parts] for _ in range(2)]
    assert sizes == [[12], [1, 12]]


def test_prompts_whose_every_logit_is_asked_come_one_after_the_other():
    """D6: the backend holds the beginning of one; with two in turns it would compute both from the start."""
    machine = scheduler(n_batch=16, max_prompt_rows=8)
    for name in "ab":
        machine.enqueue(sequence(name, [ord(name)] * 20, wants_prompt_logits=True), 0.0)
    parts = [part for _ in range(6) for part in step(machine)[1].parts]
    prefill = [(part.sequence.key.request_id, part.item.start) for part in parts if part.item.start < 20]
    first, second = ("a", "b") if prefill[0][0] == "a" else ("b", "a")
    assert prefill == [(first, 0), (first, 8), (first, 16), (second, 0), (second, 8), (second, 16)]


def test_an_idle_slot_with_the_longest_prefix_is_reused_before_an_empty_one():
    """Q10."""
    machine = scheduler(num_slots=3)
    first = sequence("a", 40)
    machine.enqueue(first, 0.0)
    step(machine)
    machine.retire(first, FinishReason.STOP, 1.0)
    again = sequence("b", [*range(36), 99, 98])
    machine.enqueue(again, 2.0)
    turn, plan = step(machine, 2.0)
    assert turn.ops == [Trim(0, 36)]
    assert (again.slot, again.num_cached, plan.parts[0].item.start) == (0, 36, 36)


def test_without_a_usable_prefix_an_empty_slot_comes_first_then_the_one_unused_for_longest():
    """Q10."""
    machine = scheduler(num_slots=2)
    for at, name in enumerate("ab"):
        held = sequence(name, [ord(name)] * 40)
        machine.enqueue(held, float(at))
        step(machine)
        assert held.slot == at
        machine.retire(held, FinishReason.STOP, float(at))
    other = sequence("c", [1, 2, 3])
    machine.enqueue(other, 5.0)
    turn, _ = step(machine, 5.0)
    assert other.slot == 0
    assert turn.ops == [Drop(0)]


def test_a_running_sequence_shares_its_cells_with_a_newcomer_of_the_same_prefix():
    """C3."""
    machine = scheduler(num_slots=2)
    machine.enqueue(sequence("a", 50), 0.0)
    step(machine)
    used = machine.cells.used
    machine.enqueue(sequence("b", [*range(45), 77]), 1.0)
    turn, plan = step(machine, 1.0)
    assert turn.ops == [Fork(0, 1, 45)]
    assert machine.cells.used == used + 2
    assert {len(part.item.tokens) for part in plan.parts} == {1}


def test_choices_of_one_request_wait_for_their_leader_and_then_share_its_prompt():
    """Q16."""
    machine = scheduler(num_slots=2, n_batch=8)
    leader = sequence("a", 20)
    follower = sequence("a", 20)
    follower.key, follower.leader = SequenceKey("a", 1), leader
    machine.enqueue(leader, 0.0)
    machine.enqueue(follower, 0.0)
    num_computed = 0
    while follower.slot is None:
        _, plan = step(machine)
        num_computed += sum(len(part.item.tokens) for part in plan.parts)
    assert num_computed == 22  # the prompt once, the leader's first and the follower's last prompt token
    assert follower.num_cached == 19


def test_a_full_pool_parks_the_youngest_background_first_and_brings_it_back():
    """Q12, Q4: nobody fails, nothing is lost."""
    machine = scheduler(num_slots=3, num_cells=100, n_batch=100)
    old, young, background = sequence("a", [1] * 25), sequence("b", [2] * 25), sequence("c", [3] * 25)
    background.priority = BACKGROUND
    for at, member in enumerate((old, young, background)):
        member.arrival_s = at
        machine.enqueue(member, at)
    parked = []
    for at in range(12):
        parked += [parking.sequence for parking in step(machine, 3.0 + at)[0].parked]
    assert parked == [background]
    assert background.form is ParkForm.TOKENS
    assert background.num_generated > 0
    before = list(background.tokens)
    machine.retire(old, FinishReason.STOP, 20.0)
    machine.retire(young, FinishReason.STOP, 20.0)
    step(machine, 21.0)
    assert background.slot is not None
    assert background.tokens[: len(before)] == before


def test_a_parked_sequence_comes_back_before_newcomers_of_its_class():
    """Q5, Q12."""
    machine = scheduler(num_slots=2, num_cells=100, n_batch=100)
    for at, name in enumerate("ab"):
        machine.enqueue(sequence(name, [at] * 38, arrival_s=float(at)), at)
    step(machine, 1.0)
    while not machine.queue:
        step(machine, 1.0)
    machine.enqueue(sequence("newcomer", 4), 5.0)
    assert [s.key.request_id for s in machine.queue] == ["b", "newcomer"]


def test_a_sequence_that_fills_the_pool_alone_is_never_parked():
    """Q12."""
    machine = scheduler(num_slots=2, num_cells=64)
    machine.enqueue(sequence("a", 60), 0.0)
    for _ in range(4):
        assert step(machine)[0].parked == []


def test_an_illegal_move_is_told_with_the_story():
    """One table is the truth about the states."""
    done = sequence("a", 3)
    done.move(SequenceState.DONE, 1.0, "stop")
    with pytest.raises(IllegalMoveError, match=r"cannot become decode .*story: 1\.000 done: stop"):
        done.move(SequenceState.DECODE, 2.0, "by mistake")


def test_common_prefix_finds_every_length():
    """Q10."""
    base = list(range(50))
    for length in range(50):
        assert common_prefix(base, [*base[:length], -1, *base[length + 1 :]]) == length
    assert common_prefix(base, base) == 50
    assert common_prefix([], base) == 0


def test_more_decode_rows_than_budget_take_turns():
    """Q9."""
    planner = Planner(StepBudget(StepCost(), 2), 64)
    rows = []
    for number in range(4):
        member = sequence(str(number), 3)
        member.slot, member.num_computed, member.state = number, 2, SequenceState.DECODE
        rows.append(member)
    seen = [part.sequence.slot for _ in range(4) for part in planner.plan(rows).parts]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_spare_sequences_let_a_newcomer_start_without_freeing_cells_under_those_who_run():
    """Q10, adr/0006: what idle slots keep is freed only beyond a bound, the newest last."""
    machine = scheduler(num_slots=2, num_sequences=6, num_cells=8000, n_batch=4000, policy=Policy.THROUGHPUT)
    running = sequence("a", [1] * 40)
    machine.enqueue(running, 0.0)
    for at in range(4):
        member = sequence(f"m{at}", [at + 2] * 500)
        machine.enqueue(member, float(at))
        assert step(machine, float(at))[0].ops == []
        machine.retire(member, FinishReason.STOP, float(at))
    newcomer = sequence("n", [9] * 4)
    machine.enqueue(newcomer, 9.0)
    assert step(machine, 9.0)[0].ops == []  # the newcomer's first step comes first
    assert step(machine, 9.1)[0].ops == [Drop(1)]
    assert [len(slot.kept) for slot in machine.slots.slots] == [0, 0, 500, 500, 500, 0]
    machine.retire(running, FinishReason.STOP, 10.0)
    machine.retire(newcomer, FinishReason.STOP, 10.5)
    assert machine.schedule(11.0).ops == [Drop(2), Drop(3), Drop(4)]


def test_a_token_that_the_backend_computed_by_itself_takes_a_cell():
    """D8: the last token of a prompt whose view by the model is asked; what has ended is counted."""
    machine = scheduler()
    asked = sequence("asked", 10, is_to_embed=True)
    machine.enqueue(asked, 0.0)
    step(machine)
    asked.tokens.append(7)
    before, pending = machine.cells.used, asked.num_pending
    machine.completed(asked)
    assert (machine.cells.used, asked.num_pending) == (before + pending, 0)
    machine.check()
    machine.retire(asked, FinishReason.STOP, 1.0)
    assert machine.stats()["num_retired_total"] == 1


def test_a_story_is_the_arrival_and_the_latest_moves():
    """O3: of a long one the middle is forgotten."""
    told = sequence("told", 4)
    for at in range(100):
        told.tell(float(at), f"move {at}")
    assert [at for at, _ in told.story] == [0.0, *range(69, 100)]
