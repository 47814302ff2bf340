"""Completeness of a model on disk (SPEC R7): no partial marker, every shard present and in its place.

A split model is `NAME-00001-of-00003.gguf` and so on; its first shard carries the metadata.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stoker.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stoker.models.gguf.bounded_file import GgufArray, Scalar

PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_SHARDS = 4096


def refuse_partial(path: Path) -> None:
    """Raise ModelFileError for a path that is missing, no file, or a download that has not finished."""
    if path.is_dir():
        if any(path.glob("*.gguf")):
            raise _error(path, "a folder; give the GGUF file in it")
        raise _error(path, "a folder in which there is no model: no GGUF file, no safetensors and no llm.mnn")
    if not path.exists():
        raise _error(path, "no such file")
    for suffix in PARTIAL_SUFFIXES:
        marker = path if path.name.endswith(suffix) else path.with_name(path.name + suffix)
        if marker.exists():
            raise _error(path, f"its download has not finished (marker {marker.name}); pull it again")


def shard_names(name: str) -> tuple[str, ...]:
    """File names of all shards that the name of one tells of; the name alone when it tells of none."""
    match = SHARD_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= _MAX_SHARDS:
        return (name,)
    count, suffix = int(match["count"]), name[-len(".gguf") :]
    return tuple(f"{match['stem']}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1))


def is_further_shard(name: str) -> bool:
    """Whether this is the name of a shard that is not the first."""
    match = SHARD_NAME.fullmatch(name)
    return match is not None and int(match["number"]) != 1


def refuse_further(path: Path) -> None:
    """Raise ModelFileError for a shard that is not the first; names the one that is."""
    if is_further_shard(path.name):
        raise _error(path, f"not the first shard; give {shard_names(path.name)[0]}")


def complete(path: Path, metadata: Mapping[str, Scalar | GgufArray]) -> tuple[Path, ...]:
    """The files of the model whose first (or only) file this is; each one is there and finished.

    Raises:
        ModelFileError: a shard is missing or unfinished; names it.
    """
    names = shard_names(path.name)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 0:
        raise _error(path, "split.count is not a number")
    if metadata.get("split.no", 0) != 0:
        raise _error(path, f"says it is shard number {metadata['split.no']}, not the first")
    if count > 1 and len(names) != count:
        raise _error(path, f"shard 1 of {count} has to be named NAME-00001-of-{count:05d}.gguf")
    if count <= 1:
        return (path,)
    paths = (path, *(path.with_name(name) for name in names[1:]))
    for shard in paths[1:]:
        if not shard.exists():
            raise _error(path, f"incomplete: shard {shard.name} is missing", missing=str(shard))
        refuse_partial(shard)
    return paths


def check_number(path: Path, metadata: Mapping[str, Scalar | GgufArray], number: int) -> None:
    """Raise ModelFileError unless a further shard says that it is number `number` (from 0)."""
    found = metadata.get("split.no")
    if found != number:
        raise _error(path, f"says it is shard number {found}, its name says {number}")


def check_tensor_count(path: Path, metadata: Mapping[str, Scalar | GgufArray], names: Sequence[str]) -> None:
    """Raise ModelFileError unless the shards hold as many tensors as the first says, each once."""
    expected = metadata.get("split.tensors.count")
    if expected != len(names):
        raise _error(path, f"its shards hold {len(names)} tensors, split.tensors.count says {expected}")
    if len(set(names)) != len(names):
        raise _error(path, "a tensor occurs in two shards")


def _error(path: Path, reason: str, missing: str = "") -> ModelFileError:
    return ModelFileError(f"{path}: {reason}", path=str(path), missing=missing)
