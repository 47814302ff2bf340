"""Choosing among texts: arithmetic, the front, the engine's line of choices, all on the fake backend."""

import dataclasses
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.fake.vocabulary import FakeVocabulary
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.cli.app import app
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import ContextLengthError, InvalidRequestError, RequestTimeoutError, UnsupportedError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Failed, Finished, StateReady
from stoker.ipc.model import ModelInfo, ModelSpec
from stoker.ipc.request import MAX_CANDIDATES, FinishReason, GenerateRequest, Priority, Sampling, StateOutput
from stoker.machine.ledger import Ledger
from stoker.runtime import Runtime
from stoker.sampling.logprobs import Likelihoods, negative_log_likelihood
from stoker.scheduler.cost import StepCost
from stoker.scheduler.queue import Throttle
from stoker.tasks.choose import ranked, require_choosing

PROMPT = "who waits for whom?"
CHOICES = ["everybody", "no one", "", "nobody", "no", "everybody"]
FAKE = "fake:eog_period=0"
WANTED = {"max_tokens": 0, "state_output": StateOutput.CHOOSE, "sampling": Sampling(temperature=0)}


def nats(prompt, text):
    """Mean negative log-likelihood in nats by the backend's own logits, computed in one step."""
    if not text:
        return math.inf
    backend = FakeBackend(n_batch=1024)
    tokens = [*prompt, *text]
    rows = backend.launch(BatchPlan((PlanItem(0, 0, tokens, len(tokens)),))).rows().astype(np.float64)
    normalised = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    at = np.arange(len(prompt) - 1, len(tokens) - 1)
    return float(-normalised[at, list(text)].mean())


def tokens_of(text, *, add_special=False):
    """The fake model's tokens of a text."""
    return FakeVocabulary().tokenize(text, add_special=add_special, parse_special=False)


def expected(*, is_calibrated=False):
    """The score of each of `CHOICES`."""
    prompt = tokens_of(PROMPT, add_special=True)
    begin = FakeVocabulary().tokenize(FakeVocabulary().bos_text, add_special=False, parse_special=True)
    scores = [nats(prompt, tokens_of(text)) for text in CHOICES]
    if is_calibrated:
        scores = [
            score - nats(begin, tokens_of(text)) if text else score
            for score, text in zip(scores, CHOICES, strict=True)
        ]
    return scores


# ---------------------------------------------------------------- arithmetic


def test_a_likelihood_is_that_of_the_softmax_in_nats():
    """SPEC D5: natural log, log-softmax of raw logits; a text in pieces is the text."""
    rows = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]], np.float32)
    whole = negative_log_likelihood(rows, [2, 0])
    assert whole == pytest.approx(math.log(4) + math.log(sum(math.exp(at) for at in range(4))))
    sums = Likelihoods([2, 0])
    for at in range(2):
        sums.add(0, rows[at : at + 1], [[2, 0][at]])
    assert sums.means() == [pytest.approx(whole / 2), math.inf]


def test_choices_are_ranked_by_score_then_index_and_empty_ones_come_last():
    """SPEC D5: lower is better; probabilities are a softmax of -score, 0 for an empty choice."""
    found = ranked(["a", "", "b", "c"], [2.0, math.inf, 1.0, 2.0])
    assert [(each.index, each.rank) for each in found] == [(2, 0), (0, 1), (3, 2), (1, 3)]
    assert sum(each.probability for each in found) == pytest.approx(1.0)
    assert found[0].probability / found[1].probability == pytest.approx(math.e)
    assert found[3].probability == 0.0


def test_nothing_but_empty_choices_has_no_probability():
    """SPEC D5: a ranking of nothing is by index."""
    found = ranked(["", ""], [math.inf, math.inf])
    assert [(each.index, each.probability) for each in found] == [(0, 0.0), (1, 0.0)]


# ---------------------------------------------------------------- the library


@pytest.mark.parametrize("calibrate", [False, True])
async def test_scores_are_those_of_a_direct_computation(calibrate):
    """SPEC D5, I5: each candidate tokenised alone and appended; calibrated: less its score after BOS."""
    async with Runtime(FAKE, isolation="thread") as runtime:
        found = await runtime.choose(PROMPT, CHOICES, calibrate=calibrate, priority="background")
    scores = {each.index: each.score for each in found.results}
    assert [scores[at] for at in range(len(CHOICES))] == pytest.approx(
        expected(is_calibrated=calibrate), abs=1e-5
    )
    assert [each.rank for each in found.results] == list(range(len(CHOICES)))
    assert found.results[-1].choice == ""
    num_tokens = len(tokens_of(PROMPT, add_special=True)) + sum(len(tokens_of(text)) for text in CHOICES)
    assert found.usage.prompt_tokens == num_tokens


async def test_a_recurrent_model_chooses_as_well():
    """SPEC D5: the class of the model makes no difference."""
    async with Runtime("fake:eog_period=0,recurrent=1", isolation="thread") as runtime:
        found = await runtime.choose(PROMPT, CHOICES)
    assert found.best.score == pytest.approx(min(expected()), abs=1e-5)


async def test_what_cannot_be_chosen_from_is_refused():
    """SPEC D5: none, one text for several, too many or too long ones are a caller's mistake, named."""
    async with Runtime(FAKE, isolation="thread") as runtime:
        for choices in ([], "yes or no", ["a"] * (MAX_CANDIDATES + 1)):
            with pytest.raises(InvalidRequestError) as refused:
                await runtime.choose(PROMPT, choices)
            assert refused.value.param == "choices"
        with pytest.raises(ContextLengthError) as refused:
            await runtime.choose(PROMPT, ["a", "b" * 20_000])
        assert refused.value.param == "choices"


@pytest.mark.parametrize("model_class", ["encoder", "encoder-decoder"])
def test_a_model_that_continues_no_prompt_is_refused_by_name(model_class):
    """SPEC D5, K2, K3: the refusal names the model and says why."""
    fields = dict.fromkeys(("num_params", "size_bytes", "n_vocab", "n_ctx", "n_ctx_train"), 0)
    fields |= dict.fromkeys(("n_batch", "num_slots", "num_threads"), 0) | {"memory_bytes": {}}
    fields |= dict.fromkeys(("path", "label", "description", "kv_type", "flash_attention"), "x")
    info = ModelInfo(id="some", model_class=model_class, architecture="arch", **fields)
    with pytest.raises(UnsupportedError, match=f"some is an {model_class}"):
        require_choosing(info)


def test_the_command_prints_what_the_server_answers():
    """SPEC I1: `stoker choose` prints the best first, or JSON."""
    arguments = ["choose", PROMPT, "--model", FAKE, *(f"--choice={text}" for text in CHOICES), "--calibrate"]

    def factory(settings):
        return Runtime(settings=settings, isolation="thread")

    plain = CliRunner().invoke(app, arguments, obj=factory)
    assert plain.exit_code == 0, plain.output
    best = CHOICES[int(np.argmin(expected(is_calibrated=True)))]
    assert plain.stdout.splitlines()[0].endswith(f"\t{best}")
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"], obj=factory).stdout)
    assert record["data"][0]["choice"] == best
    assert record["data"][-1]["score"] is None


# ---------------------------------------------------------------- the engine's line


class _Ticking(StepTimer):
    """A pace on whose clock every look takes a target of a step, so that each slice is one call."""

    def __init__(self):
        super().__init__(Stopwatch(10.0))
        self._ticked_s = 0.0

    def now(self):
        """Seconds."""
        self._ticked_s += 0.05
        return self._ticked_s


class House:
    """A resident of the fake backend, driven turn by turn."""

    def __init__(self, path=FAKE, **spec):
        self.spec = ModelSpec(id="m", path=path, **spec)
        self.backend = FakeBackend(n_batch=self.spec.n_batch or 64)
        cache = PrefixCache(CacheLimits(ram_bytes=0), Ledger())
        self.timer = _Ticking()
        self.jobs = JobTable()
        self.runner = SlotRunner(self.spec, self.backend, self.timer, cache, self.jobs)
        self.now = self.timer.now()

    def enter(self, name, **fields):
        """A request to choose arrives."""
        request = GenerateRequest(
            model="m", prompt="p" * 200, **WANTED | {"candidates": ("yes", "no")} | fields
        )
        self.readmit(Submit(request_id=name, request=request))

    def readmit(self, submit):
        """A submit is prepared and accepted."""
        self.runner.accept(prepare(submit, self.runner.prep, self.now), self.now)

    def turn(self):
        """One turn."""
        self.now = self.timer.now()
        self.runner.schedule(self.now)
        self.runner.step(self.now)

    def finish(self):
        """Turns until nothing is left to do."""
        for _ in range(3000):
            if not self.runner.has_work:
                return
            self.turn()
        raise AssertionError("it does not end")

    def of(self, kind):
        """Request ids of the events of a kind, in order."""
        return [event.request_id for event in self.jobs.events if isinstance(event, kind)]


@pytest.fixture
def make_house():
    """Residents that compute as little as they can a slice, closed at the end."""
    houses = []

    def make(**spec):
        houses.append(House(**spec))
        return houses[-1]

    yield make
    for house in houses:
        house.runner.close()


@pytest.fixture
def house(make_house):
    """One by the defaults."""
    return make_house()


def test_each_request_to_choose_ends_once(house):
    """SPEC L6: one state, one delta with its reason, one terminal event."""
    house.enter("a")
    house.enter("b", is_calibrated=True)
    house.finish()
    for kind in (StateReady, Delta, Finished):
        assert house.of(kind) == ["a", "b"]
    assert house.jobs.num_leases("m") == 0


def test_somebody_who_waits_goes_before_background_that_has_begun(house):
    """SPEC Q1, Q2: at the next slice, and what was found of the other is not lost."""
    house.enter("job", priority=Priority.BACKGROUND)
    house.turn()
    house.enter("person")
    house.finish()
    assert house.of(Finished) == ["person", "job"]


@pytest.mark.parametrize(("slower", "most"), [(1.0, 100), (1.5, 66)])
def test_a_slice_of_a_choice_is_no_longer_than_the_longest_step_now(make_house, slower, most):
    """SPEC Q23: also where a target is longer, and less on a machine that others use."""
    house, asked = make_house(target_step_ms=5000.0, max_step_ms=100.0, n_batch=512), []
    house.enter("a")
    choices = house.runner._choices
    for num_tokens in (8, 64, 512):
        choices._cost.learn(num_tokens, num_tokens * 0.001)
    choices._cost.learn = choices._cost.stepped = lambda *_: None  # the fake takes no time
    choices._cost.slowdown.times = slower
    choices._advance = lambda current, count, advance=choices._advance: (
        asked.append(count) or advance(current, count)
    )
    house.finish()
    assert house.of(StateReady) == ["a"]
    assert max(asked) == most


def test_background_waits_while_somebody_generates(house):
    """SPEC Q2: choices of background get no slice while anybody waits for a text."""
    text = GenerateRequest(prompt="hello", max_tokens=5, sampling=Sampling(temperature=0, seed=1))
    house.readmit(Submit(request_id="text", request=text))
    house.enter("job", priority=Priority.BACKGROUND)
    house.finish()
    assert house.of(Finished) == ["text", "job"]


def test_background_is_owed_slices_that_are_computed_and_no_others(make_house):
    """SPEC Q7: a turn at which there is no time for a slice does not count as the one that it waited for."""
    house = make_house(background_patience_s=1.0)
    house.enter("job", priority=Priority.BACKGROUND)
    choosing = house.runner._choices
    house.enter("person", candidates=("x" * 8000,))
    for _ in range(20_000):  # beside somebody who reads: one slice in many turns
        house.timer.now()
        choosing.step(0.02, has_readers=True)
        if house.of(Finished):
            break
    assert house.of(Finished) == ["job"]


def test_choices_take_turns_with_steps(house):
    """SPEC Q8: a text goes on while choices are computed, and they while it does."""
    text = GenerateRequest(
        prompt="hello", max_tokens=1000, ignore_eos=True, sampling=Sampling(seed=1), speculate=False
    )
    house.readmit(Submit(request_id="text", request=text))
    house.enter("choice")
    house.finish()
    assert house.of(Finished) == ["choice", "text"]
    before = house.jobs.events.index(next(e for e in house.jobs.events if isinstance(e, StateReady)))
    assert sum(isinstance(event, Delta) for event in house.jobs.events[:before]) > 1


def test_a_request_to_choose_can_be_cancelled_paused_and_sent_off(house):
    """SPEC Q17, L5: as any other; one that is sent off is computed elsewhere."""
    for name in ("a", "b", "c"):
        house.enter(name)
    house.turn()
    house.jobs.cancel("a", house.now)
    house.jobs.pause("b", house.now)
    house.finish()
    assert house.of(Finished) == ["a", "c"]
    reasons = [e.finish_reason for e in house.jobs.events if isinstance(e, Delta)]
    assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH]
    house.jobs.resume("b", house.now)
    house.jobs.evacuate("m", "it goes", house.now)
    assert not house.jobs.placed("m")
    (job,) = house.jobs.pending("m")
    house.readmit(job.submit)
    house.finish()
    assert house.of(StateReady) == ["c", "b"]


def test_a_request_past_its_deadline_ends_with_a_timeout(house):
    """SPEC Q10: also in the middle of its slices."""
    house.enter("late", timeout_s=5.0)
    house.turn()
    assert house.jobs.next_deadline_s() == pytest.approx(house.now + 5.0, abs=1.0)
    house.jobs.expire(house.now + 6.0)
    (failed,) = [event for event in house.jobs.events if isinstance(event, Failed)]
    assert failed.error.code == RequestTimeoutError.code
    assert not house.jobs.has_requests


def test_who_is_held_back_gets_no_slice(house):
    """SPEC M4, M6: a throttle holds choices as it holds texts."""
    house.enter("job", priority=Priority.BACKGROUND)
    house.runner.hold_back(Throttle(holds_background=True))
    assert not house.runner.has_work
    house.runner.hold_back(Throttle())
    house.finish()
    assert house.of(Finished) == ["job"]


def test_a_failing_call_fails_its_own_request_only(house):
    """SPEC Q12: the other one is served."""
    house.backend.faults = type(house.backend.faults)(bad_tokens=frozenset(b"z"), eog_period=0)
    house.enter("bad", candidates=("zzz", "yes"))
    house.enter("good")
    house.finish()
    assert (house.of(Failed), house.of(StateReady)) == (["bad"], ["good"])


def test_a_model_that_steps_and_chooses_learns_both_for_the_threads_in_use():
    """SPEC M7: with other threads both costs are other ones, though their backend is one."""

    class OnCpu(FakeBackend):
        """Like the fake, with threads that follow the machine."""

        @property
        def capabilities(self):
            """On a CPU."""
            return dataclasses.replace(super().capabilities, computes_on_cpu=True)

    timer, backend = StepTimer(Stopwatch(10.0)), OnCpu()
    backend.set_threads(2)
    costs = StepCost(), StepCost()
    runners = [timer.join(backend, cost) for cost in costs]
    try:
        timer._use(1)
        assert [backend.num_threads, *(cost.num_threads for cost in costs)] == [1, 1, 1]
    finally:
        for runner in runners:
            timer.leave(runner)
