"""Answers of the generating routes, as the official clients parse them.

Encoded by msgspec: one chunk a token costs a microsecond, and the front shares its cores with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import msgspec
from msgspec import UNSET, UnsetType

from stoker.images import ImageReport
from stoker.ipc.usage import CacheSource, Timings, Usage
from stoker.server.openai.logprobs import ChatLogprobs, TextLogprobs

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
