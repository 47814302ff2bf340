"""The façade an application imports: models by name, requests in, text out.

Owns what an application may call and the shape of the answers; what it is made of is `client.client`'s.

    async with Runtime(slots=4) as runtime:
        print((await runtime.ask("What is the capital of France?")).text)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, Unpack

from stoker.chat.conversation import NO_TOOLS, ToolOffer
from stoker.client.client import Client, OnArrival
from stoker.client.event_bus import RuntimeEvent
from stoker.client.process.transport import ThreadTransport, Transport
from stoker.client.requests.group import KnownAs, RequestGroup
from stoker.client.requests.record import RequestRecord, request_id_of
from stoker.client.requests.stream import StreamEvent, TextDelta
from stoker.client.store.file import KeptRequest
from stoker.images.image import ImageLike
from stoker.images.intake import Intake
from stoker.ipc.commands import CountTokens, Detokenize, Tokenize
from stoker.ipc.events import ModelState
from stoker.ipc.model import ModelInfo, Reach
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import CallKind, EngineHealth, GroupStatus, ModelStatus, RequestStatus, RuntimeStatus
from stoker.settings import EngineSettings
from stoker.tasks.ask import Answer, AskKeywords, ask
from stoker.tasks.batch import BatchKeywords, batch
from stoker.tasks.chat import ChatPlan, chat_job, offer_of, planned
from stoker.tasks.choose import Choices, ChooseKeywords, score_choices
from stoker.tasks.embed import EmbedKeywords, TextEmbeddings, embed_texts
from stoker.tasks.fields import (
    IS_PINNED_IS_FORMER,
    CallKeywords,
    ConversationKeywords,
    GenerateKeywords,
    LoadKeywords,
    Message,
    Prompt,
    checked_request,
    load_fields,
    spec_changes,
    warn_former,
    warn_outside,
)
from stoker.tasks.form import Schema, Several, T
from stoker.tasks.functions import ToolLike
from stoker.tasks.generate import chatted, generated
from stoker.tasks.read_images import Question, Reading, read_images
from stoker.tasks.rerank import Ranking, RerankKeywords, rank_documents
from stoker.tasks.run_tools import RunToolsKeywords, ToolRun, run_tools
from stoker.tasks.states import States

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.remote.runtime import RemoteRuntime

__all__ = ["Answer", "KeptRequest", "Message", "Runtime", "RuntimeEvent", "RuntimeStatus", "TextDelta"]


class Runtime:
    """Models of one machine, served to this application.

    Args:
        model: name or GGUF path of the default model; None: the settings' first, or the embedded one.
        settings: the engine's; None: the defaults.
        allow_downloads: a model may be OWNER/REPO[:FILE] of the hub; `start` downloads it if it is not here.
        fields: single settings that differ, by name; with `model`, `models` names further ones.

    Attributes:
        on_load: called with each state a model reports while it loads; set it before `start`.
        on_call: called with each ended call of several requests and `finished`, `cancelled` (its caller
            left) or the code of its error; `on_ended` with each ended request and call, as `recent` shows it.
        on_arrival: called before a request or call is taken in (`OnArrival`); what it raises refuses it.
        ahead: an engine's process that was spawned before this; `start` uses it. Set it before.
        takes_up: it goes on with what a program that ended while suspended has left; set it before `start`.
        states: saved states of recurrent models, and embeddings by state.
        take_settings, serve_model: serve the models of settings read again; one by its name, not loaded yet.
        hurry, request_text: cuts a `close` short, so that all is ended; what a request reads and wrote.
        handover, take_over: what gates ask of a machine; goes on with a request of one.

    Raises:
        InvalidRequestError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        settings: EngineSettings | None = None,
        allow_downloads: bool = False,
        **fields: Any,
    ) -> None:
        settings = (settings or EngineSettings()).replace(**fields)
        if model is not None:
            settings = settings.replace(models=(str(model), *settings.models))
        new_transport = _in_thread if settings.isolation == "thread" else None
        self._client = Client(settings, lambda state: self.on_load(state), new_transport)  # noqa: PLW0108 - it may be set later
        self._client.allows_downloads = allow_downloads
        self.takes_up = True
        self.ahead: Transport | None = None
        self.states = States(settings.states_dir, self)
        self.hurry, self.take_settings = self._client.hurry, self._client.take_settings
        self.serve_model, self.request_text = self._client.serve_model, self._client.request_text
        self.handover, self.take_over = self._client.handover, self._client.handover.take_over
        self._client.on_call = lambda call, outcome: self.on_call(call, outcome)  # noqa: PLW0108 - it may be set later
        self._client.bus.on_ended = lambda status: self.on_ended(status)  # noqa: PLW0108 - it may be set later
        self._client.on_arrival = lambda *given: self.on_arrival(*given)  # noqa: PLW0108 - likewise
        self.on_arrival: OnArrival = lambda request_id, owner, request, num_members: None  # noqa: ARG005 - the hook's
        self.on_ended: Callable[[RequestStatus], None] = lambda status: None  # noqa: ARG005 - the hook's
        self.on_call: Callable[[GroupStatus, str], None] = lambda call, outcome: None  # noqa: ARG005 - the hook's
        self.on_load: Callable[[ModelState], None] = lambda state: None  # noqa: ARG005 - the hook's argument

    def __repr__(self) -> str:
        return f"<Runtime {self._client.supervisor!r}>"

    @staticmethod
    def connect(url: str | None = None, *, api_key: str | None = None) -> RemoteRuntime:
        """The runtime of a running server, by the same methods; to be entered as this one is.

        Args:
            url: of the server; None: `STOKER_URL`, else http://127.0.0.1:8686.
            api_key: None: `STOKER_API_KEY`, else none is sent.

        Raises:
            InvalidRequestError: the URL or the key is none.
        """
        from stoker.remote.runtime import RemoteRuntime  # noqa: PLC0415 - HTTP is for those who ask for it

        return RemoteRuntime(url, api_key=api_key)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the engine; returns when every model that fits beside those before it is ready.

        What a program that ended while suspended has left goes on; see `kept`.

        Raises:
            ModelNotFoundError: a name or path leads nowhere.
            ModelError: a file is broken or cannot be downloaded or loaded.
            MachineError: no model could be loaded, for want of memory or for heat.
            MachineSetupError: the engine process does not come up.
        """
        self._client.ahead = self.ahead
        await self._client.start()
        if self.takes_up:
            await self._client.take_up()

    async def close(self) -> None:
        """Let running requests finish for `drain_s`, end the rest, free everything. Idempotent.

        Where it is suspended, and of requests without a client, all is kept for the next start.
        """
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    # ------------------------------------------------------------ questions

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken; while the engine restarts they are, and wait for it."""
        return (found := self._client.supervisor) is not None and found.is_taking

    @property
    def models(self) -> list[ModelInfo]:
        """Every served model, the default first."""
        return self._client.supervisor.registry.infos() if self._client.supervisor else []

    def health(self) -> EngineHealth:
        """Whether an engine serves, or what is done about it; asks no engine, and never raises."""
        return self._client.health()

    async def ended(self) -> None:
        """Until nothing is served any more, after `close`.

        Raises:
            NotReadyError: not started.
            EngineError: it ended unasked, by a fault of ours; only another program can serve again.
        """
        await self._client.running().ended()

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name; None and "default" mean the first.

        Raises:
            ModelNotFoundError: it is not served.
            NotReadyError: it has not been loaded yet.
        """
        return self._client.running().registry.resolve(model)

    async def status(self) -> RuntimeStatus:
        """The engine and everything it holds now.

        Raises:
            NotReadyError: not started.
        """
        return await self._client.running().status()

    @property
    def images(self) -> Intake:
        """Takes in the images of requests."""
        return self._client.images

    def stats(self) -> dict[str, int]:
        """What this side of the engine holds now."""
        return self._client.stats()

    # ------------------------------------------------------------ models

    async def load_model(
        self,
        model: str,
        *,
        keep_alive: float | str | None = None,
        ctx_size: int | None = None,
        slots: int | None = None,
        reach: Reach = Reach.ANY,
        **fields: Unpack[LoadKeywords],
    ) -> ModelInfo:
        """Serve a model and load it; returns when it is ready. All who ask for the same share one load.

        Args:
            model: id of a served one, a name `stoker models` lists, a file below the models folder, or
                OWNER/REPO[:FILE], which is downloaded first. Cancelled by all who asked, it is stopped.
            keep_alive: how long it stays after its last request, in seconds or as "5m"; None: as set, as for
                the others.
            ctx_size: tokens that one request may use; of a pool of cells all its slots share them.
            slots: sequences that run at once.
            reach: what a name that is not served may lead to; a caller that is not trusted gets less.
            fields: where it lies; names of before 0.2 warn.

        Raises:
            StokerError: why it cannot be served, downloaded or loaded now, or was asked for otherwise since.
        """
        given = {"keep_alive": keep_alive, "ctx_size": ctx_size, "slots": slots, **fields}
        changes = spec_changes(load_fields(given))
        return await self._client.load_model(_served_id(self.models, model), changes, reach)

    async def unload_model(self, model: str) -> None:
        """Free a served model, or stop its load or download; the next request for it loads it again.

        Raises:
            ModelNotFoundError: it is not served.
        """
        await self._client.running().loads.unload(_served_id(self.models, model))

    async def pin_model(self, model: str, *, is_pinned: bool | None = None) -> None:
        """Never unload a model to make room; `is_pinned` warns and will go. Raises ModelNotFoundError."""
        if is_pinned is not None:
            warn_outside(IS_PINNED_IS_FORMER)
        self._client.running().loads.pin(_served_id(self.models, model), is_pinned=is_pinned is not False)

    async def unpin_model(self, model: str) -> None:
        """Let a pinned model be unloaded to make room again. Raises ModelNotFoundError."""
        self._client.running().loads.pin(_served_id(self.models, model), is_pinned=False)

    def model_states(self) -> list[ModelStatus]:
        """Every served model and download as it was last heard of; needs no engine."""
        return self._client.model_states()

    # ------------------------------------------------------------ sleep

    @property
    def is_suspended(self) -> bool:
        """Whether the engine is away, or leaving, and every request waits for `resume`."""
        return (found := self._client.supervisor) is not None and found.is_suspended

    async def suspend(self, reason: str | None = None, *, grace_s: float | None = None) -> None:
        """Save what was computed, free everything, keep every request and its stream (SPEC L2).

        Returns when that is done, or when `resume` came within the grace. Idempotent.

        Args:
            reason: "sleep" has no grace, "background" 30 s, any other and None what `suspend_grace_s` says.
            grace_s: seconds to wait first; None: by the reason.

        Raises:
            NotReadyError: not started, or closed.
        """
        await self._client.suspend(reason or "", grace_s)

    async def resume(self) -> None:
        """Load what was loaded and let every request go on; returns when the engine serves. Idempotent.

        Raises:
            NotReadyError: not started, or closed.
            MachineSetupError: the engine process does not come up.
        """
        await self._client.running().wake()

    def kept(self) -> list[KeptRequest]:
        """Requests that a former program left when it ended while suspended; they have no client here.

        They run, and what they deliver is kept for 10 minutes after their end, until it is read.
        """
        return self._client.table.kept()

    def with_client(self) -> list[KeptRequest | GroupStatus]:
        """Live requests of this program and calls of several; those that `kept` lists are not among them."""
        return self._client.table.with_client()

    def owner_of(self, request_id: str) -> str:
        """The `owner` that a live or kept request or group was given; empty: none, or there is no such."""
        return self._client.table.owner_of(request_id)

    def attach(self, request_id: str, *, owner: str = "") -> AsyncGenerator[StreamEvent, None]:
        """The stream of a kept request from its first delta on; leaving it does not end the request.

        Args:
            request_id: its id, or what else it is known by.
            owner: digest of the caller's API key; it has to be the one that the request came with.

        Raises:
            RequestNotFoundError: there is none, or it has another owner.
            StokerError: the request failed.
        """
        return self._client.attach(request_id, owner)

    def events(self, *, after: str = "", kinds: Collection[str] = ()) -> AsyncGenerator[RuntimeEvent, None]:
        """What happens, after a snapshot or the event of that id; of `kinds` alone, if it names any."""
        return self._client.bus.subscribe(self._client.snapshot, after, kinds)

    # ------------------------------------------------------------ generation

    def stream(
        self,
        request: GenerateRequest,
        request_id: str | None = None,
        *,
        names: Sequence[str] = (),
        owner: str = "",
        route: str = "library",
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request; the last is `Finished`. Closing the iterator cancels the request.

        While it waits there are `Queued` events with its place and, where known, the seconds to go; `Parked`,
        `Paused` and `Resumed` tell of interruptions, after which the same text goes on.

        Args:
            request: what to run; without a seed it gets a random one.
            request_id: unique among live requests; None: one is made up.
            names: what else it is known by, should it outlive this program (see `attach`).
            owner: digest of the API key it came with; only the same one may attach to it.
            route: what it came by, as status and events show it: the path of an HTTP route.

        Raises:
            StokerError: the request was refused or failed.
        """
        own_id, now = request_id_of(request_id), time.monotonic()
        record = RequestRecord(own_id, checked_request(request), now, tuple(names), owner, route=route)
        return self._client.stream(record)

    def group(
        self, kind: CallKind, request: GenerateRequest, num_members: int, known_as: KnownAs
    ) -> AbstractContextManager[RequestGroup]:
        """One call that is several requests, under one id while the block runs; its `stream` runs them.

        Args:
            kind: what the call computes.
            request: its first one; model, class and timeout of all are its.
            num_members: how many there will be.
            known_as: id, names and owner; without an id one is made up.

        Raises:
            InvalidRequestError: the id is in use.
            StokerError: the model is not served.
        """
        return self._client.group(kind, request, num_members, known_as)

    def generate(
        self, prompt: Prompt | GenerateRequest, **fields: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt.

        Args:
            prompt: text, token ids or a whole request.
            fields: of `GenerateRequest`, `Sampling` and `FormKeywords`, by name; `state`: what a recurrent
                model begins from, the id of a saved state, a file or its bytes; `request_id`: unique among
                live requests, each delta carries it; `on_notice`: called with what comes before and between
                the deltas: the place in the queue, interruptions, with `return_progress` how much of the
                prompt is computed.

        Raises:
            StokerError: the request was refused or failed.
        """
        return generated(self, prompt, **fields)

    def chat(
        self, messages: str | Sequence[Message], **fields: Unpack[ConversationKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation; reasoning and calls come apart from the text, each call whole.

        Args:
            messages: each with `role` and `content`, in OpenAI's form; a list as content may hold texts,
                `Image`s, `Audio`s and `Document`s. A text is one turn, the user's.
            fields: as for `generate`; `tools`: functions that the model may call, of Python or in OpenAI's
                form; `tool_choice`: "auto" (None), "none", "required", or the form that names one of them;
                `parallel_tool_calls` False: at most one call; `tool_format`: the format of calls, in place of
                the one that the model's chat template shows; `template_args`: further variables for the
                template; `images`: whatever `Image` takes, or a list of such, for the front of the last user
                turn.

        Raises:
            StokerError: the messages or the request were refused, or it failed.
        """
        return chatted(self, messages, **fields)

    async def ask(self, prompt: Prompt | Sequence[Message], **fields: Unpack[AskKeywords[T]]) -> Answer[T]:
        """The whole answer to a text or a conversation; see `tasks.ask.ask`."""
        return await ask(self, prompt, **fields)

    async def batch(
        self, prompts: Several[Prompt | Sequence[Message]], **fields: Unpack[BatchKeywords[T]]
    ) -> list[Answer[T]]:
        """The answers to many prompts, as background work; see `tasks.batch.batch`."""
        return await batch(self, prompts, **fields)

    async def run_tools(
        self, messages: str | Sequence[Message], **fields: Unpack[RunToolsKeywords]
    ) -> ToolRun:
        """Ask, run the calls of the answer, and so on until it has none; see `tasks.run_tools.run_tools`."""
        return await run_tools(self, messages, **fields)

    async def cancel(self, request_id: str) -> None:
        """End a live request; its stream finishes with `cancelled`.

        The id of a call of several (`embed`, `rerank`, `choose`, `read`, `states`) ends all of it: the call
        raises RequestCancelledError (`read`: ReadingError, with what there is of the answer).

        Raises:
            RequestNotFoundError: no live request or call has that id.
        """
        self._client.running().requests.cancel(request_id)

    async def pause_request(self, request_id: str) -> None:
        """Let a live request stand still, its place and text kept, until `resume_request`. Idempotent.

        Its stream says `Paused` once no further token will come; a restart of the engine changes nothing.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._client.running().requests.pause(request_id)

    async def resume_request(self, request_id: str) -> None:
        """Let a paused request go on where it stood, before newcomers of its class. Idempotent.

        Raises:
            RequestNotFoundError: no live request has that id.
        """
        self._client.running().requests.resume(request_id)

    # ------------------------------------------------------------ text

    async def embed(
        self, inputs: Prompt | Sequence[Prompt], **fields: Unpack[EmbedKeywords]
    ) -> TextEmbeddings:
        """Vectors of texts, by an encoder; see `tasks.embed.embed_texts`."""
        warn_former(fields)
        return await embed_texts(self, inputs, **fields)

    async def read(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        ask: str | None = None,
        schema: Schema | None = None,
        **fields: Unpack[CallKeywords],
    ) -> Reading:
        """Read an image, or several that belong together, as JSON that is checked (SPEC V4).

        `ask` is the question (None: to read a report), `schema` a class or a JSON Schema of the answer;
        fields and errors are those of `tasks.read_images.read_images`.
        """
        warn_former(fields)
        question = Question.taken_from(ask, schema, fields)
        return await read_images(self, images, question, **fields)

    async def rerank(self, query: str, documents: Several[str], **fields: Unpack[RerankKeywords]) -> Ranking:
        """Documents for a query, the best first; see `tasks.rerank.rank_documents`."""
        warn_former(fields)
        return await rank_documents(self, query, documents, **fields)

    async def choose(
        self, prompt: Prompt, choices: Several[str], **fields: Unpack[ChooseKeywords]
    ) -> Choices:
        """Texts by how likely they are after a prompt; see `tasks.choose.score_choices`."""
        warn_former(fields)
        return await score_choices(self, prompt, choices, **fields)

    async def tokenize(
        self, text: str, model: str = "default", *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[list[int], list[bytes]]:
        """Token ids of `text` and the bytes of each.

        Raises:
            StokerError: the model is not served.
        """
        how = {"add_special": add_special, "parse_special": parse_special}
        question = Tokenize(call_id=0, model=self.resolve(model).id, text=text, **how)
        answer = await self._client.running().ask(question)
        return answer["tokens"], answer["pieces"]

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """The text of token ids.

        Raises:
            StokerError: the model is not served or has no such token.
        """
        question = Detokenize(call_id=0, model=self.resolve(model).id, tokens=list(tokens))
        answer = await self._client.running().ask(question)
        return str(answer["text"])

    async def count_tokens(self, request: GenerateRequest) -> int:
        """How many tokens the prompt of a request has, its images included; nothing is computed.

        Raises:
            StokerError: the model is not served, or does not take such a prompt.
        """
        answer = await self._client.running().ask(CountTokens(0, self.resolve(request.model).id, request))
        return int(answer["num_tokens"])

    def plan_chat(
        self,
        messages: str | Sequence[Message],
        offer: ToolOffer = NO_TOOLS,
        *,
        model: str = "default",
        template_args: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """What a conversation asks of the model, and how the answer is to be read; see `prepare_chat`.

        Blocks until the model's template, which runs in a process of its own, has laid it out.
        """
        info, read = self.resolve(model), self._client.documents.read_now(messages)
        job, images = chat_job(info, read, offer, template_args)
        return planned(job, images, self._client.lay_out(job).result())

    async def prepare_chat(
        self,
        messages: str | Sequence[Message],
        offer: ToolOffer = NO_TOOLS,
        *,
        model: str = "default",
        template_args: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> ChatPlan:
        """What a conversation asks of the model, and how the answer is to be read.

        Args:
            messages: as for `chat`.
            offer: of tools.
            model: which one is to answer.
            template_args: further variables for the model's chat template.
            owner: digest of the caller's API key; one owner's slow conversations do not delay another's.

        Raises:
            CallerError: the template or the model refuses the messages, or a document cannot be read.
            MachineError: too many wait, or no process can be started.
        """
        info = self.resolve(model)
        read = await self._client.with_documents(messages, owner)
        job, images = await asyncio.to_thread(chat_job, info, read, offer, template_args)
        return planned(job, images, await asyncio.wrap_future(self._client.lay_out(job, owner)))

    def render_chat(
        self,
        messages: str | Sequence[Message],
        model: str = "default",
        *,
        tools: Sequence[ToolLike] | None = None,
        **template_args: Any,
    ) -> str:
        """The prompt that a conversation becomes, by the model's own template; blocks as `plan_chat` does."""
        return self.plan_chat(messages, offer_of(tools), model=model, template_args=template_args).prompt


def _served_id(models: Sequence[ModelInfo], model: str) -> str:
    return models[0].id if model == "default" and models else model


def _in_thread(settings: EngineSettings) -> ThreadTransport:
    """The transport of an engine in this process; only here does the client's side meet the engine's code."""
    from stoker.engine.process import EngineInThread  # noqa: PLC0415 - a child process imports its own

    return ThreadTransport(settings, EngineInThread)
