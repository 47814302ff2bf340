"""Draws the next token of one choice from a row of raw logits (SPEC D1).

Order: edits (bias, penalties, then masks) -> truncation -> temperature -> draw. Each stage is a module of
its own and absent when the settings leave it nothing to do; greedy without edits is one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.backends.protocol.backend import Rows
from stoker.errors import InvalidRequestError, StepFailedError, StokerError
from stoker.ipc.request import Sampling
from stoker.sampling.logit_edits import LogitEdit
from stoker.sampling.mirostat import Mirostat
from stoker.sampling.rng import Stream, pick, probabilities, uniform
from stoker.sampling.truncation import TruncationChain, Workspace, Xtc


class Sampler:
    """Sampler state of one choice: the edits' memory, mirostat's bound and the number of tokens drawn.

    Args:
        sampling: the settings; a temperature above 0 needs a seed.
        index: which choice of its request; it draws with seed + index.
        edits: what changes the logits first, in this order; a grammar's mask comes last.
        workspace: buffers of the model.

    Raises:
        InvalidRequestError: no seed.
    """

    def __init__(
        self, sampling: Sampling, index: int, edits: Sequence[LogitEdit], workspace: Workspace
    ) -> None:
        self._temperature = sampling.temperature
        self._seed = (sampling.seed or 0) + index
        self._edits = tuple(edits)
        self._num_drawn = 0
        self._mirostat = Mirostat(sampling) if Mirostat.can_act(sampling) else None
        self._xtc = Xtc(sampling) if Xtc.can_act(sampling) else None
        self._truncation: TruncationChain | None = None
        if sampling.temperature > 0.0:
            if sampling.seed is None:
                raise InvalidRequestError("a request that samples needs a seed", param="seed")
            if self._mirostat is None:
                self._truncation = TruncationChain(sampling, workspace)

    def __repr__(self) -> str:
        return f"Sampler(seed={self._seed}, num_drawn={self._num_drawn}, mu={self.mirostat_mu})"

    def add_edit(self, edit: LogitEdit) -> None:
        """One more, after those there are."""
        self._edits = (*self._edits, edit)

    @property
    def edits_logits(self) -> bool:
        """Whether `draw` overwrites the row it is given."""
        return bool(self._edits)

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
        u = uniform(self._seed, self._num_drawn, Stream.TOKEN)
        if self._mirostat is not None:
            return self._mirostat.draw(row, u)
        return self._draw_truncated(row, u)

    def accept(self, token: int) -> None:
        """Note that `token` is the next one of the generation."""
        self._num_drawn += 1
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

    def _draw_truncated(self, row: Rows, u: float) -> int:
        assert self._truncation is not None
        ids, logits = self._truncation.apply(row)
        if self._xtc is not None:
            ids, logits = self._xtc.apply(ids, logits, uniform(self._seed, self._num_drawn, Stream.XTC))
        return int(ids[pick(probabilities(logits, self._temperature), u)])

    def _no_peak(self, peak: float) -> StokerError:
        if peak == -math.inf and self._edits:
            return InvalidRequestError("no token is left to draw: all are forbidden", param="logit_bias")
        return StepFailedError(
            f"the model returned logits whose largest is {peak} for token {self._num_drawn}",
            token_index=self._num_drawn,
        )
