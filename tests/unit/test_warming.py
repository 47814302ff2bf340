"""Devices that are warmed while nothing is asked of them."""

import logging
from functools import partial

import pytest

import memory_stand_in
from stoker.backends.fake.backend import FakeBackend
from stoker.client.process.transport import config_of
from stoker.engine import loop
from stoker.engine.runners.warming import TIMES, WarmStep, warm_steps
from stoker.ipc.commands import Shutdown, Submit
from stoker.ipc.events import Failed, Finished, ModelState
from stoker.ipc.model import Speculation
from stoker.ipc.request import GenerateRequest, Sampling

CARD = "is_async=1,draws=1,eog_period=0"
SEEDED = Sampling(seed=3, temperature=1.0)


class Watched:
    """A machine with one model, and the steps that its backend was given.

    Attributes:
        steps: rows of each, tokens of the first, and whether these take candidates.
        on_step: called before each.
    """

    def __init__(self, make, monkeypatch, order, **settings):
        self.steps = []
        self.on_step = lambda: None
        launch = FakeBackend.launch

        def noted(backend, plan):
            self.on_step()
            first = plan.items[0]
            self.steps.append(WarmStep(len(plan.items), len(first.tokens), first.takes_candidates))
            return launch(backend, plan)

        monkeypatch.setattr(FakeBackend, "launch", noted)
        self.machine = make(limit_mib=4000, **settings)
        sizes = {"num_slots": 6, "n_ctx": 1000, "n_batch": 600}
        self._spec = self.machine.know("m", order, speculation=Speculation.OFF, **sizes)

    def load(self):
        """Until the model is ready."""
        self.machine.load(self._spec)
        self.machine.until(lambda: self.machine.state("m") == "ready")

    @property
    def runner(self):
        """What runs on the model."""
        return self.machine.loop._runners.find("m")

    def idle(self, turns=100):
        """Turns in which nothing arrives."""
        for _ in range(turns):
            self.machine.turn()


@pytest.fixture
def watched(make, monkeypatch, request):
    """A function that makes one; a model lies on a card of the test's own."""

    def watch(order=f"device={request.node.name},{CARD}", **settings):
        return Watched(make, monkeypatch, order, **settings)

    return watch


def expected():
    """The steps of a model of six slots and 600 tokens a step."""
    rows = [WarmStep(count, 1, True) for count in (1, 2, 4, 6)]
    prompts = [WarmStep(1, count, True) for count in (32, 128, 512)]
    crowds = [WarmStep(2, 64, True)]
    return sorted([*rows, WarmStep(1, 1, False)] * TIMES + prompts + crowds)


def test_a_device_has_seen_rows_and_prompts_of_every_kind_before_the_first_request(watched, caplog):
    """SPEC B8: one step a turn, the smallest first; nothing is left in its cells, it ends and says so."""
    caplog.set_level(logging.INFO)
    model = watched()
    model.load()
    ready_before = []
    model.on_step = lambda: ready_before.append(model.machine.of(ModelState)[-1].state)
    for _ in expected()[len(model.steps) :]:
        before = len(model.steps)
        assert model.machine.loop._wait_s() == 0.0, "it sleeps beside a cold device"
        model.machine.turn()
        assert len(model.steps) == before + 1
    assert sorted(model.steps) == expected()
    sizes = [step.num_rows * step.num_tokens for step in model.steps]
    assert sizes == sorted(sizes)
    assert set(ready_before) == {"ready"}
    backend = model.runner.backend
    backend.check()
    assert backend.num_cells_used == 0
    assert not model.runner.is_cold
    assert f"m: kernels were warmed by {len(expected())} steps" in caplog.text
    assert model.machine.loop._wait_s() != 0.0, "it spins beside a warm one"
    model.idle()
    assert len(model.steps) == len(expected())


def test_that_a_model_is_ready_is_said_before_its_device_is_warmed(watched):
    """SPEC B8, S7: no server waits for it."""
    model, said = watched(), []
    model.on_step = lambda: said.append([e.state for e in model.machine.of(ModelState)][-1])
    model.load()
    model.idle(1)
    assert said[0] == "ready"


def test_a_request_that_comes_meanwhile_waits_for_one_step_at_most(watched, monkeypatch):
    """SPEC B8: it is computed next, and the rest is warmed some time after it has ended."""
    model = watched()
    model.load()
    request = GenerateRequest(model="m", prompt=tuple(b"hello"), max_tokens=5, sampling=SEEDED)

    def arrive():
        model.on_step = lambda: None
        model.machine.inbox.put(Submit(request_id="r", request=request))
        monkeypatch.setattr(loop, "REST_AFTER_S", 1e6)

    before = len(model.steps)
    model.on_step = arrive  # while the device computes a warming step
    model.machine.until(lambda: model.machine.of(Finished))
    model.idle()
    warm, own = model.steps[before : before + 1], model.steps[before + 1 :]
    assert warm[0] in expected()
    assert own == [WarmStep(1, 5, True), *[WarmStep(1, 1, True)] * (len(own) - 1)]
    assert model.runner.is_cold, "the next request may be on its way"
    monkeypatch.setattr(loop, "REST_AFTER_S", 0.0)
    model.idle()
    assert not model.runner.is_cold
    assert sum(step == WarmStep(1, 512, True) for step in model.steps) == 1
    model.runner.scheduler.check()


def answers(model):
    """What three requests get, one alone and two at once, and every counter after them but times."""
    machine, names = model.machine, ("a", "b", "c")
    for name in names:
        machine.submit(name, "m", prompt=f"Tell {name} a story", max_tokens=40, sampling=SEEDED)
        if name != "b":
            machine.until(lambda: not machine.loop._jobs.has_requests)
    counters = machine.status().counters
    kept = {
        name: value for name, value in counters.items() if not name.endswith("_s") and name != "num_turns"
    }
    return [machine.output(name) for name in names], kept


def test_texts_and_figures_are_those_of_a_device_that_was_not_warmed(watched, monkeypatch):
    """SPEC B8: no step, no token, no time and no prefix of it is counted."""
    warm = watched()
    warm.load()
    warm.idle()
    assert not warm.runner.is_cold
    monkeypatch.setattr(memory_stand_in, "config_of", partial(config_of, num_restarts=1))
    plain = watched(device_lease=False)
    plain.load()
    plain.idle()
    assert plain.runner.is_cold
    assert answers(warm) == answers(plain)
    clocks = [each.machine.loop._clock for each in (warm, plain)]
    assert clocks[0].num_steps == clocks[1].num_steps > 0


def test_an_engine_that_comes_after_one_that_ended_warms_nothing(watched, monkeypatch):
    """SPEC B8, L3: a step of these may be what has ended it."""
    monkeypatch.setattr(memory_stand_in, "config_of", partial(config_of, num_restarts=1))
    model = watched()
    model.load()
    model.idle()
    assert model.steps == []


@pytest.mark.parametrize("order", ["eog_period=0", "is_async=1,draws=1"])
def test_a_model_that_no_device_computes_is_not_warmed(order, watched):
    """SPEC B8: a CPU has no kernels to load."""
    model = watched(order)
    model.load()
    model.idle()
    assert model.steps == []


def test_a_device_without_memory_for_a_step_is_warmed_no_further(watched, request, caplog):
    """SPEC B8, M1: a line of the log says so, and requests are served."""
    model = watched(f"device={request.node.name},{CARD},most_tokens=100")
    with caplog.at_level(logging.INFO):
        model.load()
        model.idle()
    assert [step.num_tokens for step in model.steps][-1] == 128
    assert not model.runner.is_cold
    assert "warmed no further" in caplog.text
    model.machine.offer("r", "m")
    model.machine.until(lambda: model.machine.of(Finished, "r"))
    assert model.machine.of(Failed) == []
    model.runner.backend.check()


def test_an_engine_that_stops_warms_no_further(watched):
    """SPEC B8: its end waits for one step at most."""
    model = watched()
    model.load()
    model.machine.inbox.put(Shutdown())
    before = len(model.steps)
    model.idle(3)
    assert len(model.steps) == before


def test_sequences_and_cells_that_are_in_use_are_left_alone(watched):
    """SPEC B8, C1: what is kept of a prompt stays, and a step that finds no room is left out."""
    model = watched()
    model.load()
    model.machine.offer("r", "m", prompt="k" * 600, max_tokens=2)
    model.machine.until(lambda: model.machine.of(Finished, "r"))
    backend = model.runner.backend
    kept = [backend.tokens(seq) for seq in range(backend.capabilities.num_sequences)]
    assert any(kept)
    model.idle()
    assert [backend.tokens(seq) for seq in range(backend.capabilities.num_sequences)] == kept
    assert WarmStep(1, 512, True) not in model.steps
    model.runner.scheduler.check()
    backend.check()


def test_what_is_warmed_fits_the_model():
    """SPEC B8: no prompt is longer than its context, no step than its batch; without a source nothing is."""
    limits = FakeBackend(num_cells=256, n_ctx=100, n_batch=40).capabilities
    steps = warm_steps(limits, 64, draws=False)
    assert {step.num_rows * step.num_tokens for step in steps} == {1, 2, 4, 8, 16, 32}
    assert not any(step.takes_candidates for step in steps)
    one = warm_steps(limits, 1, draws=False)
    assert one == [WarmStep(1, 1, False)] * TIMES + [WarmStep(1, 32, False)]
