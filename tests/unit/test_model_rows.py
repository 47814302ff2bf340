"""Models as events show them: what is told without a move, and how much of it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from stoker.client.event_bus import EventBus, Snapshot
from stoker.client.figures import EngineFigures
from stoker.client.model_rows import MAX_USERS, ModelRows
from stoker.client.models.registry import ModelRegistry
from stoker.client.requests.record import RequestRecord
from stoker.client.requests.table import RequestTable
from stoker.ipc.events import ModelState
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import ModelStatus

READY = ModelStatus(id="m", state="ready", keep_alive_s=600.0)


class Served:
    """One model, requests for it, and what a subscriber has been told."""

    def __init__(self) -> None:
        self.statuses = [READY]
        self.table = RequestTable()
        self.bus = EventBus()
        self.figures = EngineFigures(self.bus)
        loads = cast("Any", SimpleNamespace(statuses=self._now))
        self.rows = ModelRows(loads, ModelRegistry([]), self.table, self.figures, self.bus)
        self.events = self.bus.subscribe(
            lambda: Snapshot({"models": [row.fields for row in self.rows.rows()]})
        )

    def _now(self) -> list[ModelStatus]:
        return [msgspec.structs.replace(one, leases=len(self.table)) for one in self.statuses]

    def asks(self, number: int) -> None:
        """Another request for the model."""
        request = GenerateRequest(prompt="x", model="m")
        self.table.add(RequestRecord(f"r{number}", request, time.monotonic(), owner=f"key-{number}"))

    def knows(self, **fields: Any) -> None:
        """The engine says that of the model now."""
        self.figures.models = {"m": msgspec.structs.replace(READY, **fields)}
        self.figures.models_s = time.monotonic()

    async def told(self) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """What subscribers are told of changes now: fields, and owners of requests in them."""
        self.rows.tell_changes()
        self.bus.publish("end", {})
        found = []
        async for event in self.events:
            if event.event == "end":
                return found
            found.append((event.fields, event.owners))
        raise AssertionError("the bus was closed")


@pytest.fixture
async def served() -> Served:
    """With a subscriber that has its snapshot."""
    found = Served()
    snapshot = await anext(found.events)
    assert [model["leases"] for model in snapshot.fields["models"]] == [0]
    return found


async def test_what_a_reader_knows_is_not_told_again(served: Served) -> None:
    """SPEC O20: neither after its snapshot, nor after a change or a move that it was told."""
    assert await served.told() == []
    served.asks(1)
    assert len(await served.told()) == 1
    assert await served.told() == []
    served.asks(2)
    served.bus.model_moved(ModelState(model="m", state="ready"))
    ((moved, owners),) = await served.told()
    assert (moved["what"], moved["leases"], moved["used_by"]) == ("moved", 2, ["r1", "r2"])
    assert owners == {"r1": "key-1", "r2": "key-2"}


async def test_few_users_are_named_and_all_counted(served: Served) -> None:
    """SPEC O20: the oldest; a row stays small."""
    for number in range(MAX_USERS + 4):
        served.asks(number)
    ((fields, owners),) = await served.told()
    assert (fields["what"], fields["leases"]) == ("changed", MAX_USERS + 4)
    assert fields["used_by"] == [f"r{number}" for number in range(MAX_USERS)]
    assert list(owners) == fields["used_by"]


async def test_the_time_to_be_unloaded_passes_by_itself(served: Served) -> None:
    """SPEC O20: it is told when it is another one, counted from when it was said, not while in use."""
    served.knows(unload_in_s=600.0)
    ((fields, _),) = await served.told()
    assert 599 < fields["unload_in_s"] <= 600
    served.knows(unload_in_s=600.5)
    assert await served.told() == []
    served.figures.models_s -= 100.0
    ((fields, _),) = await served.told()
    assert 499 < fields["unload_in_s"] <= 501
    served.asks(1)
    ((fields, _),) = await served.told()
    assert fields["unload_in_s"] is None


async def test_a_model_that_is_served_from_now_on_is_told(served: Served) -> None:
    """SPEC O20: no engine reports a move of it before its first load."""
    served.statuses = [READY, ModelStatus(id="new", state="absent")]
    ((fields, _),) = await served.told()
    assert (fields["model"], fields["state"]) == ("new", "absent")


async def test_nobody_is_told_before_somebody_reads() -> None:
    """SPEC O3: a library without subscribers keeps no events."""
    served = Served()
    served.asks(1)
    served.rows.tell_changes()
    assert not served.bus._kept
    await served.events.aclose()
