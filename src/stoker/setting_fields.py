"""How a setting is declared: which text is which value, how a command line offers it, what is wrong with it.

Which settings there are, and where their values come from, is `stoker.settings`'.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from stoker.errors import InvalidRequestError
from stoker.wording import wrong_value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENV_PREFIX = "STOKER_"
MAX_LAYERS = 100_000
"""Past any model."""
_UNITS = {"": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_COLLECTOR = re.compile(r"https?://[^/\s?#@]+(/[^\s?#]*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_DURATION = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_size(value: object) -> object:
    """Bytes of a size like `4GiB`, `1.5g` or `500MB`; anything that is not text is passed on.

    `k`, `m`, `g`, `t` and `KiB` ... `TiB` are powers of 1024, `KB` ... `TB` powers of 1000.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(
            f"{value!r} is not a size; write bytes or a number with a unit, such as 4GiB or 512MiB"
        )
    return int(float(match[1]) * unit)


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _pieces(value: object) -> object:
    """What is given one by one, or several in a text."""
    given = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(each, str | int | float) for each in given):
        return value
    return tuple(part.strip() for each in given for part in str(each).split(",") if part.strip())


def parse_threads(value: object) -> object:
    """A number of threads; `auto` is 0."""
    if not isinstance(value, str) or value.strip().isdigit():
        return value
    if value.strip().lower() != "auto":
        raise ValueError(f"{value!r} is neither a number of threads nor auto")
    return 0


def _expand(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str | Path) else value


def parse_keep_alive(value: object) -> object:
    """Seconds of a time like `10m`, `30s`, `1.5h` or `-1` (for good); what is not text is passed on."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if not match:
        raise ValueError(f"{value!r} is not a time; write seconds, 30s, 10m, 2h, or -1 for good")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_switch(value: object) -> object:
    """`on` or `off` of a boolean of TOML; what is none is passed on."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _origins(value: object) -> object:
    """Origins as browsers write them: lower case, without a slash at the end and without a default port."""
    given = _split(value)
    if not isinstance(given, tuple | list):
        return given
    found = []
    for each in given:
        origin = str(each).lower().rstrip("/")
        if origin not in {"*", "null"} and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{each!r} is not an origin; write scheme://host[:port], or * for every one")
        scheme = origin.partition("://")[0]
        found.append(origin.removesuffix(_DEFAULT_PORTS.get(scheme, "/")))
    return tuple(found)


def _collector(value: object) -> object:
    """The address of a collector of traces."""
    if isinstance(value, str) and not _COLLECTOR.fullmatch(value):
        raise ValueError(f"{value!r} is not the address of a collector; write such as http://127.0.0.1:4318")
    return value


def _layers(value: object) -> object:
    """A number of layers, `auto` or `all`, also where it is written as text."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if text.isdigit():
        return int(text)
    if text and text not in {"auto", "all"}:
        raise ValueError(f"{value!r} is neither a number of layers nor auto or all")
    if isinstance(value, int) and not 0 <= value <= MAX_LAYERS:
        raise ValueError(f"{value} is neither auto nor all nor between 0 and {MAX_LAYERS}")
    return text or value


def _devices(value: object) -> object:
    """Names or indexes of devices; `none` and `cpu` stand alone for none of them."""
    given = _pieces(value)
    if not isinstance(given, tuple | list):
        return given
    found = tuple(str(each) for each in given)
    is_none = [name.lower() in {"none", "cpu"} for name in found]
    if any(is_none) and len(found) > 1:
        raise ValueError(f"none and cpu stand alone, got {', '.join(found)}")
    return ("none",) if any(is_none) else found


def _parts(value: object) -> object:
    """Proportions such as 3,1."""
    given = _pieces(value)
    if isinstance(given, tuple | list) and given:
        typed = ",".join(map(str, given))
        try:
            parts = tuple(float(part) for part in given)
        except (TypeError, ValueError):
            raise ValueError(f"{typed!r} are no proportions; write such as 3,1") from None
        if not all(0 <= part < float("inf") for part in parts) or not any(parts):
            raise ValueError(f"{typed!r} are no proportions; write such as 3,1")
        return parts
    return given


GpuLayers = Annotated[
    Literal["auto", "all"] | Annotated[int, Field(ge=0, le=MAX_LAYERS)], BeforeValidator(_layers)
]
MAX_DEVICES = 16
"""That one model may be asked to lie on: as many as llama.cpp splits one over."""
DeviceNames = Annotated[tuple[str, ...], Field(max_length=MAX_DEVICES), NoDecode, BeforeValidator(_devices)]
Parts = Annotated[tuple[float, ...], Field(max_length=MAX_DEVICES), NoDecode, BeforeValidator(_parts)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_origins)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
CollectorUrl = Annotated[str, BeforeValidator(_collector)]
Location = Annotated[Path, BeforeValidator(_expand)]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a command line offers a setting.

    Attributes:
        names: of the option; a flag's two are parted by a slash.
        text: what it means, without its default.
        shown: the default in words; empty: it is not shown.
        metavar: form of the value; empty: it takes none.
        kind: bool, a list of texts, or text, which the settings read.
    """

    names: tuple[str, ...]
    text: str
    shown: str
    metavar: str
    kind: Any


def setting(default: Any, text: str, **how: Any) -> Any:
    """A field with its help text.

    `flags`, `shown` and `metavar` say what `Flag` has to say where that does not follow from name, default
    and type; the rest is pydantic's.
    """
    own: dict[str, Any] = {name: how.pop(name) for name in ("flags", "shown", "metavar") if name in how}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=own, **how)
    return Field(default=default, description=text, json_schema_extra=own, **how)


def size_setting(default: int, text: str, **how: Any) -> Any:
    """A field that takes bytes, or a number with a unit."""
    unit = next(unit for unit in (2**30, 2**20) if default % unit == 0)
    shown = f"{default // unit}{'GiB' if unit == 2**30 else 'MiB'}"
    return setting(default, text, **{"metavar": "SIZE", "shown": shown} | how)


class FrozenSettings(BaseSettings):
    """What all settings classes share: immutable, no unknown names, errors of our own tree.

    Constructing one reads nothing from outside; `load_settings` does.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - likewise
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - likewise
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - likewise
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructor arguments only."""
        return (init_settings,)

    @model_validator(mode="wrap")
    @classmethod
    def _typed_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and _takes_numbers(field.annotation):
                raise InvalidRequestError(f"{name}: {str(value).lower()} is no number", param=name)
        try:
            return handler(data)
        except ValidationError as error:
            raise _first_problem(error, list(cls.model_fields)) from None

    def replace(self, **fields: Any) -> Self:
        """A copy with `fields` changed and validated.

        Raises:
            InvalidRequestError: a name is unknown or a value out of range; `param` names it.
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **fields})


def _takes_numbers(kind: Any) -> bool:
    """Whether it takes numbers and no truths, of which pydantic would make 1 and 0."""
    kinds = [part for part in _kinds_in(kind) if part in (int, float, bool)]
    return bool(kinds) and bool not in kinds


def _kinds_in(kind: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    yield kind
    for part in get_args(kind):
        yield from _kinds_in(part)


def nearest(name: str, known: Sequence[str]) -> str:
    """What an unknown name may have meant, for the end of a message; empty: nothing is like it."""
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _first_problem(error: ValidationError, known: Sequence[str]) -> InvalidRequestError:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        text = f"there is no such setting{nearest(name, known)}"
    else:
        text = wrong_value_text(dict(problem))
    return InvalidRequestError(f"{name}: {text}", param=name)
