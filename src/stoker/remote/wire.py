"""What the library and a server say to each other beside the public APIs, as JSON.

Owns the shapes of documents and of the events of a request; a struct travels as `msgspec` writes it. Both
sides import them from here: routes are `stoker.server.native.library`'s, calls `remote.runtime`'s.
"""

from __future__ import annotations

import msgspec

from stoker.chat.answer import AnswerForm
from stoker.images.image import ImageReport
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Parked,
    Paused,
    PrefillProgress,
    PromptEcho,
    Queued,
    Resumed,
    event_name,
)
from stoker.ipc.model import ModelInfo
from stoker.ipc.status import EngineHealth, ModelStatus

REQUESTS = "/v1/runtime/requests"
STATES = "/v1/states"
COUNT_TOKENS = f"{REQUESTS}/count_tokens"
OVERVIEW = "/v1/runtime/overview"
STATUS = "/v1/runtime/status"
EVENTS = "/v1/runtime/events"
HANDOVER = "/v1/runtime/handover"
HANDOVER_STATE = f"{HANDOVER}/state"
STATE_TOKENS = "X-Stoker-Tokens"
"""Tokens of the state that is the body."""
HEAD_BYTES = 4
"""The length of a `GenerateRequest` in msgpack, little-endian, before it and a state behind it."""
MAX_HEAD_BYTES = 2**20
FRAMES = "application/vnd.stoker.frames"
"""Media type of a body that is frames of `stoker.ipc.codec`."""
DONE = "[DONE]"
"""The last data of the stream of events, where the server ends in order."""
REQUEST_ID = r"[A-Za-z0-9._:\-]{1,128}"
"""What a client may call a request; also in a header."""
BEAT_S = 5.0
"""The longest silence on a stream of the library's, whatever `keepalive_s` says."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime knows without asking an engine.

    Attributes:
        is_ready, is_suspended, health: as the properties of `Runtime`.
        models: every served one, the default first; paths are told to operators only.
        states: the same and downloads, as they were last heard of.
        prefixes: hashes of the newest beginnings that gates gave and that are held, eight bytes each,
            little-endian; empty: none, or the caller is no operator.
        refusal: why the caller is no operator, who alone may hand requests over; empty: it is one.
    """

    is_ready: bool
    is_suspended: bool
    health: EngineHealth
    models: list[ModelInfo]
    states: list[ModelStatus]
    prefixes: bytes = b""
    refusal: str = ""


class AnswerHead(msgspec.Struct, frozen=True, tag=True):
    """The first event of a conversation's answer: how its text is to be read, and what became of images."""

    form: AnswerForm = AnswerForm()
    images: tuple[ImageReport, ...] = ()


RequestMessage = (
    AnswerHead
    | Queued
    | Admitted
    | Parked
    | Paused
    | Resumed
    | PrefillProgress
    | PromptEcho
    | Delta
    | Finished
    | Failed
)
"""An event of a request's stream; the last is `Finished` or `Failed`."""

_decode = msgspec.json.Decoder(RequestMessage).decode
_encode = msgspec.json.Encoder(enc_hook=str).encode  # details of an error may hold a path


EVENT_NAMES = frozenset(map(event_name, RequestMessage.__args__))


def encoded_event(event: msgspec.Struct) -> bytes:
    """A server-sent event: its name, and the struct as JSON."""
    return b"event: " + event_name(type(event)).encode() + b"\ndata: " + _encode(event) + b"\n\n"


def decoded_event(name: str, data: str) -> RequestMessage | None:
    """The event of that name; None: a later version's, which is passed over.

    Raises:
        msgspec.DecodeError: `data` is no such event.
    """
    return _decode(data) if name in EVENT_NAMES else None
