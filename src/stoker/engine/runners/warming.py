"""Steps that a model on a device computes while nothing is asked of it, so that no request is the first.

A device loads and tunes its kernels with their first use, up to 0.2 s for each kind; which they are follows
from how many rows a step has and how long a prompt is. The steps' tokens lie in sequences that hold nothing,
and are dropped in the turn that has computed them. Nothing is counted and nothing learned from them.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stoker.backends.protocol.backend import PLAIN, BatchPlan, PlanItem
from stoker.errors import StokerError

if TYPE_CHECKING:
    from stoker.backends.protocol.backend import Backend, Capabilities
    from stoker.engine.threads.timer import Place, StepTimer

log = logging.getLogger(__name__)

PROMPTS = (32, 128, 512, 2048)
"""Tokens of a prompt from which on other kernels are used, about."""
CROWDS, CROWD_TOKENS = (2, 8, 32), 64
"""Short prompts at once, which are computed by other kernels than one of as many tokens."""
TIMES = 2
"""How often decode rows are computed: the second time the step is captured (docs/adr/0028)."""


class WarmStep(NamedTuple):
    """So many sequences of so many tokens; candidates of their last rows, or these whole."""

    num_rows: int
    num_tokens: int
    takes_candidates: bool


def warm_steps(limits: Capabilities, num_slots: int, *, draws: bool) -> list[WarmStep]:
    """Those of a model on a device, the smallest first.

    Args:
        limits: of the loaded model.
        num_slots: rows that a step has at the most.
        draws: rows may be had as candidates.
    """
    if limits.decoder_start is not None:  # it computes nothing without a source
        return []
    most = min(limits.n_batch, limits.n_ctx - 1)
    counts = [1 << power for power in range((num_slots - 1).bit_length())] + [num_slots]
    found = [WarmStep(count, 1, draws) for count in counts if count <= limits.n_batch] * TIMES
    found += [WarmStep(1, count, draws) for count in PROMPTS if count <= most]
    crowds = [count for count in CROWDS if count <= num_slots and count * CROWD_TOKENS <= limits.n_batch]
    found += [WarmStep(count, CROWD_TOKENS, draws) for count in crowds if most >= CROWD_TOKENS]
    if draws:
        found += [WarmStep(1, 1, False)] * TIMES  # as constraints need it
    return sorted(found, key=lambda step: step.num_rows * step.num_tokens)


class Warming:
    """The warming steps of one model.

    Args:
        model: its id, for the log.
        backend: the model.
        timer: has its watchdog look at them.
        place: devices that it is computed on; of a CPU there is nothing to warm.
        num_slots: rows that a step has at the most.
    """

    def __init__(self, model: str, backend: Backend, timer: StepTimer, place: Place, num_slots: int) -> None:
        self._model = model
        self._backend = backend
        self._timer = timer
        self._place = place
        draws = backend.extensions.draws is not None
        self._num_done, self._took_s = 0, 0.0
        self._left = deque(warm_steps(backend.capabilities, num_slots, draws=draws) if place else ())

    def __repr__(self) -> str:
        return f"<Warming, {len(self._left)} steps left>"

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._left

    def step(self, num_free: int) -> None:
        """Compute the next one, if it finds room; where one fails there is none after it.

        Args:
            num_free: cells that no sequence holds.
        """
        kind = self._left.popleft()
        seqs = self._empty(kind, num_free)
        if seqs:
            begun_s = self._timer.now()
            self._try(kind, seqs)
            self._num_done, self._took_s = self._num_done + 1, self._took_s + self._timer.now() - begun_s
        if not self._left:
            text = "%s: kernels were warmed by %d steps, which took %.2f s"
            log.info(text, self._model, self._num_done, self._took_s)

    def _empty(self, kind: WarmStep, num_free: int) -> list[int]:
        """As many empty sequences as the step needs; none where it finds no room."""
        backend = self._backend
        empty = [seq for seq in range(backend.capabilities.num_sequences) if backend.length(seq) == 0]
        has_room = len(empty) >= kind.num_rows and kind.num_rows * kind.num_tokens <= num_free
        return empty[: kind.num_rows] if has_room else []

    def _try(self, kind: WarmStep, seqs: list[int]) -> None:
        backend = self._backend
        tokens = [token % backend.capabilities.n_vocab for token in range(kind.num_tokens)]
        plan = BatchPlan(tuple(PlanItem(seq, 0, tokens, 1, kind.takes_candidates) for seq in seqs))
        self._timer.begin(plan.num_tokens, self._place)
        try:
            self._compute(plan)
        except (StokerError, MemoryError) as error:
            log.info("%s: kernels are warmed no further: %s", self._model, error)
            self._left.clear()
        finally:
            self._timer.abandon(self._place)
            for seq in seqs:
                backend.drop(seq)

    def _compute(self, plan: BatchPlan) -> None:
        if (conditioner := self._backend.extensions.conditioner) is not None:
            for item in plan.items:
                conditioner.condition(item.seq, PLAIN)  # whoever had that number before
        self._backend.launch(plan).rows()
