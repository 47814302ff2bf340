"""Logits the way llama.cpp's own defaults compute them (SPEC D5, D6).

Scores are compared between programs, to a thousandth and less. The serving context adds attention up in a
way of its own (docs/adr/0006), whose logits differ by more; so a prompt whose every logit is asked is also
computed here, over a context with default types. The candidates of a choice share this context: a prompt is
computed once for each of the two ways below, candidates that begin alike come one after the other, and short
ones share a call.

The measure is a text alone, cut into calls of 512 tokens. llama.cpp's CPU attention adds up in one way in
calls below 64 tokens and in another, tile by tile of cells, from 64 on. Within one way a row depends neither
on how many rows its call has nor on what other sequences hold, as long as its own cells are where they would
be alone. So a text may be cut otherwise here, and its beginning kept for the next one; what a call lacks to
64 tokens is filled up with tokens of another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions, KeyType
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.protocol.scoring import LEAST_SLICE, ScoredTokens
from stoker.errors import ModelLoadError, PoolFullError, StepFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import Rows


DEFAULT_CALL = 512
"""Tokens of a call by llama.cpp's defaults (`n_ubatch`); it cuts longer ones."""
TILED_FROM = 64
"""Tokens of a call from which llama.cpp's attention goes by tiles (GGML_FA_TILE_Q)."""
NUM_SEQUENCES = 16
FILLER = 1
"""The sequence that fills calls up; who uses it and those above empties them."""
_LEAST_ROWS = 2  # one row alone has a third way, split over the threads


def call_end(position: int, total: int) -> int:
    """Where the default call ends that computes this position of a text of `total` tokens."""
    return min(total, (position // DEFAULT_CALL + 1) * DEFAULT_CALL)


def is_tiled(position: int, total: int) -> bool:
    """Whether that call has attention go by tiles."""
    begin = position // DEFAULT_CALL * DEFAULT_CALL
    return call_end(position, total) - begin >= TILED_FROM


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a text to compute in one call, within one of the default calls.

    Attributes:
        tokens: the whole text's, as far as they are known.
        total: how many it has.
        begin, end: first token to compute, and the one after the last.
        num_rows: of how many of the last ones logits are wanted.
        namespace: of the text; what is held of another is not gone on from.
    """

    tokens: Sequence[int]
    total: int
    begin: int
    end: int
    num_rows: int
    namespace: bytes


class Scorer:
    """A context with default types, made when first needed, and again where more cells are.

    Sequence 0 holds the text that was computed last, for texts of its namespace alone. Close it before the
    model.

    Attributes:
        can_trim: a text can be taken back to its beginning; else each is computed from its first token.
    """

    def __init__(self, model: LlamaModel, n_batch: int) -> None:
        self._model = model
        self._n_batch = n_batch
        self._context: LlamaContext | None = None
        self.can_trim = model.keeps_every_cell
        self._held: list[tuple[int, bool]] = []  # tokens of sequence 0, and whether they went by tiles
        self._namespace = b""  # of what is held

    def __repr__(self) -> str:
        return f"<Scorer holds {len(self._held)} tokens, {self._context!r}>"

    def score(
        self, tokens: Sequence[int], start: int, until: int, num_threads: int, namespace: bytes
    ) -> Rows:
        """The rows of a text from position `start` to before `until`, float32 (until - start, n_vocab).

        What comes before is computed again where it is not held for this namespace.

        Raises:
            StepFailedError: the native decode failed, or there is no memory for the context.
        """
        total = len(tokens)
        self.context(total + TILED_FROM, num_threads)
        at, found = self.begin(tokens, total, start, namespace), []
        while at < until:
            end = min(call_end(at, total), until)
            if at < start and self.can_trim:
                end = min(end, start)
            num_rows = max(0, end - max(at, start))
            found.append(self.compute(Cut(tokens, total, at, end, num_rows, namespace)).copy())
            at = end
        return np.concatenate(found)

    def begin(self, tokens: Sequence[int], total: int, most: int, namespace: bytes) -> int:
        """How many of the first tokens, `most` of them, are held as they would be alone."""
        held, same = self._held if namespace == self._namespace else [], 0
        while same < min(most, len(held)) and held[same] == (tokens[same], is_tiled(same, total)):
            same += 1
        return same if self.can_trim or same == len(held) else 0

    def least(self, begin: int, total: int) -> int:
        """Tokens that a call from there on needs, lest it is computed in another way than alone."""
        if not self.can_trim:
            return 0
        return TILED_FROM if is_tiled(begin, total) else _LEAST_ROWS

    def compute(self, cut: Cut) -> Rows:
        """Go on after the first tokens that are held; float32 (cut.num_rows, n_vocab), until the next call.

        Raises:
            StepFailedError: the native decode failed; nothing is held any more.
        """
        assert self._context is not None, "no context was asked for"
        assert not cut.begin or cut.namespace == self._namespace, "what is held is another namespace's"
        self.keep(cut.begin)
        items = [PlanItem(0, cut.begin, tuple(cut.tokens[cut.begin : cut.end]), cut.num_rows)]
        num_missing = self.least(cut.begin, cut.total) - (cut.end - cut.begin)
        if num_missing > 0:
            items.append(PlanItem(FILLER, 0, (cut.tokens[0],) * num_missing, 0))
        rows = self.step(items)
        self._context.drop(FILLER)
        self._namespace = cut.namespace
        self._held += [(cut.tokens[at], is_tiled(at, cut.total)) for at in range(cut.begin, cut.end)]
        return rows

    def keep(self, length: int) -> None:
        """Hold the first `length` tokens only."""
        if length == 0:
            self.forget()
        elif length < len(self._held):
            assert self._context is not None, "a text is held without a context"
            self._context.trim(0, length)
            del self._held[length:]

    def step(self, items: list[PlanItem]) -> Rows:
        """One native call.

        Raises:
            StepFailedError: it failed; nothing is held any more.
        """
        assert self._context is not None, "no context was asked for"
        try:
            rows = self._context.step(BatchPlan(tuple(items)))
        except (PoolFullError, StepFailedError) as error:
            self.forget()
            raise StepFailedError(f"a text could not be scored: {error.message}") from error
        if np.isnan(rows).any():  # of cells too: the next text has a context of its own
            self.close()
            raise StepFailedError("the model's logits hold what is no number")
        return rows

    def context(self, num_cells: int, num_threads: int) -> LlamaContext:
        """The context with room for so many tokens; a new one holds nothing.

        Raises:
            StepFailedError: there is no memory for it.
        """
        if self._context is None or self._context.num_cells < num_cells:
            self.close()
            try:
                self._context = LlamaContext(self._model, self._options(num_cells, num_threads))
            except ModelLoadError as error:
                raise StepFailedError(f"scores need a context of their own: {error}") from error
        self._context.set_threads(num_threads)
        return self._context

    def forget(self) -> None:
        """Empty every sequence."""
        self._held.clear()
        if self._context is not None:
            for seq in range(NUM_SEQUENCES):
                self._context.drop(seq)

    def memory(self) -> int:
        """Bytes it takes."""
        return sum(self._context.memory().values()) if self._context else 0

    def memory_by_device(self) -> dict[str, dict[str, int]]:
        """What of that lies on accelerators, by id; see `OnDevices`."""
        held = self._context.memory_by_device() if self._context else {}
        return {owner: {"compute": sum(lines.values())} for owner, lines in held.items()}

    def close(self) -> None:
        """Free the context; idempotent."""
        self._held.clear()
        if self._context is not None:
            self._context.close()
            self._context = None

    def _options(self, num_cells: int, num_threads: int) -> ContextOptions:
        n_batch = max(self._n_batch, DEFAULT_CALL)
        return ContextOptions(
            num_cells=max(num_cells, n_batch),
            n_batch=n_batch,
            num_sequences=NUM_SEQUENCES,
            num_threads=num_threads,
            key_type=KeyType.F16,
        )


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
