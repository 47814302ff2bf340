"""What an engine is told of the settings: a few plain values, so that it imports no settings."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs; its models come by commands.

    Each field is the setting of that name, where `stoker.settings` says what it means.

    Attributes:
        cache_dir, heat_trace: paths; no trace: the machine's sensors.
        lease_dir: where the locks of accelerators are; None: they are shared.
        has_own_process: its client is its parent process, whose memory counts beside its own.
        num_restarts: engines of this client that have ended by themselves before.
        prefix_store: URL of a store that several machines share; empty: there is none.
        log_level: what its log is wanted from, as in `logging`.
    """

    cache_dir: str
    cache_mode: str
    cache_ram_bytes: int
    cache_disk_bytes: int
    prefix_store: str = ""
    prefix_store_bytes: int = 0
    prefix_store_ttl_s: float = 0.0
    memory_limit: int | None
    memory_margin: int
    lease_dir: str | None
    max_prepare_s: float
    watchdog_s: float
    heat_trace: str | None
    has_own_process: bool
    num_restarts: int
    log_level: int
