"""Models whose experts are read from disk as they are needed: their pages, for those who measure memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.ipc.status import StreamingStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.backends.protocol.extensions import PagedWeights
    from stoker.engine.runners.runner import ModelRunner


class StreamedWeights:
    """The pages of all models in memory; the loop changes which, the monitor's thread asks how much.

    Attributes:
        is_loading: such a model is being loaded: its file goes through memory once.
    """

    def __init__(self) -> None:
        self.is_loading = False
        self._pages: tuple[PagedWeights, ...] = ()

    def __repr__(self) -> str:
        return f"<StreamedWeights of {len(self._pages)} models>"

    def hold(self, runners: Iterable[ModelRunner]) -> None:
        """The models in memory now."""
        found = (runner.backend.extensions.pages for runner in runners)
        self._pages = tuple(each for each in found if each is not None)

    def resident_bytes(self) -> int:
        """What of them is in memory; from any thread."""
        return sum(each.resident_bytes() for each in self._pages)


def lower(runners: Iterable[ModelRunner], part: float) -> int:
    """Have these models keep that part of their budgets; returns the bytes that this dropped."""
    found = (runner.backend.extensions.pages for runner in runners)
    return sum(each.hold(part) for each in found if each is not None)


def streaming_status(runner: ModelRunner | None) -> StreamingStatus | None:
    """What a model reads as it is needed; None: all that it has is in memory."""
    pages = None if runner is None else runner.backend.extensions.pages
    if pages is None:
        return None
    found = pages.stats()
    return StreamingStatus(
        size=found.size_bytes,
        budget=found.budget_bytes,
        resident=found.resident_bytes,
        num_faults=found.num_faults,
        read_bytes=found.read_bytes,
        read_s=found.read_s,
    )
