"""Models that are in use when another needs their room: who goes, when, and what of its requests."""

import pytest

from stoker.ipc.commands import Cancel, PinModel, UnloadModel
from stoker.ipc.events import Failed, Finished
from stoker.ipc.request import Priority, Sampling

BIG = "eog_period=0,weights_mib=400"
"""Two of these fit."""
LARGE = "eog_period=0,weights_mib=700"
"""One fits."""


def serve(machine, *models, order=BIG):
    """Make models known."""
    return {model: machine.know(model, order) for model in models}


def use(machine, *models):
    """A short request to each, one after the other."""
    for model in models:
        name = f"{model}-{len(machine.events)}"
        machine.submit(name, model)
        machine.run(name)


def give_way(machine, clock):
    """Have `b` asked for while `a` writes "long", until `a` goes for it once that is done."""
    machine.submit("long", "a", max_tokens=1500)
    machine.until_tokens("long", 5)
    clock.pass_(300)
    machine.submit("other", "b")
    machine.turn()
    clock.pass_(2)
    machine.until(lambda: machine.state("a") == "unloading")


@pytest.mark.long
def test_a_busy_model_finishes_what_runs_before_it_makes_room(make, clock):
    """SPEC R3: never under its requests; both get the text they would have had alone."""
    machine = make()
    serve(machine, "a", "b", "c")
    machine.send(PinModel("c", is_pinned=True))
    use(machine, "c")
    long = {"prompt": "a long story", "max_tokens": 1500}
    machine.submit("long", "a", **long)
    machine.until_tokens("long", 5)
    clock.pass_(300)
    machine.submit("other", "b", prompt="another")
    machine.turn()
    clock.pass_(2)
    machine.until(lambda: "unloading" in machine.states("a"))
    machine.submit("late", "a", prompt="a newcomer")
    machine.run("long", "other")
    told = [e.request_id for e in machine.of(Finished)]
    assert told.index("long") < told.index("other")
    clock.pass_(300)
    machine.run("late")
    assert machine.num_returns("long") == (0, 1)
    assert machine.output("long") == make.alone(**long)
    assert machine.output("other") == make.alone(prompt="another")
    assert machine.output("late") == make.alone(prompt="a newcomer")


@pytest.mark.parametrize(
    "extra", [{}, {"seed": 7}, {"priority": Priority.BACKGROUND}], ids=["greedy", "seeded", "background"]
)
def test_what_takes_too_long_is_parked_and_goes_on_when_its_model_is_back(make, clock, extra):
    """SPEC R3, L5, L6: text equal, no event doubled, one terminal event."""
    machine = make()
    serve(machine, "a", "b")
    machine.know("c", BIG)
    machine.send(PinModel("c", is_pinned=True))
    use(machine, "c")
    long = {"prompt": "a long story", "max_tokens": 1200}
    if "seed" in extra:
        long["sampling"] = Sampling(seed=7)
    else:
        long |= extra
    machine.submit("long", "a", **long)
    machine.until_tokens("long", 100)
    clock.pass_(300)
    machine.submit("other", "b")
    machine.turn()
    clock.pass_(2)
    machine.until(lambda: "unloading" in machine.states("a"))
    clock.pass_(31)
    machine.run("other")
    assert not machine.has_ended("long")
    assert machine.state("a") != "ready"
    clock.pass_(300)
    machine.run("long")
    assert machine.num_returns("long") == (1, 2)
    assert machine.output("long") == make.alone(**long)
    assert len(machine.of((Finished, Failed), "long")) == 1


@pytest.mark.long
def test_a_job_for_another_model_does_not_disturb_people_until_its_patience_is_over(make, clock):
    """SPEC Q3, Q7, R3."""
    machine = make()
    serve(machine, "a", "b", order=LARGE)
    machine.submit("long", "a", max_tokens=1800)
    machine.until_tokens("long", 5)
    clock.pass_(300)
    machine.submit("job", "b", priority=Priority.BACKGROUND)
    machine.turn()
    clock.pass_(10)
    machine.until_tokens("long", 50)
    assert machine.state("a") == "ready"
    waiting = [status for status in machine.status().queue if status.request_id == "job"]
    assert [(status.model, status.position) for status in waiting] == [("b", 0)]
    clock.pass_(30)
    machine.until(lambda: "unloading" in machine.states("a"))
    machine.run("long", "job")


def test_a_model_that_need_not_go_any_more_takes_newcomers_again(make, clock):
    """SPEC R3: whoever wanted its room has gone."""
    machine = make()
    serve(machine, "a", "b", order=LARGE)
    give_way(machine, clock)
    machine.submit("late", "a")
    machine.turn()
    machine.send(Cancel("other"))
    machine.run("late")
    assert not machine.has_ended("long")
    machine.run("long")
    assert machine.states("a") == ["loading", "ready", "unloading", "ready"]


def test_a_model_stays_when_the_one_it_was_to_go_for_is_refused(make, clock):
    """SPEC R3: it does not go for nothing."""
    machine = make()
    machine.know("a", LARGE)
    machine.know("b", "eog_period=0,weights_mib=750")
    give_way(machine, clock)
    machine.others_mib = 180  # now it would not fit though everything went
    clock.pass_(1)
    machine.run("other")
    assert machine.error("other").code == "insufficient_memory"
    machine.submit("late", "a")
    machine.run("late")
    assert not machine.has_ended("long")
    machine.run("long")
    assert machine.states("a") == ["loading", "ready", "unloading", "ready"]


def test_a_model_stays_when_room_was_found_without_it(make, clock):
    """SPEC R3: others have given memory back meanwhile."""
    machine = make()
    serve(machine, "a", "b")
    machine.others_mib = 300
    give_way(machine, clock)
    machine.others_mib = 0
    clock.pass_(1)
    machine.run("other")
    assert not machine.has_ended("long")
    machine.submit("late", "a")
    machine.run("late", "long")
    assert machine.states("a") == ["loading", "ready", "unloading", "ready"]


@pytest.mark.long
def test_a_model_that_is_pinned_while_it_makes_room_stays(make, clock):
    """SPEC R3: pinned, never unloaded to make room; another one goes."""
    machine = make()
    serve(machine, "a", "b", "c")
    for model in ("a", "b"):
        machine.submit(f"long-{model}", model, max_tokens=1500)
        machine.until_tokens(f"long-{model}", 5)
        clock.pass_(300)
    machine.submit("other", "c")
    clock.pass_(2)
    machine.until(lambda: machine.state("a") == "unloading")
    machine.send(PinModel("a", is_pinned=True))
    clock.pass_(1)
    machine.until(lambda: machine.state("b") == "unloading")
    machine.run("other", "long-a")
    machine.turn()
    assert machine.states("a") == ["loading", "ready", "unloading", "ready"]
    assert machine.state("b") == "absent"


def test_a_model_that_gives_way_and_is_then_unloaded_goes_though_it_need_not_any_more(make, clock):
    """SPEC R3: it was asked to after another needed its room."""
    machine = make()
    serve(machine, "a", "b", order=LARGE)
    give_way(machine, clock)
    machine.send(UnloadModel("a"))
    machine.send(Cancel("other"))
    machine.run("long")
    machine.until(lambda: machine.state("a") == "absent")
    assert machine.states("a") == ["loading", "ready", "unloading", "absent"]
    assert len(machine.tokens("long")) == 1500


def test_a_model_that_somebody_wants_out_goes_though_its_room_is_not_needed_any_more(make, clock):
    """SPEC R3: it was asked to before another needed its room."""
    machine = make()
    serve(machine, "a", "b", order=LARGE)
    machine.submit("long", "a", max_tokens=1500)
    machine.until_tokens("long", 5)
    clock.pass_(300)
    machine.send(UnloadModel("a"))
    machine.submit("other", "b")
    clock.pass_(2)
    machine.until(lambda: machine.residency._swaps._going)
    machine.send(Cancel("other"))
    machine.until(lambda: machine.state("a") == "absent")
    assert machine.states("a") == ["loading", "ready", "unloading", "absent"]
    assert len(machine.tokens("long")) == 1500
