"""Which models are served, the life and the load of each, how much memory there is for one, which goes first.

The table of states and the order that decisions follow are pure (SPEC L1, R3, R8). `Placement` says how much
memory there is for a model, by what was measured and what was promised (SPEC R1, R2, C14), and owns the
ledger's lines of loaded models: memory that a model was given and has not touched yet is not free, though it
measures so. How much a model takes is the memory estimate's, measuring, loading and freeing is residency's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stoker.backends.protocol.encoding import Encoder
from stoker.errors import InsufficientMemoryError, ModelNotFoundError, ModelTooLargeError, StokerError
from stoker.ipc.events import ModelState
from stoker.ipc.model import MODEL_MOVES, STORY_LENGTH, ModelInfo, ModelLife, is_move
from stoker.models.memory_estimate.fit import DeviceBudget, Fit, MemoryBudget, weigh
from stoker.wording import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stoker.cache.prefix_cache import PrefixCache
    from stoker.engine.residency.load import Load
    from stoker.engine.residency.pending import PendingRequests
    from stoker.engine.runners.runner import ModelRunner
    from stoker.errors import ErrorInfo
    from stoker.ipc.model import ModelSpec
    from stoker.machine.ledger import Ledger
    from stoker.machine.monitor import DeviceSample, Sample
    from stoker.models.memory_estimate.fit import FittedSpec

ASKED_TO = "asked to"  # a model is unloaded though no other needs its memory
OnDevicesLines = Mapping[str, Mapping[str, int]]
"""Bytes by id of a device and line."""
SWAP_AFTER_S = 1.0
"""How long requests wait for a model before a busy one has to go for it."""
STAY_S = 2.0
"""How long a model stays at least once it is in memory; ten times what its load took, if that is more."""
FINISH_S = 30.0
"""How long those that run on a model which has to go may take to finish."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One served model.

    Attributes:
        spec: how it is to be loaded, as asked for.
        is_pinned: it is never unloaded for another.
        is_asked: the client asked for it by name, so it is loaded though no request needs it.
        ask_id: of the last load or unload that the client asked for.
        is_suspect: its last load ended an engine: the next is tried in a child process first.
        may_evict: idle models may go for what was asked for.
        keep_alive_s: how long it stays after its last request; negative: for good.
        used_s: when it last had a request, or was loaded.
        loaded_s: when it was loaded; how long that took.
        has_served: a request ran on it since it was loaded.
        size: what it takes by line; of one that is not loaded what it would, empty: not known.
        on_devices: what of that lies on devices, by their ids.
        degraded: what it was given less of than was asked for.
        stage, fraction: how far a load has come.
        reason: why it is not ready, or what was to serve it does not; error: with which it failed last.
        settled: how it was loaded last, or is to be by the settings: it is `spec` again where a load fails.
        has_gone: it went for the load of itself that is under way, and comes back where that fails.
        refused: why such a load failed, told when it is back; None: none did.
    """

    spec: ModelSpec
    life: ModelLife = ModelLife.ABSENT
    is_pinned: bool = False
    is_asked: bool = False
    ask_id: int = 0
    is_suspect: bool = False
    may_evict: bool = True
    keep_alive_s: float = 600.0
    used_s: float = 0.0
    loaded_s: float = 0.0
    load_took_s: float = 0.0
    has_served: bool = False
    size: Mapping[str, int] = field(default_factory=dict)
    on_devices: OnDevicesLines = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    stage: str = ""
    fraction: float = 0.0
    reason: str = ""
    error: ErrorInfo | None = None
    settled: ModelSpec = field(init=False)
    has_gone: bool = False
    refused: StokerError | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    def __post_init__(self) -> None:
        self.settled = self.spec

    def __repr__(self) -> str:
        return f"<ServedModel {self.spec.id} {self.life}>"

    def keep_for(self, keep_alive_s: float) -> None:
        """It stays for so long after a request from now on, however it is loaded."""
        self.spec = msgspec.structs.replace(self.spec, keep_alive_s=keep_alive_s)
        self.settled = msgspec.structs.replace(self.settled, keep_alive_s=keep_alive_s)

    def settle(self, spec: ModelSpec) -> None:
        """It is served so from now on; nothing is left of a load that was to change that."""
        self.spec = self.settled = spec
        self.has_gone, self.refused = False, None

    @property
    def is_leaving(self) -> bool:
        """Whether it goes because the client asked for that."""
        return self.life is ModelLife.UNLOADING and self.reason == ASKED_TO

    @property
    def is_to_change(self) -> bool:
        """Whether it is to be loaded otherwise than it was, or than the settings say."""
        return self.spec.as_loaded != self.settled.as_loaded

    @property
    def size_bytes(self) -> int:
        """All lines together."""
        return sum(self.size.values())

    def device_bytes(self, device: str) -> int:
        """What it holds of the device of that id."""
        return sum(self.on_devices.get(device, {}).values())

    @property
    def host_bytes(self) -> int:
        """What it holds of the machine's memory."""
        return self.size_bytes - sum(map(self.device_bytes, self.on_devices))

    @property
    def is_in_memory(self) -> bool:
        """Whether it takes memory and can compute."""
        return self.life is ModelLife.READY or self.life is ModelLife.UNLOADING

    def move(self, life: ModelLife, why: str = "") -> None:
        """Go to another state.

        Raises:
            AssertionError: the table has no such move: a bug of ours, with the story so far.
        """
        if life is self.life or not is_move(self.life, life, MODEL_MOVES):
            story = "; ".join(self.story)
            raise AssertionError(f"{self!r} cannot become {life} ({why}); story: {story}")
        self.life, self.reason = life, why
        self.stage, self.fraction = "", 0.0
        self.story.append(f"{life}: {why}" if why else life)

    def due_s(self) -> float | None:
        """When it has been idle for as long as it may (SPEC R8); None: it stays, or is busy elsewhere."""
        if self.life is not ModelLife.READY or self.is_pinned or self.keep_alive_s < 0:
            return None
        if self.keep_alive_s == 0 and not self.has_served:
            return None  # it was loaded for a request that is about to come
        return self.used_s + self.keep_alive_s


class Catalogue:
    """Every served model, in the order they were made known."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}

    def __repr__(self) -> str:
        return f"<Catalogue {list(self._models.values())}>"

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def know(self, spec: ModelSpec) -> ServedModel:
        """Serve it; one that is known already stays as it is."""
        if spec.id not in self._models:
            self._models[spec.id] = ServedModel(
                spec, is_pinned=spec.is_pinned, keep_alive_s=spec.keep_alive_s
            )
        return self._models[spec.id]

    def find(self, model: str) -> ServedModel | None:
        """The model of that id, if it is served."""
        return self._models.get(model)

    def get(self, model: str) -> ServedModel:
        """The model of that id; raises ModelNotFoundError."""
        served = self._models.get(model)
        if served is None:
            text = f"no model {model!r} is served; served: {', '.join(self._models) or 'none'}"
            raise ModelNotFoundError(text, param="model")
        return served

    def in_memory(self) -> list[ServedModel]:
        """Those that take memory, the one unused for longest first (SPEC R3)."""
        return sorted((s for s in self if s.is_in_memory), key=lambda s: s.used_s)

    def overdue(self, now: float) -> list[ServedModel]:
        """Those that have been idle for as long as they may, unless requests use them."""
        return [s for s in self if (due_s := s.due_s()) is not None and due_s <= now]


class Swaps:
    """Busy models that have to go for another: which one, when, how long it may take (SPEC R3, L5).

    A busy model is not unloaded under its requests: it takes no newcomers, and goes when what runs on it has
    ended. Work that takes longer than `FINISH_S` is parked then, and goes on when its model is back.
    """

    def __init__(self) -> None:
        self._going: dict[str, tuple[str, float]] = {}  # model: for which one, and since when

    def __repr__(self) -> str:
        return f"<Swaps {self._going}>"

    def choose(
        self, busy: Iterable[ServedModel], newcomer: str, begun_s: float, now: float
    ) -> ServedModel | None:
        """The one in memory for longest, if it is time and none goes already; it counts as going then."""
        if now - begun_s < SWAP_AFTER_S or any(other == newcomer for other, _ in self._going.values()):
            return None
        settled = [s for s in busy if now - s.loaded_s >= max(STAY_S, 10 * s.load_took_s)]
        chosen = min(settled, key=lambda s: s.loaded_s, default=None)
        if chosen is not None:
            self._going[chosen.spec.id] = newcomer, now
        return chosen

    def overdue(self, now: float) -> list[tuple[str, str]]:
        """Those whose work has had its time, and for which model they go."""
        going = self._going.items()
        return [(model, other) for model, (other, since_s) in going if now - since_s >= FINISH_S]

    def gone(self, model: str) -> None:
        """It is out."""
        self._going.pop(model, None)

    def called_off(self, newcomer: str) -> list[str]:
        """That model is not needed any more: those that went for it may stay; returns them."""
        staying = [model for model, (other, _) in self._going.items() if other == newcomer]
        for model in staying:
            del self._going[model]
        return staying


RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What other models could give: idle ones at once, busy ones when their requests have ended."""

    models: tuple[ServedModel, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Of the machine's memory."""
        return sum(served.host_bytes for served in self.models)

    def device_bytes(self, device: str) -> int:
        """Of a device."""
        return sum(served.device_bytes(device) for served in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a load waits for: bytes of the machine's memory (0 or less: none), and of devices by their ids."""

    host_bytes: int
    devices: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_nothing(self) -> bool:
        """Whether it may begin."""
        return self.host_bytes <= 0 and not self.devices

    def is_eased_by(self, served: ServedModel) -> bool:
        """Whether a model holds some of it."""
        is_host = self.host_bytes > 0 and served.host_bytes > 0
        return is_host or any(served.device_bytes(device) for device in self.devices)


class Placement:
    """Weighs loads against memory.

    Args:
        measure: takes a sample now.
        ledger: bytes by line.
        cache: the prefix cache, which gives way first.
        margin_bytes: free memory that a load has to leave.
    """

    def __init__(
        self, measure: Callable[[], Sample], ledger: Ledger, cache: PrefixCache, margin_bytes: int
    ) -> None:
        self._measure = measure
        self._ledger = ledger
        self._cache = cache
        self._margin_bytes = margin_bytes
        self._own_bytes: int | None = None  # what engine and client hold without any model

    def __repr__(self) -> str:
        return f"<Placement {self._ledger!r} margin {self._margin_bytes}>"

    def weigh(self, load: Load, share: MemoryShare) -> tuple[FittedSpec, Missing]:
        """How it can be had, and what is missing for that now.

        It is cut down only if it would not fit as asked once everything else has gone that may.

        Raises:
            ModelTooLargeError: it does not fit the limit however it is cut down.
            InsufficientMemoryError: it does not fit beside what has to stay.
        """
        assert load.estimator is not None, f"{load!r} was not looked at"
        sample = self._measure()
        if self._own_bytes is None:
            self._own_bytes = sample.footprint_bytes
        free_bytes = self._free_bytes(sample)
        evictable_bytes = self._cache.ram_bytes + share.host_bytes
        budget = MemoryBudget(
            free_bytes=free_bytes + evictable_bytes,
            limit_bytes=max(0, sample.limit_bytes - self._own_bytes),
            margin_bytes=self._margin_bytes,
            devices=tuple(_device_budget(device, load, share) for device in sample.devices),
        )
        try:
            fitted = weigh(
                _with_context(load.wanted, load.least_n_ctx), load.estimator, budget, load.least_n_ctx
            )
        except InsufficientMemoryError as error:
            raise self._insufficient(error, free_bytes, evictable_bytes) from None
        if fitted.fit is Fit.TOO_LARGE:
            raise self._too_large(load, fitted, sample, budget, free_bytes)
        if fitted.fit in {Fit.DEGRADED, Fit.STREAMS} and not load.served.may_evict:
            raise InsufficientMemoryError(  # it is loaded whole as soon as a request needs it
                f"{load.spec.id} does not fit whole beside what is loaded",
                needed=load.estimator(load.wanted).total_bytes,
                free=free_bytes,
                margin=self._margin_bytes,
                evictable=evictable_bytes,
            )
        return fitted, _missing(fitted, budget, free_bytes)

    def stands_in_its_own_way(self, load: Load, share: MemoryShare) -> bool:
        """Whether a model in memory would get more of what is asked now if what it holds were free."""
        beside = self._less(load, share)
        alone = MemoryShare(models=(*share.models, load.served))
        return beside != () and self._less(load, alone) not in {beside, None}

    def _less(self, load: Load, share: MemoryShare) -> tuple[str, ...] | None:
        """What it would get less of; None: it cannot be had, for want of memory or at all."""
        try:
            return self.weigh(load, share)[0].degraded
        except StokerError:
            return None

    def _too_large(
        self, load: Load, fitted: FittedSpec, sample: Sample, budget: MemoryBudget, free_bytes: int
    ) -> ModelTooLargeError:
        needed_bytes = fitted.estimate.host_bytes(budget.devices)
        return ModelTooLargeError(
            f"{load.spec.id} needs {size_text(needed_bytes)} at the least; of the"
            f" {size_text(sample.limit_bytes)} that may be used here Stoker itself takes"
            f" {size_text(self._own_bytes or 0)}, and {size_text(self._margin_bytes)} have to stay free"
            " (memory_margin)",
            needed=needed_bytes,
            limit=budget.limit_bytes,
            margin=self._margin_bytes,
            free=free_bytes,
            evictable=budget.free_bytes - free_bytes,
        )

    def _insufficient(
        self, error: InsufficientMemoryError, free_bytes: int, evictable_bytes: int
    ) -> InsufficientMemoryError:
        if "device" in error.details:
            return InsufficientMemoryError(error.message, retry_after_s=RETRY_AFTER_S, **error.details)
        return InsufficientMemoryError(
            f"{error.message}; {size_text(evictable_bytes)} of that by eviction",
            retry_after_s=RETRY_AFTER_S,
            **(error.details | {"free": free_bytes, "evictable": evictable_bytes}),
        )

    def _free_bytes(self, sample: Sample) -> int:
        """Available, less what was promised to models and is not touched yet."""
        held = (self._own_bytes or 0) + sum(self._ledger.host_lines().values())
        return sample.available_bytes - max(0, held - sample.footprint_bytes)

    def shed(self, missing_bytes: int, now: float) -> int:
        """Drop stored prefixes, saved ones first; returns the bytes that freed."""
        return self._cache.shed(missing_bytes, now)

    def settle(self, fitted: FittedSpec, runner: ModelRunner) -> tuple[Mapping[str, int], OnDevicesLines]:
        """It is in memory: what it takes by line, and what of that on devices, entered in the ledger."""
        lines = dict(fitted.estimate.lines) | runner.backend.memory()
        devices = runner.backend.extensions.devices
        on_devices = {} if devices is None else devices.memory_by_device()
        self._enter(lines, on_devices, 1)
        self._cache.model_back(runner.prep.fingerprint)
        return lines, on_devices

    def release(self, lines: Mapping[str, int], on_devices: OnDevicesLines, fingerprint: str) -> None:
        """It is gone; what is stored of it goes to disk, where there is one (SPEC C7)."""
        self._cache.model_gone(fingerprint)
        self._enter(lines, on_devices, -1)

    def _enter(self, lines: Mapping[str, int], on_devices: OnDevicesLines, sign: int) -> None:
        for line, size_bytes in lines.items():
            elsewhere = sum(held.get(line, 0) for held in on_devices.values())
            self._ledger.add(line, sign * max(0, size_bytes - elsewhere))
        for device, held in on_devices.items():
            for line, size_bytes in held.items():
                self._ledger.add(line, sign * size_bytes, device)


class Departed:
    """Models that have gone and hold memory yet: a worker still reads their vocabulary for a request.

    Args:
        pending: knows which vocabularies are read.
        placement: is given their memory back.
    """

    def __init__(self, pending: PendingRequests, placement: Placement) -> None:
        self._pending = pending
        self._placement = placement
        self._gone: list[tuple[ModelRunner, Mapping[str, int], OnDevicesLines]] = []

    def __repr__(self) -> str:
        return f"<Departed {[runner.spec.id for runner, _, _ in self._gone]}>"

    def __len__(self) -> int:
        return len(self._gone)

    def __iter__(self) -> Iterator[Mapping[str, int]]:
        """What each takes, by line."""
        return iter([size for _, size, _ in self._gone])

    def add(self, runner: ModelRunner, size: Mapping[str, int], on_devices: OnDevicesLines) -> None:
        """A model has gone; its memory is freed at once where nobody reads it.

        Args:
            runner: what ran on it.
            size: bytes that it takes, by line.
            on_devices: what of that lies on devices, by their ids.
        """
        self._gone.append((runner, size, on_devices))
        self.free()

    def free(self) -> None:
        """Give back the memory of those whose vocabulary no worker reads any more."""
        gone, self._gone = self._gone, []
        for runner, size, on_devices in gone:
            if self._pending.uses(runner.prep):
                self._gone.append((runner, size, on_devices))
                continue
            runner.close()
            self._placement.release(size, on_devices, runner.prep.fingerprint)


def _device_budget(device: DeviceSample, load: Load, share: MemoryShare) -> DeviceBudget:
    """What there is of a device; less where the load has failed for want of memory there."""
    evictable_bytes = share.device_bytes(device.id)
    most_bytes = load.most_bytes.get(device.id, device.total_bytes) + device.margin_bytes
    return DeviceBudget(
        id=device.id,
        free_bytes=device.free_bytes + evictable_bytes,
        limit_bytes=min(device.total_bytes, most_bytes),
        margin_bytes=device.margin_bytes,
        evictable_bytes=evictable_bytes,
    )


def _missing(fitted: FittedSpec, budget: MemoryBudget, free_bytes: int) -> Missing:
    needed = fitted.estimate
    short = {
        each.id: missing_bytes
        for each in budget.devices
        if (held := needed.device_bytes(each.id))
        and (missing_bytes := held + each.margin_bytes - each.vacant_bytes) > 0
    }
    host_bytes = needed.host_bytes(budget.devices) + budget.margin_bytes - free_bytes
    return Missing(host_bytes=host_bytes, devices=short)


def _with_context(spec: ModelSpec, least_n_ctx: int) -> ModelSpec:
    """The spec with at least so much context; 0 is the file's own, which is never less."""
    n_ctx = max(spec.n_ctx, least_n_ctx) if spec.n_ctx else 0
    num_cells = max(spec.num_cells, least_n_ctx) if spec.num_cells else 0
    return msgspec.structs.replace(spec, n_ctx=n_ctx, num_cells=num_cells)


def model_info(runner: ModelRunner) -> ModelInfo:
    """What was loaded and the limits that resulted (SPEC K7)."""
    spec, backend = runner.spec, runner.backend
    limits, vocabulary, threads = backend.capabilities, backend.vocabulary, backend.extensions.threads
    num_slots, pooling, n_embd = min(spec.num_slots, limits.num_sequences), "", 0
    if isinstance(backend, Encoder):  # it has as many places as a call takes texts
        num_slots, pooling, n_embd = limits.num_sequences, backend.pooling, backend.n_embd
    return ModelInfo(
        id=spec.id,
        path=spec.path,
        label=limits.label,
        backend=spec.backend,
        backend_reason=runner.load.passed_over_text if runner.load else "",
        vocabulary=runner.load.vocabulary.whole if runner.load else "",
        model_class=limits.model_class,
        architecture=limits.architecture,
        description=limits.description,
        num_params=limits.num_params,
        size_bytes=limits.size_bytes,
        n_vocab=limits.n_vocab,
        n_ctx=limits.n_ctx,
        n_ctx_train=limits.n_ctx_train,
        n_batch=limits.n_batch,
        num_slots=num_slots,
        num_threads=threads.num_threads if threads else 0,
        kv_type=limits.kv_type,
        num_cells=limits.num_cells,
        kv_layout=limits.kv_layout,
        is_repeatable=limits.is_repeatable,
        repeatable_cost=limits.repeatable_cost,
        flash_attention=limits.flash_attention,
        memory_bytes=backend.memory(),
        chat_template=spec.chat_template or vocabulary.chat_template,
        score_output=spec.score_output,
        thinking=spec.thinking,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        can_trim=limits.can_trim,
        can_fork=limits.can_fork,
        has_vision=limits.has_vision,
        hears_hz=limits.hears_hz,
        hearing=spec.projector.hearing if spec.projector else "",
        pairing=limits.pairing,
        pairing_reason=limits.pairing_reason,
        gives_states=bool(backend.extensions.hidden or backend.extensions.recurrent),
        degraded=list(runner.degraded),
        vocabulary_sample=runner.prep.vocabulary_sample,
        adapters=spec.adapters,
        pooling=pooling,
        n_embd=n_embd,
    )


def model_state(
    served: ServedModel, load: Load | None, runner: ModelRunner | None, error: StokerError | None, stage: str
) -> ModelState:
    """Where a model is, for the client.

    Args:
        served: the model.
        load: the load of it that is under way.
        runner: what runs on it, where it is ready.
        error: why it, or what was to take its place, could not be had.
        stage: of a load of one that is ready.
    """
    return ModelState(
        model=served.spec.id,
        state=served.life,
        stage=served.stage or stage,
        fraction=1.0 if runner is not None else served.fraction,
        info=model_info(runner) if runner is not None and not stage else None,
        error=None if error is None else error.info(),
        reason=served.reason,
        path=load.way.path if load else "",
        backend=load.way.backend if load else "",
        answers=served.ask_id if error is not None or not (served.is_asked or served.is_leaving) else 0,
    )
