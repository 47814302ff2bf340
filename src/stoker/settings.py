"""Settings of the engine and the server: frozen, validated, read once.

Owns every name, default, range and help text, and is the only reader of the environment and of TOML files.
A command line says which of them it offers and takes the rest from here.

A setting has one name everywhere: `ctx_size` is `--ctx-size`, `STOKER_CTX_SIZE` and, in TOML, `ctx_size`
or `ctx-size`. `models`, `allowed_hosts` and the like may be written in the singular, as their flags are.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import platformdirs

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.setting_fields import (
    ENV_PREFIX,
    Bytes,
    CollectorUrl,
    Flag,
    FrozenSettings,
    Location,
    Names,
    Origins,
    Size,
    nearest,
    setting,
    size_setting,
)
from stoker.site_settings import (
    BY_MEMORY,
    Keys,
    KeySettings,
    ModelSettings,
    ModelTables,
    PerModelSettings,
    Placements,
    read_tables,
    shared_hashes,
)

APP = "stoker"
TABLES = frozenset({"keys", "model_tables"})
"""Settings that only a file has: tables with names."""
MAX_PIXELS = 89_478_485  # what Pillow takes without a warning
DEFAULT_URL = "http://127.0.0.1:8686"
OLLAMA_PORT = 11434
"""Where a server listens that was started without options."""

_OTHER_VARIABLES = frozenset({"STOKER_DEBUG", "STOKER_URL", "STOKER_API_KEY"})
_MISSPELT = 0.75
"""Of `difflib`: a variable so like that of a setting is a misspelt one."""
_METAVARS = {int: "N", float: "NUMBER", Path: "PATH", bool: ""}
_TOML_NAMES = {"model_tables": "models"}
_SINGULAR = {
    "model": "models",
    "allowed_host": "allowed_hosts",
    "image_root": "image_roots",
    "peer": "peers",
    "cors_origin": "cors_origins",
}


class EngineSettings(PerModelSettings):
    """How the engine process runs and what it serves; each field says what it is.

    Attributes:
        placement: where single models lie, by their id; what one leaves open is as for all.
        model_tables: `[models.NAME]` of the file; without `models` the first of them is "default".
        models: names, also of a table, or GGUF paths; the first one is "default".
        draft_model: not of the others, whose vocabularies may be other ones: their tables name their own.
        max_queue: background gets half of it.
        isolation: "process" survives any crash of native code; "thread" is for tests and small hosts.
        max_prepare_s: compiling the request's constraint included.
        watchdog_s: a step may take this long, or ten times what it is predicted to take, whichever is more.
        memory_limit: of the engine and the client together; None: what the machine, its groups and tier
            allow.
        suspend_grace_s: resuming meanwhile changes nothing.
        lora: one belongs to the first model that it fits.
        chat_template: without a model's name, of every model whose file and family have none.
        rerank_output: without a model's name, of every reranker whose labels do not say.
        image_roots: for `file:`; empty: none.
        peers: of `stoker gate` alone, as the others named so.
        request_texts: of live ones and of the last 64 that ended, whose texts are kept in memory for that.
    """

    placement: Placements = setting(
        {},
        "Where one model lies, by any key of this section; repeat for more.",
        shown="as for all",
        metavar="MODEL:KEY=VALUE",
    )
    model_tables: ModelTables = setting(
        {}, "Models by the name that they are served under, each with its own settings.", shown="none"
    )
    models: Names = setting(
        (),
        "Model to serve; repeat for more.",
        flags=("--model", "-m"),
        shown="embedded default",
        metavar="NAME|FILE",
    )
    draft_model: str | None = setting(
        None,
        "Smaller model that guesses for the default model, of the same vocabulary.",
        shown="none",
    )
    max_queue: int = setting(512, "Requests that may wait.", ge=1)
    policy: Literal["latency", "balanced", "throughput"] = setting(
        "latency", "What a step favours while somebody waits for tokens."
    )
    target_step_ms: float = setting(
        50.0, "Longest a step should take while interactive requests decode.", gt=0, le=60_000
    )
    max_step_ms: float = setting(
        400.0,
        "Longest any step should take that somebody may wait for, on the machine as it is now.",
        gt=0,
        le=60_000,
    )
    background_patience_s: float = setting(
        30.0, "Seconds background work goes without a step before it gets one in ten.", ge=0, le=86_400
    )
    park_bytes: Size = size_setting(2**30, "Host memory for states of parked requests, a model.")
    cache_ram_bytes: Size = size_setting(2**30, "Host memory for kept states; 0: none.")
    cache_disk_bytes: Size = size_setting(4 * 2**30, "Disk for kept states, under --cache-dir; 0: none.")
    prefix_store: str | None = setting(
        None,
        "Folder or URL of a store of prefixes that several machines share.",
        shown="none",
        metavar="URL",
    )
    prefix_store_bytes: Size = size_setting(64 * 2**30, "What that store may take, of all machines.")
    prefix_store_ttl_s: float = setting(
        604_800.0, "Seconds that a prefix stays in that store after it was put there.", ge=60, le=31_536_000
    )
    isolation: Literal["process", "thread"] = setting("process", "Where native code runs.")
    max_prepare_s: float = setting(30.0, "Seconds that tokenising a request may take.", gt=0)
    watchdog_s: float = setting(10.0, "Seconds of silence that end an engine.", gt=0)
    drain_s: float = setting(10.0, "Seconds that a shutdown lets running requests finish.", ge=0)
    memory_limit: Bytes | None = setting(
        None, "Bytes, or such as 4GiB.", shown="what the machine has", metavar="SIZE"
    )
    memory_margin: Size = size_setting(
        512 * 2**20, "Free memory that loading has to leave, on each device too; 0: none."
    )
    device_lease: bool = setting(
        default=True, text="Hold accelerators for this program alone; else share them with any other."
    )
    default_max_tokens: int | None = setting(
        None,
        "Tokens of an answer that does not say; 0: until the context is full.",
        shown=BY_MEMORY,
        ge=0,
        lt=2**31,
    )
    suspend_grace_s: float = setting(0.0, "Seconds between a suspend and its begin.", ge=0, le=86_400)
    lora: Names = setting(
        (),
        "LoRA adapter that requests may name; repeat for more.",
        shown="none",
        metavar="NAME=FILE[@SCALE]",
    )
    mmproj: Location | None = setting(
        None, "Projector with which the first model that it fits sees and hears."
    )
    chat_template: Names = setting(
        (),
        "Chat template, a Jinja file: of the models that bring none, or of one; repeat for more.",
        shown="the model's own",
        metavar="[MODEL=]FILE",
    )
    rerank_output: Names = setting(
        (),
        "Output of a reranker's classifier that is the score, from 0, if it has several; repeat for more.",
        shown="what its labels say",
        metavar="[MODEL=]N",
    )
    image_roots: Names = setting(
        (), "Folder that images and documents may be read from by path; repeat for more.", metavar="PATH"
    )
    allow_http_images: bool = setting(
        default=False,
        text="Fetch images and documents from public addresses.",
        flags=("--allow-http-images/--no-http-images",),
    )
    max_images: int = setting(16, "Images of one request.", ge=1, le=256)
    max_image_bytes: Bytes = size_setting(20 * 2**20, "Bytes of one encoded image.")
    max_image_pixels: int = setting(40_000_000, "Pixels of one image.", ge=64, le=MAX_PIXELS)
    image_edge: int | None = setting(
        None, "Pixels that a longer edge is shrunk to.", shown=BY_MEMORY, ge=8, le=16384
    )
    max_audio_bytes: Bytes = size_setting(25 * 2**20, "Bytes of one encoded recording.")
    max_audio_seconds: int = setting(600, "Seconds of all recordings of one request.", ge=1, le=7200)
    max_document_bytes: Bytes = size_setting(20 * 2**20, "Bytes of one document.")
    max_document_pages: int = setting(500, "Pages of one document.", ge=1, le=10_000)
    max_document_chars: int = setting(
        1_000_000, "Characters of all documents of one request.", ge=1, le=32_000_000
    )
    max_document_seconds: int = setting(20, "Seconds that one document is read for.", ge=1, le=600)
    peers: Names = setting(
        (), "URL of a machine that the gate serves with; repeat for more.", shown="none", metavar="URL"
    )
    peer_key_file: Location | None = setting(
        None, "File with an operator's key of all machines, or a line `URL KEY` for each.", shown="none"
    )
    peer_grace_s: float = setting(
        5.0, "Seconds that a machine may be suspended before its requests go on elsewhere.", ge=0, le=86_400
    )
    peer_wait_s: float = setting(
        60.0, "Seconds that a request waits for a machine that can go on with it.", ge=0, le=86_400
    )
    request_texts: bool = setting(
        default=False,
        text="Let texts of requests be read by their ids: one's own, by operators all.",
    )
    calibrated: bool = setting(
        default=True, text="Use what `stoker calibrate` found for a model, where nothing else is set."
    )
    restore: bool = setting(default=False, text="Without --model, serve what was loaded last.")
    heat_trace: Location | None = setting(None, "Recorded heat to follow instead of the machine's sensors.")
    cache_dir: Location = setting(lambda: platformdirs.user_cache_path(APP), "Folder of the cache.")
    models_dir: Location = setting(
        lambda: platformdirs.user_data_path(APP) / "models", "Folder of pulled models."
    )
    states_dir: Location = setting(
        lambda: platformdirs.user_data_path(APP) / "states", "Folder of saved states of recurrent models."
    )
    run_dir: Location = setting(
        lambda: platformdirs.user_state_path(APP), "Folder of what has to survive the program."
    )

    @property
    def default_table(self) -> str | None:
        """The table of the default model; None: that has none."""
        first = next(iter(self.models or self.model_tables), None)
        return first if first in self.model_tables else None


class ServerSettings(FrozenSettings):
    """Where the HTTP server listens and what it accepts; each field says what it is.

    Attributes:
        host: anything but loopback should come with `api_key_file`.
        port: the readiness line tells which one was picked.
        ollama_port: clients of Ollama look for it at 11434; its API answers at `port` in any case.
        ollama: the same as 11434 there.
        admin_key_file: an operator's key is good for all that an ordinary key is good for, and to load,
            unload and pin models, suspend and resume, and see the requests of all keys. None: where keys are
            asked for this is not possible over HTTP, elsewhere programs of this machine may.
        keys: what the holder of each may do; with any, every request needs a key.
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
        otel_endpoint: the traces' own path is added where the address has none. None: what
            OTEL_EXPORTER_OTLP_ENDPOINT and the like say, where they are set.
    """

    host: str = setting("127.0.0.1", "Address to bind.")
    port: int = setting(8686, "0 picks a free one.", ge=0, le=65535)
    ollama_port: int | None = setting(
        None, "Listen on this port too, where clients of Ollama look.", shown="none", ge=0, le=65535
    )
    ollama: bool = setting(default=False, text="The same at Ollama's own port, 11434.")
    api_key_file: Location | None = setting(None, "File with one accepted key a line.", shown="no key")
    admin_key_file: Location | None = setting(None, "File with one operator's key a line.", shown="none")
    keys: Keys = setting({}, "Named keys, by their hash.", shown="none")
    allow_downloads: bool = setting(
        default=False,
        text="Let `load` download without an operator's key.",
        flags=("--allow-downloads/--no-downloads",),
    )
    allowed_hosts: Names = setting(
        (), "Further name accepted in the Host header; repeat for more.", metavar="NAME"
    )
    cors_origins: Origins = setting(
        (),
        "Origin whose pages may call the server; repeat for more, * for all.",
        shown="none",
        metavar="ORIGIN",
    )
    max_body_bytes: Bytes = size_setting(32 * 2**20, "Bytes of a request; more are refused with 413.")
    max_connections: int = setting(1024, "Open connections.", ge=16, le=65_536)
    max_receiving_bytes: Bytes = size_setting(
        128 * 2**20, "Bytes of all bodies being received together, beyond 64 KiB each."
    )
    receive_timeout_s: float = setting(
        15.0, "Seconds that the head of a request may take, and a pause in its body.", gt=0, le=3600
    )
    keepalive_s: float = setting(10.0, "Seconds between comments on a stream that has nothing to say.", gt=0)
    responses_dir: Location = setting(
        lambda: platformdirs.user_state_path(APP) / "responses", "Folder of stored responses."
    )
    max_responses: int = setting(1000, "Stored responses; 0: none.", ge=0, le=100_000)
    responses_bytes: Bytes = size_setting(256 * 2**20, "Bytes of all stored responses.")
    responses_age_s: float = setting(
        30 * 86_400.0, "Seconds that a response stays stored.", gt=0, le=366 * 86_400
    )
    ui: bool = setting(default=True, text="Serve the page at /ui.")
    strict: bool = setting(
        default=False,
        text="Refuse requests with fields that their route does not know.",
    )
    follow_sleep: bool = setting(default=True, text="Suspend and resume with the machine.")
    insecure: bool = setting(default=False, text="Serve other machines without a key.", flags=("--insecure",))
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "What the log shows.")
    log_format: Literal["text", "json"] = setting("text", "Form of the log's lines.")
    log_file: Location | None = setting(None, "File of the log.", shown="stderr")
    quiet: bool = setting(default=False, text="Show warnings and errors only.", flags=("--quiet", "-q"))
    otel_endpoint: CollectorUrl | None = setting(
        None,
        "Send traces to the OpenTelemetry collector there (OTLP over HTTP).",
        shown="none",
        metavar="URL",
    )

    @property
    def second_port(self) -> int | None:
        """The port to listen on beside `port`; None: there is none."""
        return OLLAMA_PORT if self.ollama_port is None and self.ollama else self.ollama_port


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
    is_shown = field.default_factory is None and default not in (None, (), {})
    shown = f"{default:g}" if isinstance(default, float) else str(default) if is_shown else ""
    own: Any = field.json_schema_extra
    is_list = get_origin(kind) in {tuple, dict}
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


def load_settings(
    flags: Mapping[str, Any], config: Path | None, left_out: Collection[str] = ()
) -> tuple[EngineSettings, ServerSettings]:
    """Settings from flags, `STOKER_*` and a TOML file, the first that names one winning.

    Args:
        flags: by field name; None means the flag was not given.
        config: TOML file, or None.
        left_out: keys of the file that are not read, such as `port`, `models.NAME` or `models.NAME.slots`.

    Raises:
        InvalidRequestError: unknown name, wrong type or value out of range; `param` names the setting, the
            message the flag, the variable or the key and its file.
        MachineSetupError: the file cannot be read.
    """
    layers = [_given(flags), _read_environment()]
    if config is not None:
        layers.append(_read_toml(config, left_out))
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged |= layer.values
    try:
        return (
            EngineSettings(**{k: v for k, v in merged.items() if k in EngineSettings.model_fields}),
            ServerSettings(**{k: v for k, v in merged.items() if k in ServerSettings.model_fields}),
        )
    except InvalidRequestError as error:
        place = error.param or ""
        head, dot, _ = place.partition(".")
        name = "model_tables" if dot and head == "models" else head
        spelled = next((layer.spelled[name] for layer in layers if name in layer.values), head)
        text = error.message.removeprefix(f"{place}: ")
        said = f"{place}{spelled.removeprefix(head)}" if dot else spelled
        raise InvalidRequestError(f"{said}: {text}", param=place) from None


def mistakes_of(document: Mapping[str, Any]) -> Iterator[InvalidRequestError]:
    """What is wrong with each key of a settings file by itself; `param` is such as `models.NAME.slots`."""
    for key, value in document.items():
        tables: dict[str, type[KeySettings | ModelSettings]] = {"models": ModelSettings, "keys": KeySettings}
        if key in tables and isinstance(value, dict):
            for name, table in value.items():
                yield from _mistakes_of_table(key, tables[key], name, table)
            if key == "keys":
                yield from shared_hashes({name: _hash_in(table) for name, table in value.items()})
            continue
        try:
            name = _known(key)
            _check_kind(key, name, value)
            (EngineSettings if name in EngineSettings.model_fields else ServerSettings)(**{name: value})
        except InvalidRequestError as error:
            head, dot, rest = (error.param or key).partition(".")
            own = f"{key}{dot}{rest}" if head == _SINGULAR.get(key) else error.param  # as it is written there
            text = error.message.removeprefix(f"{error.param}: ")
            yield InvalidRequestError(f"{own}: {text}", param=own)


def _hash_in(table: object) -> str:
    """The hash in a table of a key; empty: it has none, or a wrong one."""
    try:
        return KeySettings(hash=table["hash"]).hash if isinstance(table, dict) else ""
    except (KeyError, InvalidRequestError):
        return ""


def _check_kind(key: str, name: str, value: object) -> None:
    """Raises InvalidRequestError for tables written `[model.NAME]`, and for truths written as texts."""
    if name == "models" and isinstance(value, dict):
        raise InvalidRequestError(f"{key}: tables of models are written [models.NAME]", param=key)
    field = (EngineSettings.model_fields | ServerSettings.model_fields).get(name)
    if field and _plain(field.annotation) is bool and not isinstance(value, bool):
        raise InvalidRequestError(f"{key}: write true or false, without quotes, not {value!r}", param=name)


def _mistakes_of_table(
    field: str, kind: type[KeySettings | ModelSettings], name: str, table: object
) -> Iterator[InvalidRequestError]:
    """Those of one table, key by key."""
    needed = {"hash": "0" * 64} if kind is KeySettings else {}
    parts: list[object] = [table]
    if isinstance(table, dict):
        parts = [{**needed, key: value} for key, value in table.items()]
        parts += [{}] if needed.keys() - table.keys() else []
    for part in parts:
        try:
            read_tables(field, kind, {name: part})
        except InvalidRequestError as error:
            yield error


def sources_of(config: Path | None) -> dict[str, str]:
    """Where each setting that is given comes from, by name: a variable, or a key and its file."""
    layers = [_read_environment()] + ([] if config is None else [_read_toml(config)])
    return {name: spelled for layer in reversed(layers) for name, spelled in layer.spelled.items()}


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


def is_tracing_asked() -> bool:
    """Whether OpenTelemetry's own variables ask for traces: they name a collector and do not turn it off."""
    named = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    is_off = (
        os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none"
    )
    return not is_off and any(os.environ.get(name, "").strip() for name in named)


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
        raise InvalidRequestError(f"there is no setting {key!r}{nearest(name, _known_names())}", param=key)
    return name


def _given(flags: Mapping[str, Any]) -> _Layer:
    values = {_known(key): value for key, value in flags.items() if value is not None}
    return _Layer(values, {name: flag_of(name).names[0].partition("/")[0] for name in values})


def _environment() -> dict[str, str]:
    return {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(ENV_PREFIX)}


def _variables() -> dict[str, str]:
    """The setting of each variable; one of a list may be in the singular too."""
    plural = {f"{ENV_PREFIX}{name.upper()}": name for name in _known_names() if name not in TABLES}
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


def settings_text(path: Path) -> str:
    """What a settings file says.

    Raises:
        MachineSetupError: it cannot be read.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineSetupError(f"cannot read the settings file {path}: {reason}", param="config") from None


def toml_problem(error: tomllib.TOMLDecodeError) -> str:
    """Why a settings file cannot be read, with its line."""
    is_both = str(error).startswith("Cannot declare ('models',")
    also = "; `models = ...` and tables [models.NAME] do not stand in one file" if is_both else ""
    return f"not valid TOML: {error}{also}"


def _read_toml(path: Path, left_out: Collection[str] = ()) -> _Layer:
    text = settings_text(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is {toml_problem(error)}", param="config") from None
    for place in left_out:
        _leave_out(found, place)
    if isinstance(found.get("models"), dict):
        found["model_tables"] = found.pop("models")
    try:
        spelled = {_known(key): f"{_TOML_NAMES.get(key, key)} in {path}" for key in found}
        for key, value in found.items():
            _check_kind(key, _known(key), value)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}", param=error.param) from None
    return _Layer({_known(key): value for key, value in found.items()}, spelled)


def _leave_out(table: dict[str, Any], place: str) -> bool:
    """Take a key out of a table, or, where it is not there, the innermost table that was to hold it.

    Returns:
        Whether there was anything to take out.
    """
    place = place.replace("-", "_")
    for key, value in table.items():
        name = key.replace("-", "_")
        if place == name or place.startswith(f"{name}."):
            rest = place[len(name) + 1 :]
            if not (rest and isinstance(value, dict) and _leave_out(value, rest)):
                del table[key]
            return True
    return False
