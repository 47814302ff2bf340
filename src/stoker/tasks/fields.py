"""The keyword arguments of the library's calls: their names and types, and the requests they make.

Owns what may be written short: fields of `Sampling` beside those of the request, one stop string as a
string, an adapter by its name alone. `ipc.request` says what the fields mean and checks their values; a test
compares the names and types here with its structs.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeGuard

import msgspec

from stoker.client.models.loading import SpecChanges
from stoker.client.requests.stream import OnNotice
from stoker.errors import InvalidRequestError
from stoker.images.image import ImageLike
from stoker.ipc.constraint import Constraint
from stoker.ipc.request import GenerateRequest, Medium, Preempt, Priority, Sampling, StateOutput
from stoker.setting_fields import parse_keep_alive
from stoker.site_settings import PlacementSettings
from stoker.tasks.form import FormKeywords, Several, T, take_constraint
from stoker.tasks.functions import ToolLike

Prompt = str | Sequence[int]
"""Text or token ids."""
Message = Mapping[str, Any]
"""A turn of a conversation in OpenAI's form: `role`, `content` and what belongs to calls."""
GivenState = str | Path | bytes
"""The id of a saved state, a safetensors file or its bytes."""
Lora = (
    str
    | Mapping[str, float | None]
    | Sequence[str | tuple[str | int, float | None] | Mapping[str, str | int | float | None]]
)
"""LoRA adapters: a name, scales by name, or a list of names, pairs or HTTP's `{"id": ..., "scale": ...}`."""


class SamplingKeywords(TypedDict, total=False):
    """Those of `Sampling`."""

    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_n_sigma: float
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
    dry_sequence_breakers: Several[str]
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


class FormerKeywords(TypedDict, total=False):
    """Names of before 0.2, which warn: those of the struct, where HTTP and the library have others now."""

    keep_alive_s: float | None
    constraint: Constraint | None
    adapters: str | Mapping[str, float | None] | Sequence[tuple[str | int, float | None]]


class FormerLoadKeywords(TypedDict, total=False):
    """Names of before 0.2 of what `load_model` takes, which warn."""

    keep_alive_s: float | None
    n_ctx: int | None
    num_slots: int | None


class LoadKeywords(FormerLoadKeywords, total=False):
    """What computes a model and where it lies, by the names of settings; `kv_bits` is `kv_type` otherwise.

    `kv_bits`: 4 is "q4_0", 8 "q8_0", 16 what the device takes by itself.
    """

    backend: str
    gpu_layers: int | Literal["auto", "all"]
    device: str | int | Sequence[str]
    split_mode: Literal["none", "layer", "row"] | None
    tensor_split: Sequence[float]
    main_gpu: int | None
    cpu_moe: int | None
    kv_type: Literal["f16", "bf16", "q8_0", "q4_0"] | None
    kv_bits: Literal[4, 8, 16] | None
    kv_layout: Literal["auto", "pool", "streams"]
    flash_attention: Literal["auto", "off"]
    mmap: bool
    kv_offload: bool
    expert_budget: int | str | None


class RequestKeywords(SamplingKeywords, FormerKeywords, total=False):
    """Those of `GenerateRequest` but the prompt, with those of its sampling beside them.

    The names are those of HTTP: `keep_alive` takes seconds or a time such as "5m", `lora` an adapter's name,
    names with scales, or a list of either.
    """

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
    keep_alive: float | str | None
    lora: Lora
    spelled: Several[str]
    speculate: bool
    note: bytes
    document: str | None
    pictures: Sequence[Medium]
    candidates: Several[str]
    is_calibrated: bool


class CallKeywords(RequestKeywords, total=False):
    """Those of a request, and what a call of several requests is known by; see `KnownAs`."""

    request_id: str | None
    names: Several[str]
    owner: str
    route: str


class GenerateKeywords(RequestKeywords, FormKeywords[T], total=False):
    """What `generate` takes: fields of a request, the form of its text, and what is the call's own."""

    state: GivenState | None
    request_id: str | None
    on_notice: OnNotice | None


class ConversationKeywords(GenerateKeywords[T], total=False):
    """What `chat` takes."""

    images: ImageLike | Sequence[ImageLike]
    template_args: Mapping[str, Any] | None
    tools: Sequence[ToolLike] | None
    tool_choice: Any
    parallel_tool_calls: bool
    tool_format: str | None


_TEXTS: dict[str, list[str]] = {"priority": [*Priority], "preempt": [*Preempt]}
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
    fields = struct_fields(fields)
    known = {*GenerateRequest.__struct_fields__, *Sampling.__struct_fields__}
    for name in sorted(fields.keys() - known):
        raise unknown_field(name)
    sampling = dict(msgspec.to_builtins(fields.pop("sampling", given.get("sampling", {}))))
    for name in fields.keys() & set(Sampling.__struct_fields__):
        sampling[name] = fields.pop(name)
    if "stop" in fields:
        fields["stop"] = stops_of(fields["stop"])
    try:
        return msgspec.convert({**given, **fields, "sampling": sampling}, GenerateRequest)
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from None


def sampling_given(prompt: Prompt | GenerateRequest, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sampling fields that a call names; None: all of them, by a `GenerateRequest` or a `Sampling`."""
    whole = fields.get("sampling")
    if isinstance(prompt, GenerateRequest) or isinstance(whole, Sampling):
        return None
    named = {name: fields[name] for name in fields.keys() & set(Sampling.__struct_fields__)}
    return {**(whole if isinstance(whole, Mapping) else {}), **named}


def with_sampling_defaults(
    prompt: Prompt | GenerateRequest, fields: dict[str, Any], defaults: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The fields of a call with those of a model's sampling defaults that the call does not name."""
    given = sampling_given(prompt, fields)
    if not defaults or given is None or not isinstance(fields.get("sampling", {}), Mapping):
        return fields
    return {**fields, "sampling": {**defaults, **given}}


def checked_request(request: Any) -> GenerateRequest:
    """What `stream` takes, which has no fields by name. Raises InvalidRequestError: it is something else."""
    if not isinstance(request, GenerateRequest):
        text = (
            f"request is a GenerateRequest, got {type(request).__name__}; write "
            "GenerateRequest(prompt=..., sampling=Sampling(temperature=0)), or call generate with a text"
        )
        raise InvalidRequestError(text, param="request")
    return request


def _malformed(problem: str) -> InvalidRequestError:
    """The error of what msgspec says of a request, by the caller's own names."""
    found = _PLACE.fullmatch(problem)
    if found is None:
        return InvalidRequestError(f"the request is malformed: {problem}")
    what, where = found.groups()
    field = where.partition("[")[0]
    param = _RENAMED.get(field, field)
    known = f"; known: {', '.join(_TEXTS[field])}" if field in _TEXTS else ""
    return InvalidRequestError(f"{param}: {what[:1].lower()}{what[1:]}{known}", param=param)


def stops_of(stop: Any) -> tuple[str, ...]:
    """Stop strings, of which one may be given alone. Raises InvalidRequestError: it is neither."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(texts_of(stop, "stop"))


def unknown_field(name: str) -> InvalidRequestError:
    """The error of a keyword that a request does not have, with the one that it resembles."""
    known = ConversationKeywords.__annotations__.keys() - FormerKeywords.__annotations__.keys()
    if name in known:
        return InvalidRequestError(
            f"{name!r} is a field of conversations; this call continues a text", param=name
        )
    return InvalidRequestError(f"a request has no field {name!r}{_meant(name, known)}", param=name)


def _meant(name: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {alike[0]!r}?" if alike else ""


_RENAMED = {"keep_alive_s": "keep_alive", "n_ctx": "ctx_size", "num_slots": "slots", "adapters": "lora"}
_FORMER = _RENAMED | {"constraint": "one of regex, grammar, json_schema, choice, response_format and schema"}
IS_PINNED_IS_FORMER = "is_pinned is pin_model or unpin_model now"
_LOAD = ("keep_alive", "ctx_size", "slots", "reach", *LoadKeywords.__annotations__)
_KV_BITS = {4: "q4_0", 8: "q8_0", 16: None}


def warn_former(fields: Mapping[str, Any]) -> None:
    """Warn the code outside of this package that led here of names that will go."""
    for name in fields.keys() & _FORMER.keys():
        warn_outside(f"{name} is {_FORMER[name]} now")


def warn_outside(text: str) -> None:
    """A DeprecationWarning at the line outside of this package that led here."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "stoker":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, DeprecationWarning, stacklevel=level)


def load_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `load_model` was given, checked, by the names of now, without None; a former name warns.

    Raises:
        InvalidRequestError: a name never was one, or a value of where the model lies is out of range.
    """
    known = {"keep_alive", "ctx_size", "slots", *LoadKeywords.__annotations__}
    for name in given.keys() - known:
        text = f"load_model has no field {name!r}{_meant(name, _LOAD)}"
        raise InvalidRequestError(text, param=name)
    warn_former(given)
    found = {_RENAMED.get(name, name): value for name, value in given.items() if value is not None}
    _placement_of(found)
    return found


def spec_changes(fields: Mapping[str, Any]) -> SpecChanges:
    """The same as changes of a spec."""
    return SpecChanges(
        keep_alive_s=keep_alive_seconds(fields.get("keep_alive")),
        n_ctx=fields.get("ctx_size"),
        num_slots=fields.get("slots"),
        placement=_placement_of(fields).given_placement(),
        backend=fields.get("backend"),
    )


def _placement_of(fields: Mapping[str, Any]) -> PlacementSettings:
    given = {name: fields[name] for name in fields.keys() & PlacementSettings.model_fields.keys()}
    if (num_bits := fields.get("kv_bits")) is not None:
        if num_bits not in _KV_BITS:
            text = f"kv_bits: {num_bits!r} is none of {', '.join(map(str, _KV_BITS))}"
            raise InvalidRequestError(text, param="kv_bits")
        if given.setdefault("kv_type", _KV_BITS[num_bits]) != _KV_BITS[num_bits]:
            raise InvalidRequestError("kv_bits and kv_type say different things", param="kv_bits")
    return PlacementSettings(**given)


def struct_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by the names of the structs: the form, adapters and how long the model stays.

    Raises:
        InvalidRequestError: several forms are asked for, or one of these is malformed.
    """
    given = dict(fields)
    constraint = take_constraint(given)
    if constraint is not None:
        given["constraint"] = constraint
    if "keep_alive" in given:
        given["keep_alive_s"] = keep_alive_seconds(given.pop("keep_alive"))
    adapters = given.pop("lora", given.get("adapters"))
    if adapters is not None:
        given["adapters"] = _adapters(adapters)
    return given


def keep_alive_seconds(keep_alive: float | str | None) -> float | None:
    """Seconds of a number or of a text like `10m`; negative: for good (SPEC R8).

    Raises:
        InvalidRequestError: it is no time.
    """
    if keep_alive is None:
        return None
    try:
        seconds = parse_keep_alive(keep_alive)
    except ValueError as error:
        raise InvalidRequestError(f"keep_alive: {error}", param="keep_alive") from None
    return float(seconds) if isinstance(seconds, int | float) else None


def _adapters(lora: Lora) -> tuple[tuple[str | int, float | None], ...]:
    """Adapters by name or place, each with the scale that was given; None: its own (SPEC K6)."""
    match lora:
        case str(name):
            return ((name, None),)
        case Mapping():
            return tuple(lora.items())
        case Sequence() if not isinstance(lora, bytes):
            return tuple(_adapter(one) for one in lora)
    raise _no_lora(lora)


def _adapter(given: Any) -> Any:
    match given:
        case str(name):
            return name, None
        case {"id": name, **rest} if rest.keys() <= {"scale"}:
            return name, rest.get("scale")
        case [name, scale]:
            return name, scale
    raise _no_lora(given)


def _no_lora(given: object) -> InvalidRequestError:
    text = f"lora is a name, {{name: scale}} or a list of names and (name, scale), got {type(given).__name__}"
    return InvalidRequestError(text, param="lora")


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


def texts_of(given: Any, name: str) -> list[str]:
    """Several texts. Raises InvalidRequestError: they are one, or something else."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    if is_list and all(isinstance(text, str) for text in given):
        return list(given)
    kind = f"a {type(given).__name__} of other things" if is_list else type(given).__name__
    raise InvalidRequestError(f"{name}: a list of several texts is taken, not {kind}", param=name)


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is a list of turns."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _no_turn(turn: object) -> str:
    """Why it is no turn of a conversation; empty: it is one."""
    if not isinstance(turn, Mapping):
        return f"is a {type(turn).__name__}"
    if not isinstance(turn.get("role"), str):
        return "has no role"
    if turn.get("content") is None and turn["role"] in {"user", "system"}:
        return "has no content"
    return ""


def turns_of(messages: object) -> Sequence[Message]:
    """The turns of a conversation; a text is one, the user's.

    Raises:
        InvalidRequestError: they are none; says what is.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Sequence) and not isinstance(messages, bytes | bytearray):
        wrong = next(((at, why) for at, turn in enumerate(messages) if (why := _no_turn(turn))), None)
        if wrong is None:
            return messages
        param = f"messages.{wrong[0]}"
        what = f"{param} {wrong[1]}"
    else:
        what, param = f"messages is of type {type(messages).__name__}", "messages"
    text = f'{what}; a conversation is a text or a list of {{"role": "user", "content": "..."}}'
    raise InvalidRequestError(text, param=param)
