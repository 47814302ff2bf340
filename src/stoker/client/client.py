"""What a runtime is made of: the engine's supervisor, its models, stored requests, the event bus, workers.

Owns their start and close, and what a request is when it goes to the supervisor. What an application calls is
in `stoker.runtime`; processes, restarts and replay are in `stoker.client.supervisor`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stoker.audio.limits import AudioLimits
from stoker.chat.conversation import Layout
from stoker.chat.turns import may_hold_documents
from stoker.client.documents import DocumentReader
from stoker.client.event_bus import EventBus, Snapshot
from stoker.client.handover import Handover
from stoker.client.models.specs import ModelSource
from stoker.client.process.lifecycle import GRACES_S, EngineState
from stoker.client.requests.group import RequestGroup
from stoker.client.requests.record import RequestRecord
from stoker.client.requests.stream import RequestStream, StreamEvent
from stoker.client.requests.table import RequestTable
from stoker.client.snapshot import SCHEMA
from stoker.client.supervisor import EngineSupervisor
from stoker.client.worker.jobs import TranslateGrammar
from stoker.client.worker.pool import WorkerPool
from stoker.documents.limits import DocumentLimits
from stoker.documents.turns import Messages
from stoker.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    RequestCancelledError,
    RequestTimeoutError,
    StokerError,
    UnsupportedError,
)
from stoker.images.intake import Intake
from stoker.images.limits import ImageLimits
from stoker.ipc.constraint import NativeGrammar
from stoker.ipc.events import ModelState
from stoker.ipc.model import AdapterSpec, ModelClass, ModelInfo, ModelLife
from stoker.ipc.request import FinishReason, GenerateRequest, Priority, StateOutput
from stoker.ipc.status import EngineHealth
from stoker.models.hub.downloads import Downloads, is_reference
from stoker.models.store import ModelStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from concurrent.futures import Future

    from stoker.client.models.loading import SpecChanges
    from stoker.client.process.transport import NewTransport, Transport
    from stoker.client.requests.group import KnownAs
    from stoker.client.requests.texts import RequestText
    from stoker.client.worker.jobs import RenderChat
    from stoker.errors import ErrorInfo
    from stoker.ipc.model import Reach
    from stoker.ipc.status import CallKind, GroupStatus, ModelStatus
    from stoker.settings import EngineSettings

SUSPENDED_DIR = "suspended"
ReadSource = Callable[["EngineSettings"], Awaitable[ModelSource]]
OnArrival = Callable[[str, str, GenerateRequest, int], None]
"""Gets the id of a request or of a call of several, its owner, its (first) request and how many there are."""


class Client:
    """This program's side of the engine.

    Args:
        settings: the engine's.
        on_load: called with each state a model reports.
        new_transport: makes the transport of each engine; None: of child processes.

    Attributes:
        supervisor: of the engine; None before `start`.
        table: of requests and groups.
        bus: what happens.
        images: takes in the images and recordings of requests.
        workers: run templates and translate grammars.
        documents: reads those of conversations.
        handover: what gates ask of this machine.
        ahead: an engine that was spawned before `start`, which uses it; None: none was.
        allows_downloads: references of the hub among the models are downloaded at the start.
        on_arrival: as `Runtime.on_arrival`.
        new_transport, read_source: as given; finds the models of settings. They may be set before `start`.
        waits_for: what the start waits for, for people; empty: nothing else than its own work.
        on_call: called with each group that has ended, and with `finished`, `cancelled` or an error's code.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_load: Callable[[ModelState], None],
        new_transport: NewTransport | None = None,
    ) -> None:
        self.supervisor: EngineSupervisor | None = None
        self.table = RequestTable(settings.run_dir / SUSPENDED_DIR)
        self.bus = EventBus(on_load)
        self.images = Intake(ImageLimits.of(settings), AudioLimits.of(settings))
        self.workers = WorkerPool()
        self.documents = DocumentReader(DocumentLimits.of(settings))
        self.on_call: Callable[[GroupStatus, str], None] = lambda call, outcome: None  # noqa: ARG005 - the hook's
        self.on_arrival: OnArrival = lambda request_id, owner, request, num_members: None  # noqa: ARG005 - likewise
        self.ahead: Transport | None = None
        self.allows_downloads = False
        self._settings = settings
        self.new_transport = new_transport
        self.read_source: ReadSource = _read_source
        self.waits_for: Callable[[], str] = str
        self._max_tokens: int | None = None
        self.handover = Handover(self.running, self.stream, self._resolved, settings)

    def __repr__(self) -> str:
        return f"<Client of {self.supervisor!r}>"

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """See `Runtime.start`; `take_up` goes on with what a former program has left."""
        if self.supervisor is not None:
            raise InvalidRequestError("this Runtime was started before; make a new one")
        if self.allows_downloads:
            models = [await self._downloaded(ref) for ref in self._settings.models]
            self._settings = self._settings.replace(models=models)
        source = await self.read_source(self._settings)
        settings = source.settings
        self._max_tokens = source.max_tokens
        self.images.limits = ImageLimits.of(settings, source.defaults.image_edge_px)
        self.images.audio_limits = AudioLimits.of(settings)
        self.supervisor = EngineSupervisor(
            source,
            bus=self.bus,
            table=self.table,
            new_transport=self.new_transport,
            first=self.ahead,
        )
        if settings.isolation == "process" and any(model.info.chat_template for model in source.served):
            self.workers.warm()  # beside the loads, so that the first chat finds it ready
        await self.supervisor.start()

    async def _downloaded(self, ref: str) -> str:
        """The file of a reference of the hub that nothing here has the name of; another name as it is."""
        folder = self._settings.models_dir
        try:
            await asyncio.to_thread(ModelStore(folder).resolve, ref)
        except ModelNotFoundError:
            if not is_reference(ref):
                raise
        else:
            return ref

        def moved(name: str, file: str, fraction: float, num_bytes: int) -> None:
            state = ModelLife.DOWNLOADING
            self.bus.model_moved(
                ModelState(model=name, state=state, stage=file, fraction=fraction, num_bytes=num_bytes)
            )

        return str(await Downloads(folder, moved).get(ref))

    async def take_up(self) -> None:
        """Go on with the requests that a program which ended while suspended has left."""
        supervisor = self.running()
        for record in await self.table.take_up(supervisor.registry.stats()):
            supervisor.submit(record)

    async def close(self) -> None:
        """See `Runtime.close`. Idempotent."""
        self.images.close()
        for close in (self.documents.close, self.workers.close):
            try:
                await asyncio.to_thread(close)
            except RuntimeError:  # no thread can be started
                close()
        if self.supervisor is None:
            self.bus.close()
            return
        self.table.begin_closing()
        self.supervisor.takeover.close()
        self.supervisor.loads.close()
        await self.supervisor.close()
        self.bus.close()
        self.table.close()

    async def take_settings(
        self, settings: EngineSettings, before: Callable[[], None] = lambda: None
    ) -> None:
        """Serve the models of these settings in place of those of the last; no request is lost.

        A model whose settings changed is loaded otherwise and serves on meanwhile; one that is not named any
        more goes with its last request. Settings that are of no model stay as they were.

        Args:
            settings: read again.
            before: called when they were found to be good, before anything changes; may raise.

        Raises:
            StokerError: a model of theirs cannot be served; nothing has changed.
        """
        supervisor = self.running()
        source = await asyncio.to_thread(ModelSource.read, settings)
        before()
        supervisor.takeover.take(source.served)
        self._max_tokens = source.max_tokens

    async def suspend(self, reason: str, grace_s: float | None) -> None:
        """See `Runtime.suspend`."""
        if grace_s is None:
            grace_s = GRACES_S.get(reason, self._settings.suspend_grace_s)
        await self.running().suspend(grace_s)
        self.workers.release()
        self.documents.release()

    def hurry(self) -> None:
        """Cut the drain of a `close`, under way or to come, short."""
        if self.supervisor is not None:
            self.supervisor.hurry()

    # ------------------------------------------------------------ questions

    def running(self) -> EngineSupervisor:
        """The supervisor. Raises NotReadyError before `start`, and while that waits for something."""
        if self.supervisor is None:
            raise NotReadyError(self.waits_for() or "the runtime was not started")
        return self.supervisor

    def health(self) -> EngineHealth:
        """Whether an engine serves; before `start` it is starting."""
        if self.supervisor is not None:
            return self.supervisor.health()
        return EngineHealth(state=EngineState.STARTING, reason=self.waits_for())

    def model_states(self) -> list[ModelStatus]:
        """Every served model and every download as last heard of; needs no engine."""
        return self.supervisor.loads.statuses() if self.supervisor else []

    def stats(self) -> dict[str, int]:
        """What this side of the engine holds now."""
        return self.supervisor.stats() if self.supervisor else {}

    def snapshot(self) -> Snapshot:
        """The state of everything: a subscriber's first event."""
        if self.supervisor is None:
            state = EngineState.STARTING
            return Snapshot({"schema": SCHEMA, "engine": {"state": state}, "requests": [], "models": []})
        fields, owners = self.supervisor.snapshot()
        return Snapshot({**fields, "num_kept": len(self.table.kept()), **self.stats()}, owners)

    # ------------------------------------------------------------ requests

    def request_text(self, request_id: str) -> RequestText:
        """What a request reads and has written; see `Requests.text`."""
        return self.running().requests.text(request_id)

    async def load_model(self, name: str, changes: SpecChanges, reach: Reach) -> ModelInfo:
        """See `Runtime.load_model`."""
        supervisor = self.running()
        supervisor.check_open()
        return await supervisor.loads.load_by_name(name, changes, reach)

    async def serve_model(self, name: str, reach: Reach) -> ModelInfo:
        """Serve a model without loading it, as `ModelLoading.serve_by_name` does."""
        supervisor = self.running()
        supervisor.check_open()
        return await supervisor.loads.serve_by_name(name, reach)

    async def stream(self, record: RequestRecord) -> AsyncGenerator[StreamEvent, None]:
        """See `Runtime.stream`. The request is live before its constraint is ready."""
        supervisor = self.running()
        events = RequestStream(partial(supervisor.requests.cancel, record.request_id))
        events.has_returns = record.is_handed_over
        record.sinks.append(events.push)
        try:
            record.request = self._resolved(record.request)
            if record.group is None:
                self.on_arrival(record.request_id, record.owner, record.request, 1)
            constraint = record.request.constraint
            is_native = record.is_handed_over and constraint is not None and constraint.native is not None
            record.is_ready = constraint is None or is_native
            supervisor.submit(record)
        except StokerError as error:
            supervisor.requests.history.refused(record, error.info())
            raise
        async with aclosing(events), self._translating(record):
            async for event in events:
                yield event

    def _resolved(self, request: GenerateRequest) -> GenerateRequest:
        """The request for its model. Raises as `resolved`."""
        return resolved(request, self.running().registry.resolve(request.model), self._max_tokens)

    @asynccontextmanager
    async def _translating(self, record: RequestRecord) -> AsyncIterator[None]:
        """Have the request's constraint translated while the block runs: it is given to an engine then."""
        if record.is_ready:
            yield
            return
        work = asyncio.ensure_future(self._translate(record))
        try:
            yield
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _translate(self, record: RequestRecord) -> None:
        """Let a request go to an engine, or fail."""
        requests = self.running().requests
        try:
            request = await self._translated(record.request, record.owner)
        except StokerError as error:
            requests.fail(record.request_id, error.info())
        except Exception as error:
            requests.fail(
                record.request_id, StokerError(f"its constraint was not prepared: {error!r}").info()
            )
            raise
        else:
            requests.ready(record, request)

    @contextmanager
    def group(
        self, kind: CallKind, request: GenerateRequest, num_members: int, known_as: KnownAs
    ) -> Iterator[RequestGroup]:
        """See `Runtime.group`."""
        supervisor = self.running()
        group = RequestGroup(kind, request, num_members, known_as, self.stream)
        outcome: str = "cancelled"  # unless it gets to its end
        end: FinishReason | ErrorInfo = FinishReason.CANCELLED
        try:
            info = supervisor.registry.resolve(request.model)
            group.request = ceiled(msgspec.structs.replace(request, model=info.id), info)
            self.on_arrival(group.id, group.owner, group.request, num_members)
            with self.table.grouped(group):
                supervisor.requests.history.call_began(group)
                yield group
            outcome, end = "finished", FinishReason.STOP
        except StokerError as error:
            outcome = error.code
            end = FinishReason.CANCELLED if isinstance(error, RequestCancelledError) else error.info()
            raise
        finally:
            self.on_call(group.status(), outcome)
            supervisor.requests.history.call_ended(group, end)

    async def with_documents(self, messages: Messages, owner: str) -> Messages:
        """The conversation with its documents read; see `DocumentReader.read`."""
        return await self.documents.read(messages, owner) if may_hold_documents(messages) else messages

    def lay_out(self, job: RenderChat, owner: str = "") -> Future[Layout]:
        """Render a conversation in a worker process; `owner` is as in `Runtime.prepare_chat`.

        Raises:
            QueueFullError: too many of the owner's conversations with that model wait.
            NotReadyError: closed.
        """
        return self.workers.submit(job, Layout, group=f"chat {job.model} {owner}")

    async def _translated(self, request: GenerateRequest, owner: str) -> GenerateRequest:
        """The request with its constraint ready to be compiled: a replay needs no worker process."""
        constraint = request.constraint
        assert constraint is not None, f"nothing to translate for {request.model}"
        job = TranslateGrammar(constraint=constraint)
        work = asyncio.wrap_future(self.workers.submit(job, NativeGrammar, group=f"grammar {owner}"))
        try:
            native = await asyncio.wait_for(work, request.timeout_s)
        except TimeoutError:
            text = f"its timeout_s of {request.timeout_s} s passed before {job.label} was prepared"
            raise RequestTimeoutError(text, param="timeout_s") from None
        return msgspec.structs.replace(request, constraint=msgspec.structs.replace(constraint, native=native))

    async def attach(self, request_id: str, owner: str) -> AsyncGenerator[StreamEvent, None]:
        """See `Runtime.attach`."""
        stream = RequestStream(lambda: None)
        kept_id = self.table.attach(request_id, owner, stream.push)
        try:
            async for event in stream:
                yield event
        finally:
            self.table.detach(kept_id, stream.push, has_read_all=stream.is_over)


async def _read_source(settings: EngineSettings) -> ModelSource:
    return await asyncio.to_thread(ModelSource.read, settings)


# ---------------------------------------------------------------- requests as the engine gets them


def resolved(request: GenerateRequest, info: ModelInfo, max_tokens: int | None) -> GenerateRequest:
    """The request for this model, with a seed, so that a replay draws the same.

    Args:
        request: as it was asked.
        info: of the model that it names.
        max_tokens: what it may have where it does not say; None: until the context is full.

    Raises:
        UnsupportedError: the model is an encoder, and anything but a vector or a score is wanted (SPEC K2).
        InvalidRequestError: the model has no such adapter, or one is named twice.
    """
    if request.state_output not in {StateOutput.EMBED, StateOutput.SCORE}:
        require_generating(info)
    sampling = request.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    if request.max_tokens is not None:
        max_tokens = request.max_tokens
    adapters = _adapters(request, info)
    changes = {"model": info.id, "sampling": sampling, "max_tokens": max_tokens, "adapters": adapters}
    return ceiled(msgspec.structs.replace(request, **changes), info)


def ceiled(request: GenerateRequest, info: ModelInfo) -> GenerateRequest:
    """The request in the best class that the model gives."""
    is_over = info.best_priority == Priority.BACKGROUND != request.priority
    return msgspec.structs.replace(request, priority=Priority.BACKGROUND) if is_over else request


def require_generating(info: ModelInfo) -> None:
    """Raises UnsupportedError where a model is an encoder (SPEC K2)."""
    if info.model_class == ModelClass.ENCODER:
        text = f"{info.id} is an encoder ({info.architecture}): it embeds texts and generates none"
        raise UnsupportedError(text, param="model")


def _adapters(request: GenerateRequest, info: ModelInfo) -> tuple[tuple[str, float], ...]:
    """Adapters by their own names, in the order of names, each with its scale (SPEC K6).

    Where an adapter's name was asked for as a model, that one is among them. One of scale 0 is left out.
    """
    scales = {spec.name: spec.scale for spec in info.adapters if spec.name == info.adapter}
    named: set[str] = set()
    for given, scale in request.adapters:
        spec = _adapter(given, info)
        if spec.name in named:
            raise InvalidRequestError(f"the adapter {spec.name!r} is named twice", param="lora")
        named.add(spec.name)
        scales[spec.name] = spec.scale if scale is None else scale
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale))


def _adapter(given: str | int, info: ModelInfo) -> AdapterSpec:
    if isinstance(given, int):
        found = info.adapters[given : given + 1] if given >= 0 else ()
    else:
        found = tuple(spec for spec in info.adapters if spec.name == given)
    if not found:
        known = ", ".join(spec.name for spec in info.adapters) or "none"
        raise InvalidRequestError(f"{info.id} has no adapter {given!r}; it has: {known}", param="lora")
    return found[0]
