"""POST /v1/audio/transcriptions: what is said in a recording, by a model that hears.

A conversation of one turn in other words: the recording, and the wish that it be written down. Reasoning that
a model writes before its answer is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from stoker.audio import Audio
from stoker.errors import UnsupportedError
from stoker.images.turns import require_hearing
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Sampling, Sound
from stoker.server.errors import OriginRules
from stoker.server.fields import RequestFields, header_fields
from stoker.server.inbound.form import DescribedForm, read_form
from stoker.server.sse import Ending, typed_frames
from stoker.server.streaming import AnswerReading, GenerationCall, collected, streamed
from stoker.tasks.chat import effort_args

if TYPE_CHECKING:
    from stoker.chat.answer import AnswerForm
    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.model import ModelInfo
    from stoker.ipc.usage import Usage
    from stoker.server.context import ServerContext

_TIMED = {"srt", "vtt", "diarized_json"}
_WORDS = {"true": True, "1": True, "false": False, "0": False}
_MAX_PROMPT_CHARS = 8192
_UNDETERMINED = "und"  # ISO 639
_INSTRUCTION = "Transcribe audio to text"
_INSTRUCTIONS = {"lfm2": ("Perform ASR.", ""), "lfm2moe": ("Perform ASR.", "")}
"""System turn and wish of families that were taught their own, by architecture; as llama-server asks them."""
_OWN_PROMPTS = {"voxtral": ("[INST]", "[/INST]", "lang:", "[TRANSCRIBE]")}
"""What models were taught to transcribe by, beside conversations, by the kind of their projector: before and
behind the recording, before its language, at the end."""
_LANGUAGE = re.compile(r"[a-z]{2}")  # ISO 639-1
_LEAST_TOKENS, _TOKENS_S = 64, 16
"""Nobody says more in a second; what a model writes beyond is a loop."""


_ORIGINS = OriginRules({"prompt": "file", "messages": "file"})
"""A prompt that is too long is so for its recording."""


class TranscriptionRequest(RequestFields):
    """What to make of a recording; `file` is beside it."""

    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=_MAX_PROMPT_CHARS)
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt", "diarized_json"] = "json"
    temperature: float = 0.0
    stream: bool = False
    timestamp_granularities: list[str] | None = Field(None, max_length=8)

    @field_validator("temperature", "timeout_s", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """A form has texts only."""
        try:
            return float(value)
        except (TypeError, ValueError):
            return value

    @field_validator("stream", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value

    def check(self) -> None:
        """Raises UnsupportedError for what needs the times of words, and for a form that is not streamed."""
        if self.response_format in _TIMED or self.timestamp_granularities:
            is_format = self.response_format in _TIMED
            what = f"response_format {self.response_format}" if is_format else "timestamp_granularities"
            text = f"{what} needs to know when each word is said, which these models do not tell"
            name = "response_format" if is_format else "timestamp_granularities"
            raise UnsupportedError(f"{text}; json, text and verbose_json are served", param=name)
        if self.stream and self.response_format == "verbose_json":
            raise UnsupportedError("verbose_json is not streamed: ask for json or text", param="stream")

    def own_prompt(self, info: ModelInfo) -> str | None:
        """The prompt of a model that transcribes by one of its own; None: it is asked in a conversation.

        Such a prompt has no place for words that may come up, nor for a language but by its code.
        """
        if info.hearing not in _OWN_PROMPTS or self.prompt:
            return None
        if self.language and not _LANGUAGE.fullmatch(self.language):
            return None
        before, behind, names, end = _OWN_PROMPTS[info.hearing]
        language = f"{names}{self.language}" if self.language else ""
        return f"{before}{IMAGE_MARKER}{behind}{language}{end}"

    def turns(self, info: ModelInfo, recording: Audio) -> list[dict[str, Any]]:
        """The conversation that asks for it."""
        system, wish = _INSTRUCTIONS.get(info.architecture, ("", _INSTRUCTION))
        if self.language:
            wish += f" (language: {self.language})"
        if self.prompt:
            wish += f"\nIt may hold these words: {self.prompt}"
        turn = {"role": "user", "content": [recording, *([wish.strip()] if wish else [])]}
        return [*([{"role": "system", "content": system}] if system else []), turn]


class TranscriptChunks:
    """A transcript as events."""

    ending = Ending()

    def __init__(self, form: AnswerForm, seed: str) -> None:
        self._reading = AnswerReading(form, seed)
        self._text = ""
        self._held = ""  # blanks that may be its last

    def write(self, _prompt: int, event: StreamEvent) -> bytes:
        """Frames of one event; empty if it shows nothing."""
        pieces = (piece for piece in self._reading.read(event) if isinstance(piece, str))
        given = "".join([self._held, *pieces])
        delta = given.rstrip()
        self._held = given[len(delta) :]
        delta = delta if self._text else delta.lstrip()
        if not delta:
            return b""
        self._text += delta
        return typed_frames([{"type": "transcript.text.delta", "delta": delta}])

    def end(self) -> bytes:
        """Frames after the last event."""
        usage = _usage(self._reading.usage)
        return typed_frames([{"type": "transcript.text.done", "text": self._text, "usage": usage}])


class WholeTranscript:
    """A transcript as one answer.

    Args:
        body: what was asked for.
        form: how the model's text is to be read.
        duration_s: of the recording.
    """

    def __init__(self, body: TranscriptionRequest, form: AnswerForm, duration_s: float) -> None:
        self._body = body
        self._reading = AnswerReading(form, "")
        self._duration_s = duration_s
        self._pieces: list[str] = []

    def add(self, _prompt: int, event: StreamEvent) -> None:
        """Take in one event."""
        self._pieces += [piece for piece in self._reading.read(event) if isinstance(piece, str)]

    def whole(self) -> bytes:
        """The answer's body."""
        text = "".join(self._pieces).strip()
        if self._body.response_format == "text":
            return f"{text}\n".encode()
        if self._body.response_format == "json":
            return msgspec.json.encode({"text": text, "usage": _usage(self._reading.usage)})
        told = {
            "task": "transcribe",
            "language": self._body.language or _UNDETERMINED,
            "duration": round(self._duration_s, 3),
            "text": text,
            "usage": {"type": "duration", "seconds": round(self._duration_s, 3)},
        }
        return msgspec.json.encode(told)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def router(context: ServerContext) -> APIRouter:
    """The route of transcripts."""
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/audio/transcriptions", openapi_extra=DescribedForm(TranscriptionRequest, "file"))
    async def transcriptions(request: Request) -> Response:
        """Write down what is said in a recording."""
        body, data = await read_form(request, TranscriptionRequest, "file")
        body.check()
        context.require_ready()
        info = context.runtime.resolve(body.model)
        require_hearing(info, "file")
        turns = body.turns(info, Audio(data, name="file"))
        del data  # it is megabytes, and the request may wait for long
        how = {"model": info.id, "template_args": effort_args("none"), "owner": request.state.key_digest}
        with _ORIGINS.named():
            plan = await context.runtime.prepare_chat(turns, **how)
            del turns
            (taken,) = await context.runtime.images.take(plan.images)
        assert isinstance(taken.picture, Sound)
        duration_s = taken.picture.duration_s
        fields = {
            **body.fields(request.state.key_digest),
            **header_fields(request),
            "sampling": Sampling(**((info.sampling_defaults or {}) | {"temperature": body.temperature})),
            "max_tokens": _LEAST_TOKENS + int(duration_s * _TOKENS_S),
        }
        asked = GenerateRequest(
            prompt=body.own_prompt(info) or plan.prompt,
            model=info.asked_as,
            pictures=(taken.picture,),
            **plan.fields(fields),
        )
        form = plan.form
        del plan, taken
        call = GenerationCall(context, "transcript-", request, [asked], _ORIGINS)
        if body.stream:
            return streamed(call, TranscriptChunks(form, call.id), context.settings.keepalive_s)
        answer = await collected(call, WholeTranscript(body, form, duration_s), request)
        if body.response_format == "text":
            answer.headers["content-type"] = "text/plain; charset=utf-8"
        return answer

    return routes
