"""Names of models as clients of Ollama write them, and as they are listed for them.

`NAME:latest` is NAME, upper and lower case are one, `OWNER/REPO[:FILE|:QUANTISATION]` is what was pulled by
that name, with or without `hf.co/` before it; any other tag is part of a model's own name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import ModelNotFoundError
from stoker.server.inbound.body import Body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

    from stoker.ipc.model import ModelInfo
    from stoker.runtime import Runtime

LATEST = ":latest"
_HUBS = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_SUFFIX = ".gguf"  # of what is a file
SAFETENSORS = "safetensors"
"""What the folder of a repository is asked for by, where it has files of other kinds too."""
_SHOWN_CHARS = 200  # of a name, in errors


def listed_name(info: ModelInfo) -> str:
    """The name that a list has for a model: clients expect every one of them to have a tag."""
    return info.asked_as if ":" in info.asked_as else info.asked_as + LATEST


def own_name(name: str) -> str:
    """The name without what stands for nothing: the hub's address before it, `:latest` behind it."""
    return _HUBS.sub("", name.strip(), count=1).removesuffix(LATEST)


class OllamaBody(Body):
    """A body that names a model as clients of Ollama do; `asked_model` looks it up."""

    @property
    def own_models(self) -> list[str | None]:
        """None by the names that other routes know."""
        return []


def offered(runtime: Runtime) -> Iterator[ModelInfo]:
    """What can be asked for: every served model, the default one first, each followed by its adapters.

    One whose file was deleted is none of them.
    """
    for info in runtime.models:
        if not _is_gone(info):
            yield info
            yield from (msgspec.structs.replace(info, adapter=adapter.name) for adapter in info.adapters)


def asked_model(runtime: Runtime, request: Request, name: str) -> ModelInfo:
    """The served model that a name in a body means.

    Raises:
        KeyForbidsError: the key of the request may not use it.
        StokerError: see `resolved`.
    """
    info = resolved(runtime, name)
    request.state.identity.permit.check_model(info)
    return info


def resolved(runtime: Runtime, name: str) -> ModelInfo:
    """The served model that a name means.

    Raises:
        ModelNotFoundError: none; in Ollama's words, which clients look for.
        ModelError: it has failed for good.
        NotReadyError: nothing was loaded yet.
    """
    known = {info.asked_as.casefold(): info.asked_as for info in offered(runtime)}
    for candidate in (name, own_name(name)):
        with suppress(ModelNotFoundError):
            info = runtime.resolve(known.get(candidate.casefold(), candidate))
            if not _is_gone(info):
                return info
    for info in runtime.models:
        if _is_pulled_as(info, own_name(name)) and not _is_gone(info):
            return runtime.resolve(info.id)
    raise ModelNotFoundError(f"model '{name[:_SHOWN_CHARS]}' not found", param="model")


def _is_gone(info: ModelInfo) -> bool:
    """Whether its file was deleted."""
    path = Path(info.path)
    if path.is_dir():  # other files of it may be there still
        return not (path / "config.json").exists()
    return (path.suffix.lower() == _SUFFIX or path.is_absolute()) and not path.exists()


def _is_pulled_as(info: ModelInfo, reference: str) -> bool:
    """Whether the model's file is what the hub has under that reference."""
    repository, _, selector = reference.casefold().partition(":")
    parts = Path(info.path.casefold()).parts
    if "/".join(parts[-2:]) == repository:  # a folder
        return selector in {"", SAFETENSORS}
    places = {f"{owner}/{repo}" for owner, repo in pairwise(parts[:-1])}
    if repository.count("/") != 1 or repository not in places:
        return False
    file = parts[-1]
    is_quantised = re.search(rf"(?<![a-z0-9]){re.escape(selector)}(?![a-z0-9_])", file) is not None
    return not selector or is_quantised or file == selector.rpartition("/")[2]
