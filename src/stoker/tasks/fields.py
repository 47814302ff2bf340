"""The keyword arguments of the library's calls: their names and types, and the requests they make.

Owns what may be written short: fields of `Sampling` beside those of the request, one stop string as a
string, an adapter by its name alone. `ipc.request` says what the fields mean and checks their values; a test
compares the names and types here with its structs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeGuard

import msgspec

from stoker.client.requests.stream import OnNotice
from stoker.errors import InvalidRequestError
from stoker.images.image import ImageLike
from stoker.ipc.constraint import Constraint
from stoker.ipc.request import GenerateRequest, Picture, Preempt, Priority, Sampling, StateOutput

Prompt = str | Sequence[int]
"""Text or token ids."""
Message = Mapping[str, Any]
"""A turn of a conversation in OpenAI's form: `role`, `content` and what belongs to calls."""
GivenState = str | Path | bytes
"""The id of a saved state, a safetensors file or its bytes."""


class SamplingKeywords(TypedDict, total=False):
    """Those of `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


class RequestKeywords(SamplingKeywords, total=False):
    """Those of `GenerateRequest` but the prompt, with those of its sampling beside them."""

    model: str
    max_tokens: int | None
    min_tokens: int
    sampling: Sampling | Mapping[str, Any]
    stop: str | Sequence[str]
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    ignore_eos: bool
    is_chat: bool
    priority: Priority | Literal["interactive", "background"]
    preempt: Preempt | Literal["park", "cancel"]
    timeout_s: float | None
    return_progress: bool
    cache: bool
    cache_salt: str
    context_shift: bool
    initial_state: bytes | None
    state_output: StateOutput | None
    keep_alive_s: float | None
    constraint: Constraint | None
    spelled: Sequence[str]
    speculate: bool
    note: bytes
    document: str | None
    pictures: Sequence[Picture]
    adapters: str | Mapping[str, float | None] | Sequence[tuple[str | int, float | None]]
    candidates: Sequence[str]
    is_calibrated: bool


class CallKeywords(RequestKeywords, total=False):
    """Those of a request, and what a call of several requests is known by; see `KnownAs`."""

    request_id: str | None
    names: Sequence[str]
    owner: str
    route: str


class GenerateKeywords(RequestKeywords, total=False):
    """What `generate` takes."""

    state: GivenState | None
    request_id: str | None
    on_notice: OnNotice | None


class ChatKeywords(RequestKeywords, total=False):
    """Those of a request, and what only a conversation takes."""

    images: ImageLike | Sequence[ImageLike]
    parallel_tool_calls: bool
    state: GivenState | None
    on_notice: OnNotice | None


class ConversationKeywords(ChatKeywords, total=False):
    """What `chat` takes."""

    template_args: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Any
    request_id: str | None


_PLACE = re.compile(r"(.*) - at `\$\.(?:sampling\.)?(.+)`", re.DOTALL)
"""How msgspec writes what is wrong, and where."""


def request_of(prompt: Prompt | GenerateRequest, fields: Mapping[str, Any]) -> GenerateRequest:
    """A request for `prompt`, or the given one with `fields` changed.

    Raises:
        InvalidRequestError: a name is unknown, a type wrong or a value out of range.
    """
    fields = dict(fields)
    if isinstance(prompt, GenerateRequest):
        if not fields:
            return prompt
        given = msgspec.to_builtins(prompt)
    else:
        given = {"prompt": checked_prompt(prompt)}
    known = {*GenerateRequest.__struct_fields__, *Sampling.__struct_fields__}
    for name in sorted(fields.keys() - known):
        raise unknown_field(name, RequestKeywords.__annotations__)
    sampling = dict(msgspec.to_builtins(fields.pop("sampling", given.get("sampling", {}))))
    for name in fields.keys() & set(Sampling.__struct_fields__):
        sampling[name] = fields.pop(name)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    match fields.get("adapters"):
        case str(name):
            fields["adapters"] = ((name, None),)
        case Mapping() as scales:
            fields["adapters"] = tuple(scales.items())
    try:
        return msgspec.convert({**given, **fields, "sampling": sampling}, GenerateRequest)
    except msgspec.ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        what, where = found.groups() if found else (str(error), None)
        text = f"{where}: {what[:1].lower()}{what[1:]}" if where else f"the request is malformed: {what}"
        raise InvalidRequestError(text, param=where) from None


def unknown_field(name: str, known: Collection[str]) -> InvalidRequestError:
    """The error of a keyword that no call has, with the known one that it resembles."""
    alike = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {alike[0]!r}?" if alike else ""
    return InvalidRequestError(f"a request has no field {name!r}{hint}", param=name)


def checked_prompt(prompt: object) -> str | tuple[int, ...]:
    """A prompt that is text or token ids.

    Raises:
        InvalidRequestError: it is neither; says what takes what it is.
    """
    if isinstance(prompt, str):
        return prompt
    if is_conversation(prompt):
        text = "prompt is text or token ids; a conversation is answered by chat or ask"
        raise InvalidRequestError(text, param="prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if all(isinstance(token, int) for token in prompt):
            return tuple(prompt)
        text = f"prompt is one text, or token ids; got a {type(prompt).__name__} of other things"
        raise InvalidRequestError(text, param="prompt")
    text = f"prompt is text or token ids, got {type(prompt).__name__}"
    raise InvalidRequestError(text, param="prompt")


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is a list of turns."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def turns_of(messages: object) -> Sequence[Message]:
    """The turns of a conversation; a text is one, the user's.

    Raises:
        InvalidRequestError: they are none; says what is.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Sequence) and not isinstance(messages, bytes | bytearray):
        odd = next((at for at, turn in enumerate(messages) if not isinstance(turn, Mapping)), None)
        if odd is None:
            return messages
        what, param = f"messages.{odd} is a {type(messages[odd]).__name__}", f"messages.{odd}"
    else:
        what, param = f"messages is of type {type(messages).__name__}", "messages"
    text = f'{what}; a conversation is a text or a list of {{"role": "user", "content": "..."}}'
    raise InvalidRequestError(text, param=param)
