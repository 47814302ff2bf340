"""Random days of an engine with more models than memory, against what each request gets alone."""

from random import Random

import pytest

from memory_stand_in import MIB, OWN_MIB, ByHand, Clock, Gate, Machines
from stoker.engine.inbox import Loaded
from stoker.ipc.commands import Cancel, LoadModel, Pause, PinModel, Resume, Tokenize, UnloadModel
from stoker.ipc.events import Failed, Finished, ModelState, Reply, RequestEvent
from stoker.ipc.model import CLIENT_MODEL_MOVES, ModelLife, ModelSpec, is_move
from stoker.ipc.request import FinishReason, Priority
from stoker.machine.pressure import Pressure
from stoker.machine.thermal import Heat

LIMIT_MIB = 1000
ORDERS = {
    "a": "eog_period=0,weights_mib=400",
    "b": "eog_period=0,weights_mib=400",
    "c": "eog_period=0,weights_mib=350",
    "small": "eog_period=0,weights_mib=50",
    "huge": "eog_period=0,weights_mib=4000",
    "bad": "load_fails=1",
}
PROMPTS = ("a story", "another story " * 9, "x" * 200)
NUM_TOKENS = (1, 7, 60, 200)
MAY_FAIL = {
    "huge": {"model_too_large", "too_hot", "request_timeout"},
    "bad": {"model_load_failed", "too_hot", "request_timeout"},
}
OTHERS_MAY_FAIL = {"insufficient_memory", "too_hot", "request_timeout"}
EVENTS = {
    "request": 10,
    "turns": 12,
    "work": 10,
    "cancel": 2,
    "pause": 2,
    "resume": 2,
    "load": 2,
    "unload": 2,
    "pin": 1,
    "press": 2,
    "heat": 1,
    "wait": 4,
    "ask": 1,
}
"""What may happen, and how often beside the rest."""


class Day:
    """One history on one machine.

    Attributes:
        wants: prompt and number of tokens of each request.
    """

    def __init__(self, make, gate, clock, random):
        self.machine = make(LIMIT_MIB, cache_disk_bytes=0)
        self._gate, self._clock, self._random = gate, clock, random
        self._num_open = len(gate.backends)
        self._workers = (ByHand(), ByHand())
        loop = self.machine.loop
        loop._preparations._quick, loop._load_threads._loader = self._workers
        loop._load_threads._sizer = self._workers[1]
        self._lives: dict[str, ModelLife] = {}
        self.wants, self._ended, self._num_seen, self._num_asked = {}, set(), 0, 0
        self._specs = {
            model: self.machine.know(
                model, order, n_ctx=512, num_slots=3, keep_alive_s=random.choice((-1.0, 0.0, 30.0))
            )
            for model, order in ORDERS.items()
        }

    # ------------------------------------------------------------ what may happen

    def request(self):
        """A request for some model."""
        random, name = self._random, f"r{len(self.wants)}"
        model = random.choices(list(ORDERS), (4, 4, 4, 3, 1, 1))[0]
        prompt, count = random.choice(PROMPTS), random.choice(NUM_TOKENS)
        timeout_s = random.choice((None, None, None, 20.0))
        fields = {"keep_alive_s": random.choice((None, None, 0.0, -1.0)), "timeout_s": timeout_s}
        if random.random() < 0.3:
            fields["priority"] = Priority.BACKGROUND
        self.wants[name] = model, prompt, count
        self.machine.offer(name, model, prompt=prompt, max_tokens=count, **fields)

    def turns(self):
        """Some turns."""
        for _ in range(self._random.randint(1, 15)):
            self.machine.turn()
            self.check()

    def work(self):
        """A worker does something."""
        self._random.choice(self._workers).step()

    def _some(self):
        return f"r{self._random.randrange(max(1, len(self.wants)))}"

    def cancel(self):
        """A client leaves."""
        self.machine.send(Cancel(self._some()))

    def pause(self):
        """A request stands still."""
        self.machine.send(Pause(self._some()))

    def resume(self):
        """A request goes on."""
        self.machine.send(Resume(self._some()))

    def load(self):
        """A model is asked for by name, as it is or otherwise."""
        random = self._random
        spec = random.choice(list(self._specs.values()))
        num_slots = random.choice((spec.num_slots, 2, 4))
        fields = {"id": spec.id, "path": spec.path, "n_ctx": spec.n_ctx, "n_batch": spec.n_batch}
        other = ModelSpec(**fields, num_slots=num_slots, keep_alive_s=spec.keep_alive_s)
        self.machine.send(LoadModel(other, may_evict=random.random() < 0.7))

    def unload(self):
        """A model is to go."""
        self.machine.send(UnloadModel(self._random.choice(list(ORDERS))))

    def pin(self):
        """A model is pinned, or no longer."""
        self.machine.send(PinModel(self._random.choice("abc"), is_pinned=self._random.random() < 0.5))

    def press(self):
        """Memory gets short, or is so for a while, or is not any more."""
        level = self._random.choice(list(Pressure))
        for _ in range(self._random.choice((1, 1, 4, 8))):
            self._clock.pass_(1)
            self.machine.feel(level)
            self.check()

    def heat(self):
        """It gets warmer or colder."""
        self.machine.feel_heat(self._random.choice((Heat.NOMINAL, Heat.NOMINAL, Heat.SERIOUS, Heat.CRITICAL)))

    def wait(self):
        """Time passes."""
        self._clock.pass_(self._random.choice((0.3, 1.1, 3.0, 31.0)))

    def ask(self):
        """A question about text."""
        self._num_asked += 1
        self.machine.send(Tokenize(call_id=self._num_asked, model=self._random.choice("abc"), text="x"))

    # ------------------------------------------------------------ what always holds

    def check(self):
        """Nothing is lost, nothing is double, and the books are right."""
        self._check_events()
        self._check_requests()
        self._check_models()

    def _check_events(self):
        for event in self.machine.events[self._num_seen :]:
            if isinstance(event, ModelState):
                before = self._lives.get(event.model, ModelLife.ABSENT)
                assert is_move(before, ModelLife(event.state), CLIENT_MODEL_MOVES), f"{before}, then {event}"
                self._lives[event.model] = ModelLife(event.state)
            if isinstance(event, RequestEvent):
                assert event.request_id not in self._ended, f"{event} after the end"
            if isinstance(event, Finished | Failed):
                self._ended.add(event.request_id)
        self._num_seen = len(self.machine.events)

    def _check_requests(self):
        jobs = self.machine.loop._jobs
        placed = [job for model in ORDERS for job in jobs.placed(model)]
        places = [job.request_id for model in ORDERS for job in jobs.pending(model)]
        places += [job.request_id for job in placed]
        assert len(places) == len(set(places)), f"in two places: {places}"
        assert set(places) == {job.request_id for job in jobs} == set(self.wants) - self._ended
        queued = {
            sequence.key.request_id
            for runner in self.machine.loop._runners
            for sequence in (
                *runner.scheduler.queue,
                *runner.scheduler.paused,
                *runner.scheduler.slots.running,
            )
        }
        assert queued == {job.request_id for job in placed}
        assert all(job.runner is self.machine.runner(job.model) for job in placed)

    @property
    def _num_posted(self):
        """Loaded models that the loop has not heard of yet."""
        inbox = self.machine.inbox
        items = inbox.take(0)
        for item in items:
            inbox.put(item)
        return sum(isinstance(item, Loaded) for item in items)

    def _check_models(self):
        machine, expected = self.machine, {}
        for served in machine.residency._catalogue:
            runner = machine.runner(served.spec.id)
            assert served.is_in_memory == (runner is not None), f"{served!r} {list(served.story)}"
            if runner is None:
                continue
            assert not runner.backend._is_closed
            runner.scheduler.check()
            runner.backend.check()
            for line, size_bytes in served.size.items():
                expected[line] = expected.get(line, 0) + size_bytes
        departed = machine.residency._departed  # a worker still reads their vocabulary
        for size in departed:
            for line, size_bytes in size.items():
                expected[line] = expected.get(line, 0) + size_bytes
        held = machine.ledger
        assert {line: held[line] for line in held if line not in {"cache", "parked"}} == {
            line: size for line, size in expected.items() if size
        }
        assert sum(expected.values()) <= (LIMIT_MIB - OWN_MIB) * MIB
        waiting = [b for b in self._gate.backends[self._num_open :] if not b[1]._is_closed]
        assert len(waiting) <= len(list(machine.loop._runners)) + len(departed) + self._num_posted

    # ------------------------------------------------------------ the end

    def end(self):
        """Memory, calm and cool again: every request comes to its end by itself."""
        machine = self.machine
        machine.heat = Heat.NOMINAL
        for model in ORDERS:
            machine.send(PinModel(model, is_pinned=False))
        for name in self.wants:
            machine.send(Resume(name))
        for _ in range(4000):
            self._clock.pass_(1)
            machine.feel(Pressure.NORMAL)
            for worker in self._workers:
                worker.step()
            for _ in range(5):
                machine.turn()
            self.check()
            if set(self.wants) == self._ended and len(machine.of(Reply)) == self._num_asked:
                return
        raise AssertionError(f"alive: {set(self.wants) - self._ended} {machine.loop!r} {machine.residency!r}")

    def check_outputs(self, alone):
        """Each has what it has alone, or a part of it and a reason why not more."""
        for name, (model, prompt, count) in self.wants.items():
            failed, output = self.machine.of(Failed, name), self.machine.output(name)
            tokens = output.tokens.get(0, [])
            assert tokens == alone(prompt)[: len(tokens)], f"{name} says something else"
            if failed:
                assert failed[0].error.code in MAY_FAIL.get(model, OTHERS_MAY_FAIL), failed
                assert failed[0].error.code == "request_timeout" or not tokens, f"{name} was thrown away"
            elif output.reasons[0] is not FinishReason.CANCELLED:
                assert output.reasons == {0: FinishReason.LENGTH}
                assert len(tokens) == count

    def leave(self):
        """Everything is unloaded: nothing is held."""
        for model in ORDERS:
            self.machine.send(UnloadModel(model))
        for _ in range(30):
            for worker in self._workers:
                worker.step()
            self.machine.turn()
        self.machine.loop._store.cache.shed(2**40, self._clock.now())
        assert self.machine.ledger == {}
        assert not [b for b in self._gate.backends[self._num_open :] if not b[1]._is_closed]
        last = {e.model: e.state for e in self.machine.of(ModelState)}
        assert set(last.values()) <= {ModelLife.ABSENT, ModelLife.FAILED}


def run(seed, make, gate, clock, alone):
    """One day to its end."""
    random = Random(seed)
    day = Day(make, gate, clock, random)
    for event in random.choices(list(EVENTS), EVENTS.values(), k=random.randint(20, 120)):
        getattr(day, event)()
        day.check()
    day.end()
    day.check_outputs(alone)
    day.leave()


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 20, 10))
def test_whatever_happens_each_request_gets_what_it_gets_alone_and_the_books_are_right(
    first, tmp_path, monkeypatch
):
    """SPEC R3, R4, R8, L1, L6, M4, M6, C14: none lost, none doubled, no model that is not on the books."""
    check_days(range(first, first + 10), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 2000, 100))
def test_many_more_such_days(first, tmp_path, monkeypatch):
    """The same."""
    check_days(range(first, first + 100), tmp_path, monkeypatch)


def check_days(seeds, tmp_path, monkeypatch):
    """One day for each seed."""
    clock, gate = Clock(monkeypatch, is_still=True), Gate(monkeypatch)
    gate.open()
    texts = {}

    def alone(prompt):
        if prompt not in texts:
            machines = Machines(tmp_path / f"alone{len(texts)}")
            texts[prompt] = machines.alone(n_ctx=512, prompt=prompt, max_tokens=max(NUM_TOKENS)).tokens[0]
            machines.close()
        return texts[prompt]

    for seed in seeds:
        machines = Machines(tmp_path / str(seed))
        try:
            run(seed, machines, gate, clock, alone)
        except Exception as error:
            raise AssertionError(f"the day of seed {seed} ends wrong") from error
        finally:
            machines.close()
