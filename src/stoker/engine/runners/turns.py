"""Turns by time among models that have the same claim to one (SPEC Q13).

Each model has a virtual time: the seconds it was computed for. The one that has the least is next, so equals
get equal time, however long their steps are. Who comes from idle begins at the least of those that stayed: it
is served soon and has saved nothing up.

Beside a model that writes for people an encoder's seconds count several times, its calls are to be a small
part of a step, and no two of them follow each other: so a reader hardly sees them. Who has a claim at all
(people before jobs, jobs that waited too long) is `runners`'. Pure: durations are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE_OF_STEP = 0.15
"""An encoder's call beside people who read along may take this part of one of their steps: their 95th
percentile between two tokens is to rise by less than a quarter, and calls may take longer than foreseen."""
PRICE_BESIDE_READERS = 1 / SHARE_OF_STEP
"""What a second of an encoder counts there: a full call as much as the step before it."""
FOLLOW = 0.2


@dataclass(frozen=True, slots=True)
class Contender:
    """A model with a claim to the next turn.

    Attributes:
        is_encoder: it computes whole texts, and nobody reads along.
        has_readers: somebody reads what it writes, token by token.
    """

    name: str
    is_encoder: bool = False
    has_readers: bool = False


class ModelTurns:
    """The virtual times, and whose turn it is."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._step_s: dict[str, float] = {}  # of those with readers: what a step of theirs takes
        self._contending: frozenset[str] = frozenset()
        self._last_s = 0.0  # virtual time of whoever was chosen last, be it gone
        self._chosen = Contender("")
        self._price = 1.0

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {served_s:.3f}" for name, served_s in self._served_s.items())
        return f"<ModelTurns of {told or 'nobody'}>"

    def allowance_s(self, contenders: Sequence[Contender]) -> float | None:
        """Seconds that a call of an encoder may take beside those; None: as long as it likes.

        A first text goes whole, however long it is: its price keeps the encoder waiting afterwards.
        """
        steps_s = [self._step_s.get(each.name, 0.0) for each in contenders if each.has_readers]
        return SHARE_OF_STEP * min(steps_s) if steps_s else None

    def choose(self, contenders: Sequence[Contender]) -> str:
        """Whose turn it is; among equals the first. Its time is to be told to `served`."""
        self._enter(contenders)
        has_readers = any(contender.has_readers for contender in contenders)
        candidates = list(contenders)
        if has_readers and self._chosen.is_encoder:  # the step of a reader's model comes between
            candidates = [contender for contender in contenders if not contender.is_encoder]
        self._chosen = min(candidates, key=lambda contender: self._served_s[contender.name])
        self._price = PRICE_BESIDE_READERS if has_readers and self._chosen.is_encoder else 1.0
        return self._chosen.name

    def _enter(self, contenders: Sequence[Contender]) -> None:
        """Who did not contend last time begins where the others are, unless it is ahead of them."""
        stayed = [contender.name for contender in contenders if contender.name in self._contending]
        least_s = min((self._served_s[name] for name in stayed), default=self._last_s)
        for contender in contenders:
            if contender.name not in self._contending:
                own_s = self._served_s.get(contender.name, 0.0)
                self._served_s[contender.name] = max(own_s, least_s)
        self._contending = frozenset(contender.name for contender in contenders)

    def served(self, name: str, took_s: float) -> None:
        """A turn of that model took so long; one that `choose` had not chosen costs what it took."""
        is_chosen = name == self._chosen.name
        price = self._price if is_chosen else 1.0
        self._served_s[name] = self._served_s.get(name, 0.0) + took_s * price
        if is_chosen:
            self._last_s = self._served_s[name]
        if is_chosen and self._chosen.has_readers:
            usual_s = self._step_s.get(name, took_s)
            self._step_s[name] = usual_s + FOLLOW * (took_s - usual_s)

    def forget(self, name: str) -> None:
        """The model is gone."""
        self._served_s.pop(name, None)
        self._step_s.pop(name, None)
        self._contending -= {name}
