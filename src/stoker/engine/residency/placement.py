"""How much memory there is for a model, by what was measured and what was promised (SPEC R1, R2, C14).

Owns the ledger's lines of loaded models. Memory that a model was given and has not touched yet is not free,
though it measures so. What has to go for another is residency's to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import InsufficientMemoryError, ModelTooLargeError
from stoker.models.memory_estimate.fit import Fit, MemoryBudget, weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.residency.loading import Load
    from stoker.engine.runners.runner import ModelRunner
    from stoker.ipc.model import ModelSpec
    from stoker.machine.ledger import Ledger
    from stoker.machine.monitor import Sample
    from stoker.models.memory_estimate.fit import FittedSpec

RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What other models could give, in bytes: idle ones at once, busy ones when their requests have ended."""

    idle_bytes: int
    busy_bytes: int


class Placement:
    """Weighs loads against memory.

    Args:
        measure: takes a sample now.
        ledger: bytes by line.
        cache: the prefix cache, which gives way first.
        margin_bytes: free memory that a load has to leave.
    """

    def __init__(
        self, measure: Callable[[], Sample], ledger: Ledger, cache: PrefixCache, margin_bytes: int
    ) -> None:
        self._measure = measure
        self._ledger = ledger
        self._cache = cache
        self._margin_bytes = margin_bytes
        self._own_bytes: int | None = None  # what engine and client hold without any model

    def __repr__(self) -> str:
        return f"<Placement {self._ledger!r} margin {self._margin_bytes}>"

    def weigh(self, load: Load, share: MemoryShare) -> tuple[FittedSpec, int]:
        """How it can be had, and how many bytes are missing for that now (0 or less: none).

        It is cut down only if it would not fit as asked once everything else has gone that may.

        Raises:
            ModelTooLargeError: it does not fit the limit however it is cut down.
            InsufficientMemoryError: it does not fit beside what has to stay.
        """
        assert load.estimator is not None, f"{load!r} was not looked at"
        sample = self._measure()
        if self._own_bytes is None:
            self._own_bytes = sample.footprint_bytes
        free_bytes = self._free_bytes(sample)
        evictable_bytes = self._cache.ram_bytes + share.idle_bytes + share.busy_bytes
        budget = MemoryBudget(
            free_bytes=free_bytes + evictable_bytes,
            limit_bytes=max(0, sample.limit_bytes - self._own_bytes),
            margin_bytes=self._margin_bytes,
        )
        try:
            fitted = weigh(
                _with_context(load.spec, load.least_n_ctx), load.estimator, budget, load.least_n_ctx
            )
        except InsufficientMemoryError as error:
            raise self._insufficient(error, free_bytes, evictable_bytes) from None
        needed_bytes = fitted.estimate.total_bytes
        if fitted.fit is Fit.DEGRADED and not load.served.may_evict:
            raise InsufficientMemoryError(  # it is loaded whole as soon as a request needs it
                f"{load.spec.id} does not fit whole beside what is loaded",
                needed=load.estimator(load.spec).total_bytes,
                free=free_bytes,
                margin=self._margin_bytes,
                evictable=evictable_bytes,
            )
        if fitted.fit is Fit.TOO_LARGE:
            raise ModelTooLargeError(
                f"{load.spec.id} needs {_mib(needed_bytes)} at the least; models may take"
                f" {_mib(budget.limit_bytes)} here, of which {_mib(self._margin_bytes)} have to stay free",
                needed=needed_bytes,
                limit=budget.limit_bytes,
                margin=self._margin_bytes,
                free=free_bytes,
                evictable=evictable_bytes,
            )
        return fitted, needed_bytes + self._margin_bytes - free_bytes

    def _insufficient(
        self, error: InsufficientMemoryError, free_bytes: int, evictable_bytes: int
    ) -> InsufficientMemoryError:
        return InsufficientMemoryError(
            f"{error.message}; {_mib(evictable_bytes)} of that by eviction",
            retry_after_s=RETRY_AFTER_S,
            **(error.details | {"free": free_bytes, "evictable": evictable_bytes}),
        )

    def _free_bytes(self, sample: Sample) -> int:
        """Available, less what was promised to models and is not touched yet."""
        held = (self._own_bytes or 0) + sum(self._ledger.host_lines().values())
        return sample.available_bytes - max(0, held - sample.footprint_bytes)

    def shed(self, missing_bytes: int, now: float) -> int:
        """Drop stored prefixes, saved ones first; returns the bytes that freed."""
        return self._cache.shed(missing_bytes, now)

    def settle(self, fitted: FittedSpec, runner: ModelRunner) -> Mapping[str, int]:
        """It is in memory: what it takes by line, entered in the ledger."""
        lines = dict(fitted.estimate.lines) | runner.backend.memory()
        for line, size_bytes in lines.items():
            self._ledger.add(line, size_bytes)
        self._cache.model_back(runner.prep.fingerprint)
        return lines

    def release(self, lines: Mapping[str, int], fingerprint: str) -> None:
        """It is gone; what is stored of it goes to disk, where there is one (SPEC C7)."""
        self._cache.model_gone(fingerprint)
        for line, size_bytes in lines.items():
            self._ledger.add(line, -size_bytes)


def _with_context(spec: ModelSpec, least_n_ctx: int) -> ModelSpec:
    """The spec with at least so much context; 0 is the file's own, which is never less."""
    n_ctx = max(spec.n_ctx, least_n_ctx) if spec.n_ctx else 0
    num_cells = max(spec.num_cells, least_n_ctx) if spec.num_cells else 0
    return msgspec.structs.replace(spec, n_ctx=n_ctx, num_cells=num_cells)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
