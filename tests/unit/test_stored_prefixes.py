"""What was computed outlives requests, cells and the engine itself; a broken disk costs nobody an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import EngineSettings, FinishReason, GenerateRequest, Runtime, Sampling
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.cache.disk.files import FOLDER_NAME, SUFFIX, PrefixFolder
from stoker.cache.disk.tier import DiskFound, Remove
from stoker.cache.entry import Entry
from stoker.cache.prefix_cache import MAX_ENTRIES, CacheLimits
from stoker.cache.radix import key_of
from stoker.cache.store import PrefixStore
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox
from stoker.engine.loop import EngineLoop
from stoker.ipc.commands import LoadModel, Shutdown, Submit, UnloadModel
from stoker.ipc.events import Delta, Finished, ModelState, PrefillProgress
from stoker.ipc.model import CacheMode, ModelSpec
from stoker.ipc.request import Priority
from stoker.ipc.status import CacheStatus

FAKE = "fake:eog_period=0"
RECURRENT = f"{FAKE},recurrent=1"
PROMPT = bytes(97 + at * 7 % 26 for at in range(200)).decode()
TOKENS = tuple(PROMPT.encode())
WAIT_S = 20.0
GREEDY = Sampling(temperature=0.0)
Both = pytest.mark.parametrize("path", [FAKE, RECURRENT], ids=["decoder", "recurrent"])


def runtime_on(folder: Path, path: str = FAKE, **fields: Any) -> Runtime:
    """A runtime with its cache there; nothing of what it is doing is finished when it is closed."""
    given = {"isolation": "thread", "ctx_size": 2048, "slots": 4, "drain_s": 0.0, "cache_dir": folder}
    return Runtime(path, **given | fields)


async def ask(runtime: Runtime, prompt: str = PROMPT, **fields: Any) -> tuple[str, Any]:
    """Text and usage of a greedy answer."""
    given = {"prompt": tuple(prompt.encode()), "max_tokens": 4, "sampling": GREEDY}
    request = GenerateRequest(**given | fields)
    text, usage = "", None
    async for event in runtime.stream(request):
        if isinstance(event, Delta):
            text += event.text
        if isinstance(event, Finished):
            usage = event.usage
    return text, usage


async def status_of(runtime: Runtime) -> CacheStatus:
    """The cache's figures."""
    return (await runtime.status()).engine.cache


async def until(runtime: Runtime, is_so: Any) -> CacheStatus:
    """The figures once they are so."""
    async with asyncio.timeout(WAIT_S):
        while not is_so(status := await status_of(runtime)):  # noqa: ASYNC110 - it tells only who asks
            await asyncio.sleep(0.01)
    return status


def files_in(folder: Path) -> list[Path]:
    """Prefix files of a cache folder."""
    return sorted((folder / FOLDER_NAME).glob(f"*{SUFFIX}"))


def text_alone(prompt: str, num_tokens: int) -> str:
    """What the model says after it, computed directly."""
    backend = FakeBackend(num_cells=4096, n_batch=4096, faults=FakeFaults(eog_period=0))
    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        start = backend.length(0)
        row = backend.launch(BatchPlan((PlanItem(0, start, tuple(tokens[start:]), 1),))).rows()[0]
        tokens.append(int(np.argmax(row[:256])))
    return bytes(tokens[len(prompt) :]).decode()


@Both
async def test_what_was_computed_is_there_after_a_restart(tmp_path: Path, path: str) -> None:
    """C9: the end of the engine saves what is only in cells; the next one reads it, and says the same."""
    async with runtime_on(tmp_path, path) as runtime:
        first, usage = await ask(runtime)
        assert (usage.cached_tokens, usage.cache_source) == (0, None)
    assert files_in(tmp_path)
    async with runtime_on(tmp_path, path) as runtime:
        status = await until(runtime, lambda status: status.num_entries)
        assert (status.num_ram, status.num_disk, status.num_unsaved) == (0, status.num_entries, 0)
        again, usage = await ask(runtime)
        assert (usage.cached_tokens, usage.cache_source) == (len(PROMPT) - 1, "disk")
        assert first == again == text_alone(PROMPT, 4)
        counters = (await runtime.status()).engine.counters
        assert counters["cached_tokens_disk_total"] == len(PROMPT) - 1
        assert counters["prompt_tokens_computed_total"] == 1
        _, usage = await ask(runtime, PROMPT + "and more")
        if "recurrent" in path:
            assert (usage.cached_tokens, usage.cache_source) == (len(PROMPT) - 1, "ram")
        else:
            assert (usage.cached_tokens, usage.cache_source) == (len(PROMPT), "live")


async def finish_by_stop(runtime: Runtime) -> None:
    """A stop text ends it."""
    stop = text_alone(PROMPT, 8)[3:6]
    request = GenerateRequest(prompt=TOKENS, stop=(stop,), sampling=GREEDY)
    events = [event async for event in runtime.stream(request)]
    assert [e.finish_reason for e in events if isinstance(e, Delta)][-1] is FinishReason.STOP


async def finish_by_length(runtime: Runtime) -> None:
    """Its budget is spent."""
    await ask(runtime, max_tokens=5)


async def leave(runtime: Runtime) -> None:
    """The client goes away."""
    request = GenerateRequest(prompt=TOKENS, sampling=GREEDY)
    async with aclosing(runtime.stream(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                break


async def cancel(runtime: Runtime) -> None:
    """It is ended by its id."""
    request = GenerateRequest(prompt=TOKENS, sampling=GREEDY)
    async for event in runtime.stream(request, "mine"):
        if isinstance(event, Delta) and event.finish_reason is None:
            await runtime.cancel("mine")
            break


async def close_meanwhile(runtime: Runtime) -> None:
    """The engine is closed under it."""
    request = GenerateRequest(prompt=TOKENS, sampling=GREEDY)
    async for event in runtime.stream(request, "mine"):
        if isinstance(event, Delta) and event.finish_reason is None:
            await runtime.close()


@Both
@pytest.mark.parametrize("finish", [finish_by_stop, finish_by_length, leave, cancel, close_meanwhile])
async def test_every_clean_end_saves_what_was_computed(tmp_path: Path, path: str, finish: Any) -> None:
    """C6: stop, length, disconnect, cancel, and the engine's own end."""
    slow = f"{path},step_delay_s=0.002"
    async with runtime_on(tmp_path, slow) as runtime:
        await finish(runtime)
    async with runtime_on(tmp_path, slow) as runtime:
        await until(runtime, lambda status: status.num_entries)
        text, usage = await ask(runtime)
        assert usage.cache_source == "disk"
        assert usage.cached_tokens == len(PROMPT) - 1
        assert text == text_alone(PROMPT, 4)


async def test_a_prompt_that_is_cancelled_half_way_is_not_computed_from_the_start_again(
    tmp_path: Path,
) -> None:
    """C6: what was computed of it is kept, here and over a restart."""
    prompt = PROMPT * 5
    path = f"{FAKE},step_delay_s=0.002"
    async with runtime_on(tmp_path, path, n_batch=64) as runtime:
        request = GenerateRequest(prompt=tuple(prompt.encode()), return_progress=True, sampling=GREEDY)
        async with aclosing(runtime.stream(request)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress) and event.processed >= 128:
                    break
    async with runtime_on(tmp_path, path) as runtime:
        await until(runtime, lambda status: status.num_entries)
        text, usage = await ask(runtime, prompt)
        assert usage.cached_tokens >= 128
        assert text == text_alone(prompt, 4)


async def test_it_is_written_a_while_after_and_before_the_end(tmp_path: Path) -> None:
    """C9: so that a crash loses little; nobody has to ask for anything."""
    async with runtime_on(tmp_path) as runtime:
        await ask(runtime)
        status = await until(runtime, lambda status: status.num_disk)
        assert (status.num_entries, status.num_ram, status.num_unsaved) == (1, 1, 0)
        assert [path.stat().st_size for path in files_in(tmp_path)] == [status.disk_bytes]
        assert status.ram_bytes > len(PROMPT)
        assert (status.ram_limit_bytes, status.disk_limit_bytes) == (2**30, 4 * 2**30)
        assert status.disk_problem == ""


@pytest.mark.parametrize(
    ("mode", "sources"),
    [
        ("off", [None, None]),
        ("live", ["live", None]),
        ("snapshot", ["ram", "disk"]),
        ("live+snapshot", ["live", "disk"]),
    ],
)
async def test_the_mode_says_what_is_kept(tmp_path: Path, mode: str, sources: list[str | None]) -> None:
    """C10: at the next request, and after a restart."""
    async with runtime_on(tmp_path, cache_mode=mode) as runtime:
        await ask(runtime)
        if "snapshot" in mode:
            await until(runtime, lambda status: status.num_ram)
        text, usage = await ask(runtime)
        assert usage.cache_source == sources[0]
        assert text == text_alone(PROMPT, 4)
    async with runtime_on(tmp_path, cache_mode=mode) as runtime:
        if "snapshot" in mode:
            await until(runtime, lambda status: status.num_entries)
        _, usage = await ask(runtime)
        assert usage.cache_source == sources[1]
    assert bool(files_in(tmp_path)) == ("snapshot" in mode)


async def test_a_request_that_shares_nothing_leaves_nothing(tmp_path: Path) -> None:
    """C1, C10: neither in memory nor on disk; a salt keeps its own to itself."""
    async with runtime_on(tmp_path) as runtime:
        await ask(runtime, cache=False)
        _, usage = await ask(runtime)
        assert usage.cached_tokens == 0
        _, usage = await ask(runtime, cache_salt="mine")
        assert usage.cached_tokens == 0
        _, usage = await ask(runtime, cache=False)
        assert usage.cached_tokens == 0
    assert len(files_in(tmp_path)) == 2
    assert not any(b"mine" in path.read_bytes() for path in files_in(tmp_path))
    async with runtime_on(tmp_path) as runtime:
        await until(runtime, lambda status: status.num_entries)
        for salt, source in (("other", None), ("mine", "disk")):
            assert (await ask(runtime, cache_salt=salt))[1].cache_source == source


async def test_two_engines_use_one_folder(tmp_path: Path) -> None:
    """C9: neither takes the other's files for damaged; a third finds what both have left."""
    other = PROMPT[::-1]
    async with runtime_on(tmp_path) as one, runtime_on(tmp_path) as two:
        for _ in range(3):
            (text, _), (reply, _) = await asyncio.gather(ask(one), ask(two, other))
            assert (text, reply) == (text_alone(PROMPT, 4), text_alone(other, 4))
    async with runtime_on(tmp_path) as runtime:
        await until(runtime, lambda status: status.num_entries == 2)
        for prompt in (PROMPT, other):
            assert (await ask(runtime, prompt))[1].cache_source == "disk"


async def test_a_file_that_another_engine_removed_costs_time_only(tmp_path: Path) -> None:
    """C9: and is no damage."""
    async with runtime_on(tmp_path) as runtime:
        await ask(runtime)
    async with runtime_on(tmp_path) as runtime:
        await until(runtime, lambda status: status.num_entries)
        for path in files_in(tmp_path):
            path.unlink()
        text, usage = await ask(runtime)
        assert (text, usage.cached_tokens) == (text_alone(PROMPT, 4), 0)
        assert (await runtime.status()).engine.counters["cache_damaged_total"] == 0


@pytest.mark.parametrize("kind", ["a file", "no rights"])
async def test_a_folder_that_cannot_be_used_is_a_warning_and_no_more(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C9, S: it serves, keeps in memory, and says why nothing is saved."""
    folder = tmp_path / "cache"
    if kind == "a file":
        folder.mkdir()
        (folder / FOLDER_NAME).write_text("mine")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        folder.mkdir(mode=0o500)
    with caplog.at_level(logging.WARNING, "stoker"):
        async with runtime_on(folder) as runtime:
            status = await until(runtime, lambda status: status.disk_problem)
            assert FOLDER_NAME in status.disk_problem
            await ask(runtime)
            text, usage = await ask(runtime)
            assert (text, usage.cache_source) == (text_alone(PROMPT, 4), "live")
    assert "prefixes are kept in memory only" in caplog.text


@Both
async def test_whatever_lies_in_the_folder_at_the_start_is_not_believed(tmp_path: Path, path: str) -> None:
    """C9: cut, flipped, empty, foreign, linked, of no size; the answers are right and what is bad is gone."""
    async with runtime_on(tmp_path, path) as runtime:
        await ask(runtime)
        await ask(runtime, PROMPT[::-1])
    folder, sound = tmp_path / FOLDER_NAME, files_in(tmp_path)
    whole = sound[0].read_bytes()
    for at, broken in enumerate([b"", whole[:40], whole[:-1], b"\xff" * 1000, whole[::-1], whole + b"x"]):
        (folder / f"{at:032x}{SUFFIX}").write_bytes(broken)
    (folder / f"{'e' * 32}{SUFFIX}").symlink_to(sound[0])
    (folder / f"{'d' * 32}{SUFFIX}").mkdir()
    os.mkfifo(folder / f"{'c' * 32}{SUFFIX}")
    (folder / "notes.txt").write_text("mine")
    for path_of in sound:
        data = bytearray(path_of.read_bytes())
        data[-3] ^= 1
        path_of.write_bytes(data)
    async with runtime_on(tmp_path, path) as runtime:
        await until(runtime, lambda status: status.num_entries or status.disk_problem)
        for prompt in (PROMPT, PROMPT[::-1]):
            text, usage = await ask(runtime, prompt)
            assert text == text_alone(prompt, 4)
            assert usage.cached_tokens == 0 or "recurrent" in path
        assert (await status_of(runtime)).disk_problem == ""
    assert (folder / "notes.txt").read_text() == "mine"


async def test_a_state_of_another_model_is_never_used(tmp_path: Path) -> None:
    """C1: the fingerprint stands between them, whatever their tokens."""
    async with runtime_on(tmp_path, "fake:eog_period=0") as runtime:
        await ask(runtime)
    async with runtime_on(tmp_path, "fake:eog_period=100000") as runtime:
        await until(runtime, lambda status: status.num_entries)
        _, usage = await ask(runtime)
        assert usage.cached_tokens == 0
    async with runtime_on(tmp_path, "fake:eog_period=0") as runtime:
        await until(runtime, lambda status: status.num_entries)
        assert (await ask(runtime))[1].cache_source == "disk"


class Engine:
    """A loop driven on this thread, on a folder of its own."""

    def __init__(self, folder: Path, path: str = FAKE, *, looks: bool = True, **settings: Any) -> None:
        self.events: list[Any] = []
        self.inbox = Inbox()
        self.loop = EngineLoop(
            self.inbox,
            self.events.extend,
            config_of(EngineSettings(isolation="thread", cache_dir=folder, **settings)),
        )
        if looks:
            self.loop._store.open()
        self.load(path)

    @property
    def cache(self) -> Any:
        """Its prefix cache."""
        return self.loop._store.cache

    def load(self, path: str = FAKE) -> None:
        """Load the model, or load it again."""
        count = len(self.states("ready"))
        self.inbox.put(LoadModel(ModelSpec(id="m", path=path, n_ctx=2048, n_batch=64)))
        self.until(lambda: len(self.states("ready")) > count)

    def states(self, state: str) -> list[Any]:
        """What was told of the model."""
        return [e for e in self.events if isinstance(e, ModelState) and e.state == state]

    def until(self, is_done: Any) -> None:
        """Turn until then."""
        for _ in range(300):
            if is_done():
                return
            self.loop.turn(0 if self.loop._runners.has_work else 0.2)
        pytest.fail(f"not reached: {self.events[-5:]}")

    def run(self, name: str, prompt: str = PROMPT, **fields: Any) -> Any:
        """The usage of a request."""
        request = GenerateRequest(
            **{"model": "m", "prompt": tuple(prompt.encode()), "max_tokens": 4, "sampling": GREEDY} | fields
        )
        self.inbox.put(Submit(request_id=name, request=request))
        self.until(lambda: self.usage(name) is not None)
        return self.usage(name)

    def usage(self, name: str) -> Any:
        """How it ended."""
        return next((e.usage for e in self.events if isinstance(e, Finished) and e.request_id == name), None)

    def close(self) -> None:
        """End it."""
        self.inbox.put(Shutdown())
        self.loop.run()


def test_files_of_a_model_file_that_was_replaced_are_removed(tmp_path: Path) -> None:
    """C1, C9: the path is the same, the fingerprint is not; other paths' files stay."""
    engine = Engine(tmp_path)
    engine.run("one")
    engine.close()
    (path,) = files_in(tmp_path)
    engine = Engine(tmp_path)
    engine.until(lambda: len(engine.cache))
    engine.loop._store.model_loaded(FAKE, "what it is now")
    engine.until(lambda: not len(engine.cache))
    assert not path.exists()
    assert engine.run("two").cached_tokens == 0
    engine.close()


def test_what_is_only_in_cells_is_stored_before_its_model_goes(tmp_path: Path) -> None:
    """C6: unloading, or loading anew, is a clean end too."""
    engine = Engine(tmp_path)
    engine.run("one")
    engine.inbox.put(UnloadModel("m"))
    engine.until(lambda: engine.states("absent"))
    engine.load()
    usage = engine.run("two")
    assert usage.cached_tokens == len(PROMPT) - 1
    assert usage.cache_source in {"ram", "disk"}  # it may be written before the model is back
    engine.close()


def test_a_model_that_goes_in_the_middle_of_a_prompt_leaves_nothing_half_stored(tmp_path: Path) -> None:
    """C8, C14, L5: each entry has its bytes; the prompt goes on from its checkpoints in the new one."""
    slow = f"{RECURRENT},step_delay_s=0.02"  # a load is quicker
    engine = Engine(tmp_path, slow)
    request = GenerateRequest(model="m", prompt=TOKENS * 3, max_tokens=4, sampling=GREEDY)
    engine.inbox.put(Submit(request_id="one", request=request))
    engine.until(lambda: len(engine.cache))
    engine.inbox.put(LoadModel(ModelSpec(id="m", path=slow, n_ctx=2048, n_batch=32)))
    engine.until(lambda: len(engine.states("ready")) > 1)
    engine.cache.check()
    assert {entry.state for entry in engine.cache.index} <= {"ram", "disk", "reading"}
    engine.until(lambda: engine.usage("one"))
    assert engine.usage("one").completion_tokens == 4
    assert engine.usage("one").cached_tokens >= 128
    engine.close()


def test_a_drain_waits_for_those_who_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4, C7: nothing is computed meanwhile, and yet somebody is to be answered."""
    first = Engine(tmp_path)
    first.run("a")
    first.close()
    engine = Engine(tmp_path)
    engine.until(lambda: len(engine.cache))
    may_read = threading.Event()
    read = PrefixFolder.read

    def late(folder: PrefixFolder, *what: Any) -> bytearray:
        assert may_read.wait(10)
        return read(folder, *what)

    monkeypatch.setattr(PrefixFolder, "read", late)
    request = GenerateRequest(model="m", prompt=tuple(PROMPT.encode()), max_tokens=4, sampling=GREEDY)
    engine.inbox.put(Submit(request_id="b", request=request))
    engine.until(lambda: any(entry.state == "reading" for entry in engine.cache.index))
    engine.inbox.put(Shutdown(drain_s=30.0))
    engine.loop.turn(0.2)
    assert engine.usage("b") is None
    may_read.set()
    engine.loop.run()
    assert engine.usage("b").completion_tokens == 4
    assert engine.usage("b").cache_source == "disk"


def test_a_full_disk_tier_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: an entry worth less than every file is not waited for."""
    engine = Engine(tmp_path, cache_disk_bytes=5000)
    engine.run("one", PROMPT)
    engine.until(lambda: engine.cache.disk.used_bytes)
    for number in range(3):
        engine.run(f"again {number}", PROMPT)
    engine.run("poor", PROMPT[::-1] * 2, priority=Priority.BACKGROUND)
    waits: list[float] = []
    take = engine.inbox.take

    def noting(wait_s: float | None) -> Any:
        is_writing = engine.cache.disk._writing is not None
        if wait_s and engine.loop._phase.value == "closed" and not is_writing:
            waits.append(wait_s)
            return take(0)
        return take(wait_s)

    monkeypatch.setattr(engine.inbox, "take", noting)
    monkeypatch.setattr("stoker.engine.loop.SAVE_LIMIT_S", 0.2)
    engine.close()
    assert waits == []


def test_a_look_at_the_disk_that_ends_late_is_taken_in(tmp_path: Path) -> None:
    """C9: requests do not wait for it."""
    engine = Engine(tmp_path)
    engine.run("one")
    engine.close()
    engine = Engine(tmp_path, looks=False)
    assert engine.run("one").cached_tokens == 0
    engine.loop._store.open()
    engine.until(lambda: engine.cache.status().num_disk)
    assert engine.run("two").cached_tokens == len(PROMPT) - 1
    engine.cache.check()
    engine.close()
    assert len(files_in(tmp_path)) == 1


def test_a_look_at_the_disk_that_fails_turns_it_off(tmp_path: Path) -> None:
    """C9."""
    engine = Engine(tmp_path)
    engine.inbox.put(DiskFound([], "it is not there"))
    engine.until(lambda: engine.cache.disk.problem)
    assert not engine.cache.disk.is_on
    assert engine.run("one").completion_tokens == 4
    engine.close()
    assert files_in(tmp_path) == []


def test_of_too_many_files_the_longest_unused_go_whatever_their_order(tmp_path: Path) -> None:
    """C7, C9: what the folder held is the first thing the cache hears of."""
    settings = EngineSettings()
    limits = CacheLimits.within(
        2**40,
        mode=CacheMode(settings.cache_mode),
        ram_bytes=settings.cache_ram_bytes,
        disk_bytes=settings.cache_disk_bytes,
    )
    store = PrefixStore(Inbox().put, tmp_path, limits)
    found = [
        Entry(
            *(bytes(32), "model", "/model.gguf", key_of(range(1000 * at, 1000 * at + 40)), 400),
            file=f"{at}{SUFFIX}",
            file_bytes=407,
            used_s=1000.0 + at,
        )
        for at in range(MAX_ENTRIES + 2)
    ]
    store.handle(DiskFound(found[::-1]), 5000.0)
    store.close()
    removed = {order.file for order in store.cache.disk.take_ops() if isinstance(order, Remove)}
    assert len(store.cache) == MAX_ENTRIES
    assert f"{MAX_ENTRIES + 1}{SUFFIX}" not in removed
    store.cache.check()


@pytest.mark.parametrize("fields", [{}, {"n": 3}], ids=["a crowd", "choices"])
async def test_more_requests_than_slots_after_a_restart_are_all_answered(tmp_path: Path, fields: Any) -> None:
    """C9, Q15, Q16: they wait for one read, and nobody fails for it."""
    async with runtime_on(tmp_path) as runtime:
        await ask(runtime)
    async with runtime_on(tmp_path, slots=2) as runtime:
        await until(runtime, lambda status: status.num_entries)
        async with asyncio.timeout(WAIT_S):
            answers = await asyncio.gather(*(ask(runtime, **fields) for _ in range(6)))
        assert {usage.cached_tokens for _, usage in answers} == {len(PROMPT) - 1}
        assert all(sorted(text) == sorted(text_alone(PROMPT, 4) * fields.get("n", 1)) for text, _ in answers)
