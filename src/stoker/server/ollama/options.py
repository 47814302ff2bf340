"""`options`, `keep_alive` and the other fields that Ollama's generating bodies share, as our own fields.

Those that say how a model is to be loaded (`num_gpu`, `num_thread` and their like) would change what others
use, so they have no effect; the answer's header names them. `num_ctx` bounds its own request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import InvalidRequestError
from stoker.ipc.request import MAX_TOKENS, check_range
from stoker.server.fields import Int, Schema, present
from stoker.server.inbound.body import MAX_UNKNOWN, Name, Named
from stoker.server.ollama.names import OllamaBody
from stoker.tasks.fields import keep_alive_seconds

if TYPE_CHECKING:
    from starlette.requests import Request

    from stoker.ipc.model import ModelInfo
    from stoker.server.errors import OriginRules

_WHOLE = ("num_predict", "num_ctx", "seed", "top_k", "repeat_last_n", "mirostat")
"""Options that some clients write with a point: 2048.0."""
_SAMPLERS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "repeat_penalty", "seed"}
    | {"presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "stop"}
)
_KNOWN = _SAMPLERS | {"num_predict", "num_ctx"}
_BY_NAME = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
"""Of a schema: schemas by names that are the caller's."""
_AS_THEY_ARE = frozenset({"allOf", "enum", "const", "default", "examples"})
"""What is no schema, or holds for an object together with others."""
_OPENING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"})
_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+)")
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class OllamaFields(OllamaBody):
    """What chat and generate share."""

    model: Name
    stream: bool | None = None
    format: str | Named[Any] | None = None
    options: Named[Any] | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes line by line; it does unless it was told not to."""
        return self.stream is not False

    def shared(self, origins: OriginRules) -> dict[str, Any]:
        """Fields of a chat completion or a completion; `origins` learns where they stand here.

        Raises:
            InvalidRequestError: an option or the time is malformed.
        """
        options = OllamaOptions.read(self.options or {})
        for name in options.sampling:
            origins.add(name, f"options.{name}")
        return options.sampling | present(
            keep_alive=kept_seconds(self.keep_alive),
            context_shift=self.shift,
        )

    def answer_schema(self) -> Schema | None:
        """The schema of `format`, closed; True: any object; None: any text. Raises InvalidRequestError."""
        if self.format in (None, "", {}):
            return None
        if self.format == "json":
            return True
        if isinstance(self.format, str):
            text = f'format is {self.format[:40]!r}; it is "json" or a JSON Schema'
            raise InvalidRequestError(text, param="format")
        found: Schema = closed(self.format)
        return found

    def tell_ignored(self, request: Request) -> None:
        """Have the answer name the options that have no effect."""
        unknown = [f"options.{name}" for name in self.options or () if name not in _KNOWN]
        if unknown:
            known = [f"options.{name}" for name in _KNOWN]
            request.state.unknown_fields.tell(request, unknown[:MAX_UNKNOWN], known)


def note_ignored(request: Request, name: str) -> None:
    """Have the answer name a field that is known and has no effect on it."""
    request.state.ignored = [*getattr(request.state, "ignored", ()), name]


@dataclass(frozen=True, slots=True)
class OllamaOptions:
    """`options` of a body.

    Attributes:
        sampling: by the names of our own fields.
        num_predict: tokens to generate at most; 0 and less: until the context is full; None: as set.
        num_ctx: tokens that prompt and answer may have together; None: as the model is served.
    """

    sampling: dict[str, Any]
    num_predict: int | None = None
    num_ctx: int | None = None

    @classmethod
    def read(cls, given: dict[str, Any]) -> OllamaOptions:
        """Those of a body. Raises InvalidRequestError."""
        found = {name: value for name, value in given.items() if name in _KNOWN and value is not None}
        for name in _WHOLE:
            if isinstance(value := found.get(name), float) and value.is_integer():
                found[name] = int(value)
        num_predict, num_ctx = (_number(found.pop(name, None), name) for name in ("num_predict", "num_ctx"))
        if found.get("seed") == -1:  # Ollama's word for any
            del found["seed"]
        return cls(found, num_predict, num_ctx or None)

    def token_limit(self, info: ModelInfo) -> int | None:
        """Tokens to generate at most; None: as set."""
        if self.num_predict is None:
            return None
        return self.num_predict if self.num_predict > 0 else info.n_ctx or MAX_TOKENS


def closed(schema: Any) -> Any:
    """A JSON Schema whose objects hold what they name and nothing else, where it does not say.

    Ollama's grammars are so, and clients rely on it: a small model that may add fields adds them to its end.
    """
    if not isinstance(schema, dict):
        return [closed(each) for each in schema] if isinstance(schema, list) else schema
    made = {name: _closed_within(name, value) for name, value in schema.items()}
    if "properties" in schema and not _OPENING.intersection(schema):
        made["additionalProperties"] = False
    return made


def _closed_within(name: str, value: Any) -> Any:
    if name in _BY_NAME and isinstance(value, dict):
        return {each: closed(schema) for each, schema in value.items()}
    return value if name in _AS_THEY_ARE else closed(value)


def _number(value: Any, name: str) -> int | None:
    param = f"options.{name}"
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{param} is not a whole number", param=param)
    check_range(param, value, -2 if name == "num_predict" else 0, MAX_TOKENS)
    return value


def kept_seconds(keep_alive: float | str | None) -> float | None:
    """Seconds of a number or of a text such as "5m" or "1h30m"; negative: for good; None: as set.

    Raises:
        InvalidRequestError: it is no time.
    """
    if isinstance(keep_alive, str) and (found := _DURATION.fullmatch(keep_alive.strip())):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(found[2]))
        return -seconds if found[1] == "-" else seconds
    return keep_alive_seconds(keep_alive)
