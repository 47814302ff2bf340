"""Every request of the engine stands in one table: what is done to it is the same wherever it is."""

import numpy as np
import pytest

from memory_stand_in import GREEDY
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import PUBLISH_EVERY_S, JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import PoolFullError, UnsupportedError
from stoker.ipc.commands import Cancel, Pause, Resume, Submit
from stoker.ipc.events import Admitted, Delta, Failed, Finished, Paused, Queued, Resumed, StateReady
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Picture, Sampling, StateOutput
from stoker.ipc.usage import Tensor
from stoker.machine.ledger import Ledger

EMBED = {"max_tokens": 0, "state_output": StateOutput.EMBED, "sampling": GREEDY}
SCORE = EMBED | {"state_output": StateOutput.SCORE, "document": "a document"}
CHOOSE = EMBED | {"state_output": StateOutput.CHOOSE, "candidates": ("yes", "no")}
ENCODER, RERANKER, DECODER = "encoder=1", "encoder=1,pooling=rank", "eog_period=0"
ONE_SHOT = {"embed": (ENCODER, EMBED), "rerank": (RERANKER, SCORE), "choose": (DECODER, CHOOSE)}


class Bench:
    """One generating model on this thread."""

    def __init__(self, **faults):
        self.backend = FakeBackend(faults=FakeFaults(eog_period=0, **faults))
        cache = PrefixCache(CacheLimits(), Ledger())
        self.jobs = JobTable()
        spec = ModelSpec(id="m", path="fake:", num_slots=3)
        self.runner = SlotRunner(spec, self.backend, StepTimer(Stopwatch(60.0)), cache, self.jobs)
        self.now = 0.0

    def submit(self, name, **fields):
        """Enter a request; returns its job."""
        known = {"model": "m", "prompt": name, "max_tokens": 3, "sampling": Sampling(seed=1)}
        submit = Submit(request_id=name, request=GenerateRequest(**known | fields))
        job = prepare(submit, self.runner.prep, self.now)
        self.runner.accept(job, self.now)
        return job

    def finish(self):
        """Turn until nothing is left to do; scheduler and backend agree then."""
        for _ in range(200):
            if not self.runner.has_work:
                break
            self.now += 1.0
            self.runner.schedule(self.now)
            self.runner.step(self.now)
        self.runner.rest(self.now)
        self.runner.scheduler.check()
        self.backend.check()
        assert len(self.jobs) == 0

    def of(self, kind):
        """Request ids of the events of a kind, in order."""
        return [event.request_id for event in self.jobs.events if isinstance(event, kind)]


# ---------------------------------------------------------------- an error ends its request alone (SPEC Q12)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_a_backend_refuses_to_condition_ends_its_request_alone(monkeypatch, num_choices):
    """SPEC Q12, L6: the others of the same turn run on, and what it held is free."""
    bench = Bench()
    whose = {}
    condition = bench.backend.condition

    def refuse(seq, conditioning):
        if conditioning.namespace == whose["bad"]:
            raise UnsupportedError("it cannot be conditioned so")
        condition(seq, conditioning)

    monkeypatch.setattr(bench.backend, "condition", refuse)
    bench.submit("before")
    bad = bench.submit("bad", n=num_choices, cache_salt="another", max_tokens=3)
    whose["bad"] = bad.leader.conditioning.namespace
    bench.submit("after")
    bench.finish()
    assert bench.of(Failed) == ["bad"]
    assert sorted(bench.of(Finished)) == ["after", "before"]
    assert "bad" not in bench.of(Admitted)


def test_an_initial_state_that_finds_no_room_ends_its_request_alone(monkeypatch):
    """SPEC K5, Q12: the engine goes on."""
    bench = Bench(recurrent=True)
    layout = bench.backend.capabilities.state_layout
    given = [Tensor(name, shape, np.zeros(shape, "<f4").tobytes()) for name, shape in layout]

    def full(seq, tensors):
        raise PoolFullError("no room for a state")

    monkeypatch.setattr(bench.backend, "write_state", full)
    bench.submit("other")
    bench.submit("bad").leader.initial_state = given
    bench.finish()
    assert bench.of(Failed) == ["bad"]
    assert bench.of(Finished) == ["other"]


def test_an_image_that_a_backend_refuses_ends_its_request_alone(make, monkeypatch):
    """SPEC V3, Q12: when its embeddings are there, and a text beside it is answered."""
    machine = make()
    machine.have("a", order="eog_period=0,vision=5")
    backend = machine.runner("a").backend
    condition = backend.condition

    def refuse(seq, conditioning):
        if conditioning.pictures:
            raise UnsupportedError("no image is taken")
        condition(seq, conditioning)

    monkeypatch.setattr(backend, "condition", refuse)
    red = Picture(width=2, height=2, rgb=bytes([200, 0, 0] * 4))
    machine.submit("image", "a", prompt="<__media__> what is it?", pictures=(red,))
    machine.submit("text", "a")
    machine.run("image", "text")
    assert machine.error("image").code == UnsupportedError.code
    assert machine.of(Finished, "text")


# ---------------------------------------------------------------- one-shot work is as any other


def enter(machine, kind, *names, **fields):
    """Requests of a kind, each of a text of its own."""
    for name in names:
        asked = f"the text of {name}" if kind == "rerank" else tuple(f"the text of {name}".encode())
        known = {"model": "a", "prompt": asked, **ONE_SHOT[kind][1]}
        machine.inbox.put(Submit(request_id=name, request=GenerateRequest(**known | fields)))


def accept(machine):
    """Turns after which what arrived stands in its model's queue."""
    machine.turn()
    machine.loop._preparations.settle()
    machine.turn()


@pytest.mark.parametrize("kind", ONE_SHOT)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["before its model is there", "in its queue"])
def test_one_shot_work_is_paused_resumed_and_cancelled(make, kind, is_loaded):
    """SPEC Q17, S5: by its id, with the events of any request and one ending."""
    machine = make()
    machine.know("a", ONE_SHOT[kind][0])
    if is_loaded:
        machine.have("a", order=ONE_SHOT[kind][0])
        machine.loop._nap_until_s = float("inf")  # nothing is computed from here on
    enter(machine, kind, "a", "b", "c")
    if is_loaded:
        accept(machine)
    machine.inbox.put(Pause("a"))
    machine.inbox.put(Cancel("b"))
    assert [status.request_id for status in machine.status().paused] == ["a"]
    machine.loop._nap_until_s = 0.0
    machine.run("c")
    assert machine.of(StateReady, "a") == []
    assert [status.request_id for status in machine.status().paused] == ["a"]
    machine.send(Resume("a"))
    machine.run("a")
    assert machine.of(Paused, "a")
    assert machine.of(Resumed, "a")
    assert len(machine.of(StateReady)) == 2
    assert [event.finish_reason for event in machine.of(Delta, "b")] == [FinishReason.CANCELLED]
    assert len(machine.of((Finished, Failed))) == 3


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_waiting_one_shot_work_has_a_place_and_a_time(make, kind):
    """SPEC Q14: status shows each with its place, class and ETA, and the counters count it."""
    machine = make()
    machine.have("a", order=ONE_SHOT[kind][0])
    enter(machine, kind, "first")
    machine.run("first")  # by it is known what computing takes
    machine.loop._nap_until_s = float("inf")  # nothing is computed from here on
    enter(machine, kind, "x", "y", "z")
    accept(machine)
    machine.send(Pause("z"))
    status = machine.status()
    assert [(each.request_id, each.position) for each in status.queue] == [("x", 0), ("y", 1)]
    assert status.queue[0].eta_s == 0
    assert status.queue[1].eta_s > 0
    assert [each.request_id for each in status.paused] == ["z"]
    counters = status.counters
    assert (counters["num_waiting"], counters["num_paused"], counters["num_retired_total"]) == (2, 1, 1)
    (model,) = status.models
    assert model.leases == 2


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_one_shot_work_hears_of_its_new_place(make, clock, kind):
    """SPEC Q14: when those before it are gone, at most once a second."""
    machine = make()
    machine.have("a", order=ONE_SHOT[kind][0])
    machine.loop._nap_until_s = float("inf")
    enter(machine, kind, "x", "y", "z")
    accept(machine)
    assert [event.position for event in machine.of(Queued, "z")] == [2]
    machine.send(Cancel("x"))
    clock.pass_(PUBLISH_EVERY_S)
    runner = machine.runner("a")
    machine.loop._jobs.publish_positions("a", runner.queues, clock.now())
    machine.turn()
    assert [event.position for event in machine.of(Queued, "z")] == [2, 1]


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_timings_of_one_shot_work_are_those_of_any_request(make, clock, kind):
    """SPEC I4: how long it waited, and how long it was computed."""
    machine = make()
    machine.have("a", order=ONE_SHOT[kind][0])
    machine.loop._nap_until_s = clock.now() + 3.0
    enter(machine, kind, "r")
    accept(machine)
    clock.pass_(4.0)
    machine.run("r")
    (finished,) = machine.of(Finished, "r")
    assert finished.timings.queue_s >= 4.0
    assert finished.timings.prefill_s >= 0
    assert finished.usage.prompt_tokens > 0


# ---------------------------------------------------------------- wherever it is


def test_one_that_is_cancelled_before_it_is_tokenised_says_how_long_it_waited(make, gate, clock):
    """SPEC L6: its ending is made where every other is."""
    machine = make()
    machine.know("a", DECODER)
    machine.submit("r", "a")
    clock.pass_(2.0)
    machine.send(Cancel("r"))
    (finished,) = machine.of(Finished, "r")
    assert finished.timings.queue_s == pytest.approx(2.0, abs=0.5)
    assert len(machine.loop._jobs) == 0


def test_a_text_may_fill_its_encoders_whole_context(make):
    """SPEC L5: it needs no token more than the text has, so a reload with as much is no conflict."""
    machine = make()
    machine.have("a", order=ENCODER)
    n_ctx = machine.runner("a").backend.capabilities.n_ctx
    machine.loop._nap_until_s = float("inf")
    known = {"model": "a", "prompt": (65,) * n_ctx, **EMBED}
    machine.send(Submit(request_id="r", request=GenerateRequest(**known)))
    machine.loop._preparations.settle()
    machine.turn()
    assert [job.num_context for job in machine.loop._jobs] == [n_ctx]
