"""What the loop drives: one loaded model and the requests on it.

`SlotRunner` runs what generates, step by step; `OneShotRunner` computes whole texts. Both are asked the same
questions and take the same commands, so the loop, residency and status know this protocol alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.engine.jobs.job import Job
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.residency.loading import Load
    from stoker.engine.runners.turns import Contender
    from stoker.ipc.commands import Submit
    from stoker.ipc.events import Event
    from stoker.ipc.model import ModelInfo, ModelSpec
    from stoker.ipc.request import Priority
    from stoker.ipc.status import SlotStatus, WaitStatus
    from stoker.kv.sequence import SequenceState
    from stoker.scheduler.throttle import Throttle


class ModelRunner(Protocol):
    """A model in memory. A turn is `schedule`, then `step`.

    Attributes:
        spec: how it was loaded.
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        allowance_s: what a one-shot call may take beside readers of another model; None: its own target.
        prep: what preparing a request for it takes.
    """

    spec: ModelSpec
    load: Load | None
    degraded: tuple[str, ...]
    allowance_s: float | None
    prep: PrepContext

    # ------------------------------------------------------------ questions

    @property
    def events(self) -> list[Event]:
        """What has happened, for the loop to publish."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs; paused ones are not counted."""
        ...

    @property
    def has_people(self) -> bool:
        """Whether an interactive request waits for an answer of it."""
        ...

    @property
    def has_unstored(self) -> bool:
        """Whether cells of ended requests are stored nowhere else yet."""
        ...

    @property
    def num_leases(self) -> int:
        """Requests that need it in memory: paused ones do not."""
        ...

    @property
    def n_ctx(self) -> int:
        """Tokens that one request may hold."""
        ...

    @property
    def num_cells(self) -> tuple[int, int]:
        """Cells in all, and cells in use."""
        ...

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        ...

    def contexts(self) -> list[int]:
        """Tokens of context that each of its requests may come to hold, paused ones too."""
        ...

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited longer than its patience (SPEC Q7)."""
        ...

    def next_deadline_s(self) -> float | None:
        """When the first of its requests passes its deadline."""
        ...

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its queue is at its bound; `num_arriving` requests are on their way."""
        ...

    def info(self) -> ModelInfo:
        """What was loaded and the limits that resulted."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes it takes, by line."""
        ...

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        ...

    def slot_status(self, now: float) -> list[SlotStatus]:
        """Each slot as it is now."""
        ...

    def queue_status(self, state: SequenceState, now: float) -> list[WaitStatus]:
        """The queued sequences that are in `state`, next first."""
        ...

    def paused_status(self, now: float) -> list[WaitStatus]:
        """The paused sequences."""
        ...

    # ------------------------------------------------------------ commands

    def accept(self, live: Job, now: float) -> None:
        """Put a prepared request in its queue; raises StokerError where the model cannot serve it."""
        ...

    def cancel(self, request_id: str, now: float) -> None:
        """End a request with `cancelled`; an unknown id is ignored."""
        ...

    def cancel_all(self, now: float) -> None:
        """End every request with `cancelled`."""
        ...

    def pause(self, request_id: str, now: float) -> None:
        """Take a request out of its slot or queue until `resume`; an unknown id is ignored (SPEC Q17)."""
        ...

    def resume(self, request_id: str, now: float) -> None:
        """Let a paused request go on; an unknown id is ignored."""
        ...

    def evacuate(self, reason: str, now: float) -> list[Submit]:
        """Take every request off it, to go on later from the tokens it has (SPEC M4, L5)."""
        ...

    def evacuate_waiting(self, reason: str, now: float) -> list[Submit]:
        """The same for requests of which nothing runs."""
        ...

    def hold_back(self, throttle: Throttle) -> None:
        """Let only some of its requests run from the next turn on (SPEC M4, M6)."""
        ...

    def drop_idle(self, now: float) -> None:
        """Free every cell that no running or queued request needs, and what the backend can make again."""
        ...

    def close(self) -> None:
        """Free the native model."""
        ...

    # ------------------------------------------------------------ a turn

    def schedule(self, now: float) -> None:
        """Decide what the next step computes; ends requests past their deadline."""
        ...

    def step(self, now: float) -> None:
        """Compute it."""
        ...

    def expire(self, now: float) -> None:
        """End requests past their deadline, without a turn."""
        ...

    def rest(self, now: float) -> None:
        """Nothing is to be computed: store something that is only in cells."""
        ...
