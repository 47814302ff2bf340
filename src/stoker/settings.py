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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import platformdirs
from pydantic import BeforeValidator

from stoker.errors import InvalidRequestError, MachineSetupError
from stoker.setting_fields import (
    ENV_PREFIX,
    MAX_LAYERS,
    Bytes,
    DeviceNames,
    Flag,
    FrozenSettings,
    GpuLayers,
    Location,
    Names,
    Origins,
    Parts,
    Size,
    nearest,
    parse_keep_alive,
    parse_threads,
    setting,
    size_setting,
)

APP = "stoker"
MAX_SLOTS = 256  # llama_max_parallel_sequences()
MAX_PIXELS = 89_478_485  # what Pillow takes without a warning
DEFAULT_URL = "http://127.0.0.1:8686"
"""Where a server listens that was started without options."""
BY_MEMORY = "by the machine's memory"
"""A default that the machine's tier decides."""

_PLACEMENT_END = re.compile(r",(?=[^,=]*:[^,=]*=)")
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


def read_placements(given: object) -> object:
    """Placements by the id of their model, of a table of tables or of texts `MODEL:KEY=VALUE`."""
    if isinstance(given, Mapping):
        tables = dict(given)
    else:
        texts = _PLACEMENT_END.split(given) if isinstance(given, str) else given
        tables = _tables(texts if isinstance(texts, list | tuple) else [texts])
    found = {}
    for model, table in tables.items():
        if isinstance(table, PlacementSettings):
            found[model] = table
            continue
        if not isinstance(table, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic takes no other
                f"{model}: a table of settings is taken, such as gpu_layers = 20"
            )
        try:
            found[model] = PlacementSettings(
                **{name.replace("-", "_"): value for name, value in table.items()}
            )
        except InvalidRequestError as error:
            raise ValueError(f"{model}: {error.message}") from None
    return found


def _tables(texts: Sequence[object]) -> dict[str, dict[str, object]]:
    tables: dict[str, dict[str, object]] = {}
    for text in texts:
        model, colon, rest = str(text).rpartition(":")
        name, equals, value = rest.partition("=")
        if not (model and colon and equals):
            raise ValueError(f"{text!r} is not of the form MODEL:KEY=VALUE, such as small:gpu_layers=20")
        tables.setdefault(model.strip(), {})[name.strip()] = value.strip()
    return tables


class PlacementSettings(FrozenSettings):
    """Where a model's weights and cells lie: of every model, of one in the file, of one load.

    Attributes:
        gpu_layers: the output counts as one; "auto": as many as the devices can hold, else exactly so many.
        device: names or indexes as `stoker doctor` shows them; empty: all there are, "none": the CPU.
        split_mode: None: on one device where it fits on one, else by layer.
        tensor_split: a part for each device, in their order; empty: by their free memory.
        main_gpu: index among `device` of the one that holds all where nothing is split; None: the freest.
        cpu_moe: None: as many as have to; of models without experts this changes nothing.
        kv_type: quantised ones need flash attention; None: bf16 keys where answers are repeatable, else f16.
        kv_layout: in a pool requests share `ctx_size` tokens; in streams each may use as many, whatever
            others do, and steps of many requests are quicker.
        mmap: read the file as it is needed; else whole at once.
        kv_offload: cells and attention lie where the layers do; else in host memory.
    """

    gpu_layers: GpuLayers = setting(
        "auto", "Layers on the device; auto: as many as fit, all: no fewer.", metavar="auto|N|all"
    )
    device: DeviceNames = setting(
        (),
        "Device by name or index, or none; repeat for more.",
        shown="all there are",
        metavar="NAME|N",
    )
    split_mode: Literal["none", "layer", "row"] | None = setting(
        None, "How several devices share a model.", shown="none where it fits on one, else layer"
    )
    tensor_split: Parts = setting(
        (), "Part of each device, such as 3,1.", shown="by their free memory", metavar="N,N"
    )
    main_gpu: int | None = setting(
        None, "Index among --device of the one that holds all.", shown="the freest", ge=0, le=255
    )
    cpu_moe: int | None = setting(
        None,
        "Layers whose experts stay in host memory, from the first.",
        shown="as many as have to",
        ge=0,
        le=MAX_LAYERS,
    )
    kv_type: Literal["f16", "bf16", "q8_0", "q4_0"] | None = setting(
        None, "Element type of the cells.", shown="f16, bf16 keys where --repeatable needs them"
    )
    mmap: bool = setting(default=True, text="Read the file as it is needed.")
    kv_layout: Literal["auto", "pool", "streams"] = setting(
        "auto", "Cells in one pool, or each request its own; auto: its own where the device has room."
    )
    kv_offload: bool = setting(default=True, text="Cells lie on the device.")

    def given_placement(self) -> dict[str, Any]:
        """The values of these fields that were given, by name; those left to the defaults are not in it."""
        given = self.model_fields_set & PlacementSettings.model_fields.keys()
        return {name: getattr(self, name) for name in given}


Placements = Annotated[dict[str, PlacementSettings], BeforeValidator(read_placements)]


class EngineSettings(PlacementSettings):
    """How the engine process runs and what it serves; each field says what it is.

    Attributes:
        placement: where single models lie, by their id; what one leaves open is as for all.
        models: names or GGUF paths; the first one is "default".
        ctx_size: 0: the model's own. Where all slots share one pool of cells it has as many, unless
            `kv_cells` says otherwise.
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
        repeatable: "on" computes each answer on a CPU as if it ran alone, "off" as is quickest, "auto" the
            first where that was measured to cost less than 5 %.
        speculation: "lookup" repeats what the text repeats, "draft" asks `draft_model`, "auto" does both.
        suspend_grace_s: resuming meanwhile changes nothing.
        lora: one belongs to the first model that it fits.
        chat_template: without a model's name, of every model whose file and family have none.
        rerank_output: without a model's name, of every reranker whose labels do not say.
        image_roots: for `file:`; empty: none.
    """

    placement: Placements = setting(
        {},
        "Where one model lies, by any key of this section; repeat for more.",
        shown="as for all",
        metavar="MODEL:KEY=VALUE",
    )
    models: Names = setting(
        (),
        "Model to serve; repeat for more.",
        flags=("--model", "-m"),
        shown="embedded default",
        metavar="NAME|FILE",
    )
    slots: int = setting(8, "Requests that run at once.", ge=1, le=MAX_SLOTS)
    ctx_size: int = setting(
        16384,
        "Tokens that one request may use, or all in one pool of cells.",
        flags=("--ctx-size", "-c"),
        ge=0,
        lt=2**31,
    )
    threads: Annotated[int, BeforeValidator(parse_threads)] = setting(
        0,
        "CPU threads, or auto.",
        flags=("--threads", "-t"),
        shown="auto",
        metavar="auto|N",
        ge=0,
        le=1024,
    )
    n_batch: int | None = setting(
        None, "Tokens one step may carry.", shown="512, on a device 2048 or 8192", ge=1, le=65536
    )
    kv_cells: int | None = setting(None, "KV cells to allocate.", shown="as --ctx-size", ge=1, lt=2**31)
    max_queue: int = setting(512, "Requests that may wait.", ge=1)
    policy: Literal["latency", "balanced", "throughput"] = setting(
        "latency", "What a step favours while somebody waits for tokens."
    )
    target_step_ms: float = setting(
        50.0, "Longest a step should take while interactive requests decode.", gt=0, le=60_000
    )
    max_step_ms: float = setting(
        400.0, "Longest any step should take, whoever runs, on the machine as it is now.", gt=0, le=60_000
    )
    background_patience_s: float = setting(
        30.0, "Seconds background work goes without a step before it gets one in ten.", ge=0, le=86_400
    )
    park_bytes: Size = size_setting(2**30, "Host memory for states of parked requests, a model.")
    cache_mode: Literal["off", "live", "snapshot", "live+snapshot"] = setting(
        "live+snapshot", "What is kept of finished work."
    )
    cache_ram_bytes: Size = size_setting(2**30, "Host memory for kept states; 0: none.")
    cache_disk_bytes: Size = size_setting(4 * 2**30, "Disk for kept states, under --cache-dir; 0: none.")
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
    keep_alive: Annotated[float | None, BeforeValidator(parse_keep_alive)] = setting(
        None,
        "How long a model stays after its last request: 30s, 10m, -1.",
        shown=BY_MEMORY,
        metavar="TIME",
    )
    draft_model: str | None = setting(
        None, "Smaller model of the same vocabulary that guesses.", shown="none"
    )
    repeatable: Literal["auto", "on", "off"] = setting(
        "auto", "Same answer whatever runs beside it, on a CPU; auto: where that costs under 5 %."
    )
    speculation: Literal["off", "lookup", "draft", "auto"] = setting(
        "auto", "What guesses tokens ahead where that is quicker."
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
    mmproj: Location | None = setting(None, "Projector with which the first model that it fits reads images.")
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
        (), "Folder that images may be read from by path; repeat for more.", metavar="PATH"
    )
    allow_http_images: bool = setting(
        default=False,
        text="Fetch images from public addresses.",
        flags=("--allow-http-images/--no-http-images",),
    )
    max_images: int = setting(16, "Images of one request.", ge=1, le=256)
    max_image_bytes: Bytes = size_setting(20 * 2**20, "Bytes of one encoded image.")
    max_image_pixels: int = setting(40_000_000, "Pixels of one image.", ge=64, le=MAX_PIXELS)
    image_edge: int | None = setting(
        None, "Pixels that a longer edge is shrunk to.", shown=BY_MEMORY, ge=8, le=16384
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


class ServerSettings(FrozenSettings):
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

    host: str = setting("127.0.0.1", "Address to bind.")
    port: int = setting(8686, "0 picks a free one.", ge=0, le=65535)
    api_key_file: Location | None = setting(None, "File with one accepted key a line.", shown="no key")
    admin_key_file: Location | None = setting(None, "File with one operator's key a line.", shown="none")
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
    follow_sleep: bool = setting(default=True, text="Suspend and resume with the machine.")
    insecure: bool = setting(default=False, text="Serve other machines without a key.", flags=("--insecure",))
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "What the log shows.")
    log_format: Literal["text", "json"] = setting("text", "Form of the log's lines.")
    log_file: Location | None = setting(None, "File of the log.", shown="stderr")
    quiet: bool = setting(default=False, text="Show warnings and errors only.", flags=("--quiet", "-q"))


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
        raise InvalidRequestError(f"there is no setting {key!r}{nearest(name, _known_names())}", param=key)
    return name


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
