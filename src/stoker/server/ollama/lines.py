"""Answers as Ollama writes them: one JSON object a line, or one object; times in nanoseconds.

A call is told whole, in one line, with its arguments as an object. The last line has the reason and counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from stoker.chat.answer_events import CallArguments, CallBegan, CallBroken, CallCut, CallEnded, Reasoning
from stoker.ipc.events import Delta
from stoker.ipc.request import FinishReason
from stoker.ipc.usage import Timings, TokenLogprob
from stoker.server.errors import ollama_error
from stoker.server.sse import Ending
from stoker.server.streaming import AnswerReading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.chat.answer import AnswerForm
    from stoker.chat.answer_events import AnswerEvent
    from stoker.client.requests.stream import StreamEvent
    from stoker.errors import ErrorInfo

    Json = dict[str, Any]

MEDIA_TYPE = "application/x-ndjson"
_NS = 1_000_000_000
_encode = msgspec.json.Encoder().encode


def line(document: Json) -> bytes:
    """A document on a line of its own."""
    return _encode(document) + b"\n"


def _failed(info: ErrorInfo) -> bytes:
    return ollama_error(info) + b"\n"


def _unsaid(_text: str) -> bytes:
    """There are no comments among lines of JSON."""
    return b""


def ending(beat: bytes) -> Ending:
    """How a stream of lines ends and lasts; `beat` is a line that adds nothing."""
    return Ending(done=b"", fail=_failed, beat=beat, note=_unsaid, media_type=MEDIA_TYPE)


def time_text(at_s: float | None = None) -> str:
    """A time, in seconds since the epoch, as RFC 3339; None: now."""
    at = datetime.now(UTC) if at_s is None else datetime.fromtimestamp(at_s, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round(seconds * _NS))


@dataclass(frozen=True, slots=True)
class LineHead:
    """What every line of an answer says.

    Attributes:
        model: the name that the client used.
        is_chat: the text stands in a `message`, else in `response`.
        began_s: when the request came, on the monotonic clock.
    """

    model: str
    is_chat: bool
    began_s: float = field(default_factory=time.monotonic)

    def piece(self, text: str = "", thinking: str = "", calls: list[Json] | None = None) -> Json:
        """What a piece of the answer is told as."""
        document: Json = {"model": self.model, "created_at": time_text()}
        more: Json = {"thinking": thinking} if thinking else {}
        if self.is_chat:
            more |= {"tool_calls": calls} if calls else {}
            document["message"] = {"role": "assistant", "content": text, **more}
        else:
            document |= {"response": text, **more}
        return document | {"done": False}

    def done(self, reason: str, piece: Json | None = None) -> Json:
        """The last line, or with `piece` the whole answer, without its counts."""
        return (piece or self.piece()) | {"done": True, "done_reason": reason}


@dataclass(slots=True)
class _Added:
    """What some events of an answer add: text, reasoning and whole calls."""

    text: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


class LineReader:
    """Reads the stream of one answer.

    Args:
        head: of its lines.
        form: how its text is to be read.
        seed: what ids of calls are made from.
    """

    def __init__(self, head: LineHead, form: AnswerForm, seed: str) -> None:
        self._head = head
        self._reading = AnswerReading(form, seed)
        self._call: tuple[str, str] = ("", "")  # id and name of the one that is being written
        self._arguments: list[str] = []
        self._num_calls = 0

    def read(self, event: StreamEvent) -> _Added:
        """What an event adds."""
        return self._added(self._reading.read(event))

    def _added(self, events: Iterable[AnswerEvent]) -> _Added:
        found = _Added()
        for event in events:
            match event:
                case str(text):
                    found.text += text
                case Reasoning(text):
                    found.thinking += text
                case CallBegan(_, own_id, name):
                    self._call, self._arguments = (own_id, name), []
                case CallArguments(_, fragment):
                    self._arguments.append(fragment)
                case CallEnded():
                    found.calls.append(self._whole_call())
                case CallBroken(_, source) | CallCut(_, source):
                    found.text += source
        return found

    def _whole_call(self) -> Json:
        own_id, name = self._call
        written = (
            "".join(self._arguments).replace("\n", " ").replace("\r", " ")
        )  # one line; none is in a string
        arguments = msgspec.Raw(written.encode() or b"{}")  # JSON as the model wrote it
        self._num_calls += 1
        function = {"index": self._num_calls - 1, "name": name, "arguments": arguments}
        return {"id": own_id, "function": function}

    def last(self, piece: Json | None = None) -> Json:
        """The last line, or with `piece` the whole answer."""
        usage, timings = self._reading.usage, self._reading.timings or Timings()
        return self._head.done(_reason(self._reading.reason), piece) | {
            "total_duration": nanoseconds(time.monotonic() - self._head.began_s),
            "load_duration": nanoseconds(timings.queue_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(timings.decode_s),
        }


def _reason(reason: FinishReason | None) -> str:
    """Ollama has "stop" for an answer with calls too; what it does not know is said in our own words."""
    return "stop" if reason in {None, FinishReason.TOOL_CALLS} else str(reason)


def _logprobs(entries: Iterable[TokenLogprob]) -> list[Json]:
    return [
        {
            **_token(entry.token_bytes, entry.logprob),
            "top_logprobs": [_token(data, logprob) for _, data, logprob in entry.top],
        }
        for entry in entries
    ]


def _token(data: bytes, logprob: float | None) -> Json:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class AnswerLines:
    """An answer line by line."""

    def __init__(self, head: LineHead, form: AnswerForm, seed: str) -> None:
        self.ending = ending(line(head.piece()))
        self._head = head
        self._reader = LineReader(head, form, seed)

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """The line of one event; empty if it shows nothing."""
        found = self._reader.read(event)
        logprobs = event.logprobs if isinstance(event, Delta) else None
        if not found and not logprobs:
            return b""
        document = self._head.piece(found.text, found.thinking, found.calls)
        return line(document | ({"logprobs": _logprobs(logprobs)} if logprobs else {}))

    def end(self) -> bytes:
        """The last line."""
        return line(self._reader.last())


class WholeLine:
    """An answer as one object."""

    def __init__(self, head: LineHead, form: AnswerForm, seed: str) -> None:
        self._head = head
        self._reader = LineReader(head, form, seed)
        self._whole = _Added()
        self._logprobs: list[Json] = []

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        found = self._reader.read(event)
        self._whole.text += found.text
        self._whole.thinking += found.thinking
        self._whole.calls += found.calls
        if isinstance(event, Delta) and event.logprobs:
            self._logprobs += _logprobs(event.logprobs)

    def whole(self) -> bytes:
        """The answer's body."""
        piece = self._head.piece(self._whole.text, self._whole.thinking, self._whole.calls)
        return _encode(self._reader.last(piece) | ({"logprobs": self._logprobs} if self._logprobs else {}))


def one_line(document: Json, *, is_streamed: bool) -> Response:
    """A document as the only line of a stream, or as a body."""
    return Response(line(document), media_type=MEDIA_TYPE if is_streamed else "application/json")
