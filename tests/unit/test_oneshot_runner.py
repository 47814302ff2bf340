"""The one-shot runner on the fake encoder, driven turn by turn: order, batching, endings."""

import numpy as np
import pytest

from stoker.backends.fake.encoder import N_EMBD, estimator, load, vector_of
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.loop import EngineLoop
from stoker.engine.residency.catalogue import model_info
from stoker.engine.runners.oneshot import OneShotRunner
from stoker.engine.runners.status import waiting_status
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelFileError,
    ModelLoadError,
    QueueFullError,
    UnsupportedError,
)
from stoker.ipc.commands import LoadModel, Shutdown, Submit
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    ModelState,
    Paused,
    Queued,
    Resumed,
    StateReady,
)
from stoker.ipc.model import ModelSpec, Policy
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, Sampling, StateOutput
from stoker.kv.sequence import SequenceState
from stoker.scheduler.queue import Throttle
from stoker.settings import EngineSettings

BACKGROUND = Priority.BACKGROUND
_WANTS = {"model": "e", "max_tokens": 0, "state_output": StateOutput.EMBED}
EMBED = {**_WANTS, "sampling": Sampling(temperature=0)}


class House:
    """A resident with a clock of whole seconds, one a turn."""

    def __init__(self, path="fake:encoder=1", **spec):
        fields = {"id": "e", "path": path, "policy": Policy.THROUGHPUT} | spec
        spec = ModelSpec(**fields)
        self.encoder = load(spec)
        self.jobs = JobTable()
        self.runner = OneShotRunner(spec, self.encoder, StepTimer(Stopwatch(10.0)), self.jobs)
        self.now = 0.0
        self.num_entered, self.entered = 0, set()

    def measured(self, token_s=1e-6):
        """It has computed before, so many seconds a token."""
        for num_tokens in (8, 16, 32, 64, 128, 256, 512):
            self.runner._cost.learn(num_tokens, num_tokens * token_s)

    def enter(self, name, text="hello", **fields):
        """A request to embed `text` arrives, already tokenised; one that has come before gets another end."""
        self.num_entered += 1
        if text in self.entered:
            last = ord("A") + self.num_entered % 26
            text = text[:-1] + (chr(last) if isinstance(text, str) else (last,))
        self.entered.add(text)
        self.again(name, text, **fields)

    def again(self, name, text, **fields):
        """Just this text."""
        request = GenerateRequest(prompt=text, **EMBED | fields)
        self.readmit(Submit(request_id=name, request=request))

    def readmit(self, submit):
        """A submit, perhaps one that was sent off, is prepared and accepted."""
        self.runner.accept(prepare(submit, self.runner.prep, self.now - submit.age_s), self.now)

    def turn(self, num=1):
        """Turns of a second each."""
        for _ in range(num):
            self.jobs.expire(self.now)
            self.runner.schedule(self.now)
            self.runner.step(self.now)
            self.now += 1

    def of(self, kind, name=None):
        """Events of a kind, in order."""
        return [e for e in self.jobs.events if isinstance(e, kind) and name in (None, e.request_id)]

    def vector(self, name):
        """What a request was given."""
        (ready,) = self.of(StateReady, name)
        (tensor,) = ready.tensors
        assert (tensor.name, tensor.shape) == ("embedding", (N_EMBD,))
        return np.frombuffer(tensor.data, "<f4")

    def waiting(self, state):
        """Status of the texts in a state."""
        return waiting_status([self.runner], 0.0)[state]

    def order(self):
        """Who was given a vector, in order."""
        return [event.request_id for event in self.of(StateReady)]

    def tokens(self, text):
        """The tokens of a text as a request's are made."""
        return self.encoder.vocabulary.tokenize(text, add_special=True, parse_special=True)


def test_each_text_gets_its_vector_and_one_terminal_event():
    """SPEC K2, L6: beside others a text gets what it gets alone; one vector, then one ending."""
    house = House()
    house.measured()
    texts = {f"r{at}": f"text {at}" for at in range(5)}
    for name, text in texts.items():
        house.enter(name, text)
    assert [event.position for event in house.of(Queued)] == [0, 1, 2, 3, 4]
    house.turn()
    assert house.encoder.calls == [5]
    for name, text in texts.items():
        assert (house.vector(name) == vector_of(house.tokens(text))).all()
        kinds = [type(e) for e in house.jobs.events if e.request_id == name]
        assert kinds == [Queued, Admitted, StateReady, Delta, Finished]
        (finished,) = house.of(Finished, name)
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (7, 0)
    assert not house.runner.has_work
    assert house.jobs.num_leases("e") == 0


def test_a_call_carries_whole_texts_in_order_as_far_as_they_fit():
    """SPEC Q9: at most `n_batch` tokens and so many texts; a longer text goes alone; nobody is overtaken."""
    house = House(n_batch=40)
    house.measured()
    for name, length in {"a": 20, "b": 15, "long": 100, "c": 4, "d": 4}.items():
        house.enter(name, tuple(65 + at % 20 for at in range(length)))
    house.turn()
    assert house.order() == ["a", "b"]
    house.turn()
    assert house.order() == ["a", "b", "long"]
    house.turn()
    assert house.order() == ["a", "b", "long", "c", "d"]
    for at in range(20):
        house.enter(f"short {at}", (65,))
    house.turn(2)
    assert house.encoder.calls[-2:] == [16, 4]


def test_the_same_text_for_many_is_computed_once(monkeypatch):
    """SPEC K2: those who wait with it come along, however many, and count for nothing."""
    house, calls = House(n_batch=16), []
    encode = house.encoder.encode
    monkeypatch.setattr(house.encoder, "encode", lambda texts: calls.append(len(texts)) or encode(texts))
    for at in range(40):
        house.again(f"r{at}", (65,) * 12)
        house.again(f"other{at % 2}{at}", (66 + at,) * 12)
    house.turn()
    assert calls == [1]
    assert house.order() == [f"r{at}" for at in range(40)]
    assert len({tuple(house.vector(name)) for name in house.order()}) == 1


def test_the_same_text_of_other_salts_is_computed_for_each(monkeypatch):
    """SPEC C1, K2: how long a call takes does not tell one caller what another has in it."""
    house, calls = House(n_batch=16), []
    encode = house.encoder.encode
    monkeypatch.setattr(house.encoder, "encode", lambda texts: calls.append(list(texts)) or encode(texts))
    text = (65,) * 6
    for at, salt in enumerate(("a", "b", "c", "a")):
        house.again(f"r{at}", text, cache_salt=salt)
    house.turn(2)
    assert calls == [[text, text], [text]]
    assert len({tuple(house.vector(f"r{at}")) for at in range(4)}) == 1


def test_a_call_stays_within_the_step_target_where_costs_are_known():
    """SPEC Q8, Q13: people who wait for another model wait for one short step; a long text cannot be cut."""
    for policy, expected in ((Policy.LATENCY, [2, 2]), (Policy.BALANCED, [4]), (Policy.THROUGHPUT, [4])):
        house = House(policy=policy, target_step_ms=50.0)
        house.measured(0.0025)  # 20 tokens a step
        for at in range(4):
            house.enter(f"r{at}", tuple(range(65, 75)))
        house.turn()
        first = list(house.encoder.calls)
        assert first == expected[:1], policy
        while house.runner.has_work:
            house.turn()
        assert sum(house.encoder.calls) == 4
        house.enter("long", (65,) * 200)
        house.turn()
        assert house.encoder.calls[-1] == 1


def test_people_go_before_jobs_and_jobs_are_not_starved():
    """SPEC Q2, Q7: interactive stands before background; over its patience that gets one call in ten."""
    house = House(n_batch=8, background_patience_s=5.0)
    text = (65,) * 8  # one a call
    house.enter("job", text, priority=BACKGROUND)
    house.enter("job 2", text, priority=BACKGROUND)
    assert not house.runner.has_people
    for turn in range(40):
        house.enter(f"person {turn}", text)
        assert house.runner.has_people
        assert house.runner.is_owed(house.now) == (house.now >= 5 and len(house.order()) < 16)
        house.turn()
    order = house.order()
    assert order[:5] == [f"person {at}" for at in range(5)]
    assert order.index("job 2") - order.index("job") == 10
    assert order.index("job") == 5


def test_a_full_line_refuses_jobs_first():
    """SPEC Q11: background is refused at half the bound, with a time to come back."""
    house = House(max_queue=4)
    for at in range(2):
        house.enter(f"r{at}")
    house.runner.check_queue(Priority.INTERACTIVE, 1)
    with pytest.raises(QueueFullError) as refused:
        house.runner.check_queue(BACKGROUND, 0)
    assert refused.value.retry_after_s >= 1
    with pytest.raises(QueueFullError):
        house.runner.check_queue(Priority.INTERACTIVE, 2)


def test_who_leaves_or_is_late_is_never_computed():
    """SPEC Q6, S5: cancelled and expired texts end at once, paused ones too when their time is up."""
    house = House()
    house.enter("gone")
    house.enter("late", timeout_s=2.0)
    house.enter("asleep", timeout_s=3.0)
    house.jobs.pause("asleep", house.now)
    house.jobs.cancel("gone", house.now)
    house.jobs.cancel("nobody", house.now)
    assert house.of(Delta, "gone")[0].finish_reason is FinishReason.CANCELLED
    assert house.jobs.next_deadline_s() == 2.0
    house.now = 2.5
    house.turn()
    assert house.of(Failed, "late")[0].error.code == "request_timeout"
    house.jobs.expire(3.5)
    assert house.of(Failed, "asleep")[0].error.code == "request_timeout"
    assert house.encoder.calls == []
    assert len(house.of((Finished, Failed))) == 3


def test_a_paused_text_stands_still_until_it_is_resumed():
    """SPEC Q17: it leaves the line, needs no model meanwhile, and comes back to its place."""
    house = House(n_batch=6)
    for name in ("a", "b"):
        house.enter(name)
        house.now += 1
    house.jobs.pause("a", house.now)
    house.jobs.pause("a", house.now)
    assert len(house.of(Paused, "a")) == 2
    assert house.jobs.num_leases("e") == 1
    assert [status.request_id for status in house.waiting(SequenceState.PAUSED)] == ["a"]
    house.enter("c")
    house.jobs.resume("a", house.now)
    assert len(house.of(Resumed, "a")) == 1
    line = house.waiting(SequenceState.QUEUED)
    assert [(status.request_id, status.position) for status in line] == [("a", 0), ("b", 1), ("c", 2)]
    house.turn(3)
    assert house.order() == ["a", "b", "c"]


def test_a_failing_text_fails_alone():
    """SPEC Q12: a call that fails is halved until its culprit is alone."""
    house = House("fake:encoder=1,bad_tokens=7")
    for at in range(5):
        house.enter(f"good {at}")
    house.enter("bad", (65, 7))
    house.turn()
    assert house.of(Failed, "bad")[0].error.code == "step_failed"
    assert sorted(house.order()) == [f"good {at}" for at in range(5)]
    assert not house.jobs.has_requests


def test_a_vector_that_is_no_number_is_an_error(monkeypatch):
    """SPEC L6: what no client could read is never sent."""
    house = House()
    monkeypatch.setattr(house.encoder, "encode", lambda texts: np.full((len(texts), N_EMBD), np.nan))
    house.enter("r")
    house.turn()
    assert house.of(Failed, "r")[0].error.code == "step_failed"
    assert house.order() == []


def test_what_an_encoder_cannot_do_is_refused():
    """SPEC K2: text generation, several vectors of a text, a text over its length, vectors of a reranker."""
    house = House()
    with pytest.raises(UnsupportedError, match="generates none"):
        house.enter("r", state_output=None, max_tokens=5)
    with pytest.raises(UnsupportedError, match="generates none"):
        house.enter("r", state_output=StateOutput.SAVE)
    with pytest.raises(InvalidRequestError, match="one vector"):
        house.enter("r", n=2)
    house.enter("fits", (65,) * 512)
    with pytest.raises(ContextLengthError) as refused:
        house.enter("r", (65,) * 513)
    assert refused.value.details == {"num_tokens": 513, "n_ctx": 512}
    house.turn()
    assert house.order() == ["fits"]
    with pytest.raises(UnsupportedError, match="reranker"):
        House("fake:encoder=1,pooling=rank").enter("r")
    with pytest.raises(UnsupportedError, match="no reranker"):
        house.enter("r", state_output=StateOutput.SCORE, document="one")


def test_whoever_waits_can_be_sent_off_and_come_back():
    """SPEC M4, L5: all leave without a terminal event, in order, paused ones paused, and lose nothing."""
    house = House()
    house.enter("a", "first")
    house.enter("b", "second", priority=BACKGROUND)
    house.enter("c", "third")
    house.jobs.pause("c", house.now)
    house.now = 4.0
    house.jobs.evacuate("e", "no room", house.now)
    submits = [job.submit for job in house.jobs.pending("e")]
    assert [(s.request_id, s.is_paused, s.age_s) for s in submits] == [
        ("a", False, 4.0),
        ("b", False, 4.0),
        ("c", True, 4.0),
    ]
    assert house.of((Finished, Failed, Delta)) == []
    assert not house.jobs.placed("e")
    assert house.jobs.num_leases("e") == 0
    house.jobs.events.clear()
    for submit in submits[:2]:
        house.readmit(submit)
    house.turn()
    assert house.order() == ["a", "b"]


def test_a_replayed_request_that_had_ended_only_ends():
    """SPEC L3, L6: what was delivered before a restart is not computed again."""
    house = House()
    ended = Submit(
        request_id="r", request=GenerateRequest(prompt="x", **EMBED), generated=[[]], is_finished=[True]
    )
    house.readmit(ended)
    assert [type(event) for event in house.jobs.events] == [Finished]


def test_who_is_held_back_waits_and_gives_no_work():
    """SPEC M4, M6: paused background lets people through; held altogether, nobody is computed."""
    house = House()
    house.enter("job", priority=BACKGROUND)
    house.runner.hold_back(Throttle(holds_background=True))
    assert not house.runner.has_work
    assert house.jobs.has_requests
    house.enter("person")
    house.turn()
    assert house.order() == ["person"]
    house.runner.hold_back(Throttle(holds_all=True))
    house.enter("other")
    house.turn()
    assert house.order() == ["person"]
    house.runner.hold_back(Throttle())
    house.turn()
    assert house.order() == ["person", "other", "job"]


def test_it_tells_what_it_is():
    """SPEC K7: class, width, pooling and limits; no cells, no slots, nothing to store."""
    house = House("fake:encoder=1,pooling=cls,weights_mib=3", num_slots=3)
    info = model_info(house.runner)
    assert (info.model_class, info.pooling, info.n_embd) == ("encoder", "cls", N_EMBD)
    assert (info.n_ctx, info.num_slots, info.memory_bytes["weights"]) == (512, 16, 3 * 2**20)
    assert house.runner.num_cells == (0, 0)
    assert house.runner.slot_status(0.0) == []
    assert not house.runner.has_unstored
    house.runner.close()
    assert house.encoder.is_closed


def test_waiting_texts_hear_of_their_place_now_and_then():
    """SPEC Q14: a new position is told, at most once a second, with the time to go once calls were timed."""
    house = House(n_batch=8)
    for at in range(3):
        house.enter(f"r{at}", (65,) * 8)
    house.turn(2)
    told = house.of(Queued, "r2")
    assert (told[0].position, told[0].eta_s) == (2, None)
    assert told[-1].position == 0
    assert told[-1].eta_s == 0.0
    house.enter("r3", (65,) * 8)
    assert house.of(Queued, "r3")[0].eta_s > 0


def test_orders_for_the_fake_encoder_are_checked():
    """What a path asks for is known, estimated exactly, or refused."""
    spec = ModelSpec(id="e", path="fake:encoder=1,weights_mib=2", n_batch=64)
    assert dict(estimator(spec.path)(spec).lines) == load(spec).memory()
    told = []
    load(spec, told.append)
    assert told == [1.0]
    for path in ("fake:", "fake:encoder=1,pooling=max", "fake:encoder=1,wrong=1"):
        with pytest.raises(ModelFileError):
            load(ModelSpec(id="e", path=path))
    with pytest.raises(ModelLoadError):
        load(ModelSpec(id="e", path="fake:encoder=1,load_fails=1"))


class TwoModels:
    """A loop with an encoder "e" and a decoder "d", and everything it published."""

    def __init__(self):
        self.events = []
        self.inbox = Inbox()
        self.loop = EngineLoop(self.inbox, self.events.extend, config_of(EngineSettings(isolation="thread")))
        slow = "step_delay_s=0.002"  # as native steps, it lets other threads run
        for model, path in (("e", f"fake:encoder=1,{slow}"), ("d", f"fake:eog_period=0,{slow}")):
            self.inbox.put(LoadModel(ModelSpec(id=model, path=path, n_ctx=512, n_batch=16)))
        self.until(lambda: [e.state for e in self.of(ModelState)].count("ready") == 2)

    def of(self, *kinds):
        """Events of these kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    def until(self, is_done):
        """Turn until `is_done`; a turn without work waits for a worker's post."""
        for _ in range(2000):
            if is_done():
                return
            self.loop.turn(0 if self.loop._runners.has_work else 5)
        pytest.fail(f"not reached: {self.events[-5:]}")

    def submit(self, name, **fields):
        """A greedy request."""
        request = GenerateRequest(sampling=Sampling(temperature=0), **fields)
        self.inbox.put(Submit(request_id=name, request=request))

    def close(self):
        """Free both."""
        self.inbox.put(Shutdown())
        self.loop.run()


def test_the_loop_tells_what_each_turn_took(monkeypatch):
    """SPEC Q13: turns by time need the time of every turn of every model."""
    engine, heard = TwoModels(), []
    monkeypatch.setattr(
        engine.loop._runners, "served", lambda runner, took_s: heard.append((runner.spec.id, took_s))
    )
    engine.submit("text", model="e", prompt="abc", max_tokens=0, state_output=StateOutput.EMBED)
    engine.submit("answer", model="d", prompt="abc", max_tokens=3)
    engine.until(lambda: len(engine.of(Finished)) == 2)
    assert {name for name, _ in heard} == {"e", "d"}
    assert all(took_s > 0.001 for _, took_s in heard)  # each order of the fakes takes two
    engine.close()


@pytest.fixture
def two_models():
    """A loop with two models, freed at the end."""
    models = TwoModels()
    yield models
    models.close()


def test_an_encoder_and_a_decoder_take_turns(two_models):
    """SPEC Q13: of equals neither waits for the other's end."""
    two_models.submit("text", prompt=(65,) * 8, model="d", max_tokens=300)
    for at in range(50):
        two_models.submit(f"vector {at}", prompt=(65 + at,) * 16, **_WANTS)
    two_models.until(lambda: len(two_models.of(Finished)) == 51)
    order = [event.request_id for event in two_models.of(StateReady, Delta)]
    tokens = [at for at, name in enumerate(order) if name == "text"]
    vectors = [at for at, name in enumerate(order) if name != "text"]
    assert tokens[0] < vectors[-1]
    assert vectors[0] < tokens[-1]


def test_the_loop_lets_an_encoder_generate_nothing(two_models):
    """SPEC K2: refused with 400 whatever the front let through, and told to that request alone."""
    two_models.submit("text", prompt="x", model="e", max_tokens=5)
    two_models.submit("vector", prompt="x", **_WANTS)
    two_models.until(lambda: len(two_models.of(Finished, Failed)) == 2)
    (refused,) = two_models.of(Failed)
    assert (refused.request_id, refused.error.code, refused.error.http_status) == ("text", "unsupported", 400)


@pytest.mark.parametrize(("slow_steps", "expected"), [((), 4), (((40, 0.4), (10, 0.1)), 1)])
def test_no_call_of_several_texts_takes_longer_than_the_longest_step_now(slow_steps, expected):
    """SPEC Q23: whatever the policy, and fewer on a machine that has become slower."""
    house = House(max_step_ms=100.0)
    house.measured(0.0025)  # 40 tokens a step
    for num_tokens, took_s in slow_steps:
        house.runner._cost.stepped(num_tokens, took_s)
    for at in range(12):
        house.enter(f"r{at}", tuple(range(65, 75)))
    house.turn()
    assert house.encoder.calls == [expected]
