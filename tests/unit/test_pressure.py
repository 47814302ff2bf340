"""From samples to a level of pressure."""

from dataclasses import replace

import pytest

from stoker.machine.monitor import DeviceSample, Sample
from stoker.machine.pressure import (
    EVENT_HOLD_S,
    Pressure,
    PressureMeter,
    PressureReading,
    device_fraction,
    is_ours_to_ease,
    psi_fraction,
)


def sample(at_s=0.0, **fields):
    """A machine at rest, of a thousand bytes, with some fields changed."""
    rest = {
        "at_s": at_s,
        "footprint_bytes": 100,
        "limit_bytes": 1000,
        "available_bytes": 900,
        "total_bytes": 1000,
        "system_available_bytes": 900,
    }
    return Sample(**{**rest, **fields})


def card(free_bytes, own_bytes=50, margin_bytes=10, left_bytes=None):
    """An accelerator of a hundred bytes."""
    return DeviceSample(
        id="CUDA0",
        free_bytes=free_bytes,
        total_bytes=100,
        own_bytes=own_bytes,
        margin_bytes=margin_bytes,
        left_bytes=left_bytes,
    )


def footprints(*sizes):
    """The levels that one meter gives to a course of footprints in thousandths of the limit."""
    meter = PressureMeter()
    return [
        meter.update(sample(at_s, footprint_bytes=size)).level.value[0] for at_s, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("fields", "source", "fraction"),
    [
        ({"footprint_bytes": 750}, "footprint", 0.75),
        ({"system_available_bytes": 250}, "system", 0.75),
        ({"cgroup_used_bytes": 75, "cgroup_limit_bytes": 100}, "cgroup", 0.75),
        ({"psi_some_avg10": 20.0, "footprint_bytes": 500}, "psi", 0.75),
    ],
)
def test_the_worst_source_decides_and_is_named(fields, source, fraction):
    """SPEC M3: own footprint, system available, PSI; control groups as well."""
    reading = PressureMeter().update(sample(**fields))
    assert (reading.level, reading.source) == (Pressure.WARNING, source)
    assert reading.fraction == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("device", "fraction"),
    [
        (card(50), 0.0),  # all else is free
        (card(0, own_bytes=100), 0.0),  # our own models fill it
        (card(30), 0.4),  # others have 20 of the 50 that we leave
        (card(12), 0.65),  # 38 of them, and yet the margin is free
        (card(10), 0.65),
        (card(9), 0.73),
        (card(5), 0.85),
        (card(0), 1.0),
        (card(1, margin_bytes=0), 0.65),
        (card(0, margin_bytes=0), 1.0),
        (card(4, left_bytes=4), 0.65),  # so much was left by the load itself
        (card(2, left_bytes=4), 0.85),
        (card(9, left_bytes=40), 0.73),
        (card(0, left_bytes=0), 1.0),
    ],
)
def test_what_others_take_of_a_card_is_pressure_once_the_margin_is_touched(device, fraction):
    """SPEC M3: what our own models hold of it is none."""
    assert device_fraction(device) == pytest.approx(fraction)


def test_the_fullest_card_that_models_are_on_decides_and_is_named():
    """SPEC M3: a card without a model of ours, or with one that is half loaded, has nothing to give back."""
    idle, loading, full = card(0, own_bytes=0), card(0, own_bytes=None), replace(card(5), id="CUDA1")
    assert PressureMeter().update(sample(devices=(idle, loading))).level is Pressure.NORMAL
    reading = PressureMeter().update(sample(devices=(idle, loading, card(30), full)))
    assert (reading.level, reading.source, reading.fraction) == (Pressure.CRITICAL, "CUDA1", 0.85)


def test_limits_of_our_own_say_nothing_of_the_machine():
    """SPEC M3: little is available inside a small limit on a machine that has plenty."""
    reading = PressureMeter().update(sample(limit_bytes=200, available_bytes=100))
    assert (reading.level, reading.source) == (Pressure.NORMAL, "footprint")


def test_levels_are_entered_at_their_marks_and_left_five_points_lower():
    """SPEC M3: 70 and 85 percent in, 65 and 80 out."""
    assert footprints(699, 700, 650, 649, 699) == ["n", "w", "w", "n", "n"]
    assert footprints(849, 850, 800, 799, 849, 850) == ["w", "c", "c", "w", "w", "c"]
    assert footprints(900, 649) == ["c", "n"]
    assert footprints(900, 700, 650, 649) == ["c", "w", "w", "n"]


def test_an_alarm_of_the_system_is_critical_at_once_and_for_five_seconds():
    """SPEC M3: an OS event counts as critical, whatever the samples show."""
    meter = PressureMeter()
    reading = meter.update(sample(10.0, footprint_bytes=660, is_os_event=True))
    assert (reading.level, reading.source, reading.fraction) == (Pressure.CRITICAL, "event", 0.85)
    later = meter.update(sample(10.0 + EVENT_HOLD_S - 0.1, footprint_bytes=660))
    assert (later.level, later.source) == (Pressure.CRITICAL, "event")
    assert meter.update(sample(10.0 + EVENT_HOLD_S, footprint_bytes=660)).level is Pressure.WARNING
    assert meter.update(sample(10.0 + EVENT_HOLD_S, footprint_bytes=640)).level is Pressure.NORMAL


def test_an_alarm_over_a_machine_at_rest_goes_on_as_a_warning():
    """SPEC M3, M4: critical once; what is over by the next sample parks nobody."""
    meter = PressureMeter()
    assert meter.update(sample(10.0, is_os_event=True)).level is Pressure.CRITICAL
    reading = meter.update(sample(11.0))
    assert (reading.level, reading.source, reading.fraction) == (Pressure.WARNING, "event", 0.7)
    assert meter.update(sample(10.0 + EVENT_HOLD_S)) == PressureReading(
        Pressure.NORMAL, pytest.approx(0.1), "footprint"
    )


def test_another_alarm_holds_longer():
    """SPEC M3: five seconds from the last one."""
    meter = PressureMeter()
    meter.update(sample(0.0, is_os_event=True))
    meter.update(sample(4.0, is_os_event=True))
    assert meter.update(sample(8.9)).source == "event"
    assert meter.update(sample(9.0)).level is Pressure.NORMAL


def test_after_an_alarm_a_critical_machine_stays_so():
    """SPEC M3: the hysteresis goes on below the alarm."""
    meter = PressureMeter()
    meter.update(sample(0.0, is_os_event=True))
    assert meter.update(sample(5.0, footprint_bytes=810)).level is Pressure.CRITICAL
    assert meter.update(sample(6.0, footprint_bytes=790)).level is Pressure.WARNING


def test_stalled_time_has_its_own_marks():
    """SPEC M3: a tenth of the time is a warning, two fifths are critical, and it rises all the way."""
    assert [psi_fraction(percent) for percent in (0.0, 10.0, 40.0, 100.0)] == [0.0, 0.7, 0.85, 1.0]
    course = [psi_fraction(percent / 2) for percent in range(201)]
    assert course == sorted(set(course))


def test_stalls_at_a_limit_that_is_not_ours_are_a_warning_at_most():
    """SPEC M3: where nothing of what we take part in is half full, another container waits for itself."""
    reading = PressureMeter().update(sample(psi_some_avg10=90.0))
    assert (reading.level, reading.source) == (Pressure.WARNING, "psi")
    assert PressureMeter().update(sample(psi_some_avg10=90.0, footprint_bytes=500)).level is Pressure.CRITICAL
    assert not is_ours_to_ease(sample(devices=(card(free_bytes=1),)))
    assert is_ours_to_ease(sample(cgroup_used_bytes=50, cgroup_limit_bytes=100))


def test_levels_have_an_order():
    """SPEC M3: normal, warning, critical."""
    assert [level.rank for level in Pressure] == [0, 1, 2]
