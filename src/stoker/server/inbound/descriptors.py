"""File descriptors of this process: how many there may be, and how many connections must leave free."""

from __future__ import annotations

import sys

RESERVED = 128
"""For the engine's start, model files, prefix files and pictures; some 40 are in use."""
_MIN_CONNECTIONS = 16
_UNLIMITED = 2**20


def limit() -> int:
    """Descriptors that this process may open."""
    if sys.platform == "win32":
        return _UNLIMITED
    import resource  # noqa: PLC0415 - not there on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_limit(num_connections: int) -> None:
    """Raise the soft limit, as far as the hard one allows for so many connections and the reserve."""
    wanted = num_connections + RESERVED
    if sys.platform == "win32" or limit() >= wanted:
        return
    import resource  # noqa: PLC0415 - not there on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connections_within(wanted: int) -> int:
    """How many connections the limit allows, `wanted` at most."""
    return min(wanted, max(_MIN_CONNECTIONS, limit() - RESERVED))
