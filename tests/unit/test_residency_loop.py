"""Which models are in memory, seen from outside: a loop on a machine whose memory is counted."""

import msgspec
import pytest

from memory_stand_in import MIB, OWN_MIB
from stoker.errors import ModelLoadError
from stoker.ipc.commands import Cancel, LoadModel, Pause, PinModel, Resume, Submit, UnloadModel
from stoker.ipc.events import Admitted, Failed, Finished, ModelState, Paused, Queued
from stoker.ipc.request import FinishReason, GenerateRequest

BIG = "eog_period=0,weights_mib=400"
"""Two of these fit."""


def serve(machine, *models, order=BIG):
    """Make models known."""
    return {model: machine.know(model, order) for model in models}


def use(machine, *models):
    """A short request to each, one after the other."""
    for model in models:
        name = f"{model}-{len(machine.events)}"
        machine.submit(name, model)
        machine.run(name)


# ---------------------------------------------------------------- loads and evictions


def test_twenty_first_requests_make_one_load_and_are_all_answered(make, gate):
    """SPEC R4: single flight."""
    machine = make()
    serve(machine, "a")
    names = [f"r{number}" for number in range(20)]
    for name in names:
        machine.submit(name, "a")
    machine.until(lambda: gate.begun)
    gate.open()
    machine.run(*names)
    assert gate.begun == ["a"]
    assert machine.states("a") == ["loading", "ready"]
    assert all(machine.finished(name) for name in names)
    assert machine.of(Queued, "r7")[0].position == 7


def test_the_idle_model_that_was_used_longest_ago_goes_first(make):
    """SPEC R3: least recently used, not least recently loaded."""
    machine = make()
    serve(machine, "a", "b", "c")
    use(machine, "a", "b", "a", "c")
    assert (machine.state("a"), machine.state("b"), machine.state("c")) == ("ready", "absent", "ready")
    told = [e.reason for e in machine.of(ModelState) if e.model == "b" and e.state == "absent"]
    assert told == ["gives way to c"]


def test_each_stage_of_a_load_is_told_before_it_is_begun(make, monkeypatch):
    """SPEC L1, L3: also the one after room was made, so that a crash in it is charged to the load."""
    machine = make()
    serve(machine, "a", "b", "c")
    use(machine, "a", "b")
    workers, told = machine.loop._load_threads, []
    for work in (workers.size, workers.load):

        def noted(load, spec, work=work, **how):
            told.append([e.stage for e in machine.of(ModelState) if e.model == "c"])
            work(load, spec, **how)

        monkeypatch.setattr(workers, work.__name__, noted)
    use(machine, "c")
    assert told == [["header"], ["header", "waiting", "weights"]]


def test_memory_that_a_model_was_given_and_has_not_touched_is_not_free(make):
    """SPEC R1, C14: though it measures so."""
    machine = make()
    serve(machine, "a", "b", "c")
    use(machine, "a", "b")
    machine.untouched_mib = 700
    use(machine, "c")
    assert (machine.state("a"), machine.state("b"), machine.state("c")) == ("absent", "ready", "ready")


def test_a_load_that_has_evicted_goes_on_at_once(make):
    """SPEC R3: nothing is waited for once there is room."""
    machine = make()
    serve(machine, "a", "b", "c")
    use(machine, "a", "b")
    machine.submit("r", "c")
    machine.until(lambda: machine.state("a") == "absent")
    now = machine.loop._clock.now()
    assert not machine.residency._load.waits_for_room or machine.residency.next_due_s(now) <= now


def test_pinned_models_stay_and_the_refusal_names_its_numbers(make):
    """SPEC R1, R3: needed, free, margin, and what could be evicted."""
    machine = make(margin_mib=50)
    specs = serve(machine, "a", "b", "c")
    machine.load(msgspec.structs.replace(specs["a"], is_pinned=True))
    machine.until(lambda: machine.state("a") == "ready")
    machine.submit("r", "b")
    machine.run("r")
    machine.send(PinModel("b", is_pinned=True))
    machine.submit("s", "c")
    machine.run("s")
    error = machine.error("s")
    assert error.code == "insufficient_memory"
    held = sum(machine.ledger.values())
    assert error.details["margin"] == 50 * MIB
    assert error.details["evictable"] == 0
    assert error.details["free"] == (1000 - OWN_MIB) * MIB - held
    assert error.details["needed"] > 400 * MIB
    assert (machine.state("a"), machine.state("b"), machine.state("c")) == ("ready", "ready", "failed")
    machine.send(PinModel("b", is_pinned=False))
    machine.submit("t", "c")
    machine.run("t")
    assert machine.finished("t")
    assert machine.state("b") == "absent"


def test_one_that_can_never_fit_is_refused_and_nothing_goes_for_it(make):
    """SPEC R2: too_large never loads."""
    machine = make()
    serve(machine, "a", "b")
    use(machine, "a", "b")
    machine.know("huge", "weights_mib=4000")
    machine.know("nearly", "weights_mib=950")  # the engine itself takes a hundred
    for name, model in (("first", "huge"), ("second", "huge"), ("third", "nearly")):  # each as quickly
        machine.submit(name, model)
        machine.until(lambda name=name: machine.has_ended(name), turns=200)
        error = machine.error(name)
        assert error.code == "model_too_large"
        assert {"needed", "limit", "margin", "free", "evictable"} <= set(error.details)
    assert (machine.state("a"), machine.state("b")) == ("ready", "ready")


def test_what_a_model_was_given_less_of_is_told(make):
    """SPEC R2: degraded, reported, and its requests run."""
    machine = make()
    machine.know("a", "eog_period=0,weights_mib=660,cell_kib=32", n_ctx=16384)
    machine.submit("r", "a")
    machine.run("r")
    info = machine.info("a")
    assert info.degraded == ["context 4096 instead of 16384"]
    assert info.n_ctx == 4096
    (status,) = machine.status().models
    assert status.degraded == info.degraded


def test_a_model_that_is_loaded_again_with_more_room_is_no_longer_degraded(make):
    """SPEC R2: it was for want of memory, not for good."""
    machine = make()
    machine.know("a", "eog_period=0,weights_mib=290,cell_kib=32", n_ctx=16384)
    machine.others_mib = 400
    use(machine, "a")
    assert machine.info("a").degraded
    machine.send(UnloadModel("a"))
    machine.others_mib = 0
    use(machine, "a")
    assert machine.info("a").degraded == []
    assert machine.info("a").n_ctx == 16384


def test_an_optional_load_evicts_nothing_and_stays_absent(make):
    """SPEC L8: what is restored at the start does not fight for room."""
    machine = make()
    specs = serve(machine, "a", "b", "c")
    for model in ("a", "b", "c"):
        machine.load(specs[model], may_evict=model == "a")
        machine.until(lambda: not machine.residency._load)
    assert [machine.state(model) for model in "abc"] == ["ready", "ready", "absent"]


def test_a_request_evicts_for_a_model_whose_optional_load_found_no_room(make):
    """SPEC R3: that it was optional once says nothing of requests."""
    machine = make()
    specs = serve(machine, "a", "b", "c")
    for model in ("a", "b", "c"):
        machine.load(specs[model], may_evict=False)
        machine.until(lambda: not machine.residency._load)
    machine.submit("r", "c")
    machine.run("r")
    assert machine.finished("r")
    assert machine.state("a") == "absent"


def test_a_request_that_comes_during_an_optional_load_may_evict(make):
    """SPEC R3: now the model is needed."""
    machine = make()
    specs = serve(machine, "a", "b", "c")
    use(machine, "a", "b")
    machine.inbox.put(LoadModel(specs["c"], may_evict=False))
    machine.submit("r", "c")
    machine.run("r")
    assert machine.finished("r")


def test_an_optional_load_evicts_nothing_where_the_cache_gives_less_than_it_holds(make, monkeypatch):
    """SPEC R3: prefixes in use cannot go, and no model goes in their place."""
    machine = make()
    specs = serve(machine, "a", "b", "c")
    use(machine, "a", "b")
    cache = machine.loop._store.cache
    monkeypatch.setattr(type(cache), "ram_bytes", 500 * MIB)
    monkeypatch.setattr(cache, "shed", lambda *_: 0)
    machine.load(specs["c"], may_evict=False)
    machine.until(lambda: machine.residency._load is None or machine.residency._load.waits_for_room)
    machine.turn()
    assert (machine.state("a"), machine.state("b")) == ("ready", "ready")
    machine.send(UnloadModel("c"))


def test_two_models_that_cannot_be_had_are_both_refused(make):
    """SPEC R2: the loop does not fall asleep over the second."""
    machine = make()
    machine.know("x", "weights_mib=4000")
    machine.know("y", "weights_mib=4000")
    machine.inbox.put(Submit(request_id="r", request=request_for("x")))
    machine.inbox.put(Submit(request_id="s", request=request_for("y")))
    machine.run("r", "s")
    assert {machine.error(name).code for name in "rs"} == {"model_too_large"}


def request_for(model, **fields):
    """A short request."""
    return GenerateRequest(model=model, prompt=(65, 66, 67), max_tokens=4, **fields)


def test_the_ledger_holds_what_is_in_memory_and_nothing_once_it_is_gone(make):
    """SPEC C14, R10."""
    machine = make()
    serve(machine, "a", "b")
    use(machine, "a", "b")
    sizes = [status.bytes for status in machine.status().models]
    for line in ("weights", "kv", "compute"):
        assert machine.ledger.get(line, 0) == sum(size[line] for size in sizes)
    machine.send(UnloadModel("a"))
    machine.send(UnloadModel("b"))
    assert set(machine.ledger) <= {"cache"}
    machine.loop._store.cache.shed(2**40, machine.loop._clock.now())
    assert machine.ledger == {}


# ---------------------------------------------------------------- failing and stopped loads


def test_a_failing_load_tells_its_requests_and_leaves_the_others_as_they_were(make):
    """SPEC R4; the next request tries again at once."""
    machine = make()
    serve(machine, "a")
    machine.know("bad", "load_fails=1")
    machine.submit("long", "a", max_tokens=1000)
    machine.until_tokens("long", 3)
    for name in ("first", "second"):
        machine.submit(name, "bad")
        machine.run(name)
        assert machine.error(name).code == ModelLoadError.code
    assert not machine.has_ended("long"), "it was not waited for long"
    assert machine.states("bad") == ["loading", "failed", "loading", "failed"]
    machine.run("long")
    assert len(machine.tokens("long")) == 1000
    assert machine.states("a") == ["loading", "ready"]


def test_a_deadline_ends_a_request_that_runs_waits_or_stands_still(make, clock):
    """SPEC Q6: at once, with the tokens it has; one that waits never starts, the others go on."""
    machine = make()
    machine.have("a", num_slots=1)
    machine.submit("paused", "a", max_tokens=1500, timeout_s=30.0)
    machine.until_tokens("paused", 5)
    machine.send(Pause("paused"))
    machine.submit("runs", "a", max_tokens=1500, timeout_s=30.0)
    machine.until_tokens("runs", 5)
    machine.submit("waits", "a", max_tokens=4, timeout_s=30.0)
    machine.submit("on", "a", max_tokens=4, timeout_s=300.0)
    machine.until(lambda: machine.of(Queued, "on"))
    clock.pass_(31)
    machine.run("paused", "runs", "waits", "on")
    codes = {name: machine.error(name).code for name in ("paused", "runs", "waits")}
    assert set(codes.values()) == {"request_timeout"}
    assert machine.of(Admitted, "waits") == []
    assert machine.of(Finished, "on")
    machine.runner("a").scheduler.check()


@pytest.mark.parametrize("how", ["cancel", "pause", "deadline"])
def test_a_load_is_stopped_when_its_only_requester_does_not_want_it_any_more(make, gate, clock, how):
    """SPEC R4: cancellable."""
    machine = make()
    serve(machine, "a")
    machine.submit("r", "a", timeout_s=100.0)
    machine.until(lambda: gate.begun)
    match how:
        case "cancel":
            machine.send(Cancel("r"))
        case "pause":
            machine.send(Pause("r"))
        case "deadline":
            clock.pass_(101)
    machine.until(lambda: gate.stopped)
    machine.until(lambda: machine.state("a") == "absent")
    machine.turn()
    if how == "pause":
        assert len(machine.of(Paused, "r")) == 1
        assert not machine.has_ended("r")
        gate.open()
        machine.send(Resume("r"))
    machine.run("r")
    assert len(machine.of((Finished, Failed), "r")) == 1
    if how == "deadline":
        assert machine.error("r").code == "request_timeout"
    if how == "cancel":
        assert machine.output("r").reasons == {0: FinishReason.CANCELLED}
    assert machine.residency._load is None


def test_a_second_requester_keeps_a_load_going(make, gate):
    """SPEC R4."""
    machine = make()
    serve(machine, "a")
    machine.submit("r", "a")
    machine.submit("s", "a")
    machine.until(lambda: gate.begun)
    machine.send(Cancel("r"))
    machine.turn()
    gate.open()
    machine.run("r", "s")
    assert gate.begun == ["a"]
    assert gate.stopped == []
    assert machine.output("s").reasons == {0: FinishReason.LENGTH}


def test_a_model_that_was_asked_for_by_name_is_loaded_though_its_requester_goes(make, gate):
    """SPEC R4: whoever asked still wants it."""
    machine = make()
    specs = serve(machine, "a")
    machine.load(specs["a"])
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.send(Cancel("r"))
    gate.open()
    machine.until(lambda: machine.state("a") == "ready")
    assert gate.stopped == []


def test_a_load_that_was_given_up_and_ended_all_the_same_is_freed(make, gate):
    """SPEC R4, R10: no memory is lost to a race."""
    machine = make()
    serve(machine, "a")
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    gate.is_deaf = True
    machine.send(Cancel("r"))
    machine.turn()
    gate.open()
    machine.loop._load_threads._loader.submit(int).result()
    machine.turn()
    assert [model for model, _ in gate.backends] == ["a"]
    assert [model for model, backend in gate.backends if not backend._is_closed] == []
    assert machine.ledger == {}
    use(machine, "a")


def test_a_given_up_load_that_goes_on_does_not_hold_up_the_look_at_another_file(make, gate):
    """SPEC R1, R4: one that cannot fit is refused meanwhile."""
    machine = make()
    serve(machine, "a")
    machine.know("huge", "eog_period=0,weights_mib=4000")
    gate.is_deaf = True
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.send(Cancel("r"))
    machine.submit("other", "huge")
    machine.run("other")
    assert machine.error("other").code == "model_too_large"
    assert not gate.backends
