"""Which backend reads which models: the one place where backends are registered.

Importing it loads no native code, nor does opening a model; loading one does.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from stoker.errors import BackendUnavailableError, InvalidRequestError

if TYPE_CHECKING:
    from stoker.errors import StokerError
    from stoker.models.reader import ModelReader


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend and what it reads.

    Attributes:
        name: as settings and reports call it.
        module: has `open_model(path) -> ModelReader`; imports nothing native.
        scheme: how names of its models begin that are no files, such as "fake:"; empty: all are files.
        suffixes: of its files, in lower case.
        folder_files: names or glob patterns of files, any of which makes a folder one of its models.
        needs: libraries without which it computes nothing, beside those that Stoker always has.
        extra: of Stoker's package, which brings them.
        has_own_trial: its loads try a model out themselves.
        rank: its place among backends that read the same model, the lowest first.
        apple_rank: the same on Apple's own processors.
    """

    name: str
    module: str
    scheme: str = ""
    suffixes: tuple[str, ...] = ()
    folder_files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extra: str = ""
    has_own_trial: bool = False
    rank: int = 0
    apple_rank: int = 0

    @property
    def rank_here(self) -> int:
        """Its place on this machine among those that read a model."""
        return self.apple_rank if _IS_APPLE else self.rank

    def reads(self, path: str) -> bool:
        """Whether a name or path is one of its models'."""
        is_named = bool(self.scheme) and path.startswith(self.scheme)
        return is_named or path.lower().endswith(self.suffixes) or self.reads_folder(Path(path))

    def reads_folder(self, folder: Path) -> bool:
        """Whether a folder holds a model of it, be it whole or not."""
        try:
            return any(next(folder.glob(name), None) is not None for name in self.folder_files)
        except (OSError, ValueError):  # no name that the system can have
            return False

    @property
    def missing(self) -> tuple[str, ...]:
        """Which of the libraries that it needs are not installed; imports none of them."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def open(self, path: str) -> ModelReader:
        """A model of it; whether it is sound its methods say.

        Raises:
            BackendUnavailableError: a library without which models are not even read is not installed.
        """
        try:
            module = import_module(self.module)
        except ModuleNotFoundError as error:
            raise self.unavailable(f"{error.name} is not installed") from error
        reader: ModelReader = module.open_model(path)
        return reader

    def unavailable(self, reason: str) -> BackendUnavailableError:
        """That it cannot compute on this machine; names the extra that may change that."""
        advice = f"; to install what it needs: pip install 'stoker[{self.extra}]'" if self.extra else ""
        text = f"the backend {self.name} cannot be used here: {reason}{advice}"
        return BackendUnavailableError(text, backend=self.name)


BACKENDS: tuple[BackendEntry, ...] = (
    BackendEntry("fake", "stoker.backends.fake.reader", scheme="fake:"),
    BackendEntry(
        "mnn",
        "stoker.backends.mnn.reader",
        folder_files=("llm.mnn", "llm_config.json"),
        needs=("MNN",),
        extra="mnn",
        has_own_trial=True,
        rank=1,
        apple_rank=2,
    ),
    BackendEntry(
        "mlx",
        "stoker.backends.mlx.reader",
        folder_files=("*.safetensors", "model.safetensors.index.json"),
        needs=("mlx", "mlx_lm"),
        extra="mlx",
        rank=2,  # on a CPU it is right, and slow
    ),
    BackendEntry("llama", "stoker.backends.llama.reader", suffixes=(".gguf",), apple_rank=1),
)
"""The last opens what no other claims, and says what is wrong there."""
_IS_APPLE = sys.platform == "darwin" and platform.machine() == "arm64"

MAX_OPEN = 32


def entry_of(name: str) -> BackendEntry:
    """The backend of that name. Raises InvalidRequestError: there is none."""
    found = next((entry for entry in BACKENDS if entry.name == name), None)
    if found is None:
        names = ", ".join(entry.name for entry in BACKENDS if not entry.scheme)  # others are for tests
        raise InvalidRequestError(f"backend: there is no {name!r}; there are: auto, {names}", param="backend")
    return found


def readers_of(path: str) -> tuple[BackendEntry, ...]:
    """The backends that read the model of a name or path, the preferred one first (docs/adr/0032)."""
    readers = tuple(entry for entry in BACKENDS if entry.reads(path)) or (BACKENDS[-1],)
    return tuple(sorted(readers, key=lambda entry: entry.rank_here))


def why_not(backend: str, error: StokerError) -> str:
    """Why a backend does not serve a model, for people; it begins with the backend, or is about it."""
    is_about_it = error.details.get("backend") == backend
    return error.message if is_about_it else f"{backend}: {error.message}"


def open_model(path: str, backend: str = "") -> ModelReader:
    """The model of a name or path, by that backend or the first that reads it.

    Whether it is sound its methods say.

    Raises:
        BackendUnavailableError: what reads it is not installed; the message names the extra.
    """
    entry = entry_of(backend) if backend else readers_of(path)[0]
    return entry.open(path)


def has_scheme(ref: str) -> bool:
    """Whether a name means a model that is no file."""
    return any(entry.scheme and ref.startswith(entry.scheme) for entry in BACKENDS)


def is_model_folder(folder: Path) -> bool:
    """Whether a folder is a model of some backend, rather than a place where models lie."""
    return any(entry.reads_folder(folder) for entry in BACKENDS)


def suffixes() -> tuple[str, ...]:
    """Suffixes of model files, in lower case."""
    return tuple(suffix for entry in BACKENDS for suffix in entry.suffixes)


class OpenModels:
    """The models that were opened last, by path: those that take turns in memory are read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], ModelReader] = {}
        self._lock = Lock()  # one thread sizes models, another loads them

    def __repr__(self) -> str:
        return f"<OpenModels {len(self._known)}>"

    def open(self, path: str, backend: str = "") -> ModelReader:
        """As `open_model`; one whose file has changed since is read again.

        Raises:
            ModelFileError: there is no such file, or it is not complete.
            BackendUnavailableError: as `open_model`.
        """
        fresh, key = open_model(path, backend), (path, backend)
        mark = fresh.fingerprint  # before anything else of it is read
        with self._lock:
            known = self._known.pop(key, fresh)
            if known.fingerprint != mark:
                known = fresh
            self._known[key] = known
            if len(self._known) > MAX_OPEN:
                del self._known[next(iter(self._known))]
        return known
