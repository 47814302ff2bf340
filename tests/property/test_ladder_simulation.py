"""Meter and ladder over hours of synthetic samples: they answer, they do not swing, they come back."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.machine.ladder import LADDER, LONGEST_DESCENT_S, MAX_CALM_S, SETTLE_S, Ladder
from stoker.machine.monitor import Sample
from stoker.machine.pressure import EVENT_HOLD_S, Pressure, PressureMeter

HOUR_S = 3600
RECOVERY_S = round(LONGEST_DESCENT_S + EVENT_HOLD_S) + 10  # an undone rung waits for a sample
"""After so long without pressure nothing is taken, whatever there was before."""
SHARE = dict.fromkeys(LADDER, 0.04)
SECOND_S = 1.0005
"""What the monitor's second really is, or a little more."""


class Simulation:
    """A machine sampled each second, with what the ladder did.

    Args:
        load: the fraction of memory in use at a second, if no rung is taken.
        freed: what each rung gives back, as a fraction; taken at once, and it comes back slowly when undone.
        refill_s: how slowly: after so long two thirds are back.
    """

    def __init__(self, load, freed=None, refill_s=5.0):
        self.load, self.freed, self.refill_s = load, freed or {}, refill_s
        self.meter, self.ladder = PressureMeter(), Ladder()
        self.now_s = 0
        self.moves = []  # when, what, at which level
        self.levels = []
        self._away = dict.fromkeys(LADDER, 0.0)

    def run(self, until_s, events=()):
        """Sample each second until then; `events` are the seconds of OS events."""
        while self.now_s < until_s:
            self._refill()
            fraction = self.load(self.now_s) - sum(self._away.values())
            at_s = self.now_s * SECOND_S
            reading = self.meter.update(sample(at_s, fraction, is_os_event=self.now_s in events))
            self.levels.append(reading.level)
            move = self.ladder.decide(reading.level, at_s)
            if move:
                self.moves.append((at_s, move, reading.level))
                if not move.is_undone:
                    self._away[move.rung] = self.freed.get(move.rung, 0.0)
            self.now_s += 1
        return self

    def _refill(self):
        for rung in LADDER:
            if not self.ladder.is_taken(rung):
                self._away[rung] *= math.exp(-1 / self.refill_s)

    def moves_between(self, start_s, end_s):
        """How many moves were made in that time."""
        return sum(start_s <= at_s < end_s for at_s, _, _ in self.moves)

    def busiest_hour(self):
        """The most moves in any hour."""
        return max((self.moves_between(at_s, at_s + HOUR_S) for at_s, _, _ in self.moves), default=0)

    def names(self):
        """Each move as the rung's number, negative where it is undone."""
        return [(-1 if move.is_undone else 1) * (LADDER.index(move.rung) + 1) for _, move, _ in self.moves]


def sample(at_s, fraction, *, is_os_event=False):
    """A machine with so much in use."""
    used = round(1_000_000 * min(1.0, max(0.0, fraction)))
    return Sample(
        at_s=at_s,
        footprint_bytes=0,
        limit_bytes=1_000_000,
        available_bytes=1_000_000 - used,
        total_bytes=1_000_000,
        system_available_bytes=1_000_000 - used,
        is_os_event=is_os_event,
    )


def square(period_s, high=0.92, low=0.4):
    """Half the time high, half low."""
    return lambda now_s: high if now_s % period_s < period_s / 2 else low


def noise(centre, width, seed=1):
    """Uncorrelated samples around a mark."""
    drawn = random.Random(seed)
    return lambda now_s: drawn.gauss(centre, width)


def ramp(peak, up_s, down_s):
    """From 0.4 up to a peak and down again."""
    return lambda now_s: 0.4 + (peak - 0.4) * max(0.0, min(now_s / up_s, 1 - (now_s - up_s) / down_s))


def test_a_squeeze_climbs_the_ladder_once_and_descends_it_once():
    """SPEC M4: slowly up to 95 percent and back: every rung in order, then each undone, in 14 moves."""
    run = Simulation(ramp(0.95, HOUR_S, HOUR_S)).run(3 * HOUR_S)
    assert run.names() == [1, 2, 3, 4, 5, 6, 7, -7, -6, -5, -4, -3, -2, -1]
    warned, critical = run.levels.index(Pressure.WARNING), run.levels.index(Pressure.CRITICAL)
    up_s = [at_s for at_s, move, _ in run.moves if not move.is_undone]
    assert warned <= up_s[0] < up_s[2] <= warned + 4
    assert critical <= up_s[3] < up_s[6] <= critical + 5


def test_a_warning_takes_what_can_be_computed_again_and_no_more():
    """SPEC M4: at 80 percent for hours nobody is paused and no model unloaded."""
    run = Simulation(ramp(0.80, HOUR_S, HOUR_S)).run(3 * HOUR_S)
    assert run.names() == [1, 2, 3, -3, -2, -1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("width", [0.01, 0.03, 0.08])
@pytest.mark.parametrize("mark", [0.65, 0.70, 0.80, 0.85])
def test_noise_round_a_mark_is_no_rhythm(mark, width, seed):
    """SPEC M3, M4: samples that cross a mark all the time; less than a move a minute."""
    run = Simulation(noise(mark, width, seed)).run(4 * HOUR_S)
    assert run.busiest_hour() <= 40
    assert run.moves_between(HOUR_S, 4 * HOUR_S) <= 3 * 40


@pytest.mark.parametrize("period_s", [4, 20, 60, 200, 600, 1800, 7200])
def test_a_square_wave_is_followed_more_slowly_the_faster_it_is(period_s):
    """SPEC M4: a wave slower than the longest calm is followed, a faster one is sat out."""
    run = Simulation(square(period_s)).run(6 * HOUR_S)
    assert run.busiest_hour() <= 2 * len(LADDER) * max(2, min(HOUR_S / period_s + 1, 8))
    if period_s <= MAX_CALM_S:
        assert run.moves_between(HOUR_S, 6 * HOUR_S) == 0
        assert run.ladder.taken == LADDER


@pytest.mark.parametrize("every_s", [7, 45, 130, 400])
def test_spikes_do_not_pump_the_ladder(every_s):
    """SPEC M4: one sample in many is critical; what it takes is not given back for the next one."""
    run = Simulation(lambda now_s: 0.9 if now_s % every_s == 0 else 0.5).run(4 * HOUR_S)
    assert run.moves_between(HOUR_S, 4 * HOUR_S) <= 3 * 2 * HOUR_S / MAX_CALM_S
    assert max(run.names()) <= len(LADDER)


@pytest.mark.parametrize(("fraction", "highest"), [(0.3, 3), (0.68, 5)])
def test_a_single_event_is_answered_and_forgotten(fraction, highest):
    """SPEC M3, M4: over in five seconds and undone in half a minute; on a machine at rest caches only."""
    run = Simulation(lambda now_s: fraction if now_s < 20 else 0.3).run(120, events={10})
    assert run.names() == [*range(1, highest + 1), *range(-highest, 0)]
    assert run.moves[-1][0] <= 20 + 30


@pytest.mark.parametrize("refill_s", [1.0, 20.0, 120.0])
@pytest.mark.parametrize("load", [0.72, 0.78, 0.87, 0.93, 0.99])
def test_rungs_that_help_and_bring_the_pressure_back_when_undone_are_not_pumped(load, refill_s):
    """SPEC M4: each rung frees 4 percent and takes them back; less than a move a minute."""
    run = Simulation(lambda now_s: load, SHARE, refill_s).run(6 * HOUR_S)
    assert run.busiest_hour() <= 70
    assert run.moves_between(HOUR_S, 6 * HOUR_S) <= 5 * 50
    late = run.levels[HOUR_S:]
    assert sum(level is Pressure.CRITICAL for level in late) < 0.1 * len(late)


@pytest.mark.parametrize("load", [0.75, 0.90, 0.99])
def test_after_the_load_everything_returns_to_normal(load):
    """SPEC M4: after hours of feedback with relapses, too, and in a bounded time."""
    run = Simulation(lambda now_s: load if now_s < HOUR_S else 0.5, SHARE).run(HOUR_S + RECOVERY_S)
    assert run.ladder.taken == ()
    assert run.levels[-1] is Pressure.NORMAL


def test_two_squeezes_with_a_rest_between_are_answered_alike():
    """SPEC M4: up in order, down in order, twice."""
    run = Simulation(square(600)).run(1200)
    once = [1, 2, 3, 4, 5, 6, 7, -7, -6, -5, -4, -3, -2, -1]
    assert run.names() == once + once


LOADS = st.lists(
    st.tuples(st.floats(0.3, 1.0), st.integers(1, 900), st.sampled_from([0.0, 0.02, 0.1])),
    min_size=1,
    max_size=12,
)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(LOADS, st.lists(st.integers(0, 6000), max_size=4), st.floats(0.0, 0.08), st.integers(0, 99))
def test_whatever_the_course_the_moves_keep_their_order_and_their_pace(segments, events, share, seed):
    """SPEC M3, M4: one rung at a time, as far as the level asks, so many an hour, and back at last."""
    ends = list(itertools.accumulate(length for _, length, _ in segments))
    drawn = random.Random(seed)

    def load(now_s):
        for (centre, _, width), end in zip(segments, ends, strict=True):
            if now_s < end:
                return drawn.gauss(centre, width)
        return 0.2

    over_s = max([ends[-1], *events])
    run = Simulation(load, dict.fromkeys(LADDER, share)).run(over_s + RECOVERY_S, set(events))
    height = 0
    for (_, _, level), number in zip(run.moves, run.names(), strict=True):
        assert number == (height + 1 if number > 0 else -height)
        height += 1 if number > 0 else -1
        reach = {Pressure.NORMAL: 0, Pressure.WARNING: 3, Pressure.CRITICAL: 7}[level]
        assert height <= reach if number > 0 else height >= reach
    times = [at_s for at_s, _, _ in run.moves]
    assert all(later - earlier >= SETTLE_S for earlier, later in itertools.pairwise(times))
    assert run.busiest_hour() <= 200
    assert run.ladder.taken == ()
