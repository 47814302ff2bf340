"""POST /v1/completions: the body, the route, and the answer chunk by chunk or whole.

Choice j of prompt i has the index i * n + j. Echoed prompts come first in the text and in the logprobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import InvalidRequestError, UnsupportedError
from stoker.ipc.events import Delta, Finished, PrefillProgress, PromptEcho
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import GenerateRequest
from stoker.server.context import ServerContext
from stoker.server.fields import (
    GenerationFields,
    Int,
    check_logprobs,
    check_tokens,
    header_fields,
    names_progress,
    tier_of,
)
from stoker.server.inbound.body import VALUES_WITH_TOKENS, Described, Many, TokenIds, beside, read_body
from stoker.server.native.states import initial_state
from stoker.server.openai.answers import (
    Envelope,
    Head,
    TextChoice,
    TextLogprobs,
    TextLogprobsWriter,
)
from stoker.server.sse import Ending
from stoker.server.streaming import GenerationCall, collected, streamed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.usage import TokenLogprob


MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationFields):
    """Completions to make of one or several prompts."""

    max_values: ClassVar[int] = VALUES_WITH_TOKENS

    prompt: str | Many[str] | TokenIds | Many[TokenIds]
    max_tokens: int | None = Field(None, validation_alias=AliasChoices("max_tokens", "n_predict"))
    logprobs: Int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int | None = None

    def refuse_unsupported(self) -> None:
        """Refuse infill and re-ranking as well."""
        super().refuse_unsupported()
        check_logprobs("logprobs", self.logprobs)
        if self.suffix:
            raise UnsupportedError("suffix is not supported by this server", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedError("best_of other than n is not supported by this server", param="best_of")

    def prompts(self, n_vocab: int) -> list[str | tuple[int, ...]]:
        """Every prompt: text, or token ids of a vocabulary of `n_vocab`.

        Raises:
            InvalidRequestError: none, too many, an empty one, or a token id out of range.
        """
        found = self._listed()
        if not 0 < len(found) <= MAX_PROMPTS:
            raise InvalidRequestError(f"{len(found)} prompts; 1 to {MAX_PROMPTS} are taken", param="prompt")
        for prompt in found:
            if not isinstance(prompt, str):
                check_tokens(prompt, n_vocab, "prompt")
        return found

    def _listed(self) -> list[str | tuple[int, ...]]:
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [tuple(given)]
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given]

    def to_shared(self, info: ModelInfo, key_digest: str) -> dict[str, Any]:
        """Keyword arguments that every prompt's `GenerateRequest` gets."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.common(info, key_digest) | {
            "max_tokens": limit,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
            "echo": bool(self.echo),
        }


_OBJECT = "text_completion"


class TextChunks:
    """Completions as chunks."""

    ending = Ending()

    def __init__(self, head: Head, num_prompts: int) -> None:
        self._head = head
        self._envelope = Envelope(head, _OBJECT)
        num_choices = num_prompts * head.n
        self._logprobs = [TextLogprobsWriter() for _ in range(num_choices)]
        self._frames = [
            self._envelope.text_frame(TextChoice(index, ""), "text") for index in range(num_choices)
        ]

    def write(self, prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        first = prompt * self._head.n
        if isinstance(event, Delta):
            if event.text and event.logprobs is None and event.finish_reason is None:
                return self._frames[first + event.index].of(event.text)
            return self._delta(first + event.index, event)
        if isinstance(event, PromptEcho):
            return b"".join(self._echo(first + index, event) for index in range(self._head.n))
        if isinstance(event, Finished):
            self._envelope.add(event)
        elif isinstance(event, PrefillProgress):
            return self._envelope.progress(event, [TextChoice(first, "")])
        return b""

    def end(self) -> bytes:
        """Frames after the last event."""
        return self._envelope.closing([TextChoice(0, "")])

    def _delta(self, index: int, event: Delta) -> bytes:
        """What it adds, and behind it the reason of its end in a chunk of its own."""
        frames = b""
        if event.text or event.logprobs:
            frames = self._envelope.chunk(TextChoice(index, event.text, self._lists(index, event.logprobs)))
        if event.finish_reason is not None:
            frames += self._envelope.chunk(TextChoice(index, "", None, event.finish_reason))
        return frames

    def _echo(self, index: int, event: PromptEcho) -> bytes:
        lists = self._logprobs[index].write_prompt(event.logprobs, event.text) if event.logprobs else None
        return self._envelope.chunk(TextChoice(index, event.text, lists))

    def _lists(self, index: int, entries: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
        return self._logprobs[index].write(entries) if entries else None


class WholeText:
    """Completions as one answer."""

    def __init__(self, head: Head, num_prompts: int) -> None:
        num_choices = num_prompts * head.n
        self._head = head
        self._envelope = Envelope(head, _OBJECT)
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._writers = [TextLogprobsWriter() for _ in range(num_choices)]
        self._logprobs: list[TextLogprobs | None] = [None] * num_choices
        self._reasons = ["length"] * num_choices

    def add(self, prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        first = prompt * self._head.n
        if isinstance(event, Delta):
            self._add_delta(first + event.index, event)
        elif isinstance(event, PromptEcho):
            for index in range(first, first + self._head.n):
                self._add_echo(index, event)
        elif isinstance(event, Finished):
            self._envelope.add(event)

    def _add_delta(self, index: int, event: Delta) -> None:
        self._texts[index].append(event.text)
        if event.logprobs:
            self._logprobs[index] = self._writers[index].write(event.logprobs, self._logprobs[index])
        if event.finish_reason is not None:
            self._reasons[index] = event.finish_reason

    def _add_echo(self, index: int, event: PromptEcho) -> None:
        self._texts[index].append(event.text)
        if event.logprobs:
            self._logprobs[index] = self._writers[index].write_prompt(event.logprobs, event.text)

    def whole(self) -> bytes:
        """The answer's body."""
        choices = [
            TextChoice(index, "".join(texts), self._logprobs[index], self._reasons[index])
            for index, texts in enumerate(self._texts)
        ]
        return self._envelope.whole(choices)


def router(context: ServerContext) -> APIRouter:
    """The completions route."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/completions", openapi_extra=Described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(request, CompletionRequest)
        context.require_ready()
        info = context.runtime.resolve(body.model)

        def told() -> tuple[dict[str, Any], list[str | tuple[int, ...]]]:
            return body.to_shared(info, request.state.key_digest), body.prompts(info.n_vocab)

        shared, prompts = await beside(request, told)
        shared |= header_fields(request)
        if body.state is not None:
            shared |= await initial_state(context, request, body.state, info.id)
        asked = [GenerateRequest(prompt=prompt, model=info.asked_as, **shared) for prompt in prompts]
        generation = GenerationCall(context, "cmpl-", request, asked)
        tier = tier_of(asked[0].priority)
        head = Head(
            generation.id,
            info.asked_as,
            asked[0].n,
            body.wants_usage,
            tier,
            names_progress=names_progress(request),
        )
        if body.stream:
            return streamed(generation, TextChunks(head, len(asked)), context.settings.keepalive_s)
        return await collected(generation, WholeText(head, len(asked)), request)

    return routes
