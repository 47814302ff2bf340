"""Answers of chat and completions as the official clients parse them: objects, logprobs (SPEC D6), usage.

Encoded by msgspec: one chunk a token costs a microsecond, and this process shares its cores with the engine.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from stoker.images import ImageReport
from stoker.ipc.usage import CacheSource, Timings, Usage
from stoker.server.streaming.generation import total_usage
from stoker.server.streaming.sse import frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker.images import ImageReport
    from stoker.ipc.events import Finished, PrefillProgress
    from stoker.ipc.usage import TokenLogprob


LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


class TopEntry(msgspec.Struct, frozen=True):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct, frozen=True):
    """One chat token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopEntry]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenEntry]
    refusal: None = None


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The chat form; bytes that are no text of their own show as U+FFFD and stand in `bytes`."""
    content = [
        TokenEntry(
            token=entry.token_bytes.decode("utf-8", "replace"),
            logprob=_finite(entry.logprob),
            bytes=list(entry.token_bytes),
            top_logprobs=[
                TopEntry(token=raw.decode("utf-8", "replace"), logprob=_finite(value), bytes=list(raw))
                for _, raw, value in entry.top
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content)


class TextLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextLogprobsWriter:
    """Writes the parallel lists of one choice, over all its chunks.

    `text_offset` counts characters of the text before the token; a character split over tokens counts with
    the token that completes it.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(
        self, entries: Sequence[TokenLogprob], into: TextLogprobs | None = None, hidden_bytes: int = 0
    ) -> TextLogprobs:
        """Append `entries` to `into`, or to new lists.

        Args:
            entries: the tokens, in order.
            into: lists to append to; None: new ones.
            hidden_bytes: of the first tokens, that the text does not show (an opening special token).
        """
        lists = into or TextLogprobs([], [], [], [])
        for entry in entries:
            shown = entry.token_bytes[hidden_bytes:]
            hidden_bytes = max(0, hidden_bytes - len(entry.token_bytes))
            token = _token_name(entry.token_bytes)
            lists.tokens.append(token)
            lists.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(shown))
            lists.token_logprobs.append(None if entry.logprob is None else _finite(entry.logprob))
            lists.top_logprobs.append(_alternatives(token, entry))
        return lists

    def write_prompt(self, entries: Sequence[TokenLogprob], text: str) -> TextLogprobs:
        """Begin with the prompt's entries; `text` is what was echoed of it."""
        num_bytes = sum(len(entry.token_bytes) for entry in entries)
        return self.write(entries, hidden_bytes=max(0, num_bytes - len(text.encode())))


def _alternatives(token: str, entry: TokenLogprob) -> dict[str, float] | None:
    """The alternatives by name, the chosen token among them; None for a first token, which has none."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for _, raw, value in entry.top:
        top.setdefault(_token_name(raw), _finite(value))
    top.setdefault(token, _finite(entry.logprob))
    return top


def _token_name(raw: bytes) -> str:
    """The token's text, or OpenAI's `bytes:` and hexadecimal for bytes that are no text of their own."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


FINGERPRINT = f"stoker-{version('stoker')}"
MILLISECONDS = 1000.0


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed and where they came from (SPEC C13)."""

    cached_tokens: int
    cache_source: CacheSource | UnsetType = UNSET


class UsageAnswer(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TimingsAnswer(msgspec.Struct, frozen=True):
    """Milliseconds the request spent and how often others took its place (SPEC O2)."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    num_preemptions: int


class ContextShift(msgspec.Struct, frozen=True):
    """`context_shift`: how many of the oldest tokens a full context cost (SPEC C12)."""

    dropped_tokens: int


class ImageAnswer(msgspec.Struct, frozen=True):
    """A picture of the prompt: pixels as it was given, and as the model saw it where that is less."""

    width: int
    height: int
    shrunk_to: tuple[int, int] | None = None


class Progress(msgspec.Struct, frozen=True):
    """`prompt_progress`: prompt tokens in all, from the cache, and computed so far."""

    total: int
    cache: int
    processed: int
    time_ms: float


class FunctionPiece(msgspec.Struct, frozen=True):
    """What a chunk adds to a call: its name once, its arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class CallPiece(msgspec.Struct, frozen=True):
    """A call's beginning, with id and type, or more of it."""

    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET
    function_call: FunctionPiece | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Function(msgspec.Struct, frozen=True):
    """What is called."""

    name: str
    arguments: str


class Call(msgspec.Struct, frozen=True):
    """A whole call."""

    id: str
    function: Function
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """A whole assistant message; without text where it has calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a completion or of its chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class CompletionAnswer(msgspec.Struct, frozen=True):
    """A completion or a chunk of one; `object` tells which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice] | list[ChatChoice] | list[TextChoice]
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str = FINGERPRINT
    usage: UsageAnswer | UnsetType | None = UNSET
    timings: TimingsAnswer | UnsetType = UNSET
    context_shift: ContextShift | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET
    images: list[ImageAnswer] | UnsetType = UNSET


encode = msgspec.json.Encoder().encode


def usage_answer(usage: Usage) -> UsageAnswer:
    """`usage` of a count."""
    return UsageAnswer(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens, usage.cache_source or UNSET),
    )


def shift_answer(usage: Usage) -> ContextShift | UnsetType:
    """`context_shift` of a count; left out where nothing was dropped."""
    return ContextShift(usage.dropped_tokens) if usage.dropped_tokens else UNSET


def image_answers(images: Sequence[ImageReport]) -> list[ImageAnswer] | UnsetType:
    """`images` of what became of the prompt's pictures; left out where there were none."""
    return [ImageAnswer(one.width, one.height, one.shrunk_to) for one in images] or UNSET


def timings_answer(timings: Timings) -> TimingsAnswer:
    """`timings` of a request."""
    return TimingsAnswer(
        queue_ms=timings.queue_s * MILLISECONDS,
        prefill_ms=timings.prefill_s * MILLISECONDS,
        decode_ms=timings.decode_s * MILLISECONDS,
        num_preemptions=timings.num_preemptions,
    )


_Choices = list[ChatChunkChoice] | list[TextChoice]


@dataclass(frozen=True)
class Head:
    """Identity of one answer.

    Attributes:
        id: `chatcmpl-...` or `cmpl-...`.
        model: id of the model that answers.
        n: choices of each prompt.
        wants_usage: whether a stream ends with a usage chunk.
        tier: the `service_tier` it is served with; unset: it is not known.
        has_functions: calls are read in the form that was before tools.
        created: seconds since the epoch.
        images: what became of the pictures of its prompt.
    """

    id: str
    model: str
    n: int
    wants_usage: bool
    tier: str | UnsetType = UNSET
    has_functions: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    images: tuple[ImageReport, ...] = ()

    def answer(self, kind: str, choices: _Choices | list[ChatChoice], **fields: Any) -> bytes:
        """JSON of the answer, or of a chunk of it, whose `object` is `kind`."""
        made = CompletionAnswer(self.id, kind, self.created, self.model, choices, self.tier, **fields)
        return encode(made)


class Totals:
    """Usage and times over the prompts of one answer."""

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def add(self, event: Finished) -> None:
        """Take in the end of one prompt."""
        self._finished.append(event)

    def usage(self) -> Usage:
        """The sum of all prompts."""
        return total_usage([event.usage for event in self._finished])

    def timings(self) -> TimingsAnswer:
        """The longest of each stage: prompts run side by side. Preemptions are added up."""
        every = [event.timings for event in self._finished] or [Timings()]
        return timings_answer(
            Timings(
                queue_s=max(timings.queue_s for timings in every),
                prefill_s=max(timings.prefill_s for timings in every),
                decode_s=max(timings.decode_s for timings in every),
                num_preemptions=sum(timings.num_preemptions for timings in every),
            )
        )


def closing(head: Head, kind: str, totals: Totals, nothing: _Choices) -> bytes:
    """Frames after the last event: usage and timings where usage was asked for, a context shift always (C12).

    Args:
        head: of the answer.
        kind: the chunk's `object`.
        totals: over all prompts.
        nothing: one choice without text, for clients that look at the first of every chunk; who asked for
            usage expects a chunk without choices.
    """
    usage = totals.usage()
    shift = shift_answer(usage)
    if head.wants_usage:
        fields = {"usage": usage_answer(usage), "context_shift": shift, "images": image_answers(head.images)}
        return frame(head.answer(kind, [], timings=totals.timings(), **fields))
    if shift is not UNSET:
        return frame(head.answer(kind, nothing, context_shift=shift))
    return b""


def progress(head: Head, kind: str, event: PrefillProgress, nothing: _Choices) -> bytes:
    """The frame of a chunk with `prompt_progress`; the other arguments are as in `closing`."""
    done = Progress(total=event.total, cache=event.cached, processed=event.processed, time_ms=event.time_ms)
    return frame(head.answer(kind, nothing, prompt_progress=done))


def whole(head: Head, kind: str, totals: Totals, choices: list[ChatChoice] | list[TextChoice]) -> bytes:
    """The body of an answer in one piece, `kind` being its `object`."""
    usage = totals.usage()
    return head.answer(
        kind,
        choices,
        usage=usage_answer(usage),
        timings=totals.timings(),
        context_shift=shift_answer(usage),
        images=image_answers(head.images),
    )
