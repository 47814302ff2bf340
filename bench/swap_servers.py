"""Servers of two models where memory is for one: how each is told so. The second is a copy of the first.

What Stoker is told follows from its own estimate of the model. llama-server counts models instead of bytes
(its router mode, since 2025): it is told to hold one, which it runs in a process of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.errors import BenchError
from bench.machine import binary_version
from bench.peers import LlamaServer, StokerServer, llama_flags
from stoker.ipc.model import ModelSpec
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.models.memory_estimate.fit import smaller_forms

if TYPE_CHECKING:
    from pathlib import Path

    from bench.peers import Shape

NAMES = ("first", "second")
ROUTER_FLAG = "--models-dir"
OWN_BYTES = 200 * 2**20
"""Roughly what Stoker's two processes hold without a model."""
ROOMY = 2
"""The limit is this many times what one model and Stoker itself take, so that pressure is far away."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What Stoker is told, in bytes: its limit, and how much of it has to stay free."""

    limit_bytes: int
    margin_bytes: int

    def __str__(self) -> str:
        return f"limit {self.limit_bytes >> 20} MiB, of which {self.margin_bytes >> 20} MiB stay free"


def budget_for_one(model: Path, shape: Shape) -> Budget:
    """A budget in which one model fits as asked for, and no form of the other fits beside it.

    Half of the smallest form is left over, for what `OWN_BYTES` may be wrong by.
    """
    estimate = estimator_of(model)
    spec = ModelSpec(
        id="model",
        path=str(model),
        num_slots=shape.num_slots,
        n_ctx=shape.ctx_size,
        num_threads=shape.num_threads or 0,
    )
    asked = estimate(spec)
    smallest_bytes = min(estimate(smaller).total_bytes for smaller in (spec, *smaller_forms(spec, asked)))
    needed_bytes = OWN_BYTES + asked.total_bytes
    limit_bytes = ROOMY * needed_bytes
    return Budget(limit_bytes, limit_bytes - needed_bytes - smallest_bytes // 2)


def copies_of(model: Path, folder: Path) -> tuple[Path, ...]:
    """The two files, in a folder of their own and, having just been written, in the page cache."""
    folder.mkdir()
    return tuple(shutil.copyfile(model, folder / f"{name}{model.suffix}") for name in NAMES)


def require_router(binary: Path) -> None:
    """Raise BenchError where this llama-server is from before its router mode."""
    said = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False).stdout
    if ROUTER_FLAG not in said:
        version = binary_version(binary)
        raise BenchError(
            f"llama-server {version} has no router mode ({ROUTER_FLAG}), which `swap` is against"
        )


@dataclass(frozen=True, slots=True)
class StokerOfTwo:
    """`stoker serve` of both files. Models stay until room is needed, however short the machine's default."""

    models: tuple[Path, ...]
    budget: Budget
    cache_dir: Path
    label: ClassVar[str] = StokerServer.label

    def command(self, shape: Shape, port: int) -> list[str]:
        """As for one model, with both and the budget."""
        return [
            *StokerServer(cache_dir=self.cache_dir).command(shape, port),
            *(word for model in self.models for word in ("--model", str(model))),
            *("--memory-limit", str(self.budget.limit_bytes)),
            *("--memory-margin", str(self.budget.margin_bytes)),
            *("--keep-alive", "-1"),
        ]

    async def address(self, output: str, port: int) -> str | None:
        """From the readiness line."""
        return await StokerServer().address(output, port)


@dataclass(frozen=True, slots=True)
class LlamaRouter:
    """llama-server's router over a folder of files, one model at a time; else as for one model."""

    binary: Path
    models_dir: Path
    label: ClassVar[str] = LlamaServer.label

    def command(self, shape: Shape, port: int) -> list[str]:
        """The router hands what it is told on to the server of each model."""
        return [
            *(str(self.binary), ROUTER_FLAG, str(self.models_dir), "--models-max", "1"),
            *llama_flags(shape, port),
        ]

    async def address(self, output: str, port: int) -> str | None:
        """Ready when `/health` says so; it has no model in memory then."""
        return await LlamaServer(self.binary, self.models_dir).address(output, port)
