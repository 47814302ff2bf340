"""Where one choice stands in its grammar: which tokens may come next, and whether it has come to its end.

A `LogitEdit`, the last of a sampler's: it forbids what the grammar does not allow. How it meets the other
ways in which a generation ends:

- end tokens are allowed only where the grammar may end, whatever `min_tokens` and `ignore_eos` say; where
  nothing else may follow, `is_complete` ends the generation without one, even below `min_tokens`;
- a stop string, `max_tokens` and a cancel end the generation as ever, and then the text is incomplete;
- `logit_bias` and penalties are edits before this one: they prefer among the allowed tokens and cannot add
  any. Where they forbid all of them the sampler says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from stoker.grammar.compiled import CompiledGrammar

DEAD_END = (
    "NoExtensionBias"  # the grammar engine's word for a place where nothing may follow, not even an end
)

# Processor time that following a grammar may take, masks and steps through it alike, as every sequence of a
# step waits meanwhile: so much a token, saved up to so much ahead. Medians of honest masks are 20 to 90 us on
# quick machines; ambiguous rules make a step through the grammar as slow as its mask.
GRAMMAR_S_A_TOKEN = 0.01
GRAMMAR_S_AHEAD = 0.5
_MAX_REASON_CHARS = 200
# What a byte of a mask adds to its eight logits. Adding is quicker than storing by a boolean mask, whose cost
# grows with how often allowed and forbidden tokens alternate: 12 us against 20 to 120 us of 49,152.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS == 1, 0.0, -np.inf).astype(np.float32)


class _MatchPhase(Enum):
    """The grammar rules, or reasoning comes first."""

    MAY_OPEN = auto()  # nothing is written: the text of the grammar or the start of reasoning
    OPENING = auto()  # the start of reasoning has several tokens and is being written
    WAITING = auto()  # reasoning, until its end is written
    ACTIVE = auto()


class ConstraintState:
    """Grammar state of one choice. Made by `CompiledGrammar.state`, used by one thread at a time.

    Args:
        grammar: what the text must match.
        matcher: a native state of its own, at the start.
        reasoning_start, reasoning_end: as in `Constraint`.
    """

    def __init__(
        self, grammar: CompiledGrammar, matcher: LLMatcher, reasoning_start: str, reasoning_end: str
    ) -> None:
        tokenizer = grammar.tokenizer
        self.num_tokens = 0
        self._grammar = grammar
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._allowed = np.zeros((tokenizer.num_vocab + 31) // 32, np.uint32)
        self._is_fresh = False
        self._left_s = GRAMMAR_S_AHEAD
        self._opening: tuple[int, ...] = ()
        self._marker = reasoning_end.encode()
        self._tail = b""
        self._phase = _MatchPhase.WAITING if reasoning_end else _MatchPhase.ACTIVE
        if reasoning_end and reasoning_start:
            self._phase = _MatchPhase.MAY_OPEN
            self._opening = tuple(tokenizer.tokens_of(reasoning_start))
        if reasoning_end:
            tokenizer.overruns(self._marker, 0)  # looks at all tokens once, better here than in a step

    def __repr__(self) -> str:
        return f"ConstraintState({self._grammar.label}, {self._phase.name}, num_tokens={self.num_tokens})"

    @property
    def is_waiting(self) -> bool:
        """Whether reasoning goes on and the grammar has not begun."""
        return self._phase in {_MatchPhase.OPENING, _MatchPhase.WAITING}

    @property
    def may_end(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""
        return not self.is_waiting and self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the grammar is satisfied and nothing can follow: the generation ends here."""
        if not self.may_end or self._phase is _MatchPhase.MAY_OPEN:
            return False
        if self._matcher.is_stopped():
            return True
        mask = self._mask()
        ends = self._tokenizer.ends
        num_ends = int(((mask[ends >> 5] >> (ends & 31).astype(np.uint32)) & 1).sum())
        return int(np.bitwise_count(mask).sum()) == num_ends

    def apply(self, row: Rows) -> None:
        """Set the logits of all tokens that may not come next to -inf, in place.

        Raises:
            InvalidRequestError: the grammar has become too complex, or allows no token.
        """
        if self._phase is _MatchPhase.WAITING:
            row[self._tokenizer.ends] = -np.inf
            for ids in self._overruns():
                row[ids] = -np.inf
            return
        if self._phase is _MatchPhase.OPENING:
            keep = row[self._opening[0]]
            row.fill(-np.inf)
            row[self._opening[0]] = keep
            return
        mask = self._mask()
        if self._phase is _MatchPhase.MAY_OPEN:
            first = self._opening[0]
            keep = row[first]
            _forbid(row, mask)
            row[first] = keep
            return
        if not mask.any():
            raise self._error("allows no token")
        _forbid(row, mask)

    def accept(self, token: int) -> None:
        """Move on by one token.

        Raises:
            InvalidRequestError: the grammar does not allow it here, or has become too complex.
        """
        self.num_tokens += 1
        self._left_s = min(GRAMMAR_S_AHEAD, self._left_s + GRAMMAR_S_A_TOKEN)
        match self._phase:
            case _MatchPhase.MAY_OPEN if token == self._opening[0] and not self._is_allowed(token):
                self._open()
            case _MatchPhase.OPENING if token == self._opening[0]:
                self._open()
            case _MatchPhase.OPENING:
                raise self._error(f"does not allow token {token}")
            case _MatchPhase.WAITING:
                self._listen(token)
            case _:
                self._phase = _MatchPhase.ACTIVE
                started_s = time.thread_time()
                self._consume([token])
                self._pay(time.thread_time() - started_s)

    def replay(self, tokens: Sequence[int]) -> None:
        """Take over tokens of an interrupted run. Raises as `accept` does."""
        if self._phase is _MatchPhase.ACTIVE and self.num_tokens == 0 and tokens:
            self.num_tokens = len(tokens)
            self._consume(list(tokens))
            return
        for token in tokens:
            self.accept(token)

    def fork(self) -> ConstraintState:
        """A state of its own that stands at the same place."""
        twin = object.__new__(ConstraintState)
        own = {"_matcher": self._matcher.deep_copy(), "_allowed": self._allowed.copy()}
        twin.__dict__.update(self.__dict__ | own)
        return twin

    def _open(self) -> None:
        self._opening = self._opening[1:]
        self._phase = _MatchPhase.OPENING if self._opening else _MatchPhase.WAITING

    def _listen(self, token: int) -> None:
        """Look for the end of reasoning; what a token says beyond it is the grammar's."""
        data = self._tail + self._tokenizer.spelling(token)
        at = data.find(self._marker)
        if at < 0:
            self._tail = data[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            return
        self._phase, self._tail = _MatchPhase.ACTIVE, b""
        rest = data[at + len(self._marker) :].lstrip()
        if rest:
            self._consume(self._tokenizer.plain_tokens_of(rest))

    def _overruns(self) -> list[npt.NDArray[np.int64]]:
        """Tokens that would end the reasoning and begin the answer in one."""
        marker = self._marker
        written = [size for size in range(len(marker)) if self._tail.endswith(marker[:size])]
        return [self._tokenizer.overruns(marker, size) for size in written]

    def _is_allowed(self, token: int) -> bool:
        return bool(self._mask()[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

    def _consume(self, tokens: list[int]) -> None:
        self._is_fresh = False
        num_taken = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_error():
            raise self._error(f"ended in an error ({self._reason()})")
        if num_taken < len(tokens):
            token = tokens[num_taken]
            raise self._error(f"does not allow token {token} ({self._tokenizer.spelling(token)!r})")

    def _mask(self) -> npt.NDArray[np.uint32]:
        """One bit a token, of those that may come next; valid until the next token."""
        if not self._is_fresh:
            started_s = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
            self._pay(time.thread_time() - started_s)
            if self._matcher.is_error():
                is_stuck = self._matcher.get_error().startswith(DEAD_END)
                reason = "allows no token" if is_stuck else f"has become too complex ({self._reason()})"
                raise self._error(reason)
            if not len(self._tokenizer.ends):
                last = self._tokenizer.num_vocab - 1
                self._allowed[last >> 5] &= ~np.uint32(1 << (last & 31))
            self._is_fresh = True
        return self._allowed

    def _pay(self, taken_s: float) -> None:
        """Take the time of a mask or a step from what is saved. Raises InvalidRequestError beyond it."""
        self._left_s -= taken_s
        if self._left_s < 0:
            given = f"{taken_s * 1000:.0f} ms for a token where {GRAMMAR_S_A_TOKEN * 1000:g} may be had"
            raise self._error(f"takes too long to follow ({given})")

    def _reason(self) -> str:
        return self._matcher.get_error().split("\n", 1)[0][:_MAX_REASON_CHARS]

    def _error(self, text: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the {self._grammar.label} {text} after {self.num_tokens} tokens",
            param=self._grammar.param,
            num_tokens=self.num_tokens,
        )


def _forbid(row: Rows, mask: npt.NDArray[np.uint32]) -> None:
    penalties = _PENALTIES.take(mask.view(np.uint8)[: -(-len(row) // 8)], axis=0)
    row += penalties.reshape(-1)[: len(row)]
