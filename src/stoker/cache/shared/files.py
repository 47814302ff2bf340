"""The files of a shared store, behind fsspec: a folder, an object store, memory (SPEC C19).

Owns listing, reading, writing and removing them. Every call may take as long as the store likes, so it runs
on a thread that nobody joins. fsspec is imported here alone, when a store is first used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from stoker.cache.disk.prefix_file import DamagedError, NewPrefix, decode, decode_head, encode, head_bytes
from stoker.cache.shared.names import ROOT, Listed, StoredName, id_of, name_of
from stoker.errors import CacheFileError, MachineSetupError

_FOLDERS = ("", "file", "local")
_PROBE = "probe"


def shown_url(url: str) -> str:
    """A store's URL without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class SharedFiles:
    """The prefix files below `url`.

    Raises, from every method:
        CacheFileError: this one file is gone or damaged; `details` has `is_gone` or `is_damaged`.
        MachineSetupError: the store cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = shown_url(url)
        self._is_folder = urlsplit(url).scheme in _FOLDERS
        self._given = str(Path(url).expanduser()) if self._is_folder and "://" not in url else url
        self._opened: tuple[Any, str] | None = None

    def __repr__(self) -> str:
        return f"<SharedFiles {self.url}>"

    def list(self) -> list[Listed]:
        """Every file of ours, whole or not."""
        with self._usable("listed"):
            system, root = self._open()
            system.invalidate_cache()
            found = system.find(root, detail=True)
        listed = []
        for path, told in found.items():
            name = StoredName.parse(path[len(root) :].lstrip("/"))
            if name is not None:
                listed.append(Listed(name, int(told["size"])))
        return listed

    def head(self, name: StoredName, model: str) -> NewPrefix:
        """What a file says that it is for; it has to be for `model`."""
        size = head_bytes(model, name.num_tokens)
        data = self._read(name, size)
        try:
            new, _, _ = decode_head(memoryview(data), name.size_bytes)
        except DamagedError as error:
            raise self._damaged(name, str(error)) from error
        if new.model != model or id_of(new) != name.id:
            raise self._damaged(name, "it is not for what its name says")
        return new

    def get(self, name: StoredName, namespace: bytes, tokens: bytes) -> memoryview:
        """The state of a file that is for just this. A damaged file is removed."""
        data = self._read(name)
        try:
            new, payload = decode(data)
            if (new.namespace, new.tokens) != (namespace, tokens):
                raise DamagedError("it holds another prefix")  # noqa: TRY301 - as any other damage
        except DamagedError as error:
            with suppress(MachineSetupError):
                self.remove(name)
            raise self._damaged(name, f"{error}; removed") from error
        return payload

    def put(self, new: NewPrefix, place: str, payload: memoryview) -> StoredName:
        """Write a file."""
        data = encode(new, payload)
        name = name_of(new, place, len(data), time.time())
        self._write(str(name), data)
        return name

    def remove(self, name: StoredName) -> None:
        """Remove a file; it is no error if another machine has."""
        with self._usable("written"), suppress(FileNotFoundError):
            system, root = self._open()
            system.rm_file(f"{root}/{name}")

    def probe(self) -> float:
        """Write, read and remove a small file; returns the seconds of the read."""
        name = f"{_PROBE}-{os.getpid()}-{time.monotonic_ns():x}"
        self._write(name, b"stoker")
        with self._usable("read"):
            system, root = self._open()
            began_s = time.monotonic()
            found = system.cat_file(f"{root}/{name}")
            took_s = time.monotonic() - began_s
            system.rm_file(f"{root}/{name}")
        if found != b"stoker":
            raise MachineSetupError(f"the prefix store {self.url} gives back other bytes than were written")
        return took_s

    # ------------------------------------------------------------ machinery

    def _open(self) -> tuple[Any, str]:
        """The file system, and the path of our root in it."""
        if self._opened is None:
            import fsspec  # noqa: PLC0415 - of the extra `store`

            options = {"auto_mkdir": True} if self._is_folder else {}
            system, path = fsspec.core.url_to_fs(self._given, **options)
            self._opened = system, f"{path.rstrip('/')}/{ROOT}"
        return self._opened

    def _read(self, name: StoredName, size: int | None = None) -> bytes:
        with self._usable("read"):
            system, root = self._open()
            try:
                data: bytes = system.cat_file(f"{root}/{name}", start=None if size is None else 0, end=size)
            except FileNotFoundError as error:
                text = f"{self.url}: another machine removed {name}"
                raise CacheFileError(text, path=str(name), is_gone=True) from error
            return data

    def _write(self, path: str, data: bytes) -> None:
        with self._usable("written"):
            system, root = self._open()
            if self._is_folder:
                _make_private(Path(f"{root}/{path}"))
            system.pipe_file(f"{root}/{path}", data)

    def _damaged(self, name: StoredName, reason: str) -> CacheFileError:
        return CacheFileError(f"{self.url}: {name}: {reason}", path=str(name), is_damaged=True)

    @contextmanager
    def _usable(self, verb: str) -> Iterator[None]:
        """Whatever a store's library raises is a store that cannot be used."""
        try:
            yield
        except (CacheFileError, FileNotFoundError) as error:
            if isinstance(error, CacheFileError):
                raise
            raise self._unusable(verb, error) from error
        except ImportError as error:
            raise MachineSetupError(
                f"the prefix store {self.url} needs a package that is not installed: {error}; "
                "pip install 'stoker[store]', and the package that fsspec names for this kind of store"
            ) from error
        except Exception as error:
            raise self._unusable(verb, error) from error

    def _unusable(self, verb: str, error: Exception) -> MachineSetupError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return MachineSetupError(f"the prefix store {self.url} cannot be {verb}: {reason}", url=self.url)


def _make_private(path: Path) -> None:
    """An empty file that its owner alone may read, in a folder that is made where there is none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
