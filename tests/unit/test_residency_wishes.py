"""What callers want of models: loads by name, unloads, pins, how long one stays, questions to absent ones."""

from threading import Event

import msgspec
import pytest

from stoker.engine.jobs.prepare import prepare
from stoker.engine.runners.slots import SlotRunner
from stoker.errors import ModelLoadError
from stoker.ipc.commands import Cancel, Detokenize, Pause, Resume, Tokenize, UnloadModel
from stoker.ipc.events import ModelState, Reply, Resumed
from stoker.ipc.request import StateOutput

BIG = "eog_period=0,weights_mib=400"


def loaded(machine, model="a", order=BIG, **spec):
    """A model in memory; returns its spec."""
    made = machine.know(model, order, **spec)
    machine.load(made)
    machine.until(lambda: machine.state(model) == "ready")
    return made


def hold_preparing(is_over, monkeypatch):
    """Whatever is prepared from here on waits for an event first; returns what is set when one begins."""
    has_begun = Event()

    def slow(*args):
        has_begun.set()
        assert is_over.wait(60), "nobody lets it end"
        return prepare(*args)

    monkeypatch.setattr("stoker.engine.jobs.preparations.prepare", slow)
    return has_begun


def is_settled(machine):
    """Whether no load goes on and none is due."""
    return machine.residency._load is None and not any(s.is_asked for s in machine.residency._catalogue)


# ---------------------------------------------------------------- loads by name, reload


def test_the_same_model_with_the_same_settings_is_not_loaded_again(make, gate):
    """SPEC R5."""
    gate.open()
    machine = make()
    spec = loaded(machine)
    before = machine.runner("a")
    for _ in range(2):
        machine.load(spec)
        machine.until(lambda: is_settled(machine))
    machine.load(msgspec.structs.replace(spec, keep_alive_s=5.0))
    machine.until(lambda: is_settled(machine))
    assert gate.begun == ["a"]
    assert machine.runner("a") is before
    assert machine.states("a") == ["loading", "ready"]
    (status,) = machine.status().models
    assert status.keep_alive_s == 5.0


def test_a_reload_keeps_the_old_model_until_the_new_is_in_and_streams_go_on(make, gate):
    """SPEC L5: replaced under a running stream, which hears of nothing but a pause."""
    gate.open()
    machine = make()
    spec = loaded(machine)
    long = {"prompt": "a long story", "max_tokens": 1500}
    machine.submit("long", "a", **long)
    machine.until_tokens("long", 20)
    gate.shut()
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: len(gate.begun) == 2)
    num_tokens = len(machine.tokens("long"))
    machine.until_tokens("long", num_tokens + 20)  # it runs on meanwhile
    told = [e for e in machine.of(ModelState) if e.info is not None]
    assert len(told) == 1, "that it is ready is told when the new one is"
    gate.open()
    machine.until(lambda: machine.info("a").num_slots == 2)
    machine.run("long")
    assert machine.output("long") == make.alone(**long)
    assert machine.num_returns("long") == (1, 2)
    assert machine.states("a") == ["loading", "ready"]
    assert gate.backends[0][1]._is_closed
    assert machine.ledger["weights"] == 400 * 2**20


def test_requests_that_are_tokenised_for_the_old_model_run_on_the_new_one(make, gate, monkeypatch):
    """SPEC L5: nothing of a model that is gone is used, its vocabulary least of all."""
    gate.open()
    machine = make()
    spec = loaded(machine)
    gate.shut()
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: len(gate.begun) == 2)
    is_over = Event()
    hold_preparing(is_over, monkeypatch)
    machine.offer("fits", "a", max_tokens=30)
    machine.offer("long", "a", prompt="x" * 2500)
    gate.open()
    machine.loop._load_threads._loader.submit(int).result()  # that it is in is heard first
    is_over.set()
    accepted = []
    accept = SlotRunner.accept
    monkeypatch.setattr(SlotRunner, "accept", lambda *told: (accepted.append(told[:2]), accept(*told))[1])
    machine.run("fits", "long")
    assert machine.error("long").code == "context_length_exceeded"
    assert machine.output("fits") == make.alone(max_tokens=30)
    for runner, live in accepted:
        for choice in live.choices.values():
            assert choice.generation._vocabulary is runner.prep.vocabulary


def test_a_reload_that_fails_leaves_the_old_model_as_it_was(make):
    """SPEC R4, L5."""
    machine = make()
    spec = loaded(machine)
    machine.submit("long", "a", max_tokens=1000)
    machine.until_tokens("long", 5)
    for path in ("fake:load_fails=1", "fake:weights_mib=4000"):
        machine.load(msgspec.structs.replace(spec, path=path))
        machine.until(lambda: is_settled(machine))
        assert [e for e in machine.of(ModelState) if e.model == "a"][-1].error is not None
        assert machine.state("a") == "ready"
    machine.run("long")
    machine.load(spec)
    machine.until(lambda: is_settled(machine))
    assert machine.states("a") == ["loading", "ready"]
    assert machine.num_returns("long") == (0, 1)


def test_what_was_asked_for_last_is_what_is_loaded(make, gate):
    """SPEC R4: the first load ends, and nobody is told that the model is not to be had."""
    machine = make()
    spec = machine.know("a", BIG)
    machine.load(spec)
    machine.until(lambda: gate.begun)
    machine.load(msgspec.structs.replace(spec, num_slots=3))
    gate.open()
    machine.until(lambda: machine.state("a") == "ready")
    assert machine.info("a").num_slots == 3
    assert machine.states("a") == ["loading", "ready"]
    assert gate.stopped == ["a"]


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_model_that_is_unloaded_during_its_reload_is_gone(make, gate, is_busy):
    """SPEC L1: never in memory twice, never in memory and called absent."""
    gate.open()
    machine = make()
    spec = loaded(machine)
    if is_busy:
        machine.submit("long", "a", max_tokens=800)
        machine.until_tokens("long", 5)
    gate.shut()
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: len(gate.begun) == 2)
    machine.send(UnloadModel("a"))
    if is_busy:
        machine.submit("late", "a")
    gate.open()
    machine.until(lambda: "absent" in machine.states("a"))
    if is_busy:
        machine.run("long", "late")
        machine.send(UnloadModel("a"))
    machine.until(lambda: is_settled(machine))
    machine.loop._load_threads._loader.submit(int).result()
    machine.turn()
    assert machine.runner("a") is None
    assert machine.state("a") == "absent"
    assert set(machine.ledger) <= {"cache"}
    assert all(backend._is_closed for _, backend in gate.backends)


def test_a_model_that_memory_takes_during_its_reload_is_loaded_as_it_was_to_be(make, gate):
    """SPEC M4, L5."""
    gate.open()
    machine = make()
    spec = loaded(machine)
    gate.shut()
    machine.load(msgspec.structs.replace(spec, num_slots=2))
    machine.until(lambda: len(gate.begun) == 2)
    machine.residency.unload_idle(machine.loop._clock.now())
    gate.open()
    machine.until(lambda: machine.state("a") == "ready" and machine.info("a").num_slots == 2)
    assert machine.ledger["weights"] == 400 * 2**20
    machine.submit("r", "a")
    machine.run("r")
    assert [model for model, backend in gate.backends if not backend._is_closed] == ["a"]


def test_settings_that_are_read_again_do_not_undo_a_load_that_waits_its_turn(make, gate):
    """SPEC L5: they say what they said before, and somebody has asked for another load since."""
    machine = make()
    spec, other = machine.know("a", BIG), machine.know("b", BIG)
    machine.load(other)
    machine.until(lambda: gate.begun == ["b"])
    machine.load(msgspec.structs.replace(spec, num_slots=3))
    machine.know("a", BIG)
    gate.open()
    machine.until(lambda: machine.state("a") == "ready")
    assert machine.info("a").num_slots == 3


def answers(machine, model="a"):
    """States and the load or unload that each answers, repetitions left out."""
    told = [(str(e.state), e.answers) for e in machine.of(ModelState) if e.model == model]
    return [each for at, each in enumerate(told) if at == 0 or told[at - 1] != each]


def test_a_model_that_memory_takes_before_its_reload_begins_has_not_answered_it(make, gate):
    """SPEC M4, L5: it is absent, and on its way."""
    gate.open()
    machine = make()
    spec = machine.know("a", BIG)
    machine.load(spec, ask_id=1)
    machine.until(lambda: machine.state("a") == "ready")
    gate.shut()
    machine.load(machine.know("b", BIG))
    machine.until(lambda: gate.begun == ["a", "b"])
    machine.load(msgspec.structs.replace(spec, num_slots=2), ask_id=5)
    machine.residency.unload_idle(machine.loop._clock.now())
    gate.open()
    machine.until(lambda: machine.state("a") == "ready" and machine.info("a").num_slots == 2)
    assert answers(machine) == [("loading", 0), ("ready", 1), ("absent", 0), ("loading", 0), ("ready", 5)]


def test_what_is_asked_for_last_is_refused_and_what_was_asked_for_before_is_not_loaded_instead(make, gate):
    """SPEC R4, L5: nobody waits for that any more; the model stays as it was."""
    gate.open()
    machine = make()
    spec = loaded(machine, n_ctx=512)
    machine.submit("r", "a", max_tokens=200)
    machine.until_tokens("r", 5)
    gate.shut()
    machine.load(msgspec.structs.replace(spec, num_slots=2), ask_id=2)
    machine.until(lambda: len(gate.begun) == 2)
    machine.load(msgspec.structs.replace(spec, n_ctx=64), ask_id=3)
    told = machine.of(ModelState)[-1]
    assert (told.error.code, told.answers) == ("model_in_use", 3)
    gate.open()
    machine.run("r")
    machine.until(lambda: gate.stopped)
    assert is_settled(machine)
    assert machine.runner("a").spec.num_slots == spec.num_slots


def test_a_load_that_is_refused_while_the_model_goes_is_answered_and_the_model_goes(make):
    """SPEC R3, L5: what runs on it needs more context than it would have."""
    machine = make()
    spec = loaded(machine, n_ctx=512)
    machine.submit("long", "a", max_tokens=200)
    machine.until_tokens("long", 5)
    machine.send(UnloadModel("a", ask_id=2))
    machine.load(msgspec.structs.replace(spec, n_ctx=64), ask_id=3)
    told = machine.of(ModelState)[-1]
    assert (told.state, told.error.code, told.answers) == ("unloading", "model_in_use", 3)
    machine.run("long")
    machine.until(lambda: machine.state("a") == "absent")
    assert is_settled(machine)


def test_a_load_of_a_model_that_is_on_its_way_out_is_answered_when_it_is_back(make):
    """SPEC R3, R4: that it is gone answers the unload before it at the most."""
    machine = make()
    spec = loaded(machine)
    machine.submit("long", "a", max_tokens=100)
    machine.until_tokens("long", 5)
    machine.send(UnloadModel("a", ask_id=2))
    machine.load(spec, ask_id=3)
    machine.until(lambda: machine.states("a")[-2:] == ["loading", "ready"] and machine.finished("long"))
    assert answers(machine)[2:] == [("unloading", 0), ("absent", 0), ("loading", 0), ("ready", 3)]


# ---------------------------------------------------------------- unloads


def test_an_idle_model_that_is_unloaded_goes_at_once(make):
    """SPEC R3, R10."""
    machine = make()
    loaded(machine)
    machine.send(UnloadModel("a"))
    assert machine.states("a") == ["loading", "ready", "unloading", "absent"]
    assert machine.ledger == {}


def test_a_busy_model_that_is_unloaded_goes_when_its_requests_have_ended(make):
    """SPEC R3: never under a lease; the loop does not fall asleep before."""
    machine = make()
    loaded(machine)
    machine.submit("long", "a", max_tokens=300)
    machine.until_tokens("long", 5)
    machine.send(UnloadModel("a"))
    assert machine.state("a") == "unloading"
    machine.until(lambda: machine.state("a") == "absent")
    assert machine.finished("long")
    assert machine.num_returns("long") == (0, 1)
    assert len(machine.tokens("long")) == 300


def test_a_model_that_becomes_free_goes_though_nothing_else_is_to_be_done(make):
    """SPEC R3: an encoder leaves nothing to store, nothing is cleaned up, no sample comes."""
    machine = make(limit_mib=8000)
    loaded(machine, order="encoder=1")
    machine.offer("r", "a", max_tokens=0, state_output=StateOutput.EMBED)
    machine.send(UnloadModel("a"))
    machine.until(lambda: machine.state("a") == "absent")
    assert machine.finished("r")


def test_a_model_is_not_freed_while_its_vocabulary_is_in_use(make, gate, monkeypatch):
    """SPEC R10: a worker may be tokenising with it."""
    gate.open()
    machine, told = make(), []
    loaded(machine)
    backend, is_over = gate.backends[0][1], Event()
    close = backend.close
    backend.close = lambda: (told.append("freed"), close())
    has_begun = hold_preparing(is_over, monkeypatch)
    machine.offer("r", "a", max_tokens=3)
    assert has_begun.wait(60)
    machine.send(Cancel("r"))
    machine.send(UnloadModel("a"))
    machine.turn()
    assert (told, machine.states("a")[-1]) == ([], "absent")
    assert machine.ledger["weights"] == 400 * 2**20
    is_over.set()
    machine.until(lambda: bool(told))
    assert "weights" not in machine.ledger


def test_newcomers_of_a_model_that_is_unloaded_wait_until_it_is_back(make):
    """SPEC R3."""
    machine = make()
    loaded(machine)
    machine.submit("long", "a", max_tokens=300)
    machine.until_tokens("long", 5)
    machine.send(UnloadModel("a"))
    machine.submit("late", "a")
    machine.run("long", "late")
    assert machine.states("a") == ["loading", "ready", "unloading", "absent", "loading", "ready"]


@pytest.mark.parametrize("has_request", [False, True], ids=["asked for", "needed"])
def test_an_unload_during_a_load_is_answered(make, gate, has_request):
    """SPEC R4: the load ends; where requests need the model it begins anew."""
    machine = make()
    spec = machine.know("a", BIG)
    if has_request:
        machine.submit("r", "a")
    else:
        machine.load(spec)
    machine.until(lambda: gate.begun)
    machine.send(UnloadModel("a"))
    assert "absent" in machine.states("a")
    gate.open()
    if has_request:
        machine.run("r")
        assert machine.finished("r")
    else:
        machine.until(lambda: gate.stopped)
        machine.turn()
        assert machine.states("a") == ["loading", "absent"]
    assert gate.begun == ["a"] * (1 + has_request)


def test_an_unload_of_what_is_not_there_is_answered_and_one_of_nothing_is_ignored(make):
    """SPEC L1."""
    machine = make()
    machine.know("a")
    machine.send(UnloadModel("a"))
    assert machine.states("a") == ["absent"]
    num_events = len(machine.events)
    machine.send(UnloadModel("nobody"))
    assert len(machine.events) == num_events


# ---------------------------------------------------------------- keep-alive


def test_a_model_goes_when_it_was_idle_for_as_long_as_it_may(make, clock):
    """SPEC R8."""
    machine = make()
    loaded(machine, keep_alive_s=60.0)
    machine.submit("r", "a")
    machine.run("r")
    clock.pass_(59)
    machine.turn()
    assert machine.state("a") == "ready"
    (status,) = machine.status().models
    assert 0 < status.unload_in_s <= 1.5
    clock.pass_(1.1)
    machine.turn()
    assert machine.state("a") == "absent"
    assert "idle for 60 s" in machine.of(ModelState)[-1].reason


def test_a_model_never_goes_while_it_is_busy(make, clock):
    """SPEC R8: idle time counts from the last request's end."""
    machine = make()
    loaded(machine, keep_alive_s=60.0)
    machine.submit("long", "a", max_tokens=500)
    machine.until_tokens("long", 5)
    clock.pass_(600)
    machine.until_tokens("long", 50)
    machine.run("long")
    clock.pass_(50)
    machine.turn()
    assert machine.state("a") == "ready"


@pytest.mark.parametrize("how", ["asked for first", "first request", "question first"])
def test_one_that_is_not_kept_alive_goes_after_its_first_use(make, how):
    """SPEC R8: 0 unloads at once, but not what was loaded for a request that is to come."""
    machine = make()
    spec = machine.know("a", BIG, keep_alive_s=0.0)
    if how == "asked for first":
        machine.load(spec)
        machine.until(lambda: machine.state("a") == "ready")
        machine.turn()
        machine.turn()
        assert machine.state("a") == "ready"
    if how == "question first":
        machine.send(Tokenize(call_id=1, model="a", text="x"))
        machine.until(lambda: machine.of(Reply))
    else:
        machine.submit("r", "a", max_tokens=100)
        machine.run("r")
        assert len(machine.tokens("r")) == 100
    machine.until(lambda: machine.state("a") == "absent")
    assert machine.states("a").count("ready") == 1


def test_one_that_is_kept_for_good_stays(make, clock):
    """SPEC R8: -1."""
    machine = make()
    loaded(machine, keep_alive_s=-1.0)
    machine.submit("r", "a")
    machine.run("r")
    clock.pass_(10**6)
    machine.turn()
    assert machine.state("a") == "ready"


def test_a_request_may_say_how_long_its_model_stays(make, clock):
    """SPEC R8: per request; the next one without a word goes back to the model's own."""
    machine = make()
    loaded(machine, keep_alive_s=60.0)
    machine.submit("r", "a", keep_alive_s=-1.0)
    machine.run("r")
    clock.pass_(1000)
    machine.turn()
    assert machine.state("a") == "ready"
    machine.submit("s", "a")
    machine.run("s")
    clock.pass_(61)
    machine.turn()
    assert machine.state("a") == "absent"
    machine.submit("t", "a", keep_alive_s=0.0)
    machine.run("t")
    machine.until(lambda: machine.state("a") == "absent")


def test_a_paused_request_does_not_keep_its_model_in_memory_and_goes_on_all_the_same(make, clock):
    """SPEC R8, Q17: nobody uses it meanwhile."""
    machine = make()
    loaded(machine, keep_alive_s=60.0)
    long = {"prompt": "a long story", "max_tokens": 300}
    machine.submit("long", "a", **long)
    machine.until_tokens("long", 30)
    machine.send(Pause("long"))
    clock.pass_(61)
    machine.until(lambda: machine.state("a") == "absent")
    machine.turn()
    assert machine.states("a")[-1] == "absent", "it is not loaded for one that stands still"
    machine.send(Resume("long"))
    machine.run("long")
    assert machine.output("long") == make.alone(**long)
    assert len(machine.of(Resumed, "long")) == 1


# ---------------------------------------------------------------- questions


def test_questions_about_text_load_the_model_they_are_about(make):
    """A tokenizer needs the model's file."""
    machine = make()
    machine.know("a", BIG)
    machine.inbox.put(Tokenize(call_id=1, model="a", text="abc"))
    machine.send(Detokenize(call_id=2, model="a", tokens=[65, 66]))
    machine.until(lambda: len(machine.of(Reply)) == 2)
    first, second = machine.of(Reply)
    assert first.value["tokens"] == [256, 97, 98, 99]
    assert second.value["text"] == "AB"
    assert machine.states("a") == ["loading", "ready"]


def test_questions_to_a_model_that_cannot_be_had_are_answered_with_the_error(make):
    """SPEC R4."""
    machine = make()
    machine.know("bad", "load_fails=1")
    for call_id in (1, 2):
        machine.send(Tokenize(call_id=call_id, model="bad", text="abc"))
        machine.until(lambda call_id=call_id: len(machine.of(Reply)) == call_id)
    assert [e.error.code for e in machine.of(Reply)] == [ModelLoadError.code] * 2
    machine.send(Tokenize(call_id=3, model="nobody", text="abc"))
    assert machine.of(Reply)[-1].error.code == "model_not_found"


def test_status_is_there_without_any_model(make):
    """SPEC S6: and it loads none."""
    machine = make()
    machine.know("a", BIG)
    status = machine.status()
    assert [(m.id, m.state, m.leases) for m in status.models] == [("a", "absent", 0)]
    machine.turn()
    assert machine.states("a") == []
