"""One load of a model: its ways in their order, what was found out, what it got less of; and its threads.

These read what the model's file says, and load it. A `Load` is the loop's. The threads hold no state of the
engine: they get values, and post values back to the inbox; `residency` decides what becomes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.backends.device import HeldDevices
from stoker.backends.registry import OpenModels, entry_of, readers_of, why_not
from stoker.backends.trial.trial import prove
from stoker.engine.inbox import (
    Inbox,
    Loaded,
    LoadFailed,
    LoadMoved,
    LoadStop,
    Posted,
    Sized,
)
from stoker.engine.jobs.vocabulary import VocabularyDigests, digests_of
from stoker.errors import (
    BackendUnavailableError,
    EngineError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelError,
    ModelInUseError,
    ModelTooLargeError,
    NotReadyError,
    StokerError,
    UnsupportedError,
    error_from_info,
)
from stoker.ipc.model import ModelSpec, SplitMode
from stoker.models.memory_estimate.fit import with_draft
from stoker.models.placement import with_device_ids, without_devices
from stoker.models.reader import LoadContext
from stoker.wording import count_text

if TYPE_CHECKING:
    from stoker.backends.device import Device
    from stoker.backends.registry import BackendEntry
    from stoker.engine.residency.catalogue import ServedModel
    from stoker.engine.runners.runner import ModelRunner
    from stoker.models.memory_estimate.fit import Estimator, FittedSpec
    from stoker.models.reader import ModelReader

MAX_LOSSES = 2
TOLD_EVERY = 0.02
"""How much further a load has to come to be reported again: loaders report each of hundreds of tensors."""


@dataclass(slots=True, eq=False)
class Load:
    """One load of a model, from the question what it takes to the model in memory (SPEC R4).

    Attributes:
        served: the model.
        spec: how it is to be loaded, as asked for.
        stop: told to the loader; set, the load is to end.
        begun_s: when it was begun.
        is_reload: the model is in memory already and stays until the new one is (SPEC L5).
        way: how it is tried now: `spec`, or one of its fallbacks; rest: those that are left.
        passed_over: why the ways before cannot serve it; errors: the same, as they were met.
        estimator, fingerprint: what the file says; None before it was looked at.
        missing: devices that were lost and are not used.
        held: devices that are left to other processes, by their ids who has each, for people.
        looked_at: the spec with the ids of the devices that there are; None: likewise.
        fitted: how it is loaded; None while it waits for room.
        look_s: when to look for room again.
        least_n_ctx: tokens of context that requests need which have begun on the model.
        stage: what it is at: header, waiting (for room) or weights.
        vocabulary: what tells its tokens from those of others, once it is loaded.
        most_bytes: what it may take of devices at most, by their ids, where it has failed to take more.
    """

    served: ServedModel
    spec: ModelSpec
    stop: LoadStop
    begun_s: float
    is_reload: bool
    way: ModelSpec = field(init=False)
    rest: tuple[ModelSpec, ...] = field(init=False)
    passed_over: tuple[str, ...] = field(init=False)
    errors: list[StokerError] = field(default_factory=list)
    estimator: Estimator | None = None
    fingerprint: str = ""
    fitted: FittedSpec | None = None
    look_s: float = 0.0
    least_n_ctx: int = 0
    stage: str = ""
    looked_at: ModelSpec | None = None
    missing: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    most_bytes: dict[str, int] = field(default_factory=dict)
    vocabulary: VocabularyDigests = field(default_factory=VocabularyDigests)

    def __post_init__(self) -> None:
        self.way, *rest = self.spec.ways
        self.rest, self.passed_over = tuple(rest), self.spec.passed_over

    def __repr__(self) -> str:
        return f"<Load {self.spec.id} {self.stage} {self.served.fraction:.0%}>"

    @property
    def wanted(self) -> ModelSpec:
        """How it is to be loaded, with ids of devices as soon as they are known."""
        return self.looked_at or self.way

    @property
    def has_ways(self) -> bool:
        """Whether it can be, or could have been, served in several ways."""
        return bool(self.spec.fallbacks or self.passed_over)

    @property
    def passed_over_text(self) -> str:
        """Why it is this way and not one that comes before it, for people; empty: it is the first."""
        return "; ".join(self.passed_over)

    def pass_on(self, error: StokerError) -> bool:
        """The way that is tried cannot serve it; returns whether another is tried now."""
        self.errors.append(error)
        if not (self.rest and is_for_others(error)):
            return False
        self.passed_over += (why_not(self.way.backend, error),)
        self.way, *rest = self.rest
        self.rest = tuple(rest)
        self.estimator = self.fitted = self.looked_at = None
        self.most_bytes.clear()
        return True

    @property
    def failure(self) -> StokerError:
        """Why it cannot be loaded: the last error, with those of the ways before."""
        *before, last = self.errors
        if not before:
            return last
        text = "; ".join([last.message, *(error.message for error in before)])
        return error_from_info(msgspec.structs.replace(last.info(), message=text))

    def explained(self, error: StokerError) -> StokerError:
        """Why it cannot be loaded, with the devices that it might have got and others hold."""
        if not self.held:
            return error
        text = f"{error.message}; that is without {' and '.join(self._held_texts())}"
        return error_from_info(msgspec.structs.replace(error.info(), message=text))

    def _held_texts(self) -> list[str]:
        return [f"{device}, which {who} holds" for device, who in self.held.items()]

    def less(self, trial_token_s: float) -> tuple[str, ...]:
        """What the model gets less of than was asked for, and what that costs, for people.

        Args:
            trial_token_s: what a token took in a trial; 0: not measured.
        """
        less = list(self.fitted.degraded) if self.fitted else []
        if not self.missing:
            less += without_devices(self.way, self.wanted)
        if less:
            less += (f"without {device}" for device in self._held_texts())
            if trial_token_s:
                less.append(f"one request alone got {1 / trial_token_s:.3g} tokens/s in a trial")
        return (*less, *(f"without {device}, which was lost" for device in self.missing))

    def learn(self, error: InsufficientMemoryError) -> bool:
        """Loading has shown that a device has less room than was thought; returns whether to try again.

        Each time it may take an eighth less there, or as much less as was missing; from nothing it cannot.
        """
        device = error.details.get("device", "")
        tried_bytes = self.fitted.estimate.device_bytes(device) if self.fitted is not None else 0
        missing_bytes = error.details.get("needed", 0) - error.details.get("free", 0)
        most_bytes: int = max(0, min(tried_bytes * 7 // 8, tried_bytes - missing_bytes))
        before_bytes = self.most_bytes.get(device, tried_bytes)
        self.most_bytes[device] = most_bytes
        return most_bytes < before_bytes

    @property
    def waits_for_room(self) -> bool:
        """Whether it is known what it takes, and not begun yet."""
        return self.estimator is not None and self.fitted is None

    def told(self, stage: str, fraction: float) -> None:
        """It has come so far."""
        self.stage = stage
        if not self.is_reload:
            self.served.stage, self.served.fraction = stage, fraction

    def is_like(self, other: Load) -> bool:
        """Whether it would give the same model once more; how long it is kept makes no other one."""
        spec, theirs = self.spec, other.spec
        theirs = msgspec.structs.replace(theirs, keep_alive_s=spec.keep_alive_s, is_pinned=spec.is_pinned)
        is_same_way = other.way.served_by == self.way.served_by
        is_same_file = other.fingerprint == self.fingerprint
        return theirs == spec and is_same_way and is_same_file and other.held.keys() == self.held.keys()


def is_for_others(error: StokerError) -> bool:
    """Whether another backend, or the model in another form, may do what was refused so.

    Want of memory and heat are the machine's, whoever serves; so is a device that another program holds.
    """
    if isinstance(error, InvalidRequestError):
        return error.param == "device"  # there is none of that name
    is_own = isinstance(error, BackendUnavailableError | UnsupportedError | ModelError | EngineError)
    return is_own and not isinstance(error, ModelTooLargeError)


def conflict(spec: ModelSpec, n_ctx: int, runner: ModelRunner, contexts: Sequence[int]) -> StokerError | None:
    """Why a model in memory cannot give way to `spec` now.

    A request that runs, waits or stands still there must not end for want of context that it had, nor go
    on in another file. One that is not tokenised yet may come to hold all the context there is.

    Args:
        spec: how it is to be loaded.
        n_ctx: the context it would have; 0: the file's own.
        runner: the model in memory.
        contexts: tokens that each of its requests may come to hold.
    """
    paths = {way.path for way in spec.ways}
    if runner.spec.path not in paths and contexts:
        text = f"{spec.id} is loaded from another file, which {count_text(len(contexts), 'request')} need"
        return ModelInUseError(f"{text}; load it when they have ended", num_requests=len(contexts))
    now_n_ctx = (runner.load.spec.most_tokens if runner.load else 0) or math.inf
    unfit = [num for num in contexts if 0 < n_ctx < num]
    if not unfit or n_ctx >= now_n_ctx:  # backends round up: as much again is enough for what ran on it
        return None
    return ModelInUseError(
        f"{count_text(len(unfit), 'request')} on {spec.id} may come to hold up to {max(unfit)} tokens,"
        f" for which a context (ctx_size) of {n_ctx} has no room; load it so when they have ended",
        param="ctx_size",
        num_requests=len(unfit),
        n_ctx=max(unfit),
    )


def in_its_own_way(spec: ModelSpec, num_requests: int) -> ModelInUseError:
    """Why a model that requests use is not loaded otherwise where there is no room for it beside itself."""
    number = max(1, num_requests)  # there is one at least that is being tokenised
    runs = f"{count_text(number, 'request')} {'runs' if number == 1 else 'run'} on {spec.id}"
    text = f"{runs}, beside which there is no room for it as asked; load it so when they have ended"
    return ModelInUseError(text, num_requests=number)


class LoadThreads:
    """The loader's thread, and one that reads headers: a load may take its time.

    Args:
        inbox: where results are posted.
        cache_dir: results of smoke decodes.
        devices: takes the lease of what a model is loaded on.
        models: reads their headers.
        reads_whole: models are told apart by all that their files hold, as other machines use their states.

    Attributes:
        lost: devices that have ended engines, and how often: at MAX_LOSSES one is left out.
    """

    def __init__(
        self,
        inbox: Inbox,
        cache_dir: Path,
        devices: HeldDevices,
        models: OpenModels,
        *,
        reads_whole: bool = False,
    ) -> None:
        self._reads_whole = reads_whole
        self._inbox = inbox
        self._cache_dir = cache_dir
        self._devices = devices
        self._models = models
        self.lost: Mapping[str, int] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="stoker-loader")
        self._sizer = ThreadPoolExecutor(1, thread_name_prefix="stoker-sizer")

    def __repr__(self) -> str:
        return f"<LoadThreads, devices lost: {dict(self.lost)}>"

    def size(self, load: LoadStop, spec: ModelSpec, *, may_pass_on: bool = False) -> None:
        """Estimate what a model's file takes; posts Sized or LoadFailed.

        `may_pass_on`: there is another way to serve it, which is better than this one without its devices.
        """

        def answer() -> Sized:
            model = self._open(spec)
            found = model.estimator()  # before the devices, whose drivers may still start
            devices = model.devices()
            there = [each for each in devices if self.lost.get(each.id, 0) < MAX_LOSSES]
            if may_pass_on and not there:
                raise _entry(spec).unavailable(f"{' and '.join(each.id for each in devices)} was lost")
            self._devices.know(there)
            missing = tuple(sorted(self.lost.keys() - {each.id for each in there}))
            there, held = self._left_to_others(spec, there)
            if spec.draft_path and spec.speculation.uses_model:
                found = with_draft(found, self._models.open(spec.draft_path).estimator())
            placed = with_device_ids(spec, there, missing)
            return Sized(load, found, model.fingerprint, placed, missing, held)

        self._post(self._sizer, answer, lambda error: LoadFailed(load, error))

    def load(
        self, load: LoadStop, spec: ModelSpec, *, is_suspect: bool = False, has_ways: bool = False
    ) -> None:
        """Load a model; posts LoadMoved on the way, then Loaded or LoadFailed, soon where `load` is set.

        Of one that has several ways to be served the digest of its tokens is made, to tell these apart. A
        suspect, whose last load ended an engine, is tried in a child process first.
        """
        next_fraction = 0.0

        def moved(fraction: float) -> None:
            nonlocal next_fraction
            if load.is_set():
                raise NotReadyError(f"the load of {spec.id} was stopped at {fraction:.0%}")
            if fraction >= min(1.0, next_fraction):
                next_fraction = fraction + TOLD_EVERY
                self._inbox.put(LoadMoved(load, "weights", fraction))

        def answer() -> Loaded:
            model, context = self._open(spec), LoadContext(moved, self._cache_dir)
            self._devices.take(model.devices_for(spec), spec.id)
            if is_suspect:
                model.try_out(spec, context)
            prove(_entry(spec), spec, model.describe(), context, is_suspect=is_suspect)
            backend = model.load(self._with_content(spec, lambda: moved(0.0)), context)
            n_vocab = backend.capabilities.n_vocab
            return Loaded(
                load, spec.path, backend, digests_of(backend.vocabulary, n_vocab, has_ways=has_ways)
            )

        self._post(self._loader, answer, lambda error: LoadFailed(load, error))

    def _left_to_others(self, spec: ModelSpec, devices: list[Device]) -> tuple[list[Device], dict[str, str]]:
        """Where nobody said which devices to use, or to use several: those that no other process holds.

        Where each is held none is left out, and the load says who has it.

        Returns:
            The devices to choose from, and by the ids of those left out who has each, for people.
        """
        placement = spec.placement
        shares = placement.split_mode in {SplitMode.LAYER, SplitMode.ROW} or placement.tensor_split
        if placement.device or shares or placement.main_gpu is not None:
            return devices, {}
        holders = {each.id: self._devices.holder(each) for each in devices}
        free = [each for each in devices if not holders[each.id]]
        if not any(each.lock for each in free):
            return devices, {}
        return free, {device: who for device, who in holders.items() if who}

    def _with_content(self, spec: ModelSpec, on_read: Callable[[], None]) -> ModelSpec:
        path = Path(spec.path)
        if not self._reads_whole or not path.exists():
            return spec
        from stoker.models.contents import content_digest  # noqa: PLC0415 - only where a store is shared

        return msgspec.structs.replace(spec, content=content_digest(path, self._cache_dir, on_read))

    def _open(self, spec: ModelSpec) -> ModelReader:
        """Raises BackendUnavailableError where a library that it takes is not installed."""
        if missing := _entry(spec).missing:
            raise _entry(spec).unavailable(f"{' and '.join(missing)} is not installed")
        return self._models.open(spec.path, spec.backend)

    def close(self) -> None:
        """Drop what waits; wait for a load."""
        self._sizer.shutdown(cancel_futures=True)
        self._loader.shutdown(cancel_futures=True)

    def _post(
        self, pool: ThreadPoolExecutor, work: Callable[[], Posted], failed: Callable[[StokerError], Posted]
    ) -> None:
        def run() -> None:
            try:
                post = work()
            except StokerError as error:
                post = failed(error)
            except Exception as error:  # noqa: BLE001 - a worker's bug must end one request, not the loop
                post = failed(EngineError(f"{type(error).__name__}: {error}"))
            with self._inbox.interrupt.arrival():
                self._inbox.put(post)

        pool.submit(run)


def _entry(spec: ModelSpec) -> BackendEntry:
    """The backend that a spec names, or the first that reads it."""
    return entry_of(spec.backend) if spec.backend else readers_of(spec.path)[0]
