"""How steps are shared on a device, played through on a clock that only steps move."""

from statistics import mean

import pytest

from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.cells import SchedulerLimits
from stoker.kv.sequence import Sequence, SequenceKey
from stoker.machine.ledger import Ledger
from stoker.scheduler.scheduler import Scheduler

FIXED_S, TOKEN_S, ROW_S = 0.0023, 1 / 50_000, 0.00005
SHAPE_S = 0.004
"""A step of another shape than the one before: its graph is made anew."""


class Device:
    """One model's scheduler on a device of known times; nothing is computed."""

    def __init__(self, *, token_s=TOKEN_S, **limits):
        known = {"num_slots": 16, "num_sequences": 32, "num_cells": 2**17, "n_batch": 2048}
        limits = {"is_on_device": True, "max_queue": 64} | known | limits
        self.scheduler = Scheduler(SchedulerLimits(**limits), PrefixCache(CacheLimits(), Ledger()))
        self.token_s = token_s
        self.now = 0.0
        self.num_entered = 0
        self.shape = (0, 0)
        self.steps, self.ops = [], []
        self.first_s, self.gaps_s, self.last_s = {}, {}, {}

    def enter(self, name, num_prompt, num_wanted=8, priority=Priority.INTERACTIVE, num_shared=0):
        """A request of its own tokens, after some that others have too."""
        self.num_entered += 1
        sequence = Sequence(
            key=SequenceKey(name, 0),
            tokens=[0] * num_shared + [self.num_entered] * (num_prompt - num_shared),
            num_prompt=num_prompt,
            num_wanted=num_wanted,
            arrival_s=self.now,
            priority=priority,
        )
        self.scheduler.enqueue(sequence, self.now)
        return sequence

    def step(self):
        """One step, as long as the device takes."""
        self.ops += self.scheduler.schedule(self.now).ops
        plan = self.scheduler.plan()
        assert plan is not None, "work and no step"
        took_s = self.took_s(plan)
        self.now += took_s
        self.steps.append({part.sequence.key.request_id: len(part.item.tokens) for part in plan.parts})
        self.scheduler.cost.learn(plan.num_tokens, took_s)
        self.scheduler.computed(plan, self.now)
        self.scheduler.note_steps()
        for part in plan.parts:
            if part.sequence.num_pending == 0:
                self._draw(part.sequence)

    def took_s(self, plan):
        """Seconds of a step."""
        last, self.shape = self.shape, (plan.num_tokens, plan.batch().num_rows)
        took_s = FIXED_S + plan.num_tokens * self.token_s + self.shape[1] * ROW_S
        return took_s + SHAPE_S * (self.shape != last)

    def _draw(self, sequence):
        name = sequence.key.request_id
        self.first_s.setdefault(name, self.now - sequence.arrival_s)
        self.gaps_s.setdefault(name, []).append(self.now - self.last_s.get(name, self.now))
        self.last_s[name] = self.now
        sequence.tokens.append(7)
        if sequence.num_generated == sequence.num_wanted:
            self.scheduler.retire(sequence, FinishReason.LENGTH, self.now)

    def run(self):
        """To the end of all there is."""
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check()


def warmed(**limits):
    """A device that has served one request of each size."""
    device = Device(**limits)
    for name, num_prompt in {"small": 100, "large": 6000}.items():
        device.enter(name, num_prompt, 30)
        device.run()
    device.steps.clear()
    return device


def test_prompts_that_come_at_once_end_one_after_the_other():
    """Q18: the last first token comes no later than by fair slices, the others much sooner."""
    found = {}
    for is_on_device in (True, False):
        device = warmed(is_on_device=is_on_device)
        for at in range(8):
            device.enter(f"p{at}", 4096)
        device.run()
        found[is_on_device] = [device.first_s[f"p{at}"] for at in range(8)]
    assert max(found[True]) <= 1.02 * max(found[False])
    assert max(found[True]) <= 1.15 * 8 * 4096 * TOKEN_S
    assert mean(found[True]) < 0.8 * mean(found[False])
    assert found[True] == sorted(found[True])


def test_a_short_prompt_overtakes_a_long_one_and_none_waits_for_ever():
    """Q18: 3,000 tokens go before 24,000 that came sooner, until these have waited for long enough."""
    device = warmed(num_slots=64)
    device.enter("long", 24_000, 1)
    device.step()
    for at in range(100):  # more than there is time for
        device.enter(f"short{at}", 3000, 1)
        device.step()
    device.run()
    assert device.first_s["short0"] < 0.2
    assert 1.5 * 24_000 * TOKEN_S < device.first_s["long"] < 6 * 24_000 * TOKEN_S


def test_a_person_reads_on_beside_eight_jobs():
    """Q18: a step of another shape is prepared anew, so jobs join seldom and together."""
    device = warmed()
    device.enter("person", 100, 400)
    for at in range(8):
        device.enter(f"job{at}", 100, 400, Priority.BACKGROUND)
    began_s = device.now
    while "person" not in device.gaps_s or len(device.gaps_s["person"]) < 400:
        device.step()
    alone_s = 400 * (FIXED_S + TOKEN_S + ROW_S)
    assert device.now - began_s < 1.15 * alone_s
    together = [step for step in device.steps if len(step) > 1]
    assert 8 <= len(together) < 40
    assert sum(len(step) == 9 for step in together) >= len(together) / 2


@pytest.mark.parametrize(("num_prompt", "token_s"), [(100, TOKEN_S), (4096, TOKEN_S), (4096, 1 / 22_000)])
def test_a_person_who_comes_while_jobs_run_has_a_first_token_in_a_tenth_of_a_second(num_prompt, token_s):
    """Q3, Q18: whatever the jobs do then, reading long prompts or writing."""
    device = warmed(token_s=token_s)
    for at in range(8):
        device.enter(f"job{at}", num_prompt, 500, Priority.BACKGROUND)
    for at in range(30):
        device.step()
        began_s = device.now
        device.step()
        passed_s = device.now - began_s  # it may have come when that step began
        device.enter(f"person{at}", 200, 1)
        while f"person{at}" not in device.first_s:
            device.step()
        assert passed_s + device.first_s[f"person{at}"] < 0.1
    assert any(name.startswith("job") for name in device.first_s)


@pytest.mark.parametrize(("is_reading", "most_s"), [(True, 0.16), (False, 0.25)])
def test_steps_of_a_slow_device_are_as_short_as_anywhere(is_reading, most_s):
    """Q18: a device that reads 500 tokens a second gets slices that nobody waits long for."""
    device = warmed(token_s=1 / 500)
    if is_reading:
        device.enter("reader", 50, 1000)
        while "reader" not in device.first_s:
            device.step()
    device.enter("prompt", 1000, 1)
    while "prompt" not in device.first_s:
        began_s = device.now
        device.step()
        assert device.now - began_s < most_s


def test_a_device_is_not_thought_slow_before_a_slice_was_tried():
    """Q18: that a step of one token takes 2 ms says nothing of 1,000."""
    device = Device()
    device.enter("writer", 4, 1000)
    for _ in range(20):
        device.step()
    device.enter("prompt", 4096, 1)
    while "prompt" not in device.first_s:
        device.step()
    assert len([step for step in device.steps if step.get("prompt")]) <= 4


def test_a_slow_step_of_many_short_prompts_makes_no_small_slices_of_a_long_one():
    """Q18: such a step is several calls; a slice costs no more a token than the quickest step did."""
    device = warmed()
    for num_tokens in (600, 1200, 2048):
        for _ in range(100):
            device.scheduler.cost.learn(num_tokens, 0.3)
    device.enter("writer", 4, 1000)
    device.step()
    device.enter("prompt", 4096, 1)
    while "prompt" not in device.first_s:
        device.step()
    slices = [step["prompt"] for step in device.steps if "prompt" in step]
    assert len(slices) <= 7
