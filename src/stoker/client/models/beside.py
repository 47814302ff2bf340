"""What settings put beside a model: chat templates, the output that is the score, adapters, projectors.

Reads their files (SPEC K6, V1); whether they fit a model `stoker.models.adapters` and `.projector` say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec.structs import replace

from stoker.backends.registry import has_scheme
from stoker.errors import InvalidRequestError, StokerError
from stoker.ipc.model import AdapterSpec, ProjectorSpec
from stoker.ipc.request import MAX_ADAPTER_SCALE
from stoker.models.adapters import AdapterHeader, check_fits, read_adapter
from stoker.models.folders.adapters import FolderAdapter, check_fits_folder, read_folder_adapter
from stoker.models.folders.folder import ModelFolder
from stoker.models.folders.weights import WEIGHTS
from stoker.models.gguf.header import GgufHeader
from stoker.models.projector import ProjectorHeader, check_pair, read_projector

if TYPE_CHECKING:
    from stoker.models.store import ModelFile

RESERVED = "default"
"""The name of the first model, whichever that is."""
MAX_TEMPLATE_CHARS = 2**20
OutputNumber = Annotated[int, msgspec.Meta(ge=0)]
_RELEVANT = frozenset({"relevant", "is_relevant", "relevance", "yes", "true"})
"""Labels of a classifier's output, in lower case, that say that it is the score."""
H = TypeVar("H", AdapterHeader, FolderAdapter, ProjectorHeader)
M = TypeVar("M", GgufHeader, ModelFolder)


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


def number_of_output(text: str) -> int:
    """The number that a text is. Raises InvalidRequestError: it is none."""
    try:
        return int(msgspec.convert(text, OutputNumber, strict=False))
    except msgspec.ValidationError:
        what = f"rerank_output: {text!r} is no number of an output; they count from 0"
        raise InvalidRequestError(what, param="rerank_output") from None


def score_output(labels: tuple[str, ...], chosen: Mapping[str, int], model: str) -> int | None:
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
    taken = {RESERVED, *(model.id for model in models)}
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
    model = _first_fitting(projector, models, check_pair, _header_of)
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
    adapter: AdapterHeader | FolderAdapter
    if Path(spec.path).is_dir():
        adapter = read_folder_adapter(Path(spec.path))
        fitting = _first_fitting(adapter, models, check_fits_folder, _folder_of)
    else:
        adapter = read_adapter(spec.path)
        fitting = _first_fitting(adapter, models, check_fits, _header_of)
    if fitting is None:
        raise InvalidRequestError(
            f"lora: no model is served that {adapter.path.name} could adapt", param="lora"
        )
    return fitting, replace(spec, size_bytes=adapter.size_bytes, num_wide=adapter.num_wide)


def _header_of(model: ModelFile) -> GgufHeader | None:
    return model.header


def _folder_of(model: ModelFile) -> ModelFolder | None:
    """The model as a folder of safetensors; None: it is none."""
    path = Path(model.path)
    return ModelFolder.open(path) if next(path.glob(WEIGHTS), None) is not None else None


def _first_fitting(
    header: H,
    models: Sequence[ModelFile],
    check: Callable[[H, M], object],
    read: Callable[[ModelFile], M | None],
) -> ModelFile | None:
    """The first model that passes the check by what is read of it; None: nothing is read of any.

    Else raises the first error.
    """
    reasons: list[StokerError] = []
    for model in models:
        if (found := read(model)) is None:
            continue
        try:
            check(header, found)
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
