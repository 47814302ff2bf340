"""Settings of the engine and the server: frozen, validated, read once.

Owns every name, default, range and help text, and is the only reader of the environment and of TOML files.
A command line says which of them it offers and takes the rest from here.

A setting has one name everywhere: `ctx_size` is `--ctx-size`, `STOKER_CTX_SIZE` and, in TOML, `ctx_size`
or `ctx-size`. `models`, `allowed_hosts` and the like may be written in the singular, as their flags are.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin

import platformdirs
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.wording import wrong_value_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

APP = "stoker"
ENV_PREFIX = "STOKER_"
MAX_SLOTS = 256  # llama_max_parallel_sequences()
MAX_PIXELS = 89_478_485  # what Pillow takes without a warning
DEFAULT_URL = "http://127.0.0.1:8686"
"""Where a server listens that was started without options."""
BY_MEMORY = "by the machine's memory"
"""A default that the machine's tier decides."""

_UNITS = {"": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_DURATION = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_OTHER_VARIABLES = frozenset({"STOKER_DEBUG", "STOKER_URL", "STOKER_API_KEY"})
_MISSPELT = 0.75
"""Of `difflib`: a variable so like that of a setting is a misspelt one."""
_METAVARS = {int: "N", float: "NUMBER", Path: "PATH", bool: ""}
_SINGULAR = {
    "model": "models",
    "allowed_host": "allowed_hosts",
    "image_root": "image_roots",
    "cors_origin": "cors_origins",
}


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


def _threads(value: object) -> object:
    if not isinstance(value, str) or value.strip().isdigit():
        return value
    if value.strip().lower() != "auto":
        raise ValueError(f"{value!r} is neither a whole number nor auto")
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


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_origins)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
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


def _setting(default: Any, text: str, **how: Any) -> Any:
    """A field with its help text.

    `flags`, `shown` and `metavar` say what `Flag` has to say where that does not follow from name, default
    and type; the rest is pydantic's.
    """
    own: dict[str, Any] = {name: how.pop(name) for name in ("flags", "shown", "metavar") if name in how}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=own, **how)
    return Field(default=default, description=text, json_schema_extra=own, **how)


def _size(default: int, text: str, **how: Any) -> Any:
    """A field that takes bytes, or a number with a unit."""
    unit = next(unit for unit in (2**30, 2**20) if default % unit == 0)
    shown = f"{default // unit}{'GiB' if unit == 2**30 else 'MiB'}"
    return _setting(default, text, **{"metavar": "SIZE", "shown": shown} | how)


class _Frozen(BaseSettings):
    """What both settings classes share: immutable, no unknown names, errors of our own tree.

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
        try:
            return handler(data)
        except ValidationError as error:
            raise _first_problem(error) from None

    def replace(self, **fields: Any) -> Self:
        """A copy with `fields` changed and validated.

        Raises:
            InvalidRequestError: a name is unknown or a value out of range; `param` names it.
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **fields})


class EngineSettings(_Frozen):
    """How the engine process runs and what it serves; each field says what it is.

    Attributes:
        models: names or GGUF paths; the first one is "default".
        ctx_size: also the most one request may use; 0: the model's own. With `kv_cells` only that.
        threads: 0 picks the number of physical cores.
        kv_cells: one request may use no more than these either.
        max_queue: background gets half of it.
        cache_mode: "live" keeps cells, "snapshot" states in host memory and on disk.
        isolation: "process" survives any crash of native code; "thread" is for tests and small hosts.
        max_prepare_s: compiling the request's constraint included.
        watchdog_s: a step may take this long, or ten times what it is predicted to take, whichever is more.
        memory_limit: of the engine and the client together; None: what the machine, its groups and tier
            allow.
        keep_alive: seconds (or 30s, 10m, 2h); -1: for good; None: what the machine's tier says, 10 minutes at
            most.
        speculation: "lookup" repeats what the text repeats, "draft" asks `draft_model`, "auto" does both.
        suspend_grace_s: resuming meanwhile changes nothing.
        lora: one belongs to the first model that it fits.
        chat_template: without a model's name, of every model whose file and family have none.
        rerank_output: without a model's name, of every reranker whose labels do not say.
        image_roots: for `file:`; empty: none.
    """

    models: Names = _setting(
        (),
        "Model to serve; repeat for more.",
        flags=("--model", "-m"),
        shown="embedded default",
        metavar="NAME|FILE",
    )
    slots: int = _setting(8, "Requests that run at once.", ge=1, le=MAX_SLOTS)
    ctx_size: int = _setting(
        16384, "Tokens of context all slots share.", flags=("--ctx-size", "-c"), ge=0, lt=2**31
    )
    threads: Annotated[int, BeforeValidator(_threads)] = _setting(
        0,
        "CPU threads, or auto.",
        flags=("--threads", "-t"),
        shown="auto",
        metavar="auto|N",
        ge=0,
        le=1024,
    )
    n_batch: int = _setting(512, "Tokens one step may carry.", ge=1, le=65536)
    kv_cells: int | None = _setting(None, "KV cells to allocate.", shown="as --ctx-size", ge=1, lt=2**31)
    max_queue: int = _setting(512, "Requests that may wait.", ge=1)
    policy: Literal["latency", "balanced", "throughput"] = _setting(
        "latency", "What a step favours while somebody waits for tokens."
    )
    target_step_ms: float = _setting(
        50.0, "Longest a step should take while interactive requests decode.", gt=0, le=60_000
    )
    background_patience_s: float = _setting(
        30.0, "Seconds background work goes without a step before it gets one in ten.", ge=0, le=86_400
    )
    park_bytes: Size = _size(2**30, "Host memory for states of parked requests, a model.")
    cache_mode: Literal["off", "live", "snapshot", "live+snapshot"] = _setting(
        "live+snapshot", "What is kept of finished work."
    )
    cache_ram_bytes: Size = _size(2**30, "Host memory for kept states; 0: none.")
    cache_disk_bytes: Size = _size(4 * 2**30, "Disk for kept states, under --cache-dir; 0: none.")
    isolation: Literal["process", "thread"] = _setting("process", "Where native code runs.")
    max_prepare_s: float = _setting(30.0, "Seconds that tokenising a request may take.", gt=0)
    watchdog_s: float = _setting(10.0, "Seconds of silence that end an engine.", gt=0)
    drain_s: float = _setting(10.0, "Seconds that a shutdown lets running requests finish.", ge=0)
    memory_limit: Bytes | None = _setting(
        None, "Bytes, or such as 4GiB.", shown="what the machine has", metavar="SIZE"
    )
    memory_margin: Size = _size(512 * 2**20, "Free memory that loading has to leave; 0: none.")
    keep_alive: Annotated[float | None, BeforeValidator(parse_keep_alive)] = _setting(
        None,
        "How long a model stays after its last request: 30s, 10m, -1.",
        shown=BY_MEMORY,
        metavar="TIME",
    )
    draft_model: str | None = _setting(
        None, "Smaller model of the same vocabulary that guesses.", shown="none"
    )
    speculation: Literal["off", "lookup", "draft", "auto"] = _setting(
        "auto", "What guesses tokens ahead where that is quicker."
    )
    default_max_tokens: int | None = _setting(
        None,
        "Tokens of an answer that does not say; 0: until the context is full.",
        shown=BY_MEMORY,
        ge=0,
        lt=2**31,
    )
    suspend_grace_s: float = _setting(0.0, "Seconds between a suspend and its begin.", ge=0, le=86_400)
    lora: Names = _setting(
        (),
        "LoRA adapter that requests may name; repeat for more.",
        shown="none",
        metavar="NAME=FILE[@SCALE]",
    )
    mmproj: Location | None = _setting(
        None, "Projector with which the first model that it fits reads images."
    )
    chat_template: Names = _setting(
        (),
        "Chat template, a Jinja file: of the models that bring none, or of one; repeat for more.",
        shown="the model's own",
        metavar="[MODEL=]FILE",
    )
    rerank_output: Names = _setting(
        (),
        "Output of a reranker's classifier that is the score, from 0, if it has several; repeat for more.",
        shown="what its labels say",
        metavar="[MODEL=]N",
    )
    image_roots: Names = _setting(
        (), "Folder that images may be read from by path; repeat for more.", metavar="PATH"
    )
    allow_http_images: bool = _setting(
        default=False,
        text="Fetch images from public addresses.",
        flags=("--allow-http-images/--no-http-images",),
    )
    max_images: int = _setting(16, "Images of one request.", ge=1, le=256)
    max_image_bytes: Bytes = _size(20 * 2**20, "Bytes of one encoded image.")
    max_image_pixels: int = _setting(40_000_000, "Pixels of one image.", ge=64, le=MAX_PIXELS)
    image_edge: int | None = _setting(
        None, "Pixels that a longer edge is shrunk to.", shown=BY_MEMORY, ge=8, le=16384
    )
    restore: bool = _setting(default=False, text="Without --model, serve what was loaded last.")
    heat_trace: Location | None = _setting(None, "Recorded heat to follow instead of the machine's sensors.")
    cache_dir: Location = _setting(lambda: platformdirs.user_cache_path(APP), "Folder of the cache.")
    models_dir: Location = _setting(
        lambda: platformdirs.user_data_path(APP) / "models", "Folder of pulled models."
    )
    states_dir: Location = _setting(
        lambda: platformdirs.user_data_path(APP) / "states", "Folder of saved states of recurrent models."
    )
    run_dir: Location = _setting(
        lambda: platformdirs.user_state_path(APP), "Folder of what has to survive the program."
    )


class ServerSettings(_Frozen):
    """Where the HTTP server listens and what it accepts; each field says what it is.

    Attributes:
        host: anything but loopback should come with `api_key_file`.
        port: the readiness line tells which one was picked.
        admin_key_file: an operator's key is good for all that an ordinary key is good for, and to load,
            unload and pin models, suspend and resume, and see the requests of all keys. None: where keys are
            asked for this is not possible over HTTP, elsewhere programs of this machine may.
        allow_downloads: for programs of this machine; with an operator's key it is always allowed.
        allowed_hosts: besides the bound address and localhost.
        cors_origins: such as https://chat.example; "*": all, "null": files.
        max_connections: past it one that waits for its client gives way, else new ones get a 503.
        follow_sleep: of the machine (logind).
        insecure: `host` may be one that others reach although `api_key_file` is not set.
        log_level: commands other than `serve` show their log only where this or `log_file` is given.
        log_format: "json": one object a line; "text": lines for people, for journald or for a file, by where
            they go.
        log_file: gets the log instead of stderr; it may be renamed meanwhile (logrotate).
        quiet: nothing but warnings and errors.
    """

    host: str = _setting("127.0.0.1", "Address to bind.")
    port: int = _setting(8686, "0 picks a free one.", ge=0, le=65535)
    api_key_file: Location | None = _setting(None, "File with one accepted key a line.", shown="no key")
    admin_key_file: Location | None = _setting(None, "File with one operator's key a line.", shown="none")
    allow_downloads: bool = _setting(
        default=False,
        text="Let `load` download without an operator's key.",
        flags=("--allow-downloads/--no-downloads",),
    )
    allowed_hosts: Names = _setting(
        (), "Further name accepted in the Host header; repeat for more.", metavar="NAME"
    )
    cors_origins: Origins = _setting(
        (),
        "Origin whose pages may call the server; repeat for more, * for all.",
        shown="none",
        metavar="ORIGIN",
    )
    max_body_bytes: Bytes = _size(32 * 2**20, "Bytes of a request; more are refused with 413.")
    max_connections: int = _setting(1024, "Open connections.", ge=16, le=65_536)
    max_receiving_bytes: Bytes = _size(
        128 * 2**20, "Bytes of all bodies being received together, beyond 64 KiB each."
    )
    receive_timeout_s: float = _setting(
        15.0, "Seconds that the head of a request may take, and a pause in its body.", gt=0, le=3600
    )
    keepalive_s: float = _setting(10.0, "Seconds between comments on a stream that has nothing to say.", gt=0)
    follow_sleep: bool = _setting(default=True, text="Suspend and resume with the machine.")
    insecure: bool = _setting(
        default=False, text="Serve other machines without a key.", flags=("--insecure",)
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "What the log shows.")
    log_format: Literal["text", "json"] = _setting("text", "Form of the log's lines.")
    log_file: Location | None = _setting(None, "File of the log.", shown="stderr")
    quiet: bool = _setting(default=False, text="Show warnings and errors only.", flags=("--quiet", "-q"))


def flag_of(name: str) -> Flag:
    """How a command line offers the setting of that name."""
    field = (EngineSettings.model_fields | ServerSettings.model_fields)[name]
    option = next((singular for singular, plural in _SINGULAR.items() if plural == name), name)
    option = f"--{option.replace('_', '-')}"
    kind, default = _plain(field.annotation), field.default
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, "TEXT")
    if kind is float and name.endswith("_s"):
        metavar = "SECONDS"
    if kind is bool:
        option = f"{option}/--no-{option[2:]}"
        default = "yes" if default else "no"
    is_shown = field.default_factory is None and default not in {None, ()}
    shown = f"{default:g}" if isinstance(default, float) else str(default) if is_shown else ""
    own: Any = field.json_schema_extra
    is_list = get_origin(kind) is tuple
    return Flag(
        own.get("flags", (option,)),
        field.description or "",
        own.get("shown", shown),
        own.get("metavar", metavar),
        kind if kind is bool else list[str] if is_list else str,
    )


def _plain(kind: Any) -> Any:
    """The type without None and without what checks it."""
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


@dataclass(frozen=True, slots=True)
class _Layer:
    """Settings of one source: their values, and how each is spelled there, for messages; both by name."""

    values: Mapping[str, Any]
    spelled: Mapping[str, str]


def load_settings(flags: Mapping[str, Any], config: Path | None) -> tuple[EngineSettings, ServerSettings]:
    """Settings from flags, `STOKER_*` and a TOML file, the first that names one winning.

    Args:
        flags: by field name; None means the flag was not given.
        config: TOML file, or None.

    Raises:
        InvalidRequestError: unknown name, wrong type or value out of range; `param` names the setting, the
            message the flag, the variable or the key and its file.
        MachineSetupError: the file cannot be read.
    """
    layers = [_given(flags), _read_environment()]
    if config is not None:
        layers.append(_read_toml(config))
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged |= layer.values
    try:
        return (
            EngineSettings(**{k: v for k, v in merged.items() if k in EngineSettings.model_fields}),
            ServerSettings(**{k: v for k, v in merged.items() if k in ServerSettings.model_fields}),
        )
    except InvalidRequestError as error:
        name = error.param or ""
        spelled = next((layer.spelled[name] for layer in layers if name in layer.values), name)
        text = error.message.removeprefix(f"{name}: ")
        raise InvalidRequestError(f"{spelled}: {text}", param=name) from None


def strange_variables() -> list[str]:
    """Variables of the environment that begin as ours do and name no setting; misspelt ones are refused."""
    return sorted(_environment().keys() - _variables().keys() - _OTHER_VARIABLES)


def server_to_ask(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """URL and API key of a running server; what is None comes from `STOKER_URL` and `STOKER_API_KEY`."""
    environ = os.environ
    return (
        url or environ.get(f"{ENV_PREFIX}URL") or DEFAULT_URL,
        api_key or environ.get(f"{ENV_PREFIX}API_KEY") or None,
    )


def is_debug() -> bool:
    """Whether `STOKER_DEBUG` asks for tracebacks."""
    return os.environ.get(f"{ENV_PREFIX}DEBUG", "") not in {"", "0"}


def _known_names() -> list[str]:
    return [*EngineSettings.model_fields, *ServerSettings.model_fields]


def _known(key: str) -> str:
    """The setting that a key names; raises InvalidRequestError with those that may have been meant."""
    name = key.replace("-", "_")
    name = _SINGULAR.get(name, name)
    if name not in _known_names():
        raise InvalidRequestError(f"there is no setting {key!r}{_nearest(name, _known_names())}", param=key)
    return name


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _given(flags: Mapping[str, Any]) -> _Layer:
    values = {_known(key): value for key, value in flags.items() if value is not None}
    return _Layer(values, {name: flag_of(name).names[0].partition("/")[0] for name in values})


def _environment() -> dict[str, str]:
    return {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}


def _variables() -> dict[str, str]:
    """The setting of each variable; one of a list may be in the singular too."""
    plural = {f"{ENV_PREFIX}{name.upper()}": name for name in _known_names()}
    return {f"{ENV_PREFIX}{one.upper()}": name for one, name in _SINGULAR.items()} | plural


def _read_environment() -> _Layer:
    """What `STOKER_*` sets; a variable that nearly names a setting is refused."""
    known, given = _variables(), _environment()
    short = [variable.removeprefix(ENV_PREFIX) for variable in known]
    for variable in strange_variables():
        if near := difflib.get_close_matches(variable.removeprefix(ENV_PREFIX), short, 1, _MISSPELT):
            text = f"there is no setting {variable}; did you mean {ENV_PREFIX}{near[0]}?"
            raise InvalidRequestError(text, param=variable)
    spelled = {name: variable for variable, name in known.items() if variable in given}
    return _Layer({name: given[variable] for name, variable in spelled.items()}, spelled)


def _read_toml(path: Path) -> _Layer:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineSetupError(f"cannot read the settings file {path}: {reason}", param="config") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is not valid TOML: {error}", param="config") from None
    try:
        spelled = {_known(key): f"{key} in {path}" for key in found}
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}", param=error.param) from None
    return _Layer({_known(key): value for key, value in found.items()}, spelled)


def _first_problem(error: ValidationError) -> InvalidRequestError:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    if problem["type"] == "extra_forbidden":
        text = f"there is no such setting{_nearest(name, _known_names())}"
    else:
        text = wrong_value_text(dict(problem))
    return InvalidRequestError(f"{name}: {text}", param=name)
