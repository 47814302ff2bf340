"""Who may share what was computed (SPEC C1): requests of one model, adapter, initial state and salt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

DIGEST_BYTES = 32


@dataclass(frozen=True)
class Namespace:
    """A prefix of one namespace is never used in another.

    Attributes:
        model: fingerprint of the file and of how its state is laid out.
        adapter: name and digest of what changes the weights; empty: nothing.
        initial_state: digest of the state a recurrent model begins from; empty: its own.
        salt: what the caller chose to be apart.
    """

    model: str
    adapter: str = ""
    initial_state: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Names it in the tree and on disk, where a salt must not be readable."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"stoker-space")
        for part in (self.model, self.adapter, self.initial_state, self.salt):
            text = part.encode()
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return digest.digest()
