"""Random histories of requests on one model: arrivals that share prefixes, forks, pauses, parking, restarts.

`Machine` does with a backend what the resident does, with little room and a disk that answers when it likes;
a subclass says what requests ask for and what their rows have to be.
"""

import stepping
from stoker.cache.disk.tier import Read, Remove, Write
from stoker.cache.entry import Entry
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.ipc.model import CacheMode, Policy
from stoker.ipc.request import FinishReason, Priority
from stoker.kv.sequence import ParkForm, SequenceKey, SequenceState
from stoker.machine.ledger import Ledger
from stoker.scheduler.scheduler import Scheduler

SPACES = [b"a" * 32, b"b" * 32]
PAUSED_STEPS = 15
"""After so many steps a paused sequence is resumed, lest a history never ends."""

EVENTS = {
    "arrive": 8,
    "choices": 1,
    "steps": 8,
    "cancel": 1,
    "pause": 2,
    "resume": 2,
    "park": 3,
    "fail": 1,
    "expire": 1,
    "restart": 1,
}
"""What may happen, and how often beside the rest."""


def make_history(random, num_events=(10, 60), most_tokens=50):
    """Some tens of events: name and arguments."""
    names = random.choices(list(EVENTS), EVENTS.values(), k=random.randint(*num_events))
    return [(name, *arguments_of(name, random, most_tokens)) for name in names]


def arguments_of(name, random, most_tokens):
    """What an event takes."""
    match name:
        case "arrive" | "choices":
            prompt = random.randint(0, 10**6)
            num_tokens = random.randint(1, most_tokens)
            priority = random.choice(list(Priority))
            habits = random.random() < 0.2, random.random() < 0.9, random.choice(SPACES)
            return prompt, num_tokens, priority, habits
        case "steps":
            return (random.randint(1, 12),)
        case "park":
            return random.randint(0, 30), random.choice(list(ParkForm))
        case _:
            return (random.randint(0, 30),)


def make_options(random, cell_bytes):
    """Limits of the machine."""
    return {
        "park_bytes": random.choice([0, 60 * cell_bytes, 2**30]),
        "policy": random.choice(list(Policy)),
        "background_patience_s": random.choice([0.0, 5.0, 1000.0]),
        "cache_mode": random.choice([*CacheMode, CacheMode.BOTH]),
        "ram_bytes": random.choice([0, 300 * cell_bytes, 2**30]),
        "disk_bytes": random.choice([0, 400 * cell_bytes, 2**30]),
    }


class ModelLookup:
    """A disk that answers when it likes, and now and then has lost what it held."""

    def __init__(self, cache, random):
        self.cache = cache
        self.random = random
        self.files = {}
        self.waiting = []

    def turn(self, now):
        """Take new orders, and end some of those that wait."""
        self.cache.tend(now)
        self.waiting += self.cache.disk.take_ops()
        while self.waiting and self.random.random() < 0.5:
            self.end(self.waiting.pop(0), now)

    def end(self, order, now):
        """One order, well or not."""
        match order:
            case Write(entry):
                self.write(entry)
            case Read(entry):
                _, data = self.files.get(entry.file, (None, None))
                if data is None or self.random.random() < 0.2:
                    self.cache.unreadable(entry)
                else:
                    self.cache.fetched(entry, data, now)
            case Remove(file):
                self.files.pop(file, None)

    def write(self, entry):
        """A file of the state and a head, or none."""
        if self.random.random() < 0.1:
            self.cache.disk.write_failed(entry, self.random.choice(["", "", "the disk is full"]))
            return
        name = f"file {self.random.random()}"
        data = bytes(entry.data)
        self.files[name] = entry, data
        self.cache.written(entry, name, len(data) + 10)

    def restart(self, cache, now):
        """Another server opens the folder; what was on its way is not heard of again."""
        self.cache, self.waiting = cache, []
        cache.found([_as_found(name, *held) for name, held in self.files.items()], now)


def _as_found(name, entry, data):
    """What the head of a file says of it."""
    return Entry(
        namespace=entry.namespace,
        model=entry.model,
        source=entry.source,
        key=entry.key,
        size_bytes=len(data),
        file=name,
        file_bytes=len(data) + 10,
        is_exact=entry.is_exact,
        is_background=entry.is_background,
    )


class Machine(stepping.Machine):
    """With little room, and whatever may happen to those who want it."""

    def __init__(self, backend, options, random):
        limits = CacheLimits(ram_bytes=options.pop("ram_bytes"), disk_bytes=options.pop("disk_bytes"))
        settings = {"num_slots": 3, "max_queue": 1000, "target_step_s": 0.012}
        super().__init__(backend, limits, **settings | options)
        self.shelf = ModelLookup(self.cache, random)
        self.paused_at = {}

    @property
    def live(self):
        """Those that have not ended."""
        return [s for s in self.sequences if s.state is not SequenceState.DONE]

    def prompt(self, number):
        """The tokens of one of many prompts, of which some begin alike."""
        raise NotImplementedError

    def arrive(self, number, num_tokens, priority, habits):
        """A request for `num_tokens` after a prompt."""
        return self.enter(self.prompt(number), num_tokens, priority, habits)

    def enter(self, prompt, num_tokens, priority, habits, **fields):
        """A sequence with these habits: whether it ends if preempted, whether it shares, in which space."""
        ends_if_preempted, shares, space = habits
        return self.enter_prompt(
            prompt,
            num_tokens,
            priority=priority,
            ends_if_preempted=ends_if_preempted,
            namespace=space,
            shares=shares and self.scheduler.limits.cache_mode is not CacheMode.OFF,
            **fields,
        )

    def choices(self, number, num_tokens, priority, habits):
        """A request of two choices: the second goes on from the first one's prompt."""
        leader = self.arrive(number, num_tokens, priority, habits)
        key = SequenceKey(leader.key.request_id, 1)
        self.enter(self.prompt(number), 1 + num_tokens // 2, priority, habits, leader=leader, key=key)

    def pick(self, at, *states):
        """One of the live sequences in these states, if there is one."""
        candidates = [s for s in self.live if s.state in states]
        return candidates[at % len(candidates)] if candidates else None

    def cancel(self, at):
        """A client asks, or leaves."""
        if sequence := self.pick(at, *SequenceState):
            self.scheduler.retire(sequence, FinishReason.CANCELLED, self.now)

    def fail(self, at):
        """A native failure of one sequence."""
        if sequence := self.pick(at, SequenceState.PREFILL, SequenceState.DECODE):
            self.scheduler.retire(sequence, FinishReason.ERROR, self.now)

    def expire(self, at):
        """A deadline passes, which the table of requests sees."""
        if sequence := self.pick(at, *SequenceState):
            self.scheduler.retire(sequence, FinishReason.ERROR, self.now)

    def pause(self, at):
        """Stand still."""
        moving = set(SequenceState) - {SequenceState.PAUSED, SequenceState.DONE}
        if sequence := self.pick(at, *moving):
            self.scheduler.pause(sequence, self.now)
            self.paused_at[sequence] = self.now

    def resume(self, at):
        """Go on."""
        if sequence := self.pick(at, SequenceState.PAUSED):
            self.scheduler.resume(sequence, self.now)

    def park(self, at, form):
        """Give way, kept in that form."""
        if sequence := self.pick(at, SequenceState.PREFILL, SequenceState.DECODE):
            self.carry_out(self.scheduler.park(sequence, form, self.now))

    def restart(self, _):
        """The engine dies: what is left is the disk, and every open request with the tokens it has."""
        dead = self.scheduler
        for slot in dead.slots.slots:
            self.backend.drop(slot.id)
        self.cache = PrefixCache(self.cache.limits, Ledger())
        self.shelf.restart(self.cache, self.now)
        self.scheduler = Scheduler(dead.limits, self.cache)
        again = {}
        for at, sequence in enumerate(self.sequences):
            if sequence.state is not SequenceState.DONE:
                again[sequence] = self.sequences[at] = self._replayed(sequence, again)
                self.scheduler.enqueue(self.sequences[at], self.now)

    @staticmethod
    def _replayed(sequence, again):
        """It as it enters a fresh engine, whose clock goes on."""
        fresh = stepping.Sequence(key=sequence.key, tokens=sequence.tokens, num_prompt=sequence.num_prompt)
        for kept in ("priority", "arrival_s", "num_wanted", "ends_if_preempted", "namespace", "shares"):
            setattr(fresh, kept, getattr(sequence, kept))
        fresh.leader = again.get(sequence.leader)
        return fresh

    def steps(self, num_steps):
        """Steps while there is work, at most `num_steps`."""
        for _ in range(num_steps):
            for sequence in list(self.scheduler.paused):
                if self.now >= self.paused_at[sequence] + PAUSED_STEPS:
                    self.scheduler.resume(sequence, self.now)
            if not self.live:
                return
            self.step()

    def tend_disk(self):
        """It answers when it likes."""
        self.shelf.turn(self.now)

    def play(self, history):
        """All of it, and what is left to do after it; every request has ended then."""
        for event, *arguments in [*history, ("steps", 5000)]:
            getattr(self, event)(*arguments)
        for sequence in self.sequences:
            assert sequence.state is SequenceState.DONE
            if sequence.finish_reason is FinishReason.LENGTH:
                assert sequence.num_generated == sequence.num_wanted
            assert sequence.finish_reason is not FinishReason.PREEMPTED or sequence.ends_if_preempted
        assert self.cache.parked_bytes == 0
        assert not any(set(entry.leases) - {"disk"} for entry in self.cache.index)
        assert not self.scheduler.slots.parked()
