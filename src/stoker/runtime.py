"""The façade an application imports: models by name, requests in, text out.

Owns which models are served, ids and seeds of requests, chat templates and the shape of the answers.
Processes, restarts and replay are `stoker.engine.host`'s business, HTTP is the server's.

    async with Runtime(slots=4) as runtime:
        async for delta in runtime.generate("The capital of France is", max_tokens=16):
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

import msgspec

from stoker.chat.template import ChatTemplate
from stoker.engine.host import EngineHost
from stoker.engine.state import EngineState
from stoker.errors import InvalidRequestError, NotReadyError, RequestNotFoundError
from stoker.fields import sealed
from stoker.messages import Delta, Detokenize, Finished, GetStatus, ModelState, PromptEcho, Tokenize
from stoker.models.store import ModelStore
from stoker.request import FinishReason, GenerateRequest
from stoker.settings import EngineSettings
from stoker.states import GivenState, States
from stoker.status import EngineStatus
from stoker.streams import RequestStream, StreamEvent
from stoker.values import CacheMode, ModelInfo, ModelSpec, Policy, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

Message = Mapping[str, Any]
STATUS_WAIT_S = 2.0
_NO_STATUS = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one choice's text; the last of all carries `finish_reason`, `usage` and `timings`."""

    text: str = ""
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class RuntimeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What `/v1/runtime` shows. `engine` is empty while no engine serves.

    Attributes:
        pid: the engine's process.
        state: starting, serving, restarting or closed.
        restarts: times the engine died unasked.
        label: backend and device of the default model.
        threads: CPU threads its steps use now; `engine.threads_reason` tells why not as many as asked for.
    """

    pid: int
    state: str
    restarts: int
    label: str
    threads: int
    engine: EngineStatus


def _ignore(state: ModelState) -> None:
    """The hook of somebody who does not watch loads."""


class Runtime:
    """Models of one machine, served to this application.

    Args:
        model: name or GGUF path of the default model; None: the settings' first, or the embedded one.
        settings: the engine's; None: the defaults.
        fields: single settings that differ, by name; with `model`, `models` names further ones.

    Attributes:
        on_load: called with each state a model reports while it loads; set it before `start`.
        states: saved states of recurrent models, and embeddings by state.

    Raises:
        InvalidRequestError: a setting is unknown or out of range.
    """

    def __init__(
        self, model: str | Path | None = None, *, settings: EngineSettings | None = None, **fields: Any
    ) -> None:
        settings = (settings or EngineSettings()).replace(**fields)
        if model is not None:
            settings = settings.replace(models=(str(model), *settings.models))
        self._settings = settings
        self._host: EngineHost | None = None
        self._templates: dict[str, ChatTemplate] = {}
        self.states = States(settings.states_dir, self)
        self.on_load: Callable[[ModelState], None] = _ignore

    def __repr__(self) -> str:
        return f"<Runtime {self._host!r}>"

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine; returns when every model is ready.

        Raises:
            ModelNotFoundError: a name or path leads nowhere.
            ModelError: a file is broken or cannot be loaded.
            MachineSetupError: the engine process does not come up.
        """
        if self._host is not None:
            raise InvalidRequestError("this Runtime was started before; make a new one")
        specs = await asyncio.to_thread(_specs, self._settings)
        self._host = EngineHost(self._settings, specs, on_load=self._report_load)
        await self._host.start()

    def _report_load(self, state: ModelState) -> None:
        self.on_load(state)  # looked up at each call: the hook may be set at any time

    async def close(self) -> None:
        """Let running requests finish for `drain_s`, end the rest, free everything. Idempotent."""
        if self._host is not None:
            await self._host.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ questions

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken; while the engine restarts they are, and wait for it."""
        return self._host is not None and self._host.is_taking

    @property
    def models(self) -> list[ModelInfo]:
        """Every served model, the default first."""
        return self._host.roster.infos() if self._host else []

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name; None and "default" mean the first.

        Raises:
            ModelNotFoundError: it is not served.
            NotReadyError: it has not been loaded yet.
        """
        return self._running().roster.resolve(model)

    async def status(self) -> RuntimeStatus:
        """The engine and everything it holds now.

        Raises:
            NotReadyError: not started.
        """
        host = self._running()
        engine = _NO_STATUS
        if host.state is EngineState.SERVING:
            try:
                answer = (await asyncio.wait_for(host.ask(GetStatus(0)), STATUS_WAIT_S))["status"]
            except (NotReadyError, TimeoutError):  # it died between the two questions, or a step is long
                pass
            else:
                engine = answer if isinstance(answer, EngineStatus) else msgspec.convert(answer, EngineStatus)
        else:
            await asyncio.sleep(0)  # who asks again and again must not keep the engine from starting
        default = next(iter(self.models), None)
        return RuntimeStatus(
            pid=host.pid,
            state=host.state.value,
            restarts=host.num_restarts,
            label=default.label if default else "",
            threads=engine.num_threads or (default.num_threads if default else 0),
            engine=engine,
        )

    def stats(self) -> dict[str, int]:
        """What this side of the engine holds now."""
        return self._host.stats() if self._host else {}

    def _running(self) -> EngineHost:
        if self._host is None:
            raise NotReadyError("the runtime was not started")
        return self._host

    # ------------------------------------------------------------ generation

    async def stream(
        self, request: GenerateRequest, request_id: str | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request; the last is `Finished`. Closing the iterator cancels the request.

        While it waits there are `Queued` events with its place and, where known, the seconds to go; `Parked`,
        `Paused` and `Resumed` tell of interruptions, after which the same text goes on.

        Args:
            request: what to run; without a seed it gets a random one.
            request_id: unique among live requests; None: one is made up.

        Raises:
            StokerError: the request was refused or failed.
        """
        host = self._running()
        request_id = request_id or f"req-{secrets.token_hex(8)}"
        request = sealed(request, host.roster.resolve(request.model).id)
        events = RequestStream(request_id, host.cancel)
        host.submit(request_id, request, events.push)
        async with aclosing(events):
            async for event in events:
                yield event

    async def generate(
        self,
        prompt: str | Sequence[int] | GenerateRequest,
        *,
        state: GivenState | None = None,
        **fields: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt.

        Args:
            prompt: text, token ids or a whole request.
            state: what a recurrent model begins from: the id of a saved state, a file or its bytes.
            fields: of `GenerateRequest` and `Sampling`, by name.

        Raises:
            StokerError: the request was refused or failed.
        """
        request = await self.states.request(prompt, state=state, **fields)
        num_open = request.n
        last: Delta | None = None
        async with aclosing(self.stream(request)) as events:
            async for event in events:
                match event:
                    case PromptEcho() if request.echo:
                        for index in range(request.n):
                            yield TextDelta(text=event.text, index=index, logprobs=event.logprobs)
                    case Delta():
                        num_open -= event.finish_reason is not None
                        if num_open == 0:
                            last = event  # it waits for the usage
                        else:
                            yield _piece(event, None)
                    case Finished():
                        yield _piece(last, event)

    async def chat(
        self, messages: Sequence[Message], *, template_args: Mapping[str, Any] | None = None, **fields: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation.

        Args:
            messages: each with `role` and `content`.
            template_args: further variables for the model's chat template.
            fields: as for `generate`.

        Raises:
            StokerError: the messages or the request were refused, or it failed.
        """
        model = fields.get("model", "default")
        prompt = self.render_chat(messages, model=model, **(template_args or {}))
        async with aclosing(self.generate(prompt, is_chat=True, **fields)) as deltas:
            async for delta in deltas:
                yield delta

    async def cancel(self, request_id: str) -> None:
        """End a live request; its stream finishes with `cancelled`.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._host_of(request_id).cancel(request_id)

    async def pause_request(self, request_id: str) -> None:
        """Let a live request stand still, its place and text kept, until `resume_request`. Idempotent.

        Its stream says `Paused` once no further token will come; a restart of the engine changes nothing.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._host_of(request_id).pause(request_id)

    async def resume_request(self, request_id: str) -> None:
        """Let a paused request go on where it stood, before newcomers of its class. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._host_of(request_id).resume(request_id)

    def _host_of(self, request_id: str) -> EngineHost:
        if self._host is None:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}", param="request_id")
        return self._host

    # ------------------------------------------------------------ text

    async def tokenize(
        self, text: str, model: str = "default", *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[list[int], list[bytes]]:
        """Token ids of `text` and the bytes of each.

        Raises:
            StokerError: the model is not served.
        """
        question = Tokenize(
            call_id=0,
            model=self.resolve(model).id,
            text=text,
            add_special=add_special,
            parse_special=parse_special,
        )
        answer = await self._running().ask(question)
        return answer["tokens"], answer["pieces"]

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """The text of token ids.

        Raises:
            StokerError: the model is not served or has no such token.
        """
        question = Detokenize(call_id=0, model=self.resolve(model).id, tokens=list(tokens))
        text: str = (await self._running().ask(question))["text"]
        return text

    def render_chat(self, messages: Sequence[Message], model: str = "default", **template_args: Any) -> str:
        """The prompt that a conversation becomes, by the model's own template.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        info = self.resolve(model)
        template = self._templates.get(info.id)
        if template is None:
            template = ChatTemplate(info.chat_template, bos_text=info.bos_text, eos_text=info.eos_text)
            self._templates[info.id] = template
        return template.render(messages, **template_args)


def _specs(settings: EngineSettings) -> list[ModelSpec]:
    """What the engine shall load; reads the files' headers."""
    store = ModelStore(settings.models_dir)
    specs: dict[str, ModelSpec] = {}
    for ref in settings.models or (None,):
        file = store.resolve(ref)
        if file.id in specs:
            text = f"two models would be served as {file.id!r}: {specs[file.id].path} and {file.path}"
            raise InvalidRequestError(text, param="models")
        specs[file.id] = ModelSpec(
            id=file.id,
            path=file.path,
            num_slots=settings.slots,
            n_ctx=settings.kv_cells or settings.ctx_size,
            n_batch=settings.n_batch,
            num_threads=settings.threads,
            max_queue=settings.max_queue,
            policy=Policy(settings.policy),
            target_step_ms=settings.target_step_ms,
            background_patience_s=settings.background_patience_s,
            park_bytes=settings.park_bytes,
            cache_mode=CacheMode(settings.cache_mode),
        )
    return list(specs.values())


def _piece(delta: Delta | None, finished: Finished | None) -> TextDelta:
    return TextDelta(
        text=delta.text if delta else "",
        index=delta.index if delta else 0,
        token_ids=delta.token_ids if delta else [],
        logprobs=delta.logprobs if delta else None,
        finish_reason=delta.finish_reason if delta else FinishReason.LENGTH,  # no token was asked for
        usage=finished.usage if finished else None,
        timings=finished.timings if finished else None,
    )
