"""A card that other programs fill while models lie on it."""

import pytest
from test_pressure_handler import stored

from stoker.ipc.events import Failed, PressureMoved
from stoker.machine.ladder import Rung
from stoker.machine.pressure import Pressure


@pytest.fixture
def others(tmp_path):
    """A function that sets what others hold of the one card, in MiB."""
    path = tmp_path / "others"

    def hold(mib):
        path.write_text(str(mib), "ascii")
        return path

    hold(0)
    return hold


def order(name, others, **more):
    """A model of 300 MiB on a card of 1,000."""
    fields = {"device": name, "device_mib": 1000, "others": others(0), "weights_mib": 300, "eog_period": 0}
    return ",".join(f"{key}={value}" for key, value in (fields | more).items())


def test_a_card_that_others_fill_is_pressure_and_gives_way(make, clock, others):
    """SPEC M3, M4, M9: its source is named, idle models go, what is stored in the machine's memory stays."""
    machine = make(limit_mib=4000, margin_mib=100)
    machine.have("a", order=order("filled", others))
    machine.feel()
    assert machine.of(PressureMoved) == []
    held = stored(machine, "r")
    assert held > 0
    others(690)
    while machine.state("a") == "ready":
        clock.pass_(1)
        machine.feel()
        assert Rung.PARK_INTERACTIVE not in machine.rungs()
    assert [(e.level, e.source) for e in machine.of(PressureMoved)] == [(Pressure.CRITICAL, "filled")]
    assert Rung.DROP_SNAPSHOTS in machine.rungs()
    assert machine.loop._store.cache.ram_bytes == held
    (card,) = machine.status().devices
    assert (card.own, card.others) == (0, 690 * 2**20)
    others(0)
    machine.calm(clock)
    machine.submit("again", "a")
    machine.run("again")
    assert machine.of(Failed) == []


def test_what_models_hold_of_a_card_is_no_pressure(make, clock, others):
    """SPEC M3: though they leave the margin alone of it, and others have some."""
    machine = make(limit_mib=4000, margin_mib=100)
    machine.have("a", order=order("own", others, weights_mib=800))
    others(80)
    for _ in range(20):
        clock.pass_(1)
        machine.feel()
    assert machine.of(PressureMoved) == []
    assert machine.rungs() == []


def test_a_running_request_lives_through_a_filled_card(make, clock, others):
    """SPEC M4: it is parked with its tokens at the last rung, and goes on with the same text."""
    fields = {"prompt": "a story", "max_tokens": 600}
    machine = make(limit_mib=4000, margin_mib=100)
    machine.have("a", order=order("parked", others))
    machine.submit("r", "a", **fields)
    machine.until_tokens("r", 5)
    others(700)
    while Rung.PARK_INTERACTIVE not in machine.rungs():
        clock.pass_(1)
        machine.feel()
    assert machine.state("a") == "absent"
    others(0)
    machine.calm(clock)
    machine.run("r")
    assert machine.output("r") == make.alone(**fields)
