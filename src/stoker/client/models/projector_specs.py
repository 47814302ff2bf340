"""Which served model a projector belongs to (SPEC V1): from a setting and headers to specs.

How its file is read and compared is `stoker.models.projector`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import InvalidRequestError, StokerError
from stoker.models.projector import check_pair, read_projector

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stoker.ipc.model import ProjectorSpec
    from stoker.models.store import ModelFile


def projector_by_model(path: str | Path | None, models: Sequence[ModelFile]) -> dict[str, ProjectorSpec]:
    """The projector of the first model that it fits, by its id; reads the header of its file.

    Raises:
        ModelFileError: the file is broken, or is another model's; of those the first is named.
        UnsupportedError: it sees nothing, or that model sees in a way that is not served.
        InvalidRequestError: no model is served that could see.
    """
    if path is None:
        return {}
    projector = read_projector(path)
    reasons: list[StokerError] = []
    for model in models:
        if model.header is None:
            continue
        try:
            check_pair(projector, model.header)
        except StokerError as error:
            reasons.append(error)
            continue
        return {model.id: projector.spec}
    if reasons:
        raise reasons[0]
    raise InvalidRequestError(f"mmproj: no model is served that {projector.path.name} could see for")
