"""Random histories through the scheduler and the deterministic backend, against one-at-a-time execution."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.backends.fake import FakeBackend
from stoker.backends.protocol import BatchPlan, PlanItem
from stoker.request import FinishReason, Priority
from stoker.scheduler.scheduler import Drop, Fork, Scheduler, SchedulerLimits, Trim
from stoker.scheduler.sequence import Sequence, SequenceKey, SequenceState

NUM_CELLS = 124
STEM = [65 + at % 26 for at in range(60)]

arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, 40),
    st.integers(1, 30).flatmap(lambda size: st.lists(st.integers(97, 122), min_size=size, max_size=size)),
    st.integers(1, 50),
    st.sampled_from(Priority),
)
histories = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    min_size=8,
    max_size=30,
)


def alone(prompt, num_tokens):
    """Greedy continuation of `prompt` with nobody else around."""
    backend = FakeBackend(num_cells=NUM_CELLS, n_batch=NUM_CELLS)
    tokens = list(prompt)
    for _ in range(num_tokens):
        start = backend.length(0)
        row = backend.step(BatchPlan((PlanItem(0, start, tokens[start:], 1),)))[0]
        tokens.append(int(np.argmax(row)))
    return tokens


class Machine:
    """Scheduler and backend, driven synchronously."""

    def __init__(self):
        self.backend = FakeBackend(num_sequences=5, num_cells=NUM_CELLS, n_batch=24)
        self.scheduler = Scheduler(
            SchedulerLimits(num_slots=3, num_sequences=5, num_cells=NUM_CELLS, n_batch=24, max_queue=1000)
        )
        self.sequences = []
        self.wanted = {}
        self.now = 0.0

    def arrive(self, stem, tail, num_tokens, priority):
        """A request for `num_tokens` after a shared stem and its own tail."""
        prompt = STEM[:stem] + tail
        sequence = Sequence(
            key=SequenceKey(f"r{len(self.sequences)}", 0),
            tokens=list(prompt),
            num_prompt=len(prompt),
            priority=priority,
            arrival_s=self.now,
        )
        self.sequences.append(sequence)
        self.wanted[sequence.key] = num_tokens
        self.scheduler.enqueue(sequence, self.now)

    def cancel(self, at):
        """End one of the live sequences, if there is one."""
        live = [s for s in self.sequences if s.state is not SequenceState.DONE]
        if live:
            self.scheduler.retire(live[at % len(live)], FinishReason.CANCELLED, self.now)

    def steps(self, num_steps):
        """Steps while there is work, at most `num_steps`."""
        for _ in range(num_steps):
            if not self.scheduler.has_work:
                return
            self.step()

    def step(self):
        """One turn: effects, step, greedy draw."""
        self.now += 1
        for effect in self.scheduler.schedule(self.now).effects:
            match effect:
                case Fork(src, dst, length):
                    self.backend.fork(src, dst, length)
                case Trim(seq, length):
                    self.backend.trim(seq, length)
                case Drop(seq):
                    self.backend.drop(seq)
        plan = self.scheduler.plan()
        assert plan is not None, f"no step although there is work: {self.scheduler.stats()}"
        rows = self.backend.step(plan.batch())
        self.scheduler.computed(plan, self.now)
        at = 0
        for part in plan.parts:
            at += part.item.num_logits
            sequence = part.sequence
            if sequence.num_pending == 0:
                sequence.tokens.append(int(np.argmax(rows[at - 1])))
                if sequence.num_generated == self.wanted[sequence.key]:
                    self.scheduler.retire(sequence, FinishReason.LENGTH, self.now)
        self.check()

    def check(self):
        """Scheduler and backend hold the same tokens in the same number of cells."""
        self.scheduler.check()
        self.backend.check()
        assert self.backend.num_cells_used == self.scheduler.cells.used
        for slot in self.scheduler.slots.slots:
            assert list(self.backend.tokens(slot.id)) == slot.tokens


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_every_history_gives_each_request_the_tokens_it_gets_alone(history):
    """Q2, Q9, Q10, Q12, L6: none lost, none twice, no cell leaked, whatever arrives and leaves."""
    machine = Machine()
    for event, *arguments in [*history, ("steps", 5000)]:
        getattr(machine, event)(*arguments)
    for sequence in machine.sequences:
        assert sequence.state is SequenceState.DONE
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.tokens == alone(prompt, sequence.num_generated)
        if sequence.finish_reason is FinishReason.LENGTH:
            assert sequence.num_generated == machine.wanted[sequence.key]
