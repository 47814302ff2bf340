"""How many tokens of each kind a step may carry (SPEC Q8, Q9).

The batch bounds every step. Beside interactive decode rows time bounds it too: prefill is cut into slices
that keep the step within its target, and background takes a small part of their time. Times come from the
step-time model; what is not measured yet is assumed to be small.
"""

from __future__ import annotations

from stoker.ipc.model import Policy
from stoker.scheduler.cost import StepCost

BALANCED_TARGETS = 3
"""Targets that a step with interactive prefill may take under the policy `balanced`."""
MIN_PREFILL_TOKENS = 8
"""An interactive prompt gets that many tokens a step even where decoding alone takes the whole target."""
BACKGROUND_TARGETS = 4
"""Targets that a step of background alone may take: an arrival waits for its end."""
MIN_BACKGROUND_TOKENS = 64
BACKGROUND_SHARE = 0.1
"""Under `latency`: the part of their time that interactive requests give to background in their steps."""
FINISH_TARGETS = 3.0
"""Targets that a step may take to bring a prompt to its end: its first token comes some steps sooner, and the
other sequences wait once for about as long as those steps together."""
PREFILL_SHARE = 0.75
"""Under `throughput`: the part of the batch that is kept for prefill."""


class StepBudget:
    """Answers in tokens. Remembers how much time background was given beside interactive work.

    Args:
        cost: the step-time model.
        n_batch: tokens of a step.
        policy: how they are shared.
        target_s: seconds of a step with interactive decode rows.
    """

    def __init__(
        self, cost: StepCost, n_batch: int, policy: Policy = Policy.LATENCY, target_s: float = 0.05
    ) -> None:
        self.n_batch, self.policy, self.target_s = n_batch, policy, target_s
        self._cost = cost
        self._credit_s = 0.0
        self.bursts = Bursts(target_s)

    def __repr__(self) -> str:
        target = f"{self.target_s * 1000:g} ms, background may take {self._credit_s * 1000:.1f} ms"
        return f"<StepBudget {self.policy}, {self.n_batch} tokens, {target}>"

    def decode_rows(self, num_prefilling: int) -> int:
        """Decode rows beside so many ready prefills, each of which gets a token at least."""
        if not num_prefilling:
            return self.n_batch
        if self.policy is Policy.THROUGHPUT:
            return max(1, self.n_batch - int(PREFILL_SHARE * self.n_batch))
        return max(self.n_batch // 2, self.n_batch - num_prefilling)

    def prefill(self, num_rows: int, num_prefilling: int) -> int:
        """Tokens of interactive prefill beside `num_rows` interactive decode rows."""
        num_left = self.n_batch - num_rows
        if not num_rows or self.policy is Policy.THROUGHPUT:
            return num_left
        targets = BALANCED_TARGETS if self.policy is Policy.BALANCED else 1.0
        # where more prompts wait than rows decode, their first tokens count for more than its next ones
        targets = max(targets, num_prefilling / num_rows)
        within = self._cost.tokens_within(targets * self.target_s, self.n_batch) - num_rows
        return min(num_left, max(within, num_prefilling, MIN_PREFILL_TOKENS))

    def image_prefill(self, num_rows: int) -> int:
        """Tokens of prompts with images beside `num_rows` interactive decode rows (SPEC V3)."""
        num_left, alone_s = self.n_batch - num_rows, self._cost.predict(num_rows)
        if alone_s is None or self.policy is Policy.THROUGHPUT or not self.bursts.suits(alone_s):
            return self.prefill(num_rows, 1)
        if not self.bursts.is_due:
            return 0
        within = self._cost.tokens_within(alone_s + self.target_s, self.n_batch) - num_rows
        return min(num_left, max(within, MIN_PREFILL_TOKENS))

    def can_finish(self, num_tokens: int, num_others: int) -> bool:
        """Whether the last tokens of an interactive prompt may go into a step, whatever its share."""
        within = self._cost.tokens_within(FINISH_TARGETS * self.target_s, self.n_batch)
        return num_tokens + num_others <= within

    def background(self, num_tokens: int, *, has_decoding: bool) -> int:
        """Tokens of background beside `num_tokens` of interactive work, decode rows among them or not."""
        num_left = self.n_batch - num_tokens
        if not num_tokens:
            if self.policy is Policy.THROUGHPUT:
                return num_left
            within = self._cost.tokens_within(BACKGROUND_TARGETS * self.target_s, self.n_batch)
            return min(num_left, max(within, MIN_BACKGROUND_TOKENS))
        if has_decoding:
            num_left = min(num_left, self._cost.tokens_within(self.target_s, self.n_batch) - num_tokens)
        alone_s = self._cost.predict(num_tokens)
        if self.policy is Policy.LATENCY and alone_s is not None:
            self._credit_s = min(self._credit_s + BACKGROUND_SHARE * alone_s, self.target_s)
            within = self._cost.tokens_within(alone_s + self._credit_s, self.n_batch)
            num_left = min(num_left, within - num_tokens)
        return max(0, num_left)

    def joined(self, num_tokens: int, num_joined: int) -> None:
        """`num_joined` background tokens go into a step beside `num_tokens` interactive ones."""
        if not num_tokens:
            return
        alone_s, together_s = self._cost.predict(num_tokens), self._cost.predict(num_tokens + num_joined)
        if alone_s is not None and together_s is not None:
            self._credit_s = max(0.0, self._credit_s - (together_s - alone_s))


PLAIN_STEPS = 40
"""Steps between two bursts: fewer than one token in twenty is late, so the 95th percentile stays."""
SHORT_STEP = 0.5
"""Steps up to this part of the target are short."""


class Bursts:
    """When work for images may delay decode rows, where steps are short (SPEC V3, Q8).

    An image's tokens need a native call of their own, which costs about as much as a short step whatever it
    carries. Beside every step it would make each half as long again; so it comes in bursts of a whole target
    with many plain steps between them, and one token in forty is late.

    Args:
        target_s: how long such a step may take.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._num_plain = PLAIN_STEPS

    def __repr__(self) -> str:
        return f"<Bursts {self._num_plain} steps since the last one>"

    def suits(self, step_s: float) -> bool:
        """Whether steps that take so long are short; otherwise work is spread evenly over them."""
        return step_s <= SHORT_STEP * self._target_s

    @property
    def is_due(self) -> bool:
        """Whether there were enough plain steps."""
        return self._num_plain >= PLAIN_STEPS

    def stepped(self) -> None:
        """Count a step with interactive decode rows."""
        self._num_plain += 1

    def taken(self) -> None:
        """Count from here: a burst was made."""
        self._num_plain = 0


SLICE_SHARE = 0.25
"""Part of the time of steps with interactive decode rows that goes to slices between them."""
MIN_SLICE_S = 0.001
"""A shorter slice would be mostly waking and stopping."""


class SliceBudget:
    """How long the next slice of a long computation may be, beside interactive steps (SPEC Q8, V3).

    An image takes as long to encode as dozens of steps. Where no sequence decodes a slice takes a whole
    target; beside decode rows it gets a part of their time: each token is a little later and none much.

    Args:
        target_s: seconds of a slice where no sequence decodes.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._credit_s = target_s

    def __repr__(self) -> str:
        return f"<SliceBudget {self._credit_s * 1000:.1f} of {self._target_s * 1000:g} ms>"

    def stepped(self, took_s: float) -> None:
        """A step with interactive decode rows took so long."""
        self._credit_s = min(self._credit_s + SLICE_SHARE * took_s, self._target_s)

    def idle(self) -> None:
        """No sequence decodes."""
        self._credit_s = self._target_s

    def next_s(self) -> float:
        """Seconds of the next slice; 0: none yet."""
        return self._credit_s if self._credit_s >= MIN_SLICE_S else 0.0

    def spent(self, took_s: float) -> None:
        """A slice took so long; one that took too long shortens the next ones."""
        self._credit_s -= took_s
