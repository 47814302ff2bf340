"""Draws the next token of one choice from a row of raw logits (SPEC D1).

Order: edits (bias, penalties, then masks) -> truncation -> temperature -> draw. Each stage is absent when
the settings leave it nothing to do; greedy without edits is one argmax.

The draw takes one token by a counter-based uniform number: u = f(seed, token index, stream) has no state, so
batch shape, preemption, crash and resume cannot change what a request draws.

`truncation` leaves the candidates; XTC is ours because its randomness must be counter-based. Where the best
of a row tell what is drawn from it (`Sampler.num_needed`), `together` draws the tokens of a step at once.
Mirostat v1 and v2 replace truncation: they steer the surprise of the text towards a target (Baktash et al.,
"Mirostat: a neural text decoding algorithm that directly controls perplexity", with the constants of
llama.cpp, on logits already divided by the temperature); llama.cpp's own draws from a generator of its own.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Rows
from stoker.errors import InvalidRequestError, StepFailedError, StokerError
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import LogitEdit, LoweringEdit, TokenIds
from stoker.sampling.truncation import TruncationChain, Workspace, largest

Probabilities = npt.NDArray[np.float64]

_COUNTER = struct.Struct("<QQQ")
_UINT64 = 2**64 - 1
# Below this a temperature changes nothing: float32 logits that differ at all are further apart than the
# exponent can bridge, and a smaller divisor would overflow.
_MIN_TEMPERATURE = 1e-9


class Stream(IntEnum):
    """Independent uniform numbers of one token."""

    TOKEN = 0
    XTC = 1


def uniform(seed: int, index: int, stream: Stream) -> float:
    """The uniform number in [0, 1), 53 bits, of the token `index` of the generation seeded `seed`."""
    digest = hashlib.blake2b(_COUNTER.pack(seed & _UINT64, index, stream), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def probabilities(logits: Rows, temperature: float) -> Probabilities:
    """Softmax of `logits / temperature` in float64.

    Args:
        logits: float32 (n,), n >= 1; the largest must be finite, the others may be -inf.
        temperature: above 0.
    """
    chances = weights(logits, temperature)
    chances /= chances.sum()
    return chances


def weights(logits: Rows, temperature: float | Probabilities) -> Probabilities:
    """What the tokens of a row weigh in its draw: `probabilities` times a number of the row's own.

    Args:
        logits: float32 (n,) or (num_rows, n); the largest of a row must be finite, the others may be -inf.
        temperature: above 0; of rows float64 (num_rows, 1).
    """
    scaled = logits.astype(np.float64)
    scaled -= np.maximum.reduce(scaled, axis=-1, keepdims=True)
    scaled /= np.maximum(temperature, _MIN_TEMPERATURE)
    np.exp(scaled, out=scaled)
    return scaled


def dynamic_temperature(logits: Rows, sampling: Sampling) -> float:
    """The temperature for these candidates, float32 (n,), n >= 1: llama.cpp's `temp_ext`.

    From `temperature - dynatemp_range` where one candidate has all probability to `temperature +
    dynatemp_range` where all are alike; between them by their entropy over the largest possible, to the
    power of `dynatemp_exponent`.
    """
    reach = sampling.dynatemp_range
    if reach <= 0.0 or len(logits) == 1:
        return sampling.temperature
    chances = probabilities(logits, 1.0)
    chances = chances[chances > 0.0]
    share = float(-(chances * np.log(chances)).sum()) / math.log(len(logits))
    lowest = max(0.0, sampling.temperature - reach)
    highest = sampling.temperature + reach
    return lowest + (highest - lowest) * math.pow(max(share, 0.0), sampling.dynatemp_exponent)


def pick(weights: Probabilities, u: float) -> int:
    """The index at which the running sum of `weights` passes `u` of their total.

    Callers pass weights in ascending token id, not by size: two nearly equal logits that swap ranks between
    batch shapes then move the boundaries by their difference only.
    """
    cumulative = weights.cumsum()
    total = cumulative[-1]
    index = int(cumulative.searchsorted(u * total, side="right"))
    if index == len(cumulative):  # u * total was rounded up to the total
        index = int(cumulative.searchsorted(total, side="left"))
    return index


def pick_rows(weights: Probabilities, us: Probabilities) -> npt.NDArray[np.intp]:
    """`pick` of each row of `weights` by its own u; zeros behind the others change nothing."""
    cumulative = weights.cumsum(axis=1)
    totals = cumulative[:, -1:]
    indices: npt.NDArray[np.intp] = (cumulative <= us[:, np.newaxis] * totals).sum(axis=1)
    is_over = indices == weights.shape[1]  # u * total was rounded up to the total
    return np.where(is_over, (cumulative < totals).sum(axis=1), indices) if is_over.any() else indices


class PlainDraw(NamedTuple):
    """A draw that truncation and temperature make by a uniform number."""

    truncation: TruncationChain
    temperature: float
    u: float


def _lowered(edits: Sequence[LogitEdit]) -> frozenset[int] | None:
    found: frozenset[int] = frozenset()
    for edit in edits:
        if not isinstance(edit, LoweringEdit) or edit.lowered is None:
            return None
        found |= edit.lowered
    return found


class Sampler:
    """Sampler state of one choice: the edits' memory, mirostat's bound and the number of tokens drawn.

    Args:
        sampling: the settings; a temperature above 0 needs a seed.
        index: which choice of its request; it draws with seed + index.
        edits: what changes the logits first, in this order; a grammar's mask comes last.
        workspace: buffers of the model.

    Attributes:
        is_greedy: it draws the best.
        lowered: the tokens that its edits may lower; None: they may do something else.
        num_needed: how many of a row's largest logits tell what is drawn from it; None: all do.

    Raises:
        InvalidRequestError: no seed.
    """

    def __init__(
        self, sampling: Sampling, index: int, edits: Sequence[LogitEdit], workspace: Workspace
    ) -> None:
        self._temperature = sampling.temperature
        self._sampling = sampling
        self.is_greedy = sampling.temperature == 0.0
        self._seed = (sampling.seed or 0) + index
        self._num_drawn = 0
        self._u: float | None = None  # of the next token, as soon as one was drawn
        self._mirostat = Mirostat(sampling) if Mirostat.can_act(sampling) else None
        self._xtc = Xtc(sampling) if Xtc.can_act(sampling) else None
        self._truncation: TruncationChain | None = None
        if sampling.temperature > 0.0:
            if sampling.seed is None:
                raise InvalidRequestError("a request that samples needs a seed", param="seed")
            if self._mirostat is None:
                self._truncation = TruncationChain(sampling, workspace)
        self._use(tuple(edits))

    def __repr__(self) -> str:
        return f"Sampler(seed={self._seed}, num_drawn={self._num_drawn}, mu={self.mirostat_mu})"

    def add_edit(self, edit: LogitEdit) -> None:
        """One more, after those there are."""
        self._use((*self._edits, edit))

    def _use(self, edits: tuple[LogitEdit, ...]) -> None:
        self._edits = edits
        self.lowered = _lowered(edits)
        self.num_needed = self._count_needed()

    def _count_needed(self) -> int | None:
        truncation = self._truncation
        if self.lowered is None or self._mirostat is not None or (truncation and truncation.needs_row):
            return None
        return (1 if truncation is None else truncation.top_k) + len(self.lowered)

    @property
    def edits_logits(self) -> bool:
        """Whether `draw` overwrites the row it is given."""
        return bool(self._edits)

    @property
    def plain_draw(self) -> PlainDraw | None:
        """Its next draw, if nothing but truncation and temperature make it."""
        truncation = self._truncation
        if truncation is None or truncation.is_typical or self._xtc or self._sampling.dynatemp_range > 0.0:
            return None
        return PlainDraw(truncation, self._temperature, self.token_uniform())

    @property
    def mirostat_mu(self) -> float | None:
        """Mirostat's bound of surprise in bits, None while mirostat is off."""
        return None if self._mirostat is None else self._mirostat.mu

    def draw(self, row: Rows) -> int:
        """The next token; changes nothing but mirostat's bound, `accept` moves on.

        Args:
            row: raw logits, float32 (n_vocab,); overwritten where edits act.

        Raises:
            StepFailedError: NaN or infinite logits, or none that is finite.
            InvalidRequestError: the request forbids every token.
        """
        for edit in self._edits:
            edit.apply(row)
        best = int(row.argmax())  # a NaN is the largest of all
        if not math.isfinite(row[best]):
            raise self._no_peak(float(row[best]))
        if self._temperature == 0.0:
            return best
        if self._mirostat is not None:
            return self._mirostat.draw(row, self.token_uniform())
        assert self._truncation is not None
        return self._draw_cut(*self._truncation.apply(row))

    def lower(self, ids: TokenIds, logits: Rows) -> None:
        """Let its edits act on some of a row's logits, in place; `num_needed` is not None."""
        for edit in self._edits:
            assert isinstance(edit, LoweringEdit), f"{edit!r} needs the whole row"
            edit.lower(ids, logits)

    def draw_best(self, ids: TokenIds, logits: Rows) -> int:
        """As `draw`, from the best of a row after `lower`: at least `num_needed` of the raw row's.

        Args:
            ids: int32 (n,), best first, ties by lower id.
            logits: float32 (n,), of these.
        """
        if not math.isfinite(logits[0]):
            raise self._no_peak(float(logits[0]))
        if self._truncation is None:
            return int(ids[0])
        return self._draw_cut(*self._truncation.cut(ids, logits))

    def accept(self, token: int) -> None:
        """Note that `token` is the next one of the generation."""
        self._num_drawn += 1
        if self._u is not None:  # where a device computes, this is not waited for; the draw is
            self._u = self._uniform(Stream.TOKEN)
        for edit in self._edits:
            edit.accept(token)

    def restore(self, mirostat_mu: float | None) -> None:
        """Take up mirostat's state of an interrupted run; the tokens come through `accept`."""
        if self._mirostat is not None and mirostat_mu is not None:
            self._mirostat.mu = mirostat_mu

    def close(self) -> None:
        """Free what is native; idempotent."""
        if self._truncation is not None:
            self._truncation.close()

    def token_uniform(self) -> float:
        """The uniform number that its next token is drawn by."""
        if self._u is None:
            self._u = self._uniform(Stream.TOKEN)
        return self._u

    def _uniform(self, stream: Stream) -> float:
        return uniform(self._seed, self._num_drawn, stream)

    def _draw_cut(self, ids: TokenIds, logits: Rows) -> int:
        """One of the candidates that truncation has left, by ascending id."""
        if self._xtc is not None:
            ids, logits = self._xtc.apply(ids, logits, self._uniform(Stream.XTC))
        temperature = dynamic_temperature(logits, self._sampling)
        return int(ids[pick(weights(logits, temperature), self.token_uniform())])

    def _no_peak(self, peak: float) -> StokerError:
        if peak == -math.inf and self._edits:
            return InvalidRequestError("no token is left to draw: all are forbidden", param="logit_bias")
        return StepFailedError(
            f"the model returned logits whose largest is {peak} for token {self._num_drawn}",
            token_index=self._num_drawn,
        )


_XTC_MAX_THRESHOLD = 0.5  # above it no two tokens can both reach the threshold


class Xtc:
    """Exclude top choices: now and then all tokens above a threshold but the least likely of them go.

    Args:
        sampling: `xtc_probability` and `xtc_threshold`; `can_act` tells whether they do anything.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._probability = sampling.xtc_probability
        self._threshold = sampling.xtc_threshold

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings can ever exclude a token."""
        return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= _XTC_MAX_THRESHOLD

    def apply(self, ids: TokenIds, logits: Rows, u: float) -> tuple[TokenIds, Rows]:
        """The candidates left; `u` in [0, 1) decides whether the exclusion happens this time."""
        if u >= self._probability:
            return ids, logits
        chances = probabilities(logits, 1.0)
        above = np.flatnonzero(chances >= self._threshold)
        if len(above) < 2:  # noqa: PLR2004 - one token above the threshold is the one that stays
            return ids, logits
        by_chance = above[np.argsort(-chances[above], kind="stable")]
        return np.delete(ids, by_chance[:-1]), np.delete(logits, by_chance[:-1])


_NUM_FITTED = 100  # most likely tokens that v1 fits the Zipf exponent to
_MIN_EPSILON = 1e-9
_MAX_LOG2 = 1000.0  # 2 ** -mu stays a float


class Mirostat:
    """State of one choice.

    Args:
        sampling: version (1 or 2), target `tau` in bits, learning rate `eta`, temperature above 0.

    Attributes:
        mu: the bound of surprise in bits; all there is to save and restore.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._version = sampling.mirostat
        self._tau = sampling.mirostat_tau
        self._eta = sampling.mirostat_eta
        self._temperature = sampling.temperature
        self.mu = 2.0 * sampling.mirostat_tau

    @staticmethod
    def can_act(sampling: Sampling) -> bool:
        """Whether the settings ask for it; a greedy draw has no surprise to steer."""
        return sampling.mirostat != 0 and sampling.temperature > 0.0

    def draw(self, row: Rows, u: float) -> int:
        """Draw a token from `row`, float32 (n_vocab,), by `u` in [0, 1), and learn from its surprise."""
        chances = probabilities(row, self._temperature)
        kept = self._surprise_kept(chances) if self._version > 1 else self._zipf_kept(chances)
        weights = chances[kept]
        weights /= weights.sum()
        choice = pick(weights, u)
        surprise = -math.log2(weights[choice])
        self.mu -= self._eta * (surprise - self._tau)
        return int(kept[choice])

    def _surprise_kept(self, chances: Probabilities) -> npt.NDArray[np.intp]:
        bound = 2.0 ** -min(max(self.mu, -_MAX_LOG2), _MAX_LOG2)
        kept = np.flatnonzero(chances >= bound)
        return kept if len(kept) else largest(chances, 1)

    def _zipf_kept(self, chances: Probabilities) -> npt.NDArray[np.intp]:
        best = chances[largest(chances, _NUM_FITTED)]
        count = zipf_count(best[best > 0.0], self.mu, len(chances))
        return np.sort(largest(chances, count))


def zipf_count(best: Probabilities, mu: float, num_vocab: int) -> int:
    """How many tokens to keep so that the expected surprise is `mu` bits, by a fitted Zipf law.

    k = (eps * 2**mu / (1 - N**-eps)) ** (1 / s) with eps = s - 1 (equation 30 of the paper), in logarithms.

    Args:
        best: the largest probabilities, descending, all above 0.
        mu: bound of surprise in bits.
        num_vocab: N.
    """
    if len(best) < 2:  # noqa: PLR2004 - a slope needs two points
        return 1
    ranks = np.arange(1, len(best) + 1)
    steps = np.diff(np.log(ranks))
    exponent = float(steps @ -np.diff(np.log(best)) / (steps @ steps))
    epsilon = exponent - 1.0
    if abs(epsilon) < _MIN_EPSILON:
        ratio = 1.0 / math.log(num_vocab)  # the limit of eps / (1 - N**-eps)
    else:
        ratio = epsilon / (1.0 - num_vocab**-epsilon)
    log_base = math.log(ratio) + mu * math.log(2.0)
    most = math.log(num_vocab)
    if log_base >= exponent * most:
        return num_vocab
    return max(1, int(math.exp(log_base / exponent))) if exponent > 0.0 else 1
