"""Turns by time among models: a machine that exists on paper, where every turn takes what it is said to."""

from __future__ import annotations

import pytest

from stoker.backends.fake.backend import load as load_decoder
from stoker.backends.fake.encoder import load as load_encoder
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.oneshot import OneShotRunner
from stoker.engine.runners.runner import Contender
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.turns import SHARE_OF_STEP, ModelTurns, Runners
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.commands import Submit
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest, Priority, Sampling, StateOutput
from stoker.machine.ledger import Ledger
from stoker.scheduler.cost import StepCost

CHAT = Contender("chat", has_readers=True)
PROMPTS = Contender("prompts")
TEXTS = Contender("texts", is_encoder=True)


class Paper:
    """Models whose turns take the seconds that are given."""

    def __init__(self):
        self.turns = ModelTurns()
        self.order = []
        self.took_s = {}

    def run(self, num_turns, steps_s, contenders):
        """Turns in which all of them have work."""
        for _ in range(num_turns):
            name = self.turns.choose(contenders)
            took_s = steps_s[name]
            self.turns.served(name, took_s)
            self.order.append(name)
            self.took_s[name] = self.took_s.get(name, 0.0) + took_s

    def share(self, name):
        """Of all time so far."""
        return self.took_s.get(name, 0.0) / sum(self.took_s.values())


def test_equals_get_equal_time_however_long_their_steps_are():
    """SPEC Q13: 300 ms and 20 ms a step: half of the time each, so fifteen short steps to a long one."""
    paper = Paper()
    paper.run(320, {"chat": 0.02, "prompts": 0.3}, [CHAT, PROMPTS])
    assert paper.share("chat") == pytest.approx(0.5, abs=0.02)
    assert 18 <= paper.order.count("prompts") <= 22
    gaps = "".join(name[0] for name in paper.order).split("p")
    assert max(map(len, gaps)) <= 16


def test_three_equals_take_turns_where_their_steps_are_alike():
    """SPEC Q13: the one that waited longest is next among those that had as much."""
    paper = Paper()
    contenders = [Contender(name) for name in "abc"]
    paper.run(9, dict.fromkeys("abc", 0.0625), contenders)
    assert "".join(paper.order) == "abcabcabc"


def test_who_comes_from_idle_has_saved_nothing_up():
    """SPEC Q13: after an hour alone the other one shares from now on, it does not make up for the hour."""
    paper = Paper()
    paper.run(3600, {"chat": 1.0}, [CHAT])
    paper.order.clear()
    paper.run(40, {"chat": 1.0, "prompts": 1.0}, [CHAT, PROMPTS])
    assert paper.order[:2].count("prompts") == 1
    assert paper.order.count("prompts") == 20


def test_going_idle_between_calls_gains_nothing():
    """SPEC Q13: who is ahead and comes back a turn later is still ahead."""
    paper = Paper()
    for _ in range(100):
        paper.run(1, {"chat": 0.02, "prompts": 0.3}, [CHAT])
        paper.run(1, {"chat": 0.02, "prompts": 0.3}, [PROMPTS, CHAT])
    assert paper.share("prompts") <= 0.55


def test_an_encoder_beside_readers_is_hardly_seen():
    """SPEC Q13: no two calls between two steps, and less than a fifth of the time, whatever a call takes."""
    for call_s in (0.002, 0.012, 0.05, 0.4):
        paper = Paper()
        paper.run(2000, {"chat": 0.08, "texts": call_s}, [CHAT, TEXTS])
        assert "texts texts" not in " ".join(paper.order)
        assert 0 < paper.share("texts") <= 0.2, call_s
    assert paper.order[-40:].count("texts") <= 2  # a long call is dear: many steps come before the next


def test_an_encoder_without_readers_is_an_equal():
    """SPEC Q13: beside a model that only reads prompts it gets half, alone it gets all."""
    paper = Paper()
    paper.run(400, {"prompts": 0.08, "texts": 0.02}, [PROMPTS, TEXTS])
    assert paper.share("texts") == pytest.approx(0.5, abs=0.02)
    paper.order.clear()
    paper.run(5, {"texts": 0.02}, [TEXTS])
    assert paper.order == ["texts"] * 5
    assert paper.turns.allowance_s([TEXTS, PROMPTS]) is None


def test_a_call_beside_readers_may_take_a_part_of_their_step():
    """SPEC Q13: measured from the steps with readers; before any was seen, one text goes."""
    paper = Paper()
    assert paper.turns.allowance_s([CHAT, TEXTS]) == 0.0
    paper.run(50, {"chat": 0.08}, [CHAT])
    assert paper.turns.allowance_s([CHAT, TEXTS]) == pytest.approx(0.08 * SHARE_OF_STEP)
    paper.run(50, {"chat": 0.02}, [CHAT])
    assert paper.turns.allowance_s([CHAT]) == pytest.approx(0.02 * SHARE_OF_STEP, rel=0.01)
    paper.run(50, {"chat": 2.0}, [Contender("chat")])  # a prompt, which nobody reads along with
    assert paper.turns.allowance_s([CHAT]) == pytest.approx(0.02 * SHARE_OF_STEP, rel=0.01)


def test_after_a_model_is_gone_a_new_one_makes_up_for_no_time_of_its_elders():
    """SPEC Q13: also where the one that had the last turn is the one that went."""
    paper = Paper()
    paper.run(3600, {"chat": 1.0, "prompts": 1.0}, [CHAT, PROMPTS])
    paper.run(1, {"chat": 1.0, "prompts": 1.0}, [PROMPTS])
    paper.turns.forget("prompts")
    paper.order.clear()
    paper.run(10, {"chat": 1.0, "new": 1.0}, [Contender("new"), CHAT])
    assert paper.order.count("new") == 5


def test_a_model_that_is_gone_leaves_nothing_behind():
    """SPEC R3: one that is loaded again under its name begins like any other."""
    paper = Paper()
    paper.run(100, {"chat": 1.0, "prompts": 1.0}, [CHAT, PROMPTS])
    paper.turns.served("prompts", 1000.0)
    paper.turns.forget("prompts")
    paper.order.clear()
    paper.run(10, {"chat": 1.0, "prompts": 1.0}, [CHAT, PROMPTS])
    assert paper.order.count("prompts") == 5


class House:
    """A decoder and an encoder in memory, on a clock that only they move.

    A step of the decoder takes `step_s`, a token of the encoder a tenth of a hundredth of it.
    """

    def __init__(self, step_s=0.08, token_s=0.0008):
        cache = PrefixCache(CacheLimits(), Ledger())
        timer, jobs = StepTimer(Stopwatch(10.0)), JobTable()
        self.runners = Runners(timer, cache)
        self.now, self.step_s, self.token_s = 0.0, step_s, token_s
        self.order = []
        self.calls = []
        self.num_texts = 0
        decodes = ModelSpec(id="chat", path="fake:", num_slots=4)
        encodes = ModelSpec(id="texts", path="fake:encoder=1", background_patience_s=5.0)
        chat = SlotRunner(decodes, load_decoder(decodes), timer, cache, jobs)
        texts = OneShotRunner(encodes, load_encoder(encodes), timer, jobs)
        for runner, cost in ((chat, chat.scheduler.cost), (texts, texts._cost)):
            self.runners.add(runner)
            cost.learn = lambda *_: None  # the fake takes no time
        for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 512):
            StepCost.learn(texts._cost, num_tokens, num_tokens * token_s)

    def enter(self, model, name, **fields):
        """A request arrives."""
        runner = self.runners.find(model)
        wanted = {"model": model, "prompt": "a text.", "sampling": Sampling(temperature=0)} | fields
        submit = Submit(request_id=name, request=GenerateRequest(**wanted))
        runner.accept(prepare(submit, runner.prep, self.now), self.now)

    def embed(self, num, **fields):
        """Texts of seven tokens to embed arrive, each another one: equal ones are computed once."""
        for at in range(num):
            self.num_texts += 1
            text = f"text {self.num_texts:02}"
            wanted = {"prompt": text, "max_tokens": 0, "state_output": StateOutput.EMBED}
            self.enter("texts", f"text {self.now} {at}", **wanted | fields)

    def turn(self, num=1):
        """Turns, each of which takes its time."""
        for _ in range(num):
            runner = self.runners.next_with_work(self.now)
            assert runner is not None
            runner.schedule(self.now)
            runner.step(self.now)
            took_s = self.step_s
            if runner.spec.id == "texts":
                self.calls.append(runner.backend.calls[-1])
                took_s = 9 * self.calls[-1] * self.token_s
            self.now += took_s
            self.runners.served(runner, took_s)
            self.order.append(runner.spec.id)


def test_readers_see_short_calls_and_one_at_a_time():
    """SPEC Q13: while an answer is written a flood of texts goes in calls of a part of a step each."""
    house = House()
    house.enter("chat", "answer", max_tokens=60, ignore_eos=True)
    house.turn(10)
    house.embed(60)
    house.turn(60)
    text = " ".join(house.order[10:])
    assert "texts texts" not in text
    assert "chat chat chat" not in text
    assert max(house.calls) * 9 * house.token_s <= SHARE_OF_STEP * house.step_s * 1.2
    readers_s = house.order[10:].count("chat") * house.step_s
    assert sum(house.calls) * 9 * house.token_s <= readers_s / 4
    house.runners.close(lambda _: False)


def test_with_nobody_reading_texts_go_in_large_calls():
    """SPEC Q13: alone an encoder has its own target and every turn."""
    house = House()
    house.embed(12)
    house.turn()
    assert house.calls[0] >= 6
    while house.runners.has_work:
        house.turn()
    assert set(house.order) == {"texts"}
    house.runners.close(lambda _: False)


def test_texts_of_jobs_wait_for_people_but_not_for_ever():
    """SPEC Q7, Q13: past their patience one turn in ten is theirs, in a call as short as anybody's."""
    house = House()
    house.enter("chat", "answer", max_tokens=200, ignore_eos=True)
    house.turn(10)
    house.embed(40, priority=Priority.BACKGROUND)
    house.turn(50)
    assert "texts" not in house.order[10:]
    house.now += 5.0
    house.turn(40)
    assert house.order[60:].count("texts") == 4
    assert max(house.calls) <= 2
    house.runners.close(lambda _: False)


def test_a_text_that_comes_among_readers_waits_for_one_step():
    """SPEC Q13: short turns do not mean long waits where few texts come."""
    house = House()
    house.enter("chat", "answer", max_tokens=100, ignore_eos=True)
    house.turn(10)
    for _ in range(10):
        house.embed(1)
        house.turn(2)
        assert "texts" in house.order[-2:]
        house.turn(2)
    house.runners.close(lambda _: False)


def test_a_long_text_among_readers_is_followed_by_many_steps():
    """SPEC Q13: it goes whole, and what it took is made up for before the next."""
    house = House(token_s=0.08)
    house.enter("chat", "answer", max_tokens=100, ignore_eos=True)
    house.turn(10)
    house.embed(5)
    house.turn(40)
    assert house.order[10:].count("texts") == 1
    house.turn(30)
    assert house.order[10:].count("texts") == 2
    house.runners.close(lambda _: False)
