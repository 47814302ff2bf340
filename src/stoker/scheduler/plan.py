"""What one step computes: decode rows first, then fair slices of prefill (SPEC Q8, Q9).

Pure: from the running sequences and budgets of tokens to plan items. The scheduler has made sure before that
there are cells for the tokens.

`StepBudget` says how many tokens of each kind a step may carry. The batch bounds every step, and so does
the longest that one may take on the machine as it is now (SPEC Q23): only decode rows are never cut for it,
being a token each. Beside interactive decode rows prefill is cut into slices that keep the step within its
target, and background takes a small part of their time. Times come from the step-time model; what is not
measured yet is assumed to be small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

import msgspec

from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.ipc.model import Policy
from stoker.ipc.request import Priority
from stoker.kv.sequence import Sequence, SequenceState
from stoker.scheduler.cost import StepCost
from stoker.scheduler.slice_budget import Bursts

BALANCED_TARGETS = 3
"""Targets that a step with interactive prefill may take under the policy `balanced`."""
MIN_PREFILL_TOKENS = 8
"""An interactive prompt gets that many tokens a step even where decoding alone takes the whole target."""
BACKGROUND_TARGETS = 4
"""Targets that a step of background alone may take: an arrival waits for its end."""
MIN_BACKGROUND_TOKENS = 64
BACKGROUND_SHARE = 0.1
"""Under `latency`: the part of their time that interactive requests give to background in their steps."""
TILE_TOKENS = 64
"""llama.cpp computes attention over f16 keys for so many tokens at once; each of fewer takes 1.4 times as
long after 2,500 others (measured, SmolLM2)."""
STRETCH, STRETCHED_TOKENS = 4 / 3, 2 * TILE_TOKENS
"""Steps of up to so many tokens may take that many times `max_s` for one more tile: threads share rows of all
heads evenly, so few tokens are cut into many tiles that are not full. With 9 heads and two threads 64 tokens
are computed as 114, 128 as 171 and 512 as 512; after 2,500 others one of 64 takes 1.14 times one of 128."""
ALONE_TIMES = 10.0
"""A step that arrivals end may take that many times `max_s`: threads and memory are minded between steps."""
CROWD_STRETCH = 1.5
"""Targets that a step beside decode rows may take where more prompts wait than rows decode, or where it ends
one: a token costs as much in a small slice, so longer steps would only make readers wait."""
OVERTAKE = 4.0
"""A prompt goes before an earlier one where it ends that many times its own time sooner."""
PREFILL_SHARE = 0.75
"""Under `throughput`: the part of the batch that is kept for prefill."""


class StepBudget:
    """Answers in tokens. Remembers how much time background was given beside interactive work.

    Args:
        cost: the step-time model.
        n_batch: tokens of a step.
        policy: how they are shared.
        target_s: seconds of a step with interactive decode rows.
        max_s: seconds of any step.

    Attributes:
        finish_targets: targets that a step may take to bring a prompt to its end.
    """

    finish_targets = CROWD_STRETCH

    def __init__(
        self,
        cost: StepCost,
        n_batch: int,
        policy: Policy = Policy.LATENCY,
        target_s: float = 0.05,
        max_s: float = math.inf,
    ) -> None:
        self.n_batch, self.policy, self.target_s, self.max_s = n_batch, policy, target_s, max_s
        self._cost = cost
        self._credit_s = 0.0
        self.bursts = Bursts(target_s)

    def __repr__(self) -> str:
        times = f"{self.target_s * 1000:g} of {self.max_s * 1000:g} ms"
        credit = f"background may take {self._credit_s * 1000:.1f} ms"
        return f"<StepBudget {self.policy}, {self.n_batch} tokens, {times}, {credit}>"

    def num_left(self, num_tokens: int) -> int:
        """Tokens of prompts that fit a step of `num_tokens` others."""
        most = self.n_batch if self.max_s == math.inf else self._within_now()
        return min(self.n_batch - num_tokens, max(most - num_tokens, MIN_PREFILL_TOKENS))

    def _within_now(self) -> int:
        """Tokens of the longest step, on the machine as it is: whole tiles where that bounds it."""
        within = self._cost.tokens_now(self.max_s, self.n_batch)
        if within == self.n_batch:
            return within
        stretched = min(self._cost.tokens_now(STRETCH * self.max_s, self.n_batch), STRETCHED_TOKENS)
        most = max(within, stretched)
        return most - most % TILE_TOKENS if most >= TILE_TOKENS else within

    @property
    def longest_alone_s(self) -> float:
        """Seconds of a step that arrivals end (SPEC Q27)."""
        return ALONE_TIMES * self.max_s

    def alone(self, num_pending: int, num_prompts: int = 1) -> int:
        """Tokens of each of so many prompts in such a step, the shortest of which has `num_pending` left.

        Whole tiles, where that one does not come to its end.
        """
        within = self._cost.tokens_now(self.longest_alone_s, self.n_batch) // num_prompts
        if num_pending <= within:
            return num_pending
        return within - within % TILE_TOKENS if within >= TILE_TOKENS else within

    def decode_rows(self, num_prefilling: int) -> int:
        """Decode rows beside so many ready prefills, each of which gets a token at least."""
        if not num_prefilling:
            return self.n_batch
        if self.policy is Policy.THROUGHPUT:
            return max(1, self.n_batch - int(PREFILL_SHARE * self.n_batch))
        return max(self.n_batch // 2, self.n_batch - num_prefilling)

    def prefill(self, num_rows: int, num_prefilling: int) -> int:
        """Tokens of interactive prefill beside `num_rows` interactive decode rows."""
        num_left = self.num_left(num_rows)
        if not num_rows or self.policy is Policy.THROUGHPUT:
            return num_left
        most_s = self._targets(num_rows, num_prefilling) * self.target_s
        within = self._cost.tokens_within(most_s, self.n_batch) - num_rows
        return min(num_left, max(within, num_prefilling, MIN_PREFILL_TOKENS))

    def _targets(self, num_rows: int, num_prefilling: int) -> float:
        """Targets that a step with interactive decode rows may take beside so many prompts."""
        targets = BALANCED_TARGETS if self.policy is Policy.BALANCED else 1.0
        # where more prompts wait than rows decode, their first tokens count for more than its next ones
        return max(targets, min(num_prefilling / num_rows, CROWD_STRETCH))

    def without_rows(self, prompts: SequenceOf[Sequence], num_rows: int) -> dict[Sequence, int]:  # noqa: ARG002 - TiledStepBudget asks
        """Tokens of prompts that go in a step without so many interactive decode rows; empty: beside them."""
        return {}

    @property
    def owes_rows(self) -> bool:
        """Whether interactive decode rows have their step before prompts go without them."""
        return False

    def rows_waited(self, took_s: float, num_rows: int, num_prompts: int) -> None:
        """So many of them waited so long for a step of prompts, of which so many were ready."""

    def crowd(self, num_rows: int, sequences: list[Sequence]) -> int:  # noqa: ARG002 - StreamStepBudget asks
        """Tokens for which a step may take longer than `prefill` says, of several prompts."""
        return 0

    def holds_rows(self, sequences: list[Sequence]) -> bool:  # noqa: ARG002 - StreamStepBudget asks
        """Whether these prompts go in a step without interactive decode rows."""
        return False

    def rows_held(self, num_tokens: int) -> None:
        """A step of so many tokens goes without them."""

    def rows_gone(self) -> None:
        """No interactive sequence decodes."""

    def rows_stepped(self) -> None:
        """A step has interactive decode rows."""
        self.bursts.stepped()

    def image_prefill(self, num_rows: int) -> int:
        """Tokens of prompts with images beside `num_rows` interactive decode rows (SPEC V3)."""
        num_left, alone_s = self.num_left(num_rows), self._cost.predict(num_rows)
        if alone_s is None or self.policy is Policy.THROUGHPUT or not self.bursts.suits(alone_s):
            return self.prefill(num_rows, 1)
        if not self.bursts.is_due:
            return 0
        within = self._cost.tokens_within(alone_s + self.target_s, self.n_batch) - num_rows
        return min(num_left, max(within, MIN_PREFILL_TOKENS))

    def can_finish(self, num_tokens: int, num_others: int) -> bool:
        """Whether the last tokens of an interactive prompt may go into a step, whatever its share."""
        within = self._cost.tokens_within(self.finish_targets * self.target_s, self.n_batch)
        return num_tokens + num_others <= within

    def background(self, num_tokens: int, *, has_decoding: bool) -> int:
        """Tokens of background beside `num_tokens` of interactive work, decode rows among them or not."""
        num_left = self.num_left(num_tokens)
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

    def splits(self, rows: list[Sequence], prompts: list[Sequence], num_tokens: int) -> bool:  # noqa: ARG002 - TiledStepBudget asks
        """Whether `num_tokens` of prompts and these rows, of background alone, have steps in turns."""
        return False

    def is_enough(self, num_tokens: int, jobs: list[Sequence], num_others: int) -> bool:  # noqa: ARG002 - DeviceStepBudget asks
        """Whether background joins a step of `num_others` tokens with `num_tokens`."""
        return num_tokens > 0

    def slices(self, sequences: list[Sequence], num_tokens: int) -> list[int]:
        """Tokens of each prompt, of `num_tokens`: fair shares."""
        return fair_shares([sequence.num_in_reach for sequence in sequences], num_tokens)

    def joined(self, num_tokens: int, num_joined: int) -> None:
        """`num_joined` background tokens go into a step beside `num_tokens` interactive ones."""
        if not num_tokens:
            return
        alone_s, together_s = self._cost.predict(num_tokens), self._cost.predict(num_tokens + num_joined)
        if alone_s is not None and together_s is not None:
            self._credit_s = max(0.0, self._credit_s - (together_s - alone_s))


class Planned(msgspec.Struct, frozen=True):
    """One sequence's part of a step."""

    sequence: Sequence
    item: PlanItem

    @property
    def num_drafted(self) -> int:
        """How many of its last tokens are a draft; asked before the step counts as computed."""
        return max(0, len(self.item.tokens) - self.sequence.num_pending)


class StepPlan(msgspec.Struct, frozen=True):
    """The step: who takes part, with what.

    Attributes:
        parts: one a sequence.
        is_rows: each is the row of a sequence that decodes, without a draft.
    """

    parts: tuple[Planned, ...]
    is_rows: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens it computes."""
        return len(self.parts) if self.is_rows else _num_tokens(self.parts)

    @property
    def has_draft(self) -> bool:
        """Whether it computes tokens that are not drawn yet; asked before it counts as computed."""
        return any(part.num_drafted for part in self.parts)

    def without_draft(self) -> StepPlan:
        """The step as it would have been."""
        return StepPlan(tuple(Planned(part.sequence, _item(part.sequence, 1)) for part in self.parts))

    def shortened(self) -> StepPlan:
        """The first half of each part's tokens."""
        return StepPlan(
            tuple(
                Planned(part.sequence, _item(part.sequence, max(1, len(part.item.tokens) // 2)))
                for part in self.parts
            )
        )

    def in_order(self, places: SequenceOf[int]) -> StepPlan:
        """The same step with its parts in this order."""
        return StepPlan(tuple(self.parts[place] for place in places), self.is_rows)

    def batch(self) -> BatchPlan:
        """The backend's view of it."""
        return BatchPlan(tuple([part.item for part in self.parts]), self.is_rows)


def fair_shares(wanted: list[int], budget: int) -> list[int]:
    """Split `budget` tokens evenly; what one does not need goes to the others.

    A ready prefill gets at least one token while the budget has one for it.
    """
    shares = [0] * len(wanted)
    open_ends = [at for at, tokens in enumerate(wanted) if tokens]
    while budget > 0 and open_ends:
        each = max(1, budget // len(open_ends))
        for at in list(open_ends):
            given = min(each, wanted[at] - shares[at], budget)
            shares[at] += given
            budget -= given
            if shares[at] == wanted[at]:
                open_ends.remove(at)
    return shares


def one_after_another(
    sequences: SequenceOf[Sequence], num_tokens: int, cost: StepCost
) -> dict[Sequence, int]:
    """Tokens of each prompt that gets any, of `num_tokens`: all that one needs before the next gets any.

    By arrival; a short prompt overtakes a long one that came a little earlier, and none for ever.
    """

    def due(sequence: Sequence) -> tuple[float, int]:
        work_s = cost.predict(sequence.num_pending) or 0.0
        return sequence.arrival_s + OVERTAKE * work_s, sequence.slot or 0

    counts = {}
    for sequence in sorted(sequences, key=due):
        count = min(sequence.num_in_reach, num_tokens)
        if count:
            counts[sequence] = count
        num_tokens -= count
    return counts


class Planner:
    """Builds one step after the other; remembers only which sequence is first, and whose step it was.

    Args:
        budget: how many tokens of each kind a step may carry.
        max_prompt_rows: rows of logits one prompt may ask for in a step; they take memory.
    """

    def __init__(self, budget: StepBudget, max_prompt_rows: int) -> None:
        self.budget = budget
        self.max_prompt_rows = max_prompt_rows
        self._turn = 0
        self._jobs_read = False
        self._held: tuple[int, int] | None = None

    def plan(self, running: list[Sequence], favoured: Sequence | None = None) -> StepPlan | None:
        """The next step over `running` sequences, or None when nothing is ready.

        `favoured` is background whose turn this step is (SPEC Q7): no target of time keeps it out.
        """
        self._turn += 1
        if favoured is None and (rows := self._rows_alone(running)):
            return rows
        interactive = [s for s in running if not s.is_background and s is not favoured]
        background = [s for s in running if s.is_background and s is not favoured]
        if favoured is not None:
            interactive.append(favoured)
        self._held = None
        parts = self._interactive(interactive, favoured)
        if background and self._held is None:
            parts += self._background(background, parts)
        return StepPlan(tuple(parts)) if parts else None

    def computed(self, took_s: float) -> None:
        """The last step that was planned has taken so long; one that was ended or failed is not told."""
        if self._held is not None:
            self.budget.rows_waited(took_s, *self._held)
            self._held = None

    def again(self, plan: StepPlan) -> StepPlan:
        """The step after one of decode rows, of the same rows; it does not count as computed yet."""
        self._turn += 1
        self.budget.rows_stepped()
        return StepPlan(tuple([Planned(p.sequence, _next_row(p)) for p in plan.parts]), is_rows=True)

    def lengthened(self, plan: StepPlan) -> StepPlan | None:
        """`plan` with more tokens of its prompts, as a step that arrivals end; None: it cannot have more.

        Several prompts get equally many tokens, and no more than bring the shortest to its end, which would
        wait for the tokens of the others. None too where a prompt is at an image or its every logit is asked,
        where the plan brings one of several to its end, and where it mixes people's and background ones.
        """
        sequences = [part.sequence for part in plan.parts]
        if not all(map(_is_text_of_prompt, sequences)) or len({s.is_background for s in sequences}) > 1:
            return None
        if len(sequences) > 1 and any(len(p.item.tokens) == p.sequence.num_pending for p in plan.parts):
            return None
        count = self.budget.alone(min(s.num_in_reach for s in sequences), len(sequences))
        if count * len(sequences) <= plan.num_tokens:
            return None
        return StepPlan(tuple(Planned(sequence, _item(sequence, count)) for sequence in sequences))

    def _rows_alone(self, running: list[Sequence]) -> StepPlan | None:
        """The step where interactive rows decode and nothing else runs; None: it is another one."""
        for sequence in running:
            if sequence.state is not SequenceState.DECODE or sequence.priority is not Priority.INTERACTIVE:
                return None
        if not 0 < len(running) <= self.budget.n_batch:
            return None
        self.budget.rows_stepped()
        rows = sorted(running, key=_BY_SLOT) if len(running) > 1 else running
        return StepPlan(tuple([Planned(s, _row(s)) for s in rows]), is_rows=True)

    def _interactive(self, sequences: list[Sequence], favoured: Sequence | None) -> list[Planned]:
        """Every decode row that fits the batch, then prefill within its budget."""
        decoding = self._rotated([s for s in sequences if s.state is SequenceState.DECODE])
        prefilling = self._rotated([s for s in sequences if s.state is SequenceState.PREFILL])
        if not decoding:
            self.budget.rows_gone()
        elif favoured is None:
            if self._goes_alone(prefilling):
                parts = self._beside(prefilling, None, [])
                self.budget.rows_held(_num_tokens(parts))
                return parts
            if counts := self._without_rows(prefilling, len(decoding)):
                if not self.budget.owes_rows:
                    self._held = len(decoding), len(prefilling)
                    return [Planned(s, _item(s, count)) for s, count in counts.items()]
                prefilling = self._to_finish_beside(prefilling, len(decoding))
        rows = sorted(decoding[: self.budget.decode_rows(len(prefilling))], key=_BY_SLOT)
        parts = [Planned(s, _item(s, 1)) for s in rows]
        if rows:
            self.budget.rows_stepped()
        at_images = [s for s in prefilling if rows and s.is_at_image and s is not favoured]
        if at_images:
            prefilling = [s for s in prefilling if s not in at_images]
        return self._beside(prefilling, favoured, parts) + self._at_images(at_images, parts)

    def _goes_alone(self, prefilling: list[Sequence]) -> bool:
        return self.budget.holds_rows(prefilling) and not any(s.is_at_image for s in prefilling)

    def _without_rows(self, prefilling: list[Sequence], num_rows: int) -> dict[Sequence, int]:
        if not prefilling or not all(map(_is_text_of_prompt, prefilling)):
            return {}
        return self.budget.without_rows(prefilling, num_rows)

    def _to_finish_beside(self, prefilling: list[Sequence], num_rows: int) -> list[Sequence]:
        """The prompt nearest to its end, where it comes to it beside the rows that others wait for."""
        nearest = min(prefilling, key=lambda s: s.num_pending)
        return [nearest] if self.budget.can_finish(nearest.num_pending, num_rows) else []

    def _beside(
        self, prefilling: list[Sequence], favoured: Sequence | None, rows: list[Planned]
    ) -> list[Planned]:
        """The decode rows, and prefill of text within its budget."""
        parts, room = list(rows), self.budget.num_left(len(rows))
        if favoured is not None and favoured in prefilling:
            num_left = room
        else:
            num_left = self.budget.prefill(len(rows), len(prefilling))
            num_left = max(num_left, self.budget.crowd(len(rows), prefilling))
        last = self._to_finish(prefilling, num_left, parts)
        if last is not None:
            prefilling.remove(last)
            count = min(last.num_pending, room)
            num_left -= min(count, num_left // (len(prefilling) + 1))
            room -= count
            parts.append(Planned(last, _item(last, count)))
        return parts + self._prefill(prefilling, num_left, room)

    def _at_images(self, sequences: list[Sequence], rows: list[Planned]) -> list[Planned]:
        """Prompts that are at an image beside decode rows: seldom, as their work is long."""
        if not sequences:
            return []
        num_others = _num_tokens(rows)
        num_left = self.budget.image_prefill(num_others)
        parts = self._prefill(sequences, num_left, self.budget.num_left(num_others))
        if parts:
            self.budget.bursts.taken()
        return parts

    def _to_finish(self, prefilling: list[Sequence], num_left: int, rows: list[Planned]) -> Sequence | None:
        """The prompt nearest to its end, if a step can bring it there: its first token is worth the delay.

        What it takes beyond its share of `num_left` is not taken from the others.
        """
        nearest = min(prefilling, key=lambda s: s.num_pending, default=None)
        if nearest is None or _asks_all(nearest) or nearest.num_in_reach < nearest.num_pending:
            return None
        count, room = nearest.num_pending, self.budget.num_left(len(rows))
        num_others = min(num_left - min(count, num_left // len(prefilling)), max(0, room - count))
        return nearest if self.budget.can_finish(count, len(rows) + num_others) else None

    def _background(self, sequences: list[Sequence], others: list[Planned]) -> list[Planned]:
        """Background: decode rows, then prefill, within what the `others` of the step leave it."""
        num_others = _num_tokens(others)
        has_decoding = any(part.sequence.state is SequenceState.DECODE for part in others)
        num_left = self.budget.background(num_others, has_decoding=has_decoding)
        if not self.budget.is_enough(num_left, sequences, num_others):
            return []
        decoding = self._rotated([s for s in sequences if s.state is SequenceState.DECODE])
        prefilling = self._rotated([s for s in sequences if s.state is SequenceState.PREFILL])
        if not num_others and decoding and self.budget.splits(decoding, prefilling, num_left):
            self._jobs_read = not self._jobs_read
            decoding, prefilling = ([], prefilling) if self._jobs_read else (decoding, [])
        rows = sorted(decoding[: max(1, num_left - len(prefilling))], key=_BY_SLOT)
        parts = [Planned(s, _item(s, 1)) for s in rows]
        room = self.budget.num_left(num_others) - len(rows)
        parts += self._prefill(prefilling, num_left - len(rows), room)
        self.budget.joined(num_others, _num_tokens(parts))
        return parts

    def _prefill(self, sequences: list[Sequence], budget: int, batch_room: int) -> list[Planned]:
        """Slices of `budget`; a prompt whose every logit is asked comes whole, or waits for its turn.

        One that comes in slices all the same is brought to its end before the next one begins: the backend
        holds the beginning of one such text.
        """
        if min(budget, batch_room) <= 0:
            return []
        parts: list[Planned] = []
        for sequence in sorted(filter(_asks_all, sequences), key=lambda each: -each.num_computed):
            wanted = min(sequence.num_in_reach, self.max_prompt_rows)
            if wanted <= batch_room or not parts:
                parts.append(Planned(sequence, _item(sequence, min(wanted, batch_room))))
                batch_room -= len(parts[-1].item.tokens)
            if wanted < sequence.num_pending:
                break
        others = [sequence for sequence in sequences if not _asks_all(sequence)]
        shares = self.budget.slices(others, min(budget, batch_room))
        return parts + [Planned(s, _item(s, n)) for s, n in zip(others, shares, strict=True) if n]

    def _rotated(self, sequences: list[Sequence]) -> list[Sequence]:
        if not sequences:
            return sequences
        first = self._turn % len(sequences)
        return sequences[first:] + sequences[:first]


def _num_tokens(parts: Iterable[Planned]) -> int:
    return sum([len(part.item.tokens) for part in parts])


_BY_SLOT = attrgetter("slot")


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, f"{sequence!r} runs without a slot"
    return sequence.slot


def _asks_all(sequence: Sequence) -> bool:
    return sequence.wants_prompt_logits and sequence.num_computed < sequence.num_prompt


def _is_text_of_prompt(sequence: Sequence) -> bool:
    return sequence.state is SequenceState.PREFILL and not sequence.is_at_image and not _asks_all(sequence)


def _row(sequence: Sequence) -> PlanItem:
    """The last token of a sequence that decodes, the one that is not computed."""
    start, tokens = sequence.num_computed, sequence.tokens
    assert start + 1 == len(tokens), f"{sequence!r} does not decode"
    assert sequence.slot is not None, f"{sequence!r} runs without a slot"
    return PlanItem(sequence.slot, start, (tokens[start],), 1, sequence.takes_candidates)


def _next_row(part: Planned) -> PlanItem:
    """The token that follows a decode row's."""
    seq, start, _, _, takes_candidates = msgspec.structs.astuple(part.item)
    tokens = part.sequence.tokens
    assert start + 2 == len(tokens), f"{part.sequence!r} has drawn nothing after {part.item!r}"
    return PlanItem(seq, start + 1, (tokens[-1],), 1, takes_candidates)


def _item(sequence: Sequence, count: int) -> PlanItem:
    start, end = sequence.num_computed, sequence.num_computed + count
    is_whole = end == len(sequence.tokens)
    num_logits = count if _asks_all(sequence) else int(is_whole)
    tokens = sequence.tokens[start:end]
    return PlanItem(_slot(sequence), start, tokens, num_logits, sequence.takes_candidates)
