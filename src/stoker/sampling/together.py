"""Draws the next tokens of a whole step from the best logits of each row (SPEC B6).

What is drawn is what `Sampler.draw` draws from the whole rows: the same candidates go through the same native
chains, and the same sums decide. Only the work around them is done for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.backends.protocol.backend import Candidates
from stoker.errors import StokerError
from stoker.sampling.sampler import PlainDraw, Sampler, pick_rows, weights
from stoker.sampling.truncation import Workspace, by_id, in_order


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
        try:
            tokens[at] = sampler.draw_best(found.ids[at], found.logits[at])
        except StokerError as error:
            tokens[at] = error
    if plain:
        rows = [at for at, _ in plain]
        drawn = _drawn([draw for _, draw in plain], found[np.array(rows)], workspace)
        for at, token in zip(rows, drawn, strict=True):
            tokens[at] = token
    return tokens


def _edited(samplers: Sequence[Sampler], found: Candidates) -> Candidates:
    """The best after each sampler's edits, in order."""
    is_edited = np.array([sampler.edits_logits for sampler in samplers])
    if is_edited.any():
        found = Candidates(found.ids, found.logits.copy())
        for at in np.flatnonzero(is_edited).tolist():
            samplers[at].lower(found.ids[at], found.logits[at])
    return in_order(found, is_edited)


def _drawn(draws: Sequence[PlainDraw], found: Candidates, workspace: Workspace) -> list[int]:
    """A token a row, of candidates in order."""
    top_ks = np.minimum([draw.truncation.top_k for draw in draws], found.ids.shape[1])
    width = int(top_ks.max())
    found = Candidates(found.ids[:, :width], found.logits[:, :width])
    sizes = workspace.truncate_rows([draw.truncation.address for draw in draws], found, top_ks)
    left = by_id(workspace.kept(found.ids.shape), sizes)
    chances = weights(left.logits, np.array([draw.temperature for draw in draws]))
    picked = pick_rows(chances, np.array([draw.u for draw in draws]))
    drawn: list[int] = left.ids[np.arange(len(draws)), picked].tolist()
    return drawn
