"""A machine whose memory is counted, not measured: what models, caches and others take of it."""

import time
from collections import deque
from dataclasses import dataclass, field
from threading import Event
from unittest import mock

from stoker.backends.fake.backend import load as load_fake
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox, Measured
from stoker.engine.loop import EngineLoop
from stoker.engine.threads.timer import Stopwatch
from stoker.ipc.commands import GetStatus, KnowModel, LoadModel, Submit
from stoker.ipc.events import (
    Admitted,
    Delta,
    Failed,
    Finished,
    ModelState,
    Parked,
    PromptEcho,
    Reply,
    RungTaken,
)
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.machine.monitor import Sample
from stoker.machine.pressure import Pressure
from stoker.machine.thermal import Heat, HeatReading
from stoker.settings import EngineSettings

MIB = 2**20
OWN_MIB = 100
GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 2.0
"""A loop that means to wait longer, and for nobody, is taken to sleep: tests move time themselves."""
MOST_IDLE_TURNS = 300
"""So many turns on end that nobody asked for are a spin."""
PARTS = {Pressure.NORMAL: 0.3, Pressure.WARNING: 0.75, Pressure.CRITICAL: 0.95}


class Clock:
    """The engine's time: the machine's, moved ahead as a test likes; or standing still but for that."""

    def __init__(self, monkeypatch, *, is_still=False):
        self.ahead_s = 0.0
        self._still_s = time.monotonic() if is_still else None
        monkeypatch.setattr(Stopwatch, "now", staticmethod(self.now))
        monkeypatch.setattr(
            "stoker.engine.residency.pending.arrival_of", lambda submit: self.now() - submit.age_s
        )

    def now(self):
        """Seconds; each look takes a millionth of one, as nothing takes no time."""
        if self._still_s is not None:
            self._still_s += 1e-6
        return (time.monotonic() if self._still_s is None else self._still_s) + self.ahead_s

    def pass_(self, seconds):
        """Let so much time pass."""
        self.ahead_s += seconds


class Gate:
    """Loads of fake models go as far as half, and on when the gate is opened; a stopped one is noted.

    Attributes:
        is_deaf: a load does not notice that it was stopped.
        begun: models whose load was begun, in order.
        stopped: those whose load ended before it was done.
        backends: what was loaded, by model, in order.
    """

    def __init__(self, monkeypatch):
        self._is_open = Event()
        self.is_deaf = False
        self.begun, self.stopped, self.backends = [], [], []
        monkeypatch.setattr("stoker.backends.fake.backend.load", self._load)

    def open(self):
        """Let every load end."""
        self._is_open.set()

    def shut(self):
        """Hold the next loads."""
        self._is_open.clear()

    def _load(self, spec, moved):
        self.begun.append(spec.id)
        try:
            moved(0.5)
            while not self._is_open.wait(0.01):
                if not self.is_deaf:
                    moved(0.5)
            backend = load_fake(spec, None if self.is_deaf else moved)
        except Exception:
            self.stopped.append(spec.id)
            raise
        self.backends.append((spec.id, backend))
        return backend


class ByHand:
    """A worker that works when it is told to, on this thread: histories repeat exactly."""

    def __init__(self):
        self.jobs = deque()

    def settle(self):
        """Do all."""
        while self.jobs:
            self.step()

    def is_jammed(self, before_s):
        """Never: a job is done in no time."""
        return False

    def close(self, wait_s):
        """What waits is dropped."""
        self.jobs.clear()

    def submit(self, work, *args):
        """Something to do; its result makes all before it be done first."""
        job = _Job(self, work, args)
        self.jobs.append(job)
        return job

    def withdraw(self, job):
        """Take a job out that has not begun."""
        return job.cancel()

    def step(self):
        """Do the next job, if there is one."""
        if self.jobs:
            self.jobs.popleft().run()

    def shutdown(self, **_):
        """What waits is dropped."""
        self.jobs.clear()


class _Job:
    def __init__(self, pool, work, args):
        self._pool, self._work, self._args = pool, work, args
        self._value, self._is_done = None, False

    def cancel(self):
        """Nobody wants it, if it is not done yet."""
        if self in self._pool.jobs:
            self._pool.jobs.remove(self)
            return True
        return False

    def run(self):
        """Do it."""
        self._value, self._is_done = self._work(*self._args), True

    def result(self):
        """What came of it."""
        while not self._is_done:
            self._pool.step()
        return self._value


@dataclass
class Output:
    """What a request was given, by choice."""

    texts: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    reasons: dict = field(default_factory=dict)
    echo: str | None = None


class _NoMonitor:
    """Stands for the thread that measures: tests send samples themselves."""

    def __init__(self, *_):
        pass

    def start(self):
        """No thread."""

    def close(self):
        """Nothing to end."""

    def poke(self):
        """Nobody measures."""


class Machine:
    """A loop, driven on this thread, on a machine with so much memory.

    Attributes:
        events: everything the loop has published.
        others_mib: what other programs take of the machine's memory now.
        untouched_mib: what models were given and have not written to: it measures as free.
        part: how full memory is said to be, whatever the counts are; None: as counted.
        heat: how hot it is.
    """

    def __init__(self, folder, limit_mib=1000, margin_mib=0, **settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.events = []
        self._found = {}  # by what was asked for: the events of that, and of how many
        self.inbox = Inbox()
        self.limit_mib = limit_mib
        self.others_mib = 0
        self.untouched_mib = 0
        self.part = None
        self.heat = Heat.NOMINAL
        settings.setdefault("max_prepare_s", 1e6)  # threads take time that the clock here does not tell
        own = EngineSettings(isolation="thread", cache_dir=folder, memory_margin=margin_mib * MIB, **settings)
        self.loop = None
        self.loop = EngineLoop(self.inbox, self.events.extend, config_of(own), self.sample)

    # ------------------------------------------------------------ the machine

    @property
    def ledger(self):
        """Bytes by line, lines that hold nothing left out."""
        return {line: held for line, held in self.loop._store.ledger.host_lines().items() if held}

    @property
    def residency(self):
        """Which models are in memory."""
        return self.loop._residency

    def sample(self, *, is_os_event=False):
        """What a monitor would measure now."""
        held = 0 if self.loop is None else sum(self.loop._store.ledger.host_lines().values())
        limit, footprint = self.limit_mib * MIB, OWN_MIB * MIB + held - self.untouched_mib * MIB
        free = max(0, limit - footprint - self.others_mib * MIB)
        told = free if self.part is None else int(limit * (1 - self.part))
        return Sample(
            at_s=Stopwatch.now(),
            footprint_bytes=footprint,
            limit_bytes=max(limit, footprint * 2) if self.part is not None and self.loop else limit,
            available_bytes=free,
            total_bytes=limit,
            system_available_bytes=told,
            heat=HeatReading(level=self.heat),
            is_os_event=is_os_event,
            devices=self.loop._devices.samples() if self.loop else (),
        )

    def feel(self, level=None, *, is_os_event=False):
        """Let the engine have a sample, as its monitor would; `level`: memory is that short."""
        if level is not None:
            self.part = PARTS[level]
        self.inbox.put(Measured(self.sample(is_os_event=is_os_event)))
        self.turn()

    def feel_heat(self, heat):
        """The machine is so hot now."""
        self.heat = heat
        self.feel()

    # ------------------------------------------------------------ commands

    def send(self, command):
        """Send a command and let it be taken."""
        self.inbox.put(command)
        self.turn()

    def know(self, model, order="eog_period=0", **spec):
        """Serve a fake model; `order` as in `FakeFaults`."""
        made = ModelSpec(**{"id": model, "path": f"fake:{order}", "n_ctx": 2048, "n_batch": 64} | spec)
        self.send(KnowModel(made))
        return made

    def load(self, spec, **fields):
        """Ask for a model by name."""
        self.send(LoadModel(spec, **fields))

    def submit(self, name, model, **fields):
        """Send a request, as `offer` does; where its model is in memory, it is in the line on return."""
        self.offer(name, model, **fields)
        self.loop._preparations.settle()
        self.turn()

    def offer(self, name, model, prompt="the same old song", **fields):
        """Send a request: greedy, of eight tokens, unless `fields` say otherwise."""
        extra = ("generated", "is_finished", "mirostat_mu", "age_s", "is_paused")
        told = {key: fields.pop(key) for key in extra if key in fields}
        if "pictures" not in fields:
            prompt = tuple(prompt.encode())
        known = {"model": model, "prompt": prompt, "max_tokens": 8, "sampling": GREEDY}
        self.send(Submit(request_id=name, request=GenerateRequest(**known | fields), **told))

    def have(self, *models, order="eog_period=0", **spec):
        """Models in memory."""
        for model in models:
            self.load(self.know(model, order, **spec))
            self.until(lambda model=model: self.state(model) == "ready")

    def climb(self, clock, to, level=Pressure.CRITICAL):
        """Samples of a machine that is that short of memory, a second apart, until that rung is taken."""
        for _ in range(20):
            if self.loop._pressure_handler._ladder.is_taken(to):
                return
            clock.pass_(1)
            self.feel(level)
        raise AssertionError(f"{to} was not taken: {self.rungs()}")

    def calm(self, clock):
        """Samples of a machine with memory until every rung is undone."""
        for _ in range(400):
            clock.pass_(1)
            self.feel(Pressure.NORMAL)
            if not self.loop._pressure_handler._ladder.taken:
                return
        raise AssertionError(f"no end: {self.rungs()}")

    def status(self):
        """What a status page is given."""
        self.send(GetStatus(call_id=-1))
        return self.of(Reply)[-1].value["status"]

    # ------------------------------------------------------------ time

    def turn(self):
        """One turn, without waiting."""
        self.loop.turn(0)

    def until(self, is_done, turns=20000):
        """Turn until then, waiting as the loop itself would: one that sleeps for good or spins is a bug."""
        num_idle = 0
        for _ in range(turns):
            if is_done():
                return
            wait_s = self.loop._wait_s()
            num_events = len(self.events)
            self._await_post(wait_s)
            is_called = not self.inbox.empty()
            self.turn()
            is_idle = wait_s == 0 and not is_called and not self.loop._runners.has_work
            num_idle = num_idle + 1 if is_idle and len(self.events) == num_events else 0
            assert num_idle < MOST_IDLE_TURNS, f"the loop spins: {self.loop!r} {self.residency!r}"
        raise AssertionError(f"not reached; last: {self.events[-8:]}")

    def _await_post(self, wait_s):
        until_s = time.monotonic() + (PATIENCE_S if wait_s is None else min(wait_s, PATIENCE_S))
        while self.inbox.empty() and time.monotonic() < until_s:
            time.sleep(0.0005)
        is_due = wait_s is not None and wait_s <= PATIENCE_S
        assert is_due or not self.inbox.empty(), (
            f"the loop sleeps and nothing comes: {self.loop!r} {self.residency!r} {self.loop._pending!r}"
        )

    def run(self, *names):
        """Turn until each of these requests has its terminal event."""
        self.until(lambda: all(self.has_ended(name) for name in names))

    def until_tokens(self, name, count):
        """Turn until the request was given so many tokens."""
        self.until(lambda: len(self.tokens(name)) >= count)

    def end(self, command):
        """Send the last command, and let the loop run until it ends."""
        self.inbox.put(command)
        with mock.patch("stoker.engine.loop.MemoryMonitor", _NoMonitor):
            self.loop.run()

    def close(self):
        """Free everything; idempotent."""
        self.residency.close()
        self.loop._preparations.close()
        self.loop._load_threads.close()
        self.loop._store.close()
        self.residency.free_departed()
        self.loop._runners.close(self.loop._preparations.uses)
        self.loop._timer.close()
        self.loop._devices.close()

    # ------------------------------------------------------------ what was told

    def of(self, kind, request_id=None):
        """Events of a kind, in order; each event is looked at once, as this is asked turn by turn."""
        found, num_seen = self._found.get((kind, request_id), ([], 0))
        assert num_seen <= len(self.events), "events were taken away"
        found += [
            e
            for e in self.events[num_seen:]
            if isinstance(e, kind) and request_id in (None, getattr(e, "request_id", None))
        ]
        self._found[kind, request_id] = found, len(self.events)
        return list(found)

    def states(self, model):
        """What was told of a model, repetitions left out."""
        told = [str(e.state) for e in self.of(ModelState) if e.model == model]
        return [state for at, state in enumerate(told) if at == 0 or told[at - 1] != state]

    def state(self, model):
        """What was told last of a model."""
        return (self.states(model) or ["absent"])[-1]

    def info(self, model):
        """What was told of a model that became ready, the last time."""
        return [e.info for e in self.of(ModelState) if e.model == model and e.info][-1]

    def runner(self, model):
        """The model in memory, or None."""
        return self.loop._runners.find(model)

    def rungs(self):
        """The moves of the ladder: the rung's name, with a minus where it was undone."""
        return [("-" if e.is_undone else "") + e.rung for e in self.of(RungTaken)]

    def tokens(self, name, index=0):
        """Token ids that a choice was given so far."""
        return [t for e in self.of(Delta, name) if e.index == index for t in e.token_ids]

    def output(self, name):
        """All that a request was given."""
        made = Output()
        for event in self.of((Delta, PromptEcho), name):
            if isinstance(event, PromptEcho):
                made.echo = event.text
                continue
            at = event.index
            made.texts[at] = made.texts.get(at, "") + event.text
            made.tokens.setdefault(at, []).extend(event.token_ids)
            made.logprobs.setdefault(at, []).extend(event.logprobs or [])
            if event.finish_reason is not None:
                assert at not in made.reasons, f"choice {at} of {name} ended twice"
                made.reasons[at] = event.finish_reason
        return made

    def finished(self, name):
        """Whether it has ended well."""
        return bool(self.of(Finished, name))

    def has_ended(self, name):
        """Whether it has its terminal event."""
        return bool(self.of((Finished, Failed), name))

    def error(self, name):
        """The error that a request ended with."""
        (failed,) = self.of(Failed, name)
        return failed.error

    def num_returns(self, name):
        """How often it was parked, and how often it was given a place."""
        return len(self.of(Parked, name)), len(self.of(Admitted, name))


class Machines:
    """Makes machines, each with a folder of its own, and closes them all.

    Args:
        folder: where their folders go.
    """

    def __init__(self, folder):
        self._folder = folder
        self._made = []

    def __call__(self, limit_mib=1000, **settings):
        """Another machine."""
        folder = settings.pop("folder", self._folder / str(len(self._made)))
        self._made.append(Machine(folder, limit_mib, **settings))
        return self._made[-1]

    def alone(self, order="eog_period=0", *, n_ctx=2048, **fields):
        """What such a request is given where nothing disturbs it."""
        machine = self()
        machine.know("m", order, n_ctx=n_ctx)
        machine.submit("r", "m", **fields)
        machine.run("r")
        return machine.output("r")

    def close(self):
        """Free them all."""
        for machine in self._made:
            machine.close()
