"""What others do to a model, as a reader of events is told it: pins, use, the time to be unloaded."""

from __future__ import annotations

import json
from contextlib import contextmanager

import httpx
import pytest
from test_told_moves import EVENTS, SLOW, Story, happens, posted

from stoker.client.event_bus import RuntimeEvent
from stoker.runtime import Runtime
from stoker.server.log import EventLog

PIN = "/v1/runtime/models/pin"


@contextmanager
def reading(server, **more):
    """A client of a server, and what its reader of events is told after the snapshot."""
    server.ready.result(60)
    with httpx.Client(base_url=server.url, timeout=60) as http, http.stream("GET", EVENTS, **more) as answer:
        story = Story(answer)
        story.until(lambda event: event["event"] == "snapshot")
        yield http, story


def model_with(**wanted):
    """Whether an event is of a model that has these fields."""
    return lambda event: event["event"] == "model" and wanted.items() <= event.items()


@pytest.fixture(scope="module")
def slow_server(_module_servers):
    """A server of one slot and slow steps, whose model stays for ten minutes."""
    make = lambda: Runtime(model=SLOW, isolation="thread", slots=1, ctx_size=2048, keep_alive=600)  # noqa: E731
    return _module_servers(make)


def test_a_pin_that_another_sets_is_told(slow_server):
    """O20: without a new snapshot; the row is that of a snapshot, and its state is where it was."""
    with reading(slow_server) as (http, story):
        http.post(PIN, json={"model": "fake"}).raise_for_status()
        pinned = story.until(model_with(is_pinned=True))
        http.post(PIN, json={"model": "fake", "pinned": False}).raise_for_status()
        free = story.until(model_with(is_pinned=False))
        with http.stream("GET", EVENTS) as late:
            snapshot = Story(late).until(lambda event: event["event"] == "snapshot")
    assert (pinned["what"], pinned["state"], pinned["num_slots"]) == ("changed", "ready", 1)
    (row,) = snapshot["models"]
    assert row.keys() == free.keys() - {"event", "at", "id", "what"}
    assert pinned["unload_in_s"] is None
    assert 0 < row["unload_in_s"] <= 600


def test_who_uses_a_model_is_told_while_they_do(slow_server):
    """O20: by ids, calls in place of their requests; then how long it stays."""
    with reading(slow_server) as (http, story):
        asking = posted(http, "mine", 60)
        story.until(happens("mine", "decoding"))
        used = story.until(model_with(leases=1))
        story.until(happens("mine", "finished"))
        idle = story.until(lambda event: model_with(leases=0)(event) and event["unload_in_s"] is not None)
        asking.join()
    assert (used["used_by"], used["unload_in_s"]) == (["mine"], None)
    assert idle["used_by"] == []
    assert 590 < idle["unload_in_s"] <= 600


def test_a_key_is_not_told_which_requests_of_others_use_a_model(start_server, tmp_path):
    """S4: how many there are it sees, as in status; those it has it sees by their ids."""
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("key-one\nkey-two\n", encoding="utf-8")
    admins.write_text("key-admin\n", encoding="utf-8")
    make = lambda: Runtime(model=SLOW, isolation="thread", slots=2, ctx_size=2048)  # noqa: E731
    server = start_server(make, api_key_file=keys, admin_key_file=admins)
    one, two = ({"Authorization": f"Bearer key-{name}"} for name in ("one", "two"))
    with reading(server, headers=one) as (http, story):
        both = [posted(http, "mine", 80, **one), posted(http, "secret", 80, **two)]
        told = story.until(model_with(leases=2))
        with http.stream("GET", EVENTS, headers=one) as late:
            snapshot = Story(late).until(lambda event: event["event"] == "snapshot")
        for asking in both:
            asking.join()
    assert told["used_by"] == snapshot["models"][0]["used_by"] == ["mine"]
    assert snapshot["models"][0]["leases"] == 2
    assert "secret" not in json.dumps(story.all)


async def test_the_log_has_a_line_for_each_move_and_none_for_who_uses_a_model(caplog):
    """O3: it would have one for each request."""

    async def events():
        moves = (
            ("moved", "ready", "", None),
            ("changed", "ready", "", None),
            ("moved", "failed", "", None),
            ("moved", "ready", "why", None),
            ("moved", "loading", "", None),
            ("moved", "ready", "", {"message": "the load was refused"}),
        )
        for what, state, reason, error in moves:
            row = {"what": what, "model": "m", "state": state, "reason": reason, "error": error, "leases": 3}
            yield RuntimeEvent(event="model", at=0.0, fields=row)

    with caplog.at_level("INFO", "stoker.models"):
        await EventLog().follow(events())
    assert [record.message for record in caplog.records] == [
        "m is ready",
        "m failed",
        "m is ready, served in another way: why",
        "m is loading",
        "m is ready, served as before: the load was refused",
    ]
