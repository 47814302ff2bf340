"""The models a front asked for: how to load each, what became of it, how often its load killed the engine.

Owns no file and no native handle; the engine loads, the host says when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import ErrorInfo, ModelLoadError, ModelNotFoundError, NotReadyError, error_from_info

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.messages import ModelState
    from stoker.values import ModelInfo, ModelSpec

MAX_LOAD_CRASHES = 2
READY = "ready"
FAILED = "failed"
ABSENT = "absent"


@dataclass(slots=True)
class RosterEntry:
    """One model: its last reported state and, once it was ready, what it resolved to."""

    spec: ModelSpec
    state: str = ABSENT
    info: ModelInfo | None = None
    error: ErrorInfo | None = None
    load_crashes: int = 0


class Roster:
    """All served models, in order; the first is the default.

    Args:
        specs: how to load each; ids are unique.
    """

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self._entries = {spec.id: RosterEntry(spec) for spec in specs}

    def __repr__(self) -> str:
        return f"<Roster {self.stats()}>"

    def stats(self) -> dict[str, str]:
        """State of each model by id."""
        return {model: entry.state for model, entry in self._entries.items()}

    def to_load(self) -> list[ModelSpec]:
        """What a fresh engine has to load: everything that has not failed for good."""
        return [entry.spec for entry in self._entries.values() if entry.state != FAILED]

    def record(self, event: ModelState) -> None:
        """The engine reported a state."""
        entry = self._entries.get(event.model)
        if entry is None:
            return
        entry.state = event.state
        entry.error = event.error
        if event.info is not None:
            entry.info = event.info

    def is_settled(self, model: str) -> bool:
        """Whether its load has come to an end, good or bad."""
        return self._entries[model].state in {READY, FAILED}

    def begin_life(self) -> None:
        """A new engine starts with nothing loaded."""
        for entry in self._entries.values():
            if entry.state != FAILED:
                entry.state = ABSENT

    def charge(self, model: str, reason: str) -> bool:
        """The engine died while loading `model`; True when that was once too often and it has failed."""
        entry = self._entries[model]
        entry.load_crashes += 1
        if entry.load_crashes < MAX_LOAD_CRASHES:
            return False
        entry.state = FAILED
        entry.error = ModelLoadError(
            f"loading {model!r} from {entry.spec.path} ended the engine {entry.load_crashes} times, "
            f"last: {reason}",
            model=model,
            crashes=entry.load_crashes,
        ).info()
        return True

    def failure(self, model: str) -> ErrorInfo | None:
        """Why a model cannot be used any more, or None."""
        entry = self._entries.get(model)
        return entry.error if entry and entry.state == FAILED else None

    def failures(self) -> dict[str, ErrorInfo]:
        """All of those."""
        return {m: e.error for m, e in self._entries.items() if e.state == FAILED and e.error}

    def infos(self) -> list[ModelInfo]:
        """Every model that was ready once and has not failed, the default first."""
        return [e.info for e in self._entries.values() if e.info is not None and e.state != FAILED]

    def num_slots(self, model: str) -> int:
        """Choices that a model runs at once, as far as is known; 0 for one that is not served."""
        entry = self._entries.get(model)
        if entry is None:
            return 0
        return entry.spec.num_slots if entry.info is None else entry.info.num_slots

    def resolve(self, model: str | None) -> ModelInfo:
        """The model a request names; None and "default" mean the first.

        Raises:
            ModelNotFoundError: no such model is served.
            NotReadyError: it has not been loaded yet.
            ModelError: it failed to load.
        """
        named = next(iter(self._entries), None) if model in {None, "default"} else model
        entry = self._entries.get(named) if named is not None else None
        if entry is None:
            served = ", ".join(self._entries) or "none"
            raise ModelNotFoundError(f"no model {model!r} is served; served: {served}", param="model")
        if entry.state == FAILED and entry.error:
            raise error_from_info(entry.error)
        if entry.info is None:
            raise NotReadyError(f"model {entry.spec.id!r} is {entry.state}", retry_after_s=1.0)
        return entry.info
