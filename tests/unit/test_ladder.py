"""The ladder, as a table of level and rungs taken."""

import pytest

from stoker.machine.ladder import (
    CALM_PARTS,
    CALM_S,
    FORGET_S,
    LADDER,
    MAX_CALM_S,
    SETTLE_S,
    Ladder,
    Move,
    Rung,
)
from stoker.machine.pressure import EVENT_HOLD_S, Pressure

N, W, C = Pressure.NORMAL, Pressure.WARNING, Pressure.CRITICAL


def climbed(num_rungs):
    """A ladder with so many rungs taken, and the time."""
    ladder = Ladder()
    for second in range(num_rungs):
        assert ladder.decide(C, float(second)) == Move(LADDER[second])
    return ladder, float(num_rungs)


def seconds_until_undone(ladder, level, now_s):
    """How long the level has to last until the highest rung is undone; the time then."""
    start_s = now_s
    while ladder.decide(level, now_s) is None:
        now_s += 1.0
        assert now_s - start_s < 2 * MAX_CALM_S
    return now_s - start_s, now_s


def test_the_rungs_are_those_of_the_specification_in_order():
    """SPEC M4: allocator, snapshots, idle cells, limits, background, idle models, interactive."""
    assert list(LADDER) == [
        "trim_allocator",
        "drop_snapshots",
        "drop_idle_cells",
        "lower_limits",
        "pause_background",
        "unload_idle",
        "park_interactive",
    ]


@pytest.mark.parametrize("num_taken", range(8))
@pytest.mark.parametrize(("level", "reach"), [(N, 0), (W, 3), (C, 7)])
def test_level_and_rungs_taken_say_what_comes_next(level, reach, num_taken):
    """SPEC M4: up to what the level asks for, down after a calm, else nothing."""
    ladder, now_s = climbed(num_taken)
    move = ladder.decide(level, now_s)
    if num_taken < reach:
        assert move == Move(LADDER[num_taken])
        assert ladder.taken == LADDER[: num_taken + 1]
        return
    assert move is None
    later = ladder.decide(level, now_s + CALM_S)
    assert later == (Move(LADDER[num_taken - 1], is_undone=True) if num_taken > reach else None)


def test_a_rung_is_taken_once_a_sample():
    """SPEC M4: re-measured after every rung."""
    ladder, _ = climbed(1)
    assert ladder.decide(C, 0.0) is None
    assert ladder.decide(C, SETTLE_S - 0.01) is None
    assert ladder.decide(C, SETTLE_S) == Move(Rung.DROP_SNAPSHOTS)


def test_a_rung_that_helps_is_the_last_one():
    """SPEC M4: the next one only if the level still asks for it."""
    ladder, now_s = climbed(4)
    assert [ladder.decide(W, now_s + second) for second in range(int(CALM_S))] == [None] * int(CALM_S)
    assert ladder.is_taken(Rung.LOWER_LIMITS)
    assert not ladder.is_taken(Rung.PAUSE_BACKGROUND)


@pytest.mark.parametrize(("every_s", "highest"), [(1.0, Rung.PAUSE_BACKGROUND), (0.1, Rung.UNLOAD_IDLE)])
def test_a_single_event_parks_nobody(every_s, highest):
    """SPEC M3, M4: it is critical for five seconds; with samples each second no model is unloaded either."""
    ladder = Ladder()
    for number in range(round(EVENT_HOLD_S / every_s)):
        ladder.decide(C, number * every_s)
    assert ladder.taken[-1] is highest


def test_the_way_down_is_the_way_up_backwards():
    """SPEC M4: the highest first, one after the other, until nothing is taken."""
    ladder, now_s = climbed(7)
    undone = []
    for second in range(int(3 * CALM_S)):
        move = ladder.decide(N, now_s + second)
        if move:
            assert move.is_undone
            undone.append((second, move.rung))
    assert [rung for _, rung in undone] == list(reversed(LADDER))
    assert [second for second, _ in undone] == [CALM_S + step * CALM_S / CALM_PARTS for step in range(7)]
    assert ladder.taken == ()


def test_a_warning_keeps_what_a_warning_asks_for():
    """SPEC M4: from critical to warning only the rungs above the third are undone."""
    ladder, now_s = climbed(7)
    moves = [ladder.decide(W, now_s + second) for second in range(200)]
    assert [move.rung for move in moves if move] == list(reversed(LADDER[3:]))
    assert ladder.taken == LADDER[:3]


def test_a_calm_that_is_broken_begins_again():
    """SPEC M4: one sample that asks for the rungs again is enough."""
    ladder, now_s = climbed(3)
    assert ladder.decide(N, now_s) is None
    assert ladder.decide(W, now_s + CALM_S - 1) is None
    assert ladder.decide(N, now_s + CALM_S) is None
    assert ladder.decide(N, now_s + 2 * CALM_S - 0.1) is None
    assert ladder.decide(N, now_s + 2 * CALM_S) is not None


def test_each_relapse_doubles_the_calm_up_to_a_bound():
    """SPEC M4: what comes back with its memory is tried more and more rarely."""
    ladder, now_s = climbed(3)
    calms = []
    for _ in range(7):
        calm_s, now_s = seconds_until_undone(ladder, N, now_s)
        calms.append(calm_s)
        assert ladder.decide(W, now_s + 1) == Move(Rung.DROP_IDLE_CELLS)
        now_s += 2
    assert calms == [12, 24, 48, 96, 192, 240, 240]


def test_a_relapse_counts_once_however_far_it_climbs():
    """SPEC M4: seven rungs in one go are one relapse."""
    ladder, now_s = climbed(7)
    _, now_s = seconds_until_undone(ladder, N, now_s)
    for second in range(1, 8):
        ladder.decide(C, now_s + second)
    assert ladder.taken == LADDER
    assert seconds_until_undone(ladder, N, now_s + 10)[0] == 2 * CALM_S


def test_an_old_relapse_is_forgotten():
    """SPEC M4: pressure that comes back much later is another one."""
    ladder, now_s = climbed(3)
    for _ in range(4):
        _, now_s = seconds_until_undone(ladder, N, now_s)
        ladder.decide(W, now_s + 1)
        now_s += 2
    while ladder.taken:
        _, now_s = seconds_until_undone(ladder, N, now_s)
    now_s += FORGET_S
    for second in range(3):
        ladder.decide(W, now_s + second)
    assert seconds_until_undone(ladder, N, now_s + 5)[0] == CALM_S
