"""What copies of states off a device may cost a turn; time is the backend's own, no clock is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from stepping import Machine
from stoker.backends.fake.backend import FakeBackend
from stoker.cache.entry import EntryState
from stoker.cache.prefix_cache import CacheLimits
from stoker.kv import allocator as allocators
from stoker.kv.allocator import BUSY_SHARE, IDLE_TARGETS, ComputeTime, MoveBudget, unknown

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Buffer
    from stoker.backends.protocol.extensions import Extensions

TARGET_S = 0.05
TOKEN_S = 0.0005  # as where cells lie apart on a device


class CardBackend(FakeBackend):
    """Its exports take time, which is added up."""

    def __init__(self, token_s: float = TOKEN_S) -> None:
        super().__init__(num_cells=4096, num_sequences=4, n_batch=512)
        self.token_s = token_s
        self.copied_s = 0.0

    @property
    def extensions(self) -> Extensions:
        """With what they cost."""
        return replace(super().extensions, copy_times=self)

    def export_s(self, seq: int) -> float:
        """So much a token."""
        return self.token_s * self.length(seq)

    def export_state(self, seq: int) -> Buffer:
        """A copy off the card."""
        self.copied_s += self.export_s(seq)
        return super().export_state(seq)


def machine_of(backend: FakeBackend, **limits: object) -> Machine:
    """A scheduler over it, with two slots, that stores what ends."""
    known = {"num_slots": 2, "is_on_device": True, "target_step_s": TARGET_S}
    return Machine(backend, CacheLimits(ram_bytes=2**30), **known | limits)


def run(machine: Machine, *prompts: list[int]) -> None:
    """These requests, one after the other to their ends, and an idle turn after each."""
    for prompt in prompts:
        machine.enter_prompt(prompt)
        while machine.scheduler.has_work:
            machine.step()
        machine.step()


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed has."""
    return [3 + (seed * 101 + at * 7) % 200 for at in range(length)]


def saved_up(compute_s: ComputeTime = unknown) -> MoveBudget:
    """A budget whose turns have gone on for so long that it has all that it may have, at 100 s."""
    budget = MoveBudget(TARGET_S, compute_s)
    for turn in range(2000):
        budget.begin(100.0 - (1999 - turn) * TARGET_S)
    return budget


def test_a_turn_spends_what_was_saved_up_and_no_more() -> None:
    """SPEC C16: copies are made until the time is spent, which is saved up again, a part of the time."""
    budget = saved_up()
    assert [budget.take(0.02) for _ in range(4)] == [True, True, False, False]
    assert budget.take(0.01)
    assert not budget.take(0.001)
    for turn in range(1, 5):
        budget.begin(100.0 + turn * 0.05)
    assert not budget.take(4.1 * BUSY_SHARE * 0.05)
    assert budget.take(3.9 * BUSY_SHARE * 0.05)
    assert budget.num_refused_total == 4


def test_time_without_turns_saves_up_nothing() -> None:
    """SPEC C16: the crowd that comes after a quiet hour waits for no copy."""
    budget = MoveBudget(TARGET_S)
    budget.begin(1.0)
    assert not budget.take(0.001)
    budget.begin(3601.0)
    assert not budget.take(BUSY_SHARE * TARGET_S * 1.01)
    assert budget.take(BUSY_SHARE * TARGET_S * 0.99)


def test_an_idle_turn_spends_more_and_none_is_spent_where_it_is_forbidden() -> None:
    """SPEC C16: a turn that admits spends nothing, and those of a target after it one copy at most."""
    budget = saved_up()
    budget.forbid()
    assert not budget.has_time
    assert not budget.take(0.001)
    budget.begin(100.001)
    assert budget.take(0.01), "all was saved up"
    budget.begin(100.002)
    assert not budget.has_time
    assert not budget.take(0.001)
    budget.begin(100.0 + 1.01 * TARGET_S)
    later = saved_up()
    later.forbid()
    later.begin(100.0 + 1.01 * TARGET_S)
    assert later.take(0.03), "what was saved up before is not lost"
    assert not budget.take(0.03), "the copies of one turn are the last ones for a while"
    assert budget.take(0.98 * BUSY_SHARE * TARGET_S), "but for what was saved up since"
    budget.begin_idle()
    assert [budget.take(TARGET_S) for _ in range(IDLE_TARGETS + 1)] == [True] * IDLE_TARGETS + [False]


def test_what_is_computed_as_quickly_is_not_copied() -> None:
    """SPEC C16: it would have to be put back too; nor is what takes longer than any turn has."""
    budget = MoveBudget(TARGET_S, lambda num_tokens: num_tokens * 20e-6)
    assert not budget.is_worth(1000 * TOKEN_S / 20, 1000)
    assert budget.is_worth(1000 * 9e-6, 1000)
    assert not budget.is_worth(IDLE_TARGETS * TARGET_S * 1.01, 10**9)
    assert budget.num_refused_total == 2


def test_copies_are_made_though_somebody_is_admitted_all_the_time() -> None:
    """SPEC C16, C6: what was saved up is spent between two admissions, or where no more can be saved."""
    for every_s in (0.02, 0.1, 0.4):
        budget, num_made = MoveBudget(TARGET_S), 0
        for turn in range(4000):
            budget.begin(turn * 0.005)
            if turn % int(every_s / 0.005) == 0:
                budget.forbid()
            num_made += budget.has_time and budget.take(0.008)
        assert num_made * 0.008 == pytest.approx(BUSY_SHARE * 4000 * 0.005, rel=0.2)


def test_a_copy_that_no_busy_turn_has_time_for_is_asked_for_seldom() -> None:
    """SPEC C16: it is made when nobody runs."""
    budget, num_asked = MoveBudget(TARGET_S), 0
    for turn in range(2000):
        budget.begin(turn * 0.005)
        if budget.has_time:
            num_asked += 1
            assert not budget.take(1.2 * TARGET_S)
    assert num_asked < 300
    budget.begin_idle()
    assert budget.take(1.2 * TARGET_S)


def test_nothing_is_tried_until_there_is_time_for_what_was_refused() -> None:
    """SPEC C16: what a copy costs is not asked anew in each turn."""
    budget = saved_up()
    assert budget.has_time
    assert budget.take(0.04)
    assert not budget.take(0.028)
    turns = 0
    while not budget.has_time:
        turns += 1
        budget.begin(100.0 + turns * TARGET_S)
    assert 18 <= turns <= 19, "0.028 s, 1.5 ms a turn"
    assert budget.take(0.028)


def test_copies_of_one_turn_are_the_last_ones_for_a_while() -> None:
    """SPEC C16: savings do not become a copy in each of many turns, for all of which readers wait."""
    budget, made_s = saved_up(), []
    for turn in range(1, 401):
        now = 100.0 + turn * 0.005
        budget.begin(now)
        if budget.has_time and budget.take(0.006):
            made_s.append(now)
    gaps = [after - before for before, after in pairwise(made_s)]
    assert len(made_s) == pytest.approx(1 + 2.0 * BUSY_SHARE / 0.006, abs=1)
    assert min(gaps) >= 0.99 * 0.006 / BUSY_SHARE


def test_what_there_was_no_time_for_is_stored_when_nobody_waits() -> None:
    """SPEC C16, C6: it was not decided against."""
    backend = CardBackend()
    machine = machine_of(backend, has_streams=True, num_cells=4 * 4096)
    for number in range(2):
        machine.enter_prompt(prompt(number, 64))
    while machine.scheduler.has_work:
        machine.step()
    assert backend.copied_s == 0.0
    while machine.scheduler.allocator.has_unstored:
        machine.carry_out(machine.scheduler.store_idle(machine.now))
    assert backend.copied_s > 0.0


def test_a_copy_that_takes_no_time_is_always_made() -> None:
    """SPEC C16: on a CPU states lie in the memory they go to; nothing is asked there."""
    backend = FakeBackend(num_cells=4096, num_sequences=4, n_batch=512)
    machine = machine_of(backend, is_on_device=False)
    for number in range(3):
        run(machine, prompt(number, 64))
    assert machine.scheduler.allocator.moves.num_refused_total == 0
    assert machine.scheduler.allocator.cache.stats()["cache_stored_total"] >= 2


@pytest.mark.parametrize("length", [40, 300, 1600])
def test_no_turn_copies_for_longer_than_it_may(length: int) -> None:
    """SPEC C16: not one of 0.8 s before an admission either, whatever comes and is evicted."""
    backend = CardBackend()
    machine = machine_of(backend)
    for number in range(8):
        machine.enter_prompt(prompt(number, length))
        while machine.scheduler.has_work:
            before = backend.copied_s
            machine.step()
            assert backend.copied_s - before <= TARGET_S
        before = backend.copied_s
        machine.step()
        assert backend.copied_s - before <= IDLE_TARGETS * TARGET_S


def test_a_turn_that_admits_copies_nothing() -> None:
    """SPEC C16: what the newcomer takes the place of goes without a copy, although one would be quick."""
    backend = CardBackend(token_s=1e-6)
    machine = machine_of(backend, num_slots=4)
    for number in range(4):  # every sequence keeps something that was never stored
        machine.enter_prompt(prompt(number, 64))
    while machine.scheduler.has_work:
        machine.step()
    assert all(slot.kept for slot in machine.scheduler.slots.slots)
    stored = backend.copied_s
    newcomer = machine.enter_prompt(prompt(9, 64))
    machine.step()
    assert newcomer.is_running
    assert backend.copied_s == stored


@pytest.mark.parametrize(("speed", "num_found"), [(50_000, 0), (2_000, 60)])
def test_a_stored_state_comes_into_a_stream_where_computing_it_takes_longer(
    speed: int, num_found: int
) -> None:
    """SPEC C18: by the speed that prompts were computed with."""
    backend = CardBackend(token_s=1e-6)
    machine = machine_of(backend, has_streams=True, num_cells=4 * 4096)
    machine.scheduler.cost.learn(2048, 2048 / speed)
    run(machine, prompt(1, 60))
    machine.carry_out(machine.scheduler.drop_idle(machine.now))
    run(machine, prompt(1, 60) + prompt(2, 20))
    assert machine.sequences[-1].num_cached == num_found


def test_where_each_has_its_own_cells_the_next_to_come_finds_them_stored() -> None:
    """SPEC C16, C15: what idle sequences keep stays while one is empty, then one a turn is stored."""
    backend = CardBackend(token_s=1e-6)
    machine = machine_of(backend, has_streams=True, num_cells=4 * 4096)
    endless = machine.enter_prompt(prompt(0, 64), num_tokens=40)
    for number in (1, 2, 3):
        machine.enter_prompt(prompt(number, 64), num_tokens=2)
    while not all(slot.kept or slot.sequence for slot in machine.scheduler.slots.slots):
        assert backend.copied_s == 0.0
        machine.step()
    while endless.is_running:
        machine.step()
    slots = [slot for slot in machine.scheduler.slots.slots if slot.last is not endless]
    assert all(slot.kept and slot.copy and slot.copy.state is EntryState.RAM for slot in slots)


def test_a_state_that_is_not_copied_costs_its_sequence_time_and_no_token() -> None:
    """SPEC C16, Q4: the same text, computed once more."""
    dear, free = CardBackend(), CardBackend(token_s=0.0)
    texts = []
    for backend in (dear, free):
        machine = machine_of(backend)
        run(machine, prompt(1, 500), prompt(2, 500), prompt(3, 500), prompt(1, 500))
        texts.append([sequence.tokens for sequence in machine.sequences])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("most", "left"), [(8, {3, 0}), (2, {3, 1, 0})])
def test_idle_slots_that_are_not_worth_storing_share_turns_a_few_each(
    monkeypatch: pytest.MonkeyPatch, most: int, left: set[int]
) -> None:
    """SPEC C16: beside readers such a turn goes the longer way, and no turn looks at all of many."""
    monkeypatch.setattr(allocators, "MOST_DECIDED", most)
    machine = machine_of(CardBackend(), has_streams=True, num_slots=4, num_cells=4 * 4096)
    allocator, seen = machine.scheduler.allocator, []
    for number in range(4):
        machine.enter_prompt(prompt(number, 8))
    while machine.scheduler.has_work:
        machine.step()
    machine.enter_prompt(prompt(9, 64), num_tokens=10)
    while machine.scheduler.has_work and len(seen) < 400:
        machine.step()
        seen.append(len([1 for slot in allocator.slots.slots if slot.kept and not slot.is_store_decided]))
    assert set(seen[:-1]) == left, "with its end there is one more"
