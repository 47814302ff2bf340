"""From settings and a file to a served model: how it is to be loaded, and what its header says it is.

Reads headers only. Where a file is found is `stoker.models.store`'s business; that it really loads the
engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.client.models.adapter_specs import adapters_by_model
from stoker.client.models.projector_specs import projector_by_model
from stoker.client.models.registry import bare_info
from stoker.errors import InvalidRequestError
from stoker.ipc.model import (
    AdapterSpec,
    CacheMode,
    ModelClass,
    ModelInfo,
    ModelSpec,
    Policy,
    ProjectorSpec,
    Speculation,
)
from stoker.machine.profile import read_profile
from stoker.machine.tiers import DEFAULTS, TierDefaults, tier_of
from stoker.models.projector import Pairing, pairing_of
from stoker.models.seq2seq import check_one_slot, slots_of
from stoker.models.store import ModelFile, ModelStore

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader
    from stoker.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class ServedSpecs:
    """A model to serve; `info` is provisional until it was loaded once."""

    spec: ModelSpec
    info: ModelInfo


def tier_defaults(settings: EngineSettings) -> TierDefaults:
    """What holds on this machine where no setting says otherwise (SPEC M2); measures the machine."""
    return DEFAULTS[tier_of(read_profile(settings.memory_limit).effective_bytes)]


def max_tokens_of(settings: EngineSettings, defaults: TierDefaults) -> int | None:
    """Tokens an answer may have where its request does not say; None: until the context is full."""
    given = settings.default_max_tokens
    return defaults.max_tokens if given is None else given or None


def served_of(settings: EngineSettings) -> tuple[TierDefaults, list[ServedSpecs]]:
    """What holds on this machine, and what the settings name, the default first; reads the files' headers.

    Raises:
        ModelNotFoundError: a name or path leads nowhere.
        ModelFileError: a file is broken, or an adapter or the projector fits none of the models.
        InvalidRequestError: two models would be served under one name.
        UnsupportedError: the settings ask for more slots than any of the models can have.
    """
    defaults = tier_defaults(settings)
    store = ModelStore(settings.models_dir)
    found: dict[str, ServedSpecs] = {}
    files: list[ModelFile] = []
    for ref in settings.models or (None,):
        file = store.resolve(ref)
        files.append(file)
        if file.id in found:
            text = f"two models would be served as {file.id!r}: {found[file.id].spec.path} and {file.path}"
            raise InvalidRequestError(text, param="models")
        found[file.id] = served(file, settings, defaults)
        if settings.draft_model and len(found) == 1:
            found[file.id] = _guessed_for(found[file.id], store.resolve(settings.draft_model).path)
    _check_slots(settings, list(found.values()))
    adapters = adapters_by_model(settings.lora, files)
    projectors = projector_by_model(settings.mmproj, files)
    adapted = [_adapted(each, adapters.get(each.spec.id, ())) for each in found.values()]
    return defaults, [_seeing(each, projectors.get(each.spec.id)) for each in adapted]


def _guessed_for(each: ServedSpecs, draft_path: str) -> ServedSpecs:
    """The same model with the one that guesses for it."""
    return ServedSpecs(msgspec.structs.replace(each.spec, draft_path=draft_path), each.info)


def _seeing(each: ServedSpecs, projector: ProjectorSpec | None) -> ServedSpecs:
    """The same model with what it looks at pictures with."""
    if projector is None:
        return each
    return ServedSpecs(
        msgspec.structs.replace(each.spec, projector=projector),
        msgspec.structs.replace(each.info, has_vision=True, pairing=str(Pairing.READY)),
    )


def _adapted(each: ServedSpecs, adapters: tuple[AdapterSpec, ...]) -> ServedSpecs:
    """The same model with what requests may have it adapted by."""
    return ServedSpecs(
        msgspec.structs.replace(each.spec, adapters=adapters),
        msgspec.structs.replace(each.info, adapters=adapters),
    )


def _check_slots(settings: EngineSettings, found: list[ServedSpecs]) -> None:
    """Slots that somebody asked for are refused where no served model can have them."""
    is_asked = "slots" in settings.model_fields_set
    classes = {each.info.model_class for each in found}
    if is_asked and classes == {ModelClass.ENCODER_DECODER}:
        check_one_slot(found[0].spec.id, settings.slots)


def served(file: ModelFile, settings: EngineSettings, defaults: TierDefaults) -> ServedSpecs:
    """One model as the settings would have it."""
    spec = ModelSpec(
        id=file.id,
        path=file.path,
        num_slots=slots_of(file.model_class, settings.slots),
        n_ctx=settings.ctx_size,
        num_cells=settings.kv_cells or 0,
        n_batch=settings.n_batch,
        num_threads=settings.threads,
        max_queue=settings.max_queue,
        policy=Policy(settings.policy),
        target_step_ms=settings.target_step_ms,
        background_patience_s=settings.background_patience_s,
        park_bytes=settings.park_bytes,
        cache_mode=CacheMode(settings.cache_mode),
        keep_alive_s=defaults.keep_alive_s if settings.keep_alive is None else settings.keep_alive,
        speculation=Speculation(settings.speculation),
    )
    return ServedSpecs(spec, _info(spec, file))


def _info(spec: ModelSpec, file: ModelFile) -> ModelInfo:
    bare = bare_info(spec)
    n_ctx = min(spec.most_tokens or file.n_ctx_train, file.n_ctx_train)
    bare = msgspec.structs.replace(bare, n_ctx=n_ctx, n_ctx_train=file.n_ctx_train)
    return _fake_info(bare, spec, file) if file.header is None else _header_info(bare, file.header)


def _header_info(bare: ModelInfo, header: GgufHeader) -> ModelInfo:
    name = header.metadata.get("general.name")
    return msgspec.structs.replace(
        bare,
        model_class=str(header.model_class),
        architecture=header.architecture,
        description=name if isinstance(name, str) else "",
        num_params=header.num_params,
        size_bytes=header.size_bytes,
        n_vocab=header.n_vocab,
        chat_template=header.chat_template,
        bos_text=header.bos_text,
        eos_text=header.eos_text,
        pooling=header.pooling,
        pairing=str(pairing_of(header, None).pairing),
        n_embd=header.embedding_length,
    )


def _fake_info(bare: ModelInfo, spec: ModelSpec, file: ModelFile) -> ModelInfo:
    vocabulary = FakeVocabulary()
    return msgspec.structs.replace(
        bare,
        n_ctx=spec.most_tokens or file.n_ctx_train,  # it takes what it is given
        model_class=str(file.model_class),
        architecture="fake",
        n_vocab=N_VOCAB,
        chat_template=vocabulary.chat_template,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
    )
