"""Which backend reads which models: the one place where backends are registered.

Importing it loads no native code, nor does opening a model; loading one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.models.reader import ModelReader


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend and what it reads.

    Attributes:
        module: has `open_model(path) -> ModelReader`.
        scheme: how names of its models begin that are no files, such as "fake:"; empty: all are files.
        suffixes: of its files, in lower case.
    """

    module: str
    scheme: str = ""
    suffixes: tuple[str, ...] = ()

    def reads(self, path: str) -> bool:
        """Whether a name or path is one of its models'."""
        is_named = bool(self.scheme) and path.startswith(self.scheme)
        return is_named or path.lower().endswith(self.suffixes)


BACKENDS: tuple[BackendEntry, ...] = (
    BackendEntry("stoker.backends.fake.reader", scheme="fake:"),
    BackendEntry("stoker.backends.llama.reader", suffixes=(".gguf",)),
)
"""The last one opens what no other claims, and says what is wrong with it."""

MAX_OPEN = 32


def open_model(path: str) -> ModelReader:
    """The model of a name or path, by the backend that reads it; whether it is sound its methods say."""
    entry = next((entry for entry in BACKENDS if entry.reads(path)), BACKENDS[-1])
    reader: ModelReader = import_module(entry.module).open_model(path)
    return reader


def has_scheme(ref: str) -> bool:
    """Whether a name means a model that is no file."""
    return any(entry.scheme and ref.startswith(entry.scheme) for entry in BACKENDS)


def suffixes() -> tuple[str, ...]:
    """Suffixes of model files, in lower case."""
    return tuple(suffix for entry in BACKENDS for suffix in entry.suffixes)


class OpenModels:
    """The models that were opened last, by path: those that take turns in memory are read once."""

    def __init__(self) -> None:
        self._known: dict[str, ModelReader] = {}
        self._lock = Lock()  # one thread sizes models, another loads them

    def __repr__(self) -> str:
        return f"<OpenModels {len(self._known)}>"

    def open(self, path: str) -> ModelReader:
        """As `open_model`; one whose file has changed since is read again.

        Raises:
            ModelFileError: there is no such file, or it is not complete.
        """
        fresh = open_model(path)
        mark = fresh.fingerprint  # before anything else of it is read
        with self._lock:
            known = self._known.pop(path, fresh)
            if known.fingerprint != mark:
                known = fresh
            self._known[path] = known
            if len(self._known) > MAX_OPEN:
                del self._known[next(iter(self._known))]
        return known
