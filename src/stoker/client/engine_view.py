"""What is known of the engine: as it answers now, else as it was last heard of, and how long ago that was.

A long step, a restart or a suspension blanks nothing: memory, stored prefixes and counters stay as they were,
while slots and waiting requests are those of the client's own records (SPEC I4).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.client.status import NO_STATUS, known_status
from stoker.errors import NotReadyError
from stoker.ipc.commands import GetStatus
from stoker.ipc.model import ModelClass, ModelLife
from stoker.ipc.status import EngineStatus

if TYPE_CHECKING:
    from stoker.client.dispatcher import Dispatcher
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.requests.table import RequestTable

STATUS_WAIT_S = 1.0
"""What an engine may take to answer; in a longer step of it, what is known here is shown."""

Ask = Callable[[GetStatus], Awaitable[dict[str, Any]]]


class EngineView:
    """The last status of an engine.

    Args:
        table: of the live requests.
        registry: the models.
        dispatcher: knows whether an engine serves.

    Attributes:
        last: what an engine said last.
    """

    def __init__(self, table: RequestTable, registry: ModelRegistry, dispatcher: Dispatcher) -> None:
        self.last = NO_STATUS
        self._table = table
        self._registry = registry
        self._dispatcher = dispatcher
        self._said_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<EngineView {self.age_s():.1f} s old>"

    def age_s(self) -> float:
        """Seconds since an engine said how it is, or has been expected to; 0: there was none yet."""
        has_been = self._dispatcher.has_engine or self.last is not NO_STATUS
        return time.monotonic() - self._said_s if has_been else 0.0

    async def status(self, ask: Ask) -> EngineStatus:
        """What an engine answers, which is `last` from then on, else what is known here."""
        if not self._dispatcher.has_engine:
            await asyncio.sleep(0)  # a caller that polls must not keep the engine from starting
            return self._known()
        try:
            answer = (await asyncio.wait_for(ask(GetStatus(0)), STATUS_WAIT_S))["status"]
        except (NotReadyError, TimeoutError):  # it ended between the two questions, or a step is long
            return self._known()
        status = answer if isinstance(answer, EngineStatus) else msgspec.convert(answer, EngineStatus)
        models = [one for one in status.models if (entry := self._registry.get(one.id)) and entry.is_shown]
        self.last = msgspec.structs.replace(status, models=models)
        self._said_s = time.monotonic()
        return self.last

    def _known(self) -> EngineStatus:
        known = known_status(self._table.live(), self.slots(), self.last, time.monotonic())
        if self._dispatcher.has_engine:
            return known
        return msgspec.structs.replace(known, models=[])  # which the registry knows better

    def slots(self) -> dict[str, int]:
        """How many each model in memory has, by its id; of an engine that is away those it had."""
        ready = [one for one in self._registry.infos() if self._registry.state(one.id) is ModelLife.READY]
        found = {one.id: one.num_slots for one in ready if one.model_class != ModelClass.ENCODER}
        had = {} if self._dispatcher.has_engine else Counter(slot.model for slot in self.last.slots)
        return {**had, **found}
