"""How many threads steps use while other processes come and go, on a model of such a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contended_machine import Machine, Noise

from stoker.engine.threads.governor import Decision, StepSample, ThreadGovernor
from stoker.machine.cores import threads_that_fit

# Quiet seconds a step with one thread and with two: decode as measured on two kinds of machines.
MEMORY_BOUND = {1: 0.012, 2: 0.0085}
COMPUTE_BOUND = {1: 0.0185, 2: 0.0095}


def busy(start_s: float, end_s: float, num_cores: float = 1.0) -> Noise:
    """Others compute between two times."""
    return lambda now_s: num_cores if start_s <= now_s < end_s else 0.0


def alternating(half_s: float) -> Noise:
    """One other process computes, sleeps, computes, each for `half_s`."""
    return lambda now_s: float(now_s // half_s % 2 == 0)


def scaled(step_s: dict[int, float], times: float) -> dict[int, float]:
    """Steps that are `times` as long."""
    return {num: times * seconds for num, seconds in step_s.items()}


def steps_with(num_threads: int, new_machine: Callable[[], Machine], until_s: float) -> int:
    """What a fixed number of threads makes of the same time."""
    return new_machine().run(until_s, num_threads=num_threads)


# ---------------------------------------------------------------- lowering and raising


@pytest.mark.parametrize("times", [1.0, 4.0, 50.0], ids=["10 ms", "40 ms", "500 ms"])
def test_a_taken_core_is_left_within_a_second_and_taken_back_within_one(times: float) -> None:
    """SPEC M7: whatever a step takes; one under way is not interrupted."""
    longest_s = 1.0 + scaled(MEMORY_BOUND, times)[1]
    machine = Machine(scaled(MEMORY_BOUND, times), busy(3.0, 9.0))
    governor = ThreadGovernor(2)
    machine.run(14.0, governor)
    (lowered_s, one), (raised_s, two) = machine.changes
    assert (one, two) == (1, 2)
    assert 3.0 < lowered_s <= 3.0 + longest_s
    assert 9.0 < raised_s <= 9.0 + longest_s
    assert governor.reason == ""


def test_a_prompt_of_two_seconds_decides_alone() -> None:
    """SPEC M7: one long step is evidence enough, both ways."""
    governor = ThreadGovernor(2)
    robbed = StepSample(at_s=12.0, wall_s=2.0, cpu_s=2.6, predicted_s=None, num_threads=2)
    decision = governor.observe(robbed, 0.7)
    assert decision == Decision(1, "other processes use 0.7 of 2 cores")
    alone = StepSample(at_s=14.0, wall_s=2.0, cpu_s=2.0, predicted_s=None, num_threads=1)
    assert governor.observe(alone, 0.0) == Decision(2, "the cores are free again")


def test_what_is_known_of_others_may_lag() -> None:
    """SPEC M7: noise right after a reading: the loss waits for the next one, and has the right reason."""
    governor = ThreadGovernor(2)
    decision, at_s = None, 0.0
    while decision is None:
        at_s += 0.03
        robbed = StepSample(at_s=at_s, wall_s=0.03, cpu_s=0.03, predicted_s=0.01, num_threads=2)
        decision = governor.observe(robbed, 0.1 if at_s < 0.5 else 0.8)
    assert decision == Decision(1, "other processes use 0.8 of 2 cores")
    assert at_s < 0.6


@pytest.mark.parametrize("step_s", [MEMORY_BOUND, COMPUTE_BOUND])
def test_following_the_machine_beats_either_fixed_choice(step_s: dict[int, float]) -> None:
    """SPEC M7: quiet as fast as two threads, robbed as fast as one."""

    def machine() -> Machine:
        return Machine(step_s, busy(4.0, 10.0))

    governed = machine()
    governed.run(14.0, ThreadGovernor(2))
    best_fixed = max(steps_with(num, machine, 14.0) for num in (1, 2))
    assert governed.num_steps > 1.05 * best_fixed
    assert governed.speed(0.0, 4.0) > 0.99 / step_s[2]
    assert governed.speed(5.0, 10.0) > 0.97 / step_s[1]
    assert governed.speed(11.0, 14.0) > 0.97 / step_s[2]


def test_the_reason_follows_what_others_use() -> None:
    """SPEC M7: `threads_reason` tells the present, not the moment of the change."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, busy(0.0, 9.0))
    machine.run(3.0, governor)
    assert governor.reason == "other processes use 1.0 of 2 cores"
    assert "1 of 2 threads" in repr(governor)


# ---------------------------------------------------------------- what must not move it


@pytest.mark.parametrize("part", [0.1, 0.2, 0.3])
def test_our_own_front_and_its_clients_are_no_reason(part: float) -> None:
    """SPEC M7: short work, a tenth to a third of a core altogether, leaves the threads as they are."""
    machine = Machine(MEMORY_BOUND, lambda _: part)
    machine.run(10.0, ThreadGovernor(2))
    assert machine.changes == []


def test_a_burst_passes() -> None:
    """SPEC M7: a fifth of a second of somebody else, now and then."""
    machine = Machine(MEMORY_BOUND, lambda now_s: float(1.0 <= now_s % 2.0 < 1.2))
    machine.run(20.0, ThreadGovernor(2))
    assert machine.changes == []


@pytest.mark.parametrize("step_s", [MEMORY_BOUND, COMPUTE_BOUND])
@pytest.mark.parametrize("half_s", [0.3, 0.5, 1.0])
def test_noise_that_comes_and_goes_does_not_make_it_flap(half_s: float, step_s: dict[int, float]) -> None:
    """SPEC M7: in a minute few changes, and as many tokens as the worse fixed choice has, or more."""

    def machine() -> Machine:
        return Machine(step_s, alternating(half_s))

    governed = machine()
    governed.run(60.0, ThreadGovernor(2))
    assert len(governed.changes) <= 10
    assert governed.num_steps >= 0.98 * 5 * min(steps_with(num, machine, 12.0) for num in (1, 2))


def test_noise_of_some_seconds_is_followed() -> None:
    """SPEC M7: on and off for three seconds each is worth it: more tokens than with one or two threads."""

    def machine() -> Machine:
        return Machine(COMPUTE_BOUND, alternating(3.0))

    governed = machine()
    governed.run(60.0, ThreadGovernor(2))
    assert governed.num_steps > 1.05 * 5 * max(steps_with(num, machine, 12.0) for num in (1, 2))


def test_cores_lost_again_at_once_have_to_be_free_for_longer() -> None:
    """SPEC M7: and once they stay free, they are taken within the longest such time."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, lambda now_s: alternating(0.5)(now_s) if now_s < 20.0 else 0.0)
    machine.run(20.0, governor)
    assert governor.num_threads == 1
    machine.run(22.5, governor)
    assert governor.num_threads == 2


def test_steps_on_other_numbers_of_threads_say_nothing() -> None:
    """SPEC M7: a model with fewer threads of its own does not look robbed."""
    governor = ThreadGovernor(2)
    for at in range(1, 40):
        sample = StepSample(at_s=at / 10, wall_s=0.1, cpu_s=0.1, predicted_s=0.1, num_threads=1)
        assert governor.observe(sample, 0.7) is None


def test_waiting_for_a_slow_disk_is_not_taken_for_robbery() -> None:
    """SPEC M7: a loss that others do not explain counts only if steps are slower than foreseen."""
    governor = ThreadGovernor(2)
    for at in range(1, 40):
        sample = StepSample(at_s=at / 10, wall_s=0.1, cpu_s=0.1, predicted_s=0.1, num_threads=2)
        assert governor.observe(sample, 0.0) is None


def test_weights_that_come_from_the_disk_are_not_taken_for_robbery() -> None:
    """SPEC M7: the first prompt after a load waits for pages, on a machine at rest."""
    governor = ThreadGovernor(2)
    assert governor.observe(StepSample(9.0, 3.0, 0.5, None, 2), 0.0) is None
    assert governor.observe(StepSample(12.0, 3.0, 0.5, None, 2), None) is not None


# ---------------------------------------------------------------- machines that tell less


def test_without_machine_times_more_threads_are_tried_ever_more_rarely() -> None:
    """SPEC M7: lowered by what the process gets; tried after 1, 2, 4 ... seconds, at most 30."""
    machine = Machine(MEMORY_BOUND, busy(3.0, 300.0), shows_others=False)
    machine.run(70.0, ThreadGovernor(2))
    lowered = [at_s for at_s, num in machine.changes if num == 1]
    tried = [at_s for at_s, num in machine.changes if num == 2]
    assert lowered[0] < 4.0
    pauses = [round(later - earlier) for earlier, later in zip(lowered, tried, strict=False)]
    assert pauses == [1, 2, 4, 8, 16, 30]
    assert all(later - earlier < 0.3 for earlier, later in zip(tried, lowered[1:], strict=False))


def test_a_trial_on_a_quiet_machine_is_kept() -> None:
    """SPEC M7: nothing but the trial tells that the core is free again."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, busy(3.0, 5.0), shows_others=False)
    machine.run(12.0, governor)
    assert (governor.num_threads, governor.reason) == (2, "")
    assert machine.speed(9.0, 12.0) > 0.97 / MEMORY_BOUND[2]


def test_a_quota_shows_as_lost_cores_only() -> None:
    """SPEC M7: the machine seems idle, and two threads are held back together for want of quota."""

    def machine() -> Machine:
        return Machine(MEMORY_BOUND, quota_cores=1.2)

    governed = machine()
    governor = ThreadGovernor(2)
    governed.run(20.0, governor)
    assert governed.num_steps > 1.1 * steps_with(2, machine, 20.0)
    assert governor.reason.startswith("this process gets 1.")


def test_machine_times_that_vanish_leave_trials() -> None:
    """SPEC M7: lowered because of others, of whom nothing is heard any more."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, busy(0.0, 5.0))
    machine.run(3.0, governor)
    assert governor.num_threads == 1
    machine.shows_others, machine._others = False, None
    machine.run(8.0, governor)
    assert governor.num_threads == 2


# ---------------------------------------------------------------- pauses


def test_after_a_pause_free_cores_are_taken_at_once() -> None:
    """SPEC M7: idle with fewer threads; the first step asks what others used meanwhile."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, busy(0.0, 3.0))
    machine.run(3.0, governor)
    machine.idle(8.0)
    assert governor.wake(8.0, 0.0) == Decision(2, "the cores are free again")
    assert governor.wake(8.0, 0.0) is None


def test_after_a_pause_the_first_sample_asks_too() -> None:
    """SPEC M7: for a loop that only tells of steps that ended."""
    governor = ThreadGovernor(2)
    machine = Machine(MEMORY_BOUND, busy(0.0, 3.0))
    machine.run(3.0, governor)
    machine.idle(8.0)
    first = machine.step(1)
    assert governor.observe(first, 0.0) == Decision(2, "the cores are free again")


def test_evidence_from_before_a_pause_is_dropped() -> None:
    """SPEC M7: two short halves of a robbery, minutes apart, are none."""
    governor = ThreadGovernor(2)
    for start_s in (0.0, 100.0):
        for at in range(1, 3):
            sample = StepSample(
                at_s=start_s + at / 10, wall_s=0.1, cpu_s=0.1, predicted_s=0.05, num_threads=2
            )
            assert governor.observe(sample, 0.7) is None


def test_a_pause_with_others_at_work_changes_nothing() -> None:
    """SPEC M7: the mean over a pause may be old news; steps will tell."""
    governor = ThreadGovernor(2)
    sample = StepSample(at_s=1.0, wall_s=0.1, cpu_s=0.2, predicted_s=0.1, num_threads=2)
    assert governor.observe(sample, 0.0) is None
    assert governor.wake(9.0, 1.0) is None
    assert governor.wake(19.0, None) is None
    assert governor.num_threads == 2


def test_the_first_step_leaves_cores_that_are_plainly_taken() -> None:
    """SPEC M7: a long prompt's first step took ten seconds instead of one beside two busy processes."""
    assert ThreadGovernor(2).start(0.0, 1.4) == Decision(1, "other processes use 1.4 of 2 cores")
    assert ThreadGovernor(2).start(0.0, 0.7) is None, "steps will tell"
    assert ThreadGovernor(8, 16).start(0.0, 7.0) is None
    assert ThreadGovernor(8, 8).start(0.0, 3.0) == Decision(5, "other processes use 3.0 of 8 cores")


# ---------------------------------------------------------------- other machines


@pytest.mark.parametrize(("num_taken", "num_left"), [(1, 63), (4, 60), (8, 56), (30, 34)])
def test_a_large_machine_gives_up_only_what_is_taken(num_taken: int, num_left: int) -> None:
    """SPEC M7: 64 threads."""
    step_s = {num: 0.128 / num + 0.004 for num in range(1, 65)}
    machine = Machine(step_s, busy(0.5, 3.0, num_taken), num_cores=64)
    governor = ThreadGovernor(64)
    machine.run(1.5, governor)
    assert num_left <= governor.num_threads <= num_left + 0.15 * num_taken + 0.5
    machine.run(3.0, governor)
    assert governor.num_threads == num_left
    machine.run(4.0, governor)
    assert governor.num_threads == 64


def test_cores_beyond_the_threads_are_others_to_take() -> None:
    """SPEC M7: two threads on eight cores mind nobody until seven are in use."""
    governor = ThreadGovernor(2, num_cores=8)
    machine = Machine(MEMORY_BOUND, busy(0.0, 5.0, 6.0), num_cores=8)
    machine.run(5.0, governor)
    assert machine.changes == []


def test_more_threads_than_cores_are_lowered_to_the_cores() -> None:
    """SPEC M7: a number set too high is a bound, not a wish."""
    governor = ThreadGovernor(4, num_cores=2)
    sample = StepSample(at_s=1.0, wall_s=0.5, cpu_s=1.0, predicted_s=None, num_threads=4)
    assert governor.observe(sample, 0.0) == Decision(2, "there are 2 cores")
    quiet = StepSample(at_s=2.0, wall_s=0.5, cpu_s=1.0, predicted_s=None, num_threads=2)
    assert governor.observe(quiet, 0.0) is None
    assert governor.reason == "there are 2 cores"


def test_one_thread_stays_one() -> None:
    """SPEC M7: there is nothing to lower."""
    governor = ThreadGovernor(1, num_cores=2)
    machine = Machine(MEMORY_BOUND, busy(0.0, 5.0, 2.0))
    machine.run(5.0, governor)
    assert machine.changes == []


@pytest.mark.parametrize(
    ("max_threads", "num_cores", "others", "expected"),
    [(2, 2, 0.0, 2), (2, 2, 0.35, 2), (2, 2, 0.5, 1), (2, 2, 2.0, 1), (64, 64, 8.0, 56), (4, 8, 3.9, 4)],
)
def test_threads_that_fit(max_threads: int, num_cores: int, others: float, expected: int) -> None:
    """SPEC M7: a third of a core may be shared, and one thread always runs."""
    assert threads_that_fit(max_threads, num_cores, others) == expected


def test_disturbed_steps_teach_nothing() -> None:
    """SPEC M7, Q9: the step-time model remembers the quiet machine."""
    governor = ThreadGovernor(2)
    quiet = StepSample(at_s=0.2, wall_s=0.2, cpu_s=0.39, predicted_s=None, num_threads=2)
    governor.observe(quiet, 0.05)
    assert not governor.is_disturbed
    robbed = StepSample(at_s=0.4, wall_s=0.2, cpu_s=0.26, predicted_s=None, num_threads=2)
    governor.observe(robbed, 0.7)
    assert governor.is_disturbed
    machine = Machine(MEMORY_BOUND, busy(0.0, 9.0))
    lowered = ThreadGovernor(2)
    machine.run(3.0, lowered)
    assert not lowered.is_disturbed


def test_a_pause_in_which_cores_were_taken_ends_a_trial() -> None:
    """SPEC M7: nobody judges it; the next steps have one thread at least, and more as soon as may be."""
    governor = ThreadGovernor(2, 2)
    now_s = 0.0

    def steps(num: int, cores: float, others: float | None) -> None:
        nonlocal now_s
        for _ in range(num):
            now_s += 0.1
            threads = governor.num_threads
            governor.observe(StepSample(now_s, 0.1, 0.1 * min(cores, threads), 0.01, threads), others)

    steps(10, 1.0, None)
    assert governor.num_threads == 1
    while governor.num_threads == 1:  # until more are tried
        steps(1, 1.0, None)
    now_s += 1.5
    assert governor.start(now_s, 1.9) is not None
    steps(6, 0.5, 1.9)
    assert governor.num_threads == 1
    steps(8, 1.0, 0.0)
    assert governor.num_threads == 2
