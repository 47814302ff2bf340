"""The servers on an accelerator, told the same: slots, and the context that each slot has.

llama-server divides its context by its slots; Stoker is told the context of a request.
All layers are on the device, flash attention is as each has it by itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from bench.errors import BenchError
from bench.install_peer import peer_binary
from bench.peers import LOOPBACK, LlamaServer, Shape, StokerServer

STOKER = "stoker"
PEER = "llama-server"
PEER_ON_DEVICE = "backend-sampling"
LIMIT = "limit"
SERVERS = (LIMIT, PEER, PEER_ON_DEVICE, STOKER)
"""In the order in which they have the card: who is first reads the file for all."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The peer's programs; None: there is none of that name.

    Attributes:
        environment: what they need to find their libraries.
    """

    server: Path | None = None
    bench: Path | None = None
    batched_bench: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def found(cls, folder: Path | None) -> Programs:
        """Those in a folder; None: beside the llama-server that was built for the benchmark, if one was.

        Raises:
            BenchError: a folder was given, and has no llama-server.
        """
        if folder is None:
            binary = peer_binary()
            folder = binary.parent if binary else None
        elif not (folder / "llama-server").is_file():
            raise BenchError(f"there is no llama-server in {folder}")
        if folder is None:
            return cls()
        server, bench, batched = (
            path if (path := folder.absolute() / name).is_file() else None
            for name in ("llama-server", "llama-bench", "llama-batched-bench")
        )
        return cls(server, bench, batched, {"LD_LIBRARY_PATH": str(folder.absolute())})

    @property
    def missing(self) -> list[str]:
        """Names of those that there are none of."""
        names = {"llama-server": self.server, "llama-bench": self.bench}
        names["llama-batched-bench"] = self.batched_bench
        return [name for name, path in names.items() if path is None]


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """Slots, and tokens of context that each has."""

    num_slots: int
    ctx_slot: int

    @property
    def num_cells(self) -> int:
        """Of all slots."""
        return self.num_slots * self.ctx_slot


@dataclass(frozen=True, slots=True)
class StokerOnDevice:
    """`stoker serve` of one model or several.

    Attributes:
        flags: further ones.
    """

    models: tuple[Path, ...]
    shape: DeviceShape
    cache_dir: Path
    flags: tuple[str, ...] = ()
    label: ClassVar[str] = STOKER

    def command(self, _shape: Shape, port: int) -> list[str]:
        """As for a CPU, with every model; the context is that of a request."""
        alike = Shape(self.shape.num_slots, self.shape.ctx_slot, None)
        return [
            *StokerServer(cache_dir=self.cache_dir).command(alike, port),
            *(word for model in self.models for word in ("--model", str(model))),
            *self.flags,
        ]

    async def address(self, output: str, port: int) -> str | None:
        """From the readiness line."""
        return await StokerServer().address(output, port)


@dataclass(frozen=True, slots=True)
class GateOnDevices:
    """`stoker gate` before servers that are up.

    Attributes:
        peers: their addresses.
    """

    peers: tuple[str, ...]
    run_dir: Path
    label: ClassVar[str] = "gate"

    def command(self, _shape: Shape, _port: int) -> list[str]:
        """The installed command; it picks its own port."""
        return [
            *(str(Path(sys.executable).with_name("stoker")), "gate", "--host", LOOPBACK, "--port", "0"),
            *("--run-dir", str(self.run_dir)),
            *(word for peer in self.peers for word in ("--peer", peer)),
        ]

    async def address(self, output: str, port: int) -> str | None:
        """From the readiness line."""
        return await StokerServer().address(output, port)


@dataclass(frozen=True, slots=True)
class LlamaOnDevice:
    """llama-server as it comes, or with further flags."""

    binary: Path
    model: Path
    shape: DeviceShape
    flags: tuple[str, ...] = ()
    label: ClassVar[str] = PEER

    def command(self, _shape: Shape, port: int) -> list[str]:
        """Each slot has its share of the context."""
        return [
            *(str(self.binary), "-m", str(self.model), "--host", LOOPBACK, "--port", str(port)),
            *("-np", str(self.shape.num_slots), "-c", str(self.shape.num_cells)),
            *("-ngl", "99", "--no-webui", *self.flags),
        ]

    async def address(self, output: str, port: int) -> str | None:
        """Ready when `/health` says so."""
        return await LlamaServer(self.binary, self.model).address(output, port)
