"""What watchers of a runtime are told: in order, without text, and never more than they can hold."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from stoker import GenerateRequest, Runtime
from stoker.client.event_bus import MAX_KEPT, MAX_WAITING, EventBus
from stoker.errors import ErrorInfo, ModelLoadError, NotReadyError
from stoker.ipc.events import (
    Admitted,
    Finished,
    HeatMoved,
    ModelState,
    PressureMoved,
    PromptEcho,
    Queued,
    RungTaken,
)
from stoker.ipc.request import Priority
from stoker.ipc.status import RequestStatus
from stoker.ipc.usage import CacheSource, Timings, Usage


@pytest.fixture
def bus() -> EventBus:
    """A bus at second 7."""
    return EventBus(lambda state: None, lambda: 7.0)


async def told(bus: EventBus, act: Any) -> list[tuple[str, dict[str, Any]]]:
    """What one who watches is told of `act`, after the snapshot."""
    async with aclosing(bus.subscribe(dict)) as events:
        await anext(events)
        act()
        bus.close()
        return [(event.event, event.fields) async for event in events]


async def test_the_first_event_is_a_snapshot_of_that_moment(bus: EventBus) -> None:
    """SPEC O3: what happened before is in it, what happens after follows it."""
    state = {"engine": "starting"}
    bus.publish("engine", {"state": "unheard"})
    async with aclosing(bus.subscribe(lambda: state)) as events:
        state["engine"] = "serving"
        first = await anext(events)
        assert (first.event, first.at, first.fields) == ("snapshot", 7.0, {"engine": "serving"})
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
        ("model", {"model": "m", "state": "loading", "stage": "weights", "fraction": 0.5}),
        (
            "model",
            {
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


async def test_requests_are_told_without_their_text(bus: EventBus) -> None:
    """SPEC O3: where they are, how they ended and the figures of that, in what JSON can hold."""

    def act() -> None:
        bus.request_moved(Queued("r", 3, 1.5))
        bus.request_moved(Admitted("r", 64, CacheSource.RAM))
        bus.request_moved(PromptEcho(request_id="r", text="secret"))
        end = Finished(request_id="r", usage=Usage(prompt_tokens=4), timings=Timings())
        bus.request_ended(ended(), end)
        bus.request_ended(ended(NotReadyError("late").info()))

    events = await told(bus, act)
    assert [fields["what"] for _, fields in events] == ["queued", "admitted", "finished", "failed"]
    queued = {"request_id": "r", "what": "queued", "position": 3, "eta_s": 1.5, "awaits_model": False}
    assert events[0][1] == queued
    assert events[1][1]["cache_source"] == "ram"
    assert events[2][1]["usage"]["prompt_tokens"] == 4
    assert events[3][1]["error"]["code"] == "not_ready"
    assert "secret" not in json.dumps([fields for _, fields in events])


async def test_one_who_is_slow_is_told_how_much_was_dropped(bus: EventBus) -> None:
    """SPEC O3: bounded for each; the newest stay, and the others lose nothing."""
    async with aclosing(bus.subscribe(dict)) as slow, aclosing(bus.subscribe(dict)) as quick:
        await anext(slow)
        await anext(quick)
        for number in range(MAX_WAITING + 5):
            bus.publish("n", {"number": number})
            assert (await anext(quick)).fields == {"number": number}
        lagged = await anext(slow)
        assert (lagged.event, lagged.fields) == ("lagged", {"dropped": 5})
        assert (await anext(slow)).fields == {"number": 5}
        bus.close()
        assert len([event async for event in slow]) == MAX_WAITING - 1


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

        async def watch() -> None:
            async for event in runtime.events():
                json.dumps(msgspec.to_builtins(event))
                told = event.fields.get("what") or event.fields.get("state") or ""
                story.append(f"{event.event} {told}".strip())

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        async for _ in runtime.stream(GenerateRequest(prompt="hello", max_tokens=2)):
            pass
        await runtime.suspend()
        await runtime.resume()
    await watching
    expected = [
        "snapshot",
        "request queued",
        "request admitted",
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
    async with aclosing(bus.subscribe(dict)) as events:
        first = await anext(events)
        bus.publish("n", {"number": 1})
        last_id = (await anext(events)).id
    for number in (2, 3):
        bus.publish("n", {"number": number})
    async with aclosing(bus.subscribe(dict, last_id)) as again:
        assert [(await anext(again)).fields["number"] for _ in range(2)] == [2, 3]
    async with aclosing(bus.subscribe(dict, first.id)) as again:
        assert (await anext(again)).fields["number"] == 1
    for number in range(MAX_KEPT):
        bus.publish("n", {"number": number})
    endless = first.id.partition("-")[0] + "-" + "9" * 5000  # more digits than Python reads
    for stale in (last_id, "other-1", "", f"{first.id}x", endless):
        async with aclosing(bus.subscribe(dict, stale)) as anew:
            assert (await anext(anew)).event == "snapshot"


def test_nothing_is_kept_before_somebody_has_listened(bus: EventBus) -> None:
    """SPEC O3: a program that nobody watches does not pay."""
    bus.publish("n", {"number": 1})
    assert not bus._kept
