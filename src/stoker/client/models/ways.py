"""Who could serve a model, in which order: the rule of `--backend` and `fallback` (docs/adr/0032).

Reads what files say and what is remembered of trials; loads nothing. The engine tries them in their order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stoker.backends.registry import BACKENDS, entry_of, has_scheme, readers_of, why_not
from stoker.backends.trial.trial import remembered
from stoker.errors import StokerError, UnsupportedError, error_from_info
from stoker.models.projector import is_projector
from stoker.models.shards import is_further_shard
from stoker.models.store import ModelFile, described

if TYPE_CHECKING:
    from stoker.backends.registry import BackendEntry

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Way:
    """One backend and the file or folder that it would read."""

    entry: BackendEntry
    path: str

    def described(self, name: str, cache_dir: Path) -> ModelFile:
        """The model as its file describes it.

        Raises:
            BackendUnavailableError: the backend is not installed, or has failed with such models here.
            ModelFileError, UnsupportedError: its file is not whole, or none of a model that is served.
        """
        if missing := self.entry.missing:
            raise self.entry.unavailable(f"{' and '.join(missing)} is not installed")
        file = described(name, self.path, self.entry.name)
        assert file.description is not None, f"{file!r} was not described"
        verdict = remembered(self.entry, file.description, cache_dir) if self.entry.needs else None
        if verdict is not None and not verdict.is_ok:
            raise self.entry.unavailable(f"its trial failed: {verdict.detail}")
        return file


def check_backend(name: str) -> None:
    """Raises InvalidRequestError where there is no backend of that name, nor is it `AUTO`."""
    if name != AUTO:
        entry_of(name)


def ways_of(path: str, backend: str = AUTO) -> list[Way]:
    """The backends that read a model, the preferred one first; only that of the name where one is given.

    A folder of a model may also hold one file of another backend's: its twin.

    Raises:
        InvalidRequestError: there is no backend of that name.
        UnsupportedError: it does not read this model.
    """
    found = [Way(entry, path) for entry in readers_of(path)]
    if not has_scheme(path) and found[0].entry.reads_folder(Path(path)):
        found += [Way(entry, twin) for entry in BACKENDS if (twin := _only_file(Path(path), entry))]
        found.sort(key=lambda way: way.entry.rank_here)
    if backend == AUTO:
        return found
    name = entry_of(backend).name
    chosen = [way for way in found if way.entry.name == name]
    if not chosen:
        readers = ", ".join(way.entry.name for way in found)
        text = f"backend: {name} does not read {path}; what does: {readers}"
        raise UnsupportedError(text, param="backend")
    return chosen


def _only_file(folder: Path, entry: BackendEntry) -> str:
    """The one model file of that backend in a folder; empty: it has none, or several."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in entry.suffixes]
    models = [file for file in files if not is_further_shard(file.name) and not is_projector(file)]
    return str(models[0]) if len(models) == 1 else ""


@dataclass(frozen=True, slots=True)
class UsableWays:
    """What is left of the ways of one model.

    Attributes:
        files: as each way describes it, with the name of its backend, the first to be tried first.
        passed_over: why others that come before the first are not tried.
    """

    files: tuple[tuple[str, ModelFile], ...]
    passed_over: tuple[str, ...] = ()


def usable_ways(ways: list[Way], name: str, cache_dir: Path) -> UsableWays:
    """The ways that nothing is known to stand against.

    Raises:
        StokerError: why none is left: that of the only way, or the first with what the others say.
    """
    files: list[tuple[str, ModelFile]] = []
    errors: list[StokerError] = []
    passed_over: list[str] = []
    for way in ways:
        try:
            files.append((way.entry.name, way.described(name, cache_dir)))
        except StokerError as error:
            errors.append(error)
            log.info("%s is not served by %s: %s", way.path, way.entry.name, error.message)
            passed_over += [] if files else [why_not(way.entry.name, error)]
    if not files:
        raise together(errors)
    return UsableWays(tuple(files), tuple(passed_over))


def together(errors: list[StokerError]) -> StokerError:
    """The first of them, with what the others say."""
    first, *others = errors
    if not others:
        return first
    text = "; ".join([first.message, *(error.message for error in others)])
    return error_from_info(replace(first.info(), message=text))
