"""Requests whose model goes under them: they come back with the text they would have had undisturbed.

That holds over an eviction in this engine, over a reload, and over a suspend into the next engine.
"""

import msgspec
import pytest

from memory_stand_in import GREEDY, Gate
from stoker.engine.residency.residency import RETRY_S
from stoker.ipc.commands import Cancel, LoadModel, Pause, Resume, Submit, Suspend
from stoker.ipc.events import Delta, Failed, Finished, Goodbye, Parked, PromptEcho
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.ipc.usage import CacheSource

ORDER = "eog_period=0,weights_mib=100"
STORY = "a long story " * 12


KINDS = {
    "greedy": {},
    "seeded": {"sampling": Sampling(seed=11)},
    "several": {"n": 3, "sampling": Sampling(seed=5)},
    "stops": {"stop": ("zzzz", "qqqq")},
    "a stop that matches": {"stop": ("ll",), "max_tokens": 400},
    "logprobs": {"logprobs": 3},
    "mirostat": {"sampling": Sampling(seed=3, mirostat=2)},
    "mirostat of several": {"n": 2, "sampling": Sampling(seed=3, mirostat=1)},
    "echo": {"echo": True},
    "prompt logprobs": {"echo": True, "prompt_logprobs": 2},
    "penalties": {"sampling": Sampling(seed=2, repeat_penalty=1.3, dry_multiplier=0.8)},
    "shifted": {"context_shift": True, "max_tokens": 700},
    "one at the end": {"max_tokens": 61},
}


def put_out(machine, model="a"):
    """The model has to go now, whoever runs on it."""
    machine.residency._unload(machine.residency._catalogue.get(model), "tested", machine.loop._clock.now())


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_model_goes_and_comes_back_gets_what_it_would_have_got(make, kind):
    """SPEC M4, L5, L6: whatever it asks for; twice on end."""
    fields = {"prompt": STORY, "max_tokens": 120} | KINDS[kind]
    machine = make()
    machine.know("a", ORDER, n_ctx=512)
    machine.submit("r", "a", **fields)
    for count in (40, 60):
        machine.until(lambda count=count: machine.has_ended("r") or len(machine.tokens("r")) >= count)
        put_out(machine)
    machine.run("r")
    alone = make.alone(n_ctx=512, **fields)
    assert machine.output("r") == alone
    assert len(machine.of((Finished, Failed), "r")) == 1
    assert machine.of(Finished, "r")[0].usage.completion_tokens == sum(map(len, alone.tokens.values()))
    assert machine.residency._catalogue.get("a").story.count("absent: tested") == 2


def test_a_model_that_goes_in_the_middle_of_a_prefill_costs_nothing_but_time(make):
    """SPEC M4: the prompt's slices so far are kept."""
    machine = make()
    machine.know("a", ORDER, n_ctx=2048, n_batch=64)
    fields = {"prompt": "x" * 1500, "return_progress": True, "prompt_logprobs": 1, "echo": True}
    machine.submit("r", "a", **fields)
    machine.until(lambda: machine.runner("a") and machine.runner("a").scheduler.cells.used > 300)
    assert not machine.tokens("r")
    put_out(machine)
    machine.run("r")
    assert machine.output("r") == make.alone(**fields)
    assert len(machine.of(PromptEcho, "r")) == 1


def test_those_that_wait_and_those_that_run_keep_their_order(make):
    """SPEC Q2, Q5: who came first is first again."""
    machine = make()
    machine.know("a", ORDER, num_slots=2)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        machine.submit(name, "a", prompt=f"{name} says", max_tokens=40)
    machine.until_tokens("r0", 5)
    put_out(machine)
    machine.run(*names)
    ended = [e.request_id for e in machine.of(Finished)]
    assert [sorted(ended[at : at + 2]) for at in (0, 2, 4)] == [names[at : at + 2] for at in (0, 2, 4)]
    for name in names:
        assert machine.output(name) == make.alone(prompt=f"{name} says", max_tokens=40)


def test_what_was_computed_is_not_computed_again_when_the_model_is_back(make):
    """SPEC C6, M4: its state was stored on the way out."""
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a", prompt="x" * 1000, max_tokens=300)
    machine.until_tokens("r", 100)
    put_out(machine)
    before = machine.loop._clock.num_steps
    machine.run("r")
    assert machine.loop._clock.num_steps - before <= 201
    assert machine.output("r") == make.alone(prompt="x" * 1000, max_tokens=300)


def test_one_that_would_not_fit_its_model_with_less_context_waits_until_there_is_room(make, clock):
    """SPEC R2, M4: what has begun is not cut down with its model."""
    machine = make()
    machine.know("a", "eog_period=0,weights_mib=100,cell_kib=32", n_ctx=16384)
    machine.submit("r", "a", prompt="x" * 2000, max_tokens=400)
    machine.submit("short", "a", max_tokens=400)
    machine.until_tokens("r", 100)
    machine.others_mib = 700  # a context of 2,048 would fit
    put_out(machine)
    machine.until(lambda: machine.state("a") == "failed")
    machine.others_mib = 600
    clock.pass_(RETRY_S)
    machine.run("r", "short")
    assert machine.info("a").n_ctx == 4096
    assert machine.of(Failed) == []
    assert machine.output("r") == make.alone(prompt="x" * 2000, max_tokens=400, n_ctx=4096)
    assert len(machine.tokens("short")) == 400


def test_paused_requests_stay_paused_when_their_model_goes(make):
    """SPEC Q17."""
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a", max_tokens=100)
    machine.submit("s", "a", max_tokens=600)
    machine.until_tokens("r", 20)
    machine.send(Pause("r"))
    put_out(machine)
    machine.until(lambda: machine.state("a") == "ready")
    machine.run("s")
    assert len(machine.tokens("r")) < 100
    machine.send(Resume("r"))
    machine.run("r")
    assert machine.output("r") == make.alone(max_tokens=100)


def test_cancelled_while_its_model_is_away_a_request_ends_once(make):
    """SPEC L6."""
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a", max_tokens=500, n=2)
    machine.until_tokens("r", 20)
    put_out(machine)
    machine.send(Cancel("r"))
    machine.run("r")
    assert machine.output("r").reasons == dict.fromkeys((0, 1), FinishReason.CANCELLED)
    assert len(machine.of((Finished, Failed), "r")) == 1


# ---------------------------------------------------------------- suspend


class Client:
    """What the front keeps of requests: their commands, and what was delivered."""

    def __init__(self):
        self._requests = {}

    def submit(self, machine, name, **fields):
        """Send a request and keep it."""
        known = {"model": "a", "prompt": tuple(STORY.encode()), "max_tokens": 120, "sampling": GREEDY}
        self._requests[name] = GenerateRequest(**known | fields)
        machine.send(Submit(request_id=name, request=self._requests[name]))

    def submit_again(self, before, after):
        """Give the next engine what was not finished in the last one."""
        for name, request in self._requests.items():
            if before.has_ended(name):
                continue
            output = before.output(name)
            indices = range(request.n)
            deltas = before.of(Delta, name)
            last_mu = {e.index: e.mirostat_mu for e in deltas}
            after.send(
                Submit(
                    request_id=name,
                    request=request,
                    generated=[output.tokens.get(at, []) for at in indices],
                    is_finished=[at in output.reasons for at in indices],
                    mirostat_mu=[last_mu.get(at) for at in indices],
                )
            )


def both(before, after, name):
    """What a request was given in two engines together."""
    first, second = before.output(name), after.output(name)
    for at, tokens in second.tokens.items():
        first.tokens.setdefault(at, []).extend(tokens)
    for at, text in second.texts.items():
        first.texts[at] = first.texts.get(at, "") + text
    return first.tokens, first.texts, first.reasons | second.reasons


def suspended(make, tmp_path, requests, until, **spec):
    """An engine with those requests that was suspended; what its front keeps."""
    machine, front = make(folder=tmp_path / "shared"), Client()
    machine.loop._store.open()
    machine.know("a", ORDER, **spec)
    for name, fields in requests.items():
        front.submit(machine, name, **fields)
    machine.until(lambda: until(machine))
    machine.end(Suspend(save_s=5.0))
    return machine, front


def test_a_suspended_engine_says_goodbye_and_ends_no_request(make, tmp_path):
    """SPEC L2: running, waiting, paused and in the lobby."""
    requests = {f"r{n}": {"prompt": tuple(f"{n} {STORY}".encode())} for n in range(4)}
    machine, front = suspended(
        make, tmp_path, requests, lambda m: len(m.tokens("r0")) > 10, num_slots=2, n_batch=64
    )
    assert isinstance(machine.events[-1], Goodbye)
    assert machine.of((Finished, Failed, Parked)) == []
    assert machine.runner("a") is None
    after = make(folder=tmp_path / "shared")
    after.loop._store.open()
    after.know("a", ORDER, num_slots=2, n_batch=64)
    front.submit_again(machine, after)
    after.run(*requests)
    for name, fields in requests.items():
        alone = make.alone(prompt=bytes(fields["prompt"]).decode(), max_tokens=120)
        assert both(machine, after, name) == (alone.tokens, alone.texts, alone.reasons)
        assert len(after.of((Finished, Failed), name)) == 1


@pytest.mark.parametrize(
    "kind", ["seeded", "several", "a stop that matches", "mirostat of several", "shifted"]
)
def test_the_next_engine_goes_on_with_the_same_text_from_what_is_on_disk(make, tmp_path, kind):
    """SPEC L2, C6: continue every stream, and compute nothing twice."""
    fields = {"max_tokens": 120} | KINDS[kind]
    before, front = suspended(make, tmp_path, {"r": fields}, lambda m: len(m.tokens("r")) >= 25, n_ctx=512)
    assert list((tmp_path / "shared").rglob("*.*")), "nothing was written"
    after = make(folder=tmp_path / "shared")
    after.loop._store.open()
    after.until(lambda: list(after.loop._store.cache.index))
    after.know("a", ORDER, n_ctx=512)
    front.submit_again(before, after)
    after.run("r")
    alone = make.alone(n_ctx=512, prompt=STORY, **fields)
    assert both(before, after, "r") == (alone.tokens, alone.texts, alone.reasons)
    usage = after.of(Finished, "r")[0].usage
    assert usage.completion_tokens == sum(map(len, alone.tokens.values()))
    if kind != "shifted":
        assert usage.cache_source is CacheSource.DISK


def test_commands_that_arrive_after_a_suspend_end_nothing(make):
    """SPEC L2, L6: the front keeps those requests too."""
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a", max_tokens=100)
    machine.until_tokens("r", 5)
    machine.inbox.put(Suspend(save_s=1.0))
    machine.inbox.put(Submit(request_id="s", request=GenerateRequest(model="a", prompt=(1, 2))))
    machine.end(Cancel("r"))
    assert machine.of((Finished, Failed)) == []
    assert isinstance(machine.events[-1], Goodbye)


def test_a_suspend_during_a_load_stops_it(make, monkeypatch):
    """SPEC L2, R4: nobody waits for a model that is not needed now."""
    gate = Gate(monkeypatch)
    machine = make()
    machine.know("a", ORDER)
    machine.submit("r", "a")
    machine.until(lambda: gate.begun)
    machine.end(Suspend(save_s=1.0))
    assert gate.stopped == ["a"]
    assert machine.of((Finished, Failed)) == []


def test_nothing_is_loaded_for_an_engine_that_is_being_suspended(make, monkeypatch):
    """SPEC L2: what was asked for a moment before does not delay it."""
    gate = Gate(monkeypatch)
    machine = make()
    spec = machine.know("a", ORDER)
    machine.inbox.put(LoadModel(msgspec.structs.replace(spec, is_pinned=True)))
    machine.end(Suspend(save_s=1.0))
    assert gate.begun == []
