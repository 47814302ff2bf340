"""docs/status.md names what status and events hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker.client.event_bus import MAX_KEPT
from stoker.client.requests.history import MAX_RECENT
from stoker.client.supervisor import MAX_EXITS
from stoker.engine.report import NUM_PREFIXES
from stoker.ipc.status import EngineHealth, EngineStatus, RequestStatus, RuntimeStatus
from stoker.server.log import MAX_RECORDS
from stoker.server.native.runtime import status_document

PAGE = (Path(__file__).parents[2] / "docs" / "status.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", PAGE))


def test_every_field_of_a_request_is_explained() -> None:
    """O3: but whose it is, which nobody is shown."""
    assert set(RequestStatus.__struct_fields__) - {"owner"} <= NAMED


def test_every_part_of_the_status_is_explained() -> None:
    """I4."""
    engine = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)
    health = EngineHealth(state="serving")
    status = RuntimeStatus(
        pid=1, state="serving", restarts=0, label="", threads=1, engine=engine, health=health
    )
    assert set(status_document(status, [])) - {"heat"} <= NAMED


@pytest.mark.parametrize("number", [MAX_RECENT, MAX_EXITS, NUM_PREFIXES, MAX_RECORDS, MAX_KEPT])
def test_the_page_says_how_much_is_kept(number: int) -> None:
    """O3: the bounds are those of the code."""
    assert re.search(rf"\b{number:,}\b", PAGE)
