"""The models in memory, and whose turn it is.

Models with work take turns. Loading and unloading are asked for by the loop; admission by memory is not
decided here.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.engine.resident import Resident
from stoker.engine.step_clock import StepClock
from stoker.errors import ModelNotFoundError


class Residents:
    """Loaded models by id, in the order of their last turn."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._models: dict[str, Resident] = {}

    def __repr__(self) -> str:
        return f"<Residents {list(self._models.values())}>"

    def __iter__(self) -> Iterator[Resident]:
        return iter(tuple(self._models.values()))

    @property
    def has_work(self) -> bool:
        """Whether any model has something to compute."""
        return any(resident.has_work for resident in self._models.values())

    def get(self, model: str) -> Resident:
        """The model of that id; raises ModelNotFoundError."""
        resident = self._models.get(model)
        if resident is None:
            raise ModelNotFoundError(
                f"no model {model!r} is loaded; loaded: {', '.join(self._models) or 'none'}"
            )
        return resident

    def add(self, resident: Resident) -> Resident:
        """Take a loaded model in."""
        self._models[resident.spec.id] = resident
        return resident

    def remove(self, model: str) -> Resident | None:
        """Let a model go; the caller closes it."""
        return self._models.pop(model, None)

    def next_with_work(self) -> Resident | None:
        """The model with work that had its turn longest ago; it goes to the end."""
        for name, resident in self._models.items():
            if resident.has_work:
                self._models[name] = self._models.pop(name)
                return resident
        return None

    def close(self) -> None:
        """Free every model."""
        for resident in self._models.values():
            resident.close()
        self._models.clear()
