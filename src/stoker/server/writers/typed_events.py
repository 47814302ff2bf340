"""Server-sent events that carry their type twice: in the `event` line and in the JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def typed_frames(objects: Iterable[dict[str, Any]]) -> bytes:
    """Frames of objects that each have a `type`."""
    return b"".join(
        b"event: " + one["type"].encode() + b"\ndata: " + _encode(one) + b"\n\n" for one in objects
    )
