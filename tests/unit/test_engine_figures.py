"""What an engine said of itself, as far as a client keeps it; what others of its readers get of that."""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.client.event_bus import EventBus, RuntimeEvent
from stoker.client.figures import MAX_MODELS, EngineFigures
from stoker.client.requests.history import MAX_RECENT, RequestHistory
from stoker.client.requests.table import RequestTable
from stoker.client.snapshot import KnownEngine, snapshot_of
from stoker.client.status import NO_STATUS
from stoker.ipc.figures import MemoryFigures, StepFigures
from stoker.ipc.request import Priority
from stoker.ipc.status import MemoryStatus, ModelStatus, RequestStatus
from stoker.server.inbound.security import Identity
from stoker.server.native.events import MAX_FRAMES, EventFrames


def steps_of(model: str) -> StepFigures:
    """A summary of one step."""
    no_time = dict.fromkeys(("span_s", "step_ms", "longest_ms", "target_ms", "rows"), 0.0)
    nothing = dict.fromkeys(("prompt_tokens", "tokens", "num_prefill", "num_decode"), 0)
    return StepFigures(model=model, num_steps=1, **no_time, **nothing)


def test_steps_are_kept_of_so_many_models() -> None:
    """SPEC O21: the one that stepped longest ago goes."""
    figures = EngineFigures(EventBus())
    for number in range(MAX_MODELS):
        figures.take(steps_of(f"m{number}"))
    figures.take(steps_of("m0"))
    figures.take(steps_of("new"))
    models = [each["model"] for each in figures.steps()]
    assert (len(models), models[-2:]) == (MAX_MODELS, ["m0", "new"])
    assert "m1" not in models


def test_an_engine_that_is_gone_steps_no_more_and_has_no_models() -> None:
    """SPEC O20: its memory is shown as it was, as it is what there is to know."""
    figures = EngineFigures(EventBus())
    figures.take(steps_of("m"))
    model = ModelStatus(id="m", state="ready", unload_in_s=9.0)
    memory = MemoryStatus(limit=100, footprint=7)
    figures.take(MemoryFigures(memory=memory, physical=200, devices=[], models=[model]))
    figures.engine_gone()
    assert (figures.steps(), figures.models) == ([], {})
    assert (figures.memory(NO_STATUS) or {})["footprint"] == 7


def test_a_snapshot_has_the_last_that_ended_however_long_ago() -> None:
    """SPEC O20: as many as the history keeps, so that a page shows what the status does."""
    table, bus = RequestTable(), EventBus()
    history = RequestHistory(table, bus, lambda _: True)
    one = RequestStatus(
        request_id="", model="m", priority=Priority.INTERACTIVE, kind="chat", route="/", arrived_at=0.0
    )
    names = [f"r{number}" for number in range(MAX_RECENT + 10)]
    for name in names:
        history.recent.append(msgspec.structs.replace(one, request_id=name, end_to_end_s=1.0))
    known = KnownEngine("1", {}, NO_STATUS, EngineFigures(bus), [], {}, [])
    fields, _ = snapshot_of(known, table, history)
    assert [row["request_id"] for row in fields["recent"]] == names[10:]


def test_an_event_is_made_once_for_a_key_and_so_many_are_kept() -> None:
    """SPEC O21: however many read with that key, and however long they do."""
    num_asked = 0

    def owner_of(request_id: str) -> str:
        nonlocal num_asked
        num_asked += 1
        return request_id

    frames, caller = EventFrames(owner_of), Identity(key_digest="key", refusal="no operator")
    event: dict[str, Any] = {"request_id": "r", "move": {"reason": "waits for other", "by": "other"}}
    for number in range(MAX_FRAMES + 10):
        told = RuntimeEvent(event="request", at=0.0, fields=event, owner="key", id=f"p-{number}")
        first, again = frames.of(told, caller), frames.of(told, caller)
        assert first == again
    assert num_asked == MAX_FRAMES + 10
    assert b"other" not in first.replace(b"another request", b"")
    assert len(frames._frames) == MAX_FRAMES
