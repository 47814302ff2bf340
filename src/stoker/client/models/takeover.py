"""What the settings say of models after they were read again, taken over without losing a request.

What the client alone does for a model holds at once. One that has to be loaded otherwise serves on until the
new one is in, one that is no longer named until its last request has ended. Loads are `loading`'s.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from stoker.errors import ModelInUseError, StokerError
from stoker.ipc.commands import KnowModel

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from stoker.client.models.loading import ModelLoading, Tell
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.models.specs import FoundModel

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""How often a model is looked at that requests need as it is."""


class ModelTakeover:
    """Makes the served models those of the settings.

    Args:
        registry: what is known of the models.
        loads: loads and unloads them.
        tell: sends a command to the engine, if one serves.
    """

    def __init__(self, registry: ModelRegistry, loads: ModelLoading, tell: Tell) -> None:
        self._registry = registry
        self._loads = loads
        self._tell = tell
        self._acts: set[asyncio.Task[None]] = set()
        self._unlike: set[str] = set()  # models that are not loaded as the settings say

    def __repr__(self) -> str:
        return f"<ModelTakeover {len(self._acts)} under way>"

    def take(self, found: Sequence[FoundModel]) -> None:
        """From now on the settings name these models, the default first; what was under way is given up."""
        self.close()
        pinned = {model.id: model.is_pinned for model in self._registry.statuses({})}
        to_load, gone = self._registry.take(found)
        self._unlike.update(model.spec.id for model in to_load)
        for model in found:
            spec = model.spec
            self._tell(KnowModel(spec))
            if pinned.get(spec.id, spec.is_pinned) != spec.is_pinned:
                self._loads.pin(spec.id, is_pinned=spec.is_pinned)
            if spec.id in self._unlike:
                self._begin(self._load(model))
        for name in gone:
            self._begin(self._unload(name))

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        for act in self._acts:
            act.cancel()

    async def _load(self, model: FoundModel) -> None:
        """Load it as it is to be, as soon as no request needs it as it is."""
        while True:
            try:
                await self._loads.load(model.spec, model.info)
            except ModelInUseError:
                await asyncio.sleep(LOOK_AGAIN_S)
            except StokerError as error:
                log.warning("%s could not be loaded as the settings say: %s", model.spec.id, error)
                return
            else:
                self._unlike.discard(model.spec.id)
                log.info("%s is loaded as the settings say", model.spec.id)
                return

    async def _unload(self, name: str) -> None:
        """Free it when its last request has ended, and forget it."""
        while self._loads.num_requests(name):  # noqa: ASYNC110 - they end in many places
            await asyncio.sleep(LOOK_AGAIN_S)
        await self._loads.let_go(name)
        self._registry.forget(name)
        log.info("%s is no longer served: the settings do not name it", name)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        act = asyncio.ensure_future(work)
        self._acts.add(act)
        act.add_done_callback(self._acts.discard)
