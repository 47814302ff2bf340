"""Tiny models of MLX parked every twenty tokens in each form: the same tokens and text as undisturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from test_parked_forms import NUM_TOKENS, PARK_EVERY, Outcome, run

from model_folders import tiny_folder
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import Sampling
from stoker.kv.sequence import ParkForm
from stoker.machine.ledger import Ledger
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext

MODELS = ("llama", "qwen2", "gemma3_text", "mamba")
QUICK = {("gemma3_text", ParkForm.SNAPSHOT), ("llama", ParkForm.CELLS)}
EACH = [
    pytest.param(name, form, marks=() if (name, form) in QUICK else pytest.mark.slow)
    for name in MODELS
    for form in ParkForm
]
"""Each is some seconds of steps."""
SEEDED = Sampling(temperature=0.8, seed=7, repeat_penalty=1.1)


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    """One model on this thread."""
    model = pytest.importorskip("stoker.backends.mlx.model", reason="MLX is not installed (the mlx extra)")
    path = tiny_folder(tmp_path_factory.mktemp("mlx") / request.param, request.param)
    spec = ModelSpec(id="smol", path=str(path), num_slots=2, n_ctx=1024, num_threads=1)
    backend = model.load_backend(ModelFolder.open(path), spec, LoadContext(lambda _: None))
    prefixes = PrefixCache(CacheLimits(), Ledger())
    runner = SlotRunner(spec, backend, StepTimer(Stopwatch(60.0)), prefixes, JobTable())
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def undisturbed(runner: SlotRunner) -> Callable[[], Outcome]:
    """What it says without any parking."""
    return cache(lambda: run(runner, SEEDED))


@pytest.mark.long
@pytest.mark.parametrize(("runner", "form"), EACH, indirect=["runner"])
def test_parked_every_twenty_tokens_its_text_is_the_undisturbed_one(
    runner: SlotRunner, undisturbed: Callable[[], Outcome], form: ParkForm
) -> None:
    """SPEC F8, Q4: in cells, as a snapshot, as tokens that are computed again."""
    outcome = run(runner, SEEDED, form)
    assert outcome.num_preemptions == NUM_TOKENS // PARK_EVERY - 1
    assert outcome.tokens == undisturbed().tokens
    assert outcome.text == undisturbed().text
    runner.backend.check()
