"""How long a draft pays: by how often guesses were accepted, and what their steps cost (SPEC D9).

An accepted guess saves a step, a rejected one was computed for nothing. Owns the acceptance rates and a
credit of what drafts have saved and lost, which bounds what the next ones may lose: decoding with drafts is
never much slower than without. The credit is in plain steps, so that it means the same on any machine. Pure:
costs come from the step-time model, measured times as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.scheduler.cost import StepCost

COUNTS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Guesses that a step may carry; matrix products grow in steps of eight rows."""
MIN_SPEEDUP = 1.1
"""How much faster than plain decoding a step has to promise to be."""
FIRST_CREDIT = 3.0
MAX_CREDIT = 5.0
MIN_CREDIT = -6.0
"""The credit at first, and its bounds: what a bad stretch may cost, and how long it is remembered."""
MAX_RISKED = 0.15
"""The part of the credit that a draft may be expected to lose if its first guess is rejected."""
TRIAL_CREDIT = 0.01
"""What each plain step adds to the credit."""
MEMORY = 0.8
"""Weight of what was observed before, with each further draft."""
PRIOR_PULL = 0.01
"""How far rates return to what is assumed at first, with each plain step."""
PRIOR_WEIGHT = 4.0
"""Trials that a model's rates count for in those of a new sequence."""
UNMEASURED = 0.35
"""What a further token of a step costs, in plain steps, until such a step was measured."""
SLOWEST = 2.0
"""A step counts as at most so many times as long as predicted: beyond, other load disturbed it."""


class Rate:
    """How often something was true lately.

    Args:
        rate: what is assumed at first.
        weight: trials that it counts for.
    """

    def __init__(self, rate: float, weight: float = PRIOR_WEIGHT) -> None:
        self._first = rate * weight, weight
        self._true, self._tried = self._first

    def __repr__(self) -> str:
        return f"<Rate {self.value:.2f}>"

    @property
    def value(self) -> float:
        """Between 0 and 1, both excluded."""
        return min(max(self._true / self._tried, 0.01), 0.99)

    def note(self, num_true: int, num_tried: int) -> None:
        """Count trials, and how many of them were true."""
        self._true = MEMORY * self._true + num_true
        self._tried = MEMORY * self._tried + num_tried

    def fade(self) -> None:
        """Without a trial: return a little to what was assumed."""
        true, tried = self._first
        self._true += PRIOR_PULL * (true - self._true)
        self._tried += PRIOR_PULL * (tried - self._tried)


class Acceptance:
    """How likely guesses of one kind are accepted: the first, and each after an accepted one.

    Two rates, since a text either differs at once or repeats for long.
    """

    def __init__(self, first: float, further: float) -> None:
        self._first, self._further = Rate(first), Rate(further)

    def __repr__(self) -> str:
        return f"<Acceptance {self._first.value:.2f}, then {self._further.value:.2f}>"

    def copy(self) -> Acceptance:
        """The same rates as a prior of little weight, for a new sequence."""
        return Acceptance(self._first.value, self._further.value)

    @property
    def miss(self) -> float:
        """How likely the first is rejected."""
        return 1.0 - self._first.value

    def num_expected(self, count: int) -> float:
        """Expected tokens of a step with so many guesses: those accepted, and one more."""
        further = self._further.value
        return 1.0 + self._first.value * float(1.0 - further**count) / (1.0 - further)

    def note(self, num_drawn: int, *, is_missed: bool) -> None:
        """Count a draft: guesses accepted, and whether one was rejected after them or there were no more."""
        if num_drawn or is_missed:
            self._first.note(min(num_drawn, 1), 1)
        if num_drawn > 1 or (num_drawn and is_missed):
            self._further.note(num_drawn - 1, num_drawn - 1 + is_missed)

    def fade(self) -> None:
        """Without a draft: both rates fade."""
        self._first.fade()
        self._further.fade()


class DraftLength:
    """Draft lengths of one model.

    Attributes:
        credit: plain steps that may be lost now.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.credit = FIRST_CREDIT

    def __repr__(self) -> str:
        return f"<DraftLength {self.credit:.1f} steps to lose>"

    def num_worth(self, acceptance: Acceptance, most: int, guess_s: float = 0.0) -> int:
        """Guesses that pay best, up to `most`; 0: decode plainly.

        Args:
            acceptance: how likely they are accepted.
            most: how many there can be.
            guess_s: seconds to make one.
        """
        alone_s = self._cost.predict(1)
        if alone_s is None or self.credit <= 0.0:
            return 0
        best, best_s = 0, alone_s / MIN_SPEEDUP
        for count in _counts(most):
            step_s = self._step_s(count + 1, alone_s) + count * guess_s
            token_s = step_s / acceptance.num_expected(count)
            is_covered = (step_s / alone_s - 1.0) * acceptance.miss <= MAX_RISKED * self.credit
            if token_s < best_s and is_covered:
                best, best_s = count, token_s
        return best

    def settle(self, num_guesses: int, num_tokens: int, took_s: float) -> None:
        """Count a step with guesses: the tokens it gave, and seconds, guessing included."""
        alone_s = self._cost.predict(1)
        if alone_s is None:
            return
        most_s = SLOWEST * self._step_s(num_guesses + 1, alone_s)
        self._pay(num_tokens - min(took_s, most_s) / alone_s)

    def _step_s(self, num_tokens: int, alone_s: float) -> float:
        predicted_s = self._cost.predict(num_tokens) if self._cost.is_measured(num_tokens) else None
        return alone_s * (1.0 + UNMEASURED * (num_tokens - 1)) if predicted_s is None else predicted_s

    def stepped(self) -> None:
        """Count a plain step in which guesses were allowed."""
        self._pay(TRIAL_CREDIT)

    def _pay(self, won: float) -> None:
        self.credit = min(max(self.credit + won, MIN_CREDIT), MAX_CREDIT)


def _counts(most: int) -> Sequence[int]:
    below = [count for count in COUNTS if count < most]
    return [*below, min(most, COUNTS[-1])] if most > 0 else []
