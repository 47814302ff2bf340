"""The engine's loop on the fake backend, driven turn by turn on this thread."""

import logging
import os
import threading
from itertools import pairwise

import pytest

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.client.process.transport import config_of
from stoker.engine import loop
from stoker.engine.jobs import preparations
from stoker.engine.loop import COMING_SHARE, TEND_EVERY_S, EngineLoop
from stoker.engine.process import EngineInThread
from stoker.errors import PoolFullError
from stoker.ipc.commands import Cancel, Detokenize, GetStatus, LoadModel, Shutdown, Submit, Tokenize
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Goodbye,
    Hello,
    ModelState,
    PrefillProgress,
    PromptEcho,
    Queued,
    Reply,
    StateReady,
)
from stoker.ipc.model import ModelSpec, PlacementSpec
from stoker.ipc.request import FinishReason, GenerateRequest, Preempt, Priority, Sampling, StateOutput
from stoker.machine.device_lease import DeviceLease, lease_folder
from stoker.scheduler.queue import Throttle
from stoker.settings import EngineSettings

GREEDY = Sampling(temperature=0.0)


class Engine:
    """A loop with its inbox and everything it published."""

    def __init__(self, path="fake:eog_period=0", settings=None, **spec):
        self.events = []
        config = config_of(settings or EngineSettings(isolation="thread"))
        front = EngineInThread(self.events.extend, config)
        self.inbox, self.put = front._inbox, front.put
        self.loop = EngineLoop(self.inbox, self.events.extend, config)
        self.put(LoadModel(ModelSpec(**{"id": "m", "path": path, "n_ctx": 512} | spec)))
        self.until(lambda: self.of(ModelState)[-1:] and self.of(ModelState)[-1].state != "loading")

    def of(self, kind, request_id=None):
        """Events of a kind, in order."""
        return [
            e
            for e in self.events
            if isinstance(e, kind) and request_id in (None, getattr(e, "request_id", None))
        ]

    def until(self, is_done, turns=2000):
        """Turn until `is_done`; a turn without work waits for a worker's post."""
        for _ in range(turns):
            if is_done():
                return
            due_s = self.loop._wait_s()
            self.loop.turn(0.5 if due_s is None else min(due_s, 0.5))
        pytest.fail(f"not reached in {turns} turns: {self.events[-5:]}")

    def submit(self, request_id, **fields):
        """Submit a greedy request of eight tokens, unless `fields` say otherwise."""
        extra = {name: fields.pop(name) for name in ("generated", "is_finished", "age_s") if name in fields}
        request = GenerateRequest(**{"model": "m", "sampling": GREEDY, "max_tokens": 8} | fields)
        self.put(Submit(request_id=request_id, request=request, **extra))

    def run(self, *request_ids):
        """Turn until each of these has ended."""
        self.until(lambda: all(self.of((Finished, Failed), name) for name in request_ids))

    def tokens(self, request_id, index=0):
        """Token ids a choice was given."""
        return [t for e in self.of(Delta, request_id) if e.index == index for t in e.token_ids]


@pytest.fixture(params=["fake:eog_period=0", "fake:eog_period=0,is_async=1"], ids=["sync", "async"])
def engine(request):
    """A loaded fake model, freed at the end; its steps are waited for, or overlap with their delivery."""
    engine = Engine(request.param)
    yield engine
    engine.inbox.put(Shutdown())
    engine.loop.run()


def greedy(prompt, num_tokens):
    """What the fake model says after `prompt` bytes, computed directly."""
    backend, tokens = FakeBackend(), list(prompt)
    for _ in range(num_tokens):
        start = backend.length(0)
        tokens.append(
            int(backend.launch(BatchPlan((PlanItem(0, start, tokens[start:], 1),))).rows()[0][:256].argmax())
        )
    return tokens[len(prompt) :]


def test_a_request_gets_its_tokens_and_exactly_one_terminal_event(engine):
    """L6, and the engine's tokens are the backend's."""
    engine.submit("r", prompt=tuple(b"hello"))
    engine.run("r")
    assert engine.tokens("r") == greedy(b"hello", 8)
    assert [type(e) for e in engine.of((Queued, Admitted), "r")] == [Queued, Admitted]
    assert len(engine.of((Finished, Failed), "r")) == 1
    assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.LENGTH
    usage = engine.of(Finished, "r")[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 8)


def test_more_requests_than_slots_all_get_what_they_get_alone(engine):
    """Q9, Q2."""
    prompts = {f"r{n}": tuple(f"{n} prompt of {n}".encode()) for n in range(20)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt=prompt, max_tokens=20)
    engine.run(*prompts)
    for name, prompt in prompts.items():
        assert engine.tokens(name) == greedy(prompt, 20)


def test_two_completions_of_one_prompt_are_the_same_greedily_and_share_the_prefill(engine):
    """Q16."""
    engine.submit("r", prompt=tuple(b"x" * 100), n=2)
    engine.run("r")
    assert engine.tokens("r", 0) == engine.tokens("r", 1) == greedy(b"x" * 100, 8)
    computed = engine.loop._runners.find("m").scheduler
    computed.check()
    usage = engine.of(Finished, "r")[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (100, 16)


def test_a_cancelled_request_ends_with_its_reason_and_frees_its_slot(engine):
    """S5, D4, L6."""
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400)
    engine.until(lambda: len(engine.tokens("r")) > 3)
    engine.inbox.put(Cancel("r"))
    engine.run("r")
    assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.CANCELLED
    assert not engine.loop._runners.has_work
    engine.inbox.put(Cancel("r"))
    engine.loop.turn(0)
    assert len(engine.of((Finished, Failed), "r")) == 1


def test_a_request_cancelled_while_it_is_tokenised_never_starts(engine):
    """Q6, L6."""
    engine.submit("r", prompt=tuple(b"abc"))
    engine.inbox.put(Cancel("r"))
    engine.run("r")
    engine.submit("after", prompt=tuple(b"abc"))
    engine.run("after")
    assert engine.of(Admitted, "r") == []
    assert len(engine.of((Finished, Failed), "r")) == 1


def test_a_replayed_request_goes_on_where_it_was(engine):
    """L3: the delivered part is not drawn again, the rest is what it would have been."""
    whole = greedy(b"hello", 12)
    engine.submit("r", prompt=tuple(b"hello"), max_tokens=12, generated=[whole[:5]], is_finished=[False])
    engine.run("r")
    assert engine.tokens("r") == whole[5:]
    assert engine.of(Finished, "r")[0].usage.completion_tokens == 12


def test_a_replayed_request_whose_choices_had_all_ended_only_ends(engine):
    """L3, L6."""
    engine.submit("r", prompt=tuple(b"hello"), generated=[[1, 2]], is_finished=[True])
    engine.run("r")
    assert engine.of(Delta, "r") == []
    assert len(engine.of(Finished, "r")) == 1


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine):
    """What bad input gets: context_length_exceeded."""
    engine.submit("r", prompt=tuple(b"x" * 600))
    engine.run("r")
    error = engine.of(Failed, "r")[0].error
    assert error.code == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens" in error.message
    assert (error.details["num_tokens"], error.details["n_ctx"]) == (600, 512)


def test_a_full_context_ends_the_text_with_length(engine):
    """D4."""
    engine.submit("r", prompt=tuple(b"x" * 500), max_tokens=None)
    engine.run("r")
    assert len(engine.tokens("r")) == 12
    assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.LENGTH


def test_a_step_that_fails_ends_its_culprit_alone():
    """Q12: the batch is halved until the culprit is alone."""
    engine = Engine("fake:eog_period=0,bad_tokens=7")
    prompts = {f"r{n}": tuple(f"good {n}".encode()) for n in range(5)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt=prompt)
    engine.submit("bad", prompt=(65, 7, 66))
    engine.run("bad", *prompts)
    assert engine.of(Failed, "bad")[0].error.code == "step_failed"
    for name, prompt in prompts.items():
        assert engine.tokens(name) == greedy(prompt, 8)


def test_requests_that_together_overfill_the_pool_all_complete():
    """Q12: a full pool never errors everyone."""
    engine = Engine(n_ctx=300)
    prompts = {f"r{n}": tuple(bytes([97 + n]) * 60) for n in range(8)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt=prompt, max_tokens=100)
    engine.run(*prompts)
    assert engine.loop._runners.find("m").scheduler.stats()["num_preemptions_total"] > 0
    for name, prompt in prompts.items():
        assert engine.tokens(name) == greedy(prompt, 100)


def test_a_deadline_ends_a_request_wherever_it_is(engine):
    """Q6."""
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400, timeout_s=0.0)
    engine.run("r")
    assert engine.of(Failed, "r")[0].error.code == "request_timeout"
    assert engine.of(Admitted, "r") == []


def test_prefill_progress_counts_up_to_the_whole_prompt(engine):
    """S2: how long it is as soon as it has its slot, then real counts, none after the first token."""
    engine.submit("r", prompt=tuple(b"y" * 500), return_progress=True, max_tokens=2)
    other = Engine(n_batch=100, n_ctx=1024)
    other.submit("r", prompt=tuple(b"y" * 500), return_progress=True, max_tokens=2)
    other.run("r")
    counts = [e.processed for e in other.of(PrefillProgress)]
    assert (counts[0], counts[-1]) == (0, 500)
    assert all(0 < after - before <= 100 for before, after in pairwise(counts))
    assert {e.total for e in other.of(PrefillProgress)} == {500}
    kinds = [type(e) for e in other.events if isinstance(e, Admitted | PrefillProgress | Delta)]
    assert kinds[:2] == [Admitted, PrefillProgress]
    assert kinds.index(Delta) == len(counts) + 1


def test_prompt_logprobs_come_once_before_the_text(engine):
    """D6: one entry a prompt token, the first without a number."""
    prompt = tuple(b"some prompt of a few tokens, more than one slice of rows: " + b"z" * 80)
    engine.submit("r", prompt=prompt, prompt_logprobs=2, echo=True, max_tokens=0)
    engine.run("r")
    (echo,) = engine.of(PromptEcho)
    assert echo.text == bytes(prompt).decode()
    assert [lp.token_id for lp in echo.logprobs] == list(prompt)
    assert echo.logprobs[0].logprob is None
    assert all(lp.logprob <= lp.top[0][2] <= 0 for lp in echo.logprobs[1:])
    assert engine.tokens("r") == []
    assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.LENGTH


def test_tokenize_and_detokenize_answer_their_call(engine):
    """S1."""
    engine.inbox.put(Tokenize(call_id=1, model="m", text="hé", add_special=False))
    engine.inbox.put(Detokenize(call_id=2, model="m", tokens=[104, 105]))
    engine.inbox.put(Detokenize(call_id=3, model="m", tokens=[99999]))
    engine.inbox.put(Tokenize(call_id=4, model="other", text="x"))
    engine.until(lambda: len(engine.of(Reply)) == 4)
    replies = {reply.call_id: reply for reply in engine.of(Reply)}
    assert replies[1].value["tokens"] == list("hé".encode())
    assert replies[2].value["text"] == "hi"
    assert replies[3].error.code == "invalid_request"
    assert replies[4].error.code == "model_not_found"


def test_a_token_outside_the_vocabulary_is_the_callers_error(engine):
    """What bad input gets."""
    engine.submit("r", prompt=(65, 70_000))
    engine.run("r")
    error = engine.of(Failed, "r")[0].error
    assert (error.code, error.param) == ("invalid_request", "prompt")


def test_status_shows_slots_queue_and_counters():
    """I4."""
    engine = Engine("fake:eog_period=0,step_delay_s=0.01", n_ctx=8192)
    for n in range(10):
        engine.submit(f"r{n}", prompt=tuple(b"abc%d" % n), max_tokens=400)
    engine.until(lambda: len({event.request_id for event in engine.of(Queued)}) == 10)
    engine.inbox.put(GetStatus(9))
    engine.until(lambda: engine.of(Reply))
    status = engine.of(Reply)[-1].value["status"]
    assert len(status.slots) == 8
    assert {slot.state for slot in status.slots} <= {"prefill", "decode"}
    assert [wait.position for wait in status.queue] == [0, 1]
    assert status.kv_cells_used > 0


def test_a_model_that_cannot_be_loaded_is_reported_and_the_loop_goes_on(engine):
    """R4."""
    engine.inbox.put(LoadModel(ModelSpec(id="broken", path="fake:nonsense=1")))
    engine.until(lambda: engine.of(ModelState)[-1].state == "failed")
    assert engine.of(ModelState)[-1].error.code == "model_file_invalid"
    engine.submit("r", prompt=tuple(b"abc"))
    engine.run("r")


def test_a_device_is_leased_measured_and_named(tmp_path):
    """SPEC R6, M3: by the first load on it; another engine's load of a model there fails meanwhile."""
    settings = EngineSettings(isolation="thread", cache_dir=tmp_path)
    first, second = Engine("fake:device=Card", settings=settings), Engine(settings=settings)
    first.inbox.put(GetStatus(call_id=1))
    first.until(lambda: first.of(Reply))
    (shown,) = first.of(Reply)[0].value["status"].devices
    (runner,) = first.loop._runners
    own = sum(runner.backend.memory().values())
    (sample,) = first.loop._take_sample().devices
    assert (sample.id, sample.free_bytes, sample.total_bytes) == ("Card", 2**30 - own, 2**30)
    assert (sample.own_bytes, sample.other_bytes) == (own, 0)
    assert (shown.id, shown.kind, shown.is_used) == ("Card", "Fake", True)
    assert (shown.total, shown.free, shown.own, shown.others) == (2**30, 2**30 - own, own, 0)
    assert shown.lines == runner.backend.memory()
    second.inbox.put(LoadModel(ModelSpec(id="n", path="fake:device=Card")))
    second.until(lambda: second.of(ModelState)[-1].state == "failed")
    error = second.of(ModelState)[-1].error
    assert error.code == "device_busy"
    assert error.message.startswith(f"process {os.getpid()} (model m) holds the device Fake Card; ")
    cpu, seen = second.loop._report.status(0).devices
    assert (cpu.id, cpu.is_used, cpu.total) == ("CPU", True, 0)
    assert (seen.is_used, seen.held_by) == (False, f"process {os.getpid()} (model m)")
    for engine in (first, second):
        engine.inbox.put(Shutdown())
        engine.loop.run()
    third = Engine("fake:device=Card", settings=settings)
    assert third.of(ModelState)[-1].error is None
    third.inbox.put(Shutdown())
    third.loop.run()


def test_a_device_that_another_process_holds_is_left_to_it_where_there_is_one_more(tmp_path):
    """SPEC R6, R11: unless it was asked for by its name; what the model gets less of says who has it."""
    settings = EngineSettings(isolation="thread", cache_dir=tmp_path)
    cards = "fake:weights_mib=300,device=Mine+Theirs,device_mib=900+2000"
    with DeviceLease(["Theirs"], lease_folder()) as lease:
        lease.note("Theirs", "Fake Theirs", ["theirs"])
        engine = Engine(cards, settings=settings)
        info = engine.of(ModelState)[-1].info
        assert (info.label, info.degraded) == ("fake · Mine", [])
        large = cards.replace("300", "600")
        engine.inbox.put(LoadModel(ModelSpec(id="n", path=large)))
        engine.until(lambda: engine.of(ModelState)[-1].model == "n" and engine.of(ModelState)[-1].info)
        who = f"process {os.getpid()} (model theirs)"
        assert engine.of(ModelState)[-1].info.degraded[-1] == f"without Theirs, which {who} holds"
        by_name = ModelSpec(id="o", path=cards, placement=PlacementSpec(device=("Theirs",)))
        engine.inbox.put(LoadModel(by_name))
        engine.until(lambda: engine.of(ModelState)[-1].error)
        assert engine.of(ModelState)[-1].error.code == "device_busy"
        whole = ModelSpec(id="p", path=large, placement=PlacementSpec(gpu_layers="all"))
        engine.inbox.put(LoadModel(whole))
        engine.until(lambda: engine.of(ModelState)[-1].model == "p" and engine.of(ModelState)[-1].error)
        error = engine.of(ModelState)[-1].error
        assert (error.code, error.details["device"]) == ("insufficient_memory", "Mine")
        assert error.message.endswith(f"; that is without Theirs, which {who} holds")
    engine.inbox.put(LoadModel(ModelSpec(id="n", path=large)))  # as before, and the card is free now
    engine.until(lambda: (told := engine.of(ModelState)[-1]).info and told.info.label == "fake · Theirs")
    assert engine.of(ModelState)[-1].info.degraded == []
    engine.inbox.put(Shutdown())
    engine.loop.run()


def test_two_engines_share_a_device_where_the_settings_say_so(tmp_path):
    """SPEC R6: each sees what the other holds; no lock is there."""
    settings = EngineSettings(isolation="thread", cache_dir=tmp_path, device_lease=False)
    first, second = (Engine("fake:device=Shared", settings=settings) for _ in range(2))
    assert [engine.of(ModelState)[-1].state for engine in (first, second)] == ["ready", "ready"]
    (shown,) = first.loop._report.status(0).devices
    assert (shown.own, shown.others, shown.held_by) == (shown.others, shown.own, "")
    assert shown.own > 0
    assert not lease_folder().exists()
    for engine in (first, second):
        engine.inbox.put(Shutdown())
        engine.loop.run()


def test_shutdown_without_time_cancels_and_says_goodbye(engine):
    """L4."""
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400)
    engine.until(lambda: engine.tokens("r"))
    engine.inbox.put(Shutdown())
    engine.loop.run()
    assert isinstance(engine.events[-1], Goodbye)
    assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.CANCELLED
    assert len(engine.of(Finished, "r")) == 1
    engine.loop = EngineLoop(
        engine.inbox, engine.events.extend, config_of(EngineSettings(isolation="thread"))
    )


def test_shutdown_with_time_lets_running_requests_finish_and_refuses_new_ones():
    """L4."""
    engine = Engine()
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=50)
    engine.until(lambda: engine.tokens("r"))
    engine.inbox.put(Shutdown(60.0))
    engine.submit("late", prompt=tuple(b"abc"))
    engine.loop.run()
    assert len(engine.tokens("r")) == 50
    assert engine.of(Failed, "late")[0].error.code == "not_ready"


def test_a_closed_inbox_ends_the_loop():
    """L4: the front is gone."""
    engine = Engine()
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400)
    engine.inbox.close()
    engine.loop.run()
    assert engine.of(Hello)
    assert isinstance(engine.events[-1], Goodbye)


def test_a_request_that_is_ended_to_relieve_a_full_pool_gets_its_terminal_event():
    """L6, Q12: the native pool is fuller than counted, and the one that may be parked asked to be ended."""
    engine = Engine("fake:eog_period=0,step_delay_s=0.002", n_ctx=512)
    backend = engine.loop._runners.find("m").backend
    for name, preempt in (("me", Preempt.PARK), ("job", Preempt.CANCEL)):
        fields = {"priority": Priority.BACKGROUND, "preempt": preempt, "max_tokens": 200}
        engine.submit(name, prompt=tuple(name.encode()), **fields)
    engine.until(lambda: len(engine.tokens("me")) > 3 and len(engine.tokens("job")) > 3)
    compute, failures = backend.launch, iter([PoolFullError("no cells", num_tokens=1, num_cells=1)])

    def launch(plan):
        for error in failures:
            raise error
        return compute(plan)

    backend.launch = launch
    engine.run("job", "me")
    assert engine.of(Delta, "job")[-1].finish_reason is FinishReason.PREEMPTED
    assert engine.tokens("me") == greedy(b"me", 200)
    assert len(engine.of((Finished, Failed), "job")) == len(engine.of((Finished, Failed), "me")) == 1


def test_deadlines_pass_in_a_model_that_gets_no_turns():
    """Q6, Q13: another model's people are more urgent; waiting and paused requests still end in time."""
    engine = Engine("fake:eog_period=0,step_delay_s=0.01", n_ctx=4096)
    engine.inbox.put(LoadModel(ModelSpec(id="other", path="fake:eog_period=0", n_ctx=512)))
    engine.until(lambda: [e.model for e in engine.of(ModelState) if e.state == "ready"] == ["m", "other"])
    engine.submit("me", prompt=tuple(b"me"), max_tokens=2000)
    engine.until(lambda: engine.tokens("me"))
    engine.submit("late", model="other", prompt=tuple(b"x"), priority=Priority.BACKGROUND, timeout_s=0.1)
    engine.run("late")
    assert engine.of(Failed, "late")[0].error.code == "request_timeout"
    assert not engine.of(Finished, "me")


def test_a_prompt_is_embedded_where_the_pool_is_full_of_what_is_only_kept():
    """D8, Q12: its last token is the backend's to add, and finds a cell."""
    engine = Engine(n_ctx=1024)
    engine.submit("kept", prompt=tuple(65 + at % 20 for at in range(511)), max_tokens=2)
    engine.run("kept")
    prompt = tuple(66 + at % 25 for at in range(513))
    engine.submit("e", prompt=prompt, max_tokens=0, state_output=StateOutput.EMBED, cache=False)
    engine.run("e")
    assert engine.of(Failed) == []
    assert engine.of(StateReady, "e")[0].num_tokens == 513


def test_work_that_no_step_can_be_planned_for_ends_its_head_with_every_counter(engine, monkeypatch, caplog):
    """Q15: said in the log and to the client, and counted; the next request is served."""
    runner = engine.loop._runners.find("m")
    monkeypatch.setattr(runner.scheduler, "plan", lambda: None)
    engine.submit("r", prompt=tuple(b"hello"))
    with caplog.at_level(logging.ERROR, "stoker.engine.runners.slots"):
        engine.run("r")
    error = engine.of(Failed, "r")[0].error
    assert error.code == "scheduler_stalled"
    counters = runner.stats()
    assert counters["num_stalls_total"] == 1
    told = "".join(record.getMessage() for record in caplog.records)
    assert "no step can be planned" in told
    assert all(name in told for name in counters)
    monkeypatch.undo()
    engine.submit("s", prompt=tuple(b"hello"))
    engine.run("s")
    assert engine.tokens("s") == greedy(b"hello", 8)


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_small_machine_gives_freed_memory_back_after_each_burst_of_work(engine, monkeypatch, *, is_eager):
    """M2: once when nothing is left to do, and again after the next request; larger machines keep it."""
    trims = []
    monkeypatch.setattr("stoker.engine.loop.malloc.trim", lambda: trims.append(1))
    engine.loop._cleans_eagerly = is_eager
    for number in (1, 2):
        engine.submit(f"r{number}", prompt=tuple(b"hello"))
        engine.run(f"r{number}")
        engine.until(lambda: engine.loop._is_clean)
        for _ in range(3):
            engine.loop.turn(0)
        assert len(trims) == number * is_eager


def test_between_short_steps_only_what_the_next_one_needs_is_done(engine, monkeypatch):
    """Q26: what is due by time alone is looked at now and then, and at once where a request comes or ends."""
    loop, tended = engine.loop, []
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400)
    engine.until(lambda: len(engine.tokens("r")) > 3)
    now, tend = [loop._clock.now() + TEND_EVERY_S], loop._residency.tend
    monkeypatch.setattr(loop._clock, "now", lambda: now[0])
    monkeypatch.setattr(loop._residency, "tend", lambda at: (tended.append(at), tend(at))[1])
    loop.turn(0)
    tended.clear()
    for _ in range(20):
        loop.turn(0)
    assert not tended
    now[0] += TEND_EVERY_S
    loop.turn(0)
    assert tended == now
    engine.submit("s", prompt=tuple(b"abd"), max_tokens=4)
    loop.turn(0)
    assert len(tended) == 2, "a request has come"
    engine.run("s")
    loop.turn(0)
    assert tended[-1] == now[0]
    assert engine.of(Finished, "s")


def test_a_deadline_passes_beside_steps_that_take_no_time(engine, monkeypatch):
    """Q6, Q26."""
    loop, now = engine.loop, [engine.loop._clock.now()]
    monkeypatch.setattr(loop._clock, "now", lambda: now[0])
    engine.submit("r", prompt=tuple(b"abc"), max_tokens=400, timeout_s=5.0)
    engine.until(lambda: len(engine.tokens("r")) > 3)
    now[0] += 6.0
    engine.run("r")
    assert engine.of(Failed, "r")[0].error.code == "request_timeout"


@pytest.mark.parametrize("others", ["come", "do not come"])
def test_prompts_that_find_a_device_idle_wait_a_little_for_those_being_prepared(monkeypatch, others):
    """SPEC Q22: one step for all of a crowd; begun with the first alone it would have the others wait."""
    monkeypatch.setattr(loop, "GATHER_S", 10.0)
    begun, goes_on, real = threading.Event(), threading.Event(), preparations.prepare

    def prepared(submit, *others):
        if submit.request_id == "late":
            begun.set()
            goes_on.wait(60.0)
        return real(submit, *others)

    monkeypatch.setattr(preparations, "prepare", prepared)
    engine = Engine("fake:eog_period=0,is_async=1")
    runner = engine.loop._runners.find("m")
    runner.gathers = True
    plans, launch = [], runner.backend.launch
    monkeypatch.setattr(runner.backend, "launch", lambda plan: plans.append(plan) or launch(plan))
    for name in ("first", "late"):
        engine.submit(name, prompt=f"{name} one")
    engine.until(lambda: runner.scheduler.queue and begun.is_set())
    engine.loop.turn(0.0)
    assert not plans
    if others == "come":
        goes_on.set()
    else:
        real_now = engine.loop._clock.now
        monkeypatch.setattr(engine.loop._clock, "now", lambda: real_now() + 10.0)
        engine.until(lambda: plans)
        assert engine.loop._preparations.num_quick(runner.prep), "the others came or were given up"
        goes_on.set()
    engine.run("first", "late")
    assert len(plans[0].items) == (2 if others == "come" else 1)
    engine.inbox.put(Shutdown())
    engine.loop.run()


class Coming:
    """An engine whose model gathers and has a reader, while others are prepared, or not until `goes_on`.

    Attributes:
        plans: of its steps, from the time on when `ready` were prepared.
        shift_s: what its clock, which stands still, is ahead.

    Args:
        ready, coming: names of the others.
        priority: of all these.
        on_another: a device of another model, which has a reader as well.
    """

    def __init__(self, monkeypatch, ready, coming, *, priority=Priority.INTERACTIVE, on_another=None):
        self.goes_on, self.shift_s = threading.Event(), 0.0
        begun, real = threading.Event(), preparations.prepare

        def prepared(submit, *others):
            if submit.request_id in coming:
                begun.set()
                self.goes_on.wait(60.0)
            return real(submit, *others)

        monkeypatch.setattr(preparations, "prepare", prepared)
        monkeypatch.setattr(loop, "COMING_S", 20.0)
        self.engine = engine = Engine("fake:eog_period=0,is_async=1,device=left", num_slots=16)
        if on_another is not None:
            path = f"fake:eog_period=0,is_async=1,device={on_another}"
            engine.put(LoadModel(ModelSpec(id="n", path=path, n_ctx=512)))
            engine.until(lambda: engine.loop._runners.find("n"))
            engine.submit("beside", prompt="beside one", max_tokens=400, model="n")
            engine.until(lambda: engine.tokens("beside"))
        real_now, stands = engine.loop._clock.now, []
        monkeypatch.setattr(
            engine.loop._clock, "now", lambda: (stands[0] if stands else real_now()) + self.shift_s
        )
        self.runner = runner = engine.loop._runners.find("m")
        engine.submit("reader", prompt="reader one", max_tokens=400)
        engine.until(lambda: engine.tokens("reader"))
        stands.append(real_now())
        runner.gathers = True
        self.plans, launch = [], runner.backend.launch
        monkeypatch.setattr(runner.backend, "launch", lambda plan: self.plans.append(plan) or launch(plan))
        for name in (*ready, *coming):
            engine.submit(name, prompt=f"{name} one", priority=priority)
        for _ in range(600):
            if len(runner.scheduler.queue) == len(ready) and begun.is_set():
                break
            for item in engine.inbox.take(0.1):
                engine.loop._handle(item)
        else:
            pytest.fail(f"{ready} were not prepared")
        self.plans.clear()
        self.names = [*ready, *coming]

    def num_prompts(self):
        """Of the first step."""
        return sum(len(item.tokens) > 1 for item in self.plans[0].items)

    def run(self):
        """To the end of all."""
        self.goes_on.set()
        self.engine.run("reader", *self.names)
        self.engine.inbox.put(Shutdown())
        self.engine.loop.run()


def test_prompts_that_came_during_a_launch_wait_for_those_that_did_too(monkeypatch):
    """SPEC Q22: a step for the few that were ready was as long as one for all of a crowd."""
    coming = Coming(monkeypatch, ["first"], ["second", "third"])
    engine, before = coming.engine, len(coming.engine.tokens("reader"))
    engine.loop.turn(0.0)
    assert not coming.plans
    assert len(engine.tokens("reader")) == before + 1, "the reader has the token of the step in flight"
    assert 19.0 < engine.loop._wait_s() <= 20.0
    coming.goes_on.set()
    engine.until(lambda: coming.plans)
    assert coming.num_prompts() == 3
    coming.run()


def test_they_do_not_wait_for_ever(monkeypatch):
    """SPEC Q22: once, and then nothing that is still being prepared holds a step up."""
    coming = Coming(monkeypatch, ["first"], ["second"])
    coming.shift_s = 19.0
    coming.engine.loop.turn(0.0)
    assert not coming.plans
    coming.shift_s = 20.0
    coming.engine.until(lambda: coming.plans)
    assert coming.num_prompts() == 1
    coming.plans.clear()
    coming.engine.until(lambda: len(coming.plans) > 5)
    assert coming.engine.loop._preparations.num_quick(coming.runner.prep) == 1
    coming.run()


@pytest.mark.parametrize(("num_ready", "waits"), [(COMING_SHARE, True), (COMING_SHARE + 1, False)])
def test_many_that_are_ready_do_not_wait_for_one(monkeypatch, num_ready, waits):
    """SPEC Q22: it finds the next step."""
    coming = Coming(monkeypatch, [f"r{at}" for at in range(num_ready)], ["late"])
    coming.engine.loop.turn(0.0)
    assert (not coming.plans) == waits
    coming.run()


@pytest.mark.parametrize("why", ["a step has not begun them", "background", "held back", "a question"])
def test_no_reader_waits_for_others_without_a_prompt_that_gains_by_it(monkeypatch, why):
    """SPEC Q22: what waits for reasons of its own, jobs, and what comes and is no prompt."""
    priority = Priority.BACKGROUND if why == "background" else Priority.INTERACTIVE
    coming = Coming(monkeypatch, ["first"], ["second"], priority=priority)
    engine = coming.engine
    if why == "a step has not begun them":
        coming.runner.num_new = 0
    elif why == "held back":
        engine.loop._runners.hold_back(Throttle(holds_background=True))
    elif why == "a question":
        (job,) = engine.loop._preparations._jobs[-1:]
        job.is_request = False
    engine.loop.turn(0.0)
    assert coming.plans
    coming.run()


def test_a_question_about_text_is_not_waited_for(monkeypatch):
    """SPEC Q22: it becomes no prompt."""
    goes_on, real = threading.Event(), preparations.answer
    monkeypatch.setattr(preparations, "answer", lambda *given: goes_on.wait(60.0) and real(*given))
    engine = Engine("fake:eog_period=0,is_async=1")
    prep = engine.loop._runners.find("m").prep
    engine.put(Tokenize(call_id=1, model="m", text="a text"))
    engine.until(lambda: any(job.is_open for job in engine.loop._preparations._jobs))
    assert engine.loop._preparations.num_quick(prep) == 0
    goes_on.set()
    engine.until(lambda: engine.of(Reply))
    engine.inbox.put(Shutdown())
    engine.loop.run()


@pytest.mark.long
def test_another_model_on_a_device_of_its_own_makes_the_wait_no_longer(monkeypatch):
    """SPEC Q22: each waits from its own last turn on, and its readers have what was computed meanwhile."""
    coming = Coming(monkeypatch, ["first"], ["second"], on_another="right")
    engine, before = coming.engine, len(coming.engine.tokens("reader"))
    for shift_s in (0.0, 10.0, 19.0):
        coming.shift_s, num_there = shift_s, len(engine.tokens("beside"))
        engine.until(lambda: len(engine.tokens("beside")) > num_there + 5)  # noqa: B023 - called at once
        assert not coming.plans
        assert len(engine.tokens("reader")) == before + 1
    coming.shift_s = 20.0
    engine.until(lambda: coming.plans, turns=5)
    coming.run()


def held(monkeypatch, lull_s, gather_s, num_slots=4):
    """An engine with a model that gathers, and the plans of its steps."""
    monkeypatch.setattr(loop, "LULL_S", lull_s)
    monkeypatch.setattr(loop, "GATHER_S", gather_s)
    engine = Engine("fake:eog_period=0,is_async=1", num_slots=num_slots)
    runner = engine.loop._runners.find("m")
    runner.gathers = True
    plans, launch = [], runner.backend.launch
    monkeypatch.setattr(runner.backend, "launch", lambda plan: plans.append(plan) or launch(plan))
    return engine, runner, plans


def arrive(engine, runner, name, age_s=0.0):
    """One more is prepared, which came so long ago, and no other is meanwhile."""
    count = len(runner.scheduler.queue)
    engine.submit(name, prompt=f"{name} one", age_s=age_s)
    engine.until(lambda: len(runner.scheduler.queue) > count)
    assert not engine.loop._preparations.num_quick(runner.prep)
    engine.loop.turn(0.0)


@pytest.mark.parametrize(("lull_s", "gather_s", "left_s"), [(60.0, 600.0, 60.0), (600.0, 60.0, 40.0)])
def test_one_more_is_waited_for_after_the_last_and_not_for_ever(monkeypatch, lull_s, gather_s, left_s):
    """SPEC Q22: a server submits the requests of a crowd one by one; meanwhile none is being prepared."""
    engine, runner, plans = held(monkeypatch, lull_s, gather_s)
    arrive(engine, runner, "first", age_s=20.0)
    arrive(engine, runner, "second")
    assert left_s - 10.0 < engine.loop._wait_s() <= left_s
    real_now = engine.loop._clock.now
    monkeypatch.setattr(engine.loop._clock, "now", lambda: real_now() + left_s - 10.0)
    engine.loop.turn(0.0)
    assert not plans
    monkeypatch.setattr(engine.loop._clock, "now", lambda: real_now() + left_s)
    engine.until(lambda: plans)
    assert len(plans[0].items) == 2
    engine.run("first", "second")
    engine.inbox.put(Shutdown())
    engine.loop.run()


def test_nobody_is_waited_for_who_would_find_no_slot(monkeypatch):
    """SPEC Q22."""
    engine, runner, plans = held(monkeypatch, 60.0, 60.0, num_slots=2)
    arrive(engine, runner, "first")
    assert not plans
    engine.submit("second", prompt="second one")
    engine.until(lambda: plans or len(runner.scheduler.queue) == 2)
    assert [len(plan.items) for plan in plans[:1]] == [2]
    engine.run("first", "second")
    engine.inbox.put(Shutdown())
    engine.loop.run()


def test_prompts_that_wait_for_others_keep_no_other_model_waiting(monkeypatch):
    """SPEC Q22."""
    monkeypatch.setattr(loop, "GATHER_S", 60.0)
    goes_on, real = threading.Event(), preparations.prepare

    def prepared(submit, *others):
        if submit.request_id == "late":
            goes_on.wait(60.0)
        return real(submit, *others)

    monkeypatch.setattr(preparations, "prepare", prepared)
    engine = Engine("fake:eog_period=0,is_async=1,device=left")
    engine.put(LoadModel(ModelSpec(id="n", path="fake:eog_period=0,is_async=1,device=right", n_ctx=512)))
    engine.until(lambda: engine.loop._runners.find("n"))
    engine.loop._runners.find("m").gathers = True
    for name in ("first", "late"):
        engine.submit(name, prompt=f"{name} one")
    engine.until(lambda: engine.loop._runners.find("m").scheduler.queue)
    engine.submit("of another model", prompt="one", model="n")
    engine.run("of another model")
    assert not engine.of(Delta, "first")
    goes_on.set()
    engine.run("first", "late")
    engine.inbox.put(Shutdown())
    engine.loop.run()
