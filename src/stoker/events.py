"""What `Runtime.stream`, `on_notice`, `on_load` and `Runtime.events` tell, by stable names.

Holds exports only: events of a request are `ipc.events`, those of a runtime `client.event_bus`. Apart because
applications import it, as they do `errors`.
"""

from stoker.client.event_bus import RuntimeEvent
from stoker.client.requests.stream import Notice, StreamEvent
from stoker.ipc.events import (
    Admitted,
    Delta,
    Finished,
    ModelState,
    Parked,
    Paused,
    PrefillProgress,
    PromptEcho,
    Queued,
    Resumed,
    StateReady,
)

__all__ = [
    "Admitted",
    "Delta",
    "Finished",
    "ModelState",
    "Notice",
    "Parked",
    "Paused",
    "PrefillProgress",
    "PromptEcho",
    "Queued",
    "Resumed",
    "RuntimeEvent",
    "StateReady",
    "StreamEvent",
]
