"""What a runtime says of itself: live requests, ends of engines, what is stored, and while a step is long."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import aclosing
from typing import Any

import pytest

from stoker import GenerateRequest, Runtime
from stoker.cache.entry import Entry
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.cache.radix import key_of
from stoker.client import engine_view
from stoker.client.requests.record import RequestRecord
from stoker.client.status import NO_STATUS, known_status
from stoker.ipc.events import Admitted, Delta, Parked, Queued
from stoker.ipc.request import Priority
from stoker.machine.ledger import Ledger
from stoker.server.log import MAX_CHARS, MAX_RECORDS, RecentLog

SLOW = "fake:eog_period=0,step_delay_s=0.05"


def record(name: str, *events: Any, **fields: Any) -> RequestRecord:
    """A request that an engine has, after these events."""
    found = RequestRecord(name, GenerateRequest(prompt="x", model="m", **fields), 0.0)
    found.stage = found.stage.SENT
    for event in events:
        found.meter.take(event, 1.0)
        found.take(event)
        if isinstance(event, Delta):
            found.moves.writes(event.index, 1.0)
        else:
            found.moves.take(event, 1.0)
    return found


def test_an_engine_that_does_not_answer_is_shown_by_what_the_client_knows() -> None:
    """SPEC I4: running, waiting and parked requests, with their classes; the last figures of all else."""
    job = {"priority": Priority.BACKGROUND}
    records = [
        record(
            "runs", Admitted("runs", 2, None, 5, slot=1), Delta(request_id="runs", index=0, token_ids=[1, 2])
        ),
        record(
            "parked",
            Admitted("parked"),
            Parked(request_id="parked", index=0, form="cells", reason="r"),
            **job,
        ),
        record("waits", Queued("waits", 0, 2.0)),
        RequestRecord("held", GenerateRequest(prompt="x", model="m"), 0.0),
    ]
    status = known_status(records, {"m": 2}, NO_STATUS, 2.0)
    idle, slot = status.slots
    assert (slot.id, slot.request_id, slot.state, slot.num_tokens) == (1, "runs", "decode", 7)
    assert (idle.id, idle.state, idle.request_id) == (0, "idle", None)
    assert [(one.request_id, one.position) for one in status.queue] == [("waits", 0), ("held", 1)]
    assert [(one.request_id, one.priority) for one in status.parked] == [("parked", Priority.BACKGROUND)]


async def test_slots_and_queue_are_never_empty_while_a_step_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC I4: an engine in a long step answers no question; its requests are shown all the same."""
    monkeypatch.setattr(engine_view, "STATUS_WAIT_S", 0.0)
    async with Runtime(SLOW, isolation="thread", slots=1, ctx_size=512, drain_s=0.0) as runtime:
        first = runtime.stream(GenerateRequest(prompt="one", max_tokens=400), "first")
        async with aclosing(first):
            async for event in first:
                if isinstance(event, Delta):
                    break
            second = runtime.stream(GenerateRequest(prompt="two", max_tokens=4), "second")
            async with aclosing(second):
                await anext(second)
                status = await runtime.status()
        assert [slot.request_id for slot in status.engine.slots if slot.request_id] == ["first"]
        assert [one.request_id for one in status.engine.queue] == ["second"]
        assert status.as_of_s > 0


async def test_live_requests_are_listed_with_what_is_known_of_them() -> None:
    """SPEC I4: tokens of prompt, cache and answer apart, the bound, where it came by, and its progress."""
    async with Runtime(SLOW, isolation="thread", slots=1, ctx_size=512, drain_s=0.0) as runtime:
        stream = runtime.stream(
            GenerateRequest(prompt="one", max_tokens=300), "mine", owner="key", route="/v1/completions"
        )
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Delta):
                    break
            status = await runtime.status()
    (row,) = status.requests
    assert (row.request_id, row.owner, row.route, row.state) == ("mine", "key", "/v1/completions", "decode")
    assert (row.prompt_tokens, row.cached_tokens, row.max_tokens) == (row.processed_tokens, 0, 300)
    assert row.completion_tokens > 0
    assert row.finish_reason is None
    assert status.version
    assert status.up_s > 0
    assert (status.settings["policy"], status.settings["slots"]) == ("latency", 1)
    assert set(status.engine.activity["fake"]) >= {"step_ms", "rows_per_step", "people_share", "jobs_share"}
    assert len(status.engine.memory.ladder) == 7
    assert (
        status.engine.memory.thresholds["fraction_warning"]
        < status.engine.memory.thresholds["fraction_critical"]
    )


async def test_others_are_told_of_a_prompts_progress_that_its_client_did_not_ask_for() -> None:
    """SPEC O3, S2: now and then; the stream of the request itself has none of it."""
    async with Runtime(
        "fake:eog_period=0,step_delay_s=0.01", isolation="thread", slots=1, ctx_size=2048
    ) as runtime:
        events = runtime.events()
        await anext(events)
        kinds = {
            type(event).__name__
            async for event in runtime.stream(GenerateRequest(prompt="word " * 200, max_tokens=1), "mine")
        }
        told: list[dict[str, Any]] = []
        while not told or told[-1].get("what") != "finished":
            told.append((await anext(events)).fields)
        await events.aclose()
    assert "PrefillProgress" not in kinds
    progress = [fields for fields in told if fields.get("what") == "prefill_progress"]
    assert progress
    assert 0 < progress[0]["processed"] <= progress[0]["total"]


async def test_the_end_of_an_engine_is_remembered_with_who_survived() -> None:
    """SPEC L3, O3: why, how long it had served, and how many went on."""
    async with Runtime(SLOW, slots=1, ctx_size=512, drain_s=0.0) as runtime:
        stream = runtime.stream(GenerateRequest(prompt="one", max_tokens=8))
        killed = 0
        async for event in stream:
            if isinstance(event, Delta) and not killed:
                killed = (await runtime.status()).pid
                os.kill(killed, signal.SIGKILL)
        exits = (await runtime.status()).exits
    (end,) = exits
    assert (end.pid, end.num_survived, end.num_failed) == (killed, 1, 0)
    assert end.reason
    assert end.served_s > 0


def test_the_longest_stored_prefixes_are_shown_without_their_tokens() -> None:
    """SPEC C14: tokens, those of its own, bytes, hits and where."""
    cache = PrefixCache(CacheLimits(ram_bytes=2**20), Ledger())
    for length in (100, 300, 200):
        tokens = [length, *range(1000, 1000 + length - 1)]
        entry = Entry(b"n" * 32, "m", "file.gguf", key_of(tokens), 10 * length)
        cache.store(entry, 1.0)
        cache.filled(entry, b"x" * 10 * length, 1.0)
    longest = next(entry for entry in cache.index if entry.num_tokens == 300)
    cache.used(longest, 5.0)
    first, second = cache.prefixes(2, [], {"file.gguf": "m"}, 8.0)
    assert (first.model, first.parent) == ("m", None)
    assert (first.num_tokens, first.own_tokens, first.num_hits, first.idle_s) == (300, 300, 1, 3.0)
    assert (first.ram_bytes, first.disk_bytes, first.where, first.namespace) == (3000, 0, "ram", "6e6e6e6e")
    assert (second.num_tokens, second.num_hits) == (200, 0)


def test_the_last_records_of_the_log_are_kept_and_no_more() -> None:
    """SPEC O3: bounded in number and length; a message that cannot be written is none of the caller's."""
    kept = RecentLog()
    kept.attach()
    try:
        log = logging.getLogger("stoker.test")
        for number in range(MAX_RECORDS + 2):
            log.warning("record %d", number)
        log.error("x" * (2 * MAX_CHARS))
        log.propagate = False
        log.addHandler(kept)
        logging.raiseExceptions = False
        log.warning("%d", "no number")
    finally:
        logging.raiseExceptions = True
        log.propagate = True
        log.removeHandler(kept)
        kept.detach()
    logging.getLogger("stoker.test").warning("after")
    records = kept.after(0)
    assert len(records) == MAX_RECORDS
    assert (records[0].message, records[0].level, records[0].logger) == ("record 3", "WARNING", "stoker.test")
    assert len(records[-1].message) == MAX_CHARS
    assert [record.number for record in kept.after(records[-2].number)] == [records[-1].number]
