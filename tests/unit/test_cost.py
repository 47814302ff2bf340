"""The step-time model and its budgets, in numbers."""

import pytest

from stoker.ipc.model import Policy
from stoker.ipc.request import Priority
from stoker.kv.sequence import Sequence, SequenceKey, SequenceState
from stoker.scheduler.cost import StepCost
from stoker.scheduler.plan import Planner, StepBudget
from stoker.scheduler.slice_budget import MIN_SLICE_S, SliceBudget


def taught(times=None):
    """A model that has seen steps of 10 ms, and 5 ms more for each token after the first."""
    cost = StepCost()
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        cost.learn(num_tokens, (times or (lambda n: 0.01 + 0.005 * (n - 1)))(num_tokens))
    return cost


def member(name, state, tokens=40, priority=Priority.INTERACTIVE):
    """A running sequence: one row to decode, or its whole prompt to prefill."""
    sequence = Sequence(
        key=SequenceKey(name, 0), tokens=[1] * tokens, num_prompt=tokens, priority=priority, slot=len(name)
    )
    sequence.state = state
    sequence.num_computed = tokens - 1 if state is SequenceState.DECODE else 0
    return sequence


def counts(plan):
    """Tokens of each part by name."""
    return {part.sequence.key.request_id: len(part.item.tokens) for part in plan.parts}


def test_a_step_between_two_measured_ones_costs_what_lies_between():
    """Q8."""
    cost = taught()
    assert cost.predict(3) == pytest.approx(0.02)
    assert cost.predict(100) == pytest.approx(0.505)
    assert cost.predict(1024) == pytest.approx(2 * cost.predict(512))
    assert StepCost().predict(3) is None


def test_the_tokens_of_a_budget_are_the_inverse_of_the_prediction():
    """Q9."""
    cost = taught()
    for num_tokens in (1, 5, 17, 200):
        assert cost.tokens_within(cost.predict(num_tokens) + 1e-9, 512) == num_tokens
    assert cost.tokens_within(0.001, 512) == 0
    assert cost.tokens_within(1000.0, 512) == 512


def test_a_step_in_which_the_process_stood_still_teaches_nothing():
    """Q9: nothing is divided by the no time that it took."""
    cost = StepCost()
    cost.learn(512, 0.0)
    assert cost.predict(1) is None
    assert cost.tokens_within(0.05, 8) == 8


def test_the_model_follows_quicker_steps_at_once_and_slower_ones_slowly():
    """M7: what it remembers is the quiet machine."""
    cost = taught()
    cost.learn(4, 0.25)
    assert cost.predict(4) < 0.04
    for _ in range(5):
        cost.learn(4, 0.01)
    assert cost.predict(4) == pytest.approx(0.01, rel=0.2)
    for _ in range(200):
        cost.learn(4, 0.03)
    assert cost.predict(4) == pytest.approx(0.03, rel=0.05)


def test_the_first_step_of_a_size_is_forgotten_for_a_quicker_one():
    """Q8: a device has loaded its kernels then; one that is slower teaches as any other."""
    cost = StepCost()
    cost.learn(500, 0.2)
    cost.learn(500, 0.01)
    assert cost.predict(500) == pytest.approx(0.01)
    cost.learn(500, 0.006)
    assert cost.predict(500) == pytest.approx(0.008)
    cost.learn(8, 0.004)
    cost.learn(8, 0.1)
    assert cost.predict(8) < 0.01


def test_each_number_of_threads_has_its_own_times():
    """M7."""
    cost = taught()
    cost.use_threads(4)
    assert cost.predict(1) == pytest.approx(0.01)  # nothing of its own yet
    cost.learn(1, 0.004)
    assert cost.predict(1) == pytest.approx(0.004)
    cost.use_threads(1)
    assert cost.predict(1) == pytest.approx(0.01)


def test_a_noisy_point_does_not_make_more_tokens_cheaper_than_fewer():
    """Q8: the curve only rises."""
    cost = taught(lambda n: 0.5 if n == 4 else 0.01 + 0.005 * (n - 1))
    predicted = [cost.predict(n) for n in range(1, 600)]
    assert predicted == sorted(predicted)


@pytest.mark.parametrize(
    ("policy", "num_tokens"), [(Policy.LATENCY, 8), (Policy.BALANCED, 28), (Policy.THROUGHPUT, 511)]
)
def test_prefill_beside_an_interactive_row_is_cut_to_the_policys_time(policy, num_tokens):
    """Q9: 9 tokens of such steps take 50 ms, one of them is the row; 29 take 150 ms."""
    budget = StepBudget(taught(), 512, policy, 0.05)
    assert budget.prefill(1, 1) == num_tokens
    assert budget.prefill(0, 1) == 512


def test_many_prompts_beside_one_row_may_take_longer_steps():
    """Q9: but no longer than a reader may wait for a token, however many they are."""
    budget = StepBudget(taught(), 512)
    assert budget.prefill(1, 1) == 8
    assert budget.prefill(1, 4) == budget.prefill(1, 8) == 13  # 75 ms
    assert budget.prefill(4, 4) == 8


def test_a_prompt_goes_on_even_where_decoding_takes_the_whole_target():
    """Q9: never below a token for each ready prefill."""
    planner = Planner(StepBudget(taught(), 512), 64)
    rows = [member("d" * n, SequenceState.DECODE) for n in range(1, 31)]
    prompts = [member("p" * n, SequenceState.PREFILL) for n in range(40, 52)]
    planned = counts(planner.plan([*rows, *prompts]))
    assert all(planned[prompt.key.request_id] >= 1 for prompt in prompts)
    assert all(planned[row.key.request_id] == 1 for row in rows)


def test_a_prompt_that_half_a_target_more_finishes_is_finished():
    """Q9: its first token is worth the delay; the others' share of the step stays what it was."""
    planner = Planner(StepBudget(taught(), 512), 64)
    rows = [member("d" * n, SequenceState.DECODE) for n in range(1, 4)]
    short, long = member("s", SequenceState.PREFILL, 7), member("l", SequenceState.PREFILL, 300)
    planned = counts(planner.plan([*rows, short, long]))
    assert planned["s"] == 7
    assert planned["l"] == 4  # half of the 8 tokens that prompts have beside three rows
    longer = member("s", SequenceState.PREFILL, 8)  # a target and a half is 14 tokens in all
    assert counts(planner.plan([*rows, longer, long]))["s"] == 4


def test_a_step_that_one_prompt_fills_holds_nothing_of_another():
    """Q9: also where that other asks for the logits of all its tokens."""
    quick = taught(lambda n: 0.0001 * n)
    planner = Planner(StepBudget(quick, 64), 64)
    whole, scored = member("w", SequenceState.PREFILL, 64), member("sc", SequenceState.PREFILL, 80)
    scored.wants_prompt_logits = True
    assert counts(planner.plan([whole, scored])) == {"w": 64}


def test_throughput_keeps_three_quarters_of_the_batch_for_prefill():
    """Q9."""
    planner = Planner(StepBudget(taught(), 16, Policy.THROUGHPUT), 64)
    rows = [member("d" * n, SequenceState.DECODE) for n in range(1, 13)]
    planned = counts(planner.plan([*rows, member("prompt" * 9, SequenceState.PREFILL)]))
    assert planned["prompt" * 9] == 12
    assert len(planned) == 5


def test_background_joins_interactive_decode_in_a_tenth_of_its_time():
    """Q8: within the target always, and under the default policy so rarely that nobody notices."""
    cost = taught()
    planner = Planner(StepBudget(cost, 512), 64)
    running = [
        member("person", SequenceState.DECODE),
        *(member(f"job{n:03}" + "x" * n, SequenceState.DECODE, priority=Priority.BACKGROUND) for n in (1, 2)),
    ]
    steps = [counts(planner.plan(running)) for _ in range(200)]
    assert all("person" in step for step in steps)
    extra_s = sum(cost.predict(len(step)) - cost.predict(1) for step in steps)
    assert 0.05 <= extra_s / (200 * cost.predict(1)) <= 0.11
    joined = [sum(name in step for step in steps) for name in ("job001x", "job002xx")]
    assert min(joined) > 0.4 * max(joined)


def test_background_joins_as_far_as_the_target_where_the_policy_is_not_latency():
    """Q8."""
    planner = Planner(StepBudget(taught(), 512, Policy.BALANCED, 0.05), 64)
    jobs = [member("j" * n, SequenceState.DECODE, priority=Priority.BACKGROUND) for n in range(2, 30)]
    planned = counts(planner.plan([member("p", SequenceState.DECODE), *jobs]))
    assert len(planned) == 9  # 50 ms


def test_background_alone_prefills_in_slices_that_an_arrival_need_not_wait_long_for():
    """Q3: its chunk boundary comes after four targets at most."""
    planner = Planner(StepBudget(taught(), 4096), 64)
    job = member("job", SequenceState.PREFILL, tokens=4000, priority=Priority.BACKGROUND)
    assert counts(planner.plan([job])) == {"job": 64}
    quick = Planner(StepBudget(taught(lambda n: 0.001 + 0.0001 * n), 4096), 64)
    assert counts(quick.plan([job]))["job"] == pytest.approx(1990, rel=0.02)


def test_people_prefill_before_background():
    """Q2, Q9: background takes what is left of the batch."""
    planner = Planner(StepBudget(taught(), 48), 64)
    person = member("person", SequenceState.PREFILL)
    job = member("job", SequenceState.PREFILL, priority=Priority.BACKGROUND)
    assert counts(planner.plan([job, person]))["person"] == 40


def test_a_budget_of_just_one_step_carries_one_token():
    """Q8: and less carries none."""
    cost = taught()
    least_s = cost.predict(1)
    assert cost.tokens_within(least_s, 512) == 1
    assert cost.tokens_within(least_s * 0.999, 512) == 0


def test_a_slice_waits_until_there_is_a_millisecond_for_it():
    """V3, Q8: to the millisecond itself."""
    slices = SliceBudget(0.05)
    slices.spent(0.05)
    assert slices.next_s() == 0.0
    slices.stepped(4 * MIN_SLICE_S)
    assert slices.next_s() == pytest.approx(MIN_SLICE_S)
