"""What callers want of models: loads and unloads that they wait for, and pins.

Owns who waits for which model. One load serves all who ask for the same (SPEC R4); one that nobody waits for
any more is stopped. When an engine may be told, and what it says, is the host's business; what is known of
a model the roster's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.errors import ModelInUseError, ModelNotFoundError, NotReadyError, error_from_info
from stoker.ipc.commands import LoadModel, PinModel, UnloadModel
from stoker.ipc.model import ModelLife

if TYPE_CHECKING:
    from stoker.client.models.registry import ModelRegistry
    from stoker.errors import StokerError
    from stoker.ipc.events import ModelState
    from stoker.ipc.model import ModelInfo, ModelSpec

Tell = Callable[[LoadModel | UnloadModel | PinModel], bool]


class ModelLoading:
    """Everybody who waits for a model to come or to go.

    Args:
        roster: what is known of the models.
        tell: hands a command to the engine, if one serves; else False, and the roster remembers.
        num_requests: live requests of a model.
    """

    def __init__(self, registry: ModelRegistry, tell: Tell, num_requests: Callable[[str], int]) -> None:
        self._registry = registry
        self._tell = tell
        self._num_requests = num_requests
        self._coming: dict[str, list[asyncio.Future[ModelInfo]]] = {}
        self._going: dict[str, list[asyncio.Future[None]]] = {}
        self._absences: Counter[str] = Counter()  # answers to unloads that are still to come

    def __repr__(self) -> str:
        return f"<ModelLoading coming={sorted(self._coming)} going={sorted(self._going)}>"

    def __len__(self) -> int:
        return sum(map(len, self._coming.values())) + sum(map(len, self._going.values()))

    async def load(self, spec: ModelSpec, info: ModelInfo) -> ModelInfo:
        """Have a model in memory; `info` is what is known of one that is not served yet.

        Cancelled by the last who waits for it, the load is stopped, unless requests want the model.

        Raises:
            NotReadyError: it was unloaded meanwhile.
            ModelInUseError: live requests need it as it is.
            StokerError: why it cannot be loaded.
        """
        model = spec.id
        if self._registry.is_in_memory(spec):
            return self._registry.resolve(model)
        self._check_fits(spec)
        is_same = self._registry.spec(model) == spec
        was_ready = self._registry.state(model) is ModelLife.READY
        waiting = self._coming.setdefault(model, [])
        answer: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        if not (is_same and len(waiting) > 1):
            self._tell(self._registry.ask(spec, info))
        try:
            return await answer
        except asyncio.CancelledError:
            waiting.remove(answer)
            if not waiting and not was_ready and not self._num_requests(model):
                self._stop(model)
            raise
        finally:
            if self._coming.get(model) == []:
                del self._coming[model]

    def _check_fits(self, spec: ModelSpec) -> None:
        """Refuse to take context from requests whose model is away; of one that is ready the engine judges.

        Raises:
            ModelInUseError: there are such requests.
        """
        model = spec.id
        num_requests = self._num_requests(model)
        if (
            num_requests
            and self._registry.state(model) is not ModelLife.READY
            and self._registry.takes_away(spec)
        ):
            raise _in_use(model, num_requests)

    def engine_gone(self) -> None:
        """No engine can judge any more whether live requests fit into what a model was to be loaded as."""
        for model in list(self._coming):
            num_requests = self._num_requests(model)
            if num_requests and self._registry.call_off(model):
                for come in self._pop_coming(model):
                    come.set_exception(_in_use(model, num_requests))

    def _stop(self, model: str) -> None:
        if self._registry.state(model) in {ModelLife.LOADING, ModelLife.SUSPENDED}:
            self._release(model)

    async def unload(self, model: str) -> None:
        """Have a model out of memory as soon as nothing runs on it; requests that come have it loaded again.

        Raises:
            ModelNotFoundError: it is not served.
        """
        self._check(model)
        self._give_up(model)
        is_there = self._registry.state(model) in {ModelLife.LOADING, ModelLife.READY, ModelLife.UNLOADING}
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._going.setdefault(model, [])
        waiting.append(gone)
        if not (self._release(model) and is_there):
            gone.set_result(None)
        try:
            await gone
        finally:
            if gone in waiting:
                waiting.remove(gone)
            if self._going.get(model) == []:
                del self._going[model]

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """Never unload a model to make room, or no longer so.

        Raises:
            ModelNotFoundError: it is not served.
        """
        self._check(model)
        self._registry.pin(model, is_pinned=is_pinned)
        self._tell(PinModel(model, is_pinned=is_pinned))

    def moved(self, event: ModelState) -> None:
        """The roster has a model's new state: tell who waited for it."""
        state = self._registry.state(event.model)
        if state is ModelLife.READY and event.stage:  # another load of it is under way
            return
        if state not in {ModelLife.READY, ModelLife.FAILED, ModelLife.ABSENT}:
            return
        # Ready with an error: another was to take its place, and it stays.
        error = error_from_info(event.error) if event.error else _unloaded(event)
        is_there = state is ModelLife.READY and event.error is None
        if state is ModelLife.ABSENT and self._absences[event.model]:
            self._absences[event.model] -= 1
            self._gone(event.model)  # who wants it since then has asked for another load
            return
        for come in self._pop_coming(event.model):
            if is_there:
                come.set_result(self._registry.resolve(event.model))
            else:
                come.set_exception(error)
        if state is not ModelLife.READY:
            self._gone(event.model)

    def lost(self) -> None:
        """The engine is no more: what had to go is gone, and what was to come will come of the next one.

        A model that has failed for good will not, nor another load of one that serves, if that was the end.
        """
        self._absences.clear()
        for model in list(self._going):
            self._gone(model)
        for model in list(self._coming):
            failure = self._registry.load_failure(model)
            if failure is not None:
                for come in self._pop_coming(model):
                    come.set_exception(error_from_info(failure))

    def fail_all(self, error: StokerError) -> None:
        """No engine will come."""
        for model in list(self._coming):
            for come in self._pop_coming(model):
                come.set_exception(error)
        for model in list(self._going):
            self._gone(model)

    def _release(self, model: str) -> bool:
        """No engine shall have it; whether there is one that will say when that is so."""
        self._registry.release(model)
        is_told = self._tell(UnloadModel(model))
        if is_told:
            self._absences[model] += 1
        else:
            self._registry.set_aside(model)
        return is_told

    def _give_up(self, model: str) -> None:
        error = NotReadyError(f"model {model!r} was unloaded before it was ready", retry_after_s=1.0)
        for come in self._pop_coming(model):
            come.set_exception(error)

    def _gone(self, model: str) -> None:
        for gone in self._going.pop(model, []):
            if not gone.done():
                gone.set_result(None)

    def _pop_coming(self, model: str) -> list[asyncio.Future[ModelInfo]]:
        return [come for come in self._coming.pop(model, []) if not come.done()]

    def _check(self, model: str) -> None:
        if self._registry.spec(model) is None:
            served = ", ".join(self._registry.stats()) or "none"
            raise ModelNotFoundError(f"no model {model!r} is served; served: {served}", param="model")


def _unloaded(event: ModelState) -> StokerError:
    why = f": {event.reason}" if event.reason else ""
    return NotReadyError(f"model {event.model!r} was unloaded before it was ready{why}", retry_after_s=1.0)


def _in_use(model: str, num_requests: int) -> ModelInUseError:
    noun = "request" if num_requests == 1 else "requests"
    return ModelInUseError(
        f"{num_requests} {noun} for {model} wait for it as it was; load it with a shorter context (ctx_size)"
        " or from another file when they have ended",
        param="ctx_size",
        num_requests=num_requests,
    )
