"""Server-sent events that carry their type twice: in the `event` line and in the JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from stoker.ipc.events import PrefillProgress

_encode = msgspec.json.Encoder().encode


def typed_frames(objects: Iterable[dict[str, Any]]) -> bytes:
    """Frames of objects that each have a `type`."""
    return b"".join(
        b"event: " + one["type"].encode() + b"\ndata: " + _encode(one) + b"\n\n" for one in objects
    )


def progress_fields(event: PrefillProgress) -> dict[str, Any]:
    """`prompt_progress` as in chat chunks: tokens in all, from the cache, computed so far; milliseconds."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.time_ms,
    }
