"""What one machine computed another gets from a shared store; a bad store costs nobody an answer (C19)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from stoker import EngineSettings, Sampling
from stoker.cache.disk.prefix_file import NewPrefix, encode
from stoker.cache.radix import key_of
from stoker.cache.shared import rule, threads, tier
from stoker.cache.shared.files import SharedFiles
from stoker.cache.shared.names import ROOT
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox
from stoker.engine.loop import EngineLoop
from stoker.ipc.commands import LoadModel, Shutdown, Submit
from stoker.ipc.events import Delta, Finished, ModelState
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest
from stoker.ipc.shared_store import SharedStoreStatus

FAKE = "fake:eog_period=0"
RECURRENT = f"{FAKE},recurrent=1"
PROMPT = bytes(97 + at * 7 % 26 for at in range(200)).decode()


class Machine:
    """An engine's loop, driven on this thread, with a disk of its own and a store that others use too."""

    def __init__(self, folder: Path, store: str, path: str = FAKE, **settings: Any) -> None:
        self.events: list[Any] = []
        self.inbox = Inbox()
        given = {"isolation": "thread", "cache_dir": folder, "prefix_store": store, "cache_disk_bytes": 0}
        self.loop = EngineLoop(self.inbox, self.events.extend, config_of(EngineSettings(**given | settings)))
        self.inbox.put(LoadModel(ModelSpec(id="m", path=path, n_ctx=2048, n_batch=64)))
        self.until(lambda: any(isinstance(e, ModelState) and e.state == "ready" for e in self.events))

    @property
    def store(self) -> SharedStoreStatus:
        """What it knows of the store."""
        status = self.loop._store.cache.status().shared
        assert status is not None
        return status

    @property
    def counts(self) -> dict[str, float]:
        """Its counters of the store."""
        stats = self.loop._store.cache.stats()
        prefix = "prefix_store_"
        return {name[len(prefix) : -len("_total")]: n for name, n in stats.items() if name.startswith(prefix)}

    def until(self, is_done: Any) -> None:
        """Turn until then."""
        for _ in range(600):
            if is_done():
                return
            self.loop.turn(0 if self.loop._runners.has_work else 0.05)
        pytest.fail(f"not reached: {self.store} {self.counts} {self.events[-3:]}")

    def run(self, prompt: str = PROMPT, **fields: Any) -> tuple[str, Any]:
        """Text and usage of a greedy answer."""
        name = uuid.uuid4().hex
        given = {"model": "m", "prompt": tuple(prompt.encode()), "max_tokens": 4}
        request = GenerateRequest(**given | {"sampling": Sampling(temperature=0.0)} | fields)
        self.inbox.put(Submit(request_id=name, request=request))
        self.until(lambda: any(isinstance(e, Finished) and e.request_id == name for e in self.events))
        text = "".join(e.text for e in self.events if isinstance(e, Delta) and e.request_id == name)
        usage = next(e.usage for e in self.events if isinstance(e, Finished) and e.request_id == name)
        self.loop._store.cache.check()
        return text, usage

    def put(self, count: int = 1) -> None:
        """Until so much was put, soon."""

        def has_put() -> bool:
            self.loop._store.cache.shared.hurry()
            return self.counts["puts"] >= count

        self.until(has_put)

    def fail(self, count: int) -> None:
        """Until so much has failed, soon."""

        def has_failed() -> bool:
            self.loop._store.cache.shared.hurry()
            return self.counts["failures"] >= count

        self.until(has_failed)

    def look(self) -> None:
        """Until a listing that begins now has ended."""
        tier = self.loop._store.cache.shared
        tier._look_s = 0.0
        self.until(lambda: tier._look_s > 0.0 and tier._looking_s is None)

    def close(self) -> None:
        """End it."""
        self.inbox.put(Shutdown())
        self.loop.run()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Any]:
    """Makes machines, each with a folder of its own, and ends them."""
    made: list[Machine] = []

    def make(store: str, path: str = FAKE, **settings: Any) -> Machine:
        made.append(Machine(tmp_path / f"machine{len(made)}", store, path, **settings))
        return made[-1]

    yield make
    for machine in made:
        machine.close()


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new store."""
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A new store in a folder."""
    return str(tmp_path / "store")


def files_of(store: str) -> list[Path]:
    """The files of a store in a folder."""
    return sorted((Path(store) / ROOT).glob("*/*.prefix"))


@pytest.mark.parametrize("path", [FAKE, RECURRENT], ids=["decoder", "recurrent"])
def test_a_second_machine_has_what_the_first_computed(machines: Any, store: str, path: str) -> None:
    """C19: its usage says so, and its text is the same."""
    first = machines(store, path)
    text, usage = first.run()
    assert (usage.cached_tokens, usage.cache_source) == (0, None)
    first.put()
    second = machines(store, path)
    second.look()
    assert second.store.num_usable >= 1
    again, usage = second.run()
    assert (again, usage.cache_source) == (text, "store")
    assert usage.cached_tokens == len(PROMPT) - 1
    assert second.counts["gets"] == 1
    assert second.counts["got_bytes"] > 0
    assert second.store.problem == ""
    assert second.run()[1].cache_source in {"live", "ram"}


def test_part_of_what_the_first_computed_serves_another_prompt(machines: Any, folder: str) -> None:
    """C19: a system prompt is shared though the turns after it are not."""
    first = machines(folder)
    first.run(PROMPT + "one question")
    first.put()
    second = machines(folder)
    second.look()
    _, usage = second.run(PROMPT + "Another one")
    assert (usage.cached_tokens, usage.cache_source) == (len(PROMPT), "store")


def test_what_the_store_has_is_not_put_again(machines: Any, folder: str) -> None:
    """C19: two machines that compute the same prefix leave one file."""
    first = machines(folder)
    first.run()
    first.put()
    second = machines(folder)
    second.look()
    second.run(cache_salt="")
    second.loop._store.hurry()
    second.until(lambda: second.store.num_unsaved == 0)
    assert second.counts["puts"] == 0
    assert len(files_of(folder)) == 1


def test_tenants_do_not_see_each_other(machines: Any, folder: str) -> None:
    """C19: another salt has another namespace, in which there is nothing."""
    first = machines(folder)
    first.run(cache_salt="a")
    first.put()
    second = machines(folder)
    second.look()
    assert second.run(cache_salt="a")[1].cache_source == "store"
    third = machines(folder)
    third.look()
    assert third.run(cache_salt="b")[1].cached_tokens == 0
    assert third.counts["gets"] == 0


def test_files_are_for_their_owner_alone(machines: Any, folder: str) -> None:
    """C19: they hold what people have written."""
    first = machines(folder)
    first.run()
    first.put()
    (path,) = files_of(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_request_that_wants_no_cache_asks_no_store(machines: Any, folder: str) -> None:
    """C10, C19: nothing is got, nothing is put."""
    first = machines(folder)
    first.run(cache=False)
    first.loop._store.hurry()
    first.run()
    first.put()
    second = machines(folder)
    second.look()
    assert second.run(cache=False)[1].cached_tokens == 0
    assert second.counts["gets"] == 0
    assert len(files_of(folder)) == 1


@pytest.mark.parametrize("harm", ["changed", "cut", "removed", "foreign", "swapped"])
def test_a_bad_file_is_a_miss(machines: Any, folder: str, harm: str) -> None:
    """C19: it was sound when it was listed; the answer is computed, and no other request asks for it."""
    first = machines(folder)
    text, _ = first.run()
    first.put()
    second = machines(folder)
    second.look()
    (path,) = files_of(folder)
    data = bytearray(path.read_bytes())
    other = NewPrefix(bytes(32), FAKE, "", key_of(range(40)))
    match harm:
        case "swapped":
            data = bytearray(encode(other, memoryview(b"another")))
            path.write_bytes(data)
        case "changed":
            data[-1] ^= 1
            path.write_bytes(data)
        case "cut":
            path.write_bytes(data[:-9])
        case "removed":
            path.unlink()
        case "foreign":
            path.write_bytes(b"not ours" * (len(data) // 8) + bytes(len(data) % 8))
    again, usage = second.run()
    assert (again, usage.cached_tokens) == (text, 0)
    assert second.counts["lost"] == 1
    assert second.store.num_usable == 0 or second.counts["puts"]
    assert second.store.problem == ""
    assert not path.exists() or path.read_bytes() != data


@pytest.mark.parametrize("harm", ["short", "head", "misnamed"])
def test_a_bad_file_is_not_listed(machines: Any, folder: str, harm: str) -> None:
    """C19: one that is being written, or whose head is not what was written, is not known at all."""
    first = machines(folder)
    first.run()
    first.put()
    (path,) = files_of(folder)
    data = bytearray(path.read_bytes())
    if harm == "misnamed":
        path.rename(path.with_name(path.name.replace(path.stem[-32:], "0" * 32)))
    else:
        data[60] ^= harm == "head"
        path.write_bytes(data if harm == "head" else data[:-1])
    second = machines(folder)
    second.look()
    assert (second.store.num_files, second.store.num_usable) == (1, 0)
    assert second.run()[1].cached_tokens == 0
    assert second.counts["gets"] == 0


class Stuck:
    """A store whose calls of one kind do not return until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.gate = threading.Event()
        self.num_stuck = 0
        for name in names:
            monkeypatch.setattr(SharedFiles, name, self._wait)

    def _wait(self, *_: Any) -> Any:
        self.num_stuck += 1
        self.gate.wait(60)
        raise OSError("it was stuck")


def test_a_store_that_hangs_is_given_up_and_left_alone(
    machines: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: each request waits for a bounded time and is computed; after three the store is not asked."""
    monkeypatch.setattr(rule, "MAX_WAIT_S", 0.1)
    first = machines(folder)
    prompts = [f"{number}{PROMPT}" for number in range(4)]
    for prompt in prompts:
        first.run(prompt)
    first.put(4)
    second = machines(folder)
    second.look()
    second.loop._runners.__iter__().__next__().scheduler.allocator.prefix_source.compute_s = lambda _: None
    stuck = Stuck(monkeypatch, "get", "list")
    for number, prompt in enumerate(prompts):
        assert second.run(prompt)[1].cached_tokens == 0
        assert second.counts["late"] == min(number + 1, 3)
        assert bool(second.store.problem) == (number >= 2)
    assert "0.10 s" in second.store.problem
    assert stuck.num_stuck >= 3
    stuck.gate.set()
    monkeypatch.undo()
    second.loop._store.cache.shared.breaker.until_s = 0.0
    second.until(lambda: not second.store.problem)


def test_a_store_that_cannot_be_used_costs_no_answer(machines: Any, folder: str) -> None:
    """C19: after three puts that failed none is tried for a while; later one is, and the store is used."""
    Path(folder).write_text("a file where a folder should be")
    first = machines(folder)
    for number in range(1, 4):
        assert first.run(f"{number}{PROMPT}")[1].cached_tokens == 0
        first.fail(number)
    first.run(f"4{PROMPT}")
    first.loop._store.hurry()
    first.until(lambda: not first.loop._runners.has_unstored)
    assert "cannot be written" in first.store.problem
    assert first.counts["failures"] == 3
    Path(folder).unlink()
    first.loop._store.cache.shared.put_breaker.until_s = 0.0
    first.put()
    assert first.store.problem == ""


def test_a_machine_without_threads_computes(
    machines: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: a get, a put and a listing that cannot begin are failures like others."""
    first = machines(folder)
    text, _ = first.run()
    first.put()
    second = machines(folder)
    second.look()
    with monkeypatch.context() as patch:

        class Refusing(threading.Thread):
            def start(self) -> None:
                raise RuntimeError("can't start new thread")

        patch.setattr(threads, "threading", SimpleNamespace(Thread=Refusing))
        again, usage = second.run()
        assert (again, usage.cached_tokens) == (text, 0)
        second.look()
        second.fail(2)
        second.look()
        assert second.counts["failures"] >= 3
    assert second.run()[0] == text


def test_a_kind_of_store_without_its_package_is_said_with_the_remedy(machines: Any) -> None:
    """C19: the answer comes all the same."""
    first = machines("s3://bucket/prefixes")
    assert first.run()[0]
    tier = first.loop._store.cache.shared
    for _ in range(3):
        tier.breaker.until_s = 0.0
        first.look()
    assert "pip install 'stoker[store]'" in first.store.problem


def test_the_end_of_an_engine_puts_what_is_due(
    machines: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: a machine that goes leaves what it computed to the others, due or not."""
    monkeypatch.setattr(tier, "SETTLE_S", 1000.0)
    first = machines(folder)
    text, _ = first.run()
    first.close()
    assert len(files_of(folder)) == 1
    second = machines(folder)
    second.look()
    again, usage = second.run()
    assert (again, usage.cache_source) == (text, "store")


def test_two_writers_of_the_same_leave_one_and_read_either(machines: Any, store: str) -> None:
    """C19: machines that did not know of each other; the next listing removes the older file."""
    first, second = machines(store), machines(store)
    text, _ = first.run()
    assert second.run()[0] == text
    first.put()
    second.put()
    third = machines(store)
    third.look()
    assert (third.store.num_files, third.store.num_usable) == (1, 1)
    again, usage = third.run()
    assert (again, usage.cache_source) == (text, "store")


def test_a_budget_holds_for_all_machines(machines: Any, folder: str) -> None:
    """C19: the oldest go, and a machine that knew them computes."""
    first = machines(folder)
    first.run()
    first.put()
    (path,) = files_of(folder)
    stamp, _, rest = path.name.partition("-")
    path.rename(path.with_name(f"{int(stamp, 16) - 100:x}-{rest}"))  # the oldest by more than a second
    size = first.store.size_bytes
    second = machines(folder)
    second.look()
    small = machines(folder, prefix_store_bytes=size * 2)
    for number in range(3):
        small.run(f"{number}{PROMPT}")
        small.put(number + 1)
    small.look()
    assert small.store.size_bytes <= size * 2
    assert small.counts["removed"] >= 2
    assert len(files_of(folder)) <= 2
    assert second.store.num_usable == 1
    assert second.run()[1].cached_tokens == 0
    assert second.counts["lost"] == 1


def test_a_put_is_not_due_before_there_is_rest_and_a_get_is(machines: Any, folder: str) -> None:
    """SPEC C19: what waits until nobody computes wakes nobody before; who waits for it is not held up."""
    machine = machines(folder)
    machine.run()
    tier = machine.loop._store.cache.shared
    machine.until(lambda: tier._due_s)
    machine.until(lambda: tier._looking_s is None)
    put_s = min(tier._due_s.values())
    assert tier.next_due_s(0.0) == put_s
    later_s = put_s + 0.1
    assert tier.next_due_s(later_s) == later_s
    tier._gets[next(iter(tier._due_s))] = put_s - 1.0
    assert tier.next_due_s(later_s) == put_s - 1.0
    tier._gets.clear()


def test_fsspec_is_imported_only_where_there_is_a_store(tmp_path: Path) -> None:
    """C19: without the setting nothing of it is there."""
    loop = EngineLoop(Inbox(), [].extend, config_of(EngineSettings(isolation="thread", cache_dir=tmp_path)))
    assert loop._store.cache.shared is None
    assert loop._store.cache.status().shared is None
    assert not any(name.startswith("prefix_store") for name in loop._store.cache.stats())
    assert fsspec is not None
