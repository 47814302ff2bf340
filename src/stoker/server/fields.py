"""Fields that bodies share: model, class, limits, constraints, sampling; and headers in place of fields.

Names are those of OpenAI, llama-server and vLLM (SPEC D2, I7, Q1, S2); ranges are checked by
`stoker.ipc.request`, types here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field
from starlette.requests import Request

from stoker.base64_text import from_base64
from stoker.errors import InvalidRequestError
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.model import ModelInfo
from stoker.ipc.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    Preempt,
    Priority,
    Sampling,
    check_range,
)
from stoker.server.inbound.body import Body, Many, Name, Named, RequestId
from stoker.server.inbound.named_keys import Permit
from stoker.server.inbound.security import salt_of
from stoker.tasks.fields import keep_alive_seconds

Schema = Named[Any] | bool
Tier = Literal["auto", "default", "priority", "flex", "scale"]
"""OpenAI's; all but `flex` are served as `default` is."""
# Wide enough for every range of `stoker.ipc.request`, narrow enough to be a machine's number.
Int = Annotated[int, Field(ge=-(2**63), lt=2**64)]

_BREAKERS = 64
# OpenAI's; the library takes more, as llama.cpp does. Ranges of further fields are `stoker.ipc.request`'s.
_RANGES = {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}
_MAX_BIAS = 100.0

PRIORITY_HEADER = "X-Stoker-Priority"
PROGRESS_HEADER = "X-Stoker-Progress"
_YES = frozenset({"1", "true", "on", "yes"})
_NO = frozenset({"0", "false", "off", "no", ""})
_AS_EVENT = "event"


def present(**given: Any) -> dict[str, Any]:
    """The keyword arguments that are not None."""
    return {name: value for name, value in given.items() if value is not None}


def header_fields(request: Request) -> dict[str, Any]:
    """Keyword arguments of a `GenerateRequest` that the headers set; they beat the body.

    Raises:
        InvalidRequestError: no class has that name, or the progress is neither on nor off.
        KeyForbidsError: the key of the request may not ask for that class.
    """
    permit: Permit = request.state.identity.permit
    fields = present(priority=permit.default_class)
    name = request.headers.get(PRIORITY_HEADER)
    if name is not None:
        if name not in list(Priority):
            raise InvalidRequestError(
                f"{PRIORITY_HEADER} is {name[:40]!r}; known: {', '.join(Priority)}", param=PRIORITY_HEADER
            )
        permit.check_class(name)
        fields["priority"] = Priority(name)
    progress = request.headers.get(PROGRESS_HEADER)
    if progress is not None:
        word = progress.strip().lower()
        if word not in _YES | _NO | {_AS_EVENT}:
            known = "1, true, on, yes, event and 0, false, off, no"
            text = f"{PROGRESS_HEADER} is {progress[:40]!r}; known: {known}"
            raise InvalidRequestError(text, param=PROGRESS_HEADER)
        fields["return_progress"] = word in _YES | {_AS_EVENT}
    return fields


def names_progress(request: Request) -> bool:
    """Whether progress of the prompt is to come as events of a name of their own."""
    return request.headers.get(PROGRESS_HEADER, "").strip().lower() == _AS_EVENT


class RequestFields(Body):
    """What every request for work may say: the model, its class, its salt and its deadline.

    Attributes:
        priority: the class by its own name, which wins over `service_tier`; vLLM's numbers are ignored.
    """

    model: Name | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_CHARS)
    priority: Literal["interactive", "background"] | int | None = None
    service_tier: Tier | None = None
    timeout_s: float | None = None
    request_id: RequestId | None = None

    @property
    def own_id(self) -> str | None:
        """As `X-Request-Id`, over which it wins."""
        return self.request_id

    @property
    def own_class(self) -> str | None:
        """What `priority` or else `service_tier` asks for."""
        if isinstance(self.priority, str):
            return self.priority
        return Priority.BACKGROUND if self.service_tier == "flex" else None

    def fields(self, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of a `GenerateRequest` that come from these fields, but for the model.

        `key_digest` is of the caller's API key, which its salt is bound to; empty: none is asked for.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        asked = self.own_class
        return present(
            cache_salt=salt_of(key_digest, self.cache_salt or ""),
            priority=None if asked is None else Priority(asked),
            timeout_s=self.timeout_s,
        )


class NamedSchema(Body):
    """A JSON Schema and what it is called."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")  # llama-server's, with json_object

    def constraint(self) -> Constraint | None:
        """What it asks for; None: any text. Raises InvalidRequestError."""
        if self.type == "text":
            return None
        schema = self.schema_
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                text = "response_format.json_schema.schema is missing"
                raise InvalidRequestError(text, param="response_format.json_schema")
            schema = self.json_schema.schema_
        return Constraint(kind=ConstraintKind.JSON_OBJECT) if schema is None else Constraint.of_schema(schema)


class StructuredOutputs(Body):
    """vLLM's fields for the same, in one object."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None


class ConstraintFields(Body):
    """Constraints as further fields of a request; at most one of them."""

    grammar: str | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    json_schema: Schema | str | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraint(self) -> Constraint | None:
        """The one that is asked for.

        Raises:
            InvalidRequestError: there are several, or it is over a limit.
        """
        nested = self.structured_outputs or StructuredOutputs.model_validate({})
        asked: list[tuple[str, Callable[[Any, str], Constraint], Any]] = [
            ("grammar", Constraint.of_grammar, self.grammar or None),
            ("regex", Constraint.of_regex, self.regex),
            ("choice", Constraint.of_choice, self.choice),
            ("json_schema", Constraint.of_schema, self.json_schema),
            ("guided_json", Constraint.of_schema, self.guided_json),
            ("guided_regex", Constraint.of_regex, self.guided_regex),
            ("guided_choice", Constraint.of_choice, self.guided_choice),
            ("guided_grammar", Constraint.of_grammar, self.guided_grammar or None),
            ("structured_outputs.json", Constraint.of_schema, nested.json_),
            ("structured_outputs.regex", Constraint.of_regex, nested.regex),
            ("structured_outputs.choice", Constraint.of_choice, nested.choice),
            ("structured_outputs.grammar", Constraint.of_grammar, nested.grammar or None),
        ]
        found = {name: make(given, name) for name, make, given in asked if given is not None}
        if len(found) > 1:
            text = f"{' and '.join(sorted(found))} cannot be asked for together"
            raise InvalidRequestError(text, param=sorted(found)[1])
        return next(iter(found.values()), None)


class StreamOptions(Body):
    """What a stream says besides its text."""

    include_usage: bool | None = None


class SamplingFields(Body):
    """The samplers (SPEC D1); absent and null mean the default."""

    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_n_sigma: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = Field(None, validation_alias=AliasChoices("typical_p", "typical"))
    mirostat: Int | None = Field(None, validation_alias=AliasChoices("mirostat", "mirostat_mode"))
    mirostat_tau: float | None = Field(None, validation_alias=AliasChoices("mirostat_tau", "mirostat_ent"))
    mirostat_eta: float | None = Field(None, validation_alias=AliasChoices("mirostat_eta", "mirostat_lr"))
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: Many[str] | None = Field(None, max_length=_BREAKERS)
    repeat_penalty: float | None = Field(
        None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    repeat_last_n: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Named[float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    seed: Int | None = None

    def to_sampling(self, info: ModelInfo) -> Sampling:
        """The sampling they describe for a model, whose own defaults hold where they do not say.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        given = self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        for name, (low, high) in _RANGES.items():
            if name in given:
                check_range(name, given[name], low, high)
        given["logit_bias"] = _logit_bias(self.logit_bias or {}, info.n_vocab)
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        return Sampling(**((info.sampling_defaults or {}) | given))


def _logit_bias(given: dict[str, float], n_vocab: int) -> dict[int, float]:
    """Keys are token ids in decimal, as JSON has no other keys than strings."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < n_vocab):  # noqa: PLR2004 - 2**31 has ten digits
            raise InvalidRequestError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to {n_vocab - 1}",
                param="logit_bias",
            )
        check_range("logit_bias", value, -_MAX_BIAS, _MAX_BIAS)
        bias[int(key)] = value
    return bias


class InlineState(Body):
    """A recurrent model's state in the request itself: a safetensors file in base64."""

    data: str


def state_bytes(state: str | InlineState | None) -> str | bytes | None:
    """The id of a saved state, or the bytes of an inline one. Raises InvalidRequestError."""
    return decoded(state.data, "state") if isinstance(state, InlineState) else state


def decoded(text: str, param: str) -> bytes:
    """The bytes of base64. Raises InvalidRequestError."""
    try:
        return from_base64(text)
    except ValueError as error:
        raise InvalidRequestError(f"{param} is not base64: {error}", param=param) from None


class LoraEntry(Body):
    """A LoRA adapter as llama-server has it named: by its place among the model's, or by its name."""

    id: Int | str
    scale: float | None = None


class GenerationFields(SamplingFields, ConstraintFields, RequestFields):
    """What all generating routes share."""

    min_tokens: Int | None = None
    n: Int | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    preempt: Annotated[Preempt, Field(strict=False)] | None = None
    return_progress: bool | None = None
    cache: bool | None = Field(None, validation_alias=AliasChoices("cache", "cache_prompt"))
    context_shift: bool | None = None
    speculate: bool | None = None
    state: str | InlineState | None = None
    keep_alive: float | str | None = None
    lora: str | Named[float] | Many[LoraEntry] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served; all of these are."""

    def common(self, info: ModelInfo, key_digest: str) -> dict[str, Any]:
        """Keyword arguments of a `GenerateRequest` that come from these fields.

        Args:
            info: of the model.
            key_digest: as for `fields`.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        self.refuse_unsupported()
        given = present(
            min_tokens=self.min_tokens,
            n=self.n,
            ignore_eos=self.ignore_eos,
            return_progress=self.return_progress,
            cache=self.cache,
            context_shift=self.context_shift,
            speculate=self.speculate,
            keep_alive_s=keep_alive_seconds(self.keep_alive),
            preempt=self.preempt,
            constraint=self.constraint(),
            adapters=_adapters(self.lora),
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return self.fields(key_digest) | given | {"sampling": self.to_sampling(info), "stop": stop}


def _adapters(
    lora: str | dict[str, float] | list[LoraEntry] | None,
) -> tuple[tuple[str | int, float | None], ...] | None:
    """Adapters by name or place, each with the scale that was given (SPEC K6)."""
    match lora:
        case None:
            return None
        case str(name):
            return ((name, None),)
        case dict():
            return tuple(lora.items())
        case _:
            return tuple((entry.id, entry.scale) for entry in lora)


def tier_of(priority: Priority) -> str:
    """The `service_tier` of a request's class: `priority` is served as `default` is, so it is called that."""
    return "flex" if priority is Priority.BACKGROUND else "default"


def check_logprobs(name: str, count: int | None) -> None:
    """Refuse a count of alternatives over the limit, under the name the caller used.

    Raises:
        InvalidRequestError: out of range.
    """
    if count is not None:
        check_range(name, count, 0, MAX_LOGPROBS)


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Refuse token ids that the vocabulary lacks.

    Raises:
        InvalidRequestError: there are none, or one is out of range.
    """
    if not tokens:
        raise InvalidRequestError(f"{param} is an empty list of tokens", param=param)
    if min(tokens) < 0 or max(tokens) >= n_vocab:
        wrong = next(token for token in tokens if not 0 <= token < n_vocab)
        raise InvalidRequestError(
            f"{param}: there is no token {wrong}; ids are 0 to {n_vocab - 1}", param=param
        )
