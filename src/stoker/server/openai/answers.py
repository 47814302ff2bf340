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
from stoker.ipc.usage import CacheSource, GapStatus, Timings, Usage, total_usage
from stoker.server.sse import PROGRESS_EVENT, frame, progress_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stoker.images import ImageReport
    from stoker.ipc.events import Finished, PrefillProgress
    from stoker.ipc.usage import TokenLogprob
    from stoker.server.streaming import AnswerReading


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


_MILLISECONDS = 1000.0


class TimingsAnswer(msgspec.Struct, frozen=True):
    """Milliseconds the request spent and how often others took its place (SPEC O2).

    From `cache_n` on as llama-server names them; speeds are of the tokens after the first, None: no such.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    num_preemptions: int
    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_token_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float | None = None
    predicted_per_second: float | None = None
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET
    itl_ms: GapStatus | UnsetType = UNSET

    @classmethod
    def of(cls, ended: Sequence[tuple[Usage, Timings]], num_choices: int = 1) -> TimingsAnswer:
        """Those of an answer to several prompts, each of so many choices.

        Of each stage the longest counts, as prompts run side by side; preemptions and tokens are added up.
        """
        usage = total_usage([each for each, _ in ended])
        every = [each for _, each in ended] or [Timings()]
        prefill_ms = max(timings.prefill_s for timings in every) * _MILLISECONDS
        decode_ms = max(timings.decode_s for timings in every) * _MILLISECONDS
        num_read = usage.prompt_tokens - usage.cached_tokens
        num_later = usage.completion_tokens - num_choices * len(every)
        return cls(
            queue_ms=max(timings.queue_s for timings in every) * _MILLISECONDS,
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            num_preemptions=sum(timings.num_preemptions for timings in every),
            cache_n=usage.cached_tokens,
            prompt_n=num_read,
            prompt_ms=prefill_ms,
            prompt_per_token_ms=_ratio(prefill_ms, num_read),
            prompt_per_second=_ratio(num_read * _MILLISECONDS, prefill_ms),
            predicted_n=usage.completion_tokens,
            predicted_ms=decode_ms,
            predicted_per_token_ms=_ratio(decode_ms, num_later),
            predicted_per_second=_ratio(num_later * _MILLISECONDS, decode_ms),
            draft_n=usage.draft_tokens or UNSET,
            draft_n_accepted=usage.accepted_tokens if usage.draft_tokens else UNSET,
            itl_ms=every[0].itl_ms or UNSET if len(every) == 1 else UNSET,
        )


def timings_fields(reading: AnswerReading) -> dict[str, Any]:
    """`timings` of an answer with one choice as a field of an object; none before its end."""
    if reading.timings is None:
        return {}
    return {"timings": msgspec.to_builtins(TimingsAnswer.of([(reading.usage, reading.timings)]))}


def _ratio(amount: float, of: float) -> float | None:
    """None where there is nothing to divide."""
    return amount / of if of > 0 and amount > 0 else None


class ContextShift(msgspec.Struct, frozen=True):
    """`context_shift`: how many of the oldest tokens a full context cost (SPEC C12)."""

    dropped_tokens: int


class ImageAnswer(msgspec.Struct, frozen=True):
    """An image of the prompt: pixels as it was given, and as the model saw it where that is less."""

    width: int
    height: int
    shrunk_to: tuple[int, int] | None = None


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
    prompt_progress: dict[str, Any] | UnsetType = UNSET
    images: list[ImageAnswer] | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode
_Choices = list[ChatChunkChoice] | list[ChatChoice] | list[TextChoice]


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
        images: what became of the images of its prompt.
        names_progress: progress of the prompt comes as events of that name.
    """

    id: str
    model: str
    n: int
    wants_usage: bool
    tier: str | UnsetType = UNSET
    has_functions: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    images: tuple[ImageReport, ...] = ()
    names_progress: bool = False


class TextFrame:
    """The frame of one choice's next text, encoded but for the text.

    Args:
        before: bytes before the text.
        after: bytes behind it.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    def of(self, text: str) -> bytes:
        """The frame with that text."""
        return b"%b%b%b" % (self._before, _encode(text), self._after)


class Envelope:
    """What stands around the choices of one answer: its identity, and the totals over its prompts.

    Args:
        head: of the answer.
        kind: the `object` of the answer or of its chunks.
    """

    def __init__(self, head: Head, kind: str) -> None:
        self._head = head
        self._kind = kind
        self._finished: list[Finished] = []
        # Where usage was asked for, every chunk has the field and the last one fills it.
        self._no_usage = None if head.wants_usage else UNSET

    def add(self, event: Finished) -> None:
        """Take in the end of one prompt."""
        self._finished.append(event)

    def chunk(self, choice: ChatChunkChoice | TextChoice) -> bytes:
        """The frame of one choice."""
        return frame(self._answer([choice], usage=self._no_usage))  # type: ignore[arg-type] # of either kind

    def text_frame(self, choice: ChatChunkChoice | TextChoice, name: str) -> TextFrame:
        """What `chunk` gives of a choice like this one with any text; its field `name` is empty."""
        before, empty, after = self.chunk(choice).partition(b'"%b":""' % name.encode())
        assert empty, f"{choice} has no empty {name}"
        return TextFrame(before + empty[:-2], after)

    def progress(self, event: PrefillProgress, nothing: _Choices) -> bytes:
        """The frame of a chunk with `prompt_progress`; `nothing` is as in `closing`."""
        chunk = frame(self._answer(nothing, prompt_progress=progress_fields(event)))
        return b"event: %b\n%b" % (PROGRESS_EVENT.encode(), chunk) if self._head.names_progress else chunk

    def closing(self, nothing: _Choices) -> bytes:
        """Frames after the last event: usage and timings where usage was asked for, a context shift always.

        `nothing` is one choice without text, for clients that look at the first of every chunk; who asked
        for usage expects a chunk without choices (SPEC C12).
        """
        if self._head.wants_usage:
            return frame(self._answer([], **self._totals()))
        shift = _shift(self._usage())
        return b"" if shift is UNSET else frame(self._answer(nothing, context_shift=shift))

    def whole(self, choices: list[ChatChoice] | list[TextChoice]) -> bytes:
        """The body of an answer in one piece."""
        return self._answer(choices, **self._totals())

    def _answer(self, choices: _Choices, **fields: Any) -> bytes:
        head = self._head
        answer = CompletionAnswer(head.id, self._kind, head.created, head.model, choices, head.tier, **fields)
        return _encode(answer)

    def _usage(self) -> Usage:
        return total_usage([event.usage for event in self._finished])

    def _totals(self) -> dict[str, Any]:
        usage = self._usage()
        details = PromptTokensDetails(usage.cached_tokens, usage.cache_source or UNSET)
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        images = [ImageAnswer(one.width, one.height, one.shrunk_to) for one in self._head.images]
        return {
            "usage": UsageAnswer(usage.prompt_tokens, usage.completion_tokens, num_tokens, details),
            "timings": TimingsAnswer.of([(one.usage, one.timings) for one in self._finished], self._head.n),
            "context_shift": _shift(usage),
            "images": images or UNSET,
        }


def _shift(usage: Usage) -> ContextShift | UnsetType:
    """`context_shift`; left out where nothing was dropped."""
    return ContextShift(usage.dropped_tokens) if usage.dropped_tokens else UNSET
