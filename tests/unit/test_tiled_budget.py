"""Prompts in whole tiles between the steps of readers, played through on a clock that only steps move."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from test_loop import Engine

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.llama.row_tiles import TILE, RowTiles
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.threads.timer import StepTimer
from stoker.ipc.model import Policy
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.cells import SchedulerLimits
from stoker.kv.sequence import Sequence, SequenceKey
from stoker.machine.ledger import Ledger
from stoker.scheduler.cost import StepCost
from stoker.scheduler.plan import StepPlan
from stoker.scheduler.scheduler import Scheduler
from stoker.scheduler.tiled_budget import TiledStepBudget

TILES = RowTiles.of(134_515_008, 49152 * 576, 576, 30, half_tile=0.978)  # of a Xeon with AVX-512
FIXED_S, UNIT_S = 0.006, 0.0033
"""What a step takes, and a product with the weights: measured with two threads of a Xeon, SmolLM2-135M."""
MAX_S = 0.4


class Machine:
    """One model's scheduler on a CPU with tiles; nothing is computed.

    Attributes:
        steps: tokens of each part by name.
        token_s: when each sequence was given its tokens.
    """

    def __init__(self, *, unit_s: float = UNIT_S, **limits: object) -> None:
        known = {"num_slots": 4, "num_sequences": 8, "num_cells": 2**15, "n_batch": 512, "max_step_s": MAX_S}
        given = {"tiles": TILES} | known | limits
        self.scheduler = Scheduler(SchedulerLimits(**given), PrefixCache(CacheLimits(), Ledger()))  # type: ignore[arg-type]
        self.unit_s, self.now, self.num_entered = unit_s, 0.0, 0
        self.steps: list[dict[str, int]] = []
        self.took_s: list[float] = []
        self.token_s: dict[str, list[float]] = {}
        for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            took_s = FIXED_S + num_tokens * unit_s
            self.scheduler.cost.learn(num_tokens, took_s)

    def enter(self, name: str, num_prompt: int, num_wanted: int = 4, **fields: object) -> Sequence:
        """A request with tokens of its own."""
        self.num_entered += 1
        tokens = [self.num_entered] * num_prompt
        sequence = Sequence(key=SequenceKey(name, 0), tokens=tokens, num_prompt=num_prompt, **fields)  # type: ignore[arg-type]
        sequence.num_wanted, sequence.arrival_s = num_wanted, self.now
        self.scheduler.enqueue(sequence, self.now)
        return sequence

    def enter_after(
        self, name: str, num_before: int, num_prompt: int, num_wanted: int = 4, **fields: object
    ) -> Sequence:
        """A request that goes on after so many tokens that are computed, in the next step."""
        sequence = self.enter(name, num_before + num_prompt, num_wanted, **fields)
        self.scheduler.schedule(self.now)
        assert sequence.slot is not None
        self.scheduler.cells.extend(sequence.slot, num_before)
        sequence.num_computed = num_before
        return sequence

    def step(self) -> dict[str, int]:
        """One step, as long as the machine takes; it is learned from as `StepTimer` does."""
        self.scheduler.schedule(self.now)
        plan = self.scheduler.plan()
        assert plan is not None, "work and no step"
        batch = plan.batch()
        num_tokens = batch.num_tokens + TILES.num_missing(batch)
        took_s = self._took_s(plan, num_tokens)
        self.now += took_s
        self.scheduler.cost.stepped(num_tokens, took_s)
        self.scheduler.cost.learn(num_tokens, took_s)
        self.steps.append({part.sequence.key.request_id: len(part.item.tokens) for part in plan.parts})
        self.took_s.append(took_s)
        self.scheduler.computed(plan, self.now)
        for part in plan.parts:
            if part.sequence.num_pending == 0:
                self._draw(part.sequence)
        self.scheduler.check()
        return self.steps[-1]

    def _took_s(self, plan: StepPlan, num_tokens: int) -> float:
        spans = [(part.item.start, len(part.item.tokens)) for part in plan.parts]
        is_tiled = num_tokens >= TILE
        return FIXED_S + self.unit_s * (TILES.together(spans) if is_tiled else TILES.alone(spans))

    def _draw(self, sequence: Sequence) -> None:
        self.token_s.setdefault(sequence.key.request_id, []).append(self.now)
        sequence.tokens.append(7)
        if sequence.num_generated == sequence.num_wanted:
            self.scheduler.retire(sequence, FinishReason.LENGTH, self.now)

    def read_by(self, *names: str, num_before: int = 300, **fields: object) -> None:
        """Somebody reads: a long answer of each is under way."""
        for name in names:
            self.enter_after(name, num_before, 1, 400, **fields)
        while any(len(self.token_s.get(name, ())) < 3 for name in names):
            self.step()
        self.steps.clear()
        self.took_s.clear()


def test_the_rest_of_a_prompt_that_is_several_slices_has_a_step_of_its_own() -> None:
    """Q28: its first token comes after one step, and readers lose as much as by the slices."""
    machine = Machine()
    machine.read_by("a", "b", "c")
    machine.enter_after("q", 380, 40)
    assert machine.step() == {"q": 40}
    assert set(machine.step()) == {"a", "b", "c", "q"}


def test_what_half_a_target_more_finishes_goes_beside_the_readers() -> None:
    """Q9, Q28."""
    machine = Machine()
    machine.read_by("a")
    machine.enter_after("q", 60, 6)
    assert machine.step() == {"a": 1, "q": 6}


def test_the_next_prompt_waits_until_readers_had_the_steps_that_slices_would_have_left_them() -> None:
    """Q28: they get on as they do beside slices."""
    machine = Machine()
    machine.read_by("a", "b")
    machine.enter_after("q", 380, 60)
    assert machine.step() == {"q": 60}
    machine.enter_after("r", 380, 60)
    num_between = 0
    while "r" not in machine.step():
        assert {"a", "b"} <= set(machine.steps[-1])
        num_between += 1
    assert machine.steps[-1] == {"r": 60}
    assert 3 <= num_between <= 10


def test_a_long_prompt_comes_in_slices_until_those_cost_twice_as_much_as_tiles() -> None:
    """Q28: a reader's next token is late in each step, then once in several."""
    machine = Machine()
    machine.read_by("a", num_before=60)
    machine.enter("long", 3000)
    taken = []
    while len(taken) < 900:
        taken += [machine.step().get("long", 0)] * machine.steps[-1].get("long", 0)
    assert max(taken[:300]) < TILE, "in slices"
    assert set(taken[800:]) == {TILE}, "in tiles"
    gaps = [late - soon for soon, late in pairwise(machine.token_s["a"])]
    assert max(gaps) < MAX_S * 4 / 3
    last = machine.steps[-20:]
    assert 0.1 < sum("long" in step for step in last) / len(last) < 0.4


def test_the_whole_is_quicker_for_everybody() -> None:
    """Q28: for readers and for the one who asks, beside the same machine without tiles in its plans."""
    ends = {}
    for tiles in (TILES, None):
        machine = Machine(tiles=tiles)
        machine.read_by("a", "b", "c")
        for number in range(8):
            begun_s = machine.now
            machine.enter_after(f"q{number}", 380, 60, 1)
            while f"q{number}" not in machine.token_s:
                machine.step()
            ends.setdefault(f"first {number}", []).append(machine.now - begun_s)
        while len(machine.token_s["a"]) < 80:
            machine.step()
        ends.setdefault("a has 80 tokens", []).append(machine.now)
    for what, (in_tiles_s, in_slices_s) in ends.items():
        assert in_tiles_s < in_slices_s, what


def test_a_prompt_that_ends_goes_before_what_is_left_of_a_tile_for_others() -> None:
    """Q28: the others have slices beside the readers again."""
    machine = Machine()
    machine.read_by("a")
    machine.enter("long", 2000)
    machine.enter_after("q", 380, 40)
    assert machine.step() == {"q": 40}


@pytest.mark.parametrize(
    ("policy", "unit_s"), [(Policy.THROUGHPUT, UNIT_S), (Policy.LATENCY, 0.02)], ids=["policy", "slow"]
)
def test_no_tile_where_the_policy_mixes_or_it_would_take_too_long(policy: Policy, unit_s: float) -> None:
    """Q23, Q28: decode rows are in every step."""
    machine = Machine(unit_s=unit_s, policy=policy)
    machine.read_by("a")
    machine.enter_after("q", 380, 60)
    assert machine.step()["a"] == 1


def test_a_step_that_was_ended_is_not_paid_for() -> None:
    """Q27, Q28: an arrival ends it while it is young, and both have the next one."""
    machine = Machine()
    machine.read_by("a", "b")
    machine.enter_after("q", 380, 60)
    machine.scheduler.schedule(machine.now)
    ended = machine.scheduler.plan()
    assert ended is not None
    assert len(ended.parts) == 1
    assert machine.step() == {"q": 60}


def test_what_fits_beside_the_readers_does_not_wait_until_they_had_their_steps() -> None:
    """Q9, Q28: another one's long prompt is in tiles."""
    machine = Machine()
    machine.read_by("a", num_before=60)
    machine.enter_after("long", 1000, 1000)
    assert machine.step() == {"long": TILE}
    machine.enter_after("q", 60, 6)
    assert machine.step() == {"a": 1, "q": 6}


def test_a_token_goes_beside_many_readers_whose_step_is_long_without_it() -> None:
    """Q9, Q28: a slice has some tokens whatever the rows take."""
    machine = Machine(num_slots=24, num_sequences=32)
    machine.read_by(*(f"r{number:02}" for number in range(22)))
    assert machine.scheduler.cost.predict(22) > 1.5 * 0.05
    machine.enter_after("q", 380, 1)
    assert len(machine.step()) == 23


def test_what_three_targets_carry_goes_beside_the_readers_of_a_balanced_policy() -> None:
    """Q9, Q28."""
    machine = Machine(policy=Policy.BALANCED)
    machine.read_by("a", num_before=60)
    machine.enter_after("q", 60, 24)
    assert machine.step() == {"a": 1, "q": 24}


@pytest.mark.parametrize("num_left", [24, 60])
def test_no_job_joins_the_step_for_which_readers_wait(num_left: int) -> None:
    """Q8, Q28: also where what is left of the prompt is less than half a tile."""
    machine = Machine(num_slots=6)
    machine.read_by("a", "b", "c")
    machine.enter("job", 2000, priority=Priority.BACKGROUND)
    machine.enter_after("q", 380, num_left)
    assert machine.step() == {"q": num_left}


def test_background_that_is_owed_a_step_has_it_with_the_readers() -> None:
    """Q7, Q28: no prompt goes before it without them."""
    machine = Machine()
    machine.read_by("a")
    machine.read_by("job", priority=Priority.BACKGROUND)
    job = next(s for s in machine.scheduler.slots.running if s.is_background)
    machine.enter_after("q", 380, 60)
    plan = machine.scheduler.planner.plan(machine.scheduler.slots.running, job)
    assert plan is not None
    assert {part.sequence.key.request_id for part in plan.parts} == {"a", "job", "q"}


@pytest.mark.parametrize(("policy", "most_s"), [(Policy.LATENCY, 0.05), (Policy.BALANCED, 0.15)])
def test_a_quick_machine_reads_as_many_tiles_as_its_target_has_room_for(
    policy: Policy, most_s: float
) -> None:
    """Q9, Q28: but no more, as readers wait for them."""
    machine = Machine(unit_s=UNIT_S / 30, policy=policy)
    machine.read_by("a")
    machine.enter_after("long", 2000, 3000)
    within = machine.scheduler.cost.tokens_within(most_s, 512)
    assert within > 2 * TILE
    assert machine.step() == {"long": within - within % TILE}


def test_readers_of_a_slow_machine_are_owed_as_many_steps_as_of_a_quick_one() -> None:
    """Q28: slices take as many times as long there."""
    owed = []
    for slower in (1.0, 2.0):
        budget = TiledStepBudget(StepCost(), 512, tiles=TILES)
        for num_tokens in (1, 8, 16, 64):
            budget._cost.learn(num_tokens, FIXED_S + num_tokens * UNIT_S)
        budget._cost.slowdown.times = slower
        budget.rows_waited(slower * 0.2, 1, 1)
        owed.append(budget._num_owed)
    assert owed[0] == pytest.approx(0.2 / (0.05 - budget._cost.predict(1)))
    assert owed[1] == pytest.approx(owed[0])


def test_readers_whose_rows_take_all_of_the_target_are_owed_no_more_than_some_steps() -> None:
    """Q28: a slice counts as half of the target, however little of it is left."""
    budget = TiledStepBudget(StepCost(), 512, target_s=0.05, tiles=TILES)
    for num_tokens in (1, 4, 16, 64):
        budget._cost.learn(num_tokens, 0.048 + num_tokens * 0.0001)
    budget.rows_waited(0.2, 4, 1)
    assert budget._num_owed == pytest.approx(0.2 / 0.025)


def test_readers_who_come_later_are_owed_nothing() -> None:
    """Q28: a debt to those who have left holds up nobody."""
    machine = Machine()
    machine.read_by("a")
    machine.enter_after("q", 380, 60, 1)
    assert machine.step() == {"q": 60}
    assert machine.scheduler.planner.budget.owes_rows
    reader = next(s for s in machine.scheduler.slots.running if s.key.request_id == "a")
    machine.scheduler.retire(reader, FinishReason.CANCELLED, machine.now)
    machine.enter("b", 30, 400)
    machine.step()
    assert not machine.scheduler.planner.budget.owes_rows


def test_prompts_whose_every_logit_is_asked_come_beside_the_readers() -> None:
    """Q28, C10: they have rules of their own."""
    machine = Machine()
    machine.read_by("a")
    machine.enter("q", 60, wants_prompt_logits=True)
    assert machine.step()["a"] == 1


def test_jobs_get_no_steps_without_readers() -> None:
    """Q8, Q28: a background prompt joins readers' steps only."""
    machine = Machine()
    machine.read_by("a")
    machine.enter("job", 2000, priority=Priority.BACKGROUND)
    assert all("a" in machine.step() for _ in range(30))


def test_messages_that_come_at_once_are_read_two_by_two_where_a_step_of_all_costs_more() -> None:
    """Q28: the first two answer in half the time, the others when all would have."""
    machine = Machine()
    for name in "abcd":
        machine.enter_after(name, 323, 32)
    assert machine.step() == {"a": 32, "b": 32}
    assert machine.step() == {"c": 32, "d": 32}


def test_messages_behind_one_beginning_are_read_together() -> None:
    """Q28, C1: its cells are there once, so that a step of all costs no more a token."""
    machine = Machine()
    for at, name in enumerate("abcd"):
        sequence = machine.enter_after(name, 639, 20)
        sequence.tokens[:] = [5] * 639 + [10 + at] * 20
    assert machine.step() == dict.fromkeys("abcd", 20)


def test_prompts_without_a_beginning_that_come_at_once_are_read_together() -> None:
    """Q9, Q28: there a step of all costs no more."""
    machine = Machine()
    for name in "abcd":
        machine.enter(name, 48)
    assert len(machine.step()) == 4


def test_jobs_do_not_join_a_persons_tile() -> None:
    """Q8, Q28: it would attend to the cells of all; they have their tenth of the steps after it."""
    machine = Machine()
    machine.read_by("job 1", "job 2", priority=Priority.BACKGROUND)
    machine.enter_after("q", 300, 60, 100)
    assert machine.step() == {"q": 60}
    steps = [machine.step() for _ in range(60)]
    assert all("q" in step for step in steps)
    assert 1 <= sum(len(step) > 1 for step in steps) <= 20


def test_a_persons_few_tokens_are_no_tile_and_jobs_join_them() -> None:
    """Q8, Q28."""
    machine = Machine()
    machine.read_by("job 1", "job 2", priority=Priority.BACKGROUND)
    for number in range(20):
        machine.enter_after(f"q{number}", 300, 20, 1)
        if len(machine.step()) > 1:
            return
    pytest.fail(f"jobs joined none of {machine.steps}")


def test_jobs_alone_read_and_write_in_turns_where_that_is_quicker() -> None:
    """Q28: each has every second step."""
    machine = Machine()
    machine.read_by("job 1", "job 2", priority=Priority.BACKGROUND)
    machine.enter_after("p", 0, 300, priority=Priority.BACKGROUND)
    for _ in range(2):
        assert set(machine.step()) == {"p"}
        assert machine.step() == {"job 1": 1, "job 2": 1}


def test_jobs_alone_share_a_step_where_rows_have_hardly_any_cells() -> None:
    """Q28: a step more would read all weights once more."""
    machine = Machine()
    machine.read_by("job 1", "job 2", num_before=2, priority=Priority.BACKGROUND)
    machine.enter_after("p", 0, 300, priority=Priority.BACKGROUND)
    assert set(machine.step()) == {"p", "job 1", "job 2"}


def test_a_step_that_is_padded_counts_as_a_tile_in_what_waits_are_estimated_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Q14, Q24: else the machine seems slower than it is."""
    machine, told = Machine(), []
    monkeypatch.setattr(machine.scheduler.eta, "stepped", lambda num_rows, _: told.append(num_rows))
    machine.enter_after("q", 380, 50)
    assert machine.step() == {"q": 50}
    machine.step()
    machine.scheduler.note_steps()
    assert told == [TILE, 1]


def test_a_step_that_is_padded_is_learned_from_as_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q24: it takes as long, so that the next steps are not taken for those of a slow machine."""
    extensions, sizes, begin = FakeBackend.extensions, [], StepTimer.begin
    assert isinstance(extensions, property)
    found = extensions.fget
    assert found is not None
    cheap = RowTiles(1.0, 10.0)
    monkeypatch.setattr(
        FakeBackend, "extensions", property(lambda self: dataclasses.replace(found(self), tiles=cheap))
    )
    monkeypatch.setattr(
        StepTimer, "begin", lambda timer, num, *args: (sizes.append(num), begin(timer, num, *args))[1]
    )
    engine = Engine()
    engine.submit("r", prompt=tuple(range(80, 80 + 40)))
    engine.run("r")
    assert sizes[0] == TILE
    assert max(sizes[1:]) < 40, "rows, and guesses"
