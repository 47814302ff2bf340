"""Candidates after one prompt: which native calls give the rows that one call for each of them would give.

How a row is computed as it would be alone is `scoring`'s. Here: a prompt is computed once for each of the two
ways, candidates that begin alike come one after the other, and short ones share a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.backends.llama.oneshot.scoring import FILLER, NUM_SEQUENCES, TILED_FROM, Cut, call_end, is_tiled
from stoker.backends.protocol.backend import PlanItem
from stoker.backends.protocol.scoring import LEAST_SLICE, ScoredTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.llama.oneshot.scoring import Scorer
    from stoker.backends.protocol.backend import Rows


class ChoiceScoring:
    """See `Scoring`. Computes in the scorer's context; several may take turns, each goes on where it can.

    Args:
        scorer: whose context it uses.
        prompt: at least one token.
        texts: the candidates' tokens; an empty one needs nothing.
        namespace: of the prompt; nothing that was computed in another is used.
        num_threads: asked for before each call.
    """

    def __init__(
        self,
        scorer: Scorer,
        prompt: Sequence[int],
        texts: Sequence[Sequence[int]],
        namespace: bytes,
        num_threads: Callable[[], int],
    ) -> None:
        self._scorer = scorer
        self._prompt = tuple(prompt)
        self._texts = [tuple(text) for text in texts]
        self._namespace = namespace
        self._num_threads = num_threads
        self._can_trim = scorer.can_trim
        self._num_cells = max(map(len, self._texts), default=0) + len(prompt) + 2 * TILED_FROM
        self._first: dict[bool, Rows] = {}  # the row that predicts a candidate's first token, by way
        self._num_found = 0  # tokens of the current text that were predicted
        order = [index for index, text in enumerate(self._texts) if text]
        order.sort(key=lambda index: (self._way(index), self._texts[index]))
        self._order = order

    def __repr__(self) -> str:
        return f"<ChoiceScoring of {len(self._texts)} after {len(self._prompt)}, {len(self._order)} to do>"

    @property
    def is_done(self) -> bool:
        """Whether every token of every text was predicted."""
        return not self._order

    def num_next(self, max_tokens: int) -> int:
        """Tokens that `advance` would compute."""
        if self.is_done or self._known_first() is not None:
            return 0
        if self._can_share(self._order[0]):
            return sum(len(self._texts[index]) - 1 for index in self._sharing())
        begin, end = self._span(max_tokens)
        return max(end - begin, self._scorer.least(begin, len(self._tokens())))

    def advance(self, max_tokens: int) -> list[ScoredTokens]:
        """One native call, or none where what is known is enough."""
        self._scorer.context(self._num_cells, self._num_threads())  # a new one holds nothing
        index = self._order[0]
        if (first := self._known_first()) is not None:
            self._num_found = 1
            return [self._taken(index, first, 1)]
        if self._can_share(index):
            return self._together()
        begin, end = self._span(max_tokens)
        total = len(self._tokens())
        wanted = max(begin, len(self._prompt) - 1 + self._num_found)
        cut = Cut(self._tokens(), total, begin, end, max(0, end - wanted), self._namespace)
        rows = self._scorer.compute(cut)
        rows = rows[: max(0, min(end, total - 1) - wanted)]
        if not len(rows):
            return []
        num_rows = len(rows)
        if self._can_trim and end - num_rows < len(self._prompt):
            self._first[self._way(index)] = rows[:1].copy()
        self._num_found += num_rows
        return [self._taken(index, rows, num_rows)]

    # ------------------------------------------------------------ one text

    def _known_first(self) -> Rows | None:
        """The row that predicts the next text's first token, if that is what is to be told next."""
        return self._first.get(self._way(self._order[0])) if self._num_found == 0 else None

    def _taken(self, index: int, rows: Rows, num_rows: int) -> ScoredTokens:
        """What was found of the first text in the order, which leaves it with its last token."""
        text, until = self._texts[index], self._num_found
        if until == len(text):
            self._order.pop(0)
            self._num_found = 0
        return ScoredTokens(index, text[until - num_rows : until], rows)

    def _way(self, index: int) -> bool:
        """Whether the prompt's last token is computed by tiles for this text."""
        num_prompt = len(self._prompt)
        return is_tiled(num_prompt - 1, num_prompt + len(self._texts[index]))

    def _tokens(self) -> tuple[int, ...]:
        return self._prompt + self._texts[self._order[0]]

    def _is_tiled(self, position: int) -> bool:
        return is_tiled(position, len(self._tokens()))

    def _begin(self) -> int:
        """The first token to compute: after what is held as it would be alone, before the next row wanted."""
        tokens = self._tokens()
        most = len(self._prompt) - 1 + self._num_found
        return self._scorer.begin(tokens, len(tokens), most, self._namespace)

    def _span(self, max_tokens: int) -> tuple[int, int]:
        """First token of the next call and the one after its last; a text's last token predicts nothing."""
        begin, total = self._begin(), len(self._tokens())
        if not self._can_trim:
            return begin, call_end(begin, total)
        end = min(call_end(begin, total), total - 1)
        if self._is_tiled(begin) and end - begin >= 2 * LEAST_SLICE:
            end = min(end, begin + max(LEAST_SLICE, max_tokens))
        return begin, end

    # ------------------------------------------------------------ short texts together

    def _can_share(self, index: int) -> bool:
        """Whether the next text is short, with its prompt held and its first token found."""
        return (
            self._can_trim
            and self._num_found == 1
            and self._is_short(index)
            and self._begin() == len(self._prompt)
        )

    def _is_short(self, index: int) -> bool:
        return len(self._prompt) + len(self._texts[index]) < TILED_FROM

    def _sharing(self) -> list[int]:
        """The next short texts that fit one call below 64 tokens."""
        chosen: list[int] = []
        num_tokens = 0
        for index in self._order[: NUM_SEQUENCES - 1]:
            num_tokens += len(self._texts[index]) - 1
            if num_tokens >= TILED_FROM or not self._is_short(index):
                break
            chosen.append(index)
        return chosen

    def _together(self) -> list[ScoredTokens]:
        """Several short texts in one call, each in a sequence that shares the prompt."""
        chosen, num_prompt = self._sharing(), len(self._prompt)
        context = self._scorer.context(self._num_cells, self._num_threads())
        self._scorer.keep(num_prompt)
        items = []
        for seq, index in enumerate(chosen, start=FILLER):
            text = self._texts[index]
            context.fork(0, seq, num_prompt)
            if len(text) > 1:
                items.append(PlanItem(seq, num_prompt, text[:-1], len(text) - 1))
        first = self._first[False]
        rows = self._scorer.step(items) if items else first[:0]
        for seq in range(FILLER, FILLER + len(chosen)):
            context.drop(seq)
        found, at = [], 0
        for number, index in enumerate(chosen):
            text = self._texts[index]
            if number:  # the first token of the first one was told before
                found.append(ScoredTokens(index, text[:1], first))
            found.append(ScoredTokens(index, text[1:], rows[at : at + len(text) - 1]))
            at += len(text) - 1
        del self._order[: len(chosen)]
        self._num_found = 0
        return [each for each in found if each.tokens]
