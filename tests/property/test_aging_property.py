"""Background under people who always want every slot and every cell (SPEC Q7)."""

from random import Random

import pytest

import stepping
from stepping import CELL_BYTES
from stoker.backends.fake.backend import FakeBackend
from stoker.cache.prefix_cache import CacheLimits
from stoker.ipc.model import CacheMode, Policy
from stoker.ipc.request import Priority
from stoker.kv.sequence import SequenceState
from stoker.scheduler.queue import ONE_STEP_IN

PATIENCE_S = 5.0
NUM_SLOTS, N_BATCH = 3, 24
NUM_JOBS_TOKENS = 4


class Machine(stepping.Machine):
    """Three slots, five people at any time, little room or plenty."""

    def __init__(self, random):
        self.random = random
        self.num_people = 0
        backend = FakeBackend(
            num_sequences=random.choice([3, 4, 8]), num_cells=random.choice([124, 160, 400]), n_batch=N_BATCH
        )
        super().__init__(
            backend,
            CacheLimits(ram_bytes=random.choice([0, 2**20])),
            num_slots=NUM_SLOTS,
            max_queue=1000,
            target_step_s=0.012,
            background_patience_s=PATIENCE_S,
            park_bytes=random.choice([0, 40 * CELL_BYTES, 2**20]),
            policy=random.choice(list(Policy)),
            cache_mode=random.choice(list(CacheMode)),
        )

    def crowd(self):
        """Somebody always wants the slots."""
        people = [s for s in self.sequences if not s.is_background and s.state is not SequenceState.DONE]
        for _ in range(5 - len(people)):
            self.num_people += 1
            prompt = [self.num_people % 250, *(self.random.randint(97, 122) for _ in range(20))]
            self.enter_prompt(prompt, self.random.randint(5, 30))


@pytest.mark.parametrize("seed", range(40))
def test_a_job_has_a_token_within_its_patience_and_ten_steps_a_slice(seed):
    """SPEC Q7: however full slots and cells are and whatever can be kept of it; no more than its share."""
    random = Random(seed)
    machine = Machine(random)
    machine.crowd()
    machine.step()
    prompt = [random.randint(40, 60) for _ in range(random.randint(1, 110))]
    job = machine.enter_prompt(prompt, NUM_JOBS_TOKENS, priority=Priority.BACKGROUND)
    waited = 0
    while job.state is not SequenceState.DONE:
        before = job.num_generated
        machine.crowd()
        machine.step()
        waited = waited + 1 if job.num_generated == before else 0
        num_slices = -(-len(job.tokens) // (N_BATCH - NUM_SLOTS))
        assert waited <= PATIENCE_S + 1 + ONE_STEP_IN * num_slices, job.story
    stats = machine.scheduler.stats()
    assert NUM_JOBS_TOKENS <= stats["num_owed_steps_total"] <= NUM_JOBS_TOKENS * (num_slices + 1)
    assert stats["num_owed"] == 0


def test_the_one_that_is_owed_longest_has_every_such_step_until_its_token():
    """SPEC Q7: a long prompt is not computed in turns with another's, both of which would hold cells."""
    machine = Machine(Random(2))
    machine.crowd()
    machine.step()
    jobs = [machine.enter_prompt([50 + at] * 60, 2, priority=Priority.BACKGROUND) for at in range(2)]
    for _ in range(400):
        machine.crowd()
        machine.step()
        if jobs[1].num_computed:
            break
    assert jobs[1].num_computed
    assert jobs[0].num_generated >= 1
