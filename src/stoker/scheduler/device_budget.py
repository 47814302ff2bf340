"""Budgets of steps that a device computes beside the loop.

A device has a graph for each shape of step: one of as many tokens and rows as the step before costs nothing
to prepare, another is prepared anew, for about the time of a step. A slice costs little less for being small.
So prompts are brought to their ends one after the other in large slices, and background joins people's steps
seldom and then as a whole.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from stoker.ipc.model import Policy
from stoker.scheduler.plan import (
    BALANCED_TARGETS,
    MIN_BACKGROUND_TOKENS,
    MIN_PREFILL_TOKENS,
    StepBudget,
    one_after_another,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from stoker.kv.sequence import Sequence

ALONE_TARGETS = 4.0
"""Targets that a step without decode rows may take: an arrival waits for its end."""
CROWD_TARGETS = 2.0
"""The same in streams, where a step carries more; also what one may take to bring several prompts to their
ends: a large step of them is a few passes, and each small one as many."""
FINISH_TARGETS = 3.0
"""The same to bring one prompt to its end beside decode rows: its first token comes some steps sooner, and
the other sequences wait once for about as long as those steps together."""
HELD_TARGETS = 1.0
"""Targets that decode rows wait for several such steps: beside prompts they are a pass more, of another
shape. They wait for one as long as it is: beside the same prompts they would wait for longer."""
PROBE_TOKENS = 256
"""What a slice may carry before one of about that size was measured: what few tokens cost says nothing."""
WHOLE_TOKENS = 256
"""Background that wants more joins people's steps with that many tokens at least."""
RESHAPED_STEPS = 1.5
"""What the first step of the old shape costs more after one with background, in plain steps: measured on an
H100, 3 to 8 ms where a plain one takes 2.4 to 6. The step with background has its own in its time."""


class DeviceStepBudget(StepBudget):
    """As `StepBudget`, for a device; see the module.

    Attributes:
        alone_targets: targets that a step without decode rows may take.
    """

    alone_targets = ALONE_TARGETS
    finish_targets = FINISH_TARGETS

    def _within_now(self) -> int:
        within = self._cost.tokens_at_best(self.max_s / self._cost.slowdown.times, self.n_batch)
        return max(within, self._least())

    def prefill(self, num_rows: int, num_prefilling: int) -> int:
        """Tokens of interactive prefill beside `num_rows` decode rows; bounded without them too."""
        num_left = self.num_left(num_rows)
        if self.policy is Policy.THROUGHPUT:
            return num_left
        targets = self.alone_targets
        if num_rows:
            targets = max(
                BALANCED_TARGETS if self.policy is Policy.BALANCED else 1.0, num_prefilling / num_rows
            )
        # a step of many short prompts costs several of one long one: it says little of those
        within = self._cost.tokens_at_best(targets * self.target_s, self.n_batch) - num_rows
        return min(num_left, max(within, num_prefilling, MIN_PREFILL_TOKENS, self._least()))

    def background(self, num_tokens: int, *, has_decoding: bool) -> int:
        """Tokens of background beside `num_tokens` of interactive work; alone one target's."""
        if num_tokens or self.policy is Policy.THROUGHPUT:
            return super().background(num_tokens, has_decoding=has_decoding)
        within = self._cost.tokens_within(self.target_s, self.n_batch)
        return min(self.num_left(0), max(within, MIN_BACKGROUND_TOKENS, self._least()))

    def is_enough(self, num_tokens: int, jobs: list[Sequence], num_others: int) -> bool:
        """Whether background joins with `num_tokens`: all it wants, or as much as pays for another shape.

        Where it has saved up all it may, it takes what there is.
        """
        if num_others == 0 or num_tokens == 0 or self._credit_s >= self.target_s:
            return num_tokens > 0
        return num_tokens >= min(WHOLE_TOKENS, sum(job.num_in_reach for job in jobs))

    def joined(self, num_tokens: int, num_joined: int) -> None:
        """`num_joined` background tokens go into a step beside `num_tokens` interactive ones.

        What it costs beyond what was saved up is saved up before the next time.
        """
        alone_s, together_s = self._cost.predict(num_tokens), self._cost.predict(num_tokens + num_joined)
        if num_tokens and alone_s is not None and together_s is not None:
            self._credit_s -= together_s - alone_s + RESHAPED_STEPS * alone_s

    def slices(self, sequences: SequenceOf[Sequence], num_tokens: int) -> list[int]:
        """Tokens of each prompt, of `num_tokens`: one after the other, those that end soonest first."""
        counts = one_after_another(sequences, num_tokens, self._cost)
        return [counts.get(sequence, 0) for sequence in sequences]

    def _least(self) -> int:
        return 1 if self._cost.is_measured(PROBE_TOKENS) else PROBE_TOKENS


class StreamStepBudget(DeviceStepBudget):
    """As `DeviceStepBudget`, in streams, where many short prompts at once are a few large steps.

    A step of prompts of several lengths is brought to equal ones, so that it is a few passes (`evened`).
    """

    alone_targets = CROWD_TARGETS
    _held_s = 0.0

    def crowd(self, num_rows: int, sequences: SequenceOf[Sequence]) -> int:
        """Tokens that bring several prompts to their ends beside `num_rows` decode rows; 0: of no two."""
        most = self._cost.tokens_at_best(CROWD_TARGETS * self.target_s, self.n_batch) - num_rows
        most = min(most, self.num_left(num_rows))
        wanted = sorted(s.num_pending for s in sequences if s.num_in_reach == s.num_pending)
        sums = [total for total in accumulate(wanted) if total <= most]
        return sums[-1] if len(sums) > 1 else 0

    def holds_rows(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether several prompts go without the decode rows: all end, and rows have not waited for long."""
        num_tokens = sum(sequence.num_pending for sequence in sequences)
        if self.crowd(0, sequences) < num_tokens:
            return False
        took_s = self._cost.predict(num_tokens) if num_tokens else None
        targets = HELD_TARGETS if self._held_s else CROWD_TARGETS
        return took_s is not None and self._held_s + took_s <= targets * self.target_s

    def rows_held(self, num_tokens: int) -> None:
        """Decode rows wait for a step of so many tokens."""
        self._held_s += self._cost.predict(num_tokens) or 0.0

    def rows_stepped(self) -> None:
        """Interactive decode rows have their step."""
        super().rows_stepped()
        self._held_s = 0.0
