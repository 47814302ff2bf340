"""One load of a model, from the question what it takes to the model in memory (SPEC R4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stoker.engine.inbox import LoadStop
    from stoker.engine.residency.catalogue import ServedModel
    from stoker.errors import InsufficientMemoryError
    from stoker.ipc.model import ModelSpec
    from stoker.models.memory_estimate.fit import Estimator, FittedSpec


@dataclass(slots=True, eq=False)
class Load:
    """A load that goes on.

    Attributes:
        served: the model.
        spec: how it is to be loaded, as asked for.
        stop: told to the loader; set, the load is to end.
        begun_s: when it was begun.
        is_reload: the model is in memory already and stays until the new one is (SPEC L5).
        estimator, fingerprint: what the file says; None before it was looked at.
        missing: devices that were lost and are not used.
        looked_at: the spec with the ids of the devices that there are; None: likewise.
        fitted: how it is loaded; None while it waits for room.
        look_s: when to look for room again.
        least_n_ctx: tokens of context that requests need which have begun on the model.
        stage: what it is at: header, waiting (for room) or weights.
        most_bytes: what it may take of devices at most, by their ids, where it has failed to take more.
    """

    served: ServedModel
    spec: ModelSpec
    stop: LoadStop
    begun_s: float
    is_reload: bool
    estimator: Estimator | None = None
    fingerprint: str = ""
    fitted: FittedSpec | None = None
    look_s: float = 0.0
    least_n_ctx: int = 0
    stage: str = ""
    looked_at: ModelSpec | None = None
    missing: tuple[str, ...] = ()
    most_bytes: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Load {self.spec.id} {self.stage} {self.served.fraction:.0%}>"

    @property
    def wanted(self) -> ModelSpec:
        """How it is to be loaded, with ids of devices as soon as they are known."""
        return self.looked_at or self.spec

    def less(self, trial_token_s: float) -> tuple[str, ...]:
        """What the model gets less of than was asked for, and what that costs, for people.

        Args:
            trial_token_s: what a token took in a trial; 0: not measured.
        """
        less = list(self.fitted.degraded) if self.fitted else []
        if less and trial_token_s:
            less.append(f"one request alone got {1 / trial_token_s:.3g} tokens/s in a trial")
        return (*less, *(f"without {device}, which was lost" for device in self.missing))

    def learn(self, error: InsufficientMemoryError) -> bool:
        """Loading has shown that a device has less room than was thought; returns whether to try again.

        Each time it may take an eighth less there, or as much less as was missing.
        """
        device = error.details.get("device", "")
        tried_bytes = self.fitted.estimate.device_bytes(device) if self.fitted is not None else 0
        missing_bytes = error.details.get("needed", 0) - error.details.get("free", 0)
        self.most_bytes[device] = max(0, min(tried_bytes * 7 // 8, tried_bytes - missing_bytes))
        return tried_bytes > 0

    @property
    def waits_for_room(self) -> bool:
        """Whether it is known what it takes, and not begun yet."""
        return self.estimator is not None and self.fitted is None

    def told(self, stage: str, fraction: float) -> None:
        """It has come so far."""
        self.stage = stage
        if not self.is_reload:
            self.served.stage, self.served.fraction = stage, fraction

    def is_like(self, other: Load) -> bool:
        """Whether it would give the same model once more; how long it is kept makes no other one."""
        spec, theirs = self.spec, other.spec
        theirs = msgspec.structs.replace(theirs, keep_alive_s=spec.keep_alive_s, is_pinned=spec.is_pinned)
        return theirs == spec and other.fingerprint == self.fingerprint
