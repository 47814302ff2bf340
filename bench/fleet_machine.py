"""A machine as the simulator has it: slots, prompts and answers that share steps, a cache of prefixes.

Steps are not played one by one. Between two events (one comes, a prompt is read, an answer ends) each row
gets tokens at a constant rate, which the step costs and the rules of the planner give: people before jobs,
prompts in slices that a step's time has room for, a tenth of people's time for jobs, one job parked for each
person who finds no slot. A request that needs a prefix which another computes waits for it.
Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from stoker.ipc.request import Priority
from stoker.scheduler.plan import BACKGROUND_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.fleet_trace import Turn
    from stoker.scheduler.cost import StepCost

N_BATCH = 512
STEP_S = 0.15
"""A step with prompts in it while somebody reads: three targets of 50 ms, as the policy `balanced` has it."""
EPSILON = 1e-6
PEOPLE, JOBS = 0, 1


class Speeds(NamedTuple):
    """Tokens a second: a row of people's and of jobs', all prompts of people's, all of jobs'."""

    row: tuple[float, float]
    prompts: tuple[float, float]


class Pace:
    """Speeds of machines that are alike, by what they have to do.

    Args:
        cost: of steps.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._known: dict[tuple[int, int, bool, bool], Speeds] = {}

    def __repr__(self) -> str:
        return f"<Pace {self._cost!r}>"

    def speeds(self, num_people: int, num_jobs: int, reads: tuple[bool, bool]) -> Speeds:
        """With so many rows of each class, and prompts of it or not."""
        key = (num_people, num_jobs, *reads)
        found = self._known.get(key)
        if found is None:
            work = self._with_people if num_people or reads[PEOPLE] else self._jobs_alone
            found = self._known[key] = work(num_people, num_jobs, reads)
        return found

    def _step_s(self, num_tokens: float) -> float:
        return self._cost.predict(num_tokens) or 0.0

    def _slice(self, num_rows: int) -> int:
        if not num_rows:
            return N_BATCH
        return max(1, self._cost.tokens_within(STEP_S, N_BATCH) - num_rows)

    def _with_people(self, num_people: int, num_jobs: int, reads: tuple[bool, bool]) -> Speeds:
        read = self._slice(num_people) if reads[PEOPLE] else 0
        step_s = self._step_s(num_people + read)
        job_row = job_read = extra_s = 0.0
        if num_jobs or reads[JOBS]:
            extra_s = BACKGROUND_SHARE * step_s
            with_jobs_s = self._step_s(num_people + read + max(1, num_jobs))
            token_s = max((with_jobs_s - step_s) / max(1, num_jobs), 1e-9)
            num_tokens = min(extra_s / token_s, N_BATCH)
            job_row = min(1.0, num_tokens / num_jobs) if num_jobs else 0.0
            job_read = max(0.0, num_tokens - job_row * num_jobs) if reads[JOBS] else 0.0
        every_s = step_s + extra_s
        row = 1 / every_s if num_people else 0.0
        return Speeds((row, job_row / every_s), (read / every_s, job_read / every_s))

    def _jobs_alone(self, num_people: int, num_jobs: int, reads: tuple[bool, bool]) -> Speeds:
        assert num_people == 0
        read = max(1, N_BATCH - num_jobs) if reads[JOBS] else 0
        step_s = self._step_s(num_jobs + read)
        return Speeds((0.0, 1 / step_s if num_jobs else 0.0), (0.0, read / step_s))


class Job:
    """A turn that a machine has.

    Attributes:
        prompt_left, answer_left: tokens to compute.
        cached: of its prompt, what was there.
        until: where its class's clock stands when the prompt, or the answer, is done.
        missing: hashes of its chain that it computes.
    """

    __slots__ = (
        "answer_left",
        "cached",
        "first_s",
        "missing",
        "num_moves",
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

    def __repr__(self) -> str:
        left = f"{self.prompt_left:.0f} and {self.answer_left:.0f}"
        return f"<Job of {self.turn.conversation.number}, {left} left>"


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
        self._seq = 0
        self._rows: tuple[list[tuple[float, int, Job]], list[tuple[float, int, Job]]] = ([], [])
        self._reads: tuple[list[tuple[float, int, Job]], list[tuple[float, int, Job]]] = ([], [])
        self._waits: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self._parked: deque[Job] = deque()
        self._computing: dict[int, tuple[Job, list[Job]]] = {}
        self._row_clock = [0.0, 0.0]
        self._read_clock = [0.0, 0.0]
        self._speeds = Speeds((0.0, 0.0), (0.0, 0.0))

    def __repr__(self) -> str:
        return f"<Machine {self.name}, {self.num_running(PEOPLE)} people, {self.num_running(JOBS)} jobs>"

    # ------------------------------------------------------------ what is asked

    def num_running(self, rank: int) -> int:
        """Of a class, those that have a slot."""
        return len(self._rows[rank]) + len(self._reads[rank])

    def num_waiting(self, rank: int) -> int:
        """Of a class, those that have none."""
        parked = len(self._parked) if rank == JOBS else 0
        return (
            len(self._waits[rank])
            + parked
            + sum(job.rank == rank for _, jobs in self._computing.values() for job in jobs)
        )

    def next_s(self) -> float | None:
        """When something will have ended, as things are; None: nothing runs."""
        best: float | None = None
        for heaps, clock, speeds in (
            (self._rows, self._row_clock, self._speeds.row),
            (self._reads, self._read_clock, self._speeds_a_prompt()),
        ):
            for rank in (PEOPLE, JOBS):
                if heaps[rank] and speeds[rank] > 0:
                    left_s = max(0.0, heaps[rank][0][0] - clock[rank]) / speeds[rank]
                    best = left_s if best is None or left_s < best else best
        return None if best is None else self._now + best

    def _speeds_a_prompt(self) -> tuple[float, float]:
        people, jobs = self._speeds.prompts
        return people / max(1, len(self._reads[PEOPLE])), jobs / max(1, len(self._reads[JOBS]))

    # ------------------------------------------------------------ what changes

    def advance(self, now: float) -> list[Job]:
        """Compute until now; those that have ended."""
        passed_s = now - self._now
        self._now = now
        if passed_s > 0:
            each = self._speeds_a_prompt()
            for rank in (PEOPLE, JOBS):
                self._row_clock[rank] += self._speeds.row[rank] * passed_s
                self._read_clock[rank] += each[rank] * passed_s
            if any(self._rows) or any(self._reads):
                self.busy_s += passed_s
        ended: list[Job] = []
        for rank in (PEOPLE, JOBS):
            reads, rows = self._reads[rank], self._rows[rank]
            while reads and reads[0][0] <= self._read_clock[rank] + EPSILON:
                self._read(heappop(reads)[2])
            while rows and rows[0][0] <= self._row_clock[rank] + EPSILON:
                ended.append(heappop(rows)[2])
        for job in ended:
            turn = job.turn
            talk = turn.conversation
            self.num_served += 1
            self.cache.used(turn.chain, turn.tokens)
            if talk.turns_left > 0:  # the answer is a part of what comes next
                self.cache.used([turn.answer_key], [turn.answer])
        self._admit()
        return ended

    def take(self, job: Job) -> None:
        """A request has come; call `advance` first and after."""
        self._waits[job.rank].append(job)

    def lose(self) -> list[Job]:
        """Everything that it has goes elsewhere; what it computed of answers is known to the door."""
        jobs = [job for heap in (*self._reads, *self._rows) for _, _, job in heap]
        for rank in (PEOPLE, JOBS):
            for until, _, job in self._rows[rank]:
                job.answer_left = max(1.0, until - self._row_clock[rank])
        jobs += [*self._waits[PEOPLE], *self._waits[JOBS], *self._parked]
        jobs += [job for _, waiting in self._computing.values() for job in waiting]
        for heap in (*self._reads, *self._rows):
            heap.clear()
        for line in (*self._waits, self._parked):
            line.clear()
        self._computing.clear()
        self._set_speeds()
        return jobs

    def forget(self) -> None:
        """Its engine starts anew, without what was in memory."""
        self.cache = PrefixCache(self._cache_tokens)

    # ------------------------------------------------------------ slots

    def _read(self, job: Job) -> None:
        """A prompt is computed: its first token is there, and others may go on from it."""
        turn = job.turn
        self.cache.used(turn.chain, turn.tokens)
        if job.first_s is None:
            job.first_s = self._now
        job.prompt_left = 0.0
        self._write(job)
        for key in job.missing:
            _, waiting = self._computing.pop(key)
            for one in reversed(waiting):
                self._waits[one.rank].appendleft(one)
        job.missing = ()

    def _write(self, job: Job) -> None:
        self._seq += 1
        job.until = self._row_clock[job.rank] + max(0.0, job.answer_left - 1)
        heappush(self._rows[job.rank], (job.until, self._seq, job))

    def _admit(self) -> None:
        people, jobs = self._waits
        while people and (self._num_free() > 0 or self._park()):
            self._start(people.popleft())
        while self._parked and not people and self._num_free() > 0:
            self._write(self._parked.popleft())
        while jobs and not people and self._num_free() > 0:
            self._start(jobs.popleft())
        self._set_speeds()

    def _num_free(self) -> int:
        return self.num_slots - sum(map(len, self._rows)) - sum(map(len, self._reads))

    def _park(self) -> bool:
        """A job that writes gives its slot to a person; whether there is one."""
        rows = self._rows[JOBS]
        if not rows:
            return False
        until, _, job = rows.pop()  # the last of a heap is no larger than any of its leaves: it stays one
        job.answer_left = max(1.0, until - self._row_clock[JOBS])
        self._parked.append(job)
        return True

    def _start(self, job: Job) -> None:
        chain, tokens = job.turn.chain, job.turn.tokens
        held = self.cache.held(chain)
        if held < len(chain) and chain[held] in self._computing:
            leader, waiting = self._computing[chain[held]]
            waiting.append(job)
            if job.rank == PEOPLE and leader.rank == JOBS:
                self._raise(leader)
            return
        job.missing = chain[held:]
        for key in job.missing:
            self._computing[key] = (job, [])
        job.cached = sum(tokens[:held])
        written = job.turn.answer - job.answer_left  # of one that began elsewhere
        job.prompt_left = max(1.0, sum(tokens) - job.cached + written)
        self._seq += 1
        job.until = self._read_clock[job.rank] + job.prompt_left
        heappush(self._reads[job.rank], (job.until, self._seq, job))

    def _raise(self, leader: Job) -> None:
        """A job that a person follows is read as theirs are, as the scheduler has it."""
        reads = self._reads[JOBS]
        found = [entry for entry in reads if entry[2] is leader]
        if found:
            reads.remove(found[0])
            heapify(reads)
            leader.until += self._read_clock[PEOPLE] - self._read_clock[JOBS]
            heappush(self._reads[PEOPLE], (leader.until, found[0][1], leader))

    def _set_speeds(self) -> None:
        rows, reads = self._rows, self._reads
        self._speeds = self._pace.speeds(
            len(rows[PEOPLE]), len(rows[JOBS]), (bool(reads[PEOPLE]), bool(reads[JOBS]))
        )
