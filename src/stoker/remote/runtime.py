"""The runtime of a running server, with the methods of `stoker.runtime.Runtime`.

Owns what each method asks of the server and what comes back as the library's types. Connections and errors
are `connection`'s, what is known of the server between two questions `mirror`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self, Unpack

import msgspec

from stoker.chat.conversation import NO_TOOLS, Layout, ToolOffer
from stoker.client.event_bus import RuntimeEvent
from stoker.client.requests.stream import OnNotice, StreamEvent, TextDelta, text_deltas
from stoker.client.store.file import KeptRequest
from stoker.documents.turns import with_texts
from stoker.errors import ServerLostError, error_from_info
from stoker.images.image import ImageLike
from stoker.images.intake import Intake
from stoker.images.turns import with_images
from stoker.ipc.events import Delta, Failed, Finished, ModelState
from stoker.ipc.model import ModelInfo, Reach
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import EngineHealth, GroupStatus, ModelStatus, RuntimeStatus
from stoker.ipc.usage import Usage
from stoker.remote import wire
from stoker.remote.bodies import (
    call_body,
    id_field,
    image_part,
    messages_body,
    offer_body,
    refuse,
    request_body,
    request_headers,
    request_path,
    state_fields,
    taken,
)
from stoker.remote.calls import choices_of, embeddings_of, pieces_of, ranking_of, request_of_document
from stoker.remote.connection import ServerConnection
from stoker.remote.mirror import ServerMirror
from stoker.remote.states import RemoteStates
from stoker.settings import server_to_ask
from stoker.tasks.ask import Answer, AskKeywords, ask
from stoker.tasks.batch import BatchKeywords, batch
from stoker.tasks.chat import ChatPlan, chat_deltas, chat_job, offer_of, planned
from stoker.tasks.choose import Choices, ChooseKeywords
from stoker.tasks.embed import EmbedKeywords, TextEmbeddings
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
    request_of,
    sampling_given,
    texts_of,
    turns_of,
    warn_former,
    warn_outside,
)
from stoker.tasks.form import Schema, Several, T
from stoker.tasks.functions import ToolLike
from stoker.tasks.read_images import Attempt, Question, Reading, Told, pictures_of, read_with, told_by
from stoker.tasks.rerank import Ranking, RerankKeywords
from stoker.tasks.run_tools import RunToolsKeywords, ToolRun, run_tools

__all__ = ["RemoteRuntime"]


class RemoteRuntime:
    """A running server, asked by the methods of `stoker.Runtime`, with their arguments, results and errors.

    What only a runtime of this process has is refused by name (`UnsupportedError`). Questions without `await`
    are answered by what was last heard of the server, but `kept`, `with_client`, `plan_chat` and
    `render_chat`: these block until it has answered.

    Args:
        url: of the server; None: `STOKER_URL`, else http://127.0.0.1:8686.
        api_key: None: `STOKER_API_KEY`, else none is sent.

    Attributes:
        on_load: called with each state that a model of the server reports while it loads.
        states: saved states of recurrent models, and embeddings by state.

    Raises:
        InvalidRequestError: the URL or the key is none.
    """

    def __init__(self, url: str | None = None, *, api_key: str | None = None) -> None:
        self._server = ServerConnection(*server_to_ask(url, api_key))
        self._mirror = ServerMirror(self._server, lambda state: self.on_load(state))  # noqa: PLW0108 - it may be set later
        self._images = Intake()
        self.states = RemoteStates(self._server)
        self.on_load: Callable[[ModelState], None] = lambda state: None  # noqa: ARG005 - the hook's argument

    def __repr__(self) -> str:
        return f"<RemoteRuntime {self.url} {self.health().state}>"

    @property
    def url(self) -> str:
        """Of the server."""
        return self._server.url

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Connect; returns when the server takes requests.

        Raises:
            ServerLostError: no server answers.
            NotReadyError: its engine does not start.
            AuthenticationError: it asks for another key.
            MachineSetupError: what listens there is no Stoker.
        """
        self._server.open()
        try:
            await self._mirror.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End what runs for this program and disconnect; the server goes on. Idempotent."""
        await self._mirror.close()
        await self._server.close()
        self._images.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    # ------------------------------------------------------------ questions

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests."""
        return self._mirror.is_ready

    @property
    def models(self) -> list[ModelInfo]:
        """Every served model, the default first."""
        return self._mirror.models

    def health(self) -> EngineHealth:
        """Whether an engine serves there, or what is done about it; failing while the server is gone."""
        return self._mirror.health()

    def resolve(self, model: str | None) -> ModelInfo:
        """The served model of that name; None and "default" mean the first.

        Raises:
            ModelNotFoundError: it is not served.
            NotReadyError: not connected.
        """
        return self._mirror.resolve(model)

    async def status(self) -> RuntimeStatus:
        """The engine and everything it holds now.

        Raises:
            StokerError: the server does not tell.
        """
        return await self._server.get(wire.STATUS, RuntimeStatus)

    @property
    def images(self) -> Intake:
        """Takes in the images of requests that are made here of a plan."""
        return self._images

    def stats(self) -> dict[str, int]:
        """What this side of the connection holds now."""
        return {"calls": len(self._server)}

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
        """As `Runtime.load_model`; names lead to the server's models, and what it trusts its caller with.

        Raises:
            UnsupportedError: `reach` is given.
            OperatorOnlyError: the key is not an operator's.
            StokerError: why it cannot be served, downloaded or loaded now, or was asked for otherwise since.
        """
        refuse({"reach": reach is not Reach.ANY})
        given = {"keep_alive": keep_alive, "ctx_size": ctx_size, "slots": slots, **fields}
        asked = {"model": model, **load_fields(given)}
        loaded = await self._server.post("/v1/runtime/models/load", asked)
        await self._mirror.refresh()
        return self.resolve(loaded["id"])

    async def unload_model(self, model: str) -> None:
        """As `Runtime.unload_model`. Raises OperatorOnlyError where the key is not an operator's."""
        await self._operate("/v1/runtime/models/unload", {"model": model})

    async def pin_model(self, model: str, *, is_pinned: bool | None = None) -> None:
        """As `Runtime.pin_model`. Raises OperatorOnlyError where the key is not an operator's."""
        if is_pinned is not None:
            warn_outside(IS_PINNED_IS_FORMER)
        await self._operate("/v1/runtime/models/pin", {"model": model, "pinned": is_pinned is not False})

    async def unpin_model(self, model: str) -> None:
        """As `Runtime.unpin_model`. Raises OperatorOnlyError where the key is not an operator's."""
        await self._operate("/v1/runtime/models/pin", {"model": model, "pinned": False})

    def model_states(self) -> list[ModelStatus]:
        """Every served model and download as it was last heard of."""
        return self._mirror.states

    async def _operate(self, path: str, body: Mapping[str, Any]) -> None:
        await self._server.post(path, body)
        await self._mirror.refresh()

    # ------------------------------------------------------------ sleep

    @property
    def is_suspended(self) -> bool:
        """Whether the server's engine is away until `resume`."""
        return self._mirror.is_suspended

    async def suspend(self, reason: str | None = None, *, grace_s: float | None = None) -> None:
        """As `Runtime.suspend`. Raises OperatorOnlyError where the key is not an operator's."""
        await self._operate("/v1/runtime/suspend", {"reason": reason or "request", "grace_s": grace_s})

    async def resume(self) -> None:
        """As `Runtime.resume`. Raises OperatorOnlyError where the key is not an operator's."""
        await self._operate("/v1/runtime/resume", {})

    def kept(self) -> list[KeptRequest]:
        """As `Runtime.kept`; of the requests of this key, an operator's key shows all. Blocks."""
        return [one for one in self._requests(is_kept=True) if isinstance(one, KeptRequest)]

    def with_client(self) -> list[KeptRequest | GroupStatus]:
        """As `Runtime.with_client`, likewise."""
        return self._requests(is_kept=False)

    def _requests(self, *, is_kept: bool) -> list[KeptRequest | GroupStatus]:
        entries = self._server.get_now(wire.REQUESTS)["data"]
        return [request_of_document(entry) for entry in entries if entry["is_kept"] is is_kept]

    async def attach(self, request_id: str, *, owner: str = "") -> AsyncGenerator[StreamEvent, None]:
        """As `Runtime.attach`; the server knows the owner by the API key."""
        refuse({"owner": owner})
        path = f"{request_path(request_id)}/events"
        async with aclosing(self._events("GET", path)) as events:
            async for event in events:
                yield event

    async def events(
        self, *, after: str = "", kinds: Collection[str] = ()
    ) -> AsyncGenerator[RuntimeEvent, None]:
        """As `Runtime.events`; without an operator's key, of the requests of this key only."""
        async with aclosing(self._mirror.events(after, kinds)) as events:
            async for event in events:
                yield event

    # ------------------------------------------------------------ generation

    async def stream(
        self,
        request: GenerateRequest,
        request_id: str | None = None,
        *,
        names: Sequence[str] = (),
        owner: str = "",
        route: str = "library",
    ) -> AsyncGenerator[StreamEvent, None]:
        """As `Runtime.stream`; leaving the iterator ends the request at the server.

        Raises:
            ServerLostError: the server went away.
            StokerError: the request was refused or failed.
        """
        refuse({"names": names, "owner": owner, "route": route != "library"})
        body = request_body(checked_request(request)) | id_field(request_id)
        async with aclosing(self._events("POST", wire.REQUESTS, body)) as events:
            async for event in events:
                yield event

    async def generate(
        self, prompt: Prompt | GenerateRequest, **fields: Unpack[GenerateKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """As `Runtime.generate`."""
        warn_former(fields)
        on_notice, request_id = fields.pop("on_notice", None), fields.pop("request_id", None)
        given = await asyncio.to_thread(state_fields, fields.pop("state", None))
        request = request_of(prompt, fields)
        named = sampling_given(prompt, fields)
        body = request_body(request, sampling=named) | id_field(request_id) | given
        async with (
            aclosing(self._events("POST", wire.REQUESTS, body)) as events,
            aclosing(text_deltas(request, events, on_notice)) as deltas,
        ):
            async for delta in deltas:
                yield delta

    async def chat(
        self, messages: str | Sequence[Message], **fields: Unpack[ConversationKeywords]
    ) -> AsyncGenerator[TextDelta, None]:
        """As `Runtime.chat`."""
        warn_former(fields)
        is_parallel, tools = fields.pop("parallel_tool_calls", True), fields.pop("tools", None)
        choice, tool_format = fields.pop("tool_choice", None), fields.pop("tool_format", None)
        offer = offer_of(tools, choice, is_parallel=is_parallel, tool_format=tool_format)
        on_notice, request_id = fields.pop("on_notice", None), fields.pop("request_id", None)
        template_args = fields.pop("template_args", None)
        shown = with_images(turns_of(messages), fields.pop("images", ()))
        given = await asyncio.to_thread(state_fields, fields.pop("state", None))
        request = request_of("", fields)
        conversation = {
            "messages": await asyncio.to_thread(messages_body, shown),
            "chat_template_kwargs": template_args,
            **offer_body(offer),
        }
        named = sampling_given("", fields)
        body = request_body(request, conversation, named) | id_field(request_id) | given
        async with self._answer(request, body, on_notice) as (_, deltas):
            async for delta in deltas:
                yield delta

    @asynccontextmanager
    async def _answer(
        self, request: GenerateRequest, body: Mapping[str, Any], on_notice: OnNotice | None = None
    ) -> AsyncIterator[tuple[wire.AnswerHead, AsyncGenerator[TextDelta, None]]]:
        """The answer to a conversation: what its stream begins with, and its pieces."""
        async with aclosing(self._messages("POST", wire.REQUESTS, body)) as events:
            head = await anext(events)
            assert isinstance(head, wire.AnswerHead), f"a conversation's stream began with {head!r}"
            async with (
                aclosing(text_deltas(request, events, on_notice)) as pieces,  # type: ignore[arg-type] # the head was the first
                aclosing(chat_deltas(pieces, head.form)) as deltas,
            ):
                yield head, deltas

    async def _events(self, method: str, path: str, body: Any = None) -> AsyncGenerator[StreamEvent, None]:
        """The events of a request's stream as `Runtime.stream` has them."""
        async with aclosing(self._messages(method, path, body)) as messages:
            async for message in messages:
                if not isinstance(message, wire.AnswerHead):
                    yield message

    async def _messages(
        self, method: str, path: str, body: Any = None
    ) -> AsyncGenerator[wire.AnswerHead | StreamEvent, None]:
        """The events of a request's stream; `Failed` is raised, and so is an end without `Finished`."""
        num_tokens = 0
        try:
            async with aclosing(self._server.stream(method, path, body)) as frames:
                async for frame in frames:
                    message = wire.decoded_event(frame.event, frame.data)
                    match message:
                        case None:
                            continue
                        case Failed(error=error):
                            raise error_from_info(error)
                        case Delta(token_ids=ids):
                            num_tokens += len(ids)
                    yield message
                    if isinstance(message, Finished):
                        return
        except msgspec.DecodeError as error:
            raise self._server.stranger(f"its stream cannot be read: {error}") from error
        except ServerLostError as error:
            raise self._interrupted(num_tokens, error.message) from error
        raise self._interrupted(num_tokens, "the stream ended before the answer")

    def _interrupted(self, num_tokens: int, reason: str) -> ServerLostError:
        text = reason
        if num_tokens:
            text += (
                f"; {num_tokens} tokens of the answer had come, and only a suspended server keeps requests"
            )
        return ServerLostError(text, param="url", url=self.url, num_tokens=num_tokens)

    async def ask(self, prompt: Prompt | Sequence[Message], **fields: Unpack[AskKeywords[T]]) -> Answer[T]:
        """As `Runtime.ask`."""
        return await ask(self, prompt, **fields)

    async def batch(
        self, prompts: Several[Prompt | Sequence[Message]], **fields: Unpack[BatchKeywords[T]]
    ) -> list[Answer[T]]:
        """As `Runtime.batch`."""
        return await batch(self, prompts, **fields)

    async def run_tools(
        self, messages: str | Sequence[Message], **fields: Unpack[RunToolsKeywords]
    ) -> ToolRun:
        """As `Runtime.run_tools`; the functions run here."""
        return await run_tools(self, messages, **fields)

    async def cancel(self, request_id: str) -> None:
        """As `Runtime.cancel`."""
        await self._steer(request_id, "cancel")

    async def pause_request(self, request_id: str) -> None:
        """As `Runtime.pause_request`."""
        await self._steer(request_id, "pause")

    async def resume_request(self, request_id: str) -> None:
        """As `Runtime.resume_request`."""
        await self._steer(request_id, "resume")

    async def _steer(self, request_id: str, action: str) -> None:
        await self._server.post(f"{request_path(request_id)}/{action}", {})

    # ------------------------------------------------------------ text

    async def embed(
        self, inputs: Prompt | Sequence[Prompt], **fields: Unpack[EmbedKeywords]
    ) -> TextEmbeddings:
        """As `Runtime.embed`."""
        own = taken(fields, "normalize", "dimensions")
        if not inputs:
            return TextEmbeddings(model=self.resolve(fields.get("model")).id, vectors=[], usage=Usage())
        body = {"input": inputs, "encoding_format": "base64", **own, **call_body(fields)}
        return embeddings_of(await self._server.post("/v1/embeddings", body, headers=request_headers(fields)))

    async def read(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        ask: str | None = None,
        schema: Schema | None = None,
        **fields: Unpack[CallKeywords],
    ) -> Reading:
        """As `Runtime.read`; images travel as they are, and the server shrinks them."""
        warn_former(fields)
        refuse(taken(fields, "names", "owner", "route"))
        pictures = pictures_of(images, fields)
        question = Question.taken_from(ask, schema, fields)
        known_as = id_field(fields.pop("request_id", None))
        parts = await asyncio.to_thread(lambda: [image_part(one) for one in pictures])
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}

        async def answer(attempt: Attempt) -> Told:
            how = {"max_tokens": attempt.max_tokens, **attempt.sampling}
            request = request_of("", {"constraint": question.constraint, **how, **fields})
            body = request_body(request, {"messages": [turn]}) | known_as
            async with self._answer(request, body) as (head, deltas):
                return await told_by(deltas, head.images)

        return await read_with(question, answer)

    async def rerank(self, query: str, documents: Several[str], **fields: Unpack[RerankKeywords]) -> Ranking:
        """As `Runtime.rerank`."""
        own = taken(fields, "top_n", "output")
        body = {"query": query, "documents": texts_of(documents, "documents"), **own, **call_body(fields)}
        return ranking_of(await self._server.post("/v1/rerank", body, headers=request_headers(fields)))

    async def choose(
        self, prompt: Prompt, choices: Several[str], **fields: Unpack[ChooseKeywords]
    ) -> Choices:
        """As `Runtime.choose`."""
        own = taken(fields, "calibrate")
        body = {"prompt": prompt, "choices": texts_of(choices, "choices"), **own, **call_body(fields)}
        return choices_of(await self._server.post("/v1/choose", body, headers=request_headers(fields)))

    async def tokenize(
        self, text: str, model: str = "default", *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[list[int], list[bytes]]:
        """As `Runtime.tokenize`."""
        how = {"add_special": add_special, "parse_special": parse_special, "with_pieces": True}
        return pieces_of(await self._server.post("/tokenize", {"content": text, "model": model, **how}))

    async def detokenize(self, tokens: Sequence[int], model: str = "default") -> str:
        """As `Runtime.detokenize`."""
        answer = await self._server.post("/detokenize", {"tokens": list(tokens), "model": model})
        return str(answer["content"])

    async def count_tokens(self, request: GenerateRequest) -> int:
        """As `Runtime.count_tokens`."""
        answer = await self._server.post(wire.COUNT_TOKENS, request_body(request))
        return int(answer["num_tokens"])

    def plan_chat(
        self,
        messages: str | Sequence[Message],
        offer: ToolOffer = NO_TOOLS,
        *,
        model: str = "default",
        template_args: Mapping[str, Any] | None = None,
    ) -> ChatPlan:
        """As `Runtime.plan_chat`; blocks until the server has answered."""
        asked = _PlanAsked(self.resolve(model), messages, offer, template_args)
        return asked.plan(self._server.post_now("/apply-template", asked.body))

    async def prepare_chat(
        self,
        messages: str | Sequence[Message],
        offer: ToolOffer = NO_TOOLS,
        *,
        model: str = "default",
        template_args: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> ChatPlan:
        """As `Runtime.prepare_chat`."""
        refuse({"owner": owner})
        asked = await asyncio.to_thread(_PlanAsked, self.resolve(model), messages, offer, template_args)
        return asked.plan(await self._server.post("/apply-template", asked.body))

    def render_chat(
        self,
        messages: str | Sequence[Message],
        model: str = "default",
        *,
        tools: Sequence[ToolLike] | None = None,
        **template_args: Any,
    ) -> str:
        """As `Runtime.render_chat`; blocks as `plan_chat` does."""
        offer = offer_of(tools)
        return self.plan_chat(messages, offer, model=model, template_args=template_args).prompt


class _PlanAsked:
    """A question for the plan of a conversation; its images stay here, its documents are the server's."""

    def __init__(
        self,
        info: ModelInfo,
        messages: str | Sequence[Message],
        offer: ToolOffer,
        template_args: Mapping[str, Any] | None,
    ) -> None:
        shown = messages if isinstance(messages, str) else with_texts(messages, {})
        self._job, self._images = chat_job(info, shown, offer, template_args)
        self.body = {
            "model": info.asked_as,
            "messages": messages_body(turns_of(messages)),
            "chat_template_kwargs": template_args,
            "with_plan": True,
            **offer_body(offer),
        }

    def plan(self, answer: Mapping[str, Any]) -> ChatPlan:
        """The plan that the answer describes."""
        layout = msgspec.convert(answer["plan"], Layout)
        return planned(self._job, self._images, layout)
