"""What is told of a store of prefixes that several machines share."""

from __future__ import annotations

import msgspec


class SharedStoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A store of prefixes that several machines share, as this engine knows it (SPEC C19).

    Attributes:
        url: without user, password and query.
        num_files, size_bytes: of all models, at the last listing.
        num_usable: prefixes of models in memory here.
        limit_bytes: what all files may take.
        num_unsaved: stored prefixes that are to be put there.
        latency_ms, bytes_per_s: as measured here; a guess before anything was.
        problem: why it is not asked now; empty: it is.
    """

    url: str
    num_files: int = 0
    num_usable: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    num_unsaved: int = 0
    latency_ms: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""
