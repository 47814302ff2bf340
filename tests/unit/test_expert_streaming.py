"""Mixtures of experts larger than memory: verdicts, and one whose experts are partly dropped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from stoker.backends.expert_pages import ExpertPages
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.engine.threads.timer import SLOWEST_DISK, StepTimer, Stopwatch
from stoker.errors import InsufficientMemoryError
from stoker.ipc.model import ModelSpec, PlacementSpec
from stoker.machine.cgroups import ControlGroup
from stoker.machine.mapped import PAGE, FileRange, find_mapped
from stoker.models.gguf.header import read_header, tensor_places
from stoker.models.memory_estimate.estimate import estimator_of
from stoker.models.memory_estimate.fit import (
    Estimate,
    Estimator,
    Fit,
    HostExperts,
    MemoryBudget,
    weigh,
)
from stoker.scheduler.cost import StepCost
from tiny_models import write_moe

MIB = 2**20
CPU = PlacementSpec(device=("none",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MiB, nearly all of it in 16 experts, of which two compute a token; written through to the disk."""
    path = write_moe(tmp_path_factory.mktemp("moe") / "m.gguf", num_layers=4, num_experts=16, width=512)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def spec_of(model: Path, placement: PlacementSpec = CPU) -> ModelSpec:
    """The model with one slot and a short context."""
    return ModelSpec(id="m", path=str(model), n_ctx=256, num_slots=1, placement=placement)


def budget(limit: float, free: float | None = None) -> MemoryBudget:
    """So many bytes, no margin."""
    return MemoryBudget(
        free_bytes=int(limit if free is None else free), limit_bytes=int(limit), margin_bytes=0
    )


@pytest.fixture
def estimate(model: Path) -> Estimator:
    """What it takes."""
    return estimator_of(model)


def test_verdicts_of_a_mixture_follow_the_limit(model: Path, estimate: Estimator) -> None:
    """SPEC R2, R14: fits, tight, streams, too large; a budget of experts is what the rest leaves."""
    spec = spec_of(model)
    found = estimate(spec)
    whole = found.total_bytes
    assert found.experts.size_bytes == 12 * MIB
    assert found.experts.active_bytes == found.experts.size_bytes * 2 // 16
    assert not found.experts.is_streamed
    assert weigh(spec, estimate, budget(whole * 1.4)).fit is Fit.FITS
    assert weigh(spec, estimate, budget(whole * 1.15)).fit is Fit.TIGHT
    fitted = weigh(spec, estimate, budget(whole * 0.95))
    assert (fitted.fit, fitted.estimate.experts.is_streamed) == (Fit.STREAMS, True)
    assert fitted.estimate.total_bytes == int(whole * 0.95) * 90 // 100
    assert "of 12 MiB of experts in memory" in fitted.degraded[-1]
    rest = whole - found.experts.size_bytes
    assert weigh(spec, estimate, budget(rest)).fit is Fit.TOO_LARGE


def larger(estimate: Estimator, times: int) -> Estimator:
    """The same with so many times the experts."""

    def enlarged(spec: ModelSpec) -> Estimate:
        found = estimate(spec)
        more = (times - 1) * found.experts.size_bytes
        lines = dict(found.lines)
        if spec.placement.streams_experts:
            experts = min(spec.placement.expert_budget or 0, found.experts.size_bytes + more)
            lines["experts"] = experts
        else:
            lines["weights"] += more
        return Estimate(
            lines=lines,
            n_ctx=found.n_ctx,
            has_experts=True,
            experts=HostExperts(
                size_bytes=found.experts.size_bytes + more,
                active_bytes=found.experts.active_bytes,
                is_streamed=spec.placement.streams_experts,
            ),
        )

    return enlarged


def test_a_mixture_may_be_three_times_the_limit(model: Path, estimate: Estimator) -> None:
    """SPEC R14: past that it is too large, though what is not experts would fit."""
    spec, large = spec_of(model), larger(estimate, 40)
    whole = large(spec).total_bytes
    assert weigh(spec, large, budget(whole / 2.9)).fit is Fit.STREAMS
    assert weigh(spec, large, budget(whole / 3.1)).fit is Fit.TOO_LARGE


def test_what_streams_has_to_have_room_now(model: Path, estimate: Estimator) -> None:
    """SPEC R1, R14: a machine that could hold it and is in use refuses with numbers, as of other models."""
    spec, large = spec_of(model), larger(estimate, 40)
    limit = large(spec).total_bytes / 2
    with pytest.raises(InsufficientMemoryError, match=r"needs [\d.]+ MiB at the least") as caught:
        weigh(spec, large, budget(limit, free=8 * MIB))
    assert 0 < caught.value.details["needed"] < limit


def test_a_file_that_is_read_whole_does_not_stream(model: Path, estimate: Estimator) -> None:
    """SPEC R14: only a mapped file has pages that are read when they are needed."""
    spec = spec_of(model, PlacementSpec(device=("none",), mmap=False))
    assert weigh(spec, estimate, budget(estimate(spec).total_bytes * 0.95)).fit is Fit.TOO_LARGE


def test_a_budget_that_was_asked_for_is_taken_at_its_word(model: Path, estimate: Estimator) -> None:
    """SPEC R14: also where all experts would fit."""
    spec = spec_of(model, PlacementSpec(device=("none",), expert_budget=3 * MIB))
    fitted = weigh(spec, estimate, budget(2**30))
    assert (fitted.fit, fitted.estimate.lines["experts"]) == (Fit.STREAMS, 3 * MIB)
    assert weigh(spec_of(model), estimate, budget(2**30)).fit is Fit.FITS


def rows(backend: LlamaBackend, num_tokens: int = 6) -> np.ndarray:
    """Logits after each of some tokens, one a step."""
    plans = (BatchPlan((PlanItem(0, at, [at + 5], 1),)) for at in range(num_tokens))
    return np.stack([np.array(backend.launch(plan).rows()[0]) for plan in plans])


def test_a_model_with_a_third_of_its_experts_computes_the_same(model: Path, tmp_path: Path) -> None:
    """SPEC R14: what is over the budget is dropped after a step, and read again when it is needed."""
    with load(spec_of(model), cache_dir=tmp_path) as whole:
        assert whole.extensions.pages is None
        wanted, lines = rows(whole), whole.memory()
    spec = spec_of(model, PlacementSpec(device=("none",), expert_budget=4 * MIB))
    with load(spec, cache_dir=tmp_path) as backend:
        pages = backend.extensions.pages
        assert pages is not None
        assert np.array_equal(rows(backend), wanted)
        found = pages.stats()
        assert (found.size_bytes, found.budget_bytes) == (12 * MIB, 4 * MIB)
        pages.hold(1.0)  # between steps it looks as seldom as counting is slow
        assert 0 < _now(pages) <= 4 * MIB
        assert backend.memory() == lines | {
            "weights": lines["weights"] - 12 * MIB,
            "experts": 4 * MIB,
        }
        clock = Stopwatch(0.01)
        timer = StepTimer(clock)
        reader = timer.join(backend, StepCost())
        assert clock.reading_s == 12 * MIB / SLOWEST_DISK  # the watchdog waits for a slow disk
        clock.begin(1)
        clock.end(1)
        clock.begin(1)
        assert clock.read()[1] >= clock.reading_s
        timer.leave(reader)
        timer.close()
        assert clock.reading_s == 0
        assert pages.hold(0.25) > 0
        assert _now(pages) <= MIB
        assert np.array_equal(_again(backend), wanted[:1])
        pages.hold(1.0)
        assert pages.stats().budget_bytes == 4 * MIB


def _now(pages: object) -> int:
    assert isinstance(pages, ExpertPages)
    return sum(pages._look())


def _again(backend: LlamaBackend) -> np.ndarray:
    backend.drop(0)
    return rows(backend, 1)


def test_ranges_are_counted_and_dropped_by_the_page(model: Path) -> None:
    """SPEC R14: only what lies within the range, in whole pages; a file that is not mapped has none."""
    places = [place for place in tensor_places(read_header(model)) if "exps" in place.name]
    ranges = [FileRange(place.path, place.start, place.size_bytes) for place in places]
    assert find_mapped(ranges) == ()
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        first, second = find_mapped(ranges[:2])
        for each in ranges[:2]:
            assert mapped[each.start : each.end]
        assert ranges[0].size_bytes - 2 * PAGE <= first.resident_bytes() <= ranges[0].size_bytes
        first.drop()
        assert first.resident_bytes() == 0
        assert second.resident_bytes() >= ranges[1].size_bytes - 2 * PAGE
        assert mapped[ranges[0].start : ranges[0].end] == model.read_bytes()[ranges[0].start : ranges[0].end]


def test_pages_that_may_go_are_no_use_of_a_group() -> None:
    """SPEC M1, R14: those that are inactive were left out already, and are not left out twice."""
    group = ControlGroup(Path("g"), limit_bytes=100, used_bytes=60, cached_bytes=20)
    assert group.without(0).used_bytes == group.without(20).used_bytes == 60
    assert group.without(50).used_bytes == 30
    assert group.without(500).free_bytes == 100
