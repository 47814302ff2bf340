"""The models in memory, and whose turn it is (SPEC Q13).

A model that somebody waits for steps first, equals take turns. Among other models, one whose background has
waited over its patience gets one turn in ten meanwhile (SPEC Q7). Loading and unloading are asked for by the
loop; admission by memory is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.engine.resident import Resident
from stoker.errors import ModelNotFoundError
from stoker.scheduler.patience import ONE_STEP_IN


class Residents:
    """Loaded models by id, in the order of their last turn."""

    def __init__(self) -> None:
        self._models: dict[str, Resident] = {}
        self._turns_since_owed = 0

    def __repr__(self) -> str:
        return f"<Residents {list(self._models.values())}>"

    def __iter__(self) -> Iterator[Resident]:
        return iter(tuple(self._models.values()))

    @property
    def has_work(self) -> bool:
        """Whether any model has something to compute."""
        return any(resident.has_work for resident in self._models.values())

    @property
    def has_requests(self) -> bool:
        """Whether anybody waits or runs in any model."""
        return any(resident.scheduler.has_requests for resident in self._models.values())

    @property
    def has_unstored(self) -> bool:
        """Whether any model keeps in cells what is stored nowhere else yet."""
        return any(resident.has_unstored for resident in self._models.values())

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

    def next_with_work(self, now: float) -> Resident | None:
        """The model to step next; it goes to the end of its equals."""
        working = [resident for resident in self._models.values() if resident.has_work]
        if not working:
            return None
        chosen = working[0] if len(working) == 1 else self._choose(working, now)
        name = chosen.spec.id
        self._models[name] = self._models.pop(name)
        return chosen

    def _choose(self, working: list[Resident], now: float) -> Resident:
        people = [resident for resident in working if resident.has_people]
        owed = [resident for resident in working if resident not in people and resident.is_owed(now)]
        self._turns_since_owed += 1
        if owed and (not people or self._turns_since_owed >= ONE_STEP_IN):
            self._turns_since_owed = 0
            return owed[0]
        return (people or working)[0]

    def next_deadline_s(self) -> float | None:
        """When the first paused request passes its deadline."""
        deadlines = [at for r in self._models.values() if (at := r.next_deadline_s()) is not None]
        return min(deadlines, default=None)

    def close(self) -> None:
        """Free every model."""
        for resident in self._models.values():
            resident.close()
        self._models.clear()
