"""Random histories through the scheduler and the deterministic backend, against one-at-a-time execution."""

from random import Random

import pytest

import histories
from histories import make_history, make_options
from stepping import CELL_BYTES, alone
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.cache.radix import common_prefix
from stoker.errors import EngineError
from stoker.ipc.request import Priority
from stoker.kv.allocator import KVAllocator
from stoker.kv.sequence import PrefixFollow, SequenceState
from stoker.kv.slots import SlotTable
from stoker.scheduler import queue

NUM_CELLS = 124
STEM = [65 + at % 26 for at in range(60)]


class Forgetful(FakeBackend):
    """A backend whose states cannot be had, as where memory is short."""

    def export_state(self, seq):
        """Fail."""
        raise EngineError(f"no memory for the state of {seq}")


class Machine(histories.Machine):
    """Over the deterministic backend, which checks every cell."""

    def prompt(self, number):
        """Some of a shared stem, and a tail of its own."""
        random = Random(number)
        return STEM[: random.randint(0, 43)] + [random.randint(97, 122) for _ in range(random.randint(1, 30))]

    def check(self):
        """Nothing takes much more than it may, and the line is in order."""
        super().check()
        assert self.cache.parked_bytes <= self.scheduler.limits.park_bytes * 1.5
        assert self.cache.ram_bytes <= self.cache.limits.ram_bytes * 1.2
        assert self.cache.disk.used_bytes <= self.cache.limits.disk_bytes * 1.2
        line = list(self.scheduler.queue)
        assert [s.is_background for s in line] == sorted(s.is_background for s in line)
        for state in (SequenceState.QUEUED, SequenceState.PARKED):
            for priority in Priority:
                arrivals = [s.arrival_s for s in line if (s.state, s.priority) == (state, priority)]
                assert arrivals == sorted(arrivals)


def fits(allocator, sequence, placement, num_cells):
    """`KVAllocator.fits`, with everything counted anew."""
    running, slots, cells = allocator.slots.running, allocator.slots.slots, allocator.cells
    if not running:
        return True
    idle = [slot for slot in slots if slot.sequence is None and (slot.kept or slot.parked)]
    promised = (
        cells.used - sum(cells.exclusive(slot.id) for slot in idle) + sum(s.num_pending for s in running)
    )
    is_shared = placement.entry is None and allocator.slots[placement.source].sequence is not None
    wanted = len(sequence.tokens) - (placement.length if is_shared else 0)
    growth = sum(map(allocator._growth, (*running, sequence)))
    return promised + wanted + growth <= num_cells


def source(slots, sequence):
    """`SlotTable.source`, with every slot compared in full."""
    best = None
    for slot in slots.slots:
        length = slots._num_reusable(slot, sequence)
        if length and (best is None or (length, slot.is_idle) > (best[1], best[0].is_idle)):
            best = slot, length
    return best


def leader_for(sequence, running, least):
    """The function of that name, likewise."""
    best = None
    for other in running:
        if other.state is not SequenceState.PREFILL or not other.shares:
            continue
        length = min(common_prefix(other.tokens, sequence.tokens), len(sequence.tokens) - 1)
        is_to_come = other.num_computed < length >= least and other.namespace == sequence.namespace
        if is_to_come and (best is None or length > best.length):
            best = PrefixFollow(other, length)
    return best


@pytest.fixture(autouse=True)
def _compared_with_the_plain_way(monkeypatch):
    """What is kept up or skipped for the sake of crowds gives the answers of a look at everything."""
    for owner, plain in ((KVAllocator, fits), (SlotTable, source), (queue, leader_for)):
        quick = getattr(owner, plain.__name__)

        def compared(*args, quick=quick, plain=plain):
            answer = quick(*args)
            assert answer == plain(*args), f"{plain.__name__} says {answer!r} of {args!r}"
            return answer

        monkeypatch.setattr(owner, plain.__name__, compared)


class SmallTiles:
    """Steps of eight rows or more cost half as much a row."""

    num_rows = 8

    def alone(self, spans):
        """A product a row."""
        return float(sum(count for _, count in spans))

    def together(self, spans):
        """Half of one."""
        return max(self.num_rows, self.alone(spans)) / 2

    def num_missing(self, plan):
        """Nothing is padded."""
        return 0


def run(seed):
    """One history to its end; every request has the tokens it gets alone."""
    random = Random(seed)
    kind = FakeBackend if random.random() < 0.8 else Forgetful
    backend = kind(
        num_sequences=random.choice([3, 4, 8]),
        num_cells=NUM_CELLS,
        n_batch=24,
        faults=FakeFaults(recurrent=random.random() < 0.4),
    )
    tiles = SmallTiles() if seed % 3 == 0 else None
    machine = Machine(backend, make_options(random, CELL_BYTES) | {"tiles": tiles}, random)
    machine.play(make_history(random))
    for sequence in machine.sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.tokens == alone(tuple(prompt), 50)[: len(sequence.tokens)]


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 2000, 50)),
    ],
)
def test_every_history_gives_each_request_the_tokens_it_gets_alone(first):
    """Q2, Q3, Q4, Q7, Q9, Q10, Q12, Q17, L6: none lost, none twice, no cell leaked, whatever happens."""
    for seed in range(first, first + 50):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"the history of seed {seed} ends wrong") from error
