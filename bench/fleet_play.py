"""Plays a fleet as events: requests come, a policy gives them to machines, machines die, drain and sleep.

Nothing is computed and no time passes but that of the policy, which is measured in processor time of its
thread. Owns the order of events. What a machine makes of its requests is `bench/fleet_machine.py`'s, what is
asked `bench/fleet_trace.py`'s, what is counted `bench/fleet_figures.py`'s.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.fleet_figures import Tally, figures
from bench.fleet_machine import JOBS, PEOPLE, Job, Machine, Pace
from bench.fleet_policies import MODEL, POLICIES, Policy
from bench.fleet_trace import ANSWER_TOKENS, PROMPT_TOKENS, Shape, Trace
from stoker.routing.load import ByClass, PeerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.fleet_costs import Costs
    from bench.fleet_trace import Arrival, Conversation

PUBLISH_S = 1.0
MOST_PUBLISHED = 2_000_000
"""States told in one run at most; machines tell less often in a longer one."""
DETECT_S = 2.0
"""From a machine's death until the door knows."""
GRACE_S = 10.0
"""A request of a suspended machine goes on elsewhere after that."""
AWAY_S = 60.0
PROGRESS_S = 5.0
_MODELS = frozenset({MODEL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is played.

    Attributes:
        load: share of the machines' time that the requests would take without any cache.
        deaths, drains, suspends: machines that this happens to, at any time.
        warm_up: part of the requests that are not counted: caches are empty at first.
        site: what names of machines begin with; another one gives them other places on the ring.
    """

    machines: int
    requests: int
    costs: Costs
    shape: Shape
    load: float = 0.7
    seed: int = 1
    deaths: int = 0
    drains: int = 0
    suspends: int = 0
    warm_up: float = 0.2
    site: str = "m"

    @property
    def rate(self) -> float:
        """Requests a second of all machines."""
        lengths = [self.shape.scale * fmean(each) for each in (PROMPT_TOKENS, ANSWER_TOKENS)]
        return self.load * self.machines / self.costs.cold_s(*lengths)

    @property
    def lasts_s(self) -> float:
        """Until the last request comes."""
        return self.requests / self.rate

    def trace(self) -> Trace:
        """What is asked; in its middle third new conversations begin alike, if the shape has such."""
        return Trace(self.shape, self.rate, self.seed, (self.lasts_s / 3, self.lasts_s * 2 / 3))


class Timeline:
    """What will happen, in the order of its time.

    Attributes:
        now: when the last thing happened.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0

    def __repr__(self) -> str:
        return f"<Timeline at {self.now:.1f} s, {len(self._events)} to come>"

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Something will happen then, after what was told before of the same time."""
        self.num_events += 1
        heappush(self._events, (at_s, self.num_events, action))

    def after(self, wait_s: float, action: Callable[[], None]) -> None:
        """The same, from now."""
        self.at(self.now + wait_s, action)

    def step(self) -> bool:
        """The next thing happens; False: there is none."""
        if not self._events:
            return False
        self.now, _, action = heappop(self._events)
        action()
        return True


class Fleet:
    """Plays a plan with a policy.

    Args:
        plan: what is played.
        policy: who chooses.
        arrivals: what is asked; None: the plan's own trace.
    """

    def __init__(self, plan: Plan, policy: Policy, arrivals: Iterable[Arrival] | None = None) -> None:
        self._plan = plan
        self._policy = policy
        pace, costs = Pace(plan.costs.table()), plan.costs
        names = [f"{plan.site}{number}" for number in range(plan.machines)]
        self.machines = {name: Machine(name, pace, costs.slots, costs.cache_tokens) for name in names}
        self._publish_s = max(PUBLISH_S, plan.machines * plan.lasts_s / MOST_PUBLISHED)
        self._arrivals = iter(plan.trace() if arrivals is None else arrivals)
        self._timeline = Timeline()
        self._num_asked = 0
        self._num_live = 0
        self._unsent: list[Job] = []
        self.tally = Tally()

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.machines)}, {self._num_asked} asked, {self._num_live} live>"

    def play(self) -> dict[str, float]:
        """All requests, to their ends; their figures. Tells how far it is on stderr."""
        began_s, told_s = time.thread_time(), time.monotonic()
        self._begin_machines()
        self._plan_troubles()
        self._expect_arrival()
        while not self._is_over() and self._timeline.step():
            if not self._timeline.num_events % 4096 and time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                self._tell_progress(time.thread_time() - began_s)
        machines = list(self.machines.values())
        return figures(self.tally, machines, self._timeline.now, time.thread_time() - began_s)

    def _is_over(self) -> bool:
        return self._num_asked >= self._plan.requests and not self._num_live

    def _tell_progress(self, took_s: float) -> None:
        share = self._num_asked / self._plan.requests
        left_s = took_s * (1 - share) / max(share, 1e-6)
        print(f"{self._num_asked:,} requests, {share:.0%}, {left_s:.0f} s left", file=sys.stderr)

    # ------------------------------------------------------------ what will happen

    def _begin_machines(self) -> None:
        random = Random(self._plan.seed)
        for machine in self.machines.values():
            self._tell(machine)
            self._timeline.at(random.uniform(0, self._publish_s), partial(self._publish, machine))

    def _plan_troubles(self) -> None:
        plan, random = self._plan, Random(self._plan.seed)
        kinds = [self._die] * plan.deaths + [self._drain] * plan.drains + [self._suspend] * plan.suspends
        if len(kinds) >= len(self.machines):
            raise BenchError(f"{len(kinds)} machines are to end, of {len(self.machines)}: fewer than all may")
        for trouble, machine in zip(
            kinds, random.sample(list(self.machines.values()), len(kinds)), strict=True
        ):
            self._timeline.at(random.uniform(0.2, 0.9) * plan.lasts_s, partial(trouble, machine))

    def _expect_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None and self._num_asked < self._plan.requests:
            self._timeline.at(arrival.at_s, partial(self._arrive, arrival.conversation))

    def _arrive(self, talk: Conversation) -> None:
        self._ask(talk)
        self._expect_arrival()

    # ------------------------------------------------------------ requests

    def _ask(self, talk: Conversation) -> None:
        """The next turn of a conversation, while there are requests left."""
        if self._num_asked >= self._plan.requests:
            return
        self._num_asked += 1
        self._num_live += 1
        home = talk.home
        self._send(Job(talk.ask(self._timeline.now)))
        if self._is_counted and home:
            self.tally.went_on(is_elsewhere=talk.home != home)

    @property
    def _is_counted(self) -> bool:
        return self._num_asked > self._plan.warm_up * self._plan.requests

    def _send(self, job: Job) -> None:
        """Give a request to the machine that the policy chooses."""
        name = self._chosen(job)
        job.turn.conversation.home = name
        machine = self.machines[name]
        if not machine.is_up:  # the door does not know yet
            self._unsent.append(job)
            return
        self._advance(machine)
        machine.take(job)
        self._advance(machine)
        self._watch(machine)

    def _chosen(self, job: Job) -> str:
        began_s = time.thread_time()
        name = self._policy.choose(job.turn, self._timeline.now)
        self.tally.router_s.append(time.thread_time() - began_s)
        return name

    def _advance(self, machine: Machine) -> None:
        """Bring a machine to this moment."""
        for job in machine.advance(self._timeline.now):
            self._end(job, machine)

    def _watch(self, machine: Machine) -> None:
        """Look at a machine again when it will have done something; what was planned before is void."""
        machine.version += 1
        at_s = machine.next_s()
        if at_s is not None:
            self._timeline.at(at_s, partial(self._look, machine, machine.version))

    def _look(self, machine: Machine, version: int) -> None:
        if version == machine.version:
            self._advance(machine)
            self._watch(machine)

    def _end(self, job: Job, machine: Machine) -> None:
        """A request has its answer, and its conversation goes on."""
        turn = job.turn
        began_s = time.thread_time()
        self._policy.ended(turn, machine.name)
        self.tally.ended_s += time.thread_time() - began_s
        self._num_live -= 1
        known = self.tally.knew(turn)
        if self._is_counted:
            self.tally.answered(job, known, is_persons=job.rank == PEOPLE)
        gap_s = turn.conversation.answered(turn)
        if gap_s is not None:
            self._timeline.after(gap_s, partial(self._ask, turn.conversation))

    # ------------------------------------------------------------ machines

    def _tell(self, machine: Machine) -> None:
        """The policy hears how a machine is."""
        state = PeerState(
            name=machine.name,
            at=self._timeline.now,
            is_up=machine.is_up,
            is_draining=machine.is_draining,
            is_suspended=machine.is_suspended,
            models=_MODELS,
            running=ByClass(machine.num_running(PEOPLE), machine.num_running(JOBS)),
            waiting=ByClass(machine.num_waiting(PEOPLE), machine.num_waiting(JOBS)),
            num_slots=machine.num_slots,
        )
        began_s = time.thread_time()
        self._policy.update(state)
        self.tally.num_told += 1
        self.tally.told_s += time.thread_time() - began_s

    def _publish(self, machine: Machine) -> None:
        if machine.is_up:  # of a dead one the door learns later
            self._tell(machine)
        self._timeline.after(self._publish_s, partial(self._publish, machine))

    def _die(self, machine: Machine) -> None:
        """It computes no more, and what was in its memory is gone; the door learns that later."""
        self._advance(machine)
        machine.is_up = False
        machine.version += 1
        machine.forget()
        self._timeline.after(DETECT_S, partial(self._miss, machine))

    def _miss(self, machine: Machine) -> None:
        """The door learns of a death: what the machine had, and was sent since, goes on elsewhere."""
        self._tell(machine)
        name = machine.name
        unsent = [job for job in self._unsent if job.turn.conversation.home == name]
        self._unsent = [job for job in self._unsent if job.turn.conversation.home != name]
        self._move([*machine.lose(), *unsent], name)
        self._timeline.after(AWAY_S, partial(self._return, machine))

    def _drain(self, machine: Machine) -> None:
        """It takes nothing new and ends what it has."""
        machine.is_draining = True
        self._tell(machine)
        self._timeline.after(AWAY_S, partial(self._return, machine))

    def _suspend(self, machine: Machine) -> None:
        """It stands still; what it has goes on elsewhere after the grace."""
        self._advance(machine)
        machine.version += 1
        machine.is_suspended = True
        self._tell(machine)
        self._timeline.after(GRACE_S, partial(self._move, machine.lose(), machine.name))
        self._timeline.after(AWAY_S, partial(self._return, machine))

    def _return(self, machine: Machine) -> None:
        if machine.is_draining:
            machine.forget()  # it was started anew, as drained machines are
        machine.advance(self._timeline.now)
        machine.is_up, machine.is_draining, machine.is_suspended = True, False, False
        self._tell(machine)
        self._watch(machine)

    def _move(self, jobs: list[Job], name: str) -> None:
        """Requests of a machine go on elsewhere, from the tokens that they have."""
        for job in jobs:
            self._policy.ended(job.turn, name)
            self.tally.moved_alive += 1
            self._send(job)


def played(plan: Plan, policy: str) -> dict[str, float]:
    """The figures of one policy."""
    return Fleet(plan, POLICIES[policy]()).play()
