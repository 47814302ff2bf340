"""What changes logits before truncation (SPEC D1): bias, bans, penalties.

An edit owns what it must remember of the tokens; the sampler runs them in order.

The DRY penalty makes a token that would prolong a repetition cost more the longer the repetition is, with the
semantics of llama.cpp's sampler: a token that followed an earlier copy of the last L tokens loses
multiplier * base ** (L - allowed_length), for the longest such L >= allowed_length; repetitions do not reach
across a sequence breaker, and a token that is a breaker by itself is never penalised. A breaker is text; in
tokens it is a head (a token that holds the breaker, or ends with its beginning) and a tail (the tokens of the
rest). Heads are looked up in an index of the vocabulary: reading all of it for each part of each breaker took
half a minute for one request.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows, Vocabulary
from stoker.errors import InvalidRequestError
from stoker.ipc.request import Sampling

# The native samplers sort by buckets that an int must hold, so "always" is a large number, not infinity.
_MAX_BIAS = 1e6
_FEW = 8  # biases up to which single stores are quicker than a gather and a scatter


TokenIds = npt.NDArray[np.int32]


class LogitEdit(Protocol):
    """Changes a row of logits in place; -inf forbids a token."""

    def apply(self, row: Rows) -> None:
        """Edit float32 (n_vocab,) for the next token."""
        ...

    def accept(self, token: int) -> None:
        """Note the token that was drawn."""
        ...


class LogitBias:
    """Adds a constant to the logits of some tokens.

    Args:
        biases: bias by token id; +-inf forces and forbids.
        num_vocab: ids lie below it.

    Attributes:
        lowered: the tokens that it lowers; None: it raises some.

    Raises:
        InvalidRequestError: an id outside the vocabulary.
    """

    def __init__(self, biases: Mapping[int, float], num_vocab: int) -> None:
        for token in biases:
            if not 0 <= token < num_vocab:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, the vocabulary has tokens 0 to {num_vocab - 1}",
                    param="logit_bias",
                    token=token,
                    num_vocab=num_vocab,
                )
        values = [min(bias, _MAX_BIAS) if bias > -_MAX_BIAS else -math.inf for bias in biases.values()]
        self._few = tuple(zip(biases, values, strict=True)) if len(biases) <= _FEW else ()
        self._ids = np.fromiter(biases.keys(), np.int64, len(biases))
        self._values = np.array(values, np.float32)
        self.lowered = frozenset(biases) if max(values, default=0.0) <= 0.0 else None

    def apply(self, row: Rows) -> None:
        """Add the biases."""
        if self._few:
            for token, bias in self._few:
                row[token] += bias
        else:
            row[self._ids] += self._values

    def lower(self, ids: TokenIds, logits: Rows) -> None:
        """Add the biases to the logits of these tokens only, each as `apply` adds it."""
        for token, bias in zip(self._ids, self._values, strict=True):
            logits[ids == token] += bias

    def accept(self, token: int) -> None:
        """A bias does not depend on the tokens."""


class EarlyEndBan:
    """Forbids the tokens that end a generation until `min_tokens` were drawn.

    Attributes:
        lowered: the tokens that it may lower.
    """

    def __init__(self, eog_tokens: Sequence[int], min_tokens: int) -> None:
        self._ids = np.array(eog_tokens, np.int64)
        self._num_left = min_tokens
        self.lowered = frozenset(eog_tokens)

    def apply(self, row: Rows) -> None:
        """Forbid them while tokens are missing."""
        if self._num_left > 0:
            row[self._ids] = -np.inf

    def lower(self, ids: TokenIds, logits: Rows) -> None:
        """As `apply`, of these tokens only."""
        if self._num_left > 0:
            logits[np.isin(ids, self._ids)] = -np.inf

    def accept(self, token: int) -> None:
        """One fewer is missing."""
        del token
        self._num_left -= 1


LoweringEdit = LogitBias | EarlyEndBan
"""What may only lower known tokens: how it changes a row's largest logits those alone tell."""


class RepeatPenalty:
    """Repeat, presence and frequency penalties over the last `repeat_last_n` tokens, `prompt` included.

    Arithmetic as in llama.cpp's penalties sampler: a positive logit is divided by the repeat penalty, another
    multiplied by it; then count * frequency + presence is taken off.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._repeat = np.float32(sampling.repeat_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._num_last = None if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        start = 0 if self._num_last is None else max(0, len(prompt) - self._num_last)
        self._window = deque(prompt[start:])
        self._counts = Counter(self._window)

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings change any logit."""
        has_effect = (
            sampling.repeat_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        return has_effect and sampling.repeat_last_n != 0

    def apply(self, row: Rows) -> None:
        """Penalise the tokens in the window."""
        num_ids = len(self._counts)
        ids = np.fromiter(self._counts.keys(), np.int64, num_ids)
        counts = np.fromiter(self._counts.values(), np.float32, num_ids)
        logits = row[ids]
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        row[ids] = logits - (counts * self._frequency + self._presence)

    def accept(self, token: int) -> None:
        """Move the window by one token."""
        self._window.append(token)
        self._counts[token] += 1
        if self._num_last is not None and len(self._window) > self._num_last:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]


# llama.cpp's bounds: they keep the search for a breaker linear in the context.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
_MAX_BREAKERS = 64
_MAX_KEPT = 256

Tail = tuple[int, ...]
Tails = dict[int, list[Tail]]
"""Head token to the tails that complete a breaker; an empty tail means that the head is one alone."""


class _Pieces:
    """The bytes of all tokens, to be searched for what they hold and what they end with.

    Args:
        pieces: by token.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._longest = max(map(len, pieces), default=0)
        self._backwards = sorted((piece[::-1], token) for token, piece in enumerate(pieces))
        self._joined = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))

    def holding(self, part: bytes) -> set[int]:
        """Tokens with `part` in them."""
        found, at = set(), self._joined.find(part)
        while at >= 0:
            token = bisect_right(self._ends, at)
            if at + len(part) <= self._ends[token]:
                found.add(token)
                at = self._ends[token] - 1  # once a token is enough
            at = self._joined.find(part, at + 1)
        return found

    def ending_with(self, part: bytes) -> list[int]:
        """Tokens with `part` at their end, ascending."""
        low = bisect_left(self._backwards, (part[::-1], 0))
        high = bisect_right(self._backwards, (part[::-1] + b"\xff" * self._longest, len(self._ends)))
        return sorted(token for _, token in self._backwards[low:high])


class BreakerTable:
    """Breakers of one vocabulary, found once; safe to use from worker threads.

    Args:
        num_vocab: tokens in the vocabulary.
    """

    def __init__(self, num_vocab: int) -> None:
        self._num_vocab = num_vocab
        self._lock = Lock()
        self._pieces: _Pieces | None = None
        self._kept: OrderedDict[str, Tails] = OrderedDict()

    def __repr__(self) -> str:
        return f"BreakerTable(num_vocab={self._num_vocab}, kept={len(self._kept)})"

    def tails(self, vocabulary: Vocabulary, breakers: Sequence[str]) -> Tails:
        """Heads and tails of all `breakers`; empty strings are skipped.

        Raises:
            InvalidRequestError: more breakers than are taken.
        """
        if len(breakers) > _MAX_BREAKERS:
            raise InvalidRequestError(
                f"dry_sequence_breakers has {len(breakers)} strings, at most {_MAX_BREAKERS} are taken",
                param="dry_sequence_breakers",
            )
        merged: dict[int, dict[Tail, None]] = {}
        with self._lock:
            for breaker in dict.fromkeys(map(_clip, filter(None, breakers))):
                for head, tails in self._find(vocabulary, breaker).items():
                    merged.setdefault(head, {}).update(dict.fromkeys(tails))
        return {head: list(tails) for head, tails in merged.items()}

    def _find(self, vocabulary: Vocabulary, breaker: str) -> Tails:
        if breaker in self._kept:
            self._kept.move_to_end(breaker)
            return self._kept[breaker]
        if self._pieces is None:
            self._pieces = _Pieces([vocabulary.special_piece(token) for token in range(self._num_vocab)])
        tails = _scan(vocabulary, breaker, self._pieces)
        self._kept[breaker] = tails
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return tails


def _scan(vocabulary: Vocabulary, breaker: str, pieces: _Pieces) -> Tails:
    holding = pieces.holding(breaker.encode())
    tails: Tails = {head: [()] for head in sorted(holding)}
    for cut in range(1, len(breaker)):
        heads = [head for head in pieces.ending_with(breaker[:cut].encode()) if head not in holding]
        if heads:
            _add(tails, heads, vocabulary.tokenize(breaker[cut:], add_special=False, parse_special=False))
    # A character whose bytes lie in several tokens has no head above: its own tokens are the breaker.
    tokens = vocabulary.tokenize(breaker, add_special=False, parse_special=False)
    if not breaker.isascii() and tokens:
        _add(tails, tokens[:1], tokens[1:])
    return tails


def _clip(breaker: str) -> str:
    return breaker.encode()[:_MAX_BREAKER_BYTES].decode(errors="ignore")


def _add(tails: Tails, heads: Sequence[int], rest: Sequence[int]) -> None:
    tail = tuple(rest[:_MAX_TAIL_TOKENS])
    for head in heads:
        known = tails.setdefault(head, [])
        if tail not in known:
            known.append(tail)


_LOG_FLOAT_MAX = 88.7228391  # ln of the largest float32
_FLAT_BASE = 1.000001  # up to here the penalty does not grow with the length
# Finite, so that a penalised token is still the choice when all others are forbidden.
_MAX_PENALTY = 3e38


class DryPenalty:
    """DRY over the last `dry_penalty_last_n` tokens of prompt and generation.

    Args:
        sampling: the settings; `can_act` tells whether they do anything.
        prompt: token ids before the first draw.
        tails: the sequence breakers, from `BreakerTable`.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], tails: Tails) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._num_last = None if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
        self._max_exponent = (
            math.floor(_LOG_FLOAT_MAX / math.log(self._base)) if self._base > _FLAT_BASE else 0
        )
        self._tails = tails
        self._tokens = np.array(prompt, np.int32)
        self._num_tokens = len(prompt)

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings change any logit."""
        return (
            sampling.dry_multiplier != 0.0 and sampling.dry_base >= 1.0 and sampling.dry_penalty_last_n != 0
        )

    def accept(self, token: int) -> None:
        """Add a token to the history."""
        if self._num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(max(64, self._num_tokens), np.int32)))
        self._tokens[self._num_tokens] = token
        self._num_tokens += 1

    def apply(self, row: Rows) -> None:
        """Penalise what would prolong a repetition."""
        start = 0 if self._num_last is None else max(0, self._num_tokens - self._num_last)
        window = self._tokens[start : self._num_tokens]
        limit = self._reach(window)
        if limit < self._allowed:
            return
        for token, length in self._repeats(window, limit).items():
            if () not in self._tails.get(token, ()):
                penalty = self._multiplier * self._base ** (length - self._allowed)
                row[token] -= np.float32(min(penalty, _MAX_PENALTY))

    def _reach(self, window: TokenIds) -> int:
        """Tokens since the last breaker: a repetition cannot be longer."""
        if not self._tails:
            return len(window)
        for back, token in enumerate(window[::-1].data):
            tails = self._tails.get(token)
            if tails is None:
                continue
            after = window[len(window) - back :]
            lengths = [len(tail) for tail in tails if tuple(after[: len(tail)].tolist()) == tail]
            if lengths:
                return back - max(lengths)
        return len(window)

    def _repeats(self, window: TokenIds, limit: int) -> dict[int, int]:
        """For each token that followed a copy of the window's end: the length of the longest such copy."""
        last = len(window) - 1
        cap = min(limit, self._allowed + self._max_exponent)
        longest: dict[int, int] = {}
        ends = np.arange(last)  # where a copy may end
        length = 0
        while len(ends):
            if length >= self._allowed:
                longest.update(dict.fromkeys(window[ends + 1].tolist(), length))
            if length == cap:
                break
            ends = ends[ends >= length]
            ends = ends[window[ends - length] == window[last - length]]
            length += 1
        return longest
