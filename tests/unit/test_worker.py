"""Worker processes: work that does not end is ended, what is lost is replaced, nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoker import Runtime
from stoker.chat.conversation import Conversation, Layout
from stoker.client.worker.jobs import RenderChat, TranslateGrammar
from stoker.client.worker.pool import Bounds, WorkerPool, WorkerProcess
from stoker.errors import (
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    UnsupportedError,
    WorkerLostError,
    WorkLimitError,
)
from stoker.grammar.source import native_grammar
from stoker.ipc.constraint import Constraint, ConstraintKind, NativeGrammar
from stoker.models.chat_templates import CHATML

ENDLESS = (
    "{% set x = 'a ' * 1000000 %}{% for i in range(99999) %}{% if x.split(' ') %}{% endif %}{% endfor %}"
)
GREEDY = (
    "{% set n = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set n.x = n.x + ['a' * 999999 ~ i] %}{% endfor %}"
)
PATIENT = Bounds(limit_s=60.0)
BRIEF = Bounds(limit_s=0.2)
LIMIT_S = 60.0

Pools = Callable[..., WorkerPool]


def chat(template: str = CHATML, model: str = "m", **args: object) -> RenderChat:
    """A short conversation for that template."""
    messages = [{"role": "user", "content": "Hi"}]
    return RenderChat(model=model, conversation=Conversation(messages=messages, template=template, args=args))


def until(holds: Callable[[], bool]) -> None:
    """Wait for what happens in another thread or process."""
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def pools() -> Iterator[Pools]:
    """Makes pools, which are closed behind the test."""
    made: list[WorkerPool] = []

    def make(bounds: Bounds = PATIENT) -> WorkerPool:
        made.append(WorkerPool(bounds))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_a_template_that_does_not_end_is_ended_and_others_are_rendered_meanwhile(pools: Pools) -> None:
    """S9: it costs its own request an error that names the limit, and the others nothing."""
    patient = pools()
    hanging = patient.submit(chat(ENDLESS), Layout)
    assert patient.submit(chat(), Layout).result().prompt.endswith("<|im_start|>assistant\n")
    assert not hanging.done()
    brief = pools(BRIEF)
    with pytest.raises(WorkLimitError, match=r"the chat template of m did not end within 0\.2 s") as caught:
        brief.submit(chat(ENDLESS), Layout).result()
    assert (caught.value.param, caught.value.details) == ("messages", {"limit_s": 0.2})
    assert "Hi" in pools().submit(chat(), Layout).result().prompt


def test_what_takes_too_much_memory_is_ended(pools: Pools) -> None:
    """S9: the bound is the system's; the process is as good as new behind it, and this one has not grown."""
    pool = pools(Bounds(limit_s=60.0, max_bytes=64 * 1024**2))
    pool.submit(chat(), Layout).result()
    before = psutil.Process().memory_info().rss
    with pytest.raises(WorkLimitError, match="needs more than 64 MiB of memory") as caught:
        pool.submit(chat(GREEDY), Layout).result()
    assert (caught.value.param, caught.value.details) == ("messages", {"limit_bytes": 64 * 1024**2})
    assert psutil.Process().memory_info().rss - before < 32 * 1024**2
    assert "Hi" in pool.submit(chat(), Layout).result().prompt
    assert all(psutil.Process(pid).memory_info().rss < 64 * 1024**2 for pid in pool.pids())


def test_a_process_that_was_killed_is_replaced_and_its_job_done_again(pools: Pools) -> None:
    """Whether it was idle or at work: whoever waits for the answer does not hear of it."""
    pool = pools()
    pool.submit(chat(), Layout).result()
    (first,) = pool.pids()
    os.kill(first, signal.SIGKILL)
    assert "Hi" in pool.submit(chat(), Layout).result().prompt
    (second,) = pool.pids()
    assert second != first


def test_a_job_whose_process_dies_twice_is_an_error_and_costs_only_itself(pools: Pools) -> None:
    """What kills every process that it is given to is not tried for ever."""
    pool = pools()
    job = pool.submit(chat(ENDLESS), Layout)
    killed: set[int] = set()
    for _ in range(2):
        until(lambda: bool(set(pool.pids()) - killed))
        (pid,) = set(pool.pids()) - killed
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    with pytest.raises(WorkerLostError, match="ended 2 times before it answered"):
        job.result(LIMIT_S)
    assert "Hi" in pool.submit(chat(), Layout).result().prompt
    assert not any(psutil.pid_exists(pid) for pid in killed)


def test_a_group_takes_its_places_and_no_more(pools: Pools) -> None:
    """S9: whoever sends many that do not end delays nobody else."""
    pool = pools(Bounds(limit_s=60.0, max_of_group=2, num_places=3))
    slow = [pool.submit(chat(ENDLESS), Layout, group="one") for _ in range(5)]
    assert "Hi" in pool.submit(chat(), Layout, group="other").result().prompt
    assert pool.stats() == {"places": 3, "running": 2, "waiting": 3}
    assert not any(job.done() for job in slow)


def test_the_line_of_a_group_is_bounded(pools: Pools) -> None:
    """The next one is refused at once, with a hint when to come again; who leaves makes room."""
    pool = pools(Bounds(limit_s=60.0, max_of_group=1, max_waiting=2))
    running = pool.submit(chat(ENDLESS), Layout)
    until(running.running)
    waiting = [pool.submit(chat(), Layout) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait") as caught:
        pool.submit(chat(), Layout)
    assert caught.value.retry_after_s
    assert waiting[0].cancel()
    pool.submit(chat(), Layout)
    pool.submit(chat(), Layout, group="other").result(LIMIT_S)


def test_a_second_process_is_started_only_when_the_first_is_busy(pools: Pools) -> None:
    """Ordinary chats, one after the other, take one."""
    pool = pools()
    pool.warm()
    for _ in range(5):
        pool.submit(chat(), Layout).result()
    assert len(pool.pids()) == 1


def test_a_process_without_work_is_ended(pools: Pools) -> None:
    """Its memory is free then; the next job starts another. Other tests may have children of their own."""
    before = psutil.Process().children()
    pool = pools(Bounds(limit_s=60.0, idle_s=0.01))
    pool.submit(chat(), Layout).result()
    children = set(psutil.Process().children()) - set(before)
    until(lambda: not pool.pids())
    until(lambda: not any(child.is_running() for child in children))
    assert "Hi" in pool.submit(chat(), Layout).result().prompt


def test_at_rest_no_process_is_kept_and_the_next_job_starts_one(pools: Pools) -> None:
    """L2: what a suspend leaves in memory is the front alone; a job that runs comes to its end."""
    pool = pools(PATIENT)
    pool.submit(chat(), Layout).result()
    (pid,) = pool.pids()
    pool.release()
    until(lambda: not psutil.pid_exists(pid))
    assert pool.submit(chat(), Layout).result().prompt
    assert pool.pids() != [pid]


def test_closing_ends_every_process_and_every_job() -> None:
    """Nothing is left: no process, no zombie, no descriptor, no thread, nobody who waits."""
    own = psutil.Process()
    gc.collect()  # what other tests left behind is closed before it is counted, or never
    num_fds, pids = own.num_fds(), {child.pid for child in own.children()}
    threads = set(threading.enumerate())  # of other tests too
    pool = WorkerPool(Bounds(limit_s=60.0, max_of_group=1))
    jobs = [pool.submit(chat(ENDLESS), Layout, group=group) for group in ("a", "a", "b")]
    until(lambda: jobs[0].running() and jobs[2].running() and len(pool.pids()) == 2)
    pool.close()
    pool.close()
    for job in jobs:
        with pytest.raises(NotReadyError, match="closed"):
            job.result(LIMIT_S)
    with pytest.raises(NotReadyError, match="closed"):
        pool.submit(chat(), Layout).result()
    assert {child.pid for child in own.children()} == pids
    assert own.num_fds() <= num_fds
    later = set(threading.enumerate()) - threads
    assert not [thread for thread in later if thread.name == "stoker-worker"]


def test_a_process_whose_front_is_gone_ends_by_itself() -> None:
    """It reads the end of its socket."""
    process = WorkerProcess(60.0, 2**29)
    child = psutil.Process(process.pid)
    process._connection.shutdown(socket.SHUT_RDWR)
    assert child.wait(LIMIT_S) == 0
    process.end()


@pytest.mark.long
@pytest.mark.parametrize("name", ["socket.socketpair", "subprocess.Popen"])
def test_without_a_free_descriptor_a_job_is_refused_and_the_next_is_done(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """L9: an error that may pass, nothing leaks, and nothing is broken for good."""
    pool, own = pools(), psutil.Process()
    pool.submit(chat(), Layout).result()
    gc.collect()  # what other tests left behind
    num_fds = own.num_fds()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as without:
        without.setattr(name, refuse)
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(NotReadyError, match="Too many open files") as caught:
            pool.submit(chat(), Layout).result()
        assert caught.value.retry_after_s
    assert "Hi" in pool.submit(chat(), Layout).result().prompt
    assert own.num_fds() <= num_fds


def test_without_a_thread_a_job_is_refused(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9: threads run out as descriptors do."""
    pool = pools()

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        pool.warm()
        with pytest.raises(NotReadyError, match="can't start new thread"):
            pool.submit(chat(), Layout)
        assert pool.stats() == {"places": 0, "running": 0, "waiting": 0}
    assert "Hi" in pool.submit(chat(), Layout).result().prompt


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_small_and_inherits_nothing(pools: Pools) -> None:
    """It loads neither numpy nor what serves or computes, and has one socket beside its three streams."""
    pool = pools()
    pool.submit(chat(), Layout).result()
    pool.submit(TranslateGrammar(constraint=gbnf('root ::= "a" root | "b"')), NativeGrammar).result()
    (pid,) = pool.pids()
    mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    assert not [name for name in ("numpy", "pydantic", "llama", "llguidance", "PIL") if name in mapped]
    assert len(list(Path(f"/proc/{pid}/fd").iterdir())) == 4
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    assert "Max core file size        0 " in limits
    assert os.getsid(pid) == pid


async def test_an_event_loop_goes_on_while_a_template_does_not_end(pools: Pools) -> None:
    """S9: the wait is not the loop's."""
    pool = pools()
    hanging = asyncio.wrap_future(pool.submit(chat(ENDLESS), Layout))
    assert "Hi" in (await asyncio.wrap_future(pool.submit(chat(), Layout))).prompt
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


def test_values_travel_as_they_are(pools: Pools) -> None:
    """Integers of any size, floats, nothing and nested lists; what is no JSON is refused by name."""
    pool = pools()
    source = "{{ value | tojson }}"
    value = {"a": [10**40, 1.5, None, True, "é"], "b": {}}
    expected = '{"a": [10000000000000000000000000000000000000000, 1.5, null, true, "é"], "b": {}}'
    assert pool.submit(chat(source, value=value), Layout).result().prompt == expected
    for strange in (object(), "\ud800", [10**40, object()]):
        with pytest.raises(InvalidRequestError, match="takes JSON values only") as caught:
            pool.submit(chat(source, value=strange), Layout).result()
        assert caught.value.param == "messages"


def test_errors_keep_their_class_and_their_place(pools: Pools) -> None:
    """What a template or a grammar is refused for reads as if it were done here."""
    pool = pools()
    with pytest.raises(UnsupportedError, match="the model's chat template is broken"):
        pool.submit(chat("{% for %}"), Layout).result()
    with pytest.raises(InvalidRequestError, match="refused the messages: no") as refused:
        pool.submit(chat("{{ raise_exception('no') }}"), Layout).result()
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=r"there is no rule b \(line 2, column 10\)") as unknown:
        pool.submit(TranslateGrammar(constraint=gbnf('# one\nroot ::= b "a"')), NativeGrammar).result()
    assert (unknown.value.param, unknown.value.details) == ("grammar", {"line": 2, "column": 10})


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_grammar_is_translated_as_it_would_be_here(pools: Pools, kind: ConstraintKind) -> None:
    """Every kind of constraint, to the letter."""
    sources = {
        ConstraintKind.JSON_SCHEMA: '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        ConstraintKind.REGEX: "[a-z]{3}",
        ConstraintKind.LARK: 'start: "a" | start "b"',
        ConstraintKind.GBNF: 'root ::= "a" root | [b-d]+',
        ConstraintKind.BNF: "<s> ::= a <s> | b",
    }
    choices = ("x", "xy") if kind is ConstraintKind.CHOICE else ()
    constraint = Constraint(kind=kind, source=sources.get(kind, ""), choices=choices)
    made = pools().submit(TranslateGrammar(constraint=constraint), NativeGrammar).result()
    assert made == native_grammar(constraint)


async def test_a_model_whose_template_does_not_end_generates_and_cannot_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S9: it is loaded and completes texts; a chat says that it is the template."""
    monkeypatch.setattr("stoker.backends.fake.vocabulary.FakeVocabulary.chat_template", ENDLESS)
    monkeypatch.setattr("stoker.client.client.WorkerPool", lambda: WorkerPool(BRIEF))
    async with Runtime("fake:", isolation="thread") as runtime:
        with pytest.raises(WorkLimitError, match="the chat template of fake did not end"):
            await anext(runtime.chat([{"role": "user", "content": "Hi"}]))
        with pytest.raises(WorkLimitError):
            runtime.render_chat([{"role": "user", "content": "Hi"}])
        deltas = [delta async for delta in runtime.generate("Hi", max_tokens=3)]
        assert deltas[-1].finish_reason is not None


def gbnf(source: str) -> Constraint:
    """A grammar in that notation."""
    return Constraint(kind=ConstraintKind.GBNF, source=source)


@pytest.mark.long
def test_a_job_too_large_to_be_sent_is_refused(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front keeps its memory as well."""
    monkeypatch.setattr("stoker.client.worker.pool.MAX_BODY_BYTES", 10_000)
    with pytest.raises(WorkLimitError, match="too many, at most 10000 are taken"):
        pools().submit(chat("x" * 10_000), Layout).result()
