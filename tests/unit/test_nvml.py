"""What NVIDIA's driver says of a card."""

import sys

import pytest

from nvml_stand_in import NvmlStandIn
from stoker.machine.nvml import FRESH_S, CardProcess, CardReading, Nvml
from stoker.machine.thermal import Heat, HeatReading, card_heat

BUS = "0000:c1:00.0"


def test_everything_that_a_driver_tells_of_a_card_is_read():
    """SPEC M9: in degrees, watts and bytes; a program by its name."""
    nvml = NvmlStandIn()
    nvml.cards[BUS] = {
        "celsius": 61,
        "slowdown_c": 90,
        "shutdown_c": 95,
        "power_mw": 350_250,
        "memory": (30, 80),
        "processes": [(7, 20, b"/usr/bin/python3"), (8, None, "x")],
    }
    assert Nvml(nvml).read(BUS) == CardReading(
        celsius=61,
        slowdown_c=90,
        shutdown_c=95,
        power_w=350.25,
        free_bytes=30,
        total_bytes=80,
        processes=(CardProcess(7, "python3", 20), CardProcess(8, "x", 0)),
    )


def test_what_a_driver_does_not_tell_is_left_open():
    """SPEC M9: of a card that tells nothing, and of the memory of one that is cut in parts."""
    nvml = NvmlStandIn()
    nvml.cards[BUS] = {"celsius": 40, "in_parts": 1, "memory": (30, 80)}
    assert Nvml(nvml).read(BUS) == CardReading(celsius=40)
    nvml.cards[BUS] = {"in_parts": 0, "memory": (30, 80)}
    assert Nvml(nvml).read(BUS) == CardReading(free_bytes=30, total_bytes=80)
    nvml.cards[BUS] = {"power_mw": 1000, "is_old": True, "processes": [(7, 5, "x")]}
    assert Nvml(nvml).read(BUS) == CardReading(power_w=1.0)


def test_a_driver_is_asked_at_most_about_once_a_second():
    """SPEC M8, M9: whoever reads a status does not wait for it; each sample of the monitor is new."""
    nvml, now_s = NvmlStandIn(), [0.0]
    driver = Nvml(nvml, clock=lambda: now_s[0])
    found = []
    for now_s[0], celsius in ((0.0, 40), (FRESH_S - 0.01, 41), (1.0, 42)):
        nvml.cards[BUS] = {"celsius": celsius}
        found.append(driver.read(BUS).celsius)
    assert found == [40, 40, 42]


def test_without_a_driver_or_a_card_there_is_no_answer(caplog):
    """SPEC M9: and no warning; it is asked for once, and only where there is an address to ask for."""
    absent, nvml = NvmlStandIn(), NvmlStandIn()
    absent.is_there = False
    driver = Nvml(absent)
    assert driver.read("") is None
    assert absent.num_opened == 0
    assert [driver.read(BUS), driver.read(BUS)] == [None, None]
    assert absent.num_opened == 1
    assert Nvml(nvml).read(BUS) is None
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_without_the_package_there_is_no_answer(monkeypatch):
    """SPEC M9: it is not needed."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml().read(BUS) is None


@pytest.mark.parametrize(
    ("celsius", "level"),
    [(60, Heat.NOMINAL), (80, Heat.FAIR), (90, Heat.SERIOUS), (95, Heat.CRITICAL)],
)
def test_a_card_is_hot_where_its_driver_slows_it_down(celsius, level):
    """SPEC M6: by its own thresholds."""
    card = CardReading(celsius=celsius, slowdown_c=90, shutdown_c=95)
    assert card_heat("CUDA0", card) == HeatReading(level, "CUDA0", celsius)


def test_a_card_that_tells_no_temperature_is_nominal():
    """SPEC M6: as a machine without sensors."""
    assert card_heat("CUDA0", CardReading()) == HeatReading()
    assert card_heat("CUDA0", CardReading(celsius=0)) == HeatReading()
