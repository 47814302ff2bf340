"""What a workload is run against: a label for the tables, a client, and the process if it is ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.client import Client

if TYPE_CHECKING:
    from bench.peers import ServerProcess


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers. `process` is None for one that somebody else started."""

    label: str
    client: Client
    process: ServerProcess | None = None
