"""Steps that a device computes while the host delivers: the same answers, and one token launched in vain."""

import pytest

from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import MOST_UNLEARNED, StepTimer, Stopwatch
from stoker.errors import PoolFullError, StepFailedError
from stoker.ipc.commands import Submit
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Failed, Finished, Parked, PromptEcho
from stoker.ipc.model import ModelSpec, Speculation
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, Sampling
from stoker.machine.ledger import Ledger
from stoker.sampling.generation import Generation
from stoker.sampling.sampler import Sampler

WORDS = Constraint(kind=ConstraintKind.REGEX, source="(ab|cd){3} [a-z]{7}!")
REQUESTS = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "seeded": {"sampling": Sampling(seed=5, temperature=1.5)},
    "mirostat": {"sampling": Sampling(seed=5, mirostat=2)},
    "penalties": {"sampling": Sampling(seed=5, repeat_penalty=1.2, dry_multiplier=0.8)},
    "logprobs": {"logprobs": 3, "sampling": Sampling(seed=5, repeat_penalty=1.2)},
    "a stop that matches": {"stop": ("ll",), "max_tokens": 400},
    "a stop of several": {"stop": ("e", "th"), "n": 3},
    "an end of text": {"max_tokens": 400},
    "a grammar that ends": {
        "constraint": Constraint(kind=ConstraintKind.REGEX, source="(ab|cd){3} [a-z]{7}!")
    },
    "least tokens": {"stop": ("e",), "min_tokens": 20},
    "several": {"n": 3},
    "shift": {"context_shift": True, "max_tokens": 300},
    "context full": {"max_tokens": None},
    "one token": {"max_tokens": 1},
    "no token": {"max_tokens": 0},
    "prompt logprobs": {"echo": True, "prompt_logprobs": 2},
}


class Bench:
    """One model on this thread; its steps overlap with their delivery, or do not."""

    def __init__(self, *, is_async, mode=Speculation.OFF, eog_period=97, **options):
        spec = ModelSpec(id="m", path="fake:", num_slots=options.pop("num_slots", 3), speculation=mode)
        faults = FakeFaults(
            eog_period=eog_period,
            is_async=is_async,
            draws=options.pop("draws", False),
            bad_tokens=options.pop("bad_tokens", frozenset()),
        )
        self.backend = FakeBackend(**{"num_cells": 1024, "n_ctx": 128, "faults": faults} | options)
        cache = PrefixCache(CacheLimits(), Ledger())
        self.timer = StepTimer(Stopwatch(60.0))
        self.jobs = JobTable()
        self.runner = SlotRunner(spec, self.backend, self.timer, cache, self.jobs)
        self.now = 0.0
        self.events = []

    def submit(self, request_id, **fields):
        """Enter a request."""
        known = {"prompt": f"Tell {request_id} about ", "model": "m", "max_tokens": 60}
        request = GenerateRequest(**{"sampling": Sampling(seed=1)} | known | fields)
        submit = Submit(request_id=request_id, request=request)
        self.runner.accept(prepare(submit, self.runner.prep, self.now), self.now)

    def turn(self):
        """One turn as the loop makes it."""
        self.now += 1.0
        self.jobs.expire(self.now)
        self.runner.schedule(self.now)
        self.take()
        self.runner.step(self.now)
        self.take()

    def take(self):
        """Publish what has happened."""
        self.events += self.jobs.events
        self.jobs.events.clear()

    def finish(self):
        """Turn until nothing is left to do, and check what is kept."""
        for _ in range(3000):
            if not self.runner.has_work:
                break
            self.turn()
        self.runner.rest(self.now)
        self.take()
        self.runner.scheduler.check()
        self.backend.check()
        assert self.backend.num_cells_used == self.runner.scheduler.cells.used

    def answers(self):
        """By request and choice: tokens, text, log probabilities, endings; the terminal events."""
        found = {}
        for event in self.events:
            match event:
                case Delta():
                    answer = found.setdefault((event.request_id, event.index), [[], "", [], None])
                    answer[0] += event.token_ids
                    answer[1] += event.text
                    answer[2] += event.logprobs or []
                    assert answer[3] is None, f"after its end: {event}"
                    answer[3] = (event.finish_reason, event.stop_text) if event.finish_reason else None
                case Finished():
                    found[event.request_id] = event.usage.completion_tokens, event.usage.prompt_tokens
                case Failed():
                    found[event.request_id] = event.error.code
                case PromptEcho():
                    found[event.request_id, "echo"] = event.text, event.logprobs
        return found


@pytest.mark.parametrize("mode", [Speculation.OFF, Speculation.LOOKUP])
@pytest.mark.parametrize("kind", REQUESTS)
def test_both_orders_give_the_same_answers(kind, mode):
    """B5, B6: delivery behind the launch, and candidates for rows, change no token, text, stop or logprob."""
    found = []
    for is_async, draws in ((False, False), (True, False), (False, True), (True, True)):
        bench = Bench(is_async=is_async, draws=draws, mode=mode)
        for number in range(5):  # more than there are slots
            bench.submit(f"r{number}", **REQUESTS[kind])
        bench.finish()
        found.append(bench.answers())
        assert sum(isinstance(event, Finished) for event in bench.events) == 5
    assert all(answers == found[0] for answers in found[1:])


def test_requests_of_every_kind_in_one_step_draw_what_they_draw_from_whole_rows():
    """B6: only the rows of those who need them are asked for whole, beside the candidates of the others."""
    found, asked = [], set()
    for draws in (False, True):
        bench = Bench(is_async=True, draws=draws, num_slots=len(REQUESTS), num_sequences=64, num_cells=8192)
        launch = bench.backend.launch

        def watched(plan, launch=launch):
            asked.add(len({item.takes_candidates for item in plan.items if item.num_logits}))
            return launch(plan)

        bench.backend.launch = watched
        for kind, fields in REQUESTS.items():
            bench.submit(kind, **fields)
        bench.finish()
        found.append(bench.answers())
    assert found[0] == found[1]
    assert 2 in asked, "no step had rows of both kinds"


def test_an_event_is_made_while_the_next_step_is_in_flight():
    """B5: launch, then deliver what was drawn before; but a first token is waited for."""
    bench = Bench(is_async=True, eog_period=0)
    bench.submit("r")
    launch, seen = bench.backend.launch, []

    def watched(plan):
        seen.append(sum(isinstance(event, Delta) for event in [*bench.events, *bench.jobs.events]))
        return launch(plan)

    bench.backend.launch = watched
    for num_delivered in range(4):
        bench.turn()
        assert bench.runner._steps.is_in_flight
        assert seen[-1] == (num_delivered if num_delivered < 2 else num_delivered - 1)
        assert sum(isinstance(event, Delta) for event in bench.events) == num_delivered


def test_what_the_next_launch_does_not_need_comes_after_it():
    """B5: between rows that are there and the next launch a device stands still."""
    bench = Bench(is_async=True, eog_period=0)
    bench.submit("r")
    order = []

    def note(owner, name):
        call = getattr(owner, name)

        def noted(*args, **options):
            order.append(name)
            return call(*args, **options)

        setattr(owner, name, noted)

    note(bench.backend, "launch")
    note(bench.runner.scheduler.cost, "learn")
    note(bench.runner.scheduler.activity, "stepped")
    note(bench.runner.scheduler.eta, "stepped")
    note(bench.timer, "stop")
    for _ in range(4):
        bench.turn()
    learned = []
    for _ in range(2 * MOST_UNLEARNED):
        order.clear()
        bench.turn()
        assert order[:2] == ["stop", "launch"]
        learned += order[2:]
    assert learned.count("learn") >= MOST_UNLEARNED, "steps are learned from together, and each of them"
    assert learned.count("stepped") >= 2 * MOST_UNLEARNED


def test_rows_that_decode_again_are_launched_before_anything_is_made_of_their_tokens():
    """B5: a device stands still from their logits to the launch; counts, events and text come after it."""
    bench = Bench(is_async=True, draws=True, eog_period=0, num_slots=2)
    order = []
    for owner, name in (
        (bench.backend, "launch"),
        (bench.runner.scheduler, "computed"),
        (bench.runner.scheduler, "schedule"),
        (bench.runner.scheduler.planner, "plan"),
    ):
        call = getattr(owner, name)

        def noted(*args, name=name, call=call, **options):
            order.append(name)
            return call(*args, **options)

        setattr(owner, name, noted)
    for name in ("a", "b"):
        bench.submit(name, max_tokens=40)
    for _ in range(4):
        bench.turn()
    for _ in range(30):
        order.clear()
        bench.turn()
        assert order == ["launch", "computed"]
    bench.submit("c")
    order.clear()
    bench.turn()
    assert order == ["computed", "schedule", "plan", "launch"], "who comes is looked at before the next step"
    bench.finish()
    alone = Bench(is_async=False, eog_period=0)
    for name, fields in (("a", {"max_tokens": 40}), ("b", {"max_tokens": 40}), ("c", {})):
        alone.submit(name, **fields)
    alone.finish()
    assert bench.answers() == alone.answers()


@pytest.mark.parametrize("error", [StepFailedError("the card"), PoolFullError("no cells")])
def test_a_launch_of_rows_that_decode_again_may_fail(error):
    """SPEC Q12, B5: what was drawn before it stays drawn, and the step is planned as any other."""
    bench = Bench(is_async=True, draws=True, eog_period=0)
    for name in ("a", "b"):
        bench.submit(name)
    launch, num_launches = bench.backend.launch, 0

    def failing(plan):
        nonlocal num_launches
        num_launches += 1
        if num_launches % 5 == 0:
            raise error
        return launch(plan)

    bench.backend.launch = failing
    bench.finish()
    alone = Bench(is_async=False, eog_period=0)
    for name in ("a", "b"):
        alone.submit(name)
    alone.finish()
    assert bench.answers() == alone.answers()
    assert num_launches > 60


def test_a_token_launched_in_vain_is_taken_back():
    """SPEC D4, D9: a stop string shows after the launch; the cells hold what they hold in the other order."""
    kept = []
    for is_async in (False, True):
        bench = Bench(is_async=is_async, eog_period=0)
        bench.submit("r", stop=("e",), max_tokens=60)
        num_steps = 0
        while not any(isinstance(event, Finished) for event in bench.events):
            bench.turn()
            num_steps += 1
        bench.finish()
        kept.append((bench.backend.tokens(0), [slot.tokens for slot in bench.runner.scheduler.slots.slots]))
        assert bench.backend.num_steps == num_steps
    assert kept[0] == kept[1]
    assert kept[0][0]


def test_a_model_that_cannot_go_back_delivers_before_it_launches():
    """A recurrent state cannot be taken back by a token, so no token of it is launched in vain."""
    for is_async in (False, True):
        bench = Bench(is_async=is_async, eog_period=0)
        bench.backend = FakeBackend(faults=FakeFaults(recurrent=True, is_async=is_async, eog_period=0))
        bench.runner = SlotRunner(
            ModelSpec(id="m", path="fake:"),
            bench.backend,
            bench.timer,
            PrefixCache(CacheLimits(), Ledger()),
            bench.jobs,
        )
        bench.submit("r", stop=("e",), max_tokens=60)
        bench.finish()
        (delivered, _, _, end) = bench.answers()["r", 0]
        assert end == (FinishReason.STOP, "e")
        prompt = bench.runner.prep.vocabulary.tokenize("Tell r about ", add_special=True, parse_special=True)
        assert bench.backend.num_steps == len(delivered)
        assert all(len(bench.backend.tokens(seq)) < len(prompt) + len(delivered) for seq in range(4))


@pytest.mark.parametrize("draws", [False, True])
def test_a_step_that_fails_on_the_device_ends_its_culprit_alone(draws):
    """SPEC Q12: an error that comes with the rows; the others go on as if nothing had been."""
    found = []
    for is_async in (False, True):
        bench = Bench(is_async=is_async, draws=draws, eog_period=0, bad_tokens=frozenset({ord("Z")}))
        for name in ("one", "Zoe", "two"):
            bench.submit(name)
        bench.finish()
        found.append(bench.answers())
        assert found[-1]["Zoe"] == StepFailedError("").code
    assert found[0] == found[1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_led_to_no_number_is_kept_for_nobody(monkeypatch, *, is_async, is_broken):
    """SPEC Q12, C10: neither in cells nor stored, or every request with that beginning would fail like it."""
    bench = Bench(is_async=is_async, eog_period=0)
    bench.submit("r", prompt="a beginning that many have " * 3)
    for _ in range(5):
        bench.turn()
    if is_broken:

        def no_number(*_):
            raise StepFailedError("the model returned logits whose largest is nan")

        monkeypatch.setattr(Sampler, "draw", no_number)
        monkeypatch.setattr(Generation, "num_needed", None)  # so that each draws for itself
    bench.finish()
    monkeypatch.undo()
    bench.submit("other")
    bench.finish()
    assert (bench.answers().get("r") == StepFailedError("").code) is is_broken
    kept = [slot.kept for slot in bench.runner.scheduler.slots.slots if slot.kept]
    assert len(kept) == (1 if is_broken else 2)
    beginning = bench.runner.prep.vocabulary.tokenize("a beginning", add_special=True, parse_special=True)
    assert any(each[: len(beginning)] == beginning for each in kept) is not is_broken


def disturb(bench, what):
    """Something that a sequence of request "a" cannot be in flight for."""
    match what:
        case "cancel":
            bench.jobs.cancel("a", bench.now)
        case "pause":
            bench.jobs.pause("a", bench.now)
            bench.turn()
            bench.jobs.resume("a", bench.now)
        case "evacuate":
            bench.jobs.evacuate("m", "tested", bench.now)
            submits = [job.submit for job in bench.jobs.pending("m")]
            bench.take()
            for submit in submits:
                assert submit.generated[0] == bench.answers()[submit.request_id, 0][0]
                bench.runner.accept(prepare(submit, bench.runner.prep, bench.now), bench.now)
        case "deadline":
            bench.now = 30.0
        case "drop":
            bench.runner.drop_idle(bench.now)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("what", ["cancel", "pause", "evacuate", "deadline", "drop"])
def test_what_touches_a_sequence_waits_for_its_step(what, draws):
    """One step in flight: the fake refuses every other call meanwhile; nothing is lost or doubled (B6)."""
    bench = Bench(is_async=True, draws=draws, eog_period=0)
    for name in ("a", "b"):
        bench.submit(name, **({"timeout_s": 20.0} if what == "deadline" and name == "a" else {}))
    while len(bench.answers().get(("a", 0), [[]])[0]) < 5:
        bench.turn()
    assert bench.runner._steps.is_in_flight
    disturb(bench, what)
    bench.finish()
    alone = Bench(is_async=False, eog_period=0)
    alone.submit("a")
    alone.submit("b")
    alone.finish()
    (tokens, text, _, end), whole = bench.answers()["a", 0], alone.answers()["a", 0]
    assert tokens == whole[0][: len(tokens)]
    assert whole[1].startswith(text)
    assert bench.answers()["b", 0] == alone.answers()["b", 0]
    assert end == {"cancel": (FinishReason.CANCELLED, None), "deadline": None}.get(what, whole[3])
    assert (bench.answers()["a"] == "request_timeout") == (what == "deadline")


@pytest.mark.parametrize("draws", [False, True])
def test_a_token_comes_before_the_news_that_its_sequence_was_parked(draws):
    """SPEC Q3, B6: the turn that parks background has drawn a token of it, which is delivered first."""
    bench = Bench(is_async=True, draws=draws, eog_period=0, num_slots=1)
    bench.submit("job", priority=Priority.BACKGROUND)
    while len(bench.answers().get(("job", 0), [[]])[0]) < 5:
        bench.turn()
    bench.submit("me")
    while not any(isinstance(event, Parked) for event in bench.events):
        bench.turn()
    at = next(at for at, event in enumerate(bench.events) if isinstance(event, Parked))
    before = [e for e in bench.events[:at] if isinstance(e, Delta) and e.request_id == "job"]
    job = next(s for s in bench.runner.scheduler.queue if s.key.request_id == "job")
    assert sum(len(event.token_ids) for event in before) == job.num_generated
    bench.finish()
    alone = Bench(is_async=False, eog_period=0)
    alone.submit("job")
    alone.finish()
    assert bench.answers()["job", 0] == alone.answers()["job", 0]
    assert len(bench.answers()["job", 0][0]) == 60


def test_other_native_work_waits_for_the_step_in_flight():
    """One clock and one set of threads: whoever begins, be it another model, has the step waited for."""
    bench = Bench(is_async=True, eog_period=0)
    bench.submit("r")
    bench.turn()
    assert not bench.backend._in_flight.is_collected
    bench.timer.begin(1)
    assert bench.backend._in_flight.is_collected
    bench.timer.abandon()
    bench.finish()
    assert len(bench.answers()["r", 0][0]) == 60
