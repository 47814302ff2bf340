"""The traffic with the engine that serves: requests, questions and models there, events and answers back.

Owns which of what waits an engine may have. The supervisor says which engine serves and when it has ended.
Live requests are in `requests`, open questions in `calls`, models in `registry`, their loads in `loads`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker.client.figures import EngineFigures
from stoker.client.models.loading import ModelLoading
from stoker.client.models.takeover import ModelTakeover
from stoker.client.process.exit import EngineExit
from stoker.client.process.log_relay import relay
from stoker.client.requests.calls import Calls, Question
from stoker.client.requests.history import RequestHistory
from stoker.client.requests.requests import Requests
from stoker.ipc.codec import WireError
from stoker.ipc.commands import Command, KnowModel, LoadModel, PinModel, Submit, UnloadModel, Watch
from stoker.ipc.events import (
    Delta,
    Event,
    Goodbye,
    Heartbeat,
    HeatMoved,
    Hello,
    Logged,
    ModelState,
    PressureMoved,
    Reply,
    RungTaken,
)
from stoker.ipc.figures import CacheFigures, MachineFigures, MemoryFigures, StepFigures
from stoker.ipc.model import ModelLife

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.client.event_bus import EventBus
    from stoker.client.models.registry import ModelRegistry
    from stoker.client.models.specs import ModelSource
    from stoker.client.process.instance import EngineInstance
    from stoker.client.requests.table import RequestTable
    from stoker.errors import ErrorInfo, StokerError

_SUSPENDED = EngineExit("suspended", is_blamable=False)


class Dispatcher:
    """Everything that waits for an engine.

    Attributes:
        requests, calls, loads: what waits.
        figures: what the engine has posted of itself.
        has_delivered: the engine has delivered a token, so that it works.

    Args:
        table: of the requests.
        registry: what is known of the models.
        source: the settings; finds models that are not served yet.
        bus: gets what happens.
    """

    def __init__(
        self,
        table: RequestTable,
        registry: ModelRegistry,
        source: ModelSource,
        bus: EventBus,
    ) -> None:
        self._registry = registry
        self._bus = bus
        self._instance: EngineInstance | None = None
        self._is_serving = False
        self._absence = "the engine is starting"
        self.has_delivered = False
        self.figures = EngineFigures(bus)
        bus.on_watch = self._watch
        bus.expects_figures = lambda: self.has_engine
        settings = source.settings
        history = RequestHistory(
            table,
            bus,
            lambda model: registry.state(model) is ModelLife.READY,
            keeps_texts=settings.request_texts,
        )
        self.requests = Requests(table, settings.max_queue, registry, self, history)
        self.calls = Calls()
        self.loads = ModelLoading(registry, source, self._tell, self.requests, bus)
        self.takeover = ModelTakeover(registry, self.loads, self._tell)

    def __repr__(self) -> str:
        return f"<Dispatcher serving={self.has_engine} {self.requests!r} {self.calls!r} {self.loads!r}>"

    def stats(self) -> dict[str, int]:
        """What waits now."""
        return {
            **self.requests.stats(),
            "num_open_calls": len(self.calls),
            "num_waiting_for_models": len(self.loads),
        }

    @property
    def has_engine(self) -> bool:
        """Whether an engine serves that was not told to leave."""
        return self._is_serving and self._instance is not None and not self._instance.is_leaving

    @property
    def absence(self) -> str:
        """Why no engine serves, for people; empty: one does."""
        return "" if self.has_engine else self._absence

    # ------------------------------------------------------------ engines come and go

    def begin_instance(self, instance: EngineInstance) -> None:
        """Listen to this engine, and to no former one."""
        self._instance, self._is_serving = instance, False
        self.has_delivered = False

    def serve(self) -> None:
        """The engine is ready: give it all that it may have."""
        self._is_serving = True
        self._watch(is_watched=self._bus.is_watched)
        self.requests.fail_unservable()
        self.hand_out()

    def engine_exited(self, ended: EngineExit) -> None:
        """The engine has ended unasked."""
        self._is_serving, self._absence = False, "the engine is restarting"
        self.figures.engine_gone()
        self.loads.engine_gone()
        before = self._registry.stats()
        self._registry.begin_instance()
        self._publish_moves(before)
        self.loads.lost()
        self.requests.engine_exited(ended.beside(*self.calls.in_flight()))
        self.calls.engine_exited(ended)

    def note_models(self) -> None:
        """The engine has the command to leave: the next one loads what it has now."""
        before = self._registry.stats()
        self._registry.suspend()
        self._publish_moves(before)

    def sleep(self) -> None:
        """The engine has left as it was asked to, or there was none: everything stands still."""
        self._is_serving, self._absence = False, "the engine is suspended"
        self.figures.engine_gone()
        self.loads.engine_gone()
        self.note_models()
        self.loads.lost()
        self.requests.sleep()
        self.calls.engine_exited(_SUSPENDED)

    def fail_all(self, error: StokerError) -> None:
        """No engine will come: end everything that waits."""
        self.requests.fail_all(error)
        self.calls.fail_all(error)
        self.loads.fail_all(error)

    def _watch(self, is_watched: bool) -> None:  # noqa: FBT001 - the bus's hook
        """Have the engine make figures, or no longer: it is told once, however many read them."""
        if self.has_engine:
            self.send(Watch(is_watched))

    def _publish_moves(self, before: dict[str, str]) -> None:
        for model, state in self._registry.stats().items():
            if before.get(model) != state:
                self._bus.model_moved(ModelState(model=model, state=state))

    # ------------------------------------------------------------ to the engine

    def hand_out(self) -> None:
        """Give the serving engine what it may have by now."""
        if not self.has_engine:
            return
        for command in self._due():
            try:
                self.send(command)
            except WireError as error:
                self._refuse(command, error.info())

    def _due(self) -> Iterator[Submit | Question]:
        yield from self.requests.release()
        if len(self.calls):
            yield from self.calls.take_unsent(has_texts=not self.requests.is_on_trial)

    def _refuse(self, command: Submit | Question, error: ErrorInfo) -> None:
        """It is too large to be sent."""
        if isinstance(command, Submit):
            self.requests.fail(command.request_id, error)
        else:
            self.calls.settle(Reply(call_id=command.call_id, error=error))

    def send(self, command: Command) -> None:
        """Hand the engine a command; nothing where there is none."""
        if self._instance:
            self._instance.send(command)

    def _tell(self, command: KnowModel | LoadModel | UnloadModel | PinModel) -> bool:
        """Send what callers want of models; a load needs a serving engine, else the next boot does it.

        Returns:
            Whether it was sent.
        """
        it = self._instance
        can_hear = it and it.is_up and not (it.is_leaving or it.is_over)
        if not (self.has_engine or (can_hear and not isinstance(command, LoadModel))):
            return False
        self.send(command)
        return True

    # ------------------------------------------------------------ from the engine

    def take(self, instance: EngineInstance, events: list[Event]) -> None:
        """One frame from an engine; what a former one still says is ignored."""
        if instance is not self._instance:
            return
        now = time.monotonic()
        instance.sign(now)
        has_due = False
        for event in events:
            if type(event) is Delta:  # in as few calls as can be, as there is one a token
                has_due |= self.requests.take_delta(event, now)
                self.has_delivered = self.has_delivered or bool(event.token_ids)
            else:
                self._take_one(instance, event, now)
                has_due = True
        if has_due:
            self.hand_out()

    def _take_one(self, instance: EngineInstance, event: Event, now: float) -> None:
        match event:
            case Hello():
                instance.greet()
            case Heartbeat():
                instance.beat(event, now)
            case ModelState():
                self._take_model(instance, event)
            case Reply():
                self.calls.settle(event)
            case PressureMoved() | RungTaken() | HeatMoved():
                self._bus.machine_moved(event)
            case StepFigures() | MemoryFigures() | CacheFigures() | MachineFigures():
                self.figures.take(event)
            case Logged():
                relay(event, instance.pid)
            case Goodbye():
                pass
            case _:
                self.requests.take(event)

    def _take_model(self, instance: EngineInstance, event: ModelState) -> None:
        if instance.is_leaving:  # it frees everything: which models there were is noted
            return
        self.loads.moved(event, is_settled=self._registry.record(event))
        if self._registry.failure(event.model):
            self.requests.fail_unservable()
        instance.note_model(event.model, event.answers)
        self._bus.model_moved(event)
