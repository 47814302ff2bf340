"""From settings and files to served models: how each is loaded, and what its header says it is.

Reads headers, of models, LoRA adapters (SPEC K6) and projectors (SPEC V1). Where a file is found belongs to
`stoker.models.store`, whether files fit each other to `stoker.models.adapters` and `.projector`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from stoker.backends.registry import has_scheme
from stoker.chat.tools.formats.table import format_named
from stoker.client.store.last_models import LastModels
from stoker.errors import InvalidRequestError, StokerError, error_from_info
from stoker.ipc.model import (
    AdapterSpec,
    CacheMode,
    ModelClass,
    ModelInfo,
    ModelSpec,
    Pairing,
    Policy,
    ProjectorSpec,
    Reach,
    Repeatable,
    Speculation,
)
from stoker.ipc.request import MAX_ADAPTER_SCALE
from stoker.machine.limits import DEFAULTS, TierDefaults, read_limits, tier_of
from stoker.models.adapters import AdapterHeader, check_fits, read_adapter
from stoker.models.placement import placed
from stoker.models.projector import ProjectorHeader, check_pair, read_projector
from stoker.models.seq2seq import check_one_slot, slots_of
from stoker.models.store import ModelFile, ModelStore

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader
    from stoker.models.reader import ModelDescription
    from stoker.settings import EngineSettings
    from stoker.site_settings import ModelSettings

_RESERVED = "default"
_SWITCHES = {"on": True, "off": False}
MAX_TEMPLATE_CHARS = 2**20
OutputNumber = Annotated[int, msgspec.Meta(ge=0)]
_RELEVANT = frozenset({"relevant", "is_relevant", "relevance", "yes", "true"})
"""Labels of a classifier's output, in lower case, that say that it is the score."""
H = TypeVar("H", AdapterHeader, ProjectorHeader)


class FoundModel(NamedTuple):
    """A model to serve; `info` says what its header does, until it was loaded once.

    `is_due`: it is loaded at the start, else when a request needs it.
    """

    spec: ModelSpec
    info: ModelInfo
    is_due: bool = True


class ModelSource:
    """The models that settings and names lead to.

    Args:
        settings: the engine's.
        served: what is served from the start, the default first.
        last: remembers what is loaded over the end of this program; None: nothing does.
    """

    def __init__(
        self, settings: EngineSettings, served: Sequence[FoundModel] = (), last: LastModels | None = None
    ) -> None:
        self.settings = settings
        self.served = served
        self._last = last
        self._store = ModelStore(settings.models_dir)

    def __repr__(self) -> str:
        return f"<ModelSource {self._store!r} serving {[model.spec.id for model in self.served]}>"

    @classmethod
    def read(cls, settings: EngineSettings) -> ModelSource:
        """With the models that the settings name, or those that the last program had where they are restored.

        Measures the machine and reads the files' headers.

        Raises:
            ModelNotFoundError: a name or path leads nowhere.
            ModelFileError: a file is broken, or an adapter or the projector fits none of the models.
            InvalidRequestError: two models would be served under one name.
            UnsupportedError: the settings ask for more slots than any of the models can have.
        """
        last = LastModels(settings.run_dir)
        if settings.restore and not (settings.models or settings.model_tables):
            settings = settings.replace(models=last.read())
        source = cls(settings, last=last)
        source.served = source._read_served()
        return source

    @cached_property
    def defaults(self) -> TierDefaults:
        """What holds on this machine where no setting says otherwise (SPEC M2); measures the machine."""
        return DEFAULTS[tier_of(read_limits(self.settings.memory_limit).effective_bytes)]

    @property
    def max_tokens(self) -> int | None:
        """Tokens an answer may have where its request does not say; None: until the context is full."""
        given = self.settings.default_max_tokens
        return self.defaults.max_tokens if given is None else given or None

    def note_loaded(self, paths: Sequence[str]) -> None:
        """Files of the models that are ready now, the default first."""
        if self._last is not None:
            self._last.note(paths)

    def find(self, name: str, reach: Reach = Reach.LOCAL) -> FoundModel:
        """A listed model, one below the models folder or, within `reach`, a fake; reads its header.

        Raises:
            ModelNotFoundError: there is no such model, or it lies outside the models folder.
            ModelError: its file is broken or holds no language model.
        """
        is_free = reach is Reach.ANY and has_scheme(name)
        return self.described(
            self._store.resolve_scheme(name) if is_free else self._store.resolve_listed(name)
        )

    def _read_listed(self) -> tuple[dict[str, FoundModel], list[ModelFile]]:
        """Every model by its id, the default first, and the files of those that have no table."""
        settings, tables = self.settings, self.settings.model_tables
        found: dict[str, FoundModel] = {}
        files: list[ModelFile] = []
        for ref in settings.models or (() if tables else (None,)):
            if ref in tables:
                found[ref] = self._declared(ref, tables[ref])._replace(is_due=True)
                continue
            file = self._store.resolve(ref)
            files.append(file)
            if file.id in found:
                paths = f"{found[file.id].spec.path} and {file.path}"
                text = f"two models would be served as {file.id!r}: {paths}"
                raise InvalidRequestError(text, param="models")
            found[file.id] = self.described(file)
        for name, table in tables.items():
            if name not in found:
                found[name] = self._declared(name, table)
        return found, files

    def _read_served(self) -> list[FoundModel]:
        settings = self.settings
        found, files = self._read_listed()
        for param, named in (
            ("chat_template", self._templates),
            ("rerank_output", self._score_outputs),
            ("placement", settings.placement),
        ):
            if strange := set(named) - {*found, ""}:
                text = f"{param}: no model {min(strange)!r} is served; there are: {', '.join(found)}"
                raise InvalidRequestError(text, param=param)
        if settings.draft_model:
            default = next(iter(found))
            found[default] = self._drafted(found[default], settings.draft_model, "draft_model")
        if "slots" in settings.model_fields_set:
            self._check_slots(list(found.values()))
        for model, adapters in adapters_by_model(settings.lora, files).items():
            found[model] = _adapted(found[model], adapters)
        for model, projector in projector_by_model(settings.mmproj, files).items():
            found[model] = _seeing(found[model], projector)
        _check_names(found.values())
        return list(found.values())

    def _declared(self, name: str, table: ModelSettings) -> FoundModel:
        """The model of a table of the settings.

        Raises:
            StokerError: as `read`; `param` is such as `models.NAME.file`.
        """
        place = f"models.{name}"
        with _placed_at(f"{place}.file"):
            file = dataclasses.replace(self._store.resolve(table.file or name), id=name)
        with _placed_at(f"{place}.chat_template") if table.chat_template else nullcontext():
            found = ModelSource(self._as_of(name, table)).described(file)
        if table.tool_format:
            format_named(table.tool_format, f"{place}.tool_format")
        spec = replace(
            found.spec,
            aliases=table.aliases,
            best_priority=table.priority,
            sampling_defaults=table.sampling or None,
            tool_format=table.tool_format,
            is_pinned=table.pinned,
        )
        found = FoundModel(spec, found.info.served_as(spec), table.load or table.pinned)
        if table.draft_model:
            found = self._drafted(found, table.draft_model, f"{place}.draft_model")
        with _placed_at(f"{place}.lora"):
            for adapters in adapters_by_model(table.lora, [file]).values():
                found = _adapted(found, adapters)
        with _placed_at(f"{place}.mmproj"):
            for projector in projector_by_model(table.mmproj, [file]).values():
                found = _seeing(found, projector)
        return found

    def _drafted(self, found: FoundModel, ref: str, place: str) -> FoundModel:
        """The model with its draft model, unless it has one already."""
        if found.spec.draft_path:
            return found
        with _placed_at(place):
            return found._replace(spec=replace(found.spec, draft_path=self._store.resolve(ref).path))

    def _as_of(self, name: str, table: ModelSettings) -> EngineSettings:
        """The settings as they are for the model of that table."""
        given: dict[str, Any] = table.given_per_model()
        own = {"chat_template": table.chat_template, "rerank_output": table.rerank_output}
        for setting, value in own.items():
            if value is not None:
                others = [each for each in getattr(self.settings, setting) if not each.startswith(f"{name}=")]
                given[setting] = (f"{name}={value}", *others)
        if placement := self.settings.placement.get(name):
            given = placement.given_placement() | given
        return self.settings.replace(**given, placement={})

    def _check_slots(self, found: list[FoundModel]) -> None:
        """Slots that were asked for are refused where no served model can have them."""
        if {model.info.model_class for model in found} == {ModelClass.ENCODER_DECODER}:
            check_one_slot(found[0].spec.id, self.settings.slots)

    def described(self, file: ModelFile) -> FoundModel:
        """A file that can be loaded, as the settings want it."""
        settings, found = self.settings, file.description
        assert found is not None, f"{file!r} cannot be loaded"
        keep_alive = settings.keep_alive
        spec = ModelSpec(
            id=file.id,
            path=file.path,
            num_slots=slots_of(file.model_class, settings.slots),
            n_ctx=settings.ctx_size,
            num_cells=settings.kv_cells or 0,
            n_batch=settings.n_batch or 0,
            num_threads=settings.threads,
            max_queue=settings.max_queue,
            policy=Policy(settings.policy),
            target_step_ms=settings.target_step_ms,
            max_step_ms=settings.max_step_ms,
            background_patience_s=settings.background_patience_s,
            park_bytes=settings.park_bytes,
            cache_mode=CacheMode(settings.cache_mode),
            keep_alive_s=self.defaults.keep_alive_s if keep_alive is None else keep_alive,
            repeatable=Repeatable(settings.repeatable),
            speculation=Speculation(settings.speculation),
            chat_template=self._template_of(file.id, found),
            score_output=_score_output(found.outputs, self._score_outputs, file.id),
            thinking=_SWITCHES.get(settings.thinking or "", settings.thinking),
        )
        for placement in (settings, settings.placement.get(file.id)):
            spec = spec if placement is None else placed(spec, placement.given_placement())
        return FoundModel(spec, _info(spec, found))

    def _template_of(self, model: str, found: ModelDescription) -> str | None:
        if found.model_class is ModelClass.ENCODER:
            return None
        return self._templates.get(model) or found.chat_template or self._templates.get("")

    @cached_property
    def _templates(self) -> dict[str, str]:
        """The settings' chat templates by the id of their model; "": of models that have none."""
        named = by_model(self.settings.chat_template, "chat_template")
        return {model: read_template(path) for model, path in named.items()}

    @cached_property
    def _score_outputs(self) -> dict[str, int]:
        """Which output is the score, by the id of its model; "": of rerankers that do not say."""
        named = by_model(self.settings.rerank_output, "rerank_output")
        return {model: _number_of_output(text) for model, text in named.items()}


@contextmanager
def _placed_at(place: str) -> Iterator[None]:
    """Errors of the block name a key of the settings file."""
    try:
        yield
    except StokerError as error:
        text = error.message.removeprefix(f"{place.rpartition('.')[2]}: ")
        raise error_from_info(replace(error.info(), message=f"{place}: {text}", param=place)) from None


def _adapted(found: FoundModel, adapters: tuple[AdapterSpec, ...]) -> FoundModel:
    spec, info, is_due = found
    return FoundModel(replace(spec, adapters=adapters), replace(info, adapters=adapters), is_due)


def _seeing(found: FoundModel, projector: ProjectorSpec) -> FoundModel:
    spec, info, is_due = found
    seeing = replace(
        info,
        pairing=str(Pairing.READY),
        has_vision=projector.has_vision,
        hears_hz=projector.hears_hz,
        hearing=projector.hearing,
    )
    return FoundModel(replace(spec, projector=projector), seeing, is_due)


def _check_names(found: Iterable[FoundModel]) -> None:
    """Raises InvalidRequestError where two models would be served under one name."""
    owners = {_RESERVED: "the first model"}
    for spec, _, _ in found:
        kinds = (("", [spec.id]), (".aliases", spec.aliases), (".lora", [one.name for one in spec.adapters]))
        for kind, names in kinds:
            for name in names:
                place = f"models.{spec.id}{kind}"
                if (other := owners.setdefault(name, place)) != place:
                    text = f"{place}: {name!r} is a name of {other} too"
                    raise InvalidRequestError(text, param=place)


def _info(spec: ModelSpec, found: ModelDescription) -> ModelInfo:
    asked = spec.most_tokens or found.n_ctx_train
    return replace(
        ModelInfo.bare(spec),
        n_ctx=min(asked, found.n_ctx_train) if found.has_fixed_context else asked,
        n_ctx_train=found.n_ctx_train,
        model_class=str(found.model_class),
        architecture=found.architecture,
        description=found.name,
        num_params=found.num_params,
        size_bytes=found.size_bytes,
        n_vocab=found.n_vocab,
        bos_text=found.bos_text,
        eos_text=found.eos_text,
        pooling=found.pooling,
        pairing=found.pairing,
        n_embd=found.n_embd,
        quantisation=found.quantisation,
    )


# ---------------------------------------------------------------- what goes with a model


def by_model(texts: Sequence[str], param: str) -> dict[str, str]:
    """What is given as VALUE, for every model that it suits, or as MODEL=VALUE, by the model's id or "".

    Raises:
        InvalidRequestError: two are given for the same.
    """
    found: dict[str, str] = {}
    for text in texts:
        model, equals, value = text.partition("=")
        model, value = (model.strip(), value) if equals else ("", text)
        if model in found:
            raise InvalidRequestError(f"{param}: two are given for {model or 'every model'}", param=param)
        found[model] = value.strip()
    return found


def read_template(path: str) -> str:
    """The chat template in a file. Raises InvalidRequestError where it cannot be read, or holds nothing."""
    try:
        with Path(_expanded(path)).open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"chat_template: {path}: {why}", param="chat_template") from None
    if not text.strip() or len(text) > MAX_TEMPLATE_CHARS:
        what = "is empty" if not text.strip() else f"has more than {MAX_TEMPLATE_CHARS} characters"
        raise InvalidRequestError(f"chat_template: {path} {what}", param="chat_template")
    return text


def _number_of_output(text: str) -> int:
    try:
        return int(msgspec.convert(text, OutputNumber, strict=False))
    except msgspec.ValidationError:
        what = f"rerank_output: {text!r} is no number of an output; they count from 0"
        raise InvalidRequestError(what, param="rerank_output") from None


def _score_output(labels: tuple[str, ...], chosen: Mapping[str, int], model: str) -> int | None:
    """Which output of a classifier is the score: the chosen one, the only one, or the relevant one."""
    if model in chosen:
        return chosen[model]
    if len(labels) <= 1:
        return 0
    relevant = [at for at, label in enumerate(labels) if label.strip().casefold() in _RELEVANT]
    return relevant[0] if len(relevant) == 1 else chosen.get("")


def parse_adapter(text: str) -> AdapterSpec:
    """The adapter of `NAME=FILE` or `NAME=FILE@SCALE`.

    Raises:
        InvalidRequestError: it is not written so, or the scale is out of range.
    """
    name, equals, path = text.partition("=")
    name = name.strip()
    if not (equals and name and path and name.isprintable()):
        raise InvalidRequestError(f"lora: {text!r} is not written NAME=FILE or NAME=FILE@SCALE", param="lora")
    file, at, scale = path.rpartition("@")
    number = _number(scale) if at else None
    if number is None:
        return AdapterSpec(name=name, path=_expanded(path))
    if not abs(number) <= MAX_ADAPTER_SCALE:
        text = f"the adapter {name!r} has the scale {scale}; -{MAX_ADAPTER_SCALE:g} to {MAX_ADAPTER_SCALE:g}"
        raise InvalidRequestError(f"lora: {text} are taken", param="lora")
    return AdapterSpec(name=name, path=_expanded(file), scale=number)


def adapters_by_model(
    texts: Sequence[str], models: Sequence[ModelFile]
) -> dict[str, tuple[AdapterSpec, ...]]:
    """The adapters of each model that has any, by its id; an adapter belongs to the first model it fits.

    Raises:
        InvalidRequestError: an adapter is malformed, or has a name that is taken.
        ModelFileError: a file is broken or fits none of the models; of those the first is named.
        UnsupportedError: it fits one that cannot be adapted.
    """
    found: dict[str, tuple[AdapterSpec, ...]] = {}
    taken = {_RESERVED, *(model.id for model in models)}
    for spec in map(parse_adapter, texts):
        if spec.name in taken:
            text = f"lora: {spec.name!r} is the name of a model or of another adapter"
            raise InvalidRequestError(text, param="lora")
        taken.add(spec.name)
        model, whole = _placed(spec, models)
        found[model.id] = (*found.get(model.id, ()), whole)
    return found


def projector_by_model(path: str | Path | None, models: Sequence[ModelFile]) -> dict[str, ProjectorSpec]:
    """The projector of the first model that it fits, by its id.

    Raises:
        ModelFileError: the file is broken, or is another model's; of those the first is named.
        UnsupportedError: it encodes neither images nor sound, or in a way that is not served.
        InvalidRequestError: no model is served that could take them.
    """
    if path is None:
        return {}
    projector = read_projector(path)
    model = _first_fitting(projector, models, check_pair)
    if model is None:
        text = f"mmproj: no model is served that {projector.path.name} could see for"
        raise InvalidRequestError(text, param="mmproj")
    return {model.id: projector.spec}


def _placed(spec: AdapterSpec, models: Sequence[ModelFile]) -> tuple[ModelFile, AdapterSpec]:
    """The first model that the adapter fits, and the spec with what its file adds."""
    if has_scheme(spec.path):
        for model in models:
            if model.header is None:
                return model, spec
    adapter = read_adapter(spec.path)
    fitting = _first_fitting(adapter, models, check_fits)
    if fitting is None:
        raise InvalidRequestError(
            f"lora: no model is served that {adapter.path.name} could adapt", param="lora"
        )
    return fitting, replace(spec, size_bytes=adapter.size_bytes, num_wide=adapter.num_wide)


def _first_fitting(
    header: H, models: Sequence[ModelFile], check: Callable[[H, GgufHeader], object]
) -> ModelFile | None:
    """The first model whose header passes the check; None: no model has one. Else raises the first error."""
    reasons: list[StokerError] = []
    for model in models:
        if model.header is None:
            continue
        try:
            check(header, model.header)
        except StokerError as error:
            reasons.append(error)
            continue
        return model
    if reasons:
        raise reasons[0]
    return None


def _number(text: str) -> float | None:
    """A finite number, or None: an @ may be part of a file's name."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _expanded(path: str) -> str:
    return path if has_scheme(path) else str(Path(path.strip()).expanduser())
