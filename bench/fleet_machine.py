"""A machine as the simulator has it: slots, prompts and answers that share steps, a cache of prefixes.

Steps are not played one by one. Between two events (one comes, a prompt is read, an answer ends) each row
gets tokens at a constant rate, which the step costs and the rules of the planner give: people before jobs,
prompts in slices that a step's time has room for, a tenth of people's time for jobs.

Who runs is decided as by `stoker.scheduler.scheduler`: a person who finds no slot takes that of the youngest
job, also in the middle of its prompt; what is parked keeps what it has computed and goes on before newcomers
of its class; a request that needs a prefix which another computes waits for it in its place, and where a
person does the other is no job meanwhile. Left out: cells that run out, and the token that a job is owed
after half a minute without one.
Pure: time is an argument.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from stoker.ipc.request import Priority
from stoker.scheduler.plan import BACKGROUND_SHARE, StepBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.fleet_trace import Turn
    from stoker.scheduler.cost import StepCost

N_BATCH = 512
EPSILON = 1e-6
PEOPLE, JOBS = 0, 1


class Speeds(NamedTuple):
    """Tokens a second: a row of people's and of jobs', all prompts of people's, all of jobs'."""

    row: tuple[float, float]
    prompts: tuple[float, float]


class Work(NamedTuple):
    """How many write and how many prompts are read, of people and of jobs."""

    people: int = 0
    people_prompts: int = 0
    jobs: int = 0
    jobs_prompts: int = 0


class Pace:
    """Speeds of machines that are alike, by what they have to do.

    Args:
        cost: of steps.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._budget = StepBudget(cost, N_BATCH)
        self._known: dict[Work, Speeds] = {}

    def __repr__(self) -> str:
        return f"<Pace {self._cost!r}>"

    def speeds(self, work: Work) -> Speeds:
        """With so much to do."""
        found = self._known.get(work)
        if found is None:
            has_people = work.people or work.people_prompts
            found = self._known[work] = self._with_people(work) if has_people else self._jobs_alone(work)
        return found

    def _step_s(self, num_tokens: float) -> float:
        return self._cost.predict(num_tokens) or 0.0

    def _with_people(self, work: Work) -> Speeds:
        read = self._budget.prefill(work.people, work.people_prompts) if work.people_prompts else 0
        num_tokens = work.people + read
        num_joined = self._num_joined(work, num_tokens)
        every_s = self._step_s(num_tokens + num_joined)
        row = 1 / every_s if work.people else 0.0
        job_row = min(1.0, num_joined / work.jobs) if work.jobs else 0.0
        job_read = max(0.0, num_joined - job_row * work.jobs) if work.jobs_prompts else 0.0
        return Speeds((row, job_row / every_s), (read / every_s, job_read / every_s))

    def _num_joined(self, work: Work, num_tokens: int) -> float:
        """Tokens of jobs beside people's: in a tenth of their time, within the target where some write."""
        if not (work.jobs or work.jobs_prompts):
            return 0.0
        alone_s = self._step_s(num_tokens)
        token_s = self._step_s(num_tokens + 1) - alone_s
        num_joined = min(BACKGROUND_SHARE * alone_s / max(token_s, 1e-9), N_BATCH - num_tokens)
        if work.people:
            num_joined = min(
                num_joined, self._cost.tokens_within(self._budget.target_s, N_BATCH) - num_tokens
            )
        return max(0.0, num_joined)

    def _jobs_alone(self, work: Work) -> Speeds:
        read = max(1, N_BATCH - work.jobs) if work.jobs_prompts else 0
        step_s = self._step_s(work.jobs + read)
        return Speeds((0.0, 1 / step_s if work.jobs else 0.0), (0.0, read / step_s))


class Job:
    """A turn that a machine has.

    Attributes:
        prompt_left, answer_left: tokens to compute.
        cached: of its prompt, what was there.
        until: where its class's clock stands when the prompt, or the answer, is done.
        missing: hashes of its chain that it computes.
        number: of its arrival at the machine.
        is_parked: it has run, and gave its slot away.
    """

    __slots__ = (
        "answer_left",
        "cached",
        "first_s",
        "is_parked",
        "missing",
        "num_moves",
        "number",
        "prompt_left",
        "rank",
        "turn",
        "until",
    )

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.rank = JOBS if turn.conversation.priority is Priority.BACKGROUND else PEOPLE
        self.prompt_left = 0.0
        self.answer_left = float(turn.answer)
        self.cached = 0
        self.until = 0.0
        self.first_s: float | None = None
        self.missing: Sequence[int] = ()
        self.num_moves = 0
        self.number = 0
        self.is_parked = False

    def __repr__(self) -> str:
        left = f"{self.prompt_left:.0f} and {self.answer_left:.0f}"
        return f"<Job of {self.turn.conversation.number}, {left} left>"

    @property
    def place(self) -> tuple[int, bool, int]:
        """Order of those that have no slot: people, in a class what has run, then as they came."""
        return self.rank, not self.is_parked, self.number


class PrefixCache:
    """Which parts of prompts are kept, and how many tokens; the one that was not used for longest goes."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self.num_tokens = 0

    def __repr__(self) -> str:
        return f"<PrefixCache of {len(self._tokens)} parts, {self.num_tokens} tokens>"

    def __contains__(self, key: int) -> bool:
        return key in self._tokens

    def used(self, chain: Sequence[int], tokens: Sequence[int]) -> None:
        """These are kept, the first of them longest."""
        kept = self._tokens
        for key, num in zip(reversed(chain), reversed(tokens), strict=True):
            if key in kept:
                kept.move_to_end(key)
            else:
                self.num_tokens += num
                kept[key] = num
        while self.num_tokens > self._max_tokens and kept:
            self.num_tokens -= kept.popitem(last=False)[1]

    def held(self, chain: Sequence[int]) -> int:
        """How many of the first parts are kept."""
        for at, key in enumerate(chain):
            if key not in self._tokens:
                return at
        return len(chain)

    def newest(self, num: int) -> frozenset[int]:
        """Hashes of what was used last."""
        keys = reversed(self._tokens)
        return frozenset(key for key, _ in zip(keys, range(num), strict=False))


class Rows:
    """Those of a class that write, or whose prompts are read: all get tokens at one rate, none has its own.

    A clock counts the tokens that each was given since the beginning; `Job.until` is where it stands when
    a job has all that it needs.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._clock = 0.0

    def __repr__(self) -> str:
        return f"<Rows {len(self._heap)}>"

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, job: Job) -> bool:
        return any(one is job for _, _, one in self._heap)

    def jobs(self) -> list[Job]:
        """All of them."""
        return [job for _, _, job in self._heap]

    def add(self, job: Job, num_tokens: float) -> None:
        """It needs so many tokens."""
        job.until = self._clock + num_tokens
        heappush(self._heap, (job.until, job.number, job))

    def left(self, job: Job) -> float:
        """Tokens that it still needs."""
        return job.until - self._clock

    def remove(self, job: Job) -> float:
        """It goes; returns what it still needed."""
        self._heap.remove((job.until, job.number, job))
        heapify(self._heap)
        return self.left(job)

    def clear(self) -> None:
        """All of them go."""
        self._heap.clear()

    def next_left(self) -> float:
        """Tokens that the first to be done needs."""
        return max(0.0, self._heap[0][0] - self._clock)

    def advance(self, num_tokens: float) -> None:
        """Each was given so many."""
        self._clock += num_tokens

    def done(self) -> Job | None:
        """One that has all that it needs, which goes; None: there is none."""
        if self._heap and self._heap[0][0] <= self._clock + EPSILON:
            return heappop(self._heap)[2]
        return None


class Machine:
    """One of the fleet.

    Args:
        name: by which the router knows it.
        pace: its speeds.
        num_slots: sequences at once.
        cache_tokens: that its cache holds.
    """

    def __init__(self, name: str, pace: Pace, num_slots: int, cache_tokens: int) -> None:
        self.name = name
        self.cache = PrefixCache(cache_tokens)
        self.num_slots = num_slots
        self.version = 0
        self.is_up = True
        self.is_draining = False
        self.is_suspended = False
        self.num_served = 0
        self.busy_s = 0.0
        self._cache_tokens = cache_tokens
        self._pace = pace
        self._now = 0.0
        self._num_taken = 0
        self._rows = (Rows(), Rows())
        self._reads = (Rows(), Rows())
        self._queue: list[Job] = []
        self._computing: dict[int, Job] = {}
        self._speeds = Speeds((0.0, 0.0), (0.0, 0.0))

    def __repr__(self) -> str:
        return f"<Machine {self.name}, {self.num_running(PEOPLE)} people, {self.num_running(JOBS)} jobs>"

    # ------------------------------------------------------------ what is asked

    def num_running(self, rank: int) -> int:
        """Of a class, those that have a slot."""
        return len(self._rows[rank]) + len(self._reads[rank])

    def num_waiting(self, rank: int) -> int:
        """Of a class, those that have none."""
        return sum(job.rank == rank for job in self._queue)

    def next_s(self) -> float | None:
        """When something will have ended, as things are; None: nothing runs."""
        each = self._speeds_a_prompt()
        soonest_s = min(
            (
                rows.next_left() / speed
                for rows, speed in zip((*self._rows, *self._reads), (*self._speeds.row, *each), strict=True)
                if rows and speed > 0
            ),
            default=None,
        )
        return None if soonest_s is None else self._now + soonest_s

    def _speeds_a_prompt(self) -> tuple[float, float]:
        people, jobs = self._speeds.prompts
        return people / max(1, len(self._reads[PEOPLE])), jobs / max(1, len(self._reads[JOBS]))

    # ------------------------------------------------------------ what changes

    def advance(self, now: float) -> list[Job]:
        """Compute until now; those that have ended."""
        self._compute(now - self._now)
        self._now = now
        ended: list[Job] = []
        for rank in (PEOPLE, JOBS):
            while (job := self._reads[rank].done()) is not None:
                self._read(job)
            while (job := self._rows[rank].done()) is not None:
                self._answered(job)
                ended.append(job)
        self._admit()
        return ended

    def _compute(self, passed_s: float) -> None:
        if passed_s <= 0:
            return
        each = self._speeds_a_prompt()
        for rank in (PEOPLE, JOBS):
            self._rows[rank].advance(self._speeds.row[rank] * passed_s)
            self._reads[rank].advance(each[rank] * passed_s)
        if self._num_busy():
            self.busy_s += passed_s

    def take(self, job: Job) -> None:
        """A request has come; call `advance` first and after."""
        self._num_taken += 1
        job.number, job.is_parked = self._num_taken, False
        insort(self._queue, job, key=_PLACE)

    def lose(self) -> list[Job]:
        """Everything that it has goes elsewhere; what it computed of answers is known to the door."""
        jobs = [job for rows in (*self._reads, *self._rows) for job in rows.jobs()] + self._queue
        for rows in self._rows:
            for job in rows.jobs():
                job.answer_left = max(1.0, rows.left(job))
        for rows in (*self._reads, *self._rows):
            rows.clear()
        self._queue.clear()
        self._computing.clear()
        self._set_speeds()
        return jobs

    def forget(self) -> None:
        """Its engine starts anew, without what was in memory."""
        self.cache = PrefixCache(self._cache_tokens)

    def _read(self, job: Job) -> None:
        """A prompt is computed: its first token is there, and others may go on from it."""
        self.cache.used(job.turn.chain, job.turn.tokens)
        if job.first_s is None:
            job.first_s = self._now
        job.prompt_left = 0.0
        self._no_longer_computes(job)
        self._rows[job.rank].add(job, max(0.0, job.answer_left - 1))

    def _answered(self, job: Job) -> None:
        turn = job.turn
        self.num_served += 1
        self.cache.used(turn.chain, turn.tokens)
        if turn.conversation.turns_left > 0:  # the answer is a part of what comes next
            self.cache.used([turn.answer_key], [turn.answer])

    # ------------------------------------------------------------ slots

    def _admit(self) -> None:
        """In the order of the queue, while there is a place or a job gives its own, as `Scheduler` does."""
        num_ahead = 0  # what waits for a prefix keeps its place
        for job in list(self._queue):
            if not (self._has_place(num_ahead) or self._displaceable(job)):
                break
            if self._awaits_prefix(job):
                num_ahead += 1
            elif self._makes_place(job, num_ahead):
                self._queue.remove(job)
                self._start(job)
            else:
                break
        self._set_speeds()

    def _num_busy(self) -> int:
        return sum(map(len, (*self._rows, *self._reads)))

    def _has_place(self, num_ahead: int) -> bool:
        return self._num_busy() + num_ahead < self.num_slots

    def _displaceable(self, job: Job) -> list[Job]:
        """Jobs that would give way to it; a prompt that a person waits for is none."""
        if job.rank == JOBS:
            return []
        return [*self._rows[JOBS].jobs(), *self._reads[JOBS].jobs()]

    def _makes_place(self, job: Job, num_ahead: int) -> bool:
        while not self._has_place(num_ahead):
            victims = self._displaceable(job)
            if not self._has_place(num_ahead - len(victims)):
                return False
            self._park(max(victims, key=_NUMBER))
        return True

    def _park(self, job: Job) -> None:
        """A job gives its slot away, and keeps what it has computed."""
        if job in self._reads[JOBS]:
            job.prompt_left = max(EPSILON, self._reads[JOBS].remove(job))
            self._no_longer_computes(job)
        else:
            job.answer_left = 1 + max(0.0, self._rows[JOBS].remove(job))
        job.is_parked = True
        insort(self._queue, job, key=_PLACE)

    def _awaits_prefix(self, job: Job) -> bool:
        """Whether another computes what it goes on from; for a person that is then as urgent as their own."""
        chain = job.turn.chain
        held = self.cache.held(chain)
        leader = self._computing.get(chain[held]) if held < len(chain) else None
        if leader is None or job.is_parked:
            return False
        if job.rank == PEOPLE and leader in self._reads[JOBS]:
            self._reads[PEOPLE].add(leader, self._reads[JOBS].remove(leader))
        return True

    def _start(self, job: Job) -> None:
        chain, tokens = job.turn.chain, job.turn.tokens
        if job.is_parked:
            job.is_parked = False
            if not job.prompt_left:
                self._rows[job.rank].add(job, job.answer_left - 1)
                return
        else:
            held = self.cache.held(chain)
            job.missing, job.cached = chain[held:], sum(tokens[:held])
            written = job.turn.answer - job.answer_left  # of one that began elsewhere
            job.prompt_left = max(1.0, sum(tokens) - job.cached + written)
        for key in job.missing:
            self._computing.setdefault(key, job)
        self._reads[job.rank].add(job, job.prompt_left)

    def _no_longer_computes(self, job: Job) -> None:
        for key in job.missing:
            if self._computing.get(key) is job:
                del self._computing[key]

    def _set_speeds(self) -> None:
        people, jobs = map(len, self._rows)
        people_prompts, jobs_prompts = map(len, self._reads)
        self._speeds = self._pace.speeds(Work(people, people_prompts, jobs, jobs_prompts))


_NUMBER = attrgetter("number")
_PLACE = attrgetter("place")
