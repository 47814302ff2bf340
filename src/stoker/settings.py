"""Settings of the engine and the server: frozen, validated, read once.

Owns every name, default and range, and is the only reader of the environment and of TOML files.
Which of them a command line offers is the CLI's business; what they do is their component's.

A setting has one name everywhere: `ctx_size` is `--ctx-size`, `STOKER_CTX_SIZE` and, in TOML, `ctx_size`
or `ctx-size`. `models`, `allowed_hosts` and the like may be written in the singular, as their flags are.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import platformdirs
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from stoker.errors import InvalidRequestError, MachineSetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

APP = "stoker"
ENV_PREFIX = "STOKER_"
MAX_SLOTS = 256  # llama_max_parallel_sequences()
MAX_PIXELS = 89_478_485  # what Pillow takes without a warning

_UNITS = {"": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_UNITS["b"] = 1
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_DURATION = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
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
    return 0 if isinstance(value, str) and value.strip().lower() == "auto" else value


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
Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Location = Annotated[Path, BeforeValidator(_expand)]


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
    """How the engine process runs and what it serves.

    Attributes:
        models: names or GGUF paths to serve; empty: the embedded default. The first one is "default".
        slots: sequences that run at once.
        ctx_size: tokens (KV cells) all slots share, and the most one request may use; 0: the model's own.
            With `kv_cells` only the second.
        threads: CPU threads; 0 picks the number of physical cores.
        n_batch: tokens one step may carry.
        kv_cells: KV cells to allocate, which all slots share, where that should differ from `ctx_size`; one
            request may use no more than these either.
        max_queue: requests that may wait; background gets half of it.
        policy: how a step is shared between decode and prefill: "latency", "balanced" or "throughput".
        target_step_ms: how long a step may take while an interactive request decodes.
        background_patience_s: how long background work may go without a step before it gets one in ten.
        park_bytes: host memory that the states of parked requests may take, per model.
        cache_mode: what is kept of finished work: "off", "live" (cells), "snapshot" (states in host memory
            and on disk) or "live+snapshot".
        cache_ram_bytes: host memory that kept states may take, over all models; 0: none.
        cache_disk_bytes: what they may take on disk, under `cache_dir`; 0: none.
        isolation: "process" survives any crash of native code; "thread" is for tests and small hosts.
        max_prepare_s: how long turning a request into tokens and compiling its constraint may take.
        watchdog_s: silence of the engine after which it counts as hung; a step may take this long, or ten
            times what it is predicted to take, whichever is more.
        drain_s: how long a shutdown lets running requests finish.
        memory_limit: bytes that the engine and its front may take together; None: what the machine, its
            control groups and its tier allow.
        memory_margin: bytes of free memory that a load has to leave; 0: none.
        keep_alive: seconds (or 30s, 10m, 2h) that a model stays in memory after its last request; -1: for
            good; None: what the machine's tier says, 10 minutes at most.
        draft_model: name or path of a smaller model of the same vocabulary that guesses for the first one.
        speculation: what guesses tokens ahead where that is quicker: "off", "lookup" (what the text
            repeats), "draft" (`draft_model`) or "auto" (both).
        default_max_tokens: tokens an answer may have where its request does not say; 0: until the context
            is full; None: what the machine's tier says.
        suspend_grace_s: seconds between `suspend` and its begin; resuming meanwhile changes nothing.
        lora: LoRA adapters that requests may name, each NAME=FILE or NAME=FILE@SCALE; one belongs to the
            first model that it fits.
        mmproj: the projector (GGUF) with which the first model that it fits reads pictures.
        image_roots: folders that pictures named by `file:` may be read from; empty: none.
        allow_http_images: fetch pictures from public http and https addresses.
        max_images: pictures of one request.
        max_image_bytes: of one encoded picture.
        max_image_pixels: of one picture, by its header.
        image_edge: pixels that a picture's longer edge is shrunk to; None: what the machine's tier says.
        restore: with no `models` given, serve those that were loaded when it last ended.
        heat_trace: a recorded course of heat to follow instead of the machine's sensors.
        cache_dir: verdicts and files that can be made again.
        models_dir: where pulled models lie.
        states_dir: where saved states of recurrent models lie.
        run_dir: what has to survive the program: suspended requests, which models were loaded.
    """

    models: Names = ()
    slots: int = Field(default=8, ge=1, le=MAX_SLOTS)
    ctx_size: int = Field(default=16384, ge=0, lt=2**31)
    threads: Annotated[int, BeforeValidator(_threads)] = Field(default=0, ge=0, le=1024)
    n_batch: int = Field(default=512, ge=1, le=65536)
    kv_cells: int | None = Field(default=None, ge=1, lt=2**31)
    max_queue: int = Field(default=512, ge=1)
    policy: Literal["latency", "balanced", "throughput"] = "latency"
    target_step_ms: float = Field(default=50.0, gt=0, le=60_000)
    background_patience_s: float = Field(default=30.0, ge=0, le=86_400)
    park_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = 2**30
    cache_mode: Literal["off", "live", "snapshot", "live+snapshot"] = "live+snapshot"
    cache_ram_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = 2**30
    cache_disk_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = 4 * 2**30
    isolation: Literal["process", "thread"] = "process"
    max_prepare_s: float = Field(default=30.0, gt=0)
    watchdog_s: float = Field(default=10.0, gt=0)
    drain_s: float = Field(default=10.0, ge=0)
    memory_limit: Bytes | None = None
    memory_margin: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = 512 * 2**20
    keep_alive: Annotated[float | None, BeforeValidator(parse_keep_alive)] = None
    draft_model: str | None = None
    speculation: Literal["off", "lookup", "draft", "auto"] = "auto"
    default_max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    suspend_grace_s: float = Field(default=0.0, ge=0, le=86_400)
    lora: Names = ()
    mmproj: Location | None = None
    image_roots: Names = ()
    allow_http_images: bool = False
    max_images: int = Field(default=16, ge=1, le=256)
    max_image_bytes: Bytes = 20 * 2**20
    max_image_pixels: int = Field(default=40_000_000, ge=64, le=MAX_PIXELS)
    image_edge: int | None = Field(default=None, ge=8, le=16384)
    restore: bool = False
    heat_trace: Location | None = None
    cache_dir: Location = Field(default_factory=lambda: platformdirs.user_cache_path(APP))
    models_dir: Location = Field(default_factory=lambda: platformdirs.user_data_path(APP) / "models")
    states_dir: Location = Field(default_factory=lambda: platformdirs.user_data_path(APP) / "states")
    run_dir: Location = Field(default_factory=lambda: platformdirs.user_state_path(APP))


class ServerSettings(_Frozen):
    """Where the HTTP server listens and what it accepts.

    Attributes:
        host: address to bind; anything but loopback should come with `api_key_file`.
        port: 0 lets the system choose; the readiness line tells which.
        api_key_file: file with one accepted key a line; None: no key is asked for.
        admin_key_file: file with one operator's key a line. It is good for all that an ordinary key is good
            for, and to load, unload and pin models, suspend and resume, and see the requests of all keys.
            None: where keys are asked for nobody may do that over HTTP, elsewhere programs of this machine.
        allow_downloads: let programs of this machine load models of the hub by name without an operator's
            key; with one that is always allowed.
        allowed_hosts: names accepted in `Host` besides the bound address and localhost.
        cors_origins: origins whose pages may call, such as https://chat.example; "*": all, "null": files.
        max_body_bytes: a longer request body is refused with 413.
        max_connections: open ones; past it one that waits for its client gives way, else new ones get a 503.
        max_receiving_bytes: what the bodies that are being received may take together, beyond 64 KiB each.
        receive_timeout_s: seconds that the head of a request may take, and a sender pause in its body.
        keepalive_s: seconds between comments on a stream that has nothing to say.
        follow_sleep: suspend when the machine goes to sleep and resume when it wakes (logind).
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8686, ge=0, le=65535)
    api_key_file: Location | None = None
    admin_key_file: Location | None = None
    allow_downloads: bool = False
    allowed_hosts: Names = ()
    cors_origins: Origins = ()
    max_body_bytes: Bytes = 32 * 2**20
    max_connections: int = Field(default=1024, ge=16, le=65_536)
    max_receiving_bytes: Bytes = 128 * 2**20
    receive_timeout_s: float = Field(default=15.0, gt=0, le=3600)
    keepalive_s: float = Field(default=10.0, gt=0)
    follow_sleep: bool = True


def load_settings(flags: Mapping[str, Any], config: Path | None) -> tuple[EngineSettings, ServerSettings]:
    """Settings from flags, `STOKER_*` and a TOML file, the first that names one winning.

    Args:
        flags: by field name; None means the flag was not given.
        config: TOML file, or None.

    Raises:
        InvalidRequestError: unknown name, wrong type or value out of range; `param` names the setting and
            the message its source.
        MachineSetupError: the file cannot be read.
    """
    layers = [
        ("flag", _canonical({name: value for name, value in flags.items() if value is not None})),
        ("environment", _read_environment()),
        (str(config), _read_toml(config) if config is not None else {}),
    ]
    merged: dict[str, Any] = {}
    for _, layer in reversed(layers):
        merged |= layer
    try:
        return (
            EngineSettings(**{k: v for k, v in merged.items() if k in EngineSettings.model_fields}),
            ServerSettings(**{k: v for k, v in merged.items() if k in ServerSettings.model_fields}),
        )
    except InvalidRequestError as error:
        source = next((title for title, layer in layers if error.param in layer), "default")
        raise InvalidRequestError(f"{error.message} (from {source})", param=error.param) from None


def is_debug() -> bool:
    """Whether `STOKER_DEBUG` asks for tracebacks."""
    return os.environ.get(f"{ENV_PREFIX}DEBUG", "") not in {"", "0"}


def _known_names() -> list[str]:
    return [*EngineSettings.model_fields, *ServerSettings.model_fields]


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names as the fields spell them; an unknown one is refused with the nearest known."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = _SINGULAR.get(name, name)
        if name not in _known_names():
            near = difflib.get_close_matches(name, _known_names(), n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(_known_names())}"
            raise InvalidRequestError(f"there is no setting {key!r}{hint}", param=key)
        named[name] = value
    return named


def _read_environment() -> dict[str, Any]:
    """What `STOKER_*` sets; a variable that names no setting is some other program's or a later version's."""
    found: dict[str, Any] = {}
    for cls in (EngineSettings, ServerSettings):
        source = EnvSettingsSource(cls)
        found |= source()
        for singular, name in _SINGULAR.items():
            value = source.env_vars.get(f"{ENV_PREFIX}{singular}".lower())
            if name in cls.model_fields and value is not None:
                found.setdefault(name, value)
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineSetupError(f"cannot read the settings file {path}: {reason}", param="config") from None
    try:
        return _canonical(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is not valid TOML: {error}", param="config") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error.message} (from {path})", param=error.param) from None


def _first_problem(error: ValidationError) -> InvalidRequestError:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, _known_names(), n=2)
        text = "there is no such setting" + (f"; did you mean {' or '.join(near)}?" if near else "")
        return InvalidRequestError(f"{name}: {text}", param=name)
    if problem["type"] != "value_error":  # ours say what they got
        text = f"{text}, got {problem['input']!r}"
    return InvalidRequestError(f"{name}: {text}", param=name)
