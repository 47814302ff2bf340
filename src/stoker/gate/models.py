"""Models of the site as one engine tells of them: their moves, and loads and unloads at machines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stoker.errors import NoMachineError, StokerError
from stoker.ipc.commands import KnowModel, LoadModel, PinModel, UnloadModel
from stoker.ipc.events import Event, ModelState
from stoker.ipc.model import ModelLife
from stoker.routing.peers import RouteRequest

if TYPE_CHECKING:
    from stoker.gate.site import Machine, Site

log = logging.getLogger(__name__)


class SiteModels:
    """See the module.

    Args:
        site: the machines.
        publish: gives events to the client.
    """

    def __init__(self, site: Site, publish: Callable[[Event], None]) -> None:
        self._site = site
        self._publish = publish
        self._known: set[str] = set()
        self._told: dict[str, tuple[ModelLife, str]] = {}
        self._busy: set[str] = set()

    def __repr__(self) -> str:
        return f"<SiteModels {self._told}>"

    def tell(self) -> None:
        """Publish what has changed since it was published last."""
        infos = {info.id: info for info in self._site.infos()}
        for model in self._known - self._busy:
            info = infos.get(model)
            life = self._site.life(model) if info is not None else ModelLife.ABSENT
            news = (life, f"{info.num_slots} {info.vocabulary_sample}" if info is not None else "")
            before = self._told.get(model, (ModelLife.ABSENT, ""))
            if news == before:
                continue
            self._told[model] = news
            if life is ModelLife.READY and before[0] is ModelLife.ABSENT:
                self._publish(ModelState(model=model, state=ModelLife.LOADING))
            elif life is ModelLife.LOADING and before[0] is ModelLife.READY:
                self._publish(ModelState(model=model, state=ModelLife.ABSENT))
            self._publish(ModelState(model=model, state=life, info=info if life is ModelLife.READY else None))

    async def carry_out(self, command: KnowModel | LoadModel | UnloadModel | PinModel) -> None:
        """What callers want of a model."""
        match command:
            case KnowModel(spec=spec):
                self._known.add(spec.id)
                self.tell()
            case LoadModel(spec=spec):
                self._known.add(spec.id)
                await self._load(spec.id, command.ask_id)
            case UnloadModel(model=model):
                self._busy.add(model)
                await self._at_all(model, "unload", {"model": model})
                self._settled(ModelState(model=model, state=ModelLife.ABSENT, answers=command.ask_id))
            case PinModel(model=model, is_pinned=is_pinned):
                await self._at_all(model, "pin", {"model": model, "pinned": is_pinned})

    async def _load(self, model: str, ask_id: int) -> None:
        """Load it where it fits best."""
        self._busy.add(model)
        self._publish(ModelState(model=model, state=ModelLife.LOADING))
        loop_time = self._site.now()
        try:
            choice = self._site.choose(RouteRequest(model=model), (), loop_time)
            machine = self._site.machine(choice.peer)
            if machine is None:
                raise NoMachineError(f"{choice.peer} is no part of the site any more")
            await machine.link.operate("load", {"model": model})
            await self._site.ask_now(choice.peer)
        except StokerError as error:
            self._settled(ModelState(model=model, state=ModelLife.ABSENT, error=error.info(), answers=ask_id))
            return
        info = next((one for one in self._site.infos() if one.id == model), None)
        self._settled(ModelState(model=model, state=ModelLife.READY, info=info, answers=ask_id))

    def _settled(self, moved: ModelState) -> None:
        self._busy.discard(moved.model)
        self._told[moved.model] = (ModelLife(moved.state), "")
        self._publish(moved)

    async def _at_all(self, model: str, action: str, body: dict[str, Any]) -> None:
        """Have every machine that has it do that; what one refuses is logged."""
        machines: list[Machine] = [
            one for one in self._site if one.is_up and one.is_wanted and one.info(model)
        ]
        for machine in machines:
            try:
                await machine.link.operate(action, body)
                await self._site.ask_now(machine.link.name)
            except StokerError as error:
                log.warning("%s did not %s %s: %s", machine.link.name, action, model, error.message)
