"""Experts that are read from the mapped file as they are needed: how many stay in memory (SPEC R14).

The kernel reads a page when it is touched and takes pages back when it is short. After steps this drops what
is over the budget, of the last layers first: each token goes through all layers in order, so that dropping
what was unused for longest would leave nothing that the next token needs first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stoker.backends.protocol.extensions import PageStats
from stoker.machine.mapped import FileRange, ReadCounts, find_mapped
from stoker.models.gguf.header import tensor_places
from stoker.models.memory_estimate.shares import host_expert_layers, is_expert, layer_of, read_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.ipc.model import PlacementSpec
    from stoker.machine.mapped import MappedRange
    from stoker.models.gguf.header import GgufHeader

LOOK_SHARE = 50
"""Counting pages takes at most a fiftieth of the time."""


PART_BYTES = 16 * 2**20
"""What is dropped at a time."""


class ExpertPages:
    """The expert weights of one loaded model; see `PagedWeights`.

    Args:
        ranges: where they are mapped, in the order of their layers.
        size_bytes: of all of them.
        budget_bytes: what may stay in memory.
    """

    def __init__(self, ranges: Sequence[MappedRange], size_bytes: int, budget_bytes: int) -> None:
        self._ranges = tuple(ranges)
        self.size_bytes = size_bytes
        self.budget_bytes = min(budget_bytes, size_bytes)
        self._part = 1.0
        self._looked: tuple[float, float, int] = (0.0, 0.0, 0)  # next look, its cost, what it found
        self._reads = ReadCounts()
        self._read_s = 0.0
        self._tend()

    def __repr__(self) -> str:
        return f"<ExpertPages {self._looked[2]} of {self.size_bytes} bytes, budget {self._held_bytes}>"

    @classmethod
    def of(cls, header: GgufHeader, placement: PlacementSpec) -> ExpertPages | None:
        """Those of a model that is loaded; None: there are none, or this system does not tell of mappings."""
        if not placement.streams_experts:
            return None
        layers = host_expert_layers(read_parts(header), placement)
        ranges = [
            part
            for place in tensor_places(header)
            if is_expert(place.name) and layer_of(place.name) in layers
            for part in FileRange(place.path, place.start, place.size_bytes).parts(PART_BYTES)
        ]
        mapped = find_mapped(ranges)
        size_bytes = sum(each.size_bytes for each in ranges)
        return cls(mapped, size_bytes, placement.expert_budget or 0) if mapped else None

    @property
    def _held_bytes(self) -> int:
        return int(self.budget_bytes * self._part)

    def hold(self, part: float) -> int:
        """Keep that part of the budget from now on; returns the bytes that this dropped."""
        self._part = part
        before = self.resident_bytes()
        self._tend()
        return max(0, before - self._looked[2])

    def resident_bytes(self) -> int:
        """What is in memory, as it was counted lately; from any thread."""
        if time.monotonic() >= self._looked[0]:
            self._look()
        return self._looked[2]

    def stats(self) -> PageStats:
        """What stays, and what was read."""
        return PageStats(
            size_bytes=self.size_bytes,
            budget_bytes=self._held_bytes,
            resident_bytes=self.resident_bytes(),
            num_faults=self._reads.num_faults,
            read_bytes=self._reads.size_bytes,
            read_s=self._read_s,
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step: count what it reads, and afterwards drop what is over the budget."""
        before, begun_s = ReadCounts.now(), time.monotonic()
        yield
        found = ReadCounts.now().since(before)
        self._reads = ReadCounts(
            self._reads.num_faults + found.num_faults, self._reads.size_bytes + found.size_bytes
        )
        if found.num_faults:
            self._read_s += time.monotonic() - begun_s
        if time.monotonic() >= self._looked[0]:
            self._tend()

    def _look(self) -> list[int]:
        """Count; returns what is in memory of each range."""
        begun_s = time.monotonic()
        found = [each.resident_bytes() for each in self._ranges]
        now = time.monotonic()
        self._looked = (now + LOOK_SHARE * (now - begun_s), now - begun_s, sum(found))
        return found

    def _tend(self) -> None:
        """Drop ranges, the last first, until the rest is within the budget."""
        found = self._look()
        over_bytes = sum(found) - self._held_bytes
        if over_bytes <= 0:
            return
        for each, size_bytes in zip(reversed(self._ranges), reversed(found), strict=True):
            if over_bytes <= 0:
                break
            if size_bytes:
                each.drop()
                over_bytes -= size_bytes
        self._look()
