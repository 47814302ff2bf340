"""A scheduler over the deterministic backend, driven step by step, and what its sequences should get."""

from functools import cache

import numpy as np

from stoker.backends.fake.backend import FakeBackend
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.cache.prefix_cache import PrefixCache
from stoker.engine.runners.steps import carry_out
from stoker.ipc.request import FinishReason
from stoker.kv.cells import SchedulerLimits
from stoker.kv.sequence import Sequence, SequenceKey
from stoker.machine.ledger import Ledger
from stoker.scheduler.scheduler import Scheduler

MAX_TOKENS = 4096
CELL_BYTES = 8


@cache
def alone(prompt, num_tokens):
    """Greedy continuation of `prompt` with nobody else around."""
    backend = FakeBackend(num_cells=MAX_TOKENS, n_batch=MAX_TOKENS)
    tokens = list(prompt)
    for _ in range(num_tokens):
        start = backend.length(0)
        row = backend.launch(BatchPlan((PlanItem(0, start, tokens[start:], 1),))).rows()[0]
        tokens.append(int(np.argmax(row)))
    return tokens


class Machine:
    """Scheduler, cache and backend; a step takes a second, so that patience counts steps."""

    def __init__(self, backend, cache_limits, **limits):
        self.backend = backend
        self.cache = PrefixCache(cache_limits, Ledger())
        known = backend.capabilities
        defaults = {
            "num_sequences": known.num_sequences,
            "num_cells": known.num_cells,
            "n_batch": known.n_batch,
            "can_trim": known.can_trim,
            "can_fork": known.can_fork,
            "shares_cells": known.shares_cells,
            "cell_bytes": CELL_BYTES,
        }
        self.scheduler = Scheduler(SchedulerLimits(**defaults | limits), self.cache)
        self.sequences = []
        self.now = 0.0

    def enter_prompt(self, prompt, num_tokens=3, **fields):
        """A request of its own for so many tokens after a prompt."""
        fields = {"key": SequenceKey(f"r{len(self.sequences)}", 0)} | fields
        sequence = Sequence(
            tokens=list(prompt), num_prompt=len(prompt), num_wanted=num_tokens, arrival_s=self.now, **fields
        )
        self.sequences.append(sequence)
        self.scheduler.enqueue(sequence, self.now)
        return sequence

    def step(self):
        """One turn: disk, effects, step, greedy draw; returns how many tokens of each were computed."""
        self.now += 1
        self.tend_disk()
        has_work = self.scheduler.has_work
        self.carry_out(self.scheduler.schedule(self.now) if has_work else self.scheduler.store_idle(self.now))
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.scheduler.has_work, f"no step although there is work: {self.scheduler.stats()}"
            self.check()
            return {}
        batch = plan.batch()
        if compaction := self.backend.extensions.compaction:
            compaction.arrange(batch)
        rows = self.backend.launch(batch).rows()
        self.scheduler.cost.learn(batch.num_tokens, 0.002 + 0.002 * batch.num_tokens)
        self.scheduler.computed(plan, self.now)
        self._draw(plan, rows)
        self.check()
        return {part.sequence: len(part.item.tokens) for part in plan.parts}

    def _draw(self, plan, rows):
        at = 0
        for part in plan.parts:
            at += part.item.num_logits
            sequence = part.sequence
            if sequence.num_pending == 0:
                sequence.tokens.append(int(np.argmax(rows[at - 1])))
                if sequence.num_generated == sequence.num_wanted:
                    self.scheduler.retire(sequence, FinishReason.LENGTH, self.now)

    def carry_out(self, turn):
        """What the resident does with it."""
        carry_out(turn.ops, self.backend, self.scheduler.allocator)

    def tend_disk(self):
        """There is none."""

    def check(self):
        """Scheduler and backend hold the same tokens in the same number of cells."""
        self.scheduler.check()
        self.backend.check()
        assert self.backend.num_cells_used == self.scheduler.cells.used
        for slot in self.scheduler.slots.slots:
            assert list(self.backend.tokens(slot.id)) == slot.tokens
