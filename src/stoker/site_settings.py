"""Settings of one model or one key: what the tables of a settings file hold, and what holds for all models.

Which text is which value belongs to `stoker.setting_fields`, where a table comes from to `stoker.settings`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BeforeValidator, Field

from stoker.errors import InvalidRequestError
from stoker.ipc.request import Sampling
from stoker.setting_fields import (
    MAX_LAYERS,
    Bytes,
    DeviceNames,
    FrozenSettings,
    GpuLayers,
    Location,
    Names,
    Parts,
    nearest,
    parse_keep_alive,
    parse_switch,
    parse_threads,
    setting,
)

MAX_SLOTS = 256  # llama_max_parallel_sequences()
BY_MEMORY = "by the machine's memory"
"""A default that the machine's tier decides."""
MAX_MODELS = 1000
HASH_PREFIX = "sha256:"
MAX_KEYS = 1000
"""Named keys: each request is compared with all of them."""
MAX_NAME_CHARS = 128
_HASH = re.compile(r"[0-9a-f]{64}")
_KEY_BYTES = 24  # 192 random bits: nobody finds the key of a hash
_PLACEMENT_END = re.compile(r",(?=[^,=]*:[^,=]*=)")
T = TypeVar("T", bound=FrozenSettings)
Class = Literal["interactive", "background"]


def new_key() -> str:
    """A key that nobody can guess."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


def hash_of(key: bytes) -> str:
    """How a settings file writes a key: whoever reads the file cannot use it."""
    return HASH_PREFIX + hashlib.sha256(key).hexdigest()


def _hash(value: object) -> object:
    if not isinstance(value, str):
        return value
    digits = value.strip().lower().removeprefix(HASH_PREFIX)
    if not _HASH.fullmatch(digits):
        raise ValueError(
            "this is no SHA-256 hash: sha256: and 64 hexadecimal digits; `stoker config key NAME` makes one"
        )
    return HASH_PREFIX + digits


def read_tables(field: str, kind: type[T], given: object) -> dict[str, T]:
    """Tables of that kind by their name.

    Raises:
        InvalidRequestError: a name, a key or a value is wrong; `param` is such as `keys.NAME.KEY`.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{field}: tables are taken, each with a name: [{field}.NAME]", param=field)
    return {
        str(name): _read_table(f"{field}.{name}", kind, str(name), table) for name, table in given.items()
    }


def _read_table(place: str, kind: type[T], name: str, table: object) -> T:
    if isinstance(table, kind):
        return table
    if not (name.strip() and name.isprintable() and len(name) <= MAX_NAME_CHARS):
        text = f"{name[:40]!r} is no name: printable, 1 to {MAX_NAME_CHARS} characters"
        raise InvalidRequestError(f"{place}: {text}", param=place)
    if not isinstance(table, Mapping):
        raise InvalidRequestError(f"{place}: a table is taken", param=place)
    try:
        return kind(**{str(key).replace("-", "_"): value for key, value in table.items()})
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}.{error.message}", param=f"{place}.{error.param}") from None


# ---------------------------------------------------------------- models


class PlacementSettings(FrozenSettings):
    """What computes a model and where it lies: of every model, of one in the file, of one load.

    Attributes:
        backend: "auto" takes the first that reads the model and works here; another name that one or none.
        gpu_layers: the output counts as one; "auto": as many as the devices can hold, else exactly so many.
        device: names or indexes as `stoker doctor` shows them; empty: all there are, "none": the CPU.
        split_mode: None: by layer where `tensor_split` is given, else on one device where it fits on one.
        tensor_split: a part for each device, in their order; empty: by their free memory.
        main_gpu: index among `device` of the one that holds all where nothing is split; None: the freest.
        cpu_moe: None: as many as have to; of models without experts this changes nothing.
        kv_type: quantised ones need flash attention; None: bf16 keys where answers are repeatable, else f16.
        kv_layout: in a pool requests share `ctx_size` tokens; in streams each may use as many, whatever
            others do, and steps of many requests are quicker.
        flash_attention: of decoders that llama.cpp computes. Quantised cells need it, and repeatable answers
            of a CPU; "off" is for one request at a time behind a long text there.
        mmap: read the file as it is needed; else whole at once.
        kv_offload: cells and attention lie where the layers do; else in host memory.
        expert_budget: of models without experts, or that are not mapped, this changes nothing; None: all of
            them where they fit, else what the rest leaves.
    """

    backend: str = setting(
        "auto",
        "What computes it; auto: the first that reads it and works here.",
        metavar="auto|llama|mlx|mnn",
        min_length=1,
        max_length=MAX_NAME_CHARS,
    )
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
        (),
        "Part of each device, such as 3,1; it is shared then.",
        shown="by their free memory",
        metavar="N,N",
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
    flash_attention: Literal["auto", "off"] = setting(
        "auto", "Attention as one operation; off: behind a long text a CPU writes one answer quicker."
    )
    kv_offload: bool = setting(default=True, text="Cells lie on the device.")
    expert_budget: Bytes | None = setting(
        None,
        "Memory for experts; the others are read from the file as they are needed.",
        shown="all where they fit, else what is left",
        metavar="SIZE",
    )

    def given_placement(self) -> dict[str, Any]:
        """The values of these fields that were given, by name; those left to the defaults are not in it."""
        given = self.model_fields_set & PlacementSettings.model_fields.keys()
        return {name: getattr(self, name) for name in given}


Thinking = Literal["on", "off", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""On, off, or how hard."""


class PerModelSettings(PlacementSettings):
    """What holds for every model where its own table does not say otherwise.

    Attributes:
        ctx_size: 0: the model's own. Where all slots share one pool of cells it has as many, unless
            `kv_cells` says otherwise.
        threads: 0 picks the number of physical cores.
        kv_cells: one request may use no more than these either.
        cache_mode: "live" keeps cells, "snapshot" states in host memory and on disk.
        keep_alive: seconds (or 30s, 10m, 2h); -1: for good; None: what the machine's tier says, 10 minutes at
            most.
        repeatable: "on" computes each answer on a CPU as if it ran alone, "off" as is quickest, "auto" the
            first where that was measured to cost less than 5 %.
        speculation: "lookup" repeats what the text repeats, "draft" asks the draft model, "auto" does both.
        thinking: fields of a request come before it.
    """

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
    cache_mode: Literal["off", "live", "snapshot", "live+snapshot"] = setting(
        "live+snapshot", "What is kept of finished work."
    )
    keep_alive: Annotated[float | None, BeforeValidator(parse_keep_alive)] = setting(
        None,
        "How long a model stays after its last request: 30s, 10m, -1.",
        shown=BY_MEMORY,
        metavar="TIME",
    )
    repeatable: Literal["auto", "on", "off"] = setting(
        "auto", "Same answer whatever runs beside it, on a CPU; auto: where that costs under 5 %."
    )
    speculation: Literal["off", "lookup", "draft", "auto"] = setting(
        "auto", "What guesses tokens ahead where that is quicker."
    )
    thinking: Annotated[Thinking | None, BeforeValidator(parse_switch)] = setting(
        None, "Whether models think first, or how hard.", shown="as the template has it"
    )

    def given_per_model(self) -> dict[str, Any]:
        """The values of these fields that were given, by name."""
        given = self.model_fields_set & PerModelSettings.model_fields.keys()
        return {name: getattr(self, name) for name in given}


def _sampling(given: object) -> object:
    """Samplers by name, checked as those of a request are."""
    if not isinstance(given, Mapping):
        raise ValueError("a table is taken, such as { temperature = 0.3 }")  # noqa: TRY004 - pydantic's
    values, mistakes = {}, []
    for name, value in given.items():
        try:
            values[name] = _sampler(str(name), value)
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return values


def _sampler(name: str, value: object) -> object:
    """The checked value of one sampler. Raises ValueError."""
    known = set(Sampling.__struct_fields__) - {"logit_bias"}
    if name not in known:
        raise ValueError(f"there is no sampler {name!r}{nearest(name, sorted(known))}")
    try:
        return getattr(msgspec.convert({name: value}, Sampling), name)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {str(error).partition(' - at ')[0]}") from None
    except InvalidRequestError as error:
        raise ValueError(error.message) from None


SamplingDefaults = Annotated[dict[str, Any], BeforeValidator(_sampling)]


class ModelSettings(PerModelSettings):
    """One model of the settings file.

    Attributes:
        file: None: what the table's name means.
        fallback: name, file or folder; it has its own template, context and estimate.
        load: at the start; else when a request needs it.
        pinned: loaded at the start, and never unloaded to make room.
        priority: the best class that its requests get.
        sampling: what a request gets that does not say, by the names of requests.
        tool_format: None: as the chat template has it.
        draft_model: None: none; of the default model that of the settings for all.
        lora, mmproj, chat_template, rerank_output: as the settings of the same names, of this model alone.
    """

    file: str | None = setting(None, "Name, GGUF file or OWNER/REPO[:FILE].", shown="the table's name")
    fallback: str | None = setting(
        None, "The same model in another form, for when this one cannot be served.", shown="none"
    )
    aliases: Names = setting((), "Further names.", shown="none")
    load: bool = setting(default=False, text="Load it at the start.")
    pinned: bool = setting(default=False, text="Load it at the start and keep it in memory.")
    priority: Class = setting("interactive", "Best class of its requests.")
    sampling: SamplingDefaults = setting({}, "Samplers of requests that do not say.", shown="the library's")
    tool_format: str | None = setting(None, "Format of tool calls.", shown="as the template has it")
    draft_model: str | None = setting(
        None,
        "Smaller model of the same vocabulary that guesses.",
        shown="none; of the default model as for all",
    )
    lora: Names = setting((), "LoRA adapters: NAME=FILE[@SCALE].", shown="none")
    mmproj: Location | None = setting(None, "Projector with which it sees and hears.", shown="none")
    chat_template: Location | None = setting(None, "Chat template, a Jinja file.", shown="its own")
    rerank_output: int | None = setting(
        None, "Output that is the score, from 0.", shown="what its labels say", ge=0
    )


def _read_models(given: object) -> dict[str, ModelSettings]:
    return read_tables("models", ModelSettings, given)


ModelTables = Annotated[dict[str, ModelSettings], BeforeValidator(_read_models), Field(max_length=MAX_MODELS)]


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


Placements = Annotated[dict[str, PlacementSettings], BeforeValidator(read_placements)]


# ---------------------------------------------------------------- keys


def _classes(value: object) -> object:
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list | tuple) and not given:
        raise ValueError("at least one class is needed: interactive, background")
    return tuple(given) if isinstance(given, list) else given


class KeySettings(FrozenSettings):
    """What the holder of one named key may do.

    Attributes:
        hash: the key itself stands nowhere.
        classes: a request that asks for none gets interactive if that is allowed, else background.
        models: by the names that they, their aliases or adapters are served under; empty: all.
        requests_per_minute: of all its clients together; None: any number.
        tokens_per_minute: of prompts, cached ones too, and of answers; None: any number.
        admin: may load, unload and pin models, suspend and resume, and see and steer requests of all keys.
    """

    hash: Annotated[str, BeforeValidator(_hash)] = setting(
        "", "SHA-256 hash of the key; `stoker config key NAME` makes one.", validate_default=True
    )
    classes: Annotated[tuple[Class, ...], BeforeValidator(_classes)] = setting(
        ("interactive", "background"), "Classes that its requests may have."
    )
    models: Names = setting((), "Models that it may use.", shown="all")
    requests_per_minute: int | None = setting(None, "Requests a minute.", shown="any", ge=1, le=10**9)
    tokens_per_minute: int | None = setting(
        None, "Tokens a minute, of prompts and answers.", shown="any", ge=1, le=10**12
    )
    admin: bool = setting(default=False, text="May operate the server.")


def _read_keys(given: object) -> dict[str, KeySettings]:
    found = read_tables("keys", KeySettings, given)
    for error in shared_hashes({name: key.hash for name, key in found.items()}):
        raise error
    return found


def shared_hashes(hashes: Mapping[str, str]) -> Iterator[InvalidRequestError]:
    """An error for each key whose hash an earlier one has too; hashes by the key's name, empty for none."""
    first: dict[str, str] = {}
    for name, value in hashes.items():
        other = first.setdefault(value, name)
        if value and other != name:
            text = f"keys.{name}.hash: it is that of keys.{other} too"
            yield InvalidRequestError(text, param=f"keys.{name}.hash")


Keys = Annotated[dict[str, KeySettings], BeforeValidator(_read_keys), Field(max_length=MAX_KEYS)]
