"""Requests that are being prepared: beside each other, until they take too long, and refused by length."""

import time
from threading import Event, Semaphore

import pytest

from memory_stand_in import GREEDY
from stoker.backends.fake.vocabulary import FakeVocabulary
from stoker.engine.inbox import Inbox
from stoker.engine.jobs.preparations import MAX_OVERDUE, NUM_LONG, Lane, Preparations
from stoker.engine.jobs.prompts import (
    MAX_CHARS_PER_TOKEN,
    MAX_QUESTION_CHARS,
    QUICK_CHARS,
    SHIFTED_CONTEXTS,
    USUAL_CHARS_PER_TOKEN,
)
from stoker.ipc.commands import Cancel, Detokenize, Submit, Tokenize
from stoker.ipc.events import Failed, Finished, PrefillProgress, Queued, Reply
from stoker.ipc.request import IMAGE_MARKER, FinishReason, GenerateRequest, StateOutput

N_CTX = 2048
LONG = "so long " * (N_CTX // 8 + QUICK_CHARS)  # more bytes than the context has tokens, and a long text


class Held:
    """Texts that take for ever to tokenise, until they are let go: those that begin with a given word.

    Attributes:
        begun: texts of which it has begun, in order.
        asked: how often the vocabulary was asked for tokens.
    """

    def __init__(self, monkeypatch, word="slow"):
        self.begun, self.asked = [], 0
        self._let_go, self._word, self._begins = Event(), word, Semaphore(0)
        tokenize = FakeVocabulary.tokenize

        def slow(vocabulary, text, *, add_special, parse_special):
            self.asked += 1
            options = {"add_special": add_special, "parse_special": parse_special}
            if text.startswith(self._word):
                self.begun.append(text)
                self._begins.release()
                assert self._let_go.wait(60), "nobody let it go"
            return tokenize(vocabulary, text, **options)

        monkeypatch.setattr(FakeVocabulary, "tokenize", slow)

    def await_begun(self, count=1):
        """Return when so many more have begun."""
        for _ in range(count):
            assert self._begins.acquire(timeout=60), "it does not begin"

    def let_go(self):
        """Let them end."""
        self._let_go.set()


@pytest.fixture
def held(monkeypatch):
    """Slow texts, let go at the end."""
    held = Held(monkeypatch)
    yield held
    held.let_go()


@pytest.fixture
def machine(make):
    """A model in memory whose line nobody leaves: it takes one request at a time."""
    machine = make(max_prepare_s=30.0)
    machine.have("a", n_ctx=N_CTX)
    return machine


@pytest.fixture
def preparations_of(monkeypatch):
    """Preparations of jobs that go on until the end; quick ones are never over their patience."""
    monkeypatch.setattr("stoker.engine.jobs.preparations.QUICK_PATIENCE_S", 600.0)
    let_go, begins, made = Event(), Semaphore(0), []

    def work():
        begins.release()
        assert let_go.wait(60), "nobody let it go"

    def make(max_prepare_s):
        made.append(Preparations(Inbox(), max_prepare_s))

        def begin(*, is_quick):
            return made[-1].begin(work, lambda error: error, object(), is_quick=is_quick)

        def has_begun():
            assert begins.acquire(timeout=60), "it does not begin"

        return made[-1], begin, has_begun

    yield make
    let_go.set()
    for each in made:
        each.close()


def offer(machine, name, prompt, **fields):
    """Send a request of text."""
    request = GenerateRequest(
        **{"model": "a", "prompt": prompt, "max_tokens": 8, "sampling": GREEDY} | fields
    )
    machine.send(Submit(request_id=name, request=request))


# ---------------------------------------------------------------- beside each other


def test_a_slow_text_delays_its_own_request_only(machine, held):
    """SPEC Q2: quick ones pass it, long ones too."""
    offer(machine, "slow", "slow")
    held.await_begun()
    offer(machine, "quick", "a short text")
    offer(machine, "long", "x" * (QUICK_CHARS + 1), context_shift=True)
    machine.run("quick", "long")
    assert not machine.has_ended("slow")
    held.let_go()
    machine.run("slow")
    assert machine.output("slow").reasons == {0: FinishReason.LENGTH}


def test_long_texts_leave_the_places_of_quick_ones_alone(machine, held):
    """However many come at once; among each other they have places of their own."""
    for number in range(NUM_LONG + 5):
        offer(machine, f"long{number}", "slow" * QUICK_CHARS, context_shift=True, max_tokens=1)
    held.await_begun(NUM_LONG)
    offer(machine, "quick", "a short text")
    machine.run("quick")
    assert len(held.begun) == NUM_LONG
    held.let_go()
    machine.run(*(f"long{number}" for number in range(NUM_LONG + 5)))


def test_quick_texts_enter_the_line_in_the_order_they_came(machine):
    """SPEC Q2."""
    names = [f"r{number}" for number in range(60)]
    for number, name in enumerate(names):
        offer(machine, name, "word " * (60 - number), max_tokens=1)
    machine.run(*names)
    entered = list(dict.fromkeys(event.request_id for event in machine.of(Queued)))
    assert entered == names


# ---------------------------------------------------------------- ends


def test_who_cancels_while_its_text_is_read_is_told_at_once_and_leaves_nothing(machine, held):
    """SPEC Q10, L6: the client has left; the work is abandoned."""
    offer(machine, "slow", "slow")
    held.await_begun()
    machine.send(Cancel("slow"))
    assert machine.output("slow").reasons == {0: FinishReason.CANCELLED}
    assert all(job.preparation is None for job in machine.loop._jobs)
    held.let_go()
    machine.loop._preparations.settle()
    machine.turn()
    assert len(machine.of(Finished, "slow")) == 1
    assert machine.of(Queued, "slow") == []


def test_what_was_cancelled_before_its_turn_is_never_begun(machine, held):
    """The places are for those who still wait."""
    for number in range(NUM_LONG + 1):
        offer(machine, f"long{number}", "slow" * QUICK_CHARS, context_shift=True)
    held.await_begun(NUM_LONG)
    machine.send(Cancel(f"long{NUM_LONG}"))
    held.let_go()
    machine.run("long0", "long1")
    assert len(held.begun) == NUM_LONG


def test_deadlines_pass_while_a_text_is_read(machine, held, clock):
    """SPEC Q6: timeout_s counts from submission, wherever the request is."""
    offer(machine, "slow", "slow", timeout_s=10.0)
    held.await_begun()
    clock.pass_(11)
    machine.run("slow")
    assert machine.error("slow").code == "request_timeout"
    assert "being tokenised" in machine.error("slow").message


def test_preparing_has_a_limit_of_its_own(machine, held, clock):
    """The native call goes on; its client has the error with the limit and the remedy."""
    offer(machine, "slow", "slow")
    machine.send(Tokenize(call_id=7, model="a", text="slow too"))
    held.await_begun(2)
    clock.pass_(31)
    machine.run("slow")
    machine.until(lambda: bool(machine.of(Reply)))
    error = machine.error("slow")
    assert (error.code, error.details) == ("preparation_timeout", {"max_prepare_s": 30.0})
    assert "max_prepare_s 30 s" in error.message
    assert [(reply.call_id, reply.error.code) for reply in machine.of(Reply)] == [(7, "preparation_timeout")]
    held.let_go()
    machine.loop._preparations.settle()
    machine.turn()
    assert len(machine.of(Failed, "slow")) == len(machine.of(Reply)) == 1


def test_where_every_place_is_taken_for_good_those_that_wait_fail(machine, held, clock):
    """Nobody waits for a place that will not be free."""
    for number in range(1 + MAX_OVERDUE):
        offer(machine, f"slow{number}", f"slow {number}")
        held.await_begun()
    offer(machine, "waits", "a short text")
    clock.pass_(31)
    machine.run("waits")
    assert machine.error("waits").code == "preparation_timeout"
    held.let_go()
    machine.loop._preparations.settle()
    offer(machine, "later", "a short text")
    machine.run("later")
    assert machine.output("later").reasons == {0: FinishReason.LENGTH}


def test_where_long_texts_take_every_place_quick_ones_wait_for_their_own(preparations_of):
    """SPEC Q2: a jam of the one kind is none of the other."""
    preparations, begin, has_begun = preparations_of(0.0)
    for _ in range(NUM_LONG + MAX_OVERDUE):
        begin(is_quick=False)
        has_begun()
    begin(is_quick=True)
    has_begun()
    quick, long = begin(is_quick=True), begin(is_quick=False)
    preparations.expire(time.monotonic())
    assert (quick.is_open, long.is_open) == (True, False)


def test_those_that_wait_when_the_engine_ends_use_nothing_any_more(preparations_of, monkeypatch):
    """SPEC L4: their model can be freed; what runs on keeps its own, and both kinds end within one time."""
    monkeypatch.setattr("stoker.engine.jobs.preparations.CLOSE_S", 0.0)
    preparations, begin, has_begun = preparations_of(600.0)
    runs = begin(is_quick=True)
    has_begun()
    waits = begin(is_quick=True)
    preparations.close()
    assert (preparations.uses(runs.owner), preparations.uses(waits.owner)) == (True, False)


def test_who_waits_for_a_place_and_gives_up_leaves_nothing_behind(machine, held):
    """A text that nobody waits for is freed at once, though no place becomes free."""
    for number in range(1 + MAX_OVERDUE):
        offer(machine, f"slow{number}", f"slow {number}")
        held.await_begun()
    offer(machine, "waits", "a short text")
    assert "1 wait" in repr(machine.loop._preparations)
    machine.send(Cancel("waits"))
    assert "1 wait" not in repr(machine.loop._preparations)


def test_a_request_that_no_thread_can_be_started_for_fails_alone(machine, monkeypatch):
    """SPEC Q12: the engine serves on, and the next one is prepared."""

    def refused(lane):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "_start_thread", refused)
        offer(machine, "unlucky", "a short text")
        machine.run("unlucky")
    assert machine.error("unlucky").code == "machine_setup"
    assert "can't start new thread" in machine.error("unlucky").message
    offer(machine, "next", "a short text")
    machine.run("next")
    assert machine.output("next").reasons == {0: FinishReason.LENGTH}


def test_how_long_a_prompt_is_is_told_before_it_is_computed(machine):
    """SPEC S2."""
    offer(machine, "r", "x" * 100, return_progress=True)
    machine.run("r")
    first = machine.of(PrefillProgress, "r")[0]
    assert (first.total, first.processed) == (101, 0)


# ---------------------------------------------------------------- refused by length


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"is_chat": True}, "prompt"),
        ({"context_shift": True, "prompt": LONG * 40}, "prompt"),
        ({"max_tokens": 0, "state_output": StateOutput.EMBED}, "prompt"),
        (
            {"max_tokens": 0, "state_output": StateOutput.CHOOSE, "prompt": "x", "candidates": ("a", LONG)},
            "choices",
        ),
    ],
    ids=["prompt", "chat", "shifted", "embedded", "choice"],
)
def test_what_cannot_fit_is_refused_by_its_length_and_never_tokenised(machine, held, fields, param):
    """Thirty megabytes took 20 s and 1.1 GiB to be told that they are too long."""
    offer(machine, "r", **{"prompt": LONG} | fields)
    machine.run("r")
    error = machine.error("r")
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert error.details["n_ctx"] == N_CTX
    assert error.details["num_tokens"] > N_CTX
    assert f"maximum context length is {N_CTX} tokens" in error.message
    assert f"at least {error.details['num_tokens']} tokens" in error.message
    assert held.asked == 0


@pytest.mark.parametrize(
    ("order", "fields", "param"),
    [
        ("encoder=1", {"state_output": StateOutput.EMBED}, "input"),
        (
            "encoder=1,pooling=rank",
            {"state_output": StateOutput.SCORE, "document": LONG, "prompt": "query"},
            "documents",
        ),
    ],
    ids=["embedded", "reranked"],
)
def test_an_encoders_texts_are_too(make, held, order, fields, param):
    """SPEC K1, K4."""
    machine = make()
    machine.have("a", order=order, n_ctx=512)
    offer(machine, "r", **{"prompt": LONG, "max_tokens": 0} | fields)
    machine.run("r")
    assert (machine.error("r").code, machine.error("r").param) == ("context_length_exceeded", param)
    assert held.asked == 0


def test_no_text_has_more_characters_than_a_context_is_worth(machine, held, monkeypatch):
    """Where a vocabulary may take any number of blanks together, no count of tokens bounds a text."""
    monkeypatch.setattr(FakeVocabulary, "least_tokens", lambda *_: 0)
    offer(machine, "r", " " * (N_CTX * MAX_CHARS_PER_TOKEN + 1))
    machine.run("r")
    error = machine.error("r")
    assert (error.code, error.details["max_chars"]) == (
        "context_length_exceeded",
        N_CTX * MAX_CHARS_PER_TOKEN,
    )
    assert f"{N_CTX * MAX_CHARS_PER_TOKEN + 1} characters, of which at most" in error.message
    assert f"at most {N_CTX * MAX_CHARS_PER_TOKEN} are read" in error.message
    assert held.asked == 0


def test_a_shifted_context_reads_more_than_it_holds(machine):
    """SPEC C12: the oldest are dropped; how much more has a number."""
    offer(machine, "r", "x" * (N_CTX * 2), context_shift=True)
    machine.run("r")
    assert machine.output("r").reasons == {0: FinishReason.LENGTH}
    most = max(SHIFTED_CONTEXTS * N_CTX, QUICK_CHARS)
    offer(machine, "s", (120,) * (most + 1), context_shift=True)
    machine.run("s")
    assert machine.error("s").code == "context_length_exceeded"


def test_token_ids_that_are_too_many_are_refused_before_they_are_looked_at(machine, monkeypatch):
    """Two million of them took seconds."""
    monkeypatch.setattr("stoker.engine.jobs.prepare.check_tokens", lambda *_: pytest.fail("looked at"))
    offer(machine, "r", (120,) * (N_CTX + 1))
    machine.run("r")
    assert machine.error("r").details == {"num_tokens": N_CTX + 1, "n_ctx": N_CTX}


def test_questions_about_text_are_bounded(machine, held):
    """They have no context to fit into, so they have a number of their own."""
    machine.send(Tokenize(call_id=1, model="a", text="x" * (MAX_QUESTION_CHARS + 1)))
    machine.send(Detokenize(call_id=2, model="a", tokens=[120] * (2**20 + 1)))
    machine.until(lambda: len(machine.of(Reply)) == 2)
    assert {(reply.call_id, reply.error.param) for reply in machine.of(Reply)} == {
        (1, "content"),
        (2, "tokens"),
    }
    assert str(MAX_QUESTION_CHARS) in machine.of(Reply)[0].error.message
    assert held.asked == 0


def test_what_is_in_doubt_is_tokenised(make, held):
    """Only what cannot fit is refused: a bound that is too low refuses nothing."""
    machine = make()
    machine.have("a", n_ctx=2 * QUICK_CHARS)
    offer(machine, "r", "x" * (2 * QUICK_CHARS - 20))
    machine.run("r")
    assert machine.output("r").reasons == {0: FinishReason.LENGTH}
    assert held.asked == 1


def test_what_may_fit_by_its_characters_is_tokenised_without_a_look(make, held, monkeypatch):
    """SPEC Q21: it is refused with the number of its tokens, which are no more than eight contexts'."""
    monkeypatch.setattr(FakeVocabulary, "least_tokens", lambda *_: pytest.fail("looked at"))
    machine = make()
    machine.have("a", n_ctx=QUICK_CHARS)
    num_chars = USUAL_CHARS_PER_TOKEN * QUICK_CHARS
    offer(machine, "r", "x" * num_chars)
    machine.run("r")
    error = machine.error("r")
    assert (error.code, error.details) == (
        "context_length_exceeded",
        {"num_tokens": num_chars + 1, "n_ctx": QUICK_CHARS},
    )
    assert held.asked == 1


def test_many_short_parts_of_a_text_are_looked_at_as_one(machine, held):
    """SPEC Q21: what counts is the whole, whatever marks of images stand in it."""
    part = "x" * (QUICK_CHARS - 1)
    offer(machine, "r", IMAGE_MARKER.join([part] * (USUAL_CHARS_PER_TOKEN + 2)))
    machine.run("r")
    assert "at least" in machine.error("r").message
    assert held.asked == 0
