"""What the routes share: the runtime, the settings, the metrics and the live requests with their names.

One `ServerContext` is made by `app` and handed to each router; nothing here knows HTTP.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import NotReadyError
from stoker.server.inbound.bodies import IncomingBodies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stoker.runtime import Runtime
    from stoker.server.metrics import Metrics
    from stoker.settings import ServerSettings

RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class OwnedRequest:
    """A request whose client is connected.

    Attributes:
        id: the runtime's.
        names: what else it is known by: the client's `X-Request-Id`, then the answer's id.
        owner: digest of the API key that it came with; empty: none is asked for.
    """

    id: str
    names: tuple[str, ...]
    model: str
    is_chat: bool
    owner: str = ""


class OwnedRequests:
    """Names under which running requests are known outside, and the runtime's ids behind them.

    The header's `X-Request-Id`, the answer's `id` and the runtime's own id all lead to the same work.
    A client may send the same `X-Request-Id` twice, so a name can stand for several requests.
    """

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}
        self._requests: dict[str, OwnedRequest] = {}

    def __repr__(self) -> str:
        return f"LiveRequests({len(self._ids)} names)"

    @contextlib.contextmanager
    def entered(self, requests: Sequence[OwnedRequest]) -> Iterator[None]:
        """Known by their names and their own ids while the block runs."""
        pairs = {(name, request.id) for request in requests for name in (*request.names, request.id)}
        self._requests |= {request.id: request for request in requests}
        for name, own in pairs:
            self._ids.setdefault(name, []).append(own)
        try:
            yield
        finally:
            for name, own in pairs:
                self._ids[name].remove(own)
                if not self._ids[name]:
                    del self._ids[name]
            for request in requests:
                del self._requests[request.id]

    def runtime_ids(self, name: str, is_reached: Callable[[str], bool]) -> list[str]:
        """The runtime's ids behind `name`, of requests whose owners `is_reached` takes; none is no error."""
        return sorted(own for own in self._ids.get(name, ()) if is_reached(self._requests[own].owner))

    def requests(self) -> list[OwnedRequest]:
        """Everything that is live, oldest first."""
        return list(self._requests.values())

    def num_names(self) -> int:
        """Names known now; 0 when nothing runs."""
        return len(self._ids)


@dataclass
class ServerContext:
    """One server's shared parts.

    Attributes:
        bodies: of requests, while they come in.
        is_stopping: set once when the shutdown begins; new work is refused from then on.
        started_at: seconds since the epoch.
    """

    runtime: Runtime
    settings: ServerSettings
    metrics: Metrics
    live: OwnedRequests = field(default_factory=OwnedRequests)
    bodies: IncomingBodies = field(init=False)
    started_at: float = field(default_factory=time.time)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.bodies = IncomingBodies(self.settings)

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
