"""What the routes share: the runtime, the settings, the metrics and the bodies that come in.

One `ServerContext` is made by `app` and handed to each router; nothing here knows HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.client.process.lifecycle import EngineState
from stoker.errors import NotReadyError
from stoker.ipc.model import ModelLife
from stoker.server.inbound.bodies import IncomingBodies
from stoker.server.inbound.named_keys import NamedKeys
from stoker.server.inbound.quotas import Quotas
from stoker.server.inbound.security import Access, KeyRing
from stoker.server.log import RecentLog
from stoker.server.openai.responses.store import ResponseStore, StoreBounds
from stoker.server.tracing.start import tracing_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import ModelStatus, RequestStatus
    from stoker.runtime import Runtime, RuntimeStatus
    from stoker.server.metrics.metrics import Metrics
    from stoker.server.tracing.requests import RequestTracing
    from stoker.settings import ServerSettings

RETRY_AFTER_S = 2.0
_ON_THEIR_WAY = frozenset({ModelLife.DOWNLOADING, ModelLife.LOADING})
_MAX_TOLD = 4


@dataclass
class ServerContext:
    """One server's shared parts.

    Attributes:
        bodies: of requests, while they come in.
        access: whose requests are taken.
        quotas: what named keys have used of what they may.
        responses: those that are stored.
        tracing: of requests, to a collector; None: nobody asked for it.
        on_keys: called after the keys have changed; one for each connection that outlives a request.
        log: its last records.
        is_stopping: set once when the shutdown begins; new work is refused from then on.
        started_at: seconds since the epoch.
    """

    runtime: Runtime
    settings: ServerSettings
    metrics: Metrics
    bodies: IncomingBodies = field(init=False)
    access: Access = field(init=False)
    quotas: Quotas = field(init=False)
    responses: ResponseStore = field(init=False)
    tracing: RequestTracing | None = field(init=False)
    on_keys: set[Callable[[], None]] = field(default_factory=set)
    log: RecentLog = field(default_factory=RecentLog)
    started_at: float = field(default_factory=time.time)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        settings = self.settings
        self.bodies = IncomingBodies(settings)
        self._named_keys = NamedKeys(settings.keys)
        files = KeyRing.read(settings.api_key_file), KeyRing.read(settings.admin_key_file)
        self.access = Access(*files, self._named_keys)
        self.quotas = Quotas(self._named_keys)
        bounds = StoreBounds(settings.max_responses, settings.responses_bytes, settings.responses_age_s)
        self.responses = ResponseStore(settings.responses_dir, bounds)
        self.runtime.on_call = self.metrics.count_call
        self.runtime.on_ended = self._ended
        self.runtime.on_arrival = self._arrived
        self.tracing = tracing_to(settings.otel_endpoint)

    def _arrived(self, request_id: str, owner: str, request: GenerateRequest, num_members: int) -> None:
        self.quotas.arrived(request_id, owner, request, num_members)
        if self.tracing is not None:
            self.tracing.arrived(request_id, request)

    def _ended(self, status: RequestStatus) -> None:
        self.metrics.ended.count(status)
        self.quotas.ended(status)
        if self.tracing is not None:
            self.tracing.ended(status)

    def take_keys(self, settings: ServerSettings) -> None:
        """Take the keys of settings that were read again; what runs goes on, and what was used stays used.

        Raises:
            MachineSetupError: a key file cannot be read; nothing has changed.
        """
        files = KeyRing.read(settings.api_key_file), KeyRing.read(settings.admin_key_file)
        self.access.replace(*files)
        self._named_keys.replace(settings.keys)
        for changed in tuple(self.on_keys):
            changed()

    def require_ready(self, about: Callable[[Sequence[ModelStatus]], str] | None = None) -> None:
        """Refuse work that cannot start now.

        Args:
            about: says how far the models are; None: by their names.

        Raises:
            NotReadyError: models are loading, no engine starts, or the server stops.
        """
        if self.is_stopping:
            raise NotReadyError("the server is stopping", retry_after_s=RETRY_AFTER_S)
        if self.runtime.is_ready:
            return
        health = self.runtime.health()
        if health.is_alive:
            text = (about or loading_text)(self.runtime.model_states())
            if health.state == EngineState.STARTING and health.reason and about is None:
                text = health.reason
            raise NotReadyError(f"{text}; /ready tells when they are", retry_after_s=RETRY_AFTER_S)
        text = f"the engine is {health.state} for {health.for_s:.0f} s, last: {health.reason}"
        raise NotReadyError(text, retry_after_s=max(RETRY_AFTER_S, health.next_start_s or 0.0))


def loading_text(models: Sequence[ModelStatus]) -> str:
    """Which models are on their way, and how far: "a: loading, weights, 40 %"."""
    told = []
    for model in models:
        if model.state in _ON_THEIR_WAY:
            share = f"{model.fraction:.0%}" if model.fraction else ""
            told.append(f"{model.id}: {', '.join(filter(None, (model.state, model.stage, share)))}")
    more = [f"{len(told) - _MAX_TOLD} more"] if len(told) > _MAX_TOLD else []
    names = "; ".join([*told[:_MAX_TOLD], *more])
    return f"the models are not ready yet ({names})" if names else "the models are not ready yet"


def ready_count_text(models: Sequence[ModelStatus]) -> str:
    """The same without names, for those who come without a key."""
    if not models:
        return loading_text(models)
    num_ready = sum(model.state == ModelLife.READY for model in models)
    return f"the models are not ready yet ({num_ready} of {len(models)})"


def models_now(status: RuntimeStatus, heard: Sequence[ModelStatus]) -> list[ModelStatus]:
    """Every served model, the default first: as the engine knows it, else as last heard of."""
    known = {model.id: model for model in status.engine.models}
    served = [known.pop(model.id, model) for model in heard]
    return served + list(known.values())
