"""What a caller who is no operator is shown: of other callers' requests only counts and places.

The forms stay those of `schema.status` and of the event stream; what is withheld is null, empty or 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.client.event_bus import RuntimeEvent

_WITHHELD = "told to operators only"


def redact_status(document: dict[str, Any], may_see: Callable[[str], bool]) -> None:
    """Blank what belongs to other callers in a document of GET /v1/runtime; changes the document.

    Args:
        document: from `status_document`.
        may_see: whether the request of that runtime id is shown.
    """
    for entry in (each for name in ("slots", "queue", "parked", "paused") for each in document[name]):
        if entry["request_id"] is None or not may_see(entry["request_id"]):
            entry |= {"request_id": None, "num_tokens": 0, "story": []}
    for model in document["models"]:
        model["reason"] = ""  # may name files and requests
    document["cache"]["disk"]["problem"] = ""


def redacted_event(event: RuntimeEvent, may_see: Callable[[str], bool]) -> RuntimeEvent | None:
    """The event without reasons; None: it is about another caller's request and is not shown.

    Args:
        event: of the runtime.
        may_see: whether requests of that owner are shown.
    """
    if event.event == "request":
        return event if may_see(event.owner) else None
    fields = {name: value for name, value in event.fields.items() if name != "reason"}
    if error := fields.get("error"):
        fields["error"] = {**error, "message": _WITHHELD}
    return msgspec.structs.replace(event, fields=fields)
