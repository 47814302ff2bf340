"""Names in a shared store, which say all that upkeep needs, and which files are superfluous (SPEC C19).

Pure. A file is `PLACE/WRITTEN-SIZE-TOKENS-ID.prefix`, in hexadecimal: the model and layout of the state, the
second of its writing since the epoch, its bytes, its tokens, and what it stands for. The size tells a file
that is being written from a whole one, so that no store needs to rename; the time needs no clock of the
store. Machines that write the same prefix give it the same id.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.cache.disk.prefix_file import VERSION, NewPrefix
from stoker.cache.radix import num_tokens

ROOT = f"stoker-prefixes-{VERSION}-{sys.byteorder}"
"""Below the store's URL: machines of another version or byte order look elsewhere."""
UNFINISHED_S = 3600.0
"""Age from which a file that is not whole counts as one whose writer died."""
AHEAD_S = 600.0
"""A file whose writer's clock is ahead by more is the first to go: its age is not known."""
_ID_BYTES = 16
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{1,10})-([0-9a-f]{1,12})-([0-9a-f]{1,7})-([0-9a-f]{32})\.prefix")


@dataclass(frozen=True, slots=True, order=True)
class StoredName:
    """A file by its name; they are in order of their age, the oldest first.

    Attributes:
        written_s: seconds since the epoch.
        id: what it stands for; see `id_of`.
        place: see `place_of`.
        size_bytes: of the whole file.
        num_tokens: of its prefix.
    """

    written_s: int
    id: str
    place: str
    size_bytes: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.place}/{self.written_s:x}-{self.size_bytes:x}-{self.num_tokens:x}-{self.id}.prefix"

    @classmethod
    def parse(cls, path: str) -> StoredName | None:
        """From a path below the root; None: it is none of ours."""
        match = _NAME.fullmatch(path)
        if match is None:
            return None
        place, written, size, count, digest = match.groups()
        return cls(int(written, 16), digest, place, int(size, 16), int(count, 16))


def place_of(model: str, apart: str) -> str:
    """The folder of the states of a model: its fingerprint, and what keeps machines apart."""
    return _digest(b"stoker-place", model.encode(), apart.encode())


def id_of(new: NewPrefix) -> str:
    """What tells a prefix from the others of its place: namespace and tokens."""
    return _digest(b"stoker-prefix", new.namespace, new.tokens)


def name_of(new: NewPrefix, place: str, size_bytes: int, now_s: float) -> StoredName:
    """The name of a file of so many bytes that is written now."""
    return StoredName(int(now_s), id_of(new), place, size_bytes, num_tokens(new.tokens))


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the store: its name, and the bytes that it has by now."""

    name: StoredName
    has_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it was written."""
        return self.has_bytes == self.name.size_bytes


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a store may hold.

    Attributes:
        size_bytes: of all files.
        ttl_s: seconds that a file stays after it was written.
    """

    size_bytes: int
    ttl_s: float


def superfluous(files: Iterable[Listed], now_s: float, limits: StoreLimits) -> list[StoredName]:
    """Files to be removed: too old, left by dead writers, doubled, and the oldest of what is over the limit.

    It depends on names only, so machines that look at the same time choose the same.
    """
    going: list[StoredName] = []
    staying: dict[tuple[str, str], StoredName] = {}
    num_bytes = 0
    for file in sorted(files, key=lambda file: _age_order(file.name, now_s)):
        name, age_s = file.name, now_s - file.name.written_s
        if age_s > limits.ttl_s or (not file.is_whole and age_s > UNFINISHED_S):
            going.append(name)
            continue
        num_bytes += name.size_bytes
        if file.is_whole:
            if (older := staying.pop((name.place, name.id), None)) is not None:
                going.append(older)
                num_bytes -= older.size_bytes
            staying[name.place, name.id] = name
    for name in staying.values():
        if num_bytes <= limits.size_bytes:
            break
        going.append(name)
        num_bytes -= name.size_bytes
    return going


def _age_order(name: StoredName, now_s: float) -> tuple[bool, StoredName]:
    return name.written_s <= now_s + AHEAD_S, name


def _digest(person: bytes, *parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=_ID_BYTES, person=person)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
