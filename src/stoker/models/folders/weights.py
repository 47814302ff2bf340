"""The files of weights of a model's folder: which there are to be, and whether each is there and whole."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stoker.errors import ModelFileError
from stoker.models.folders.json_file import MAX_INDEX_BYTES, broken, read_object
from stoker.models.folders.tensors import FolderTensor, read_tensors
from stoker.models.shards import PARTIAL_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
"""What MLX's models are read from."""
MAX_FILES = 4096
_SHARD = re.compile(r"(?P<stem>model.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_NAMED = 3
_FOREIGN = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.mnn", "*.onnx")


def refuse_unfinished(folder: Path) -> None:
    """Raise ModelFileError where something in the folder is a download that has not finished."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(PARTIAL_SUFFIXES):
            raise broken(folder, f"its download has not finished (marker {path.name}); pull it again")


def read_weights(folder: Path) -> tuple[tuple[Path, ...], Mapping[str, FolderTensor]]:
    """Files of weights in the order of their names, and all their tensors.

    Raises:
        ModelFileError: a file is missing, truncated or corrupt, or the index says something else than it.
    """
    index = folder / INDEX
    places = _read_index(index) if index.exists() else {}
    paths = [folder / name for name in sorted(set(places.values()))] or _unlisted(folder)
    if len(paths) > MAX_FILES:
        raise broken(folder, f"it has {len(paths)} files of weights, at most {MAX_FILES} are taken")
    if missing := [path.name for path in paths if not path.exists()]:
        raise _missing(folder, missing)
    found: dict[str, FolderTensor] = {}
    for path in paths:
        tensors = read_tensors(path)
        if twice := found.keys() & tensors.keys():
            raise broken(path, f"the tensor {min(twice)[:64]!r} is in another file too")
        found |= tensors
    _check_places(index, places, found)
    return tuple(paths), found


def _read_index(index: Path) -> dict[str, str]:
    """Names of files by tensor."""
    places = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise broken(index, "it has no weight_map")
    for name in set(map(str, places.values())):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or "\0" in name:
            raise broken(index, f"it names {name[:64]!r}, which is no safetensors file of the folder")
    if not all(isinstance(name, str) for name in places.values()):
        raise broken(index, "its weight_map names what is no file")
    return places


def _unlisted(folder: Path) -> list[Path]:
    """Files of a folder that has no index."""
    paths = sorted(folder.glob(WEIGHTS))
    for path in paths:
        match = _SHARD.fullmatch(path.name)
        count = int(match["count"]) if match else 0
        if match and 0 < count <= MAX_FILES:
            names = [
                f"{match['stem']}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)
            ]
            if missing := [name for name in names if not (folder / name).exists()]:
                raise _missing(folder, missing)
    if not paths:
        other = next((each.name for kind in _FOREIGN for each in sorted(folder.glob(kind))), "")
        text = f"; it holds {other}, which is not read" if other else ""
        raise broken(folder, f"no weights: there is neither {INDEX} nor {WEIGHTS}{text}")
    return paths


def _missing(folder: Path, names: list[str]) -> ModelFileError:
    """Which files are; `missing` is the first of them."""
    listed = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    text = f"{folder}: incomplete: {len(names)} of its files of weights missing ({listed}); pull it again"
    return ModelFileError(text, path=str(folder), missing=str(folder / names[0]))


def _check_places(index: Path, places: Mapping[str, str], found: Mapping[str, FolderTensor]) -> None:
    """What a file has beside what the index names does no harm."""
    for name, file in places.items():
        tensor = found.get(name)
        if tensor is None or tensor.file != file:
            raise broken(index, f"it says that {file} holds the tensor {name[:64]!r}, which it does not")
