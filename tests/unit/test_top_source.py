"""The documents of a server's events as `stoker top` reads them: what it takes, and how it comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker.cli.top import source
from stoker.cli.top.source import SCHEMA, EventSource
from stoker.client import snapshot
from stoker.errors import MachineSetupError, ServerLostError


class Server:
    """Plays connections: lists of documents, or what ends them."""

    url = "http://here"

    def __init__(self, *connections: list[dict[str, Any]] | Exception) -> None:
        self._connections = list(connections)
        self.asked_after: list[str] = []

    async def stream(
        self, _method: str, _path: str, *, headers: Any
    ) -> AsyncGenerator[SimpleNamespace, None]:
        """The next connection."""
        self.asked_after.append((headers or {}).get("Last-Event-ID", ""))
        played = self._connections.pop(0)
        if isinstance(played, Exception):
            raise played
        for document in played:
            yield SimpleNamespace(data=json.dumps(document), id=document["id"])

    @staticmethod
    def read(data: str, _kind: Any) -> Any:
        """A document."""
        return json.loads(data)


def state(number: int, schema: int = SCHEMA) -> dict[str, Any]:
    """A snapshot."""
    return {"event": "snapshot", "id": f"p-{number}", "schema": schema}


def read_from(server: Server, lost: list[str]) -> EventSource:
    """The source of a server that notes what is said of it."""
    return EventSource(cast("Any", server), lost.append)


def test_it_reads_the_schema_that_this_version_writes() -> None:
    """O16: a change of one needs a look at the other."""
    assert SCHEMA == snapshot.SCHEMA


async def test_events_of_another_schema_are_refused_with_both_numbers() -> None:
    """O16: fields may mean something else there."""
    with pytest.raises(MachineSetupError, match=f"schema 7.* reads schema {SCHEMA}"):
        await read_from(Server([state(1, schema=7)]), []).snapshot()


async def test_a_connection_that_ends_is_taken_up_after_the_last_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O16: however often; that it is lost is said, and that it is back."""
    monkeypatch.setattr(source, "_FIRST_PAUSE_S", 1e-6)
    lost: list[str] = []
    steps = [{"event": "steps", "id": "p-2"}]
    server = Server([state(1)], ServerLostError("gone"), [*steps, state(3)])
    async with aclosing(read_from(server, lost).documents()) as documents:
        found = [(await anext(documents))["id"] for _ in range(3)]
    assert found == ["p-1", "p-2", "p-3"]
    assert server.asked_after == ["", "p-1", "p-1"]
    assert lost == ["", "the server ended its events", "gone", ""]


async def test_a_server_that_was_never_there_is_not_waited_for() -> None:
    """O16, T1: the command ends with a line."""
    documents = read_from(Server(ServerLostError("gone")), []).documents()
    with pytest.raises(ServerLostError, match="gone"):
        await anext(documents)
