"""One trial of `stoker calibrate`: a model loaded with some settings in an engine of its own, and asked.

What is measured is what people wait for: a prompt of some hundred tokens and thirty tokens of an answer,
through the whole library. The engine is a child process, so that a trial that crashes ends no other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stoker.cli.calibrate.search import TrialTime, TriedSetting
from stoker.errors import ModelLoadError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection

    from stoker.cli.calibrate.search import Choices
    from stoker.runtime import Runtime
    from stoker.settings import EngineSettings

NUM_TOKENS = 30
NUM_ASKED = 2
"""Requests of one trial, of which the quicker one counts."""
_SENTENCES = (
    "The river rises in the hills and runs through three towns before it reaches the sea.",
    "In spring the water is high, and the mills along its banks grind from morning until night.",
    "Boats carry grain down the river and salt up the river, as they have done for many years.",
    "In summer the water is low, and the mills along its banks stand still for weeks.",
)
_PROMPT = " ".join(_SENTENCES * 4)
_GENERATING = frozenset({"decoder", "recurrent", "hybrid"})


@dataclass(frozen=True, slots=True)
class ModelLook:
    """What a model is like with the defaults.

    Attributes:
        num_threads: CPU threads of its steps.
        has_device: an accelerator computes it, or some of it.
        expert_budget: bytes of experts that stay in memory; 0: all of them do.
    """

    num_threads: int
    has_device: bool
    expert_budget: int


class ModelTrials:
    """Trials of one model.

    Args:
        settings: as they are without a calibration; the first model is the one.
        folder: for what a program leaves; thrown away afterwards.
    """

    def __init__(self, settings: EngineSettings, folder: Path) -> None:
        self._settings = settings.replace(
            calibrated=False,
            isolation="process",
            cache_mode="off",
            cache_disk_bytes=0,
            keep_alive=-1.0,
            restore=False,
            run_dir=folder,
        )

    def __repr__(self) -> str:
        return f"<ModelTrials of {self._settings.models}>"

    async def look(self) -> ModelLook:
        """What it is like with the defaults; raises UnsupportedError where it generates no text."""
        async with self._running({}) as runtime:
            info, status = runtime.models[0], await runtime.status()
            if info.model_class not in _GENERATING:
                raise UnsupportedError(f"{info.id} is {info.class_text}: only what writes text is calibrated")
            streaming = status.models[0].streaming
            return ModelLook(
                num_threads=status.threads,
                has_device=any(each.is_used and each.id != "CPU" for each in status.engine.devices),
                expert_budget=streaming.budget if streaming else 0,
            )

    async def measure(self, choices: Choices) -> TrialTime:
        """One trial: the quicker of `NUM_ASKED` requests, once the model is warm.

        Raises:
            StokerError: it cannot be loaded or computed so.
        """
        async with self._running(choices) as runtime:
            await _ask(runtime, "Once upon a time", 2)
            found = [await _ask(runtime, f"{number}. {_PROMPT}", NUM_TOKENS) for number in range(NUM_ASKED)]
        return min(found, key=lambda each: each.seconds)

    @asynccontextmanager
    async def _running(self, choices: Choices) -> AsyncIterator[Runtime]:
        from stoker.runtime import Runtime

        changes: dict[str, Any] = dict(choices)
        runtime = Runtime(settings=self._settings.replace(**changes))
        runtime.takes_up = False
        try:  # a start that is interrupted has to be closed too
            await runtime.start()
            yield runtime
        finally:
            await runtime.close()


async def _ask(runtime: Runtime, prompt: str, num_tokens: int) -> TrialTime:
    fields: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    begun_s, first_s = time.perf_counter(), 0.0
    async for _ in runtime.generate(prompt, **fields):
        first_s = first_s or time.perf_counter()
    end_s = time.perf_counter()
    if not first_s:
        raise ModelLoadError("it wrote nothing")
    return TrialTime(end_s - begun_s, (num_tokens - 1) / max(end_s - first_s, 1e-6))


def dimensions(look: ModelLook, given: Collection[str]) -> list[TriedSetting]:
    """What to try of a model that is like that; a setting that was given is not tried.

    Values that can make no difference are left out: threads where a device computes, fewer layers where there
    is none, a budget of experts where all are in memory.

    Args:
        look: at the model.
        given: names of settings that are set.
    """
    cores, most = look.num_threads, psutil.cpu_count() or 1
    threads = {max(1, cores // 2), max(1, cores * 3 // 4), most} - {cores}
    found = [
        TriedSetting("threads", () if look.has_device else tuple(sorted(threads))),
        TriedSetting("n_batch", (512, 4096) if look.has_device else (256, 1024)),
        TriedSetting("kv_type", ("q8_0",)),
        TriedSetting("gpu_layers", (0,) if look.has_device else ()),
        TriedSetting("speculation", ("off",)),
        TriedSetting("expert_budget", (look.expert_budget // 2,) if look.expert_budget > 1 else ()),
    ]
    return [each for each in found if each.values and each.name not in given]
