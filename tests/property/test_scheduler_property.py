"""Random histories through the scheduler and the deterministic backend, against one-at-a-time execution."""

from random import Random

import pytest

import stepping
from stepping import CELL_BYTES, alone
from stoker.backends.fake import FakeBackend, FakeFaults
from stoker.cache.disk_tier import Read, Remove, Write
from stoker.cache.prefix_cache import CacheLimits
from stoker.errors import EngineError
from stoker.request import FinishReason, Priority
from stoker.scheduler.sequence import ParkForm, SequenceState
from stoker.values import CacheMode, Policy

NUM_CELLS = 124
STEM = [65 + at % 26 for at in range(60)]
SPACES = [b"a" * 32, b"b" * 32]
PAUSED_STEPS = 15
"""After so many steps a paused sequence is resumed, lest a history never ends."""

EVENTS = {
    "arrive": 8,
    "steps": 8,
    "cancel": 1,
    "pause": 2,
    "resume": 2,
    "park": 3,
    "fail": 1,
    "expire": 1,
}
"""What may happen, and how often beside the rest."""


def make_history(random):
    """Some tens of events: name and arguments."""
    names = random.choices(list(EVENTS), EVENTS.values(), k=random.randint(10, 60))
    return [(name, *arguments_of(name, random)) for name in names]


def arguments_of(name, random):
    """What an event takes."""
    match name:
        case "arrive":
            tail = [random.randint(97, 122) for _ in range(random.randint(1, 30))]
            num_tokens = random.randint(1, 50)
            priority = random.choice(list(Priority))
            habits = random.random() < 0.2, random.random() < 0.9, random.choice(SPACES)
            return random.randint(0, 43), tail, num_tokens, priority, habits
        case "steps":
            return (random.randint(1, 12),)
        case "park":
            return random.randint(0, 30), random.choice(list(ParkForm))
        case _:
            return (random.randint(0, 30),)


def make_options(random):
    """Limits of the machine."""
    return {
        "num_sequences": random.choice([3, 4, 8]),
        "park_bytes": random.choice([0, 60 * CELL_BYTES, 2**20]),
        "policy": random.choice(list(Policy)),
        "background_patience_s": random.choice([0.0, 5.0, 1000.0]),
        "can_export": random.random() < 0.8,
        "is_recurrent": random.random() < 0.4,
        "cache_mode": random.choice([*CacheMode, CacheMode.BOTH]),
        "ram_bytes": random.choice([0, 300 * CELL_BYTES, 2**20]),
        "disk_bytes": random.choice([0, 400 * CELL_BYTES, 2**20]),
    }


class Forgetful(FakeBackend):
    """A backend whose states cannot be had, as where memory is short."""

    def export_state(self, seq):
        """Fail."""
        raise EngineError(f"no memory for the state of {seq}")


class Shelf:
    """A disk that answers when it likes, and now and then has lost what it held."""

    def __init__(self, cache, random):
        self.cache = cache
        self.random = random
        self.files = {}
        self.waiting = []

    def turn(self, now):
        """Take new orders, and end some of those that wait."""
        self.cache.tend(now)
        self.waiting += self.cache.disk.take_orders()
        while self.waiting and self.random.random() < 0.5:
            self.end(self.waiting.pop(0), now)

    def end(self, order, now):
        """One order, well or not."""
        match order:
            case Write(entry):
                self.write(entry)
            case Read(entry):
                data = self.files.get(entry.file)
                if data is None or self.random.random() < 0.2:
                    self.cache.unreadable(entry)
                else:
                    self.cache.fetched(entry, data, now)
            case Remove(file):
                self.files.pop(file, None)

    def write(self, entry):
        """A file of the state and a head, or none."""
        if self.random.random() < 0.1:
            self.cache.unwritten(entry, self.random.choice(["", "", "the disk is full"]))
            return
        name = f"file {self.random.random()}"
        self.files[name] = bytes(entry.data)
        self.cache.written(entry, name, len(entry.data) + 10)


class Machine(stepping.Machine):
    """With little room, and whatever may happen to those who want it."""

    def __init__(self, options, random):
        kind = FakeBackend if options.pop("can_export") else Forgetful
        faults = FakeFaults(recurrent=options.pop("is_recurrent"))
        num_sequences = options.pop("num_sequences")
        limits = CacheLimits(ram_bytes=options.pop("ram_bytes"), disk_bytes=options.pop("disk_bytes"))
        super().__init__(
            kind(num_sequences=num_sequences, num_cells=NUM_CELLS, n_batch=24, faults=faults),
            limits,
            num_slots=3,
            max_queue=1000,
            target_step_s=0.012,
            **options,
        )
        self.shelf = Shelf(self.cache, random)
        self.paused_at = {}

    @property
    def live(self):
        """Those that have not ended."""
        return [s for s in self.sequences if s.state is not SequenceState.DONE]

    def arrive(self, stem, tail, num_tokens, priority, habits):
        """A request for `num_tokens` after a shared stem and its own tail."""
        ends_if_preempted, shares, space = habits
        self.enter_prompt(
            STEM[:stem] + tail,
            num_tokens,
            priority=priority,
            ends_if_preempted=ends_if_preempted,
            namespace=space,
            shares=shares and self.scheduler.limits.cache_mode is not CacheMode.OFF,
        )

    def pick(self, at, *states):
        """One of the live sequences in these states, if there is one."""
        candidates = [s for s in self.live if s.state in states]
        return candidates[at % len(candidates)] if candidates else None

    def cancel(self, at):
        """A client asks, or leaves."""
        if sequence := self.pick(at, *SequenceState):
            self.scheduler.retire(sequence, FinishReason.CANCELLED, self.now)

    def fail(self, at):
        """A native failure of one sequence."""
        if sequence := self.pick(at, SequenceState.PREFILL, SequenceState.DECODE):
            self.scheduler.retire(sequence, FinishReason.ERROR, self.now)

    def expire(self, at):
        """A deadline passes."""
        if sequence := self.pick(at, *SequenceState):
            sequence.deadline_s = self.now

    def pause(self, at):
        """Stand still."""
        moving = set(SequenceState) - {SequenceState.PAUSED, SequenceState.DONE}
        if sequence := self.pick(at, *moving):
            self.scheduler.pause(sequence, self.now)
            self.paused_at[sequence] = self.now

    def resume(self, at):
        """Go on."""
        if sequence := self.pick(at, SequenceState.PAUSED):
            self.scheduler.resume(sequence, self.now)

    def park(self, at, form):
        """Give way, kept in that form."""
        if sequence := self.pick(at, SequenceState.PREFILL, SequenceState.DECODE):
            self.carry_out(self.scheduler.park(sequence, form, self.now))

    def steps(self, num_steps):
        """Steps while there is work, at most `num_steps`."""
        for _ in range(num_steps):
            for sequence in list(self.scheduler.paused):
                if self.now >= self.paused_at[sequence] + PAUSED_STEPS:
                    self.scheduler.resume(sequence, self.now)
            if not self.live:
                return
            self.step()

    def tend_disk(self):
        """It answers when it likes."""
        self.shelf.turn(self.now)

    def check(self):
        """Nothing takes much more than it may, and the line is in order."""
        super().check()
        assert self.cache.parked_bytes <= self.scheduler.limits.park_bytes * 1.5
        assert self.cache.ram_bytes <= self.cache.limits.ram_bytes * 1.2
        assert self.cache.disk.used_bytes <= self.cache.limits.disk_bytes * 1.2
        line = self.scheduler.waiting()
        assert [s.is_background for s in line] == sorted(s.is_background for s in line)
        for state in (SequenceState.QUEUED, SequenceState.PARKED):
            for priority in Priority:
                arrivals = [s.arrival_s for s in line if (s.state, s.priority) == (state, priority)]
                assert arrivals == sorted(arrivals)


def run(seed):
    """One history to its end; every request has ended, with the tokens it gets alone."""
    random = Random(seed)
    machine = Machine(make_options(random), random)
    for event, *arguments in [*make_history(random), ("steps", 5000)]:
        getattr(machine, event)(*arguments)
    for sequence in machine.sequences:
        assert sequence.state is SequenceState.DONE
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.tokens == alone(tuple(prompt), 50)[: len(sequence.tokens)]
        if sequence.finish_reason is FinishReason.LENGTH:
            assert sequence.num_generated == sequence.num_wanted
        assert sequence.finish_reason is not FinishReason.PREEMPTED or sequence.ends_if_preempted
    assert machine.cache.parked_bytes == 0
    assert not any(set(entry.leases) - {"disk"} for entry in machine.cache.entries())
    assert not machine.scheduler.slots.guests()


@pytest.mark.parametrize(
    "first",
    [
        *range(0, 800, 100),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(800, 2000, 100)),
    ],
)
def test_every_history_gives_each_request_the_tokens_it_gets_alone(first):
    """Q2, Q3, Q4, Q7, Q9, Q10, Q12, Q17, L6: none lost, none twice, no cell leaked, whatever happens."""
    for seed in range(first, first + 100):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"the history of seed {seed} ends wrong") from error
