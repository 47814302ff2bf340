"""The keyword arguments of the library's calls: their names and types, and the requests they make.

Owns what may be written short: fields of `Sampling` beside those of the request, one stop string as a
string, an adapter by its name alone. `ipc.request` says what the fields mean and checks their values; a test
compares the names and types here with its structs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from stoker.errors import InvalidRequestError
from stoker.images.image import ImageLike
from stoker.ipc.constraint import Constraint
from stoker.ipc.request import GenerateRequest, Picture, Preempt, Priority, Sampling, StateOutput

Prompt = str | Sequence[int]
"""Text or token ids."""
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


class ChatKeywords(RequestKeywords, total=False):
    """Those of a request, and what only a conversation takes."""

    images: ImageLike | Sequence[ImageLike]
    parallel_tool_calls: bool
    state: GivenState | None


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
        given = {"prompt": prompt if isinstance(prompt, str) else tuple(prompt)}
    known = {*GenerateRequest.__struct_fields__, *Sampling.__struct_fields__}
    if unknown := sorted(fields.keys() - known):
        raise InvalidRequestError(f"a request has no field {unknown[0]!r}", param=unknown[0])
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
        raise InvalidRequestError(f"the request is malformed: {error}") from error
