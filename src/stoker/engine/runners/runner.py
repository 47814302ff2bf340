"""What the loop drives: one loaded model and the requests on it.

`SlotRunner` runs what generates, step by step; `OneShotRunner` computes whole texts. The loop, residency and
status know this protocol alone. What is done to one request, such as pause or cancel, is the job table's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Backend
    from stoker.backends.protocol.encoding import Encoder
    from stoker.engine.jobs.job import Job, JobQueue
    from stoker.engine.jobs.prepare import PrepContext
    from stoker.engine.residency.load import Load
    from stoker.engine.threads.timer import Place
    from stoker.ipc.model import ModelSpec
    from stoker.ipc.request import Priority
    from stoker.ipc.status import ModelRoom, SlotStatus
    from stoker.kv.sequence import Sequence
    from stoker.scheduler.cost import StepTally
    from stoker.scheduler.queue import Throttle


@dataclass(frozen=True, slots=True)
class Contender:
    """A model with a claim to the next turn.

    Attributes:
        is_encoder: it computes whole texts.
        has_readers: interactive requests decode, token by token.
    """

    name: str
    is_encoder: bool = False
    has_readers: bool = False


@dataclass(slots=True)
class Flight:
    """The step of a model that devices compute beside the loop.

    Attributes:
        place: the devices; empty: steps are computed in the loop, or partly by the CPU, which all share.
        due_s: when it is to be asked for, by the engine's clock: when it is probably over, or at once where
            steps of its size are not known; 0: none is under way.
    """

    place: Place = frozenset()
    due_s: float = 0.0


class ModelRunner(Protocol):
    """A model in memory. A turn is `schedule`, then `step`.

    Attributes:
        spec: how it was loaded.
        load: how it came into memory.
        degraded: what it was given less of than was asked for.
        flight: its step that is under way.
        gathers: a first step of several prompts takes its device as long as one of one.
        num_new: people's requests that it accepted since it was scheduled last.
        stepped_s: when its last turn ended, on the engine's clock; set by the loop.
        allowance_s: what a one-shot call may take beside readers of another model; None: its own target.
        prep: what preparing a request for it takes.
        tally: what its steps did since that was asked last.
    """

    spec: ModelSpec
    load: Load | None
    degraded: tuple[str, ...]
    flight: Flight
    gathers: bool
    num_new: int
    stepped_s: float
    allowance_s: float | None
    prep: PrepContext
    tally: StepTally

    # ------------------------------------------------------------ questions

    @property
    def backend(self) -> Backend | Encoder:
        """The loaded model."""
        ...

    @property
    def queues(self) -> tuple[JobQueue, ...]:
        """Where its requests wait and run."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
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
    def is_cold(self) -> bool:
        """Whether there are kernels of its devices to be warmed."""
        ...

    @property
    def num_cells(self) -> tuple[int, int]:
        """Cells in all, and cells in use."""
        ...

    @property
    def running(self) -> list[Sequence]:
        """Sequences that may go on from what is stored, and compute; read only."""
        ...

    @property
    def num_computing(self) -> tuple[int, int]:
        """Sequences in slots that read their prompts, and those that write."""
        ...

    def contender(self) -> Contender:
        """How it takes part in the choice of the next turn."""
        ...

    def is_owed(self, now: float) -> bool:
        """Whether background of it has waited longer than its patience (SPEC Q7)."""
        ...

    def check_queue(self, priority: Priority, num_arriving: int) -> None:
        """Raises QueueFullError when its queue is at its bound; `num_arriving` requests are on their way."""
        ...

    def stats(self) -> dict[str, float]:
        """Every counter, for status pages and bug reports."""
        ...

    def activity(self, now: float) -> dict[str, float]:
        """What its steps were like lately, by name; empty: it has none."""
        ...

    def room(self) -> ModelRoom | None:
        """What it has left for a new request; None: it has no cells."""
        ...

    def slot_status(self, now: float) -> list[SlotStatus]:
        """Each slot as it is now."""
        ...

    # ------------------------------------------------------------ commands

    def accept(self, job: Job, now: float) -> None:
        """Put a prepared request in its queue; raises StokerError where the model cannot serve it."""
        ...

    def settle(self, now: float) -> None:
        """Take in what a step in flight has computed, so that its sequences may be moved."""
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
        """Decide what the next step computes."""
        ...

    def step(self, now: float) -> None:
        """Compute it."""
        ...

    def rest(self, now: float) -> None:
        """Nothing is to be computed: store something that is only in cells."""
        ...

    def warm(self, now: float) -> None:
        """Nothing is to be computed: one step that warms kernels; only where `is_cold`."""
        ...
