"""A runtime without an engine: it has the API that the server uses and plays events from a script."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from grouping import OpensGroups
from stoker.chat.conversation import NO_TOOLS, continuation_of, prepared_turn
from stoker.client.documents import DocumentReader
from stoker.client.event_bus import RuntimeEvent
from stoker.client.requests.texts import RequestText
from stoker.client.store.file import KeptRequest
from stoker.errors import (
    CacheFileError,
    ModelNotFoundError,
    RequestNotFoundError,
    StateNotFoundError,
    TextsOffError,
)
from stoker.images.intake import Intake
from stoker.ipc.events import (
    Admitted,
    Delta,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    PromptEcho,
    Queued,
    Resumed,
    StateReady,
)
from stoker.ipc.model import ModelInfo, Reach
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.status import (
    EngineHealth,
    EngineStatus,
    ExitStatus,
    GroupStatus,
    ModelStatus,
    RequestStatus,
    SlotStatus,
    WaitStatus,
)
from stoker.ipc.usage import Tensor, Timings, TokenLogprob, Usage
from stoker.models.chat_templates import CHATML
from stoker.tasks.chat import ChatPlan, chat_job, planned
from stoker.tasks.states import States

Notice = Queued | Admitted | Parked | Paused | Resumed
Step = Notice | PrefillProgress | PromptEcho | Delta | Finished | Exception | str
HOLD = "hold"  # a step that lasts until `release`

INFO = ModelInfo(
    id="stand-in",
    path="stand-in",
    label="none",
    model_class="decoder",
    architecture="none",
    description="scripted",
    num_params=1,
    size_bytes=1,
    n_vocab=1000,
    n_ctx=64,
    n_ctx_train=64,
    n_batch=64,
    num_slots=4,
    num_threads=1,
    kv_type="f16",
    flash_attention="off",
    memory_bytes={"weights": 1},
    chat_template=CHATML,
)
FINISHED = Finished(
    request_id="x",
    usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    timings=Timings(queue_s=0.5, prefill_s=0.25, decode_s=0.125, num_preemptions=2),
)


class StandInStatus(msgspec.Struct):
    """The status of an engine that is not there."""

    engine: EngineStatus
    pid: int = 4242
    state: str = "serving"
    restarts: int = 3
    label: str = "stand-in"
    threads: int = 1
    groups: Sequence[GroupStatus] = ()
    requests: Sequence[RequestStatus] = ()
    recent: Sequence[RequestStatus] = ()
    exits: Sequence[ExitStatus] = ()
    as_of_s: float = 0.0
    up_s: float = 12.5
    version: str = "0"
    settings: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"policy": "latency", "models_dir": "none"}
    )

    @property
    def health(self) -> EngineHealth:
        """In that state, since just now."""
        return EngineHealth(state=self.state)


class StandInHandover:
    """Of a machine that holds nothing for others."""

    def held(self) -> bytes:
        """No beginnings of prompts."""
        return b""

    @asynccontextmanager
    async def state_of(self, request_id: str) -> AsyncIterator[Any]:
        """None is there."""
        raise StateNotFoundError(f"nothing is computed of request {request_id!r} here")
        yield

    async def take_state(self, request: GenerateRequest, parts: AsyncIterable[bytes]) -> int:
        """None can be used."""
        raise CacheFileError("this machine stores no states")


@dataclass
class StandInRuntime(OpensGroups):
    """Plays `scripts`, one a request in order of arrival; without one, as many words as were asked for."""

    is_ready: bool = False
    scripts: deque[Sequence[Step]] = field(default_factory=deque)
    requests: list[GenerateRequest] = field(default_factory=list)
    live: dict[str, GenerateRequest] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    steered: list[tuple[str, str]] = field(default_factory=list)
    images: Intake = field(default_factory=Intake)
    handover: StandInHandover = field(default_factory=StandInHandover)
    documents: DocumentReader = field(default_factory=DocumentReader)
    engine: EngineStatus | None = None
    engine_health: EngineHealth | None = None
    start_error: Exception | None = None
    end_error: Exception | None = None
    waits_for_models: bool = False
    model_state: str = ""  # what is shown of its model, if not what `is_ready` says
    is_suspended: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    load_error: Exception | None = None
    load_waits: bool = False
    kept_requests: list[KeptRequest] = field(default_factory=list)
    kept_scripts: dict[str, Sequence[Step]] = field(default_factory=dict)
    told: list[RuntimeEvent] = field(default_factory=list)
    named: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reaches: list[Reach] = field(default_factory=list)
    placements: list[dict[str, object]] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = States(Path("no-such-folder"), self)
        self._released = asyncio.Event()
        self._loaded = asyncio.Event()
        self._ended = asyncio.Event()

    # ------------------------------------------------------------ the runtime's API

    async def start(self) -> None:
        """Ready at once, unless told to wait or fail."""
        if self.start_error is not None:
            raise self.start_error
        if self.waits_for_models:
            await self._loaded.wait()
        self.is_ready = True

    async def close(self) -> None:
        """End every stream that holds."""
        self.documents.close()
        self.is_ready = False
        self._released.set()
        self._ended.set()

    @property
    def models(self) -> list[ModelInfo]:
        """One model, once ready."""
        return [INFO] if self.is_ready else []

    def health(self) -> EngineHealth:
        """As it is ready or not, or as the test says."""
        if self.engine_health is not None:
            return self.engine_health
        if self.is_suspended:
            return EngineHealth(state="suspended")
        return EngineHealth(state="serving" if self.is_ready else "starting")

    async def ended(self) -> None:
        """Until the test ends it, with what it says."""
        await self._ended.wait()
        if self.end_error is not None:
            raise self.end_error

    def resolve(self, model: str | None) -> ModelInfo:
        """The one model."""
        if model in (None, "default", INFO.id):
            return INFO
        raise ModelNotFoundError(f"no model {model!r} is served", param="model")

    def render_chat(self, messages: Sequence[dict[str, Any]], model: str = "default", **args: Any) -> str:
        """A line a message."""
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, *(f"{name}={value}" for name, value in sorted(args.items()))])

    async def prepare_chat(
        self, messages: Sequence[dict[str, Any]], offer: Any = NO_TOOLS, *, model: str = "default", **how: Any
    ) -> ChatPlan:
        """As the runtime prepares, with the prompt of `render_chat`."""
        info = self.resolve(model)
        read = await self.documents.read(messages, how.get("owner", ""))
        job, images = chat_job(info, read, offer, how.get("template_args"))
        turns, args = job.conversation.messages, dict(job.conversation.args)
        turn = prepared_turn(turns, info.chat_template, offer, continuation_of(turns, args))
        args |= {"tools": turn.tools} if turn.tools else {}
        layout = turn.laid_out(lambda given, /, **changes: self.render_chat(given, **(args | changes)))
        return planned(job, images, layout)

    async def tokenize(
        self, text: str, model: str = "default", *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[list[int], list[bytes]]:
        """A token a byte; 999 opens where special ones are asked for."""
        data = text.encode()
        opening = ([999], [b"<s>"]) if add_special else ([], [])
        return [*opening[0], *data], [*opening[1], *(bytes([byte]) for byte in data)]

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """The bytes back."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    async def count_tokens(self, request: GenerateRequest) -> int:
        """A token a byte, and 100 a picture."""
        self.requests.append(request)
        return len(str(request.prompt).encode()) + 100 * len(request.pictures)

    async def status(self) -> StandInStatus:
        """What is live sits in slots; the first waiting one shows in the queue. Or as the test says."""
        if self.engine is not None:
            return StandInStatus(engine=self.engine, threads=self.engine.num_threads)
        slots = [
            SlotStatus(id=i, state="decode", model=INFO.id, num_tokens=1, request_id=request_id)
            for i, request_id in enumerate(self.live)
        ]
        queue = [
            WaitStatus(request_id=request_id, priority=request.priority, position=0, eta_s=1.5)
            for request_id, request in list(self.live.items())[:1]
        ]
        return StandInStatus(
            state="serving" if self.is_ready else "starting",
            engine=EngineStatus(
                slots=slots, queue=queue, parked=[], counters={}, kv_cells_total=100, kv_cells_used=25
            ),
        )

    async def cancel(self, request_id: str) -> None:
        """Note it and let holding streams go on."""
        self.cancelled.append(request_id)
        self._released.set()

    def request_text(self, request_id: str) -> RequestText:
        """It shows none."""
        raise TextsOffError("the stand-in shows no texts")

    async def pause_request(self, request_id: str) -> None:
        """Note it."""
        self._steer("pause", request_id)

    async def resume_request(self, request_id: str) -> None:
        """Note it."""
        self._steer("resume", request_id)

    def _steer(self, how: str, request_id: str) -> None:
        if request_id not in self.live:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}", param="request_id")
        self.steered.append((how, request_id))

    # ------------------------------------------------------------ models and sleep

    async def load_model(
        self,
        model: str,
        *,
        keep_alive: float | None = None,
        ctx_size: int | None = None,
        slots: int | None = None,
        reach: Reach = Reach.ANY,
        **placement: object,
    ) -> ModelInfo:
        """Note it; loaded at once, unless it is told to fail or to take for ever."""
        self.reaches.append(reach)
        self.placements.append(placement)
        self.calls.append(("load", model, keep_alive, ctx_size, slots))
        if self.load_error is not None:
            raise self.load_error
        if self.load_waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.calls.append(("load given up", model))
        return self.resolve(model)

    async def serve_model(self, name: str, reach: Reach) -> ModelInfo:
        """Note it; it is served already."""
        self.reaches.append(reach)
        self.calls.append(("serve", name))
        return self.resolve(name)

    async def unload_model(self, model: str) -> None:
        """Note it."""
        self.calls.append(("unload", self.resolve(model).id))

    async def pin_model(self, model: str) -> None:
        """Note it."""
        self.calls.append(("pin", self.resolve(model).id, True))

    async def unpin_model(self, model: str) -> None:
        """Note it."""
        self.calls.append(("pin", self.resolve(model).id, False))

    def model_states(self) -> list[ModelStatus]:
        """One model, ready or loading."""
        state = self.model_state or ("ready" if self.is_ready else "loading")
        return [ModelStatus(id=INFO.id, state=state, bytes={"weights": 1})]

    async def suspend(self, reason: str = "sleep", *, grace_s: float | None = None) -> None:
        """Suspended at once."""
        self.calls.append(("suspend", reason, grace_s))
        self.is_suspended = True

    async def resume(self) -> None:
        """Serving at once."""
        self.calls.append(("resume",))
        self.is_suspended = False

    def kept(self) -> list[KeptRequest]:
        """As the test says."""
        return self.kept_requests

    def with_client(self) -> list[KeptRequest]:
        """What is live."""
        return [
            KeptRequest(
                id=request_id,
                names=list(self.names[request_id]),
                is_chat=request.is_chat,
                model=request.model,
                owner=self.owners[request_id],
            )
            for request_id, request in self.live.items()
            if request_id in self.names
        ]

    def owner_of(self, request_id: str) -> str:
        """As the test says, or as it was streamed."""
        return self.owners.get(request_id, "")

    async def attach(self, request_id: str, *, owner: str = "") -> AsyncGenerator[Any]:
        """Play the script of that request."""
        self.calls.append(("attach", request_id, owner))
        for step in self.kept_scripts[request_id]:
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            yield step

    async def events(self, *, after: str = "", kinds: Collection[str] = ()) -> AsyncGenerator[RuntimeEvent]:
        """What the test says, then nothing until the end."""
        for event in self.told:
            yield event
        await self._released.wait()

    async def stream(
        self,
        request: GenerateRequest,
        request_id: str | None = None,
        *,
        names: Sequence[str] = (),
        owner: str = "",
        route: str = "library",
    ) -> AsyncGenerator[Any]:
        """Play the next script."""
        self.routes.append(route)
        self.named.append((tuple(names), owner))
        request_id = request_id or f"req-{len(self.requests)}"
        self.owners[request_id] = owner
        self.names[request_id] = tuple(names)
        assert request_id not in self.live
        self.requests.append(request)
        self.live[request_id] = request
        steps = self.scripts.popleft() if self.scripts else _words(request)
        is_over = False
        try:
            for step in steps:
                await asyncio.sleep(0)
                if step == HOLD:
                    await self._released.wait()
                elif isinstance(step, Exception):
                    is_over = True
                    raise step
                else:
                    is_over = isinstance(step, Finished)
                    yield step
        finally:
            del self.live[request_id]
            if not is_over:
                self.abandoned.append(request_id)

    # ------------------------------------------------------------ what tests do to it

    def reset(self) -> None:
        """Forget what happened; streams of the next test hold again."""
        self._released.clear()
        self.engine = self.engine_health = None
        self.is_suspended = self.load_waits = False
        self.load_error, self.model_state = None, ""
        self.kept_scripts.clear()
        for record in (self.requests, self.abandoned, self.cancelled, self.steered, self.scripts):
            record.clear()
        for noted in (
            self.calls,
            self.kept_requests,
            self.told,
            self.named,
            self.owners,
            self.names,
            self.reaches,
            self.placements,
        ):
            noted.clear()

    def release(self) -> None:
        """Let every stream that holds go on."""
        self._released.set()

    def end(self, error: Exception) -> None:
        """It ends by itself."""
        self.end_error = error
        self._ended.set()

    def finish_loading(self) -> None:
        """The models are there now."""
        self._loaded.set()


def _words(request: GenerateRequest) -> list[Step]:
    """`w0 w1 ...` for each choice in turn."""
    steps: list[Step] = [Queued("x", 0)]
    if request.state_output is not None:
        # Of candidates a number each, and one more each where they are calibrated; else two of a state.
        size = len(request.candidates) * (2 if request.is_calibrated else 1) or 2
        numbers = [0.5 - 1.5 * place for place in range(size)]
        hidden = Tensor("hidden", (size,), struct.pack(f"<{size}f", *numbers))
        steps.append(StateReady(request_id="x", num_tokens=5, tensors=[hidden]))
    if request.echo:
        text = request.prompt if isinstance(request.prompt, str) else "tokens"
        entries = None
        if request.prompt_logprobs is not None:
            entries = [_entry(char.encode(), None if i == 0 else -1.0) for i, char in enumerate(text)]
        steps.append(PromptEcho(request_id="x", text=text, logprobs=entries))
    count = 4 if request.max_tokens is None else min(request.max_tokens, 20)
    for number, index in itertools.product(range(count), range(request.n)):
        text = f"w{number} "
        steps.append(
            Delta(
                request_id="x",
                index=index,
                text=text,
                token_ids=[number],
                logprobs=None if request.logprobs is None else [_entry(text.encode(), -0.5)],
                finish_reason=FinishReason.LENGTH if number == count - 1 else None,
            )
        )
    usage = Usage(prompt_tokens=5, completion_tokens=count * request.n)
    return [*steps, Finished(request_id="x", usage=usage, timings=Timings())]


def _entry(token: bytes, logprob: float | None) -> TokenLogprob:
    top = [] if logprob is None else [(7, token, logprob), (8, b"\xff", -3.0)]
    return TokenLogprob(7, token, logprob, top)


def delta(text: str, index: int = 0, finish_reason: FinishReason | None = None) -> Delta:
    """One token's delta."""
    return Delta(request_id="x", index=index, text=text, token_ids=[1], finish_reason=finish_reason)
