"""What a backend may add to the core protocol: one small protocol each.

`Backend.extensions` names those that a loaded model has; there is no other way to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from stoker.backends.protocol.scoring import ScoringLane

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stoker.backends.protocol.backend import BatchPlan, Buffer, Conditioning
    from stoker.backends.protocol.scoring import Scoring
    from stoker.backends.protocol.vision import Vision
    from stoker.ipc.usage import Tensor


class Conditioner(Protocol):
    """Computes tokens with something beside them: adapters, a source, images, rows of a whole prompt."""

    def condition(self, seq: int, conditioning: Conditioning) -> None:
        """Compute the sequence's next tokens with this, until the next call; computes nothing itself.

        Called each time a sequence of the scheduler gets this number, so a backend may forget it at a drop.

        Raises:
            UnsupportedError: it holds what this model cannot do.
        """
        ...


class StateTransfer(Protocol):
    """Sequences as bytes: what is exported and imported again is bit-exact, an initial state included."""

    def export_state(self, seq: int) -> Buffer:
        """The sequence's state."""
        ...

    def import_state(self, seq: int, data: Buffer) -> None:
        """Put exported state into the empty sequence `seq`.

        Raises:
            InvalidRequestError: the bytes are foreign or damaged.
            PoolFullError: no cells for it; nothing changed.
        """
        ...


class CopyTimes(Protocol):
    """Where states are not in host memory, and copying one is worth a thought (SPEC C16)."""

    def export_s(self, seq: int) -> float:
        """Seconds that an export of the sequence would take, about."""
        ...


class RecurrentState(Protocol):
    """A recurrent model's state as the tensors that `Capabilities.state_layout` names."""

    def read_state(self, seq: int) -> list[Tensor]:
        """The state after the sequence's tokens."""
        ...

    def write_state(self, seq: int, tensors: Sequence[Tensor]) -> None:
        """Let the empty sequence `seq` begin from a state; its length stays 0, and only `drop` removes it.

        Raises:
            PoolFullError: no room for it; nothing changed.
        """
        ...


class LastHidden(Protocol):
    """Hidden states."""

    def last_hidden(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """What the model made of the last of `tokens`, float32 (width,), before the output matrix (SPEC D8).

        The sequence holds `tokens`, or all but the last of them; afterwards it holds them all. Holding all of
        them costs a step of one token where the model can trim, and else a step of each.

        Raises:
            UnsupportedError: the model gives none.
            PoolFullError: no cell for the last token.
            StepFailedError: the native decode failed, or there is no memory for it.
        """
        ...


class TextScorer(Protocol):
    """Scores texts after a prompt."""

    def scoring(
        self,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        namespace: bytes = b"",
        lane: ScoringLane = ScoringLane.CHOICES,
    ) -> Scoring:
        """How likely each of `texts` is after `prompt`, which has a token at least (SPEC D5).

        Computes nothing itself, and touches no sequence. The prompt begins with the model's own state. What a
        scoring of another `namespace` has computed is not used again; slices of another `lane` in between
        cost it nothing.

        Raises:
            UnsupportedError: the model predicts no tokens of a prompt.
        """
        ...


class Drafter(Protocol):
    """A smaller model that guesses for a larger one (SPEC D9)."""

    def guess(self, tokens: Sequence[int], count: int, namespace: bytes = b"") -> list[int]:
        """Up to `count` tokens that may follow a text; none while it still reads it, some at each call.

        What it has read of another `namespace` is not used again.
        """
        ...


class Threads(Protocol):
    """CPU threads of the steps."""

    @property
    def num_threads(self) -> int:
        """Threads a step uses."""
        ...

    def set_threads(self, num_threads: int) -> None:
        """Use that many from the next step on."""
        ...


class StepAbort(Protocol):
    """Steps that end before they are over, told so by any thread (SPEC Q27)."""

    def abort_step(self) -> None:
        """End the step under way, or the next one, with StepAbortedError; idempotent, from any thread."""
        ...

    def allow_steps(self) -> None:
        """Compute steps to their ends again."""
        ...


class Compaction(Protocol):
    """Cells whose places decide what a step costs, or its last bits."""

    def arrange(self, plan: BatchPlan) -> Sequence[int]:
        """Move tokens so that a step of `plan` finds them where it should; copies, computes nothing.

        In a pool where sums are taken in the order of the cells, tokens go into free cells before them,
        shared ones for all who share them: a sequence that grew into a cell before its own tokens would get
        other last bits than alone; `launch` does that too. Of streams some are copied, so that those of the
        plan follow each other. Asked for before a step, its time is not the step's.

        Returns:
            Places of the plan's items in the order in which the step costs least; a range: as they are.
        """
        ...


Span: TypeAlias = tuple[int, int]
"""Tokens of a sequence by those before them, and their number."""


class Tiles(Protocol):
    """Steps in which so many rows cost less than somewhat fewer: they are computed in tiles (SPEC Q24).

    Costs are in products of the weights with one row.
    """

    @property
    def num_rows(self) -> int:
        """Rows of a tile."""
        ...

    def alone(self, spans: Iterable[Span]) -> float:
        """What the rows of some tokens cost in steps of less than a tile."""
        ...

    def together(self, spans: Iterable[Span]) -> float:
        """What they cost in one step of a tile or more, padded if they are fewer."""
        ...

    def num_missing(self, plan: BatchPlan) -> int:
        """Rows that a step of `plan` is padded with."""
        ...


class Draws(Protocol):
    """Candidates in place of rows of logits: found where they were computed, so that rows need not travel."""

    @property
    def num_candidates(self) -> int:
        """Logits of a row that an item with `takes_candidates` gets."""
        ...


class Scratch(Protocol):
    """Memory that is made again when it is needed, such as a context that only scores use (SPEC M4)."""

    def give_back(self) -> None:
        """Free it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStats:
    """Weights that are read from their file as they are needed, and what that took so far.

    Attributes:
        size_bytes: of all of them.
        budget_bytes: what may stay in memory now.
        resident_bytes: what of them is in memory.
        num_faults: page faults of steps that had to wait for storage.
        read_bytes: what steps read from storage.
        read_s: seconds of the steps that did.
    """

    size_bytes: int
    budget_bytes: int
    resident_bytes: int
    num_faults: int = 0
    read_bytes: int = 0
    read_s: float = 0.0


class PagedWeights(Protocol):
    """Weights of which a part stays in memory, the others being read from a mapped file (SPEC R14)."""

    def hold(self, part: float) -> int:
        """Keep that part of the budget from now on, 0 to 1; returns the bytes that this dropped."""
        ...

    def resident_bytes(self) -> int:
        """What is in memory, from any thread; the kernel may take it back at any time."""
        ...

    def stats(self) -> PageStats:
        """What stays, and what was read."""
        ...


class OnDevices(Protocol):
    """Holds memory of accelerators beside that of the machine."""

    def memory_by_device(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes by `Device.id` and by line, of the devices that have memory of their own.

        It is a part of `Backend.memory()`, whose lines are totals: what no device holds of a line lies in the
        machine's memory, and so does all that an integrated device uses. A device that is computed on and
        holds nothing is there, with no lines.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What a loaded model has beyond the core; None: it has not."""

    conditioner: Conditioner | None = None
    states: StateTransfer | None = None
    copy_times: CopyTimes | None = None
    recurrent: RecurrentState | None = None
    hidden: LastHidden | None = None
    scorer: TextScorer | None = None
    vision: Vision | None = None
    drafter: Drafter | None = None
    threads: Threads | None = None
    aborts: StepAbort | None = None
    compaction: Compaction | None = None
    tiles: Tiles | None = None
    scratch: Scratch | None = None
    devices: OnDevices | None = None
    draws: Draws | None = None
    pages: PagedWeights | None = None


NO_EXTENSIONS = Extensions()
