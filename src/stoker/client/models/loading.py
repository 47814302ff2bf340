"""Loads, unloads, pins and downloads of models, as callers ask for them.

Owns the callers that wait for a model. One load serves all who ask for the same (SPEC R4); a load whose last
caller is cancelled is stopped. States of models are in `registry`, commands go out through
`client.dispatcher`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stoker.client.models.specs import FoundModel
from stoker.errors import (
    ModelFileError,
    ModelInUseError,
    ModelNotFoundError,
    NotReadyError,
    OperatorOnlyError,
    error_from_info,
)
from stoker.ipc.commands import KnowModel, LoadModel, PinModel, UnloadModel
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelClass, ModelLife, Reach
from stoker.ipc.status import ModelStatus
from stoker.models.hub.downloads import Downloads, is_reference
from stoker.models.placement import PlacementChanges, placed
from stoker.models.seq2seq import check_one_slot
from stoker.wording import count_text

if TYPE_CHECKING:
    from stoker.client.event_bus import EventBus
    from stoker.client.models.registry import ModelEntry, ModelRegistry
    from stoker.client.models.specs import ModelSource
    from stoker.client.requests.requests import Requests
    from stoker.errors import StokerError
    from stoker.ipc.model import ModelInfo, ModelSpec

_UNLOADED = "model {!r} was unloaded before it was ready"
_SUPERSEDED = "this load of model {!r} was given up: somebody has asked for it otherwise"

Tell = Callable[[KnowModel | LoadModel | UnloadModel | PinModel], bool]


class SpecChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants differently of a model than the settings say; None: as it is."""

    keep_alive_s: float | None = None
    n_ctx: int | None = None
    num_slots: int | None = None
    placement: PlacementChanges | None = None
    backend: str | None = None

    def check(self, info: ModelInfo) -> None:
        """Raises UnsupportedError where a model of that class cannot be loaded so."""
        if info.model_class == ModelClass.ENCODER_DECODER:
            check_one_slot(info.id, self.num_slots or 1)

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """The spec with these changes, on each of its ways; `backend` chooses these before."""
        return spec.on_all_ways(self._applied)

    def _applied(self, spec: ModelSpec) -> ModelSpec:
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        given.pop("backend", None)
        if self.placement is not None:
            spec = placed(spec, given.pop("placement"))
        if self.n_ctx is not None:
            given["num_cells"] = 0  # what is asked for is what all its slots share
        return msgspec.structs.replace(spec, **given)


class ModelLoading:
    """The callers that wait for a model to come or to go.

    Args:
        registry: what is known of the models.
        source: finds models that are not served yet.
        tell: sends a command to the engine, if one serves; else False, and the registry has it for the next.
        requests: the live ones, by which a model is in use.
        bus: gets the states of downloads.
    """

    def __init__(
        self, registry: ModelRegistry, source: ModelSource, tell: Tell, requests: Requests, bus: EventBus
    ) -> None:
        self._registry = registry
        self._source = source
        self._tell = tell
        self._requests = requests
        self._bus = bus
        self._downloads = Downloads(source.settings.models_dir, self._download_moved)
        self._downloading: dict[str, ModelState] = {}
        self._coming: dict[str, list[asyncio.Future[ModelInfo]]] = {}
        self._going: dict[str, list[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<ModelLoading coming={sorted(self._coming)} going={sorted(self._going)}>"

    def __len__(self) -> int:
        return sum(map(len, self._coming.values())) + sum(map(len, self._going.values()))

    def statuses(self) -> list[ModelStatus]:
        """Every served model and every download as last heard of; needs no engine."""
        downloads = [
            ModelStatus(
                id=name,
                state=moved.state,
                stage=moved.stage,
                fraction=moved.fraction,
                num_bytes=moved.num_bytes,
            )
            for name, moved in self._downloading.items()
        ]
        return [*self._registry.statuses(self._requests.num_by_model()), *downloads]

    def close(self) -> None:
        """Stop every download."""
        self._downloads.close()

    # ------------------------------------------------------------ by name

    async def load_by_name(self, name: str, changes: SpecChanges, reach: Reach) -> ModelInfo:
        """Load a model, which is served from then on; one that is loaded otherwise is replaced.

        Args:
            name: id of a served model, a name that `stoker models` lists, a file below the models folder, or
                OWNER/REPO[:FILE] of the hub, which is downloaded first.
            changes: what it is to be loaded with.
            reach: what `name` may lead to.

        Raises:
            ModelNotFoundError: there is no such model, or it lies outside the models folder.
            OperatorOnlyError: it would have to be downloaded, which `reach` excludes.
            UnsupportedError: a model of that class cannot be loaded so.
            NotReadyError: no engine is there, or the load or download was stopped.
            StokerError: why it cannot be loaded or downloaded.
        """
        entry = self._registry.get(name)
        if entry is not None:
            spec, info = entry.to_load, entry.info
        else:
            spec, info, _ = await self._find(name, reach)
            known = self._registry.get(spec.id)
            is_known = known is not None and known.to_load.way_of(spec.path, spec.backend).path == spec.path
            spec = known.to_load if known is not None and is_known else spec
        if changes.backend is not None:
            spec, info, _ = await asyncio.to_thread(self._source.again, spec, changes.backend)
        changes.check(info)
        return await self.load(changes.applied(spec), info)

    async def serve_by_name(self, name: str, reach: Reach) -> ModelInfo:
        """Serve a model, downloaded if need be, without loading it; its first request does.

        Args:
            name: as of `load_by_name`.
            reach: likewise.

        Raises:
            ModelNotFoundError, OperatorOnlyError: as `load_by_name`.
            StokerError: why it cannot be downloaded or read.
        """
        if self._registry.get(name) is None:
            spec, info, _ = await self._find(name, reach)
            name = spec.id
            self._tell(self._registry.serve(spec, info))
        return self._registry.resolve(name)

    async def _find(self, name: str, reach: Reach) -> FoundModel:
        try:
            return await asyncio.to_thread(self._source.find, name, reach)
        except ModelNotFoundError:
            if not is_reference(name):
                raise
            if reach is Reach.LOCAL:
                raise _downloads_off(name) from None
        except ModelFileError:  # of what was downloaded the files that are damaged are fetched again, once
            if not is_reference(name) or reach is Reach.LOCAL:
                raise
        path = await self._download(name)
        return await asyncio.to_thread(self._source.find, path)

    async def _download(self, name: str) -> str:
        self._download_moved(name, "", 0.0, 0)
        try:
            path = await self._downloads.get(name)
        finally:
            if name not in self._downloads and self._downloading.pop(name, None) is not None:
                self._bus.model_moved(ModelState(model=name, state=ModelLife.ABSENT))
        return str(path)

    def _download_moved(self, name: str, file: str, fraction: float, num_bytes: int) -> None:
        moved = ModelState(
            model=name, state=ModelLife.DOWNLOADING, stage=file, fraction=fraction, num_bytes=num_bytes
        )
        self._downloading[name] = moved
        self._bus.model_moved(moved)

    # ------------------------------------------------------------ what callers want

    async def load(self, spec: ModelSpec, info: ModelInfo) -> ModelInfo:
        """Load a model; `info` describes one that is not served yet.

        Who waits for a load of it otherwise waits no longer: what was asked for last is what is loaded.

        When its last caller is cancelled, the load is stopped, unless requests want the model. One that was
        in memory is then as it was.

        Raises:
            NotReadyError: it was unloaded, or asked for otherwise, meanwhile.
            ModelInUseError: live requests need it as it is.
            StokerError: why it cannot be loaded.
        """
        model = spec.id
        entry = self._registry.get(model)
        if entry is not None and entry.is_ready_as(spec) and not entry.info.degraded:
            return self._registry.resolve(model)  # one that got less may get more now: the engine looks again
        self._check_fits(spec, entry)
        is_same = entry is not None and entry.to_load == spec
        was_ready = self._registry.state(model) is ModelLife.READY
        if entry is None or entry.to_load.as_loaded != spec.as_loaded:
            self._fail(model, NotReadyError(_SUPERSEDED.format(model)))
        callers = self._coming.setdefault(model, [])
        answer: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        callers.append(answer)
        if not (is_same and len(callers) > 1):
            is_told = self._tell(self._registry.ask(spec, info))
            if entry is None and not is_told:
                self._tell(KnowModel(spec))  # a booting engine answers no unload of one unknown
        try:
            return await answer
        except asyncio.CancelledError:
            callers.remove(answer)
            if not callers and answer.cancelled():  # else it is answered, and only the caller has gone
                self._give_up(model, was_ready=was_ready)
            raise
        finally:
            if self._coming.get(model) == []:
                del self._coming[model]

    def _give_up(self, model: str, *, was_ready: bool) -> None:
        """Nobody waits for a load any more: one that was in memory is to be as it was, another is stopped."""
        if was_ready:
            if (former := self._registry.call_off(model)) is not None:
                self._tell(former)
            return
        is_under_way = self._registry.state(model) in {ModelLife.LOADING, ModelLife.SUSPENDED}
        if is_under_way and not self.num_requests(model):
            self._release(model)

    def _check_fits(self, spec: ModelSpec, entry: ModelEntry | None) -> None:
        """Refuse to take context from requests whose model is away; the engine judges of one that is ready.

        Raises:
            ModelInUseError: there are such requests.
        """
        num_requests = self.num_requests(spec.id)
        is_away = entry is not None and entry.state is not ModelLife.READY
        if num_requests and entry and is_away and entry.loses_by(spec):
            raise _in_use(spec.id, num_requests)

    async def unload(self, model: str) -> None:
        """Free a model once nothing runs on it, or stop its load or download; a later request loads it again.

        Raises:
            ModelNotFoundError: it is not served.
        """
        if model in self._downloads:
            self._downloads.stop(model)
            return
        self._check_served(model)
        await self.let_go(model)

    async def let_go(self, model: str) -> None:
        """Free a model that is known, whether or not it is still served."""
        self._fail(model, NotReadyError(_UNLOADED.format(model), retry_after_s=1.0))
        is_there = self._registry.state(model) in {ModelLife.LOADING, ModelLife.READY, ModelLife.UNLOADING}
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        callers = self._going.setdefault(model, [])
        callers.append(gone)
        if not (self._release(model) and is_there):
            gone.set_result(None)
        try:
            await gone
        finally:
            if gone in callers:
                callers.remove(gone)
            if self._going.get(model) == []:
                del self._going[model]

    def pin(self, model: str, *, is_pinned: bool) -> None:
        """Never unload a model to make room, or no longer so.

        Raises:
            ModelNotFoundError: it is not served.
        """
        self._check_served(model)
        self._registry.pin(model, is_pinned=is_pinned)
        self._tell(PinModel(model, is_pinned=is_pinned))

    # ------------------------------------------------------------ what engines do

    def moved(self, event: ModelState, *, is_settled: bool) -> None:
        """The registry has a model's new state: answer its callers.

        Args:
            event: the state.
            is_settled: nothing that was asked of the model is open any more.
        """
        state = self._registry.state(event.model)
        if state is ModelLife.READY:
            ready = [
                entry.spec.path
                for info in self._registry.infos()
                if (entry := self._registry.get(info.id)) and entry.state is ModelLife.READY
            ]
            self._source.note_loaded(ready)
        if state in {ModelLife.FAILED, ModelLife.ABSENT}:  # whatever was asked for since
            self._gone(event.model)
        if not is_settled:
            return
        # Ready with an error: another was to take its place, and it stays.
        if state is ModelLife.READY and event.error is None:
            for come in self._pop_coming(event.model):
                come.set_result(self._registry.resolve(event.model))
        else:
            self._fail(event.model, error_from_info(event.error) if event.error else _unloaded(event))

    def engine_gone(self) -> None:
        """Fail the loads that would take context from live requests: no engine can judge of them any more."""
        for model in list(self._coming):
            num_requests = self.num_requests(model)
            if num_requests and self._registry.call_off(model, for_requests=True):
                self._fail(model, _in_use(model, num_requests))

    def lost(self) -> None:
        """The engine has ended: unloads are done, and the next engine goes on with the loads.

        It does not with a model that has failed for good, nor with a reload that ended this engine.
        """
        for model in list(self._going):
            self._gone(model)
        for model in list(self._coming):
            failure = self._registry.load_failure(model)
            if failure is not None:
                self._fail(model, error_from_info(failure))

    def fail_all(self, error: StokerError) -> None:
        """No engine will come: end every wait."""
        for model in list(self._coming):
            self._fail(model, error)
        for model in list(self._going):
            self._gone(model)

    def _release(self, model: str) -> bool:
        """Have no engine load it; returns whether one will report that it is absent."""
        return self._registry.release(model, self._tell)

    def num_requests(self, model: str) -> int:
        """Live requests for a model."""
        return self._requests.num_by_model().get(model, 0)

    def _fail(self, model: str, error: StokerError) -> None:
        for come in self._pop_coming(model):
            come.set_exception(error)

    def _gone(self, model: str) -> None:
        for gone in self._going.pop(model, []):
            if not gone.done():
                gone.set_result(None)

    def _pop_coming(self, model: str) -> list[asyncio.Future[ModelInfo]]:
        return [come for come in self._coming.pop(model, []) if not come.done()]

    def _check_served(self, model: str) -> None:
        if self._registry.get(model) is None:
            raise self._registry.not_served(model)


def _unloaded(event: ModelState) -> StokerError:
    why = f": {event.reason}" if event.reason else ""
    return NotReadyError(_UNLOADED.format(event.model) + why, retry_after_s=1.0)


def _in_use(model: str, num_requests: int) -> ModelInUseError:
    return ModelInUseError(
        f"{count_text(num_requests, 'request')} for {model} wait for it as it was; load it with a shorter"
        " context (ctx_size) or from another file when they have ended",
        param="ctx_size",
        num_requests=num_requests,
    )


def _downloads_off(name: str) -> OperatorOnlyError:
    return OperatorOnlyError(
        f"{name} is not on this machine, and the server downloads it for operators with a key only: run"
        f" `stoker pull {name}` there, or start the server with --allow-downloads or --admin-key-file",
        param="model",
    )
