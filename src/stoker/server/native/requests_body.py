"""The document of GET /v1/runtime/requests: who is served and who is kept, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.client.store.kept import KeptRequest
    from stoker.ipc.status import EngineStatus
    from stoker.runtime import RuntimeStatus
    from stoker.server.context import OwnedRequest

HELD = "held"  # the front has it: it has not reached an engine, or there is none


def requests_document(
    live: Sequence[OwnedRequest], kept: Sequence[KeptRequest], status: RuntimeStatus
) -> list[dict[str, object]]:
    """One entry a request of the runtime; the live ones first, as they came."""
    places = _places(status.engine)
    entries: list[dict[str, object]] = []
    for request in live:
        state, num_tokens = places.get(request.id, (HELD, 0))
        entries.append(_entry(request, state, num_tokens) | {"is_kept": False})
    return entries + [_entry(found, found.state, found.num_tokens) | {"is_kept": True} for found in kept]


def _entry(request: OwnedRequest | KeptRequest, state: str, num_tokens: int) -> dict[str, object]:
    return {
        "id": request.id,
        "names": request.names,
        "kind": "chat" if request.is_chat else "completion",
        "model": request.model,
        "state": state,
        "num_tokens": num_tokens,
    }


def _places(engine: EngineStatus) -> dict[str, tuple[str, int]]:
    """State of each request that the engine has, and its tokens; of several choices the busiest counts."""
    places: dict[str, tuple[str, int]] = {}
    for state, waiting in (("queued", engine.queue), ("parked", engine.parked), ("paused", engine.paused)):
        places |= {found.request_id: (state, found.num_tokens) for found in waiting}
    places |= {slot.request_id: (slot.state, slot.num_tokens) for slot in engine.slots if slot.request_id}
    return places
