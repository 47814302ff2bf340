"""Requests about pictures on MLX, parked in each form at each of their stages: the undisturbed answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_parked_images import NOW, PICTURES, STAGES, in_order, run

from seeing_folders import seeing_folder
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.model import ModelSpec
from stoker.kv.sequence import ParkForm
from stoker.machine.ledger import Ledger
from stoker.models.folders.folder import ModelFolder
from stoker.models.reader import LoadContext

pytest.importorskip("mlx_lm", reason="MLX is not installed (the mlx extra)")

from stoker.backends.mlx.model import load_backend
from stoker.backends.mlx.vision.library import installed_version
from stoker.backends.mlx.vision.vision import MlxEncoding

if not installed_version():
    pytest.skip("mlx-vlm is not installed (the mlx-vlm extra)", allow_module_level=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    """The model on this thread; steps that a picture takes several of, and slices of a layer."""
    path = seeing_folder(tmp_path_factory.mktemp("seeing") / "m", "llava-clip")
    spec = ModelSpec(id="m", path=str(path), n_ctx=512, n_batch=24, num_slots=2, num_threads=1)
    backend = load_backend(ModelFolder.open(path), spec, LoadContext(lambda _: None))
    timer, slice_of = StepTimer(Stopwatch(60.0)), MlxEncoding.run
    runner = SlotRunner(spec, backend, timer, PrefixCache(CacheLimits(), Ledger()), JobTable())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlxEncoding, "run", lambda encode, _: slice_of(encode, NOW))
        yield runner
    runner.close()


@pytest.fixture(scope="module")
def undisturbed(runner: SlotRunner) -> list[int]:
    """The answer about the three pictures."""
    return run(runner, PICTURES)[0]


def test_the_places_of_pictures_are_in_the_answer(runner: SlotRunner, undisturbed: list[int]) -> None:
    """SPEC F10, V2."""
    assert run(runner, in_order((2, 0, 1)))[0] != undisturbed


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ParkForm)
def test_parked_at_any_stage_on_mlx_the_answer_is_the_undisturbed_one(
    runner: SlotRunner, undisturbed: list[int], form: ParkForm, stage: str
) -> None:
    """SPEC F10, Q4: a visitor with a picture of its own uses the cells meanwhile."""
    answer, num_parked = run(runner, PICTURES, form, stage)
    assert num_parked >= 2
    assert answer == undisturbed
    runner.backend.check()
