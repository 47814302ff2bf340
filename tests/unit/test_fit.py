"""Whether a model fits, and what it gets less of so that it does: pure, with estimates made up."""

from __future__ import annotations

import msgspec
import pytest

from stoker.errors import InsufficientMemoryError
from stoker.ipc.model import ModelSpec
from stoker.models.memory_estimate.fit import Estimate, Fit, MemoryBudget, smaller_forms, smallest, weigh

MIB = 2**20
WEIGHTS = 100 * MIB
CELL = 16 * 1024
SLOT = 2 * MIB
SPEC = ModelSpec(id="m", path="m.gguf", n_ctx=16384, num_slots=8)


def estimate(spec: ModelSpec) -> Estimate:
    """100 MiB of weights, 16 KiB a cell (half of it quantised), 2 MiB a slot."""
    cell = CELL // 2 if spec.kv_type == "q8_0" else CELL
    n_ctx = spec.n_ctx or 32768
    return Estimate(
        lines={"weights": WEIGHTS, "kv": n_ctx * cell, "compute": spec.num_slots * SLOT},
        n_ctx=n_ctx,
        smaller_kv_types=() if spec.kv_type else ("q8_0",),
    )


def rigid(spec: ModelSpec) -> Estimate:
    """A model whose cells cannot be quantised."""
    found = estimate(spec)
    return Estimate(lines=found.lines, n_ctx=found.n_ctx)


FULL = estimate(SPEC).total_bytes


def budget(free_mib: float, *, limit_mib: float = 10_000, margin_mib: float = 0) -> MemoryBudget:
    """A budget in MiB."""
    return MemoryBudget(
        free_bytes=int(free_mib * MIB), limit_bytes=int(limit_mib * MIB), margin_bytes=int(margin_mib * MIB)
    )


def test_a_model_with_room_to_spare_fits_as_asked() -> None:
    """SPEC R2: `fits` changes nothing."""
    fitted = weigh(SPEC, estimate, budget(5000, limit_mib=5000, margin_mib=100))
    assert (fitted.fit, fitted.spec, fitted.degraded) == (Fit.FITS, SPEC, ())
    assert fitted.estimate.total_bytes == FULL == WEIGHTS + 16384 * CELL + 8 * SLOT


@pytest.mark.parametrize(
    ("left_mib", "fit"),
    [(99, Fit.TIGHT), (100, Fit.FITS)],
)
def test_less_than_another_margin_left_over_is_tight(left_mib: int, fit: Fit) -> None:
    """SPEC R2: `tight` loads as asked, and says that little is left."""
    free_mib = FULL / MIB + 100 + left_mib
    fitted = weigh(SPEC, estimate, budget(free_mib, limit_mib=free_mib, margin_mib=100))
    assert (fitted.fit, fitted.spec) == (fit, SPEC)


def test_without_a_margin_a_tenth_of_the_limit_tells_what_is_tight() -> None:
    """SPEC R1, R2: a margin of 0 asks for nothing to be left, and a full machine is tight all the same."""
    exact = FULL / MIB
    assert weigh(SPEC, estimate, budget(exact, limit_mib=exact * 1.4)).fit is Fit.TIGHT
    assert weigh(SPEC, estimate, budget(exact * 1.4, limit_mib=exact * 1.4)).fit is Fit.FITS


@pytest.mark.parametrize(
    ("percent", "fit"), [(74, Fit.FITS), (76, Fit.TIGHT), (89, Fit.TIGHT), (91, Fit.DEGRADED)]
)
def test_a_model_takes_a_part_of_the_limit_at_most(percent: int, fit: Fit) -> None:
    """SPEC R2: it fits up to 75 % of the limit, tightly up to 90 %, whatever margin is asked for."""
    limit_mib = FULL / MIB * 100 / percent
    assert weigh(SPEC, estimate, budget(limit_mib, limit_mib=limit_mib)).fit is fit


def test_the_margin_is_kept_free_to_the_byte() -> None:
    """SPEC R1: admitted against free memory minus the margin."""
    enough = MemoryBudget(free_bytes=FULL + 512 * MIB, limit_bytes=2**40, margin_bytes=512 * MIB)
    short = msgspec.structs.replace(SPEC)
    assert weigh(short, estimate, enough).spec == SPEC
    less = MemoryBudget(free_bytes=FULL + 512 * MIB - 1, limit_bytes=2**40, margin_bytes=512 * MIB)
    assert weigh(short, estimate, less).fit is Fit.DEGRADED


def test_context_is_the_first_thing_to_become_shorter() -> None:
    """SPEC R2: halves of it, the largest that fits; neither cells nor slots change."""
    fitted = weigh(SPEC, estimate, budget(100 + 16 + 64))
    assert fitted.fit is Fit.DEGRADED
    assert (fitted.spec.n_ctx, fitted.spec.kv_type, fitted.spec.num_slots) == (4096, "", 8)
    assert fitted.degraded == ("context 4096 instead of 16384",)
    assert fitted.estimate == estimate(fitted.spec)


def test_cells_are_quantised_where_no_context_is_short_enough() -> None:
    """SPEC R2: then with as long a context as fits."""
    fitted = weigh(SPEC, estimate, budget(100 + 16 + 31))
    assert (fitted.spec.n_ctx, fitted.spec.kv_type, fitted.spec.num_slots) == (2048, "q8_0", 8)
    assert fitted.degraded == ("context 2048 instead of 16384", "q8_0 cells instead of 16-bit ones")


def test_slots_go_last() -> None:
    """SPEC R2: 4, 2, then 1."""
    fitted = weigh(SPEC, estimate, budget(100 + 4 + 16))
    assert (fitted.spec.n_ctx, fitted.spec.kv_type, fitted.spec.num_slots) == (2048, "q8_0", 2)
    assert fitted.degraded[-1] == "2 slots instead of 8"
    assert weigh(SPEC, estimate, budget(100 + 2 + 16)).degraded[-1] == "1 slot instead of 8"


def test_a_model_that_cannot_be_quantised_keeps_its_cells() -> None:
    """SPEC R2: quantised cells are offered only where the estimate says so."""
    fitted = weigh(SPEC, rigid, budget(100 + 8 + 32))
    assert (fitted.spec.n_ctx, fitted.spec.kv_type, fitted.spec.num_slots) == (2048, "", 4)


@pytest.mark.parametrize("asked", [1024, 2048, 3000])
def test_context_is_never_cut_below_2048_nor_below_what_was_asked(asked: int) -> None:
    """SPEC R2: what was asked for stays the least where it is less."""
    spec = msgspec.structs.replace(SPEC, n_ctx=asked)
    assert {form.n_ctx for form in smaller_forms(spec, rigid(spec))} == {asked}


def test_a_context_left_to_the_model_is_halved_from_the_models_own() -> None:
    """SPEC R2: n_ctx 0 means the trained length, which the estimate knows."""
    spec = msgspec.structs.replace(SPEC, n_ctx=0)
    fitted = weigh(spec, estimate, budget(100 + 16 + 256))
    assert (fitted.spec.n_ctx, fitted.degraded) == (16384, ("context 16384 instead of 32768",))


def test_a_model_that_fits_the_machine_but_not_now_is_refused_with_numbers() -> None:
    """SPEC R1: needed, free and margin are in the refusal."""
    with pytest.raises(InsufficientMemoryError) as caught:
        weigh(SPEC, estimate, budget(110, limit_mib=4000, margin_mib=10))
    least = WEIGHTS + 2048 * CELL // 2 + SLOT
    assert caught.value.details == {"needed": least, "free": 110 * MIB, "margin": 10 * MIB}
    assert "118 MiB" in caught.value.message


def test_a_model_over_the_limit_in_every_form_is_too_large() -> None:
    """SPEC R2: `too_large` names the smallest form; more free memory than the limit does not help."""
    fitted = weigh(SPEC, estimate, budget(50_000, limit_mib=127, margin_mib=10))
    assert fitted.fit is Fit.TOO_LARGE
    assert fitted.estimate.total_bytes == WEIGHTS + 2048 * CELL // 2 + SLOT
    assert len(fitted.degraded) == 3


def test_the_margin_counts_against_the_limit_too() -> None:
    """SPEC R1, M5: what would fit the bare limit is too large where the margin has to stay free."""
    assert weigh(SPEC, estimate, budget(50_000, limit_mib=145)).fit is Fit.DEGRADED
    assert weigh(SPEC, estimate, budget(50_000, limit_mib=145, margin_mib=28)).fit is Fit.TOO_LARGE


def test_the_smallest_form_is_found_also_where_cutting_does_not_help() -> None:
    """SPEC R2: a model of fixed size is too large as it is; nothing is said to have been cut."""
    found = smallest(SPEC, lambda _: Estimate(lines={"weights": WEIGHTS}))
    assert (found.spec, found.degraded) == (SPEC, ())
