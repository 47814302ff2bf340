"""What the routes share: the runtime, the settings, the metrics and the bodies that come in.

One `ServerContext` is made by `app` and handed to each router; nothing here knows HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import NotReadyError
from stoker.server.inbound.bodies import IncomingBodies
from stoker.server.log import RecentLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.status import ModelStatus
    from stoker.runtime import Runtime, RuntimeStatus
    from stoker.server.metrics import Metrics
    from stoker.settings import ServerSettings

RETRY_AFTER_S = 2.0


@dataclass
class ServerContext:
    """One server's shared parts.

    Attributes:
        bodies: of requests, while they come in.
        log: its last records.
        is_stopping: set once when the shutdown begins; new work is refused from then on.
        started_at: seconds since the epoch.
    """

    runtime: Runtime
    settings: ServerSettings
    metrics: Metrics
    bodies: IncomingBodies = field(init=False)
    log: RecentLog = field(default_factory=RecentLog)
    started_at: float = field(default_factory=time.time)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.bodies = IncomingBodies(self.settings)
        self.runtime.on_call = self.metrics.count_call
        self.runtime.on_ended = self.metrics.ended.count

    def require_ready(self) -> None:
        """Refuse work that cannot start now.

        Raises:
            NotReadyError: models are loading, no engine starts, or the server stops.
        """
        if self.is_stopping:
            raise NotReadyError("the server is stopping", retry_after_s=RETRY_AFTER_S)
        if self.runtime.is_ready:
            return
        health = self.runtime.health()
        if health.is_alive:
            raise NotReadyError(
                "the models are not ready yet; /ready tells when", retry_after_s=RETRY_AFTER_S
            )
        text = f"the engine is {health.state} for {health.for_s:.0f} s, last: {health.reason}"
        raise NotReadyError(text, retry_after_s=max(RETRY_AFTER_S, health.next_start_s or 0.0))


def models_now(status: RuntimeStatus, heard: Sequence[ModelStatus]) -> list[ModelStatus]:
    """Every served model, the default first: as the engine knows it, else as last heard of."""
    known = {model.id: model for model in status.engine.models}
    served = [known.pop(model.id, model) for model in heard]
    return served + list(known.values())
