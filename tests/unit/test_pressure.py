"""From samples to a level of pressure."""

import pytest

from stoker.machine.monitor import Sample
from stoker.machine.pressure import (
    EVENT_HOLD_S,
    Pressure,
    PressureMeter,
    PressureReading,
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
        ({"device_free_bytes": 25, "device_total_bytes": 100}, "device", 0.75),
        ({"psi_some_avg10": 20.0, "footprint_bytes": 500}, "psi", 0.75),
    ],
)
def test_the_worst_source_decides_and_is_named(fields, source, fraction):
    """SPEC M3: own footprint, system available, device free, PSI; control groups as well."""
    reading = PressureMeter().update(sample(**fields))
    assert (reading.level, reading.source) == (Pressure.WARNING, source)
    assert reading.fraction == pytest.approx(fraction)


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
    assert not is_ours_to_ease(sample(device_free_bytes=1, device_total_bytes=100))
    assert is_ours_to_ease(sample(cgroup_used_bytes=50, cgroup_limit_bytes=100))


def test_levels_have_an_order():
    """SPEC M3: normal, warning, critical."""
    assert [level.rank for level in Pressure] == [0, 1, 2]
