"""How far a step guesses ahead: it pays or it is left, on machines of several kinds."""

from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest

from stoker.scheduler.cost import Slowdown, StepCost
from stoker.speculation.speculator import (
    MAX_CREDIT,
    MIN_CREDIT,
    READ_GAP_S,
    READ_STEPS,
    UNMEASURED,
    Acceptance,
    DraftLength,
    Rate,
)

CURVES = {
    "processor": {1: 0.017, 4: 0.044, 8: 0.078, 32: 0.110, 256: 0.9},
    "accelerator": {1: 0.005, 8: 0.006, 32: 0.008, 256: 0.03},
    "no gain": {1: 0.017, 2: 0.034, 32: 0.55, 256: 4.4},
}


def step_s(curve, num_tokens):
    """What a step really takes: between the points of a curve on a line."""
    points = sorted(curve.items())
    for (low, low_s), (high, high_s) in pairwise(points):
        if num_tokens <= high:
            return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
    raise AssertionError(num_tokens)


def measured(curve):
    """A model of steps that knows every size."""
    cost = StepCost()
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 256):
        cost.learn(num_tokens, step_s(curve, num_tokens))
    return cost


def decode(curve, num_tokens, is_drawn, cost=None):
    """Seconds for so many tokens with guesses everywhere, and without any; `is_drawn` decides each guess."""
    draft_length, odds, known = DraftLength(cost or measured(curve)), Acceptance(0.75, 0.9), 0
    took_s = 0.0
    while known < num_tokens:
        count = draft_length.num_worth(odds, 31)
        drawn = next((at for at in range(count) if not is_drawn()), count)
        this_s = step_s(curve, count + 1)
        took_s += this_s
        known += drawn + 1
        if count:
            draft_length.settle(count, drawn + 1, this_s)
            odds.note(drawn, is_missed=drawn < count)
        else:
            draft_length.stepped()
            odds.fade()
    return took_s, known * step_s(curve, 1)


@pytest.mark.parametrize("name", CURVES)
def test_guesses_that_are_never_drawn_cost_next_to_nothing(name):
    """SPEC D9: two in a hundred at most, whatever a step costs, over some hundred tokens and over many."""
    for num_tokens in (400, 4000):
        with_s, without_s = decode(CURVES[name], num_tokens, lambda: False)
        assert with_s <= 1.02 * without_s


@pytest.mark.parametrize(("rate", "curve"), [(0.5, "processor"), (0.8, "processor"), (0.7, "no gain")])
def test_guesses_that_do_not_pay_cost_next_to_nothing(rate, curve):
    """SPEC D9: drawn now and then, on a machine where that is not enough."""
    random = Random(3)
    with_s, without_s = decode(CURVES[curve], 4000, lambda: random.random() < rate)
    assert with_s <= 1.02 * without_s


def test_guesses_that_are_drawn_make_it_quicker():
    """SPEC D9: long ones where a step of many tokens is cheap for each."""
    random = Random(4)
    for name, rate, factor in (
        ("processor", 0.97, 2.0),
        ("accelerator", 0.8, 2.0),
        ("accelerator", 0.5, 1.3),
    ):
        with_s, without_s = decode(CURVES[name], 600, lambda rate=rate: random.random() < rate)
        assert without_s >= factor * with_s, name


def test_where_more_tokens_take_as_much_longer_nothing_is_guessed():
    """SPEC D9: however likely."""
    odds = Acceptance(0.99, 0.99)
    assert DraftLength(measured(CURVES["no gain"])).num_worth(odds, 31) == 0
    assert DraftLength(measured(CURVES["processor"])).num_worth(odds, 31) == 31


def test_nothing_is_guessed_before_a_step_was_measured_and_never_more_than_fits():
    """SPEC D9."""
    odds = Acceptance(0.9, 0.9)
    assert DraftLength(StepCost()).num_worth(odds, 31) == 0
    draft_length = DraftLength(measured(CURVES["accelerator"]))
    assert [draft_length.num_worth(odds, most) for most in (-1, 0, 1, 4)] == [0, 0, 1, 4]


def test_a_model_that_takes_long_to_guess_is_asked_for_less():
    """SPEC D9: guessing counts as part of the step."""
    odds, draft_length = Acceptance(0.9, 0.9), DraftLength(measured(CURVES["accelerator"]))
    counts = [draft_length.num_worth(odds, 31, guess_s) for guess_s in (0.0, 0.001, 0.003, 0.005)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_the_first_text_of_an_engine_takes_no_prompts_step_for_a_plain_one():
    """SPEC D9, D11: of steps a prompt's alone is known then; beside that every guess would seem to win."""
    cost, odds = StepCost(), Acceptance(0.5, 0.75)
    cost.learn(65, 0.376)
    draft_length = DraftLength(cost)
    for _ in range(8):  # so many are learned together
        assert draft_length.num_worth(Acceptance(0.99, 0.99), 31) == 0
        draft_length.took(0.012)
    cost.learn(1, 0.011)
    draft_length.took(0.012)
    assert draft_length.reader_s == READ_GAP_S
    cost.learn(8, 0.060)
    assert draft_length.num_worth(odds, 7) == 0, "eight rows take as long as five plain steps"


@pytest.mark.parametrize("slower", [1.0, 4.0, 12.0])
def test_somebody_who_reads_waits_for_no_step_much_longer_than_a_plain_one(slower):
    """SPEC D11: 30 ms, or two plain steps on a machine where these are slow; a job's steps are not bound."""
    curve, odds = CURVES["processor"], Acceptance(0.99, 0.99)
    draft_length = DraftLength(cost := measured(curve))
    for _ in range(40):
        cost.stepped(1, slower * step_s(curve, 1))
        draft_length.took(slower * step_s(curve, 1))
    longest_s = max(READ_GAP_S, READ_STEPS * slower * step_s(curve, 1))
    assert draft_length.reader_s == pytest.approx(longest_s, rel=0.05)
    count = draft_length.num_worth(odds, 31, longest_s=draft_length.reader_s)
    assert slower * step_s(curve, count + 1) <= longest_s
    assert draft_length.num_worth(odds, 31) == 31


def test_one_length_that_is_too_slow_rules_out_no_longer_one():
    """SPEC D9, D11: where plain steps alone were measured two tokens count twice, three less than that."""
    cost, odds = StepCost(), Acceptance(0.99, 0.99)
    for _ in range(8):
        cost.learn(1, 0.014)
    draft_length = DraftLength(cost)
    draft_length.took(0.014)
    assert draft_length.num_worth(odds, 2, longest_s=draft_length.reader_s) == 2
    assert draft_length.num_worth(odds, 1, longest_s=draft_length.reader_s) == 0


def test_a_step_that_was_disturbed_does_not_end_guessing():
    """SPEC D9: what it took beyond its prediction fades with plain steps, as no other tells it is over."""
    curve, odds = CURVES["processor"], Acceptance(0.95, 0.95)
    draft_length = DraftLength(measured(curve))
    draft_length.took(step_s(curve, 1))
    count = draft_length.num_worth(odds, 31)
    draft_length.settle(count, count + 1, 4.0 * step_s(curve, count + 1))
    draft_length.credit = MAX_CREDIT
    assert draft_length.num_worth(odds, 31) == 0
    for _ in range(60):
        draft_length.stepped()
    assert draft_length.num_worth(odds, 31) == count


def test_guesses_that_win_natively_and_lose_on_the_wall_are_left():
    """SPEC D9: who writes their tokens out takes a core from the next step, which is as long again."""
    curve, draft_length = CURVES["processor"], DraftLength(measured(CURVES["processor"]))
    odds, plain_s, took_s, known, before = Acceptance(0.9, 0.95), step_s(curve, 1), 0.0, 0, 0
    while known < 4000:
        count = draft_length.num_worth(odds, 31, longest_s=draft_length.reader_s)
        this_s = step_s(curve, count + 1) + 0.025 * before
        if count:
            draft_length.settle(count, count + 1, this_s)
            odds.note(count, is_missed=False)
        else:
            (draft_length.went_back if before else draft_length.took)(this_s)
            draft_length.stepped()
        took_s, known, before = took_s + this_s, known + count + 1, count
    assert took_s <= 1.02 * known * plain_s


def test_steps_with_guesses_that_take_longer_than_predicted_are_shorter_next_time():
    """SPEC D11: the time is that from step to step, whatever made it longer."""
    draft_length, odds = DraftLength(measured(CURVES["accelerator"])), Acceptance(0.95, 0.95)
    first = draft_length.num_worth(odds, 31, longest_s=0.009)
    for _ in range(10):
        draft_length.settle(first, first + 1, 2 * step_s(CURVES["accelerator"], first + 1))
    assert 0 <= draft_length.num_worth(odds, 31, longest_s=0.009) < first


def test_the_account_is_bounded_both_ways():
    """SPEC D9: a good stretch does not pay for a long bad one; after a bad one it is tried again some day."""
    draft_length = DraftLength(measured(CURVES["processor"]))
    for _ in range(100):
        draft_length.settle(31, 32, step_s(CURVES["processor"], 32))
    assert draft_length.credit == MAX_CREDIT
    for _ in range(100):
        draft_length.settle(31, 1, step_s(CURVES["processor"], 32))
    assert draft_length.credit == MIN_CREDIT
    assert draft_length.num_worth(Acceptance(0.99, 0.99), 31) == 0
    for _ in range(1000):
        draft_length.stepped()
    assert draft_length.num_worth(Acceptance(0.99, 0.99), 31) > 0


def test_odds_follow_what_happens_and_come_back_when_nothing_does():
    """SPEC D9."""
    odds = Acceptance(0.5, 0.8)
    for _ in range(20):
        odds.note(0, is_missed=True)
    assert odds.miss > 0.95
    for _ in range(2000):
        odds.fade()
    assert abs(odds.miss - 0.5) < 0.02
    for _ in range(20):
        odds.note(10, is_missed=False)
    assert odds.miss < 0.1
    assert odds.num_expected(10) > 9
    assert odds.copy().miss == pytest.approx(odds.miss)


def test_sizes_that_were_never_measured_are_tried_as_if_they_were_cheap():
    """SPEC D9: plain steps alone do not tell what a longer one costs, and nobody would ever find out."""
    cost = StepCost()
    cost.learn(1, 0.010)
    sure = Acceptance(0.95, 0.97)
    assert DraftLength(cost).num_worth(sure, 7) > 0
    assert not cost.is_measured(3)
    cost.learn(8, 0.080)
    assert cost.is_measured(8)
    assert DraftLength(cost).num_worth(sure, 7) == 0
    assert UNMEASURED < 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 15, 23, 31])
def test_a_step_is_filled_up_to_where_a_further_row_costs_much(count):
    """SPEC D9: some sizes are tried, those at the end of eight rows among them."""
    cost = SimpleNamespace(
        predict=lambda num_tokens: 0.02 if num_tokens <= count + 1 else 2.0,
        knows=lambda _: True,
        is_measured=lambda _: True,
        slowdown=Slowdown(),
    )
    draft_length, odds = DraftLength(cost), Acceptance(0.99, 0.99)
    assert draft_length.num_worth(odds, 40) == count
    assert draft_length.num_worth(odds, count) == count


def test_a_rate_is_never_quite_sure():
    """SPEC D9: what never came true may, and what always did may not."""
    assert (Rate(0.0).value, Rate(0.5).value, Rate(1.0).value) == (0.01, 0.5, 0.99)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1.015), (0.3, 1.01), (0.97, 0.75)])
def test_a_device_that_prepares_each_shape_anew_is_counted_with_both(share, most):
    """SPEC D9, Q18: the step with guesses takes longer, and so does the plain one after it."""
    cost, curve, random = StepCost(), CURVES["accelerator"], Random(5)
    draft_length, odds = DraftLength(cost), Acceptance(0.75, 0.9)
    cost.learn(1, step_s(curve, 1))
    known, took_s, shape = 0, 0.0, 1
    while known < 4000:
        count = draft_length.num_worth(odds, 31)
        drawn = next((at for at in range(count) if random.random() >= share), count)
        this_s = step_s(curve, count + 1) + 0.006 * (count + 1 != shape)
        if count:
            draft_length.settle(count, drawn + 1, this_s)
            odds.note(drawn, is_missed=drawn < count)
        else:
            if shape > 1:
                draft_length.went_back(this_s)
            draft_length.stepped()
            odds.fade()
        cost.learn(count + 1, this_s)
        shape, known, took_s = count + 1, known + drawn + 1, took_s + this_s
    assert took_s <= most * known * step_s(curve, 1)
