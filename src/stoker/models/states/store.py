"""States that callers saved (SPEC K5): one safetensors file each, in a folder an owner.

Owns names, bounds and files; what a state is made of is `file`'s. Several processes may share a folder:
a file appears whole or not at all, and one that is damaged is never handed out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
import time
import zlib
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stoker.errors import InvalidRequestError, MachineSetupError, StateNotFoundError
from stoker.models.states.file import (
    MAX_HEADER_BYTES,
    MAX_STATE_BYTES,
    METADATA,
    check_state,
    read_header,
    with_metadata,
)
from stoker.private import make_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_STATES = 1024
"""States an owner may keep."""
MAX_BYTES = 8 * 1024**3
"""Bytes an owner's states may take."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".safetensors"
_PARTIAL_SUFFIX = ".partial"
_EVERYBODY = "everybody"
_MODE, _FOLDER_MODE = 0o600, 0o700
_LENGTH_BYTES = 8


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state that can be begun from.

    Attributes:
        id: the name it is asked for by.
        model: the served model it was saved or uploaded for.
        num_tokens: tokens it has seen; 0: not known, it was uploaded.
        size_bytes: of its file.
        created: seconds since the epoch.
    """

    id: str
    model: str
    num_tokens: int
    size_bytes: int
    created: int


class StateStore:
    """Saved states below `folder`, which need not exist.

    An owner is any text, such as the digest of an API key; the empty one is everybody where no key is asked
    for. An owner does not see another's states, nor that they exist.

    Args:
        max_states: states an owner may keep.
        max_bytes: bytes they may take.
    """

    def __init__(self, folder: Path, *, max_states: int = MAX_STATES, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_states = max_states
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"StateStore({str(self._folder)!r})"

    def save(  # noqa: PLR0913 - what a state's head says, by name
        self,
        data: bytes,
        *,
        model: str,
        num_tokens: int = 0,
        name: str | None = None,
        owner: str = "",
        replace: bool = False,
    ) -> SavedState:
        """Keep a safetensors file; without a name it gets one, with `replace` the place of one of that name.

        Raises:
            InvalidRequestError: the name or the file is no good, the name is taken or there are too many.
            MachineSetupError: the folder cannot be written.
        """
        name = f"state-{secrets.token_hex(8)}" if name is None else name
        check_name(name)
        check_state(data)
        _, begin = read_header(data)
        created = int(time.time())
        metadata = {
            "model": model,
            "num_tokens": str(num_tokens),
            "created": str(created),
            "crc32": str(zlib.crc32(memoryview(data)[begin:])),
        }
        whole = with_metadata(data, metadata)
        try:
            with self._lock:  # what is checked stays so until the file is there
                self._check_room(name, len(whole), owner, replace=replace)
                _write(self._path(name, owner), whole, replace=replace)
        except FileExistsError:  # another server was quicker
            _taken(name)
        except OSError as error:
            raise MachineSetupError(
                f"cannot keep a state of {len(whole)} bytes in {self._folder}: {error.strerror}"
            ) from None
        return SavedState(id=name, model=model, num_tokens=num_tokens, size_bytes=len(whole), created=created)

    def list(self, owner: str = "") -> list[SavedState]:
        """The owner's states, the newest first; damaged files are left out."""
        found = []
        for path in self._files(owner):
            with contextlib.suppress(InvalidRequestError, StateNotFoundError):
                found.append(_described(path))
        return sorted(found, key=lambda state: (-state.created, state.id))

    def get(self, name: str, owner: str = "") -> SavedState:
        """What is known of a state.

        Raises:
            StateNotFoundError: the owner has none of that name.
            InvalidRequestError: its file is damaged.
        """
        return _described(self._known(name, owner))

    def load(self, name: str, owner: str = "") -> bytes:
        """The state's file.

        Raises:
            StateNotFoundError: the owner has none of that name.
            InvalidRequestError: its file is damaged.
        """
        path = self._known(name, owner)
        data = _read(path, MAX_STATE_BYTES + MAX_HEADER_BYTES)
        header, begin = read_header(data)
        _from_header(header, path, len(data))
        if str(zlib.crc32(memoryview(data)[begin:])) != header[METADATA].get("crc32"):
            raise _damaged(path)
        return data

    def delete(self, name: str, owner: str = "") -> None:
        """Forget a state. Raises StateNotFoundError."""
        path = self._known(name, owner)
        try:
            path.unlink()
        except FileNotFoundError:
            _absent(name)
        except OSError as error:
            raise MachineSetupError(f"cannot delete the state {name!r}: {error.strerror}") from None

    def _check_room(self, name: str, size_bytes: int, owner: str, *, replace: bool) -> None:
        sizes = {path.stem: _size(path) for path in self._files(owner)}
        if replace:
            sizes.pop(name, None)
        if name in sizes:
            _taken(name)
        if len(sizes) >= self._max_states:
            raise InvalidRequestError(
                f"{len(sizes)} states are kept, at most {self._max_states} may be; delete one first",
                param="state",
            )
        if sum(sizes.values()) + size_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"states take {sum(sizes.values())} bytes, this one {size_bytes} more,"
                f" at most {self._max_bytes} may be taken; delete one first",
                param="state",
            )

    def _files(self, owner: str) -> Iterator[Path]:
        folder = self._folder / _folder_name(owner)
        found = folder.iterdir() if folder.is_dir() else ()
        yield from (path for path in found if path.suffix == _SUFFIX and _NAME.fullmatch(path.stem))

    def _known(self, name: str, owner: str) -> Path:
        if not _NAME.fullmatch(name):
            _absent(name)
        path = self._path(name, owner)
        if not path.is_file() or path.is_symlink():
            _absent(name)
        return path

    def _path(self, name: str, owner: str) -> Path:
        return self._folder / _folder_name(owner) / f"{name}{_SUFFIX}"


def _folder_name(owner: str) -> str:
    if not owner:
        return _EVERYBODY
    return hashlib.blake2b(owner.encode(), digest_size=16, person=b"stoker-owner").hexdigest()


def check_name(name: str) -> None:
    """Whether a state may be called so. Raises InvalidRequestError."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name[:80]!r} is no name for a state: 1 to 64 letters, digits, - and _, the first no sign",
            param="name",
        )


def _taken(name: str) -> NoReturn:
    raise InvalidRequestError(
        f"there is a state {name!r} already; say replace, or delete it first", param="name"
    )


def _write(path: Path, data: bytes, *, replace: bool) -> None:
    """Whole or not at all, for this user only."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            partial.replace(path)
        else:
            os.link(partial, path)  # fails where the name is taken, as a move would not
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            return file.read(max_bytes)
    except FileNotFoundError:
        _absent(path.stem)
    except OSError as error:
        raise MachineSetupError(f"cannot read the state {path.stem!r}: {error.strerror}") from None


def _described(path: Path) -> SavedState:
    header, _ = read_header(_read(path, _LENGTH_BYTES + MAX_HEADER_BYTES))
    return _from_header(header, path, _size(path))


def _from_header(header: dict[str, object], path: Path, size_bytes: int) -> SavedState:
    try:
        said = msgspec.convert(header.get(METADATA), dict[str, str])
        return SavedState(
            id=path.stem,
            model=said["model"],
            num_tokens=int(said["num_tokens"]),
            size_bytes=size_bytes,
            created=int(said["created"]),
        )
    except (msgspec.ValidationError, KeyError, ValueError):
        raise _damaged(path) from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process deleted it
        return 0


def _damaged(path: Path) -> InvalidRequestError:
    return InvalidRequestError(f"the file of the state {path.stem!r} is damaged", param="state")


def _absent(name: str) -> NoReturn:
    raise StateNotFoundError(f"there is no state {name[:80]!r}", param="state")
