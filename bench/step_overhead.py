"""Python's own time per step: how long the engine loop takes around the native decode.

Runs the real loop on the real backend in this process, with so many rows decoding, its events encoded and
written to a socket as in production (a child swallows them). The native calls are wrapped with a clock: a
step's own time is the time from one decode call to the next, less what they took. Drawing tokens from rows,
with the text and events of them, is part of it, and also shown by itself.

    python -m bench.step_overhead --model FILE [--rows 1 8] [--threads N] [--json]

Beside a device the parts of a step count differently: from rows that are there to the next launch the device
stands still, everything after the launch is free while it takes less than the device. Without a model both
are measured on a device that takes time and computes nothing, at 1, 8, 32 and 64 rows; also what it takes to
admit 64 requests that come at once, where slots and cache are full of what earlier ones have left.

    python -m bench.step_overhead --device [--vocabulary 1024] [--device-ms 5.8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Self

from bench.errors import BenchError
from bench.prompts import random_prompt
from bench.steady_device import SCHEME, SteadyReader, register
from stoker.backends.llama.binding import llama
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox
from stoker.engine.loop import EngineLoop
from stoker.engine.process import EventWriter
from stoker.engine.runners.postprocess import Postprocess
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.steps import StepRunner
from stoker.ipc.commands import LoadModel, Shutdown, Submit
from stoker.ipc.events import Failed, Finished, ModelState
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.steady_device import Lap
    from stoker.ipc.events import Event

NUM_ROWS = 8
DEVICE_ROWS = (1, 8, 32, 64)
DEVICE_CELLS = 2**16
NUM_TOKENS = 160
CROWD_TOKENS = 2
TOKEN_BYTES = 1024
NUM_FILLING = 5
"""Crowds until there are as many stored prefixes as a cache takes."""
NUM_CROWDS = 5
PROMPT_WORDS = 24
WAIT_S = 300.0
NUM_PERCENTILES = 20
WAYS = {"greedy": Sampling(temperature=0.0), "default samplers": Sampling(seed=1)}


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds of a step, over all steps of one run.

    `own_cpu_median_ms` counts what the loop's thread computed, without its waits for a core: it stays the
    same on a busy machine.
    """

    way: str
    num_rows: int
    num_steps: int
    own_median_ms: float
    own_p95_ms: float
    own_cpu_median_ms: float
    drawing_median_ms: float
    native_median_ms: float


@dataclass(frozen=True, slots=True)
class BesideDevice:
    """Milliseconds of a step beside a device, medians over all steps of one run.

    Attributes:
        before_launch_ms: from rows that are there to the next launch, while the device stands still; with
            the time of drawing from rows of this vocabulary.
        after_launch_ms: from there until the next rows are asked for, while the device computes.
        before_launch_cpu_ms, after_launch_cpu_ms: the same on the thread's own clock.
    """

    way: str
    num_rows: int
    num_steps: int
    before_launch_ms: float
    after_launch_ms: float
    before_launch_cpu_ms: float
    after_launch_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Admission:
    """Milliseconds of the loop for each request of a crowd, from the inbox to its slot, prompts apart.

    Attributes:
        accept_ms: entering the queue, with the estimate and event of its place; median over crowds.
        admit_ms: from the queue to a slot: what gives way, states that are stored, events.
    """

    num_rows: int
    num_crowds: int
    accept_ms: float
    admit_ms: float


@dataclass(slots=True)
class Turn:
    """One decode call and what followed it, up to the next one."""

    num_tokens: int
    began_s: float
    began_cpu_s: float
    ended_s: float = 0.0
    ended_cpu_s: float = 0.0
    drawing_s: float = 0.0

    @property
    def native_s(self) -> float:
        """What the call took."""
        return self.ended_s - self.began_s


class Stopwatch:
    """Takes the time of decode calls and of drawing, by turn. Used on the loop's thread only.

    The clock of a thread is a system call, which finds no cache warm either: it is read at the two ends of a
    decode alone, outside of what is Python's own.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def __repr__(self) -> str:
        return f"<Stopwatch {len(self.turns)} turns>"

    def decode(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, llama_decode, with a turn of its own."""

        def timed(context: Any, batch: Any) -> Any:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            turn = Turn(batch.n_tokens, began_s, began_cpu_s)
            self.turns.append(turn)
            result = call(context, batch)
            turn.ended_cpu_s, turn.ended_s = time.thread_time(), time.perf_counter()
            return result

        return timed

    def drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """`draw` with its time added to the turn."""

        def timed(*args: Any) -> None:
            began_s = time.perf_counter()
            draw(*args)
            self.turns[-1].drawing_s += time.perf_counter() - began_s

        return timed

    @contextmanager
    def on_decode(self) -> Iterator[None]:
        """Inside, the bindings' decode is clocked."""
        decode = llama.llama_decode
        llama.llama_decode = self.decode(decode)
        try:
            yield
        finally:
            llama.llama_decode = decode

    @contextmanager
    def on_drawing(self) -> Iterator[None]:
        """Inside, `Postprocess.draw` is clocked too."""
        draw = Postprocess.draw
        setattr(Postprocess, "draw", self.drawing(draw))  # noqa: B010 - a method may not be assigned
        try:
            yield
        finally:
            setattr(Postprocess, "draw", draw)  # noqa: B010 - likewise


@contextmanager
def clocked(owner: type, name: str) -> Iterator[list[float]]:
    """Inside, the seconds of each call of that method are noted."""
    method, took_s = getattr(owner, name), list[float]()

    def timed(*args: Any) -> None:
        began_s = time.perf_counter()
        method(*args)
        took_s.append(time.perf_counter() - began_s)

    setattr(owner, name, timed)
    try:
        yield took_s
    finally:
        setattr(owner, name, method)


def summarise(way: str, num_rows: int, turns: Sequence[Turn]) -> Overhead:
    """The steps of `turns` that decode all rows, each followed by another such step.

    Raises:
        BenchError: there are too few of them.
    """
    pairs = [
        (turn, following)
        for turn, following in pairwise(turns)
        if turn.num_tokens == num_rows == following.num_tokens
    ]
    if len(pairs) < NUM_PERCENTILES:
        raise BenchError(f"{len(pairs)} steps had {num_rows} rows; {NUM_PERCENTILES} are needed")
    own_ms = [1e3 * (after.began_s - turn.ended_s) for turn, after in pairs]
    cpu_ms = [1e3 * (after.began_cpu_s - turn.ended_cpu_s) for turn, after in pairs]
    return Overhead(
        way=way,
        num_rows=num_rows,
        num_steps=len(pairs),
        own_median_ms=median(own_ms),
        own_p95_ms=quantiles(own_ms, n=NUM_PERCENTILES)[-1],
        own_cpu_median_ms=median(cpu_ms),
        drawing_median_ms=median(1e3 * turn.drawing_s for turn, _ in pairs),
        native_median_ms=median(1e3 * turn.native_s for turn, _ in pairs),
    )


class Engine:
    """The loop on a thread of its own, driven through its inbox. Inside the context the model is loaded."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._inbox = Inbox()
        self._outcomes: list[Event] = []
        self._news = threading.Condition()
        self._ours, theirs = socket.socketpair()
        self._swallower = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)  # noqa: S607 - any cat
        theirs.close()
        self._writer = EventWriter(self._ours)
        asked = {
            "slots": spec.num_slots,
            "ctx_size": spec.n_ctx,
            "cache_disk_bytes": 0,
        }  # nothing stays behind
        settings = EngineSettings.model_validate(asked)
        self._loop = EngineLoop(self._inbox, self._publish, config_of(settings))
        self._thread = threading.Thread(target=self._loop.run, name="bench-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._inbox.put(LoadModel(self._spec))
        self._wait_for(lambda event: isinstance(event, ModelState) and event.state == "ready", 1)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._inbox.put(Shutdown())
        self._thread.join(WAIT_S)
        self._ours.close()
        self._swallower.wait(WAIT_S)

    def run(self, way: str, sampling: Sampling, num_tokens: int = NUM_TOKENS, crowd: int = 0) -> None:
        """As many requests as there are slots, from start to end; each `crowd` has prompts of its own."""
        self._outcomes.clear()
        for index in range(self._spec.num_slots):
            request = GenerateRequest(
                prompt=random_prompt(PROMPT_WORDS, index + crowd * self._spec.num_slots),
                model=self._spec.id,
                max_tokens=num_tokens,
                sampling=sampling,
                ignore_eos=True,
            )
            self._inbox.put(Submit(request_id=f"{way}-{index}", request=request))
        self._wait_for(lambda event: isinstance(event, Finished), self._spec.num_slots)

    def _publish(self, events: list[Event]) -> None:
        self._writer.write(events)
        told = [event for event in events if isinstance(event, Finished | Failed | ModelState)]
        if told:
            with self._news:
                self._outcomes += told
                self._news.notify()

    def _wait_for(self, wanted: Callable[[Event], bool], count: int) -> None:
        def is_over() -> bool:
            failed = [e for e in self._outcomes if isinstance(e, Failed) or getattr(e, "error", None)]
            return bool(failed) or sum(map(wanted, self._outcomes)) >= count or not self._thread.is_alive()

        with self._news:
            self._news.wait_for(is_over, WAIT_S)
            if sum(map(wanted, self._outcomes)) < count:
                raise BenchError(f"the engine did not do its work; it said {self._outcomes[-3:]}")


def measure(model: str, num_threads: int, rows: Sequence[int] = (NUM_ROWS,)) -> list[Overhead]:
    """The overhead of each way of sampling on `model` (a GGUF path), at each number of rows."""
    results = []
    watch = Stopwatch()
    for num_rows in rows:
        spec = ModelSpec(id="bench", path=model, num_slots=num_rows, n_ctx=4096, num_threads=num_threads)
        with watch.on_decode(), watch.on_drawing(), Engine(spec) as engine:
            for way, sampling in WAYS.items():
                watch.turns.clear()
                engine.run(way, sampling)
                results.append(summarise(way, num_rows, watch.turns))
    return results


def summarise_laps(way: str, num_rows: int, laps: Sequence[Lap]) -> BesideDevice:
    """The steps that decode all rows, each followed by another such step.

    Raises:
        BenchError: there are too few of them.
    """
    pairs = [pair for pair in pairwise(laps) if {lap.num_tokens for lap in pair} == {num_rows}]
    pairs = [pair for pair in pairs if all(lap.num_rows == num_rows for lap in pair)]
    if len(pairs) < NUM_PERCENTILES:
        raise BenchError(f"{len(pairs)} steps had {num_rows} rows; {NUM_PERCENTILES} are needed")
    return BesideDevice(
        way=way,
        num_rows=num_rows,
        num_steps=len(pairs),
        before_launch_ms=median(1e3 * (after.launched_s - lap.there_s) for lap, after in pairs),
        after_launch_ms=median(1e3 * (lap.asked_s - lap.launched_s) for lap, _ in pairs),
        before_launch_cpu_ms=median(1e3 * (after.launched_cpu_s - lap.there_cpu_s) for lap, after in pairs),
        after_launch_cpu_ms=median(1e3 * (lap.asked_cpu_s - lap.launched_cpu_s) for lap, _ in pairs),
    )


def measure_beside_device(n_vocab: int, step_ms: float) -> list[BesideDevice]:
    """Each way of sampling at each number of rows, on a device whose steps take `step_ms`."""
    register()
    results = []
    for num_rows in DEVICE_ROWS:
        path = f"{SCHEME}{n_vocab},{step_ms}"
        spec = ModelSpec(id="bench", path=path, num_slots=num_rows, n_ctx=4096, num_cells=DEVICE_CELLS)
        with Engine(spec) as engine:
            laps = SteadyReader.made.laps
            for way, sampling in WAYS.items():
                laps.clear()
                engine.run(way, sampling)
                results.append(summarise_laps(way, num_rows, laps))
    return results


def measure_admission(n_vocab: int, step_ms: float) -> Admission:
    """Of crowds of as many as there are slots, once slots and cache are full."""
    register()
    num_rows = DEVICE_ROWS[-1]
    path = f"{SCHEME}{n_vocab},{step_ms},{TOKEN_BYTES}"
    spec = ModelSpec(id="bench", path=path, num_slots=num_rows, n_ctx=1024, num_cells=DEVICE_CELLS)
    accepted_ms, admitted_ms = [], []
    with Engine(spec) as engine:
        for crowd in range(NUM_FILLING + NUM_CROWDS):
            with (
                clocked(SlotRunner, "accept") as accepting,
                clocked(SlotRunner, "schedule") as scheduling,
                clocked(StepRunner, "finish") as finishing,  # a part of it that is no admission
            ):
                engine.run(f"crowd {crowd}", WAYS["greedy"], CROWD_TOKENS, crowd)
            accepted_ms.append(1e3 * sum(accepting) / num_rows)
            admitted_ms.append(1e3 * (sum(scheduling) - sum(finishing)) / num_rows)
    return Admission(
        num_rows, NUM_CROWDS, median(accepted_ms[NUM_FILLING:]), median(admitted_ms[NUM_FILLING:])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the overhead, as text or as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_overhead", description=__doc__)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model")
    subject.add_argument("--device", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[NUM_ROWS])
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--device-ms", type=float, default=5.8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.device:
            return _report_device(options)
        results = measure(options.model, options.threads, options.rows)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    for result in results:
        print(
            f"{result.num_rows} rows, {result.way}: own {result.own_median_ms:.3f} ms "
            f"(p95 {result.own_p95_ms:.3f}, CPU {result.own_cpu_median_ms:.3f}), "
            f"drawing, text and events in it {result.drawing_median_ms:.3f}, "
            f"native {result.native_median_ms:.1f}, {result.num_steps} steps"
        )
    return 0


def _report_device(options: argparse.Namespace) -> int:
    results = measure_beside_device(options.vocabulary, options.device_ms)
    admission = measure_admission(options.vocabulary, options.device_ms)
    if options.json:
        print(json.dumps([*map(asdict, results), asdict(admission)]))
        return 0
    for result in results:
        print(
            f"{result.num_rows} rows, {result.way}: before launch {result.before_launch_ms:.3f} ms "
            f"(CPU {result.before_launch_cpu_ms:.3f}), after it {result.after_launch_ms:.3f} "
            f"(CPU {result.after_launch_cpu_ms:.3f}), {result.num_steps} steps"
        )
    print(
        f"{admission.num_rows} at once: {admission.accept_ms:.3f} ms each into the queue, "
        f"{admission.admit_ms:.3f} from there into a slot, median of {admission.num_crowds} crowds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
