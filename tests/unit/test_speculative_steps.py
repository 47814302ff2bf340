"""Steps that carry a draft: the same tokens, fewer steps, nobody's room."""

from dataclasses import dataclass, field

import pytest

from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.postprocess import Postprocess
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import InvalidRequestError, PoolFullError, StepFailedError
from stoker.ipc.commands import Submit
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Failed, Finished
from stoker.ipc.model import ModelSpec, Speculation
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, Sampling
from stoker.kv.sequence import ParkForm, Sequence, SequenceKey
from stoker.machine.ledger import Ledger
from stoker.speculation.speculator import (
    MOST_WATCHED,
    READ_GAP_S,
    REPEAT_ACCEPTANCE,
    WARY_STEPS,
    Acceptance,
    DraftLength,
    Subject,
)

ROUND = Constraint(kind=ConstraintKind.REGEX, source="(the same again, )+")
REQUESTS = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "seeded": {"sampling": Sampling(seed=5, temperature=1.5)},
    "mirostat": {"sampling": Sampling(seed=5, mirostat=2)},
    "penalties": {"sampling": Sampling(seed=5, repeat_penalty=1.2, dry_multiplier=0.8)},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ("again, the same again, the same again, th",)},
    "shift": {"context_shift": True, "max_tokens": 700},
    "context full": {"max_tokens": None},
    "one token": {"max_tokens": 1},
    "prompt logprobs": {"echo": True, "prompt_logprobs": 2},
}


class EagerWager(DraftLength):
    """Guesses seven tokens wherever that fits."""

    def num_worth(self, odds, most, guess_s=0.0, longest_s=0.0):
        """Seven."""
        return max(0, min(most, 7))


@dataclass
class Answer:
    """What a request got."""

    tokens: list = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    reason: str | None = None


class Bench:
    """One model on this thread, whose backend is counted."""

    def __init__(self, mode, **options):
        spec = ModelSpec(id="m", path="fake:", num_slots=options.pop("num_slots", 2), speculation=mode)
        known = {"num_cells": 512, "faults": FakeFaults(eog_period=0)}
        self.backend = options.pop("backend", None) or FakeBackend(**known | options)
        self.cache = PrefixCache(CacheLimits(), Ledger())
        self.jobs = JobTable()
        self.runner = SlotRunner(spec, self.backend, StepTimer(Stopwatch(60.0)), self.cache, self.jobs)
        self.now = 0.0
        self.answers = {}
        self.deltas = []

    def submit(self, request_id, submit=None, **fields):
        """Enter a request."""
        known = {"prompt": "And ", "model": "m", "max_tokens": 200, "constraint": ROUND}
        request = GenerateRequest(**{"sampling": Sampling(seed=1)} | known | fields)
        submit = submit or Submit(request_id=request_id, request=request)
        self.answers.setdefault(request_id, {})
        self.runner.accept(prepare(submit, self.runner.prep, self.now), self.now)

    def turn(self):
        """One turn, and what was found out by it."""
        self.now += 1.0
        self.runner.schedule(self.now)
        self.runner.step(self.now)
        self.note()

    def note(self):
        """Read what a turn has brought: what each request got, and its deltas."""
        self.deltas.append([event for event in self.jobs.events if isinstance(event, Delta)])
        for event in self.jobs.events:
            if isinstance(event, Delta):
                answer = self.answers[event.request_id].setdefault(event.index, Answer())
                answer.tokens += event.token_ids
                answer.text += event.text
                answer.logprobs += event.logprobs or []
                answer.reason = event.finish_reason or answer.reason
            assert not isinstance(event, Failed), event
        self.jobs.events.clear()

    def settle(self):
        """Carry out what the last step left to do, and check everything."""
        self.runner.rest(self.now)
        self.runner.scheduler.check()
        self.backend.check()
        assert self.backend.num_cells_used == self.runner.scheduler.cells.used
        for slot in self.runner.scheduler.slots.slots:
            assert list(self.backend.tokens(slot.id)) == slot.tokens

    def run(self, request_id="r", **fields):
        """A request to its end; its first choice."""
        self.submit(request_id, **fields)
        while self.runner.has_work:
            self.turn()
            self.settle()
        return self.answers[request_id][0]

    @property
    def counts(self):
        """Draft tokens, and those that were drawn."""
        stats = self.runner.stats()
        return stats["num_drafted_total"], stats["num_accepted_total"]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr("stoker.speculation.speculator.DraftLength", EagerWager)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_the_one_without_drafts(name):
    """SPEC D9: tokens, text, logprobs and the reason of its end, in fewer steps."""
    plain, quick = Bench(Speculation.OFF, n_ctx=256), Bench(Speculation.LOOKUP, n_ctx=256)
    assert quick.run(**REQUESTS[name]) == plain.run(**REQUESTS[name])
    assert plain.counts == (0, 0)
    if name != "one token":
        drafted, accepted = quick.counts
        assert drafted >= accepted > 10
        assert quick.backend.num_steps <= plain.backend.num_steps - accepted


def test_what_is_not_drawn_is_taken_back():
    """SPEC D9: text that repeats and then goes on otherwise leaves no cell behind."""
    turns = Constraint(kind=ConstraintKind.REGEX, source="(over and over [a-z]{6} )+")
    plain, quick = Bench(Speculation.OFF), Bench(Speculation.AUTO)
    assert quick.run(constraint=turns) == plain.run(constraint=turns)
    drafted, accepted = quick.counts
    assert drafted > accepted + 20
    assert quick.runner.scheduler.cells.used == plain.runner.scheduler.cells.used


def test_a_request_may_ask_for_none():
    """SPEC D9: `speculate` false; and a model loaded without."""
    quick = Bench(Speculation.LOOKUP)
    quick.run(speculate=False)
    assert quick.counts == (0, 0)
    for mode in (Speculation.OFF, Speculation.DRAFT):
        bench = Bench(mode)
        bench.run()
        assert bench.counts == (0, 0)


def test_a_model_that_cannot_go_back_gets_no_drafts():
    """SPEC D9, K5."""
    bench = Bench(Speculation.LOOKUP, faults=FakeFaults(eog_period=0, recurrent=True))
    bench.run()
    assert bench.counts == (0, 0)


def test_nobody_gets_drafts_while_others_run():
    """SPEC D9, Q8: others would wait longer for their next tokens."""
    bench = Bench(Speculation.LOOKUP)
    bench.submit("a")
    bench.submit("b", max_tokens=100, sampling=Sampling(seed=2))
    while not bench.answers["b"] or bench.answers["b"][0].reason is None:
        bench.turn()
        assert bench.counts == (0, 0)
        bench.settle()
    while bench.runner.has_work:
        bench.turn()
    assert bench.counts[1] > 50
    assert bench.answers["a"][0] == Bench(Speculation.OFF).run()


def test_several_choices_are_what_they_were():
    """SPEC D9, Q16: the last one that runs may be guessed."""
    fields = {"n": 3, "sampling": Sampling(seed=9, temperature=1.5), "constraint": None, "stop": ("e",)}
    outcomes = []
    for mode in (Speculation.OFF, Speculation.LOOKUP):
        bench = Bench(mode, num_slots=4)
        bench.run(**fields)
        outcomes.append(bench.answers["r"])
    assert outcomes[0] == outcomes[1]


def test_drafts_take_only_cells_that_are_free():
    """SPEC D9, Q12: a pool that is nearly full costs drafts, and nobody's text."""
    plain = Bench(Speculation.OFF, num_cells=96)
    quick = Bench(Speculation.LOOKUP, num_cells=96)
    assert quick.run(max_tokens=None) == plain.run(max_tokens=None)
    assert quick.runner.stats()["num_preemptions_total"] == 0
    assert quick.answers["r"][0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("form", list(ParkForm))
def test_parked_between_drafts_it_goes_on_as_if_nothing_had_been(form):
    """SPEC D9, Q4: what it keeps is what was drawn, not what was guessed."""
    bench = Bench(Speculation.LOOKUP)
    bench.submit("r")
    sequence = next(iter(bench.jobs)).choices[0].sequence
    num_turns = 0
    while bench.runner.has_work:
        bench.turn()
        num_turns += 1
        if num_turns % 3 == 0 and sequence.is_running:
            bench.runner._carry_out(bench.runner.scheduler.park(sequence, form, bench.now), bench.now)
            bench.settle()
    assert sequence.num_preemptions > 3
    assert bench.counts[1] > 50
    assert bench.answers["r"][0] == Bench(Speculation.OFF).run()


def test_after_a_crash_it_goes_on_with_the_tokens_that_were_delivered():
    """SPEC D9, L3: a draft was never delivered."""
    whole = Bench(Speculation.OFF).run()
    first = Bench(Speculation.LOOKUP)
    first.submit("r")
    while len(first.answers["r"].get(0, Answer()).tokens) < 90:
        first.turn()
    first.jobs.evacuate("m", "tested", first.now)
    (submit,) = [job.submit for job in first.jobs.pending("m")]
    assert submit.generated[0] == first.answers["r"][0].tokens
    second = Bench(Speculation.LOOKUP)
    second.answers["r"] = first.answers["r"]
    second.submit("r", submit)
    while second.runner.has_work:
        second.turn()
    assert second.answers["r"][0] == whole


def test_cancelled_right_after_a_draft_it_leaves_what_was_drawn():
    """SPEC D9, C6: the next request may go on from these cells."""
    bench = Bench(Speculation.LOOKUP)
    bench.submit("r")
    while bench.counts[0] == 0:
        bench.turn()
    bench.jobs.cancel("r", bench.now)
    bench.note()
    bench.settle()
    assert bench.answers["r"][0].reason is FinishReason.CANCELLED


@pytest.mark.parametrize("where", ["pool", "step"])
def test_a_step_that_fails_for_its_draft_is_made_without(where, monkeypatch):
    """SPEC D9, Q12: nobody is failed, and nothing is freed, for the sake of a guess."""
    bench, launch = Bench(Speculation.LOOKUP), FakeBackend.launch
    error = PoolFullError("no cells") if where == "pool" else StepFailedError("broken")

    def failing(backend, plan):
        if any(item.num_logits > 1 for item in plan.items):
            raise error
        return launch(backend, plan)

    monkeypatch.setattr(FakeBackend, "launch", failing)
    answer = bench.run()
    monkeypatch.undo()
    assert answer == Bench(Speculation.OFF).run()
    assert bench.counts == (0, 0)


def test_one_choice_that_fails_takes_the_draft_of_its_request_along():
    """SPEC D9, L6: an error on the way through a draft leaves the cells that were counted."""
    bench = Bench(Speculation.LOOKUP)
    bench.submit("r")
    while bench.counts[0] == 0:
        bench.turn()
    live = next(iter(bench.jobs))
    generation, calls = live.choices[0].generation, []

    def failing(row):
        calls.append(row)
        if len(calls) == 4:
            raise InvalidRequestError("no token is left")
        return type(generation).advance(generation, row)

    generation.advance = failing
    while bench.runner.has_work:
        bench.runner.schedule(bench.now)
        bench.runner.step(bench.now)
    failed = [event for event in bench.jobs.events if isinstance(event, Failed)]
    assert len(failed) == 1
    assert not [event for event in bench.jobs.events if isinstance(event, Finished)]
    bench.jobs.events.clear()
    bench.settle()


class Oracle:
    """A draft model that knows the answer, with a mistake now and then; at first it reads."""

    def __init__(self, prompt, answer):
        self.text = [*prompt, *answer, 0]
        self.num_calls = 0

    def guess(self, tokens, count, namespace=b""):
        """What comes, the third token of every second call wrong."""
        self.num_calls += 1
        if self.num_calls == 1:
            return []
        guesses = self.text[len(tokens) : len(tokens) + count]
        if self.num_calls % 2 and len(guesses) > 2:
            guesses[2] ^= 1
        return guesses


@pytest.mark.parametrize("mode", [Speculation.DRAFT, Speculation.AUTO])
def test_a_draft_model_is_asked_where_nothing_repeats(mode):
    """SPEC D9: free text, guessed by another model; the answer is the one without."""
    plain = Bench(Speculation.OFF)
    fields = {"constraint": None, "max_tokens": 120}
    answer = plain.run(**fields)
    backend = FakeBackend(num_cells=512, faults=FakeFaults(eog_period=0))
    prompt = plain.backend.vocabulary.tokenize("And ", add_special=True, parse_special=True)
    backend.drafter = Oracle(prompt, answer.tokens)
    bench = Bench(mode, backend=backend)
    assert bench.run(**fields) == answer
    drafted, accepted = bench.counts
    assert drafted > accepted > 60


def test_no_draft_model_is_asked_unless_that_was_wanted():
    """SPEC D9: a model loaded for lookups only."""
    backend = FakeBackend(num_cells=512, faults=FakeFaults(eog_period=0))
    backend.drafter = Oracle(b"And ", ())
    bench = Bench(Speculation.LOOKUP, backend=backend)
    bench.run(constraint=None)
    assert backend.drafter.num_calls == 0


def test_a_draft_leaves_what_ended_requests_left_in_their_cells():
    """SPEC D9, C6: with a pool full of what may be reused it is cut short, and nothing goes for its sake."""
    bench = Bench(Speculation.LOOKUP, num_cells=128, num_slots=2)
    first = bench.run("first", prompt="Once ", max_tokens=60)
    second = bench.run("second", max_tokens=100)
    assert first == Bench(Speculation.OFF).run(prompt="Once ", max_tokens=60)
    assert second == Bench(Speculation.OFF).run(max_tokens=100)


def test_a_step_for_one_of_several_gets_no_draft_either():
    """SPEC D9, Q8: those who are left out of it would wait for longer."""
    bench = Bench(Speculation.LOOKUP)
    bench.submit("a")
    bench.submit("b")
    for _ in range(60):
        bench.turn()
    plan = bench.runner.scheduler.plan()
    assert len(plan.parts) == 2
    alone = type(plan)(tuple(part for part in plan.parts if part.sequence.key.request_id == "a"))
    assert bench.runner._speculator.extended(alone) is alone
    bench.jobs.cancel("b", bench.now)
    for _ in range(WARY_STEPS):
        assert bench.runner._speculator.extended(alone) is alone, "who left may come again"
    assert bench.runner._speculator.extended(alone) is not alone


def test_a_repeat_that_nobody_bets_on_is_followed_to_its_first_miss():
    """SPEC D9: how often repeats go on is learned for nothing, also where no guess pays."""
    told = [*list(range(10, 30)), 10, 11, 12]
    odds = (*tuple(Acceptance(*rates) for rates in REPEAT_ACCEPTANCE), Acceptance(0.5, 0.5))
    subject = Subject(Sequence(key=SequenceKey("r", 0), tokens=told, num_prompt=len(told)), odds)
    match = subject.index.match(told)
    subject.watch(0, match)
    assert [subject.watched(token) for token in (13, 14, 99)] == [[], [], [(0, 2, True)]]
    subject.watch(0, match)
    heard = [ended for token in range(13, 13 + MOST_WATCHED) for ended in subject.watched(token)]
    assert heard == [(0, MOST_WATCHED, False)]
    subject.watch(0, match)
    subject.watch_none()
    assert subject.watched(99) == []


def test_what_was_watched_teaches_the_odds(monkeypatch):
    """SPEC D9: a text that repeats itself makes repeats likelier, with no draft computed."""
    monkeypatch.setattr(EagerWager, "num_worth", lambda *_, **__: 0)
    bench = Bench(Speculation.LOOKUP)
    odds = bench.runner._speculator._acceptance[: len(REPEAT_ACCEPTANCE)]
    before = [each.miss for each in odds]
    bench.run()
    assert bench.counts == (0, 0)
    assert sum(each.miss for each in odds) < sum(before)


def test_what_a_step_takes_is_the_time_from_the_one_before():
    """SPEC D9: in company of whatever runs between them; here each turn is a second of its own clock."""
    bench = Bench(Speculation.LOOKUP)
    speculator, told = bench.runner._speculator, []
    length = speculator._draft_length
    speculator._now = lambda: bench.now
    length.took = length.went_back = told.append
    length.settle = lambda _count, _tokens, took_s: told.append(took_s)
    bench.run()
    assert bench.counts[0] > 20
    assert len(told) > 20
    assert told[0] < 1.0  # what it took itself: nothing of the subject was before it
    assert set(told[1:]) == {1.0}


def test_a_step_with_guesses_is_as_long_as_who_reads_it_allows():
    """SPEC D11, Q23: a person's by the pace of plain steps, a job's as long as any."""
    for priority, longest_s in ((Priority.INTERACTIVE, READ_GAP_S), (Priority.BACKGROUND, 0.4)):
        bench, asked = Bench(Speculation.LOOKUP), []
        length = bench.runner._speculator._draft_length
        length.num_worth = lambda *_, longest_s=0.0, asked=asked: asked.append(longest_s) or 0
        bench.run(priority=priority)
        assert set(asked) == {longest_s}


def test_a_step_may_be_longer_where_tokens_of_the_one_before_are_read_meanwhile():
    """SPEC D11: by as long as they are, up to twice; after a guess that was wrong it may not."""
    bench, asked = Bench(Speculation.LOOKUP), []
    speculator = bench.runner._speculator
    length = speculator._draft_length
    length.num_worth = lambda _odds, most, *_, longest_s: asked.append(longest_s) or min(most, 7)
    learned, took_s = speculator.learn, 0.04
    speculator.learn = lambda plan, _took_s: learned(plan, took_s)
    bench.run(constraint=Constraint(kind=ConstraintKind.REGEX, source="(over and over [a-z]{6} )+"))
    assert set(asked) <= {min(READ_GAP_S + n * took_s / 8, 2 * READ_GAP_S) for n in range(8)}
    assert {READ_GAP_S, 2 * READ_GAP_S} <= set(asked)


def test_the_tokens_of_a_step_are_told_at_its_pace(monkeypatch):
    """SPEC D13: its time by its rows between one and the next; nobody reads along with a job."""
    measured = Bench(Speculation.LOOKUP)
    measured.run()
    assert all(delta.pause_s > 0.0 for step in measured.deltas for delta in step[:-1])
    draw, took_s = Postprocess.draw, 0.8
    monkeypatch.setattr(Postprocess, "draw", lambda self, plan, rows, _: draw(self, plan, rows, took_s))
    for priority, expected in ((Priority.INTERACTIVE, took_s / 8), (Priority.BACKGROUND, 0.0)):
        bench = Bench(Speculation.LOOKUP)
        bench.run(priority=priority)
        several = [[delta.pause_s for delta in step] for step in bench.deltas if len(step) == 8]
        assert len(several) > 10
        assert all(pauses == [expected] * 7 + [0.0] for pauses in several)
