"""Drafts: guessed tokens that a step computes beside the last one drawn (SPEC D9).

Owns which sequence's next tokens are guessed, from what, how many, and the counts. What repeats is found by
`prompt_lookup`; a guess that differs from what the request draws never becomes a token. There is a draft
only where a sequence runs alone, and only in free cells.

An accepted guess saves a step, a rejected one was computed for nothing. `DraftLength` owns the acceptance
rates and a credit of what drafts have saved and lost, which bounds what the next ones may lose: decoding
with drafts is never much slower than without. The credit is in plain steps, so that it means the same on any
machine. What a step takes is the time on the wall from the one before, in company of whatever else runs.
While somebody reads, a step with a draft is bounded by the pace of the plain ones; where the step before gave
several tokens they are read while it is computed, and it may take that much longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from stoker.backends.protocol.backend import Backend
from stoker.ipc.model import ModelClass, Speculation
from stoker.kv.sequence import Sequence, SequenceState
from stoker.scheduler.cost import StepCost
from stoker.scheduler.plan import Planned, StepPlan
from stoker.scheduler.scheduler import Scheduler
from stoker.speculation.prompt_lookup import LookupMatch, SuffixIndex, continuation

COUNTS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Guesses that a step may carry; matrix products grow in steps of eight rows."""
MIN_SPEEDUP = 1.15
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
EXCESS_PULL = 0.05
"""The same of what steps with guesses took beyond their prediction: one that was disturbed would end them."""
PRIOR_WEIGHT = 4.0
"""Trials that a model's rates count for in those of a new sequence."""
UNMEASURED = 0.35
"""What a further token of a step costs, in plain steps, until such a step was measured."""
SLOWEST = 2.0
"""A plain step counts as at most so many times as long as predicted: beyond, other load disturbed it."""
SLOWEST_DRAFT = 4.0
"""The same of a step with guesses, which others disturb more often as it is longer, and of the plain one
after it, which a device prepares anew."""
FOLLOW = 0.2
"""How quickly times on the wall, and that of a guess by a draft model, are learned anew."""
FOLLOW_EXCESS = 0.5
"""The same of steps with guesses that take longer than predicted: the next ones are to be shorter."""
READ_GAP_S, READ_STEPS = 0.03, 2.0
"""While somebody reads, no step with guesses has them wait longer, or for so many plain steps, if more."""
MAX_READER_GAPS = 2.0
"""Where they read meanwhile what the step before has given, it takes as long as so many of these at most."""
WARY_STEPS = 32
"""Steps that a sequence runs alone after company before guesses are made for it: those who talk in turns come
again soon, and would find a long step and the others no longer in step with each other."""
ROOM = 0.9
"""The part of that which is planned to be used: some steps take longer than predicted."""


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
        self._plain_s: float | None = None  # from the end of a step to that of a plain one
        self._excess = 1.0  # how many times their prediction steps with guesses took
        self.credit = FIRST_CREDIT

    def __repr__(self) -> str:
        return f"<DraftLength {self.credit:.1f} steps to lose>"

    @property
    def reader_s(self) -> float:
        """The longest that somebody who reads may wait for a step with guesses."""
        return max(READ_GAP_S, READ_STEPS * (self._plain_s or self._cost.predict(1) or 0.0))

    def num_worth(
        self, acceptance: Acceptance, most: int, guess_s: float = 0.0, longest_s: float = math.inf
    ) -> int:
        """Guesses that pay best, up to `most`; 0: decode plainly.

        Args:
            acceptance: how likely they are accepted.
            most: how many there can be.
            guess_s: seconds to make one.
            longest_s: seconds that the step may take.
        """
        alone_s = self._cost.predict(1)
        if alone_s is None or not self._cost.knows(1) or self.credit <= 0.0:
            return 0  # of a plain step nothing is known: at first the shortest measured was a prompt's
        plain_s = self._plain_s or alone_s
        best, best_s = 0, plain_s / MIN_SPEEDUP
        for count in _counts(most):
            step_s = self._excess * self._step_s(count + 1, alone_s) + count * guess_s
            if step_s > ROOM * longest_s:
                continue  # a longer one may be estimated as quicker, where neither was measured
            token_s = step_s / acceptance.num_expected(count)
            is_covered = (step_s / plain_s - 1.0) * acceptance.miss <= MAX_RISKED * self.credit
            if token_s < best_s and is_covered:
                best, best_s = count, token_s
        return best

    def settle(self, num_guesses: int, num_tokens: int, took_s: float) -> None:
        """Count a step with guesses: the tokens it gave, and seconds from the step before to its end."""
        alone_s = self._cost.predict(1)
        if alone_s is None:
            return
        expected_s = self._step_s(num_guesses + 1, alone_s)
        times = min(took_s / expected_s, SLOWEST_DRAFT)
        self._pay(num_tokens - times * expected_s / (self._plain_s or alone_s))
        self._excess += (FOLLOW_EXCESS if times > self._excess else FOLLOW) * (times - self._excess)

    def _step_s(self, num_tokens: int, alone_s: float) -> float:
        """Seconds from one step to the end of one over so many tokens, now."""
        predicted_s = self._cost.predict(num_tokens) if self._cost.is_measured(num_tokens) else None
        if predicted_s is None:
            predicted_s = alone_s * (1.0 + UNMEASURED * (num_tokens - 1))
        times = self._cost.slowdown.times
        between_s = 0.0 if self._plain_s is None else max(0.0, self._plain_s - times * alone_s)
        return times * predicted_s + between_s

    def took(self, took_s: float) -> None:
        """A plain step that followed another one took so long from that one's end."""
        alone_s = self._cost.predict(1) if self._cost.knows(1) else None
        plain_s = self._plain_s or alone_s or took_s
        self._plain_s = plain_s + FOLLOW * (min(took_s, SLOWEST * plain_s) - plain_s)

    def stepped(self) -> None:
        """Count a plain step in which guesses were allowed; what drafts took too long fades."""
        self._pay(TRIAL_CREDIT)
        self._excess += EXCESS_PULL * (1.0 - self._excess)

    def went_back(self, took_s: float) -> None:
        """Count a plain step right after one with guesses.

        A device prepares it anew (SPEC Q18); on a CPU whoever writes the tokens out needs a core meanwhile.
        """
        plain_s = self._plain_s or self._cost.predict(1)
        if plain_s is not None:
            self._pay(1.0 - min(took_s / plain_s, SLOWEST_DRAFT))

    def _pay(self, won: float) -> None:
        self.credit = min(max(self.credit + won, MIN_CREDIT), MAX_CREDIT)


def pause_s(took_s: float, num_guesses: int) -> float:
    """Seconds between the tokens of a step with so many guesses, where they are read one after the other."""
    return took_s / (num_guesses + 1)


def _counts(most: int) -> list[int]:
    below = [count for count in COUNTS if count < most]
    return [*below, min(most, COUNTS[-1])] if most > 0 else []


MODEL_ACCEPTANCE = (0.75, 0.75)
"""Assumed of a draft model: the first guess, and each further one."""
REPEAT_ACCEPTANCE = ((0.5, 0.75), (0.65, 0.85), (0.8, 0.9), (0.9, 0.95))
"""The same of repeats of up to 4, 8, 16 and more tokens."""
MOST_WATCHED = 8
"""Guesses of one place that are compared with what is drawn where none of them was in a draft."""


class Subject:
    """The sequence that runs alone: what it repeats, and how often such repeats continue."""

    def __init__(self, sequence: Sequence, acceptance: tuple[Acceptance, ...]) -> None:
        self.sequence = sequence
        self.index = SuffixIndex()
        self._dropped = sequence.num_prompt, sequence.num_forgotten
        *repeats, of_model = [each.copy() for each in acceptance]
        self.repeats, self.of_model = tuple(repeats), of_model
        self._watched: dict[int, tuple[list[int], int]] = {}

    def __repr__(self) -> str:
        return f"<Subject {self.sequence.key} {self.index!r} {self.repeats} {self.of_model}>"

    def is_of(self, sequence: Sequence) -> bool:
        """Whether it is that sequence, with the tokens that the index has seen."""
        # A shift of the context drops tokens of the prompt, or generated ones: those that follow move.
        dropped = sequence.num_prompt, sequence.num_forgotten
        return self.sequence is sequence and self._dropped == dropped

    def watch(self, kind: int, match: LookupMatch) -> None:
        """Compare a repeat that is in no draft with what is drawn, unless one of its kind is watched."""
        if kind not in self._watched:
            self._watched[kind] = continuation(self.sequence.tokens, match, MOST_WATCHED), 0

    def watched(self, token: int) -> list[tuple[int, int, bool]]:
        """A token was drawn: kind, right guesses and whether it missed, of each watched repeat that ends."""
        ended = []
        for kind, (guess, num_before) in list(self._watched.items()):
            is_missed = guess[num_before] != token
            num_right = num_before + (not is_missed)
            if is_missed or num_right == len(guess):
                ended.append((kind, num_right, is_missed))
                del self._watched[kind]
            else:
                self._watched[kind] = guess, num_right
        return ended

    def watch_none(self) -> None:
        """Stop watching: a draft tells."""
        self._watched.clear()


class Speculator:
    """Extends the steps of one model by drafts where that pays.

    Args:
        may_draft: whether the request of an id runs and asks for drafts.
        mode: what the model was loaded with.
        now: the engine's clock, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        may_draft: Callable[[str], bool],
        mode: Speculation,
        now: Callable[[], float],
    ) -> None:
        limits = backend.capabilities
        can_take_back = limits.can_trim and limits.model_class is ModelClass.DECODER
        self._looks_up = can_take_back and mode.looks_up
        self._drafter = backend.extensions.drafter if can_take_back and mode.uses_model else None
        self._n_ctx, self._n_vocab = limits.n_ctx, limits.n_vocab
        self._most = min(limits.n_batch, limits.num_sequences) - 1  # rows that a context has room for anyway
        self._ends = frozenset(backend.vocabulary.eog_tokens)
        self._scheduler = scheduler
        self._may_draft = may_draft
        self._draft_length = DraftLength(scheduler.cost)
        self._now = now
        self._acceptance = tuple(Acceptance(*rates) for rates in (*REPEAT_ACCEPTANCE, MODEL_ACCEPTANCE))
        self._subject: Subject | None = None
        self._drafted_by: tuple[Acceptance, ...] = ()
        self._has_drafted = False  # in the step before
        self._num_wary = 0  # steps to come without guesses
        self._learned_s: float | None = None  # when that was learned from, if it was the subject's
        self._read_s = 0.0  # how long what that gave is read, one token after the other
        self._guessing_s = 0.0
        self._guess_s: float | None = None
        self.num_drafted_total = 0
        self.num_accepted_total = 0

    def __repr__(self) -> str:
        return f"<Speculator {self.num_accepted_total} of {self.num_drafted_total}, {self._draft_length!r}>"

    def stats(self) -> dict[str, float]:
        """Draft tokens that steps computed, and those of them that were drawn."""
        return {
            "num_drafted_total": self.num_drafted_total,
            "num_accepted_total": self.num_accepted_total,
        }

    # ------------------------------------------------------------ before the step

    def extended(self, plan: StepPlan) -> StepPlan:
        """The step with a draft, where one pays."""
        self._drafted_by, self._guessing_s = (), 0.0
        can_guess = self._looks_up or self._drafter is not None
        subject = self._subject_of(plan) if can_guess else None
        if subject is None:
            return plan
        if self._num_wary:
            self._num_wary -= 1
            return plan
        draft = self._repeated(subject) or self._modelled(subject)
        if not draft:
            return plan
        part = plan.parts[0]
        tokens = [*part.item.tokens, *draft]
        item = msgspec.structs.replace(part.item, tokens=tokens, num_logits=len(tokens))
        return StepPlan((Planned(part.sequence, item),))

    def _subject_of(self, plan: StepPlan) -> Subject | None:
        """The sequence of a step that decodes alone."""
        if len(self._scheduler.slots.running) != 1 or len(plan.parts) != 1:
            self._num_wary = WARY_STEPS
            return None
        sequence = plan.parts[0].sequence
        if sequence.state is not SequenceState.DECODE or not self._may_draft(sequence.key.request_id):
            return None
        subject = self._subject
        if subject is None or not subject.is_of(sequence):
            subject = self._subject = Subject(sequence, self._acceptance)
        return subject

    def _repeated(self, subject: Subject) -> list[int]:
        """What followed an earlier repeat of the last tokens."""
        match = subject.index.match(subject.sequence.tokens) if self._looks_up else None
        if match is None:
            return []
        kind = min(max((match.length - 1).bit_length() - 2, 0), len(REPEAT_ACCEPTANCE) - 1)
        acceptance = subject.repeats[kind]
        sequence = subject.sequence
        count = self._draft_length.num_worth(
            acceptance, self._num_possible(sequence), longest_s=self._longest_s(sequence)
        )
        if not count:
            subject.watch(kind, match)
            return []
        subject.watch_none()
        self._drafted_by = acceptance, self._acceptance[kind]
        return self._drawable(continuation(sequence.tokens, match, count))

    def _modelled(self, subject: Subject) -> list[int]:
        """What the draft model guesses."""
        sequence, acceptance = subject.sequence, subject.of_model
        if self._drafter is None or sequence.images:
            return []
        count = self._draft_length.num_worth(
            acceptance, self._num_possible(sequence), self._guess_s or 0.0, self._longest_s(sequence)
        )
        if not count:
            return []
        begun_s = self._now()
        draft = self._drafter.guess(sequence.tokens, count, sequence.conditioning.namespace)
        if not draft:
            return []  # it still reads
        self._guessing_s = self._now() - begun_s
        each_s = self._guessing_s / len(draft)
        self._guess_s = each_s if self._guess_s is None else self._guess_s + FOLLOW * (each_s - self._guess_s)
        self._drafted_by = acceptance, self._acceptance[-1]
        return self._drawable(draft)

    def _longest_s(self, sequence: Sequence) -> float:
        """Seconds that its step may take: nobody reads along with a job."""
        if sequence.is_background:
            return self._scheduler.limits.max_step_s
        gap_s = self._draft_length.reader_s
        return min(gap_s + self._read_s, MAX_READER_GAPS * gap_s)

    def _num_possible(self, sequence: Sequence) -> int:
        """Guesses that fit: rows, free cells, the context, and the tokens it still wants."""
        num_tokens = len(sequence.tokens)
        most = min(self._most, self._scheduler.cells.free - 1, self._n_ctx - num_tokens - 1)
        if sequence.num_wanted is not None:
            most = min(most, sequence.num_wanted - sequence.num_generated - 1)
        return most

    def _drawable(self, draft: list[int]) -> list[int]:
        """The draft up to a token that ends the text or stands for an image."""
        for at, token in enumerate(draft):
            if not 0 <= token < self._n_vocab or token in self._ends:
                return draft[:at]
        return draft

    # ------------------------------------------------------------ after it

    def learn(self, plan: StepPlan, took_s: float) -> None:
        """What became of the step's draft, if it had one."""
        subject, part = self._subject, plan.parts[0]
        self._read_s = 0.0
        if subject is None or part.sequence is not subject.sequence:
            self._learned_s = None
            return
        wall_s = self._since_last(took_s)
        num_drafted = len(part.item.tokens) - 1
        if not num_drafted:
            if self._has_drafted:
                self._draft_length.went_back(wall_s)
            elif len(plan.parts) == 1:
                self._draft_length.took(wall_s)
            self._pass(subject)
            self._observe(subject, part.item.start + 1)
        elif self._drafted_by:
            num_drawn = len(subject.sequence.tokens) - part.item.start - 1
            num_accepted = min(max(num_drawn - 1, 0), num_drafted)
            has_ended = subject.sequence.state is SequenceState.DONE
            self._read_s = num_accepted * pause_s(took_s, num_drafted)
            self._settle(num_drafted, num_accepted, wall_s)
            for acceptance in self._drafted_by:
                acceptance.note(num_accepted, is_missed=num_accepted < num_drafted and not has_ended)
        self._has_drafted = num_drafted > 0
        if subject.sequence.state is SequenceState.DONE:
            self._subject = None

    def _since_last(self, took_s: float) -> float:
        """Seconds from the step before; of a first one what it took itself, guessing included."""
        now, last = self._now(), self._learned_s
        self._learned_s = now
        return took_s + self._guessing_s if last is None else now - last

    def _observe(self, subject: Subject, place: int) -> None:
        """A plain step drew the token at `place`: watched guesses teach the rates at no cost."""
        tokens = subject.sequence.tokens
        if place >= len(tokens):
            return
        for kind, num_right, is_missed in subject.watched(tokens[place]):
            for acceptance in (subject.repeats[kind], self._acceptance[kind]):
                acceptance.note(num_right, is_missed=is_missed)

    def _pass(self, subject: Subject) -> None:
        if subject.sequence.num_generated > 1 and len(self._scheduler.slots.running) <= 1:
            self._draft_length.stepped()
            for acceptance in (self._acceptance[-1], subject.of_model):  # those of repeats are watched
                acceptance.fade()

    def _settle(self, num_drafted: int, num_accepted: int, took_s: float) -> None:
        self._draft_length.settle(num_drafted, num_accepted + 1, took_s)
        self.num_drafted_total += num_drafted
        self.num_accepted_total += num_accepted
