"""Draws the next tokens of a whole step, from its rows or from the best logits of each (SPEC B6, D1).

What is drawn is what `Sampler.draw` draws from the whole rows: the same candidates go through the same native
chains, and the same sums decide. Only the work around them is done for all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stoker.backends.protocol.backend import Candidates, Rows
from stoker.errors import StokerError
from stoker.sampling.sampler import PlainDraw, Sampler, pick_rows, weights
from stoker.sampling.truncation import Workspace, by_id, by_logit, in_order, largest

_FEW = 8  # tokens that are looked for one by one sooner than all at once
_MOST = 256  # candidates up to which rows are drawn from together


def draw_rows(
    samplers: Sequence[Sampler], rows: Rows, workspace: Workspace
) -> list[int | StokerError | None]:
    """The next token of each, from raw logits, which stay as they are; `Sampler.accept` moves on.

    Args:
        samplers: of the rows.
        rows: float32 (num_rows, n_vocab).
        workspace: of their model.

    Returns:
        What `Sampler.draw` draws; None: it has to draw from the row itself.
    """
    drawn: list[int | StokerError | None] = [None] * len(samplers)
    bests = rows.argmax(axis=1).tolist()  # a NaN is the largest of all
    left: list[int] = []
    for at, (sampler, best) in enumerate(zip(samplers, bests, strict=True)):
        num_needed = sampler.num_needed
        if num_needed is None or num_needed > _MOST or not math.isfinite(rows[at, best]):
            continue
        if not sampler.is_greedy:
            left.append(at)
        elif best not in (sampler.lowered or ()):
            drawn[at] = best
    if left:
        few = [samplers[at] for at in left]
        for at, token in zip(left, _drawn_from(few, _best_of(rows, left, few), workspace), strict=True):
            drawn[at] = token
    return drawn


def _best_of(rows: Rows, places: Sequence[int], samplers: Sequence[Sampler]) -> Candidates:
    """As many of the largest logits of the rows at those places as any of their samplers needs."""
    most = max(sampler.num_needed or 0 for sampler in samplers)
    ids = [largest(rows[at], most) for at in places]
    logits = [rows[at][own] for at, own in zip(places, ids, strict=True)]
    return Candidates(np.array(ids, np.int32), np.array(logits))


def draw_together(
    samplers: Sequence[Sampler], found: Candidates, workspace: Workspace
) -> list[int | StokerError]:
    """The next token of each; changes nothing, `Sampler.accept` moves on.

    Args:
        samplers: none needs more than a row of `found` holds (`Sampler.num_needed`).
        found: a row each.
        workspace: of their model.

    Returns:
        Tokens; for a row from which none can be drawn the error of `Sampler.draw`.
    """
    tokens = _clearly_best(samplers, found)
    left = [at for at, token in enumerate(tokens) if token is None]
    if len(left) == len(tokens):
        return _drawn_from(samplers, found, workspace)
    if left:
        rest = [samplers[at] for at in left]
        for at, token in zip(left, _drawn_from(rest, found[np.array(left)], workspace), strict=True):
            tokens[at] = token
    return [token for token in tokens if token is not None]


class _PlainRows:
    """What draws by truncation and temperature alone have of their samplers, which stays from step to step.

    Args:
        draws: one a row.
    """

    def __init__(self, draws: Sequence[PlainDraw]) -> None:
        self._truncations = [draw.truncation for draw in draws]
        self._top_ks = [draw.truncation.top_k for draw in draws]
        self._width = max(self._top_ks)
        self._temperatures = np.array([[draw.temperature] for draw in draws])
        self._places = np.arange(len(draws))

    def __repr__(self) -> str:
        return f"<_PlainRows of {len(self._truncations)}, {self._width} candidates>"

    def drawn(self, found: Candidates, us: Sequence[float], workspace: Workspace) -> list[int]:
        """A token a row, of candidates in order, by their uniform numbers."""
        most, width, top_ks = found.ids.shape[1], self._width, self._top_ks
        if most < width:
            top_ks = [min(top_k, most) for top_k in top_ks]
        found = Candidates(found.ids[:, :width], found.logits[:, :width])
        chains = [truncation.address for truncation in self._truncations]
        sizes = workspace.truncate_rows(chains, found, top_ks)
        left = by_id(workspace.kept, sizes)
        picked = pick_rows(weights(left.logits, self._temperatures), np.array(us))
        tokens: list[int] = left.ids[self._places, picked].tolist()
        return tokens


class PlainSamplers:
    """Samplers of several rows, of each of which nothing but truncation and temperature makes the draw."""

    def __init__(self, samplers: Sequence[Sampler], draws: Sequence[PlainDraw]) -> None:
        self._samplers = list(samplers)
        self._rows = _PlainRows(draws)

    def __repr__(self) -> str:
        return f"<PlainSamplers {self._rows!r}>"

    def draw(self, found: Candidates, workspace: Workspace) -> list[int] | None:
        """As `draw_together`; None: a row is to be looked at by itself."""
        if not np.isfinite(found.logits[:, 0]).all():
            return None
        us = [sampler.token_uniform() for sampler in self._samplers]
        return self._rows.drawn(in_order(found), us, workspace)


def plain_samplers(samplers: Sequence[Sampler]) -> PlainSamplers | None:
    """These, where each draws so; None: one does not, or there is one alone, which is quicker by itself."""
    draws = [None if sampler.edits_logits else sampler.plain_draw for sampler in samplers]
    plain = [draw for draw in draws if draw is not None and not draw.truncation.needs_row]
    return PlainSamplers(samplers, plain) if 1 < len(plain) == len(samplers) else None


def _clearly_best(samplers: Sequence[Sampler], found: Candidates) -> list[int | StokerError | None]:
    """The best of each row that is drawn greedily, alone at the top and not lowered; None: look closer."""
    if found.logits.shape[1] == 1 or not any(sampler.is_greedy for sampler in samplers):
        return [None] * len(samplers)
    ids, tops = found.ids[:, 0].tolist(), found.logits[:, :2].tolist()
    return [
        token
        if sampler.is_greedy and second < best < math.inf and token not in (sampler.lowered or ())
        else None
        for sampler, token, (best, second) in zip(samplers, ids, tops, strict=True)
    ]


def _drawn_from(
    samplers: Sequence[Sampler], found: Candidates, workspace: Workspace
) -> list[int | StokerError]:
    """As `draw_together`, with edits, ties and chances."""
    # one by itself is quicker than as one of many
    if len(samplers) == 1 and _is_as_found(samplers[0], found):
        return [_drawn_alone(samplers[0], found)]
    found = _edited(samplers, found)
    tokens: list[int | StokerError] = found.ids[:, 0].tolist()
    plain: list[tuple[int, PlainDraw]] = []
    for at, is_finite in enumerate(np.isfinite(found.logits[:, 0]).tolist()):
        sampler = samplers[at]
        if is_finite and sampler.is_greedy:
            continue
        if is_finite and (draw := sampler.plain_draw) is not None:
            plain.append((at, draw))
            continue
        tokens[at] = _drawn_alone(sampler, found[at : at + 1])
    if plain:
        rows = [at for at, _ in plain]
        own = found if len(rows) == len(samplers) else found[np.array(rows)]
        draws = [draw for _, draw in plain]
        drawn = _PlainRows(draws).drawn(own, [draw.u for draw in draws], workspace)
        for at, token in zip(rows, drawn, strict=True):
            tokens[at] = token
    return tokens


def _is_as_found(sampler: Sampler, found: Candidates) -> bool:
    """Whether a row's candidates are in order, and its sampler's edits act on none of them."""
    logits = found.logits[0]
    return bool((logits[1:] != logits[:-1]).all()) and (sampler.lowered or frozenset()).isdisjoint(
        found.ids[0].tolist()
    )


def _drawn_alone(sampler: Sampler, found: Candidates) -> int | StokerError:
    try:
        return sampler.draw_best(found.ids[0], found.logits[0])
    except StokerError as error:
        return error


def _edited(samplers: Sequence[Sampler], found: Candidates) -> Candidates:
    """The best after each sampler's edits, in order; edits whose tokens are not among them change nothing."""
    if lowered := {sampler.lowered for sampler in samplers if sampler.lowered}:
        has_lowered = _have_any(found.ids, frozenset().union(*lowered))
        is_edited = has_lowered & np.array([bool(sampler.lowered) for sampler in samplers])
        if is_edited.any():
            found = Candidates(found.ids, found.logits.copy())
            for at in np.flatnonzero(is_edited).tolist():
                samplers[at].lower(found.ids[at], found.logits[at])
            return by_logit(found)
    return in_order(found)


def _have_any(ids: npt.NDArray[np.int32], tokens: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Whether any of the tokens is in each row."""
    if len(tokens) > _FEW:
        is_one = np.isin(ids, list(tokens))
    else:
        is_one = np.zeros(ids.shape, np.bool_)
        for token in tokens:
            is_one |= ids == token
    found: npt.NDArray[np.bool_] = np.logical_or.reduce(is_one, axis=1)
    return found
