"""Requests that wait for a model that is being loaded: bounds, deadlines, pauses, and how an engine ends."""

import pytest

from stoker.engine.inbox import Closed
from stoker.ipc.commands import Cancel, Pause, Resume, Shutdown
from stoker.ipc.events import Failed, Finished, Paused, Queued, Resumed
from stoker.ipc.request import FinishReason, Priority

BIG = "eog_period=0,weights_mib=400"


def test_the_line_of_a_model_that_is_being_loaded_is_bounded_and_background_goes_first(make, gate):
    """SPEC Q11: half of it for background."""
    machine = make()
    machine.know("a", BIG, max_queue=6)
    for number in range(3):
        machine.submit(f"b{number}", "a", priority=Priority.BACKGROUND)
    machine.submit("b3", "a", priority=Priority.BACKGROUND)
    for number in range(4):
        machine.submit(f"i{number}", "a")
    assert machine.error("b3").code == machine.error("i3").code == "queue_full"
    assert machine.error("i3").retry_after_s > 0
    gate.open()
    machine.run(*(f"b{number}" for number in range(4)), *(f"i{number}" for number in range(4)))
    assert len(machine.of(Failed)) == 2
    assert len(machine.of(Finished)) == 6


def test_deadlines_pass_in_the_lobby_too(make, gate, clock):
    """SPEC Q6: the time of waiting for a model counts."""
    machine = make()
    machine.know("a", BIG)
    machine.submit("r", "a", timeout_s=10.0)
    machine.submit("s", "a", timeout_s=10.0, age_s=9.0)
    machine.submit("t", "a")
    clock.pass_(2)
    machine.run("s")
    assert machine.error("s").code == "request_timeout"
    assert not machine.has_ended("r")
    clock.pass_(9)
    machine.run("r")
    assert machine.error("r").code == "request_timeout"
    gate.open()
    machine.run("t")


def test_one_that_is_paused_in_the_lobby_stays_paused_when_its_model_comes(make, gate):
    """SPEC Q17, and it can be cancelled and resumed there."""
    machine = make()
    machine.know("a", BIG)
    for name in ("r", "s", "t"):
        machine.submit(name, "a")
    machine.send(Pause("r"))
    machine.send(Pause("s"))
    machine.send(Resume("s"))
    assert len(machine.of(Paused, "r")) == 1
    assert len(machine.of(Resumed, "s")) == 1
    gate.open()
    machine.run("s", "t")
    assert not machine.tokens("r")
    machine.send(Resume("r"))
    machine.run("r")
    assert machine.output("r").tokens == machine.output("t").tokens


def test_cancelled_in_the_lobby_a_request_ends_every_choice_once(make, gate):
    """SPEC L6."""
    machine = make()
    machine.know("a", BIG)
    machine.submit("r", "a", n=2, generated=[[97, 98], [97]], is_finished=[True, False])
    machine.submit("s", "a")
    machine.send(Cancel("r"))
    machine.send(Cancel("r"))
    gate.open()
    machine.run("s")
    assert machine.output("r").reasons == {1: FinishReason.CANCELLED}
    (finished,) = machine.of(Finished, "r")
    assert finished.usage.completion_tokens == 3


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    "command", [Shutdown(drain_s=0.0), Shutdown(drain_s=0.3)], ids=["at once", "drained"]
)
def test_a_shutdown_during_a_load_ends_every_request_once(make, gate, command):
    """SPEC L4, L6."""
    machine = make()
    machine.know("a", BIG)
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.end(command)
    assert gate.stopped == ["a"]
    assert len(machine.of((Finished, Failed), "r")) == 1
    assert machine.output("r").reasons == {0: FinishReason.CANCELLED}


def test_a_model_whose_load_ends_with_the_engine_is_freed(make, gate, monkeypatch):
    """SPEC L4, R10: in a thread nobody else frees it."""
    machine = make()
    machine.know("a", BIG)
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    gate.is_deaf = True
    close = machine.residency.close
    monkeypatch.setattr(machine.residency, "close", lambda: (close(), gate.open()))
    machine.end(Shutdown())
    assert [model for model, _ in gate.backends] == ["a"]
    assert [model for model, backend in gate.backends if not backend._is_closed] == []


def test_a_drain_lets_those_who_wait_for_a_load_finish_and_does_not_wait_for_the_paused(make, gate):
    """SPEC L4."""
    gate.open()
    machine = make()
    machine.know("a", BIG)
    machine.know("b", BIG)
    machine.submit("r", "a")
    machine.submit("s", "b", is_paused=True)
    machine.end(Shutdown(drain_s=20.0))
    assert machine.loop._clock.now() < machine.loop._until_s
    assert machine.output("r").reasons == {0: FinishReason.LENGTH}
    assert machine.output("s").reasons == {0: FinishReason.CANCELLED}
    assert len(machine.of(Queued, "r")) >= 1


def test_an_engine_whose_front_has_gone_stops_its_load(make, gate):
    """SPEC L4."""
    machine = make()
    machine.know("a", BIG)
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.end(Closed.CLOSED)
    assert gate.stopped == ["a"]
    assert machine.runner("a") is None
