"""What a turn of the scheduler decided: operations on the backend, and what was admitted, parked or ended.

Values only. The runner applies the operations, in order, before the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.cache.entry import Entry
from stoker.kv.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Fork:
    """Backend: the empty sequence `dst` shares the first `length` tokens of `src`."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Backend: keep the first `length` tokens of `seq`."""

    seq: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Backend: forget `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Export:
    """Backend: the state of `seq` as bytes, to be kept by `entry`; for `sequence`, if it is parked on it."""

    seq: int
    entry: Entry
    sequence: Sequence | None = None


@dataclass(frozen=True, slots=True)
class Import:
    """Backend: put the state that `entry` keeps into the empty `seq`, and of it keep `length` tokens."""

    seq: int
    entry: Entry
    sequence: Sequence
    length: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Backend: put a recurrent model's state into the empty `seq`, for `sequence` to begin from."""

    seq: int
    sequence: Sequence


KVOp = Fork | Trim | Drop | Export | Import | Begin


@dataclass(frozen=True, slots=True)
class Parking:
    """A sequence that was parked, and why; `by` is the request that the reason names."""

    sequence: Sequence
    reason: str
    by: str = ""


@dataclass(slots=True)
class Schedule:
    """What one call decided; `ops` run in order before the step.

    Attributes:
        admitted: got a slot, for the first time or again.
        parked: gave theirs up and wait.
        preempted: ended, as they asked not to be parked.
        hindered: wait in the queue, for another reason than before.
    """

    ops: list[KVOp] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    parked: list[Parking] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    hindered: list[Sequence] = field(default_factory=list)
