"""Suspended requests over the end of the program: their files, their records, and who may have them."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker import GenerateRequest, Runtime, Sampling
from stoker.client.event_bus import EventBus
from stoker.client.models.registry import ModelRegistry
from stoker.client.requests.history import RequestHistory
from stoker.client.requests.record import RequestRecord
from stoker.client.requests.requests import Requests
from stoker.client.requests.stream import StreamEvent
from stoker.client.requests.table import ENDED_KEPT_S, MAX_ENDED, RequestTable
from stoker.client.store.file import DamagedFile, KeptFile, KeptFolder
from stoker.client.store.last_models import LastModels
from stoker.errors import InvalidRequestError, NotReadyError, QueueFullError, RequestNotFoundError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Event, Failed, Finished, PromptEcho, Queued, RequestEvent
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, TokenLogprob, Usage

FAKE = "fake:eog_period=0,step_delay_s=0.003"
ASKED = GenerateRequest(prompt="hello", model="fake", max_tokens=40, n=2, sampling=Sampling(seed=5))


def submit(request_id: str, **fields: Any) -> Submit:
    """A request as the host tells of it."""
    return Submit(request_id=request_id, request=ASKED, **fields)


def delta(request_id: str, text: str, *tokens: int, index: int = 0, **fields: Any) -> Delta:
    """A piece of a choice."""
    return Delta(request_id=request_id, index=index, text=text, token_ids=list(tokens), **fields)


def finished(request_id: str) -> Finished:
    """The end."""
    return Finished(request_id=request_id, usage=Usage(), timings=Timings())


def files(folder: Path) -> list[Path]:
    """What is kept on disk."""
    return sorted(folder.glob("*"))


def text_by_choice(events: list[StreamEvent] | list[Event] | list[RequestEvent]) -> dict[int, str]:
    """All text of each choice."""
    deltas = [event for event in events if isinstance(event, Delta)]
    return {index: "".join(d.text for d in deltas if d.index == index) for index in (0, 1)}


# ------------------------------------------------------------ the record


def test_a_record_tells_all_that_was_shown_in_few_events() -> None:
    """SPEC L2: one echo, one delta a choice with every token and logprob, the end; no places in a queue."""
    logprob = TokenLogprob(1, b"a", -0.5, [])
    record = RequestRecord("r", ASKED, 0.0)
    echo = PromptEcho(request_id="r", text="hello")
    assert [record.take(event) for event in (Queued("r", 0), echo, echo)] == [True, True, False]
    record.take(delta("r", "a", 1, logprobs=[logprob]))
    record.take(delta("r", "x", 7, index=1))
    record.take(delta("r", "b", 2, logprobs=[logprob], finish_reason=FinishReason.STOP, stop_text="."))
    whole = delta("r", "ab", 1, 2, logprobs=[logprob] * 2, finish_reason=FinishReason.STOP, stop_text=".")
    assert record.shown() == [echo, whole, delta("r", "x", 7, index=1)]
    assert (record.num_generated, record.is_ended) == (3, False)
    before = record.shown()
    record.take(delta("r", "c", 3, index=1, logprobs=[logprob]))
    assert before == [echo, whole, delta("r", "x", 7, index=1)]  # what was shown does not grow
    record.take(finished("r"))
    assert record.is_ended
    again = RequestRecord.taken_up(record.file(0.0), 0.0)
    assert again.shown() == record.shown()


# ------------------------------------------------------------ the files


def test_a_file_holds_everything_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    """SPEC L2: request, tokens, sampler state, age, names, owner; mode 0600; the newest replaces."""
    folder = KeptFolder(tmp_path / "suspended")
    kept = KeptFile(
        submit=submit(
            "a", generated=[[1], [2]], is_finished=[False, True], mirostat_mu=[1.5, None], age_s=3.0
        ),
        shown=[delta("a", "x", 1), PromptEcho(request_id="a", text="hello")],
        names=["xid"],
        owner="k",
    )
    folder.write(KeptFile(submit=submit("a"), shown=[]))
    folder.write(kept)
    (file,) = files(tmp_path / "suspended")
    assert file.stat().st_mode & 0o777 == 0o600
    folder.close()
    assert list(KeptFolder(tmp_path / "suspended").take(["fake"])) == [kept]


def test_a_file_of_a_living_program_or_of_another_model_is_left_alone(tmp_path: Path) -> None:
    """SPEC L2: nobody runs what somebody still has; a model that is not served now may be another time."""
    owner, other = KeptFolder(tmp_path), KeptFolder(tmp_path)
    owner.write(KeptFile(submit=submit("a"), shown=[]))
    assert list(other.take(["fake"])) == []
    owner.close()
    assert list(other.take(["x"])) == []
    assert len(list(other.take(["fake"]))) == 1
    assert list(other.take(["fake"])) == []
    other.remove("a")
    other.remove("a")
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["short", "flipped", "foreign", "empty", "valid sum, foreign body"])
def test_a_damaged_file_is_put_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """SPEC L2, C9: never trusted, never a crash, and the others are taken up."""
    folder = KeptFolder(tmp_path)
    folder.write(KeptFile(submit=submit("a"), shown=[]))
    folder.close()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    match damage:
        case "short":
            file.write_bytes(data[:-3])
        case "flipped":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "foreign":
            file.write_bytes(b"something else altogether, long enough to hold a header")
        case "empty":
            file.write_bytes(b"")
        case _:
            import hashlib  # noqa: PLC0415 - one use

            body = b"\x93\x01\x02\x03"
            end_of_label = 44 + int.from_bytes(data[8:12], "big")
            file.write_bytes(data[:end_of_label] + hashlib.sha256(body).digest() + body)
    folder.write(KeptFile(submit=submit("b"), shown=[]))
    folder.close()
    with caplog.at_level(logging.WARNING):
        found = list(KeptFolder(tmp_path).take(["fake"]))
    assert [kept.submit.request_id for kept in found if isinstance(kept, KeptFile)] == ["b"]
    told = [damaged.label.id for damaged in found if isinstance(damaged, DamagedFile)]
    assert told == ([] if damage in {"foreign", "empty"} else ["a"])
    assert "put aside" in caplog.text
    assert sorted(path.suffix for path in files(tmp_path)) == [".bad", ".request"]


def test_files_that_were_put_aside_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC L2: in number and in bytes; the oldest go."""
    monkeypatch.setattr("stoker.client.store.file.MAX_BAD_FILES", 3)
    for number in range(6):
        file = tmp_path / f"{number}.request"
        file.write_bytes(b"damaged")
        os.utime(file, (number, number))
    assert list(KeptFolder(tmp_path).take(["fake"])) == []
    assert [path.name for path in files(tmp_path)] == ["3.bad", "4.bad", "5.bad"]
    monkeypatch.setattr("stoker.client.store.file.MAX_BAD_BYTES", 20)
    (tmp_path / "6.request").write_bytes(b"damaged")
    assert list(KeptFolder(tmp_path).take(["fake"])) == []
    assert [path.name for path in files(tmp_path)] == ["5.bad", "6.bad"]


# ------------------------------------------------------------ the table


class Nowhere:
    """No engine."""

    absence = "there is none"

    def send(self, command: object) -> None:
        """Nothing hears it."""

    def hand_out(self) -> None:
        """Nothing is given."""


def entered(
    table: RequestTable, request_id: str, names: Sequence[str] = (), owner: str = ""
) -> RequestRecord:
    """A new request, with its client."""
    record = RequestRecord(request_id, ASKED, 0.0, names=names, owner=owner)
    table.add(record)
    return record


def happen(table: RequestTable, *events: RequestEvent) -> None:
    """What comes of an engine: it is noted and shown."""
    for event in events:
        record = table.find(event.request_id)
        assert record is not None
        record.take(event)
        table.deliver(event)


async def test_whoever_attaches_to_a_damaged_request_is_told_so(tmp_path: Path) -> None:
    """SPEC L2, S10: by any of its names, its owner alone, and not that there is no such request."""
    folder = KeptFolder(tmp_path)
    folder.write(KeptFile(submit=submit("a"), shown=[], names=["xid"], owner="k"))
    folder.close()
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    table = RequestTable(tmp_path)
    assert await table.take_up(["fake"]) == []
    (shown,) = table.kept()
    assert (shown.id, shown.names, shown.owner, shown.state) == ("a", ["xid"], "k", "ended")
    with pytest.raises(RequestNotFoundError):
        table.attach("xid", "somebody else", lambda _: None)
    events: list[RequestEvent] = []
    table.attach("xid", "k", events.append)
    (event,) = events
    assert isinstance(event, Failed)
    assert event.error.code == "kept_request_damaged"
    assert "put aside as" in event.error.message


async def test_requests_with_a_client_lose_their_files_when_the_engine_comes_back(tmp_path: Path) -> None:
    """SPEC L2: and one that ends while suspended at once."""
    table = RequestTable(tmp_path)
    for name in "ab":
        entered(table, name)
    await table.keep()
    assert len(files(tmp_path)) == 2
    happen(table, finished("a"))
    assert len(files(tmp_path)) == 1
    await table.release()
    assert files(tmp_path) == []
    assert len(table) == 1


async def test_requests_are_kept_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L2: a machine that is out of threads costs a pause of the event loop, not the requests."""

    def refused(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    table = RequestTable(tmp_path)
    entered(table, "r")
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refused)
        await table.keep()
        assert len(files(tmp_path)) == 1
        await table.release()
        assert not files(tmp_path)
    table.close()


async def test_an_id_that_is_in_use_is_refused_and_a_refused_request_leaves_nothing(tmp_path: Path) -> None:
    """SPEC L6: two requests of one id would be told apart by nobody."""
    table = RequestTable(tmp_path)
    history = RequestHistory(table, EventBus(), lambda _: True)
    requests = Requests(table, 2, ModelRegistry([]), Nowhere(), history)
    requests.submit(RequestRecord("a", ASKED, 0.0))
    with pytest.raises(InvalidRequestError, match="in use"):
        requests.submit(RequestRecord("a", ASKED, 0.0))
    requests.submit(RequestRecord("b", ASKED, 0.0))
    with pytest.raises(QueueFullError):
        requests.submit(RequestRecord("c", ASKED, 0.0))
    assert [live.request_id for live in table.live()] == ["a", "b"]
    requests.cancel("a")
    requests.cancel("b")
    assert len(table) == 0


async def taken_up(tmp_path: Path, *request_ids: str, clock: list[float]) -> RequestTable:
    """A table that found these on disk, each with "old " delivered."""
    former = RequestTable(tmp_path)
    for request_id in request_ids:
        entered(former, request_id, [f"x-{request_id}"], "key").was_accepted = True
        happen(former, delta(request_id, "old ", 1))
    await former.keep()
    former.close()
    table = RequestTable(tmp_path, lambda: clock[0])
    for record in await table.take_up(["fake"]):
        table.add(record)
    return table


async def test_whoever_attaches_is_shown_everything_from_the_first_delta(tmp_path: Path) -> None:
    """SPEC L2: by any of its names, with the right key; several may, and the end read by one lets it go."""
    table = await taken_up(tmp_path, "a", clock=[0.0])
    (kept,) = table.kept()
    assert (kept.id, kept.names, kept.owner, kept.state, kept.num_tokens, kept.n) == (
        "a",
        ["x-a"],
        "key",
        "running",
        1,
        2,
    )
    for name, owner in (("a", ""), ("a", "other"), ("b", "key")):
        with pytest.raises(RequestNotFoundError):
            table.attach(name, owner, lambda _: None)
    first: list[RequestEvent] = []
    second: list[RequestEvent] = []
    assert table.attach("a", "key", first.append) == "a"
    happen(table, delta("a", "new", 2))
    assert table.attach("x-a", "key", second.append) == "a"
    table.detach("a", first.append, has_read_all=False)
    happen(table, finished("a"))
    assert text_by_choice(first) == text_by_choice(second) == {0: "old new", 1: ""}
    assert not any(isinstance(event, Finished) for event in first)
    assert isinstance(second[-1], Finished)
    assert table.kept()[0].state == "ended"
    table.detach("a", second.append, has_read_all=True)
    assert table.kept() == []
    assert files(tmp_path) == []


async def test_what_nobody_attaches_to_is_kept_for_ten_minutes_after_its_end(tmp_path: Path) -> None:
    """SPEC L2: then it goes, with its file; what still runs stays."""
    clock = [0.0]
    table = await taken_up(tmp_path, "a", "b", clock=clock)
    happen(table, finished("a"))
    clock[0] = ENDED_KEPT_S
    assert [kept.id for kept in table.kept()] == ["a", "b"]
    clock[0] += 1.0
    assert [kept.id for kept in table.kept()] == ["b"]
    assert len(files(tmp_path)) == 1


async def test_ended_requests_that_nobody_reads_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L2: the oldest goes first."""
    assert MAX_ENDED >= 512
    monkeypatch.setattr("stoker.client.requests.table.MAX_ENDED", 1)
    table = await taken_up(tmp_path, "a", "b", clock=[0.0])
    happen(table, finished("a"), finished("b"))
    assert [kept.id for kept in table.kept()] == ["b"]


async def test_what_ends_with_the_program_goes_on_with_the_next(tmp_path: Path) -> None:
    """SPEC L2, L4: the end that a shutdown brings is not the request's own."""
    table = await taken_up(tmp_path, "a", clock=[0.0])
    table.begin_closing()
    happen(table, Failed("a", NotReadyError("the program ends").info()))
    table.close()
    assert [kept.submit.request_id for kept in KeptFolder(tmp_path).take(["fake"])] == ["a"]


async def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC L2: the engine is suspended all the same, and its clients go on later."""
    (tmp_path / "file").write_text("in the way")
    table = RequestTable(tmp_path / "file")
    entered(table, "a")
    await table.keep()
    assert "1 of 1 suspended requests are not written" in caplog.text


# ------------------------------------------------------------ the runtime


@asynccontextmanager
async def running(tmp_path: Path, **fields: Any) -> AsyncIterator[Runtime]:
    """A runtime of one program."""
    options: dict[str, Any] = {
        "isolation": "thread",
        "slots": 4,
        "run_dir": tmp_path,
        "drain_s": 0.0,
        **fields,
    }
    async with Runtime(FAKE, **options) as runtime:
        yield runtime


async def test_requests_of_an_ended_program_go_on_and_are_read_from_their_beginning(tmp_path: Path) -> None:
    """SPEC L2: the undisturbed text, also of one that came while suspended; their clients are told."""
    async with running(tmp_path) as runtime:
        expected = text_by_choice([event async for event in runtime.stream(ASKED)])
        begun = runtime.stream(ASKED, "a", names=["xid"], owner="key")
        num_deltas = 0
        async with aclosing(begun):
            while num_deltas < 6:
                num_deltas += isinstance(await anext(begun), Delta)
            await runtime.suspend()
            assert runtime.is_suspended
            late = runtime.stream(ASKED, "b")
            await anext(late)
            await runtime.close()
            for stream in (begun, late):
                with pytest.raises(NotReadyError, match="next start"):
                    [event async for event in stream]
    async with running(tmp_path) as runtime:
        assert sorted(kept.id for kept in runtime.kept()) == ["a", "b"]
        with pytest.raises(RequestNotFoundError):
            await anext(runtime.attach("xid", owner="other"))
        for name, owner in (("xid", "key"), ("b", "")):
            assert text_by_choice([event async for event in runtime.attach(name, owner=owner)]) == expected
        assert runtime.kept() == []
        assert files(tmp_path / "suspended") == []


async def test_leaving_an_attached_stream_does_not_end_the_request(tmp_path: Path) -> None:
    """SPEC L2: who comes back is shown everything again."""
    async with running(tmp_path) as runtime:
        expected = text_by_choice([event async for event in runtime.stream(ASKED)])
        await runtime.suspend()
        stream = runtime.stream(ASKED, "a")
        await anext(stream)
        await runtime.close()
        with pytest.raises(NotReadyError):
            await anext(stream)
    async with running(tmp_path) as runtime:
        async with aclosing(runtime.attach("a")) as events:
            await anext(events)
        assert text_by_choice([event async for event in runtime.attach("a")]) == expected


async def test_the_models_of_the_last_time_are_served_again(tmp_path: Path) -> None:
    """SPEC L8: where that is asked for and none is named."""
    async with running(tmp_path):
        pass
    restored = Runtime(run_dir=tmp_path, restore=True, isolation="thread", drain_s=0.0)
    async with restored:
        assert [info.path for info in restored.models] == [FAKE]


def test_a_memory_of_models_that_is_gone_or_broken_is_none(tmp_path: Path) -> None:
    """SPEC L8: files that are no longer there are left out, and an unloaded machine forgets nothing."""
    last = LastModels(tmp_path)
    assert last.read() == ()
    last.note(["fake:", str(tmp_path / "gone.gguf")])
    last.note([])
    assert LastModels(tmp_path).read() == ("fake:",)
    (tmp_path / "models.json").write_text('{"models": 3}')
    assert last.read() == ()
    (tmp_path / "models.json").write_text("{")
    assert last.read() == ()
