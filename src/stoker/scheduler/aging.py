"""Background work does not starve (SPEC Q7): when it is owed a step, and which sequence is next.

A background sequence that has had no step for `patience_s` is owed a token. While any is owed one, one step
in ten is for the one that has waited longest, until its token is drawn: a long prompt takes several such
steps before the next one has its turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.kv.sequence import Sequence

ONE_STEP_IN = 10


class Aging:
    """Counts steps since the last one that was owed.

    Attributes:
        num_steps_total: steps that were given because they were owed.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.num_steps_total = 0
        self._steps_since = ONE_STEP_IN

    def __repr__(self) -> str:
        return f"<Aging {self.patience_s:g} s, {self._steps_since} steps since the last turn>"

    def is_owed(self, sequence: Sequence, now: float) -> bool:
        """Whether it has waited for `patience_s`, or did so and has not had its token yet."""
        has_waited = now - sequence.last_step_s >= self.patience_s
        return sequence.is_background and not sequence.is_held and (sequence.is_owed or has_waited)

    def next_owed(self, sequences: Iterable[Sequence], now: float) -> Sequence | None:
        """The sequence that the next step is owed to, if one is due; notes which are owed one from now on."""
        waiting = [sequence for sequence in sequences if self.is_owed(sequence, now)]
        for sequence in waiting:
            if sequence.owed_since_s is None:
                sequence.owed_since_s = sequence.last_step_s
        return min(waiting, key=_order, default=None) if self._steps_since >= ONE_STEP_IN else None

    def stepped(self, favoured: Sequence | None) -> None:
        """Count a step; `favoured` is the sequence that it was owed to."""
        self._steps_since = 1 if favoured is not None else self._steps_since + 1
        self.num_steps_total += favoured is not None


def _order(sequence: Sequence) -> tuple[float, float, int]:
    assert sequence.owed_since_s is not None, f"{sequence!r} is owed nothing"
    return sequence.owed_since_s, sequence.arrival_s, sequence.key.index
