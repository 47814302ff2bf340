"""What subscribers are told at the end of each request and call: what it was, what it took, how it ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker import GenerateRequest, Runtime
from stoker.client.event_bus import EventBus, Snapshot
from stoker.client.requests.history import MAX_RECENT, RequestHistory
from stoker.client.requests.meter import RequestMeter, Wait, tokens_per_second
from stoker.client.requests.record import RequestRecord, Stage
from stoker.client.requests.table import RequestTable
from stoker.errors import ModelNotFoundError, QueueFullError
from stoker.ipc.events import Admitted, Delta, Parked, Paused, Preparing, Queued, Resumed, Waiting
from stoker.ipc.request import Priority
from stoker.ipc.usage import CacheSource
from stoker.server.native.events import veiled

FIELDS = {
    *("request_id", "what", "model", "priority", "kind", "route", "arrived_at", "prompt_tokens"),
    *("cached_tokens", "completion_tokens", "max_tokens", "queue_s", "first_token_s", "decode_s"),
    *("tokens_per_second", "num_parks", "parked_s", "waited_for"),
}
DECODER = "fake:eog_period=0,step_delay_s=0.002"
PRIVATE = "words of mine"


class Ends:
    """The ends that a runtime tells of."""

    def __init__(self, runtime: Runtime) -> None:
        self._events = runtime.events()
        self.others: list[dict[str, Any]] = []

    async def next(self) -> dict[str, Any]:
        """The next one; what comes before is in `others`."""
        async for event in self._events:
            if event.event == "request" and event.fields["what"] in {"finished", "failed"}:
                return event.fields
            if event.event == "request":
                self.others.append(event.fields)
        raise AssertionError("no request ended")

    async def close(self) -> None:
        """Listen no more."""
        await self._events.aclose()


@asynccontextmanager
async def told(model: str = DECODER, **fields: Any) -> AsyncIterator[tuple[Runtime, Ends]]:
    """A runtime of one fake, and the ends it tells of."""
    settings = {"isolation": "thread", "slots": 2, "ctx_size": 1024, "drain_s": 0.0} | fields
    async with Runtime(model, **settings) as runtime:
        ends = Ends(runtime)
        await anext(ends._events)
        yield runtime, ends
        await ends.close()


async def spend(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def test_the_end_of_a_request_says_what_it_was_and_what_it_took() -> None:
    """SPEC O3: one event with flat fields, also kept in the status; no text of the request in it."""
    before = time.time()
    async with told() as (runtime, ends):
        request = GenerateRequest(prompt=PRIVATE, max_tokens=5, priority=Priority.BACKGROUND)
        await spend(runtime.stream(request, "mine", owner="key", route="/v1/completions"))
        end = await ends.next()
        recent = (await runtime.status()).recent
    assert end.keys() >= FIELDS
    known = ("request_id", "what", "model", "priority", "kind", "route", "max_tokens", "completion_tokens")
    assert [end[name] for name in known] == [
        *("mine", "finished", "fake", "background", "completion", "/v1/completions", 5, 5),
    ]
    assert before <= end["arrived_at"] <= time.time()
    assert 0 < end["prompt_tokens"] < 100
    assert 0 <= end["queue_s"] <= end["first_token_s"]
    assert end["tokens_per_second"] == pytest.approx(4 / end["decode_s"])
    assert (end["finish_reason"], end["error"], "owner" in end) == ("length", None, False)
    assert [(one.request_id, one.owner, one.completion_tokens) for one in recent] == [("mine", "key", 5)]
    assert PRIVATE not in json.dumps(end)


async def test_a_call_of_several_requests_is_one_end() -> None:
    """SPEC O3: its requests are told of while they run, by the call's id, and end without a word."""
    async with told("fake:encoder=1") as (runtime, ends):
        await runtime.embed(["one text", "another", "a third"], request_id="mine")
        await runtime.embed("the last", request_id="last")
        end, last = await ends.next(), await ends.next()
    assert (end["request_id"], end["kind"], end["finish_reason"]) == ("mine", "embed", "stop")
    assert end["prompt_tokens"] > last["prompt_tokens"] > 0
    assert (end["completion_tokens"], end["first_token_s"], end["tokens_per_second"]) == (0, None, None)
    assert end.keys() >= FIELDS
    assert last["request_id"] == "last"
    assert {event.get("group") for event in ends.others} == {None, "mine", "last"}
    begun = [event for event in ends.others if event["request_id"] == "mine"]
    assert (begun[0]["what"], begun[0]["num_members"]) == ("arrived", 3)
    assert [event["move"]["state"] for event in begun if "move" in event] == [
        "preparing",
        "queued",
        "prefill",
    ]
    assert [move["state"] for move in end["moves"]] == ["preparing", "queued", "prefill", "ended"]


async def test_every_kind_of_request_and_call_is_told_of() -> None:
    """SPEC O3: chat, completion, choose and states of a model that generates."""
    async with told() as (runtime, ends):
        await spend(runtime.chat([{"role": "user", "content": PRIVATE}], max_tokens=2))
        await spend(runtime.generate(PRIVATE, max_tokens=2))
        await runtime.choose(PRIVATE, ["a", "b"])
        await runtime.states.embed_all([PRIVATE, "x"])
        kinds = [(await ends.next())["kind"] for _ in range(4)]
    assert kinds == ["chat", "completion", "choose", "state"]


async def test_what_ended_in_the_queue_has_no_place_there() -> None:
    """SPEC O3: neither a position nor a time until it runs, among the last requests of the status."""
    async with told() as (runtime, ends):
        running = [asyncio.create_task(spend(runtime.generate("x", max_tokens=900))) for _ in range(2)]
        while len([slot for slot in (await runtime.status()).slots if slot.request_id]) < 2:
            continue  # each status takes a turn of the engine
        stream = runtime.stream(GenerateRequest(prompt="x", max_tokens=9), "waits")
        async for event in stream:
            if isinstance(event, Queued):
                break
        await stream.aclose()
        await ends.next()
        (cut,) = [each for each in (await runtime.status()).recent if each.request_id == "waits"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert cut.finish_reason == "cancelled"
    assert (cut.position, cut.eta_s) == (None, None)


async def test_an_end_that_nobody_wanted_says_why() -> None:
    """SPEC O3: a cancelled one finishes; a refusal carries its code, also where no engine had it."""
    async with told(max_queue=1) as (runtime, ends):
        stream = runtime.stream(GenerateRequest(prompt="x", max_tokens=900), "cut")
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        cut = await ends.next()
        with pytest.raises(ModelNotFoundError):
            await spend(runtime.stream(GenerateRequest(prompt="x", model="none")))
        unknown = await ends.next()
        crowd = [spend(runtime.generate("x", max_tokens=400)) for _ in range(8)]
        found = await asyncio.gather(*crowd, return_exceptions=True)
        refused = await ends.next()
    assert (cut["what"], cut["finish_reason"]) == ("finished", "cancelled")
    assert (unknown["what"], unknown["error"]["code"], unknown["model"]) == (
        "failed",
        "model_not_found",
        "none",
    )
    assert any(isinstance(each, QueueFullError) for each in found)
    assert (refused["error"]["code"], refused["finish_reason"]) == ("queue_full", None)


async def test_only_the_last_that_ended_are_kept() -> None:
    """SPEC O3: what is shown of the past has a bound."""
    async with told("fake:encoder=1") as (runtime, ends):
        for number in range(MAX_RECENT + 3):
            await runtime.embed("x", request_id=f"call-{number}")
            await ends.next()
        recent = (await runtime.status()).recent
    assert [one.request_id for one in recent] == [f"call-{number}" for number in range(3, MAX_RECENT + 3)]


# ---------------------------------------------------------------- the meter: seconds in a script


def metered() -> RequestMeter:
    """A meter of a request that arrived at second 100."""
    return RequestMeter(arrived_at=5.0, arrived_s=100.0)


def delta() -> Delta:
    """One token."""
    return Delta(request_id="r", index=0, token_ids=[1])


def test_times_are_counted_from_the_arrival() -> None:
    """SPEC O2: the first slot and the first token count, later ones do not."""
    meter = metered()
    meter.take(Admitted("r", 4, CacheSource.RAM, 9), 101.0)
    meter.take(delta(), 103.0)
    meter.take(Admitted("r", 0, None, 9), 104.0)
    meter.take(delta(), 105.0)
    assert (meter.queue_s(110.0), meter.to_first_token_s(), meter.decode_s(110.0)) == (1.0, 3.0, 7.0)
    assert (meter.prompt_tokens, metered().queue_s(107.0), metered().to_first_token_s()) == (9, 7.0, None)


def test_the_longest_wait_is_named_and_a_short_one_is_not() -> None:
    """SPEC O3: who reads one line wants to know the one cause."""
    meter = metered()
    meter.take(Preparing("r"), 100.0)
    meter.take(Queued("r", 3, 1.5), 100.2)
    meter.take(Queued("r", 1, 1.0), 100.3)
    assert meter.longest_wait(100.4) == (pytest.approx(0.2), "")
    assert (meter.position, meter.eta_s(100.8), meter.eta_s(105.0)) == (1, pytest.approx(0.5), 0.0)
    meter.take(Admitted("r"), 102.2)
    meter.take(delta(), 103.0)
    assert meter.longest_wait(200.0) == (2.0, "3 before it in the queue")
    meter.take(Parked(request_id="r", index=0, form="cells", reason="room"), 104.0)
    meter.take(delta(), 109.0)
    assert meter.longest_wait(200.0) == (5.0, Wait.PARKED)
    assert (meter.num_parks, meter.waited_s(Wait.PARKED, 200.0)) == (1, 5.0)


def test_the_time_that_a_choice_is_parked_is_between_no_tokens() -> None:
    """SPEC O22: of the choice that gave its slot away; the others write on."""
    meter = metered()
    other = Delta(request_id="r", index=1, token_ids=[1])
    for at in (103.0, 103.25):
        meter.take(delta(), at)
        meter.take(other, at)
    meter.take(Parked(request_id="r", index=0, form="cells", reason="room"), 103.5)
    meter.take(other, 104.25)
    meter.take(Admitted("r"), 109.0)
    meter.take(delta(), 109.5)
    meter.take(delta(), 109.75)
    found = meter.gaps.status()
    assert found is not None
    assert (found.max, found.mean) == (1000.0, pytest.approx((250 + 250 + 1000 + 250) / 4))


def test_a_pause_is_the_callers_and_a_suspension_the_machines() -> None:
    """SPEC O3: both stop a request; a pause while the engine is suspended is not another wait."""
    meter = metered()
    meter.steer(Paused("r"), 101.0)
    meter.steer(Resumed("r"), 104.0)
    assert meter.longest_wait(104.0) == (3.0, Wait.PAUSED)
    meter.wait(Wait.SUSPENDED, 105.0)
    meter.steer(Paused("r"), 105.0)
    meter.steer(Resumed("r"), 106.0)
    meter.take(delta(), 110.0)
    assert meter.longest_wait(200.0) == (5.0, Wait.SUSPENDED)


@pytest.mark.parametrize(
    ("num_tokens", "num_first", "decode_s", "expected"),
    [(11, 1, 2.0, 5.0), (12, 2, 2.0, 5.0), (1, 1, 2.0, None), (0, 0, 0.0, None), (9, 1, 0.0, None)],
)
def test_speed_counts_what_came_after_the_first_tokens(
    num_tokens: int, num_first: int, decode_s: float, expected: float | None
) -> None:
    """SPEC O2: the first token of a choice is the prompt's; of one token there is no speed."""
    assert tokens_per_second(num_tokens, num_first, decode_s) == expected


async def test_subscribers_are_told_how_much_is_written_and_nobody_else_is(tmp_path: Path) -> None:
    """SPEC O3: tokens and speed of an answer, every two seconds while it writes; nothing without a reader."""
    table, bus = RequestTable(tmp_path), EventBus()
    history = RequestHistory(table, bus, lambda _: True)
    record = RequestRecord("r", GenerateRequest(prompt="x", model="m"), 0.0)
    table.add(record)

    def write(now: float) -> None:
        delta = Delta(request_id="r", index=0, text="x", token_ids=[1])
        record.take_delta(delta)
        history.wrote(record, delta, now)

    reader = bus.subscribe(lambda: Snapshot({}))
    await anext(reader)
    for now in (0.0, 1.0, 2.5, 3.0, 4.6):
        write(now)
    told = [(await anext(reader)).fields for _ in range(3)]
    assert [fields["what"] for fields in told] == ["decoding", "progress", "progress"]
    assert [fields["completion_tokens"] for fields in told[1:]] == [3, 5]
    assert told[1]["tokens_per_second"] == pytest.approx(2 / 2.5)
    await reader.aclose()
    published = bus._num_published
    write(10.0)
    assert bus._num_published == published
    table.close()


async def test_a_place_that_is_told_again_says_who_its_reason_names(tmp_path: Path) -> None:
    """SPEC O20, S4: without a move that would; else another key is told the name."""
    table, bus = RequestTable(tmp_path), EventBus()
    history = RequestHistory(table, bus, lambda _: True)
    record = RequestRecord("r", GenerateRequest(prompt="x", model="m"), 0.0)
    record.stage = Stage.QUEUED
    table.add(record)
    async with aclosing(bus.subscribe(lambda: Snapshot({}))) as events:
        await anext(events)
        history.took(Waiting(request_id="r", index=0, reason="waits for theirs", by="theirs"))
        history.took(Queued("r", 2))
        _, again = (await anext(events)).fields, (await anext(events)).fields
    assert (again["what"], again["waits_for"], again["by"]) == ("queued", "waits for theirs", "theirs")
    assert "theirs" not in json.dumps(veiled(again, lambda _: False))
