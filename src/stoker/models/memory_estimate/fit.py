"""Whether a model fits, and what it is given less of so that it does (SPEC R1, R2).

Owns the words for it (estimate, budget, fit) and the order in which a model is cut down. An `Estimator`
says what a model takes, the caller what is free; nothing here measures or loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product

import msgspec

from stoker.errors import InsufficientMemoryError
from stoker.ipc.model import KVLayout, ModelSpec
from stoker.models.memory_estimate.placing import Placing, draft_placement, less_on_devices
from stoker.wording import count_text, size_text

SMALLEST_N_CTX = 2048
DRAFT_BATCH = 64
"""Tokens that a draft model computes at a time."""
MANY_SLOTS = 16
"""From here on a step of all slots costs so much more in a pool that shorter streams are the better form."""
_SHARES = (4, 2, 1)
"""Such streams, by a slot's share of the pool that was asked for."""
_SLOTS = (4, 2, 1)
_TIGHT_FRACTION = 10  # less than a tenth of the limit left over counts as tight
FITS_PERCENT = 75
"""Of the limit: what takes more is tight."""
MOST_PERCENT = 90
"""Of the limit: what one model may take."""
MOST_STREAMED = 3
"""Limits: a mixture of experts may take so many if its experts are read as they are needed. Of a larger one
so few stay in memory that nearly each is read for each token."""


class Fit(StrEnum):
    """How a model fits: as asked, barely, cut down, with experts left on disk, or not at all."""

    FITS = "fits"
    TIGHT = "tight"
    DEGRADED = "degraded"
    STREAMS = "streams"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """Weights of experts that host memory holds, in bytes.

    Attributes:
        size_bytes: of all of them.
        active_bytes: of those that one token is computed with.
        is_streamed: not all stay in memory; the others are read from the file as they are needed.
    """

    size_bytes: int = 0
    active_bytes: int = 0
    is_streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a model takes in memory, loaded as its spec says.

    Attributes:
        lines: bytes by line of the ledger: weights, kv, compute, other; experts where they are streamed.
        n_ctx: cells it gets; of use where the spec leaves that to the model. 0: not known.
        kv_layout: what the cells of the spec are laid out as; "auto" counts as a pool.
        smaller_kv_types: what `kv_type` may be set to so that the same cells take less, largest first.
        on_devices: what of the lines lies on devices, by their ids, where the spec names such.
        num_layers: layers that a device may hold, the output counting as one; 0: not known.
        has_experts: whether layers have experts, which may stay in host memory.
        experts: those that do.
    """

    lines: Mapping[str, int]
    n_ctx: int = 0
    kv_layout: KVLayout = KVLayout.POOL
    smaller_kv_types: tuple[str, ...] = ()
    on_devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    num_layers: int = 0
    has_experts: bool = False
    experts: HostExperts = HostExperts()

    @property
    def total_bytes(self) -> int:
        """All lines together."""
        return sum(self.lines.values())

    def device_bytes(self, device: str) -> int:
        """All lines on the device of that id."""
        return sum(self.on_devices.get(device, {}).values())

    def host_bytes(self, devices: Iterable[DeviceBudget]) -> int:
        """What lies in the machine's memory; `devices` are those that have some of their own."""
        return self.total_bytes - sum(self.device_bytes(each.id) for each in devices)


Estimator = Callable[[ModelSpec], Estimate]
"""What one model would take, for any way to load it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """What there is for a model in an accelerator's own memory, in bytes; as in `MemoryBudget`.

    Attributes:
        id: of the device, such as "CUDA0".
        limit_bytes: what models could ever have of it.
        evictable_bytes: what of `free_bytes` other models have now, who would go.
    """

    id: str
    free_bytes: int
    limit_bytes: int
    margin_bytes: int
    evictable_bytes: int = 0

    @property
    def vacant_bytes(self) -> int:
        """What nobody has now."""
        return self.free_bytes - self.evictable_bytes

    @property
    def room_bytes(self) -> int:
        """What a model may take now."""
        return max(0, min(self.free_bytes, self.limit_bytes) - self.margin_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What there is for a model, in bytes: in the machine's memory, and in that of accelerators.

    Attributes:
        devices: accelerators with memory of their own, in the order of their backend; none: there are none.
        free_bytes: what it could have now, with what the eviction of idle models would give.
        limit_bytes: what models could ever have here.
        margin_bytes: how much has to be left; 0: nothing.
    """

    free_bytes: int
    limit_bytes: int
    margin_bytes: int
    devices: tuple[DeviceBudget, ...] = ()

    @property
    def room_bytes(self) -> int:
        """What a model may take now."""
        return min(max(0, self.free_bytes - self.margin_bytes), self.most_bytes)

    @property
    def most_bytes(self) -> int:
        """What a model may take when there is nothing else."""
        return max(0, min(self.limit_bytes - self.margin_bytes, self.limit_bytes * MOST_PERCENT // 100))

    def is_tight(self, total_bytes: int) -> bool:
        """Whether it takes over 75 % of the limit, or leaves less than the margin once more, or a tenth."""
        reserve = max(self.margin_bytes, self.limit_bytes // _TIGHT_FRACTION)
        is_large = total_bytes > self.limit_bytes * FITS_PERCENT // 100
        return is_large or self.room_bytes - total_bytes < reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSpec:
    """How a model can be had.

    Attributes:
        fit: how it fits.
        spec: as it is to be loaded; of a model that is too large the smallest form of it.
        estimate: what that takes.
        degraded: what it gets less of than was asked for, for people.
    """

    fit: Fit
    spec: ModelSpec
    estimate: Estimate
    degraded: tuple[str, ...] = ()


def weigh(spec: ModelSpec, estimate: Estimator, budget: MemoryBudget, least_n_ctx: int = 0) -> FittedSpec:
    """How `spec` can be had within `budget`, with a context of `least_n_ctx` tokens or more.

    On devices all layers come first, with cells in streams where the layout is "auto" and those fit, with
    many slots also shorter ones, else in a pool; then with quantised cells, then, as far as its placement is
    "auto", with experts in host memory, with fewer layers, and on the CPU. In host memory the context is made
    shorter, then cells are quantised (with as long a context as then fits), then there are fewer slots. At
    last the experts of a mixture are read from its mapped file as they are needed, if all of it takes at most
    `MOST_STREAMED` limits, with a budget of what the rest leaves. Devices are named by their ids.

    Raises:
        InsufficientMemoryError: it would fit the machine, but not now, or a device cannot hold what was asked
            of it. Details carry `needed` (of its smallest form), `free` and `margin`, in bytes; of a device
            also `device`, and `layers` that would fit.
    """
    asked, placing = estimate(spec), Placing(estimate, budget)
    best: FittedSpec | None = None
    for form in _forms(spec, asked, placing, least_n_ctx):
        found = estimate(form)
        if not placing.short(found) and found.host_bytes(budget.devices) <= budget.room_bytes:
            best = _fitted(Fit.DEGRADED, spec, asked, form, found)
            break
    if best is None:
        forms = tuple(_forms(spec, asked, placing, least_n_ctx))
        streaming = _streaming(forms, placing, budget.room_bytes)
        if streaming is None:
            return _too_large(spec, placing, least_n_ctx, _streaming(forms, placing, budget.most_bytes))
        best = _fitted(Fit.STREAMS, spec, asked, streaming, estimate(streaming))
    if best.estimate.experts.is_streamed:
        return replace(best, fit=Fit.STREAMS)
    if best.degraded:
        return best
    is_tight = budget.is_tight(best.estimate.host_bytes(budget.devices))
    return replace(best, fit=Fit.TIGHT if is_tight else Fit.FITS)


def _forms(spec: ModelSpec, asked: Estimate, placing: Placing, least_n_ctx: int) -> Iterator[ModelSpec]:
    """In the order of `weigh`."""
    streams = tuple(_streams(spec, asked, least_n_ctx)) if _tries_streams(spec, asked, placing) else ()
    for form in placing.whole(spec):
        for changes in streams:
            yield msgspec.structs.replace(form, kv_layout=KVLayout.STREAMS, **changes)
        yield form
    if placing.has_devices(spec):
        for kv_type in () if spec.kv_type else asked.smaller_kv_types:
            yield from placing.whole(msgspec.structs.replace(spec, kv_type=kv_type))
        yield from placing.parted(spec)
    for smaller in smaller_forms(spec, asked, least_n_ctx):
        yield from placing.forms(smaller)


def _streams(spec: ModelSpec, asked: Estimate, least_n_ctx: int) -> Iterator[dict[str, int]]:
    """How streams differ from what was asked for: as long, then by a slot's share of the pool; never less."""
    yield {}
    cells = spec.pool_cells or asked.n_ctx
    if spec.num_slots < MANY_SLOTS:
        return
    for share in _SHARES:
        n_ctx = cells // spec.num_slots * share
        if max(SMALLEST_N_CTX, least_n_ctx) <= n_ctx < cells:
            yield {"n_ctx": n_ctx}


def _tries_streams(spec: ModelSpec, asked: Estimate, placing: Placing) -> bool:
    """Whether streams would serve it: all cells lie on devices, and every request would have its context.

    It would not where `num_cells` says that the slots are to share fewer.
    """
    place = spec.placement
    is_open = spec.kv_layout is KVLayout.AUTO and placing.has_devices(spec)
    is_parted = isinstance(place.gpu_layers, int) and place.gpu_layers < asked.num_layers
    if not is_open or not place.kv_offload or is_parted:
        return False
    in_streams = msgspec.structs.replace(spec, kv_layout=KVLayout.STREAMS)
    found = placing.estimate(in_streams)
    whole = placing.estimate(msgspec.structs.replace(in_streams, num_cells=0))
    return found.kv_layout is KVLayout.STREAMS and found.n_ctx == whole.n_ctx


def _streaming(forms: Iterable[ModelSpec], placing: Placing, room_bytes: int) -> ModelSpec | None:
    """The first form that fits `room_bytes` of host memory without its experts; these get what it leaves.

    That has to be enough for those of one token, else each would be read anew for each.
    """
    budget = placing.budget
    for form in forms:
        if not form.placement.mmap or form.placement.expert_budget is not None:
            return None
        bare = msgspec.structs.replace(
            form, placement=msgspec.structs.replace(form.placement, expert_budget=0)
        )
        found = placing.estimate(bare)
        host_bytes, experts = found.host_bytes(budget.devices), found.experts
        if not experts.size_bytes or host_bytes + experts.size_bytes > MOST_STREAMED * budget.limit_bytes:
            continue
        left_bytes = room_bytes - host_bytes
        if left_bytes >= max(1, experts.active_bytes) and not placing.short(found):
            placement = msgspec.structs.replace(form.placement, expert_budget=left_bytes)
            return msgspec.structs.replace(form, placement=placement)
    return None


def _too_large(
    spec: ModelSpec, placing: Placing, least_n_ctx: int, streaming: ModelSpec | None
) -> FittedSpec:
    """The smallest form, which no machine like this can hold; raises InsufficientMemoryError of others.

    `streaming` is how its experts could be read as they are needed if nothing else were in memory.
    """
    estimate, budget = placing.estimate, placing.budget
    if streaming is not None:
        least = _fitted(Fit.STREAMS, spec, estimate(spec), streaming, estimate(streaming))
        needed = least.estimate.host_bytes(budget.devices) - least.estimate.lines["experts"]
        raise _no_room_now(spec, needed + least.estimate.experts.active_bytes, budget)
    least = smallest(spec, estimate, least_n_ctx, placing)
    if short := placing.short(least.estimate):
        raise _no_room_on(short[0], spec, least, placing)
    needed = least.estimate.host_bytes(budget.devices)
    if needed > budget.most_bytes:
        return least
    raise _no_room_now(spec, needed, budget)


def _no_room_now(spec: ModelSpec, needed: int, budget: MemoryBudget) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"{spec.id} needs {size_text(needed)} at the least, and {size_text(budget.margin_bytes)} have to stay"
        f" free (memory_margin); {size_text(max(0, budget.free_bytes))} can be had now",
        needed=needed,
        free=budget.free_bytes,
        margin=budget.margin_bytes,
    )


def _no_room_on(
    device: DeviceBudget, spec: ModelSpec, least: FittedSpec, placing: Placing
) -> InsufficientMemoryError:
    """A device cannot hold what it was asked to hold: what it could, and the flag for that."""
    needed, free = least.estimate.device_bytes(device.id), max(0, min(device.free_bytes, device.limit_bytes))
    layers, num_layers = placing.most_layers(least.spec), least.estimate.num_layers
    would_fit = f"{layers} of {num_layers} layers would fit: --gpu-layers {layers}, or auto"
    return InsufficientMemoryError(
        f"{spec.id} needs {size_text(needed)} of {device.id} at the least, and"
        f" {size_text(device.margin_bytes)} have to stay free there; {size_text(free)} can be had now;"
        f" {would_fit if layers else 'no layer would fit: --device none'}",
        needed=needed,
        free=free,
        margin=device.margin_bytes,
        device=device.id,
        layers=layers,
    )


def smallest(
    spec: ModelSpec, estimate: Estimator, least_n_ctx: int = 0, placing: Placing | None = None
) -> FittedSpec:
    """The form of `spec` that takes least, for where not even that fits; with `placing` least of devices."""
    asked = estimate(spec)
    bases = (spec, *smaller_forms(spec, asked, least_n_ctx))
    forms = bases if placing is None else tuple(form for base in bases for form in placing.forms(base))
    devices = placing.budget.devices if placing else ()

    def size(pair: tuple[ModelSpec, Estimate]) -> tuple[int, int]:
        host_bytes = pair[1].host_bytes(devices)
        return pair[1].total_bytes - host_bytes, host_bytes

    smaller, least = min(((form, estimate(form)) for form in forms), key=size)
    return _fitted(Fit.TOO_LARGE, spec, asked, smaller, least)


def smaller_forms(spec: ModelSpec, asked: Estimate, least_n_ctx: int = 0) -> Iterator[ModelSpec]:
    """`spec` cut down in every way there is, what users miss least first; `asked` is its own estimate.

    No form has a shorter context than `least_n_ctx`, unless `spec` has.
    """
    slots = (spec.num_slots, *(number for number in _SLOTS if number < spec.num_slots))
    kv_types = (spec.kv_type, *asked.smaller_kv_types)
    pools = tuple(cells for cells in _pools(spec, asked) if cells == spec.pool_cells or cells >= least_n_ctx)
    for num_slots, kv_type, cells in product(slots, kv_types, pools):
        sized = spec if cells == spec.pool_cells else spec.with_cells(cells)
        smaller = msgspec.structs.replace(sized, num_slots=num_slots, kv_type=kv_type)
        if smaller != spec:
            yield smaller


def _pools(spec: ModelSpec, asked: Estimate) -> Iterator[int]:
    """Cells: what was asked for, then halves of it."""
    yield spec.pool_cells
    n_ctx = asked.n_ctx or spec.pool_cells
    while n_ctx // 2 >= SMALLEST_N_CTX:
        n_ctx //= 2
        yield n_ctx


def _fitted(fit: Fit, spec: ModelSpec, asked: Estimate, smaller: ModelSpec, found: Estimate) -> FittedSpec:
    phrases = []
    if smaller.pool_cells != spec.pool_cells:
        wanted = min(filter(None, (asked.n_ctx, spec.pool_cells)))  # the estimate's is rounded up
        phrases.append(f"context {found.n_ctx or smaller.pool_cells} instead of {wanted}")
    if smaller.kv_type != spec.kv_type:
        phrases.append(f"{smaller.kv_type} cells instead of {spec.kv_type or '16-bit'} ones")
    if smaller.num_slots != spec.num_slots:
        phrases.append(f"{count_text(smaller.num_slots, 'slot')} instead of {spec.num_slots}")
    phrases += less_on_devices(spec, smaller, found.num_layers)
    if found.experts.is_streamed:
        kept, whole = size_text(found.lines.get("experts", 0)), size_text(found.experts.size_bytes)
        phrases.append(f"{kept} of {whole} of experts in memory, the others read from disk as needed")
    return FittedSpec(fit=fit, spec=smaller, estimate=found, degraded=tuple(phrases))


def with_draft(estimate: Estimator, draft: Estimator) -> Estimator:
    """The same model, with a draft model that guesses for it (SPEC R1, D9) and reads as long a text."""

    def both(spec: ModelSpec) -> Estimate:
        found = estimate(spec)
        alone = msgspec.structs.replace(
            spec, kv_type="", adapters=(), projector=None, placement=draft_placement(spec.placement)
        )
        own = draft(
            msgspec.structs.replace(alone, num_slots=1, n_batch=DRAFT_BATCH, n_ctx=found.n_ctx, num_cells=0)
        )
        lines = {**found.lines, "draft": own.total_bytes}
        on_devices = dict(found.on_devices)
        for device, part in own.on_devices.items():
            on_devices[device] = {**on_devices.get(device, {}), "draft": sum(part.values())}
        return replace(found, lines=lines, on_devices=on_devices)

    return both
