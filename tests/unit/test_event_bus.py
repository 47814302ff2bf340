"""What watchers of a runtime are told: in order, without text, and never more than they can hold."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from stoker import GenerateRequest, Runtime
from stoker.client.event_bus import (
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    EventBus,
    Snapshot,
)
from stoker.errors import ErrorInfo, ModelLoadError, NotReadyError
from stoker.ipc.events import (
    Finished,
    HeatMoved,
    ModelState,
    PressureMoved,
    RungTaken,
)
from stoker.ipc.request import Priority
from stoker.ipc.status import RequestStatus
from stoker.ipc.usage import Timings, Usage


@pytest.fixture
def bus() -> EventBus:
    """A bus at second 7."""
    return EventBus(lambda state: None, lambda: 7.0)


def nothing() -> Snapshot:
    """A state in which there is nothing."""
    return Snapshot({})


async def told(bus: EventBus, act: Any) -> list[tuple[str, dict[str, Any]]]:
    """What one who watches is told of `act`, after the snapshot."""
    async with aclosing(bus.subscribe(nothing)) as events:
        await anext(events)
        act()
        bus.close()
        return [(event.event, event.fields) async for event in events]


async def test_the_first_event_is_a_snapshot_of_that_moment(bus: EventBus) -> None:
    """SPEC O3: what happened before is in it, what happens after follows it."""
    state = {"engine": "starting"}
    bus.publish("engine", {"state": "unheard"})
    async with aclosing(bus.subscribe(lambda: Snapshot(state))) as events:
        state["engine"] = "serving"
        first = await anext(events)
        assert (first.event, first.at, first.fields) == (
            "snapshot",
            7.0,
            {"engine": "serving", "dropped": 0},
        )
        bus.engine_moved("suspended", "asked to")
        assert (await anext(events)).fields == {"state": "suspended", "reason": "asked to"}
    assert len(bus) == 0


async def test_every_kind_of_event_has_its_name_and_figures(bus: EventBus) -> None:
    """SPEC O3: models, pressure, rungs, heat; an error with its code."""

    def act() -> None:
        bus.model_moved(ModelState(model="m", state="loading", stage="weights", fraction=0.5))
        bus.model_moved(ModelState(model="m", state="failed", error=ModelLoadError("no").info(), reason="no"))
        bus.machine_moved(PressureMoved(level="warning", fraction=0.75, source="psi"))
        bus.machine_moved(RungTaken(rung="drop_snapshots", freed_bytes=3))
        bus.machine_moved(HeatMoved(level="serious", sensor="cpu", celsius=95.0))

    assert await told(bus, act) == [
        ("model", {"what": "moved", "model": "m", "state": "loading", "stage": "weights", "fraction": 0.5}),
        (
            "model",
            {
                "what": "moved",
                "model": "m",
                "state": "failed",
                "reason": "no",
                "error": {"code": "model_load_failed", "message": "no"},
            },
        ),
        ("pressure", {"level": "warning", "fraction": 0.75, "source": "psi"}),
        ("rung", {"rung": "drop_snapshots", "is_undone": False, "freed_bytes": 3}),
        ("heat", {"level": "serious", "sensor": "cpu", "celsius": 95.0}),
    ]


def ended(error: ErrorInfo | None = None) -> RequestStatus:
    """A request that has ended, as others are shown it."""
    return RequestStatus(
        request_id="r",
        model="m",
        priority=Priority.INTERACTIVE,
        kind="chat",
        route="library",
        arrived_at=5.0,
        error=error,
    )


async def test_the_end_of_a_request_is_told_with_all_that_is_known_of_it(bus: EventBus) -> None:
    """SPEC O3: how it ended and the figures of that, in what JSON can hold; who came is not told."""

    def act() -> None:
        end = Finished(request_id="r", usage=Usage(prompt_tokens=4), timings=Timings())
        bus.request_ended(ended(), end)
        bus.request_ended(ended(NotReadyError("late").info()))

    events = await told(bus, act)
    assert [fields["what"] for _, fields in events] == ["finished", "failed"]
    assert events[0][1]["usage"]["prompt_tokens"] == 4
    assert events[1][1]["error"] == {"code": "not_ready", "message": "late"}
    assert not any("owner" in fields for _, fields in events)


async def test_one_who_is_slow_gets_the_state_in_place_of_what_it_lost(bus: EventBus) -> None:
    """SPEC O3: bounded for each; the others lose nothing."""
    state = {"number": -1}
    async with (
        aclosing(bus.subscribe(lambda: Snapshot(state))) as slow,
        aclosing(bus.subscribe(nothing)) as quick,
    ):
        await anext(slow)
        await anext(quick)
        for number in range(MAX_WAITING + 5):
            state["number"] = number
            bus.publish("n", {"number": number})
            assert (await anext(quick)).fields == {"number": number}
        found = await anext(slow)
        expected = {"number": MAX_WAITING + 4, "dropped": MAX_WAITING + 5}
        assert (found.event, found.fields) == ("snapshot", expected)
        bus.publish("n", {"number": "next"})
        assert (await anext(slow)).fields == {"number": "next"}
        bus.close()
        assert [event async for event in slow] == []


async def test_few_large_events_are_as_much_as_many_small_ones(bus: EventBus) -> None:
    """SPEC O3: what waits for one, and what is kept, has a bound in bytes too."""
    async with aclosing(bus.subscribe(nothing)) as slow:
        await anext(slow)
        for _ in range(5):
            bus.publish("n", {"text": "x" * (MAX_WAITING_BYTES // 4)})
        assert (await anext(slow)).fields == {"dropped": 5}
        for _ in range(20):
            bus.publish("n", {"text": "x" * (MAX_KEPT_BYTES // 4)})
    assert sum(len(event.data) for event in bus._kept) <= MAX_KEPT_BYTES


async def test_an_event_is_encoded_once_and_a_snapshot_serves_all_who_come_at_once(bus: EventBus) -> None:
    """SPEC O3: however many read, the document is one."""
    num_made = 0

    def state() -> Snapshot:
        nonlocal num_made
        num_made += 1
        return Snapshot({"made": num_made})

    readers = [bus.subscribe(state) for _ in range(10)]
    firsts = [await anext(reader) for reader in readers]
    assert num_made == 1
    bus.publish("n", {"number": 1})
    seconds = [await anext(reader) for reader in readers]
    assert all(event is seconds[0] for event in seconds)
    assert json.loads(seconds[0].data) == {"event": "n", "at": 7.0, "id": seconds[0].id, "number": 1}
    assert json.loads(firsts[0].data)["made"] == 1
    for reader in readers:
        await reader.aclose()


async def test_the_engine_is_told_once_that_somebody_watches_and_once_that_nobody_does(
    bus: EventBus,
) -> None:
    """SPEC O3: by the first who wants its figures and the last who leaves, however many there are."""
    told_engine: list[bool] = []
    bus.on_watch = told_engine.append
    log = bus.subscribe(nothing, kinds=("request", "model"))
    await anext(log)
    assert told_engine == []
    readers = [bus.subscribe(nothing) for _ in range(100)]
    for reader in readers:
        await anext(reader)
    assert told_engine == [True]
    bus.publish("steps", {"num_steps": 1})
    bus.publish("model", {"model": "m"})
    assert (await anext(log)).event == "model"
    for reader in readers:
        await reader.aclose()
    assert told_engine == [True, False]
    await log.aclose()


async def test_the_first_who_watches_waits_for_figures_and_no_longer_than_a_moment(
    monkeypatch: pytest.MonkeyPatch, bus: EventBus
) -> None:
    """SPEC O3: an engine in a long step answers late; the snapshot then has what is known."""
    monkeypatch.setattr("stoker.client.event_bus.FIGURES_S", 0.0)
    bus.expects_figures = lambda: True
    async with aclosing(bus.subscribe(nothing)) as events:
        assert (await anext(events)).event == "snapshot"
    bus.publish("n", {})
    state: dict[str, Any] = {}
    monkeypatch.setattr("stoker.client.event_bus.FIGURES_S", 60.0)

    def answer(is_watched: bool) -> None:  # noqa: FBT001 - the hook's
        if is_watched:
            state["memory"] = 1
            bus.has_figures.set()

    bus.on_watch = answer
    async with aclosing(bus.subscribe(lambda: Snapshot(state))) as events:
        assert (await anext(events)).fields == {"memory": 1, "dropped": 0}


async def test_a_hook_that_fails_harms_nobody() -> None:
    """SPEC O3: its error is reported by the event loop, not raised into the host."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(state: ModelState) -> None:
        raise ValueError(state.model)

    bus = EventBus(fail)
    bus.model_moved(ModelState(model="m", state="ready"))
    await asyncio.sleep(0)
    assert [type(context["exception"]) for context in reported] == [ValueError]


async def test_a_runtime_tells_its_whole_story() -> None:
    """SPEC O3, L1, L2: engine and model states, a request from the line to its end, sleep and waking."""
    async with Runtime("fake:eog_period=0", isolation="thread", drain_s=0.0) as runtime:
        story: list[str] = []
        is_watching = asyncio.Event()

        async def watch() -> None:
            async for event in runtime.events():
                json.dumps(event.fields)
                name = "what" if event.event == "request" else "state"
                told = event.fields.get(name) or ""
                story.append(f"{event.event} {told}".strip())
                is_watching.set()

        watching = asyncio.create_task(watch())
        await is_watching.wait()
        async for _ in runtime.stream(GenerateRequest(prompt="hello", max_tokens=2)):
            pass
        await runtime.suspend()
        await runtime.resume()
    await watching
    expected = [
        "snapshot",
        "request arrived",
        "request queued",
        "request admitted",
        "request decoding",
        "request finished",
        "model suspended",
        "engine suspended",
        "engine restarting",
        "model loading",
        "model ready",
        "engine serving",
        "engine closed",
    ]
    heard = [line for number, line in enumerate(story) if line in expected and line not in story[:number]]
    assert heard == expected


async def test_one_who_comes_back_gets_what_it_missed_and_no_snapshot(bus: EventBus) -> None:
    """SPEC O3: by the id of its last event; of another program, or too long ago, it begins anew."""
    async with aclosing(bus.subscribe(nothing)) as events:
        first = await anext(events)
        bus.publish("n", {"number": 1})
        last_id = (await anext(events)).id
    for number in (2, 3):
        bus.publish("n", {"number": number})
    async with aclosing(bus.subscribe(nothing, last_id)) as again:
        assert [(await anext(again)).fields["number"] for _ in range(2)] == [2, 3]
    async with aclosing(bus.subscribe(nothing, first.id)) as again:
        assert (await anext(again)).fields["number"] == 1
    for number in range(MAX_KEPT):
        bus.publish("n", {"number": number})
    endless = first.id.partition("-")[0] + "-" + "9" * 5000  # more digits than Python reads
    for stale in (last_id, "other-1", "", f"{first.id}x", endless):
        async with aclosing(bus.subscribe(nothing, stale)) as anew:
            assert (await anext(anew)).event == "snapshot"


def test_nothing_is_kept_before_somebody_has_listened(bus: EventBus) -> None:
    """SPEC O3: a program that nobody watches does not pay."""
    bus.publish("n", {"number": 1})
    assert not bus._kept
