"""Which models are served, where each is in its life, and which is unloaded first (SPEC L1, R3, R8).

Pure: this keeps the table of states and the order that decisions follow. How much a model takes is the memory
estimate's, measuring, loading and freeing is residency's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import ModelNotFoundError
from stoker.ipc.model import MODEL_MOVES, STORY_LENGTH, ModelLife, is_move

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker.errors import ErrorInfo
    from stoker.ipc.model import ModelSpec

SWAP_AFTER_S = 1.0
"""How long requests wait for a model before a busy one has to go for it."""
STAY_S = 2.0
"""How long a model stays at least once it is in memory; ten times what its load took, if that is more."""
FINISH_S = 30.0
"""How long those that run on a model which has to go may take to finish."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One served model.

    Attributes:
        spec: how it is to be loaded, as asked for.
        is_pinned: it is never unloaded for another.
        is_asked: the client asked for it by name, so it is loaded though no request needs it.
        is_suspect: its last load ended an engine: the next is tried in a child process first.
        may_evict: idle models may go for what was asked for.
        keep_alive_s: how long it stays after its last request; negative: for good.
        used_s: when it last had a request, or was loaded.
        loaded_s: when it was loaded; how long that took.
        has_served: a request ran on it since it was loaded.
        size: what it takes by line; of one that is not loaded what it would, empty: not known.
        degraded: what it was given less of than was asked for.
        stage, fraction: how far a load has come.
        reason: why it is not ready; error: with which it failed last.
    """

    spec: ModelSpec
    life: ModelLife = ModelLife.ABSENT
    is_pinned: bool = False
    is_asked: bool = False
    is_suspect: bool = False
    may_evict: bool = True
    keep_alive_s: float = 600.0
    used_s: float = 0.0
    loaded_s: float = 0.0
    load_took_s: float = 0.0
    has_served: bool = False
    size: Mapping[str, int] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    stage: str = ""
    fraction: float = 0.0
    reason: str = ""
    error: ErrorInfo | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    def __repr__(self) -> str:
        return f"<ServedModel {self.spec.id} {self.life}>"

    @property
    def size_bytes(self) -> int:
        """All lines together."""
        return sum(self.size.values())

    @property
    def is_in_memory(self) -> bool:
        """Whether it takes memory and can compute."""
        return self.life in {ModelLife.READY, ModelLife.UNLOADING}

    def move(self, life: ModelLife, why: str = "") -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, with the story so far.
        """
        if life is self.life or not is_move(self.life, life, MODEL_MOVES):
            story = "; ".join(self.story)
            raise AssertionError(f"{self!r} cannot become {life} ({why}); story: {story}")
        self.life, self.reason = life, why
        self.stage, self.fraction = "", 0.0
        self.story.append(f"{life}: {why}" if why else life)

    def due_s(self) -> float | None:
        """When it has been idle for as long as it may (SPEC R8); None: it stays, or is busy elsewhere."""
        if self.life is not ModelLife.READY or self.is_pinned or self.keep_alive_s < 0:
            return None
        if self.keep_alive_s == 0 and not self.has_served:
            return None  # it was loaded for a request that is about to come
        return self.used_s + self.keep_alive_s


class Catalogue:
    """Every served model, in the order they were made known."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}

    def __repr__(self) -> str:
        return f"<Catalogue {list(self._models.values())}>"

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def know(self, spec: ModelSpec) -> ServedModel:
        """Serve it; one that is known already stays as it is."""
        if spec.id not in self._models:
            self._models[spec.id] = ServedModel(
                spec, is_pinned=spec.is_pinned, keep_alive_s=spec.keep_alive_s
            )
        return self._models[spec.id]

    def find(self, model: str) -> ServedModel | None:
        """The model of that id, if it is served."""
        return self._models.get(model)

    def get(self, model: str) -> ServedModel:
        """The model of that id; raises ModelNotFoundError."""
        served = self._models.get(model)
        if served is None:
            text = f"no model {model!r} is served; served: {', '.join(self._models) or 'none'}"
            raise ModelNotFoundError(text, param="model")
        return served

    def in_memory(self) -> list[ServedModel]:
        """Those that take memory, the one unused for longest first (SPEC R3)."""
        return sorted((s for s in self if s.is_in_memory), key=lambda s: s.used_s)

    def overdue(self, now: float) -> list[ServedModel]:
        """Those that have been idle for as long as they may, unless requests use them."""
        return [s for s in self if (due_s := s.due_s()) is not None and due_s <= now]


class Swaps:
    """Busy models that have to go for another: which one, when, how long it may take (SPEC R3, L5).

    A busy model is not unloaded under its requests: it takes no newcomers, and goes when what runs on it has
    ended. Work that takes longer than `FINISH_S` is parked then, and goes on when its model is back.
    """

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
