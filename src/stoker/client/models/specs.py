"""From settings and files to served models: how each is loaded, and what its header says it is.

Reads headers, of models, LoRA adapters (SPEC K6) and projectors (SPEC V1). Where a file is found belongs to
`stoker.models.store`, whether files fit each other to `stoker.models.adapters` and `.projector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from stoker.backends.registry import has_scheme, open_model
from stoker.chat.tools.formats.table import format_named
from stoker.client.models.beside import (
    RESERVED,
    adapters_by_model,
    by_model,
    number_of_output,
    projector_by_model,
    read_template,
    score_output,
)
from stoker.client.models.ways import AUTO, check_backend, usable_ways, ways_of
from stoker.client.store.last_models import LastModels
from stoker.errors import (
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    StokerError,
    UnsupportedError,
    error_from_info,
)
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
from stoker.machine.limits import DEFAULTS, TierDefaults, read_limits, tier_of
from stoker.models.calibration import Calibrations, settings_text
from stoker.models.placement import placed
from stoker.models.seq2seq import check_one_slot, slots_of
from stoker.models.store import ModelFile, ModelStore, described

if TYPE_CHECKING:
    from stoker.models.calibration import Calibration
    from stoker.models.reader import ModelDescription
    from stoker.settings import EngineSettings
    from stoker.site_settings import ModelSettings

_SWITCHES = {"on": True, "off": False}
_NO_OTHERS: Mapping[str, str] = MappingProxyType({})
V = TypeVar("V")


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
        self._paths: dict[str, str] = {}  # of models that were found, by id, as they were named

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
        given, path = ("", name) if is_free else self._store.locate_listed(name)
        return self.served_as(given, path)[0]

    def look_up(self, ref: str | None) -> tuple[FoundModel, ModelFile]:
        """The model of a table, a path, a listed name or None (the embedded default), and what it says.

        Raises:
            StokerError: as `read`.
        """
        table = self.settings.model_tables.get(ref) if ref is not None else None
        if ref is not None and table is not None:
            found = self._declared(ref, table)
            return found, described(ref, found.spec.path, found.spec.backend)
        found, (file, *_) = self.served_as(*self._store.locate(ref))
        return found, file

    def again(self, spec: ModelSpec, backend: str) -> FoundModel:
        """A model that was found before, as that backend would serve it, or by the rule ("auto").

        Raises:
            StokerError: as `find`; UnsupportedError: that backend does not read it.
        """
        if (table := self.settings.model_tables.get(spec.id)) is not None:
            return self._declared(spec.id, table, backend)
        path = self._paths.get(spec.id, spec.path)
        others = {name: own for name, own in self.settings.placement.items() if name != spec.id}
        settings = self.settings.replace(backend=backend, placement=others)
        return ModelSource(settings).served_as(spec.id, path)[0]

    def served_as(self, name: str, path: str, twin: str | None = None) -> tuple[FoundModel, list[ModelFile]]:
        """A model with every way to serve it, and the file of each way.

        Args:
            name: it is served under; empty: what it calls itself.
            path: of its file or folder.
            twin: name or path of the same model in another form.

        Raises:
            StokerError: why there is none.
        """
        own = self.settings.placement.get(name)
        is_own = own is not None and "backend" in own.model_fields_set
        backend = own.backend if own is not None and is_own else self.settings.backend
        ways = ways_of(path, backend)
        if twin is not None:
            with suppress(UnsupportedError):  # the backend that was asked for does not read it
                ways += ways_of(self._located_twin(twin), backend)
        usable = usable_ways(ways, name, self.settings.cache_dir)
        found = [self.described(file, each) for each, file in usable.files]
        self._paths[found[0].spec.id] = path
        return _joined(found, usable.passed_over), [file for _, file in usable.files]

    def _read_listed(self) -> tuple[dict[str, FoundModel], list[ModelFile]]:
        """Every model by its id, the default first, and the files of those that have no table."""
        settings, tables = self.settings, self.settings.model_tables
        found: dict[str, FoundModel] = {}
        files: list[ModelFile] = []
        for ref in settings.models or (() if tables else (None,)):
            if ref in tables:
                found[ref] = self._declared(ref, tables[ref])._replace(is_due=True)
                continue
            model, (file, *_) = self.served_as(*self._store.locate(ref))
            files.append(file)
            if file.id in found:
                paths = f"{found[file.id].spec.path} and {file.path}"
                text = f"two models would be served as {file.id!r}: {paths}"
                raise InvalidRequestError(text, param="models")
            found[file.id] = model
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

    def _declared(self, name: str, table: ModelSettings, backend: str | None = None) -> FoundModel:
        """The model of a table of the settings, as they say or as that backend serves it.

        Raises:
            StokerError: as `read`; `param` is such as `models.NAME.file`.
        """
        place = f"models.{name}"
        source = ModelSource(self._as_of(name, table))
        if backend is not None:
            source.settings = source.settings.replace(backend=backend)
        elif "backend" in table.model_fields_set:
            with _placed_at(f"{place}.fallback"):
                source._check_twin(table)
        else:
            check_backend(source.settings.backend)  # of all models: wrong at its own place
        with _placed_at(f"{place}.chat_template") if table.chat_template else nullcontext():
            source._own_files()
        own = {"fallback": f"{place}.fallback"}
        if backend is not None:  # of the call, not of the file
            own["backend"] = "backend"
        elif "backend" in table.model_fields_set:
            own["backend"] = f"{place}.backend"
        with _placed_at(f"{place}.file", own):
            found, files = source._with_twin(name, table)
        if table.tool_format:
            format_named(table.tool_format, f"{place}.tool_format")

        def declared(spec: ModelSpec) -> ModelSpec:
            return replace(
                spec,
                aliases=table.aliases,
                best_priority=table.priority,
                sampling_defaults=table.sampling or None,
                tool_format=table.tool_format,
                is_pinned=table.pinned,
            )

        spec = found.spec.on_all_ways(declared)
        found = FoundModel(spec, found.info.served_as(spec), table.load or table.pinned)
        if table.draft_model:
            found = self._drafted(found, table.draft_model, f"{place}.draft_model")
        with _placed_at(f"{place}.lora"):
            found = _fitted(found, files, lambda file: adapters_by_model(table.lora, [file]), _adapted)
        with _placed_at(f"{place}.mmproj"):
            return _fitted(found, files, lambda file: projector_by_model(table.mmproj, [file]), _seeing)

    def _own_files(self) -> None:
        """Read what goes with models; raises InvalidRequestError where that cannot be read."""
        assert self._templates is not None
        assert self._score_outputs is not None

    def _check_twin(self, table: ModelSettings) -> None:
        """Raises InvalidRequestError where the table's own backend rules its fallback out."""
        if table.fallback is None or self.settings.backend == AUTO:
            return
        try:
            ways_of(self._store.locate(table.fallback)[1], self.settings.backend)
        except UnsupportedError as error:
            text = f"{error.message.removeprefix('backend: ')}; with backend auto it is taken"
            raise InvalidRequestError(text, param="fallback") from None

    def _with_twin(self, name: str, table: ModelSettings) -> tuple[FoundModel, list[ModelFile]]:
        """The model of a table, or its fallback where its file is not there or not whole."""
        try:
            path = self._store.locate(table.file or name)[1]
        except (ModelNotFoundError, ModelFileError) as error:
            if table.fallback is None:
                raise
            twin = self._located_twin(table.fallback)
            found, files = self.served_as(name, twin)
            return _after(found, error.message), files
        return self.served_as(name, path, table.fallback)

    def _located_twin(self, ref: str) -> str:
        """Where a fallback lies; errors name the key."""
        with _placed_at("fallback"):
            return self._store.locate(ref)[1]

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

    def described(self, file: ModelFile, backend: str = "") -> FoundModel:
        """A file that can be loaded, as the settings want it, by that backend alone."""
        settings, found = with_calibration(self.settings, file.id, file.path)[0], file.description
        assert found is not None, f"{file!r} cannot be loaded"
        keep_alive = settings.keep_alive
        spec = ModelSpec(
            id=file.id,
            path=file.path,
            backend=backend,
            quantisation=found.quantisation,
            num_slots=min(slots_of(file.model_class, settings.slots), found.max_slots or settings.slots),
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
            score_output=score_output(found.outputs, self._score_outputs, file.id),
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
        return {model: number_of_output(text) for model, text in named.items()}


def with_calibration(
    settings: EngineSettings, model: str, path: str
) -> tuple[EngineSettings, Calibration | None, dict[str, str]]:
    """The settings with what `stoker calibrate` found for a model, where nothing was set (SPEC R16).

    Returns:
        The settings, what was found (None: nothing, or it is not to be used), and the names of settings that
        it does not change, each with why.
    """
    placement = settings.placement.get(model)
    names = settings.model_fields_set | (placement.model_fields_set if placement else set())
    given = {name: f"{name} is set" for name in names}
    own = placement if placement and "flash_attention" in placement.model_fields_set else settings
    if own.flash_attention == "off":
        given.setdefault("kv_type", "flash_attention is off")  # which the quantised ones that are tried need
    kept = Calibrations(settings.cache_dir)
    if not settings.calibrated or has_scheme(path) or not kept.has_any():
        return settings, None, given
    found = kept.find(path, open_model(path).fingerprint)
    if found is None:
        return settings, None, given
    changes: dict[str, Any] = found.used(given)
    return settings.replace(**changes), found, given


def calibration_texts(settings: EngineSettings, file: ModelFile) -> tuple[str, ...]:
    """What was found for a model and what of it holds, for people; empty: it was never calibrated."""
    _, found, given = with_calibration(settings, file.id, file.path)
    if found is None:
        is_outdated = settings.calibrated and Calibrations(settings.cache_dir).is_outdated(file.path)
        text = "calibrated before its file, the build or the machine changed, which does not hold any more"
        return (f"{text}: stoker calibrate {file.id}",) if is_outdated else ()
    texts = [f"calibrated: {settings_text(found.used(given))}"]
    if used := found.used(given):
        texts = [f"calibrated: {settings_text(used)}, {found.gain:.0%} less time in its trials"]
    overridden = found.overridden(given).items()
    texts += [f"calibrated {name} {value} does not hold: {given[name]}" for name, value in overridden]
    return tuple(texts)


@contextmanager
def _placed_at(place: str, others: Mapping[str, str] = _NO_OTHERS) -> Iterator[None]:
    """Errors of the block name a key of the settings file: `place`, or what `others` have for their own."""
    try:
        yield
    except StokerError as error:
        at = others.get(error.param or "", place)
        text = error.message.removeprefix(f"{at.rpartition('.')[2]}: ")
        raise error_from_info(replace(error.info(), message=f"{at}: {text}", param=at)) from None


def _joined(found: Sequence[FoundModel], passed_over: tuple[str, ...]) -> FoundModel:
    """The first way to serve a model, with the others as its fallbacks."""
    (spec, info, is_due), *others = found
    spec = replace(spec, fallbacks=tuple(other.spec for other in others), passed_over=passed_over)
    return FoundModel(spec, replace(info, backend_reason="; ".join(passed_over)), is_due)


def _after(found: FoundModel, why: str) -> FoundModel:
    """The same, with why what comes before it does not serve."""
    passed_over = (why, *found.spec.passed_over)
    info = replace(found.info, backend_reason="; ".join(passed_over))
    return FoundModel(replace(found.spec, passed_over=passed_over), info, found.is_due)


def _fitted(
    found: FoundModel,
    files: Sequence[ModelFile],
    fitting: Callable[[ModelFile], Mapping[str, V]],
    fit: Callable[[FoundModel, V], FoundModel],
) -> FoundModel:
    """The model with what goes with it on each way whose file it fits. Raises where it fits none of them."""
    ways, errors = list(found.spec.ways), []
    info = found.info
    for at, file in enumerate(files):
        try:
            for given in fitting(file).values():
                way = fit(FoundModel(ways[at], info if at == 0 else ModelInfo.bare(ways[at])), given)
                ways[at], info = way.spec, way.info if at == 0 else info
        except StokerError as error:
            errors.append(error)
    if len(errors) == len(files):
        raise errors[0]
    return FoundModel(replace(ways[0], fallbacks=tuple(ways[1:])), info, found.is_due)


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
    owners = {RESERVED: "the first model"}
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
        pairing_reason=found.pairing_reason,
        gives_states=found.gives_states,
        n_embd=found.n_embd,
        quantisation=found.quantisation,
    )
