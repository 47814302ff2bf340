"""Busy models that have to make room for another: which one, when, and how long it may take (SPEC R3, L5).

Pure. A busy model is not unloaded under its requests: it takes no newcomers, and goes when what runs on it
has ended. Work that takes longer than `FINISH_S` is parked then, and goes on when its model is back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.engine.residency.catalogue import ServedModel

SWAP_AFTER_S = 1.0
"""How long requests wait for a model before a busy one has to make room for it."""
STAY_S = 2.0
"""How long a model stays at least once it is in memory; ten times what its load took, if that is more."""
FINISH_S = 30.0
"""How long those that run on a model which has to go may take to finish."""


class Swaps:
    """Models on their way out for another's sake."""

    def __init__(self) -> None:
        self._going: dict[str, tuple[str, float]] = {}  # model: for which one, and since when

    def __repr__(self) -> str:
        return f"<Swaps {self._going}>"

    def choose(
        self, busy: Iterable[ServedModel], newcomer: str, begun_s: float, now: float
    ) -> ServedModel | None:
        """The one in memory for longest, if it is time and none goes already; it counts as going then."""
        if now - begun_s < SWAP_AFTER_S or any(other == newcomer for other, _ in self._going.values()):
            return None
        settled = [s for s in busy if now - s.loaded_s >= max(STAY_S, 10 * s.load_took_s)]
        chosen = min(settled, key=lambda s: s.loaded_s, default=None)
        if chosen is not None:
            self._going[chosen.spec.id] = newcomer, now
        return chosen

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """Those whose work has had its time, and for which model they go."""
        going = self._going.items()
        return [(model, other) for model, (other, since_s) in going if now - since_s >= FINISH_S]

    def gone(self, model: str) -> None:
        """It is out."""
        self._going.pop(model, None)

    def called_off(self, newcomer: str) -> list[str]:
        """That model is not needed any more: those that went for it may stay; returns them."""
        staying = [model for model, (other, _) in self._going.items() if other == newcomer]
        for model in staying:
            del self._going[model]
        return staying
