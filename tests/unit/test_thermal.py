"""Heat from sensors, from macOS, from a trace, and its hysteresis."""

import ctypes
from types import SimpleNamespace

import psutil
import pytest

from stoker.errors import MachineSetupError
from stoker.machine.thermal import (
    LEAVE_AFTER_S,
    Heat,
    HeatMeter,
    HeatReading,
    MacThermalState,
    RecordedTrace,
    heat_source,
    hottest_sensor,
)


def sensor(current, high=None, critical=None, label=""):
    """What psutil shows of one sensor."""
    return SimpleNamespace(label=label, current=current, high=high, critical=critical)


def read(**chips):
    """The reading of sensors by chip."""
    return hottest_sensor(lambda: chips)


# ---------------------------------------------------------------- sensors


@pytest.mark.parametrize(
    ("celsius", "level"),
    [
        (69.0, "nominal"),
        (70.0, "fair"),
        (79.9, "fair"),
        (80.0, "serious"),
        (99.9, "serious"),
        (100.0, "critical"),
    ],
)
def test_a_sensor_is_judged_by_its_own_thresholds(celsius, level):
    """SPEC M6: critical from critical, serious from high, fair within 10 K of high."""
    assert read(coretemp=[sensor(celsius, 80.0, 100.0)]).level == level


def test_the_worst_sensor_counts_and_is_named():
    """SPEC M6: a hotter one that bears more is not the worst."""
    reading = read(
        coretemp=[sensor(60.0, 80.0, 100.0, "Core 0"), sensor(82.0, 80.0, 100.0, "Core 1")],
        amdgpu=[sensor(85.0, 105.0, 110.0, "edge")],
    )
    assert reading == HeatReading(Heat.SERIOUS, "coretemp Core 1", 82.0)


@pytest.mark.parametrize(
    ("celsius", "level"), [(86.9, "nominal"), (87.0, "fair"), (97.0, "serious"), (105.0, "critical")]
)
@pytest.mark.parametrize("missing", [None, 0.0, -273.15, 65261.85], ids=str)
def test_missing_and_implausible_thresholds_have_defaults(celsius, level, missing):
    """SPEC M6: firmware that does not know writes anything."""
    assert read(k10temp=[sensor(celsius, missing, missing, "Tctl")]).level == level


@pytest.mark.parametrize("high", [None, 100.0, 110.0])
def test_with_critical_alone_high_is_five_kelvin_below(high):
    """SPEC M6: psutil shows the one threshold that a sensor names as both."""
    levels = [read(coretemp=[sensor(celsius, high, 100.0)]).level for celsius in (84.9, 85.0, 95.0, 100.0)]
    assert levels == ["nominal", "fair", "serious", "critical"]


def test_a_named_default_threshold_is_a_threshold():
    """SPEC M6: a sensor that is critical at 105 alone is serious at 100, as with any other number."""
    assert read(acpitz=[sensor(99.0, 105.0, 105.0)]).level == "fair"


@pytest.mark.parametrize("celsius", [None, 0.0, -40.0, 255.0])
def test_an_implausible_temperature_is_ignored(celsius):
    """SPEC M6: a sensor that is broken says nothing."""
    assert read(acpitz=[sensor(celsius)]) == HeatReading()


def test_a_drive_or_a_radio_is_not_the_machine():
    """SPEC M6: pausing work does not cool what computing does not heat."""
    assert read(nvme=[sensor(90.0, 81.0, 85.0)], iwlwifi_1=[sensor(110.0)]) == HeatReading()


@pytest.mark.parametrize("error", [OSError, ValueError, psutil.Error])
def test_unknown_sensors_are_nominal(error):
    """SPEC M6: no sensors, and sensors that cannot be read."""

    def broken():
        raise error

    assert hottest_sensor(broken) == HeatReading() == read()


def test_this_machine_can_be_read():
    """SPEC M6: whatever it has, the answer is a level."""
    assert heat_source()().level in list(Heat)


# ---------------------------------------------------------------- macOS


class System:
    """Stands in for libSystem, with one published state."""

    def __init__(self, state, register_status=0, get_status=0):
        self.state, self.register_status, self.get_status = state, register_status, get_status

    def notify_register_check(self, name, token):
        """Hand out token 7."""
        assert name == b"com.apple.system.thermalpressurelevel"
        ctypes.cast(token, ctypes.POINTER(ctypes.c_int))[0] = 7
        return self.register_status

    def notify_get_state(self, token, state):
        """The state, to who has the token."""
        assert token.value == 7
        ctypes.cast(state, ctypes.POINTER(ctypes.c_uint64))[0] = self.state
        return self.get_status


@pytest.mark.parametrize(
    ("state", "level"), [(0, "nominal"), (1, "fair"), (2, "serious"), (3, "critical"), (4, "critical")]
)
def test_the_thermal_pressure_of_macos_is_a_level(state, level):
    """SPEC M6: nominal, moderate, heavy, trapping, sleeping."""
    assert MacThermalState(System(state)).read() == HeatReading(Heat(level), "thermal pressure")


def test_a_system_without_thermal_pressure_is_nominal():
    """SPEC M6: unknown sensors are nominal."""
    for system in (System(3, register_status=1), System(3, get_status=1), object()):
        assert MacThermalState(system).read() == HeatReading()


# ---------------------------------------------------------------- recorded


def trace_file(folder, text):
    """A trace with this text."""
    path = folder / "heat.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_plays_from_its_first_reading_and_its_last_line_holds(tmp_path):
    """SPEC M6: levels and degrees by the second."""
    path = trace_file(tmp_path, "# seconds, heat\n\n1, fair\n2.5,99 # degrees\n4,critical\n")
    now_s = 100.0
    source = RecordedTrace(path, lambda: now_s)
    seen = []
    for now_s in (500.0, 500.9, 501.0, 502.5, 503.9, 504.0, 9000.0):  # noqa: B007 - the clock reads it
        reading = source.read()
        seen.append((reading.level.value, reading.celsius))
    assert seen == [
        ("nominal", None),
        ("nominal", None),
        ("fair", None),
        ("serious", 99.0),
        ("serious", 99.0),
        ("critical", None),
        ("critical", None),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("0,nominal\n1,warm\n", "line 2"),
        ("0 nominal\n", "line 1"),
        ("# heat\n\nnan,fair\n", "line 3"),
        ("0,inf\n", "line 1"),
        ("x,fair\n", "line 1"),
        ("2,fair\n1,fair\n", "line 2"),
        ("# nothing\n", "no line"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path, text, where):
    """SPEC M6: a typed error for whoever wrote the setting."""
    with pytest.raises(MachineSetupError, match=where) as caught:
        heat_source(trace_file(tmp_path, text))
    assert caught.value.param == "heat_trace"


def test_a_trace_that_is_not_there_is_a_setup_error(tmp_path):
    """SPEC M6: as any other file in the settings."""
    with pytest.raises(MachineSetupError, match=r"none\.csv"):
        heat_source(tmp_path / "none.csv")


def test_a_trace_takes_the_place_of_the_sensors(tmp_path):
    """SPEC M6: what `heat_trace` names is what is read."""
    assert heat_source(trace_file(tmp_path, "0,critical"))() == HeatReading(Heat.CRITICAL, "trace")


# ---------------------------------------------------------------- hysteresis


def settled(*course):
    """Time and initial of each settled level, for times and levels as read."""
    meter = HeatMeter()
    return [meter.update(HeatReading(Heat(level)), at_s).level.value[0] for at_s, level in course]


def test_a_level_is_entered_at_once_and_left_after_ten_seconds_below_it():
    """SPEC M6: recovery needs a calm."""
    assert LEAVE_AFTER_S == 10.0
    course = settled((0, "critical"), (5, "nominal"), (14.9, "nominal"), (15, "nominal"), (15.1, "serious"))
    assert course == ["c", "c", "c", "n", "s"]


def test_one_hot_reading_holds_its_level_anew():
    """SPEC M6: ten seconds on end."""
    course = settled(
        (0, "serious"), (1, "nominal"), (9, "serious"), (12, "nominal"), (21, "nominal"), (22, "fair")
    )
    assert course == ["s", "s", "s", "s", "s", "f"]


def test_it_cools_level_by_level():
    """SPEC M6: each level counts its own seconds."""
    course = settled((0, "critical"), (1, "serious"), (5, "nominal"), (11, "nominal"), (15, "nominal"))
    assert course == ["c", "c", "c", "s", "n"]


def test_a_settled_reading_shows_what_the_sensor_shows_now():
    """SPEC M6: the level is held, the degrees are not."""
    meter = HeatMeter()
    meter.update(HeatReading(Heat.CRITICAL, "coretemp", 101.0), 0.0)
    assert meter.update(HeatReading(Heat.FAIR, "coretemp", 80.0), 1.0) == HeatReading(
        Heat.CRITICAL, "coretemp", 80.0
    )


def test_a_machine_that_was_never_hot_is_nominal_from_the_start():
    """SPEC M6: nothing is held that was not there."""
    assert settled((0, "nominal"), (1, "fair")) == ["n", "f"]
