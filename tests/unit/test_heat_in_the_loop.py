"""What the engine does about heat: background stands still, loads are refused, all slows; and it ends."""

import pytest

from memory_stand_in import Clock
from stoker.ipc.commands import Submit
from stoker.ipc.events import Admitted, Failed, Finished, HeatMoved, Parked
from stoker.ipc.request import GenerateRequest, Priority
from stoker.machine.ladder import CALM_S, Rung
from stoker.machine.thermal import Heat

ORDER = "eog_period=0,weights_mib=100"
LONG = {"prompt": "a long story " * 10, "max_tokens": 1500}


def test_serious_heat_holds_background_and_refuses_loads_with_the_reason(make, clock):
    """SPEC M6; it ends by itself."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.know("b", ORDER)
    machine.submit("job", "a", priority=Priority.BACKGROUND, **LONG)
    machine.until_tokens("job", 20)
    machine.feel_heat(Heat.SERIOUS)
    machine.turn()
    assert [e.reason for e in machine.of(Parked, "job")] == ["heat: background waits"]
    for name in ("x", "y"):
        machine.submit(name, "b")
        machine.run(name)
        assert machine.error(name).code == "too_hot"
        assert machine.error(name).details["heat"] == "serious"
        assert machine.error(name).retry_after_s > 0
    machine.submit("r", "a")
    machine.run("r")
    assert machine.finished("r")
    assert not machine.has_ended("job")
    machine.feel_heat(Heat.NOMINAL)
    machine.submit("z", "b")
    machine.run("job", "z")
    assert machine.output("job") == make.alone(**LONG)
    assert [e.level for e in machine.of(HeatMoved)] == ["serious", "nominal"]


def test_heat_refuses_every_model_that_is_wanted_and_none_that_is_there(make, clock):
    """SPEC M6, R5: one that was asked for again stays as it is."""
    machine = make()
    machine.have("a", order=ORDER)
    spec = machine.residency._catalogue.get("a").spec
    for model in ("b", "c", "d"):
        machine.know(model, ORDER)
    machine.heat = Heat.SERIOUS
    machine.feel()
    machine.load(type(spec)(id="a", path=spec.path, n_ctx=512))
    machine.turn()
    assert machine.state("a") == "ready"
    for model in ("b", "c", "d"):
        request = GenerateRequest(model=model, prompt=(65, 66))
        machine.inbox.put(Submit(request_id=f"of-{model}", request=request))
    machine.run("of-b", "of-c", "of-d")
    machine.submit("r", "a")
    machine.run("r")
    assert machine.states("a") == ["loading", "ready"]
    assert {machine.error(f"of-{model}").code for model in "bcd"} == {"too_hot"}


def test_requests_that_have_begun_wait_for_a_machine_that_is_too_hot(make, clock):
    """SPEC M4, M6: they are not thrown away, and tried again until it is cooler."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("r", "a", **LONG)
    machine.until_tokens("r", 20)
    machine.climb(clock, Rung.PARK_INTERACTIVE)
    machine.feel_heat(Heat.SERIOUS)
    machine.calm(clock)
    for _ in range(3):
        clock.pass_(6)
        machine.turn()
    assert machine.state("a") == "failed"
    assert machine.of((Finished, Failed)) == []
    machine.feel_heat(Heat.NOMINAL)
    clock.pass_(6)
    machine.run("r")
    assert machine.output("r") == make.alone(**LONG)


def test_critical_heat_lets_interactive_work_half_of_the_time(make, monkeypatch):
    """SPEC M6: half duty, measured on a clock that only steps move."""
    clock = Clock(monkeypatch, is_still=True)
    machine = make()
    machine.have("a", order=ORDER)
    backend = machine.runner("a").backend
    launch = backend.launch

    def slow_launch(plan):
        clock.pass_(0.1)
        return launch(plan)

    monkeypatch.setattr(backend, "launch", slow_launch)

    def seconds_for(name):
        machine.submit(name, "a", max_tokens=50)
        machine.loop._preparations.settle()
        begun_s, busy_s = clock.now(), machine.loop._clock.busy_s
        for _ in range(400):
            if machine.has_ended(name):
                return clock.now() - begun_s, machine.loop._clock.busy_s - busy_s
            clock.pass_(machine.loop._wait_s() or 0.0)
            machine.turn()
        raise AssertionError("no end")

    spent_s, busy_s = seconds_for("cool")
    assert spent_s == pytest.approx(busy_s, rel=0.01)
    machine.heat = Heat.CRITICAL
    machine.feel()
    spent_s, busy_s = seconds_for("hot")
    assert spent_s == pytest.approx(2 * busy_s, rel=0.05)
    machine.heat = Heat.NOMINAL
    machine.feel()
    spent_s, busy_s = seconds_for("cool again")
    assert spent_s == pytest.approx(busy_s, rel=0.05)
    assert machine.of(Parked) == []


def test_memory_and_heat_together_hold_background_until_both_are_over(make, clock):
    """SPEC M4, M6."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.submit("job", "a", priority=Priority.BACKGROUND, **LONG)
    machine.until_tokens("job", 20)
    machine.climb(clock, Rung.PAUSE_BACKGROUND)
    machine.feel_heat(Heat.SERIOUS)
    machine.calm(clock)
    machine.turn()
    assert not machine.loop._runners.has_work
    machine.feel_heat(Heat.FAIR)
    machine.run("job")
    assert machine.num_returns("job") == (1, 2)
    assert machine.output("job") == make.alone(**LONG)


def test_a_model_that_comes_while_things_are_held_holds_them_too(make, clock):
    """SPEC M4: what holds, holds for every model."""
    machine = make()
    machine.have("a", order=ORDER)
    machine.know("b", ORDER)
    machine.climb(clock, Rung.PAUSE_BACKGROUND)
    machine.submit("job", "b", priority=Priority.BACKGROUND)
    machine.submit("r", "b")
    machine.run("r")
    assert machine.of(Admitted, "job") == []
    assert clock.ahead_s < CALM_S
    machine.calm(clock)
    machine.run("job")
