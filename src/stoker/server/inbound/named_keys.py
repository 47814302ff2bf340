"""Named keys: whose key came with a request, and which classes and models its holder may use.

Pure. How much of it they may use in a minute is `quotas`', who may operate the server is `security`'s.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import KeyForbidsError
from stoker.ipc.request import Priority
from stoker.site_settings import hash_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.ipc.model import ModelInfo
    from stoker.site_settings import KeySettings

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Permit:
    """What requests of one caller may ask for.

    Attributes:
        name: of the key; empty: it has none.
        classes: that a request may have; empty: any.
        models: that it may use; empty: all.
    """

    name: str = ""
    classes: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()

    @property
    def default_class(self) -> Priority | None:
        """What a request gets that asks for no class; None: what is usual."""
        is_usual = not self.classes or Priority.INTERACTIVE in self.classes
        return None if is_usual else Priority.BACKGROUND

    def check_class(self, asked: str | None) -> None:
        """Refuse a class that the key may not use. Raises KeyForbidsError."""
        if asked is not None and self.classes and asked not in self.classes:
            allowed = ", ".join(self.classes)
            text = f"the key {self.name!r} may not ask for the class {asked}; it may for: {allowed}"
            raise KeyForbidsError(text, param="priority", classes=list(self.classes))

    def may_use(self, info: ModelInfo) -> bool:
        """Whether it may use a model, or the adapter of one."""
        return not self.models or not self.models.isdisjoint((info.id, info.asked_as, *info.aliases))

    def check_model(self, info: ModelInfo) -> None:
        """Refuse a model that the key may not use. Raises KeyForbidsError."""
        if not self.may_use(info):
            models = sorted(self.models)
            text = f"the key {self.name!r} may not use the model {info.asked_as}; it may use"
            raise KeyForbidsError(f"{text}: {', '.join(models)}", param="model", models=models)


ANYTHING = Permit()


@dataclass(frozen=True, slots=True)
class NamedKey:
    """One key of the settings.

    Attributes:
        permit: what its requests may ask for.
        settings: as they stand in the file.
        digest: tells its requests from those of other keys.
    """

    permit: Permit
    settings: KeySettings
    digest: str


class NamedKeys:
    """The keys of the settings by their hashes; `replace` takes those of a file that was read again.

    Args:
        settings: by the name of the key.
    """

    def __init__(self, settings: Mapping[str, KeySettings]) -> None:
        self.replace(settings)

    def __repr__(self) -> str:
        return f"NamedKeys({sorted(key.permit.name for key in self._keys)})"

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether one of them may operate the server."""
        return any(key.settings.admin for key in self._keys)

    def replace(self, settings: Mapping[str, KeySettings]) -> None:
        """From now on these are the keys; requests that run go on."""
        self._keys = tuple(_named_key(name, each) for name, each in settings.items())
        self._by_digest = {key.digest: key for key in self._keys}

    def find(self, given: bytes) -> NamedKey | None:
        """The key whose hash is that of `given`; compares with all, in constant time."""
        hashed = hash_of(given)
        found = [key for key in self._keys if hmac.compare_digest(hashed, key.settings.hash)]
        return found[0] if found else None

    def of(self, digest: str) -> NamedKey | None:
        """The key of requests with that digest."""
        return self._by_digest.get(digest)


def _named_key(name: str, settings: KeySettings) -> NamedKey:
    digest = hashlib.blake2b(
        settings.hash.encode(), digest_size=_DIGEST_BYTES, person=b"stoker-named-key"
    ).hexdigest()
    return NamedKey(Permit(name, settings.classes, frozenset(settings.models)), settings, digest)
