"""Steps of a prompt that is alone, and what ends them, on a clock that only steps move."""

import socket
import threading
from contextlib import contextmanager
from functools import cache

import pytest
from test_loop import Engine

from stoker.backends.device import HeldDevices
from stoker.backends.fake.backend import FakeBackend
from stoker.backends.fake.faults import FakeFaults
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.registry import OpenModels
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Closed, Inbox, LoadFailed, LoadStop, Sized
from stoker.engine.process import ClientLink, EngineInThread
from stoker.engine.residency.load import LoadThreads
from stoker.engine.runners.long_steps import ALONE_S, BOUNDED_TIMES, YOUNG_SHARE
from stoker.errors import StepAbortedError
from stoker.ipc.codec import encode_command
from stoker.ipc.commands import (
    Cancel,
    GetStatus,
    KnowModel,
    LoadModel,
    Pause,
    Resume,
    Shutdown,
    Suspend,
    Tokenize,
    UnloadModel,
)
from stoker.ipc.events import Failed, Finished, Queued, Reply
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import Priority
from stoker.scheduler.cost import StepCost
from stoker.scheduler.plan import ALONE_TIMES, STRETCHED_TOKENS, TILE_TOKENS, StepBudget
from stoker.scheduler.queue import Throttle
from stoker.settings import EngineSettings

TOKEN_S = 1 / 300
MAX_S = 0.4
PROMPT = tuple(ord("a") + at % 23 for at in range(3000))
QUESTION = tuple(b"who is there")
PATH = "fake:eog_period=0,aborts=1"


class Timed(Engine):
    """An engine whose clock steps move, by `TOKEN_S` for each token.

    Attributes:
        sizes: tokens of each step that was computed.
        ended: tokens of those that were ended.
        arrives: called in the middle of the next step of over `STRETCHED_TOKENS`, once.
    """

    def __init__(self, path=PATH, **fields):
        super().__init__(path, n_ctx=4096, **fields)
        self.sizes, self.ended, self.arrives = [], [], None
        clock, backend = self.loop._clock, next(iter(self.loop._runners)).backend
        self.now, launch = clock.now(), backend.launch
        clock.now = lambda: self.now

        def timed(plan):
            if self.arrives is not None and plan.num_tokens > STRETCHED_TOKENS:
                self.now += TOKEN_S * plan.num_tokens / 2
                arrives, self.arrives = self.arrives, None
                arrives()
            try:
                found = launch(plan)
            except StepAbortedError:
                self.ended.append(plan.num_tokens)
                raise
            self.now += TOKEN_S * plan.num_tokens
            self.sizes.append(plan.num_tokens)
            return found

        backend.launch = timed

    @property
    def counters(self):
        """What the runner counts."""
        return next(iter(self.loop._runners)).stats()

    def warm(self):
        """Compute prompts of several sizes: nothing is known of its times."""
        for size in (6, 20, 50, 300, 1000):
            self.submit(f"warm{size}", prompt=tuple(b"A") * size, max_tokens=1)
            self.run(f"warm{size}")
        self.sizes.clear()


@contextmanager
def timed(*args, **fields):
    """An engine that has computed a prompt, freed at the end."""
    engine = Timed(*args, **fields)
    try:
        engine.warm()
        yield engine
    finally:
        engine.put(Shutdown())
        engine.loop.run()


@cache
def greedy(prompt, num_tokens):
    """What the fake model says after a prompt that it reads at once."""
    backend, tokens = FakeBackend(n_batch=len(prompt), faults=FakeFaults(eog_period=0)), list(prompt)
    for _ in range(num_tokens):
        start = backend.length(0)
        tokens.append(
            int(backend.launch(BatchPlan((PlanItem(0, start, tokens[start:], 1),))).rows()[0].argmax())
        )
    return tokens[len(prompt) :]


def long_ones(engine):
    """Steps longer than any may be beside others."""
    return [size for size in engine.sizes if size > STRETCHED_TOKENS]


@pytest.mark.parametrize("priority", Priority)
def test_a_prompt_that_is_alone_comes_in_steps_of_the_whole_batch(priority):
    """SPEC Q27: its text is as ever, and its time is learned as that of any step."""
    with timed() as engine:
        num_before = engine.counters["num_long_steps_total"]
        engine.submit("long", prompt=PROMPT, max_tokens=4, priority=priority)
        engine.run("long")
        assert engine.sizes == [512] * 5 + [440] + [1] * 3
        assert engine.tokens("long") == greedy(PROMPT, 4)
        assert engine.counters["num_long_steps_total"] - num_before == 6
        assert engine.counters["num_ended_steps_total"] == 0
    with timed("fake:eog_period=0") as engine:
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.run("long")
        assert not long_ones(engine), "nothing could end them"
        assert "num_long_steps_total" not in engine.counters


def test_what_arrives_ends_the_step_and_is_served_beside_bounded_ones():
    """SPEC Q27: nothing is lost but that step's time; both texts are as alone."""
    with timed() as engine:
        engine.arrives = lambda: engine.submit("q", prompt=QUESTION, max_tokens=4)
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.until(lambda: engine.of(Queued, "q"))
        queued_s = engine.now
        engine.until(lambda: engine.tokens("q"))
        assert engine.now - queued_s < 3 * MAX_S
        assert not long_ones(engine)
        engine.run("q", "long")
        assert engine.tokens("q") == greedy(QUESTION, 4)
        assert engine.tokens("long") == greedy(PROMPT, 4)
        assert engine.ended[0] == 512
        assert max(engine.ended[1:], default=0) <= STRETCHED_TOKENS, "young ones, by what was prepared"
        assert engine.counters["num_ended_steps_total"] == len(engine.ended)
        assert engine.counters["ended_steps_s_total"] == pytest.approx(256 * TOKEN_S)
        assert engine.of(Finished, "long")[0].usage.prompt_tokens == len(PROMPT)
        assert sum(engine.sizes) == len(PROMPT) + len(QUESTION) + 2 * 3


def test_an_ended_step_teaches_no_costs_and_blames_nobody():
    """SPEC Q27: what steps cost, how slow the machine is, and requests stay as they were."""
    with timed() as engine:
        cost = next(iter(engine.loop._runners)).scheduler.cost
        told = []
        engine.arrives = lambda: (told.append((repr(cost), cost.slowdown.times)), engine.put(GONE))
        engine.submit("long", prompt=PROMPT)
        engine.until(lambda: engine.ended)
        assert told == [(repr(cost), cost.slowdown.times)]
        assert engine.loop.heartbeat().step_s == 0.0
        engine.run("long")
        assert not engine.of(Failed)


GONE = Cancel("unknown")


@pytest.mark.parametrize(
    "item",
    [
        GONE,
        Pause("unknown"),
        Resume("unknown"),
        UnloadModel("other"),
        LoadModel(ModelSpec(id="other", path="fake:")),
        KnowModel(ModelSpec(id="other", path="fake:")),
        Tokenize(call_id=7, model="m", text="a"),
        Shutdown(),
        Suspend(save_s=5.0),
    ],
    ids=lambda item: type(item).__name__,
)
def test_whatever_somebody_waits_for_ends_it(item):
    """SPEC Q27."""
    with timed() as engine:
        engine.arrives = lambda: engine.put(item)
        engine.submit("long", prompt=PROMPT)
        engine.until(lambda: engine.ended)
        assert engine.ended == [512]


def test_a_status_and_what_the_engine_tells_itself_do_not_end_it():
    """SPEC Q27: a status comes after the step; the client has shown what it knows by then."""
    with timed() as engine:
        engine.arrives = lambda: engine.put(GetStatus(9))
        engine.submit("long", prompt=PROMPT)
        engine.run("long")
        assert not engine.ended
        assert [reply.call_id for reply in engine.of(Reply)] == [9]


def test_a_cancel_ends_the_step_and_the_request():
    """SPEC Q27: no token of it is computed afterwards."""
    with timed() as engine:
        engine.arrives = lambda: engine.put(Cancel("long"))
        engine.submit("long", prompt=PROMPT)
        engine.run("long")
        assert engine.ended == [512]
        assert not engine.sizes
        assert not engine.tokens("long")
        assert not engine.of(Failed)


def test_a_paused_prompt_goes_on_from_where_its_step_was_ended():
    """SPEC Q17, Q27."""
    with timed() as engine:
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.until(lambda: len(engine.sizes) == 2)
        engine.arrives = lambda: engine.put(Pause("long"))
        engine.until(lambda: engine.ended)
        engine.loop.turn(0)
        assert len(engine.sizes) == 2
        engine.put(Resume("long"))
        engine.run("long")
        assert engine.tokens("long") == greedy(PROMPT, 4)
        assert sum(engine.sizes) == len(PROMPT) + 3


def come_at_once(engine, **prompts):
    """Requests of so many prompts, all prepared before a step of theirs begins."""
    for name, prompt in prompts.items():
        fields = {"priority": Priority.BACKGROUND} if name.startswith("job") else {}
        engine.submit(name, prompt=prompt, max_tokens=4, **fields)
    engine.loop.turn(0)
    engine.loop._preparations.settle()


def letters(letter, size):
    """A prompt that begins like no other letter's."""
    return (ord(letter), *PROMPT[: size - 1])


def test_prompts_that_came_together_share_long_steps_until_the_shortest_is_read():
    """SPEC Q27: as much of each, in whole tiles; then its rows decode, and steps beside them are bounded."""
    prompts = {name: letters(name, size) for name, size in (("a", 300), ("b", 300), ("c", 320), ("d", 320))}
    with timed(num_slots=4) as engine:
        come_at_once(engine, **prompts)
        engine.until(lambda: engine.tokens("a"))
        assert engine.sizes == [4 * 128, 4 * 128, 4 * 44]
        engine.run(*prompts)
        assert not long_ones(engine)[3:]
        assert [engine.tokens(name) for name in prompts] == [greedy(each, 4) for each in prompts.values()]


def test_a_short_prompt_waits_for_no_long_step_of_others():
    """SPEC Q27: one of 20 tokens beside one of 3,000 has its first token as soon as in bounded steps."""
    with timed(num_slots=2) as engine:
        come_at_once(engine, long=PROMPT, q=letters("q", 20))
        engine.until(lambda: engine.tokens("q"))
        assert not long_ones(engine)
        assert sum(engine.sizes) <= STRETCHED_TOKENS


def test_a_prompt_that_the_step_brings_to_its_end_is_kept_in_it():
    """SPEC Q8, Q27: with a target of half a second 20 tokens end before the equal parts of others would."""
    with timed(num_slots=16, target_step_ms=500.0) as engine:
        others = {letter: letters(letter, 200) for letter in "abcdefghijklmno"}
        came_s = engine.now
        come_at_once(engine, q=letters("q", 20), **others)
        engine.until(lambda: engine.tokens("q"))
        assert not long_ones(engine)
        assert engine.now - came_s < 2 * MAX_S


def test_a_person_waits_for_no_long_step_of_a_job():
    """SPEC Q27: nor has its own while a job is there."""
    with timed(num_slots=2) as engine:
        num_before = engine.counters["num_long_steps_total"]
        come_at_once(engine, person=letters("p", 600), job=letters("j", 600))
        engine.until(lambda: engine.tokens("person"))
        assert engine.counters["num_long_steps_total"] == num_before


def test_what_arrives_ends_the_long_step_of_several_prompts():
    """SPEC Q27: and their texts are as alone."""
    prompts = {name: letters(name, 600) for name in "abc"}
    with timed(num_slots=4) as engine:
        engine.arrives = lambda: engine.submit("q", prompt=QUESTION, max_tokens=4)
        come_at_once(engine, **prompts)
        engine.until(lambda: engine.ended)
        assert engine.ended == [3 * 128]
        engine.until(lambda: engine.tokens("q"))
        assert not long_ones(engine)
        engine.run("q", *prompts)
        assert engine.tokens("q") == greedy(QUESTION, 4)
        assert [engine.tokens(name) for name in prompts] == [greedy(each, 4) for each in prompts.values()]


def test_a_long_step_that_was_ended_while_it_was_young_is_begun_anew_as_long():
    """SPEC Q27: what has joined the prompt is no reason for short steps, which both would be read in."""
    with timed(num_slots=4) as engine:

        def join():
            engine.now -= 512 * TOKEN_S * (1 - YOUNG_SHARE) / 2  # it comes within the first tenth
            engine.submit("b", prompt=letters("b", 600), max_tokens=4)

        engine.arrives = join
        engine.submit("a", prompt=letters("a", 600), max_tokens=4)
        engine.until(lambda: engine.ended)
        engine.loop.turn(0)
        engine.loop._preparations.settle()
        engine.until(lambda: engine.tokens("a"))
        assert engine.ended[0] == 512
        assert set(engine.ended[1:]) <= {STRETCHED_TOKENS}, "before the other was prepared"
        assert len(engine.sizes) == 3, f"two of them long: {engine.sizes}"


def test_no_step_is_long_while_another_request_is_there():
    """SPEC Q27: one that waits and one that is being prepared; a paused one is not there."""
    with timed(num_slots=1) as engine:
        engine.submit("long", prompt=PROMPT)  # first prepared: "q" alone would soon be done with
        engine.submit("q", prompt=QUESTION, max_tokens=4, priority=Priority.BACKGROUND)
        engine.run("long", "q")
        assert not long_ones(engine)
        engine.now += ALONE_S
        engine.sizes.clear()
        engine.submit("long2", prompt=PROMPT[::-1])
        engine.submit("q2", prompt=QUESTION, max_tokens=4, priority=Priority.BACKGROUND)
        engine.put(Pause("q2"))
        engine.run("long2")
        assert long_ones(engine)


def test_after_a_step_was_ended_a_tenth_of_the_time_is_lost_at_most():
    """SPEC Q27: whoever calls again and again does not keep a prompt from its end."""
    with timed() as engine:

        def again():
            engine.put(GONE)
            engine.arrives = again

        engine.arrives = again
        began_s = engine.now
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.run("long")
        took_s = engine.now - began_s
        assert len(engine.ended) > 1
        assert not long_ones(engine)
        lost_s = engine.counters["ended_steps_s_total"]
        assert lost_s == pytest.approx(sum(engine.ended) * TOKEN_S / 2)
        assert lost_s < 0.1 * took_s + 256 * TOKEN_S, "the last one may be recent"
        assert engine.tokens("long") == greedy(PROMPT, 4)


def test_once_it_is_alone_for_a_while_its_steps_are_long_again():
    """SPEC Q27."""
    with timed() as engine:
        engine.arrives = lambda: engine.put(GONE)
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.until(lambda: engine.ended)
        engine.until(lambda: engine.sizes)
        assert engine.sizes == [STRETCHED_TOKENS]
        engine.now += BOUNDED_TIMES * 256 * TOKEN_S
        engine.run("long")
        assert long_ones(engine) == [512] * 5 + [312]


def test_after_company_that_decoded_steps_are_bounded_for_a_while():
    """SPEC Q27: whoever read an answer a moment ago may ask again."""
    with timed(num_slots=2) as engine:
        come_at_once(engine, q=QUESTION, long=PROMPT)
        engine.run("q")
        left_s = engine.now
        engine.sizes.clear()
        engine.until(lambda: long_ones(engine))
        assert engine.now - engine.sizes[-1] * TOKEN_S - left_s > ALONE_S / 2
        engine.run("long")
        assert engine.tokens("long") == greedy(PROMPT, 4)


def test_a_long_step_has_a_bound_too():
    """SPEC Q27: memory, heat and threads are minded between steps, also on a machine that others use."""
    cost = StepCost()
    for num_tokens in (1, 8, 32, 128, 512):
        cost.learn(num_tokens, num_tokens * TOKEN_S)
    budget = StepBudget(cost, 512, max_s=MAX_S)
    assert budget.alone(3000) == 512
    assert budget.alone(3000, 3) == 2 * TILE_TOKENS
    assert budget.alone(3000, 30) == 512 // 30, "less than a tile"
    cost.slowdown.times = 9.0
    most = ALONE_TIMES * MAX_S / (9 * TOKEN_S)
    assert most - TILE_TOKENS < budget.alone(3000) <= most
    assert budget.alone(3000) % TILE_TOKENS == 0
    assert budget.alone(100) == 100


def test_the_watchdog_gives_a_long_step_its_time():
    """SPEC L3, Q27: ten times what so many tokens have taken, where that is more than the watchdog's own."""
    settings = EngineSettings(isolation="thread", watchdog_s=1.0)
    with timed(settings=settings) as engine:
        told = []
        engine.arrives = lambda: told.append(engine.loop.heartbeat())
        engine.submit("long", prompt=PROMPT)
        engine.run("long")
        assert told[0].step_s == pytest.approx(256 * TOKEN_S)
        assert told[0].step_limit_s == pytest.approx(10 * 512 * TOKEN_S)


def test_while_others_have_the_cores_steps_are_bounded():
    """SPEC Q27, M7: how many threads a step uses follows the machine between steps."""
    with timed() as engine:
        slowdown = next(iter(engine.loop._runners)).scheduler.cost.slowdown
        slowdown.stepped = lambda _took_s, _quiet_s: None
        slowdown.times = 2.0
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.run("long")
        assert not long_ones(engine)


def test_a_request_about_to_run_out_of_time_has_short_steps():
    """SPEC Q6, Q27: its end is not to wait for that of a long one."""
    with timed() as engine:
        engine.submit("long", prompt=PROMPT, timeout_s=8.0)
        engine.run("long")
        assert long_ones(engine)
        assert engine.of(Failed, "long")[0].error.code == "request_timeout"
        assert engine.sizes[-1] == STRETCHED_TOKENS


def test_an_engine_that_drains_has_no_long_steps():
    """SPEC Q27: the end of its time is not to find one."""
    with timed() as engine:
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.until(lambda: engine.sizes)
        engine.put(Shutdown(drain_s=3600.0))
        engine.run("long")
        assert long_ones(engine) == [512]
        assert engine.tokens("long") == greedy(PROMPT, 4)


def test_an_engine_that_is_held_back_has_no_long_steps():
    """SPEC M4, M6, Q27: memory and heat are looked at between steps."""
    with timed() as engine:
        engine.loop._runners.hold_back(Throttle(holds_background=True))
        engine.submit("long", prompt=PROMPT)
        engine.run("long")
        assert not long_ones(engine)


def test_a_model_that_cannot_go_back_has_no_long_steps():
    """SPEC Q27, K2: an ended step would take all that it has computed."""
    with timed(f"{PATH},recurrent=1") as engine:
        engine.submit("long", prompt=PROMPT, max_tokens=4)
        engine.run("long")
        assert not long_ones(engine)


def test_a_suspension_ends_it_and_its_tokens_are_kept():
    """SPEC L2, Q27."""
    with timed() as engine:
        engine.submit("long", prompt=PROMPT)
        engine.until(lambda: len(engine.sizes) == 2)
        engine.arrives = lambda: engine.put(Suspend(save_s=5.0))
        engine.loop.run()
        assert engine.ended == [512]
        assert engine.sizes == [512, 512]
        assert not engine.of((Finished, Failed), "long")
        engine.loop.run = lambda: None


class Step:
    """One that can be ended."""

    def __init__(self):
        self.is_ended = False

    def abort_step(self):
        """It is."""
        self.is_ended = True

    def allow_steps(self):
        """The next one is not."""
        self.is_ended = False


BURST = [bytes([letter]) * 100 for letter in b"pqrs"]


class Burst(Timed):
    """An engine with a slot each, and requests that come while a step of those before them is young."""

    def __init__(self, **spec):
        super().__init__(num_slots=len(BURST), **spec)
        self.hook = lambda _plan: None
        self.news = threading.Event()
        backend, put = next(iter(self.loop._runners)).backend, self.inbox.put
        launch = backend.launch

        def hooked(plan):
            self.hook(plan)
            return launch(plan)

        def noted(item):
            put(item)
            self.news.set()

        backend.launch, self.inbox.put = hooked, noted

    def come(self):
        """The first comes; each other one in the middle of the step that is begun then."""
        left = list(BURST)
        self.submit("r0", prompt=tuple(left.pop(0)), max_tokens=4)

        def hook(_plan):
            if left:
                self.submit(f"r{len(BURST) - len(left)}", prompt=tuple(left.pop(0)), max_tokens=4)
            elif self.num_prepared < len(BURST):
                self.wait_for_news()

        self.hook = hook

    def wait_for_news(self):
        """Until something has arrived that the loop has not looked at, and the step that it ends was told."""
        interrupt = self.inbox.interrupt
        while not interrupt.has_arrived:
            assert self.news.wait(10.0), "nothing has come"
            self.news.clear()
        with interrupt._lock:
            assert interrupt.has_arrived

    @property
    def num_prepared(self):
        """Requests that wait or run."""
        return len({event.request_id for event in self.of(Queued)})


def test_prompts_that_come_at_once_are_read_together():
    """SPEC Q27: the first has no step to itself, which the others would wait for, and its rows later on."""
    engine = Burst()
    engine.warm()
    engine.events.clear()
    engine.come()
    engine.until(lambda: engine.num_prepared == len(BURST))
    assert engine.ended
    first = {}
    while len(first) < len(BURST):
        engine.loop.turn(0)
        for at in range(len(BURST)):
            if engine.tokens(f"r{at}"):
                first.setdefault(at, len(engine.sizes))
    assert len(set(first.values())) == 1, "all in one step"
    engine.run(*(f"r{at}" for at in range(len(BURST))))
    assert [engine.tokens(f"r{at}") for at in range(len(BURST))] == [greedy(each, 4) for each in BURST]
    engine.put(Shutdown())
    engine.loop.run()


def test_a_step_that_is_no_longer_young_goes_on():
    """SPEC Q27: what it has computed is worth more than company."""
    engine = Burst()
    engine.warm()

    def late(plan):
        engine.hook = lambda _plan: None
        engine.now += 2 * YOUNG_SHARE * TOKEN_S * plan.num_tokens
        engine.put(GONE)

    engine.hook = late
    engine.submit("r", prompt=tuple(BURST[0]), max_tokens=1)
    engine.run("r")
    assert not engine.ended
    engine.put(Shutdown())
    engine.loop.run()


def test_arrivals_one_after_the_other_begin_a_step_anew_for_a_tenth_of_its_time():
    """SPEC Q27: then it goes on, whatever comes."""
    engine = Burst()
    engine.warm()

    def again(_plan):
        engine.now += 0.001
        engine.put(GONE)

    engine.hook = again
    engine.submit("r", prompt=tuple(BURST[0]), max_tokens=1)
    engine.run("r")
    assert len(engine.ended) > 1
    assert engine.counters["ended_steps_s_total"] <= YOUNG_SHARE * 100 * TOKEN_S + 0.002
    engine.put(Shutdown())
    engine.loop.run()


@pytest.mark.parametrize("share", [YOUNG_SHARE / 2, 0.5], ids=["young", "old"])
def test_what_ended_a_long_step_waits_for_no_bounded_one_while_it_is_prepared(share):
    """SPEC Q27: the step that is begun meanwhile is young, whenever the long one was begun."""
    engine = Burst()
    engine.warm()
    came_s = []

    def hook(plan):
        if not came_s and plan.num_tokens > STRETCHED_TOKENS:
            engine.now += share * TOKEN_S * plan.num_tokens
            came_s.append(engine.now)
            engine.submit("q", prompt=QUESTION, max_tokens=4)
        elif came_s and not engine.of(Queued, "q"):
            engine.now += 0.005
            engine.wait_for_news()

    engine.hook = hook
    engine.submit("long", prompt=PROMPT, max_tokens=4)
    engine.until(lambda: engine.tokens("q"))
    assert engine.ended == [512, STRETCHED_TOKENS]
    assert engine.now - came_s[0] < STRETCHED_TOKENS * TOKEN_S + 0.02
    engine.put(Shutdown())
    engine.loop.run()


def test_what_comes_just_before_a_long_step_waits_for_no_bounded_one():
    """SPEC Q27: it is taken first, and a step of both prompts is planned after it."""
    engine = Burst()
    engine.warm()
    scheduler = next(iter(engine.loop._runners)).scheduler
    plan, begun = scheduler.plan, []

    def come_between(*args):
        found = plan(*args)
        if len(scheduler.slots.running) == 2 and not engine.of(Queued, "q") and not begun:
            begun.append(len(engine.sizes))
            engine.submit("q", prompt=QUESTION, max_tokens=4)
        return found

    scheduler.plan = come_between
    come_at_once(engine, a=letters("a", 600), b=letters("b", 600))
    engine.until(lambda: begun)
    assert len(engine.sizes) == begun[0]
    engine.put(Shutdown())
    engine.loop.run()


@pytest.mark.parametrize("shares", [(0.095,), (0.098, 0.103)], ids=["young", "young and old"])
def test_whatever_comes_again_and_again_takes_a_tenth_of_the_time(shares):
    """SPEC Q27: long steps that are ended while they are young are counted too."""
    engine = Burst()
    engine.warm()
    num_come = [0]

    def hook(plan):
        if plan.num_tokens > STRETCHED_TOKENS:
            engine.now += shares[num_come[0] % len(shares)] * TOKEN_S * plan.num_tokens
            num_come[0] += 1
            engine.put(GONE)

    engine.hook = hook
    began_s = engine.now
    engine.submit("long", prompt=PROMPT, max_tokens=4)
    engine.run("long")
    assert num_come[0] > 2
    last_s = max(shares) * 512 * TOKEN_S
    assert engine.counters["ended_steps_s_total"] < 0.1 * (engine.now - began_s) + last_s
    assert engine.tokens("long") == greedy(PROMPT, 4)
    engine.put(Shutdown())
    engine.loop.run()


def test_no_arrival_is_missed_whenever_it_comes():
    """SPEC Q27: before the step it keeps it from beginning, in it it ends it, after it it ends no other."""
    front, step = EngineInThread(print, config_of(EngineSettings())), Step()
    inbox = front._inbox
    front.put(GONE)
    assert not inbox.interrupt.watch(step)
    assert inbox.take(0) == [GONE]
    assert inbox.interrupt.watch(step)
    front.put(GetStatus(1))
    assert not step.is_ended
    other = threading.Thread(target=front.put, args=(GONE,))
    other.start()
    other.join()
    assert step.is_ended
    inbox.interrupt.unwatch()
    assert not step.is_ended
    front.put(GONE)
    assert not step.is_ended
    assert len(inbox.take(None)) == 3
    assert inbox.interrupt.watch(step)
    inbox.interrupt.unwatch()
    inbox.interrupt.close()
    assert not inbox.interrupt.watch(step)


def test_commands_on_the_socket_and_its_end_are_arrivals():
    """SPEC Q27: a status is none."""
    inbox = Inbox()
    client, engine = socket.socketpair()
    with client, engine:
        link = ClientLink(engine, inbox)
        link.start()
        link.finish()  # else the end of the socket ends this process
        client.sendall(encode_command(GetStatus(1)))
        assert inbox.take(10) == [GetStatus(1)]
        assert not inbox.interrupt.has_arrived
        client.sendall(encode_command(GONE))
        assert inbox.get(timeout=10) == GONE
        assert inbox.interrupt.has_arrived
        inbox.interrupt.looked()
        client.close()
        assert inbox.get(timeout=10) is Closed.CLOSED
        assert inbox.interrupt.has_arrived


def test_what_comes_of_a_load_is_an_arrival(tmp_path):
    """SPEC Q27: a model's estimate, and why there is none."""
    for path, kind in ((PATH, Sized), (str(tmp_path / "none.gguf"), LoadFailed)):
        inbox = Inbox()
        threads = LoadThreads(inbox, tmp_path, HeldDevices(tmp_path), OpenModels())
        threads.size(LoadStop(), ModelSpec(id="m", path=path))
        assert isinstance(inbox.get(timeout=30), kind)
        threads.close()
        assert inbox.interrupt.has_arrived


def test_an_ended_step_of_the_fake_has_changed_nothing():
    """SPEC Q27: ended while it computes, from another thread."""
    backend = FakeBackend(faults=FakeFaults(aborts=True, step_delay_s=600.0))
    plan = BatchPlan((PlanItem(0, 0, PROMPT[:100], 1),))
    other = threading.Thread(target=backend.extensions.aborts.abort_step)
    other.start()
    with pytest.raises(StepAbortedError):
        backend.launch(plan)
    other.join()
    assert (backend.length(0), backend.num_cells_used, backend.num_steps) == (0, 0, 0)
