"""Threads for what a load does off the loop: reading what a model's file says, and loading it.

They hold no state of the engine. They get values, and post values back to the inbox; the loop decides what
becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.backends.device import HeldDevices
from stoker.backends.registry import OpenModels
from stoker.engine.inbox import (
    Inbox,
    Loaded,
    LoadFailed,
    LoadMoved,
    LoadStop,
    Posted,
    Sized,
)
from stoker.errors import EngineError, NotReadyError, StokerError
from stoker.ipc.model import ModelSpec
from stoker.models.memory_estimate.fit import with_draft
from stoker.models.placement import with_device_ids
from stoker.models.reader import LoadContext

MAX_LOSSES = 2
TOLD_EVERY = 0.02
"""How much further a load has to come to be reported again: loaders report each of hundreds of tensors."""


class LoadThreads:
    """The loader's thread, and one that reads headers: a load may take its time.

    Args:
        inbox: where results are posted.
        cache_dir: results of smoke decodes.
        devices: takes the lease of what a model is loaded on.

    Attributes:
        lost: devices that have ended engines, and how often: at MAX_LOSSES one is left out.
    """

    def __init__(self, inbox: Inbox, cache_dir: Path, devices: HeldDevices) -> None:
        self._inbox = inbox
        self._cache_dir = cache_dir
        self._devices = devices
        self._models = OpenModels()
        self.lost: Mapping[str, int] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="stoker-loader")
        self._sizer = ThreadPoolExecutor(1, thread_name_prefix="stoker-sizer")

    def __repr__(self) -> str:
        return f"<LoadThreads, devices lost: {dict(self.lost)}>"

    def size(self, load: LoadStop, spec: ModelSpec) -> None:
        """Estimate what a model's file takes; posts Sized or LoadFailed."""

        def answer() -> Sized:
            model = self._models.open(spec.path)
            found = model.estimator()  # before the devices, whose drivers may still start
            there = [each for each in model.devices() if self.lost.get(each.id, 0) < MAX_LOSSES]
            self._devices.know(there)
            missing = tuple(sorted(self.lost.keys() - {each.id for each in there}))
            if spec.draft_path and spec.speculation.uses_model:
                found = with_draft(found, self._models.open(spec.draft_path).estimator())
            return Sized(load, found, model.fingerprint, with_device_ids(spec, there, missing), missing)

        self._post(self._sizer, answer, lambda error: LoadFailed(load, error))

    def load(self, load: LoadStop, spec: ModelSpec, *, is_suspect: bool = False) -> None:
        """Load a model; posts LoadMoved on the way, then Loaded or LoadFailed, soon where `load` is set.

        A suspect, whose last load ended an engine, is tried in a child process first.
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
            model, context = self._models.open(spec.path), LoadContext(moved, self._cache_dir)
            self._devices.take(model.devices_for(spec), spec.id)
            if is_suspect:
                model.try_out(spec, context)
            return Loaded(load, spec.path, model.load(spec, context))

        self._post(self._loader, answer, lambda error: LoadFailed(load, error))

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
