"""Which LoRA adapters belong to which served model (SPEC K6): from settings and headers to specs.

An adapter belongs to the first model that it fits. How its file is read and compared is
`stoker.models.adapters`' business.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError, StokerError
from stoker.ipc.model import AdapterSpec
from stoker.ipc.request import MAX_ADAPTER_SCALE
from stoker.models.adapters import AdapterHeader, check_fits, read_adapter
from stoker.models.store import FAKE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.models.store import ModelFile

_RESERVED = "default"


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
    """The adapters of each model that has any, by its id; reads the headers of their files.

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


def _placed(spec: AdapterSpec, models: Sequence[ModelFile]) -> tuple[ModelFile, AdapterSpec]:
    """The first model that it fits, and what its file adds to the spec."""
    if spec.path.startswith(FAKE_PREFIX):
        for model in models:
            if model.header is None:
                return model, spec
    adapter = read_adapter(spec.path)
    reasons: list[StokerError] = []
    for model in models:
        if model.header is None:
            continue
        try:
            check_fits(adapter, model.header)
        except StokerError as error:
            reasons.append(error)
            continue
        return model, _measured(spec, adapter)
    if reasons:
        raise reasons[0]
    raise InvalidRequestError(f"lora: no model is served that {adapter.path.name} could adapt", param="lora")


def _measured(spec: AdapterSpec, adapter: AdapterHeader) -> AdapterSpec:
    return AdapterSpec(
        name=spec.name,
        path=spec.path,
        scale=spec.scale,
        size_bytes=adapter.size_bytes,
        num_wide=adapter.num_wide,
    )


def _number(text: str) -> float | None:
    """A finite number, or None: an @ may be part of a file's name."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _expanded(path: str) -> str:
    return path if path.startswith(FAKE_PREFIX) else str(Path(path.strip()).expanduser())
