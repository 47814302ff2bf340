"""A fleet of machines with a router in front of it, played as events: what routing is worth.

The router is that of `stoker.routing`; a machine is what its measured step costs make of its requests
(`bench/fleet_machine.py`); the requests have the shape of public traces (`bench/fleet_trace.py` says which,
and where the figures are). Nothing is computed and no time passes but that of the router, which is measured
in processor time of its thread.

    python -m bench.fleet --machines 1000 --requests 1000000
    python -m bench.fleet --machines 3 --requests 3000 --policy stoker --policy round_robin --json
    python -m bench.fleet --machines 100 --requests 100000 --viral 0.5 --deaths 5 --drains 5 --suspends 5
    python -m bench.fleet --measure http://127.0.0.1:8080 > costs.json
    python -m bench.fleet --machines 3 --requests 3000 --costs costs.json

A million requests over a thousand machines take one core some minutes a policy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from bench.errors import BenchError
from bench.fleet_costs import PRESETS, Costs, measure, read
from bench.fleet_machine import JOBS, PEOPLE, Job, Machine, Pace
from bench.fleet_policies import MODEL, POLICIES, Policy
from bench.fleet_trace import ANSWER_TOKENS, PROMPT_TOKENS, SHAPES, Shape, Trace
from stoker.routing.load import ByClass, PeerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.fleet_trace import Conversation

PUBLISH_S = 1.0
MOST_PUBLISHED = 2_000_000
"""States told in one run at most; machines tell less often in a longer one."""
DETECT_S = 2.0
"""From a machine's death until the door knows."""
GRACE_S = 10.0
"""A request of a suspended machine goes on elsewhere after that."""
AWAY_S = 60.0
WARM_UP = 0.2
"""Part of the requests that are not counted: caches are empty at first."""
PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is played.

    Attributes:
        load: share of the machines' time that the requests would take without any cache.
        deaths, drains, suspends: machines that this happens to, at any time.
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


@dataclass(slots=True)
class Tally:
    """What is counted, after the warm-up."""

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    others_prompt: int = 0
    others_cached: int = 0
    first_s: list[float] = field(default_factory=list)
    jobs_first_s: list[float] = field(default_factory=list)
    turns_moved: int = 0
    turns_next: int = 0
    moved_alive: int = 0
    router_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    told_s: float = 0.0
    num_told: int = 0


def at(values: Sequence[float], share: float) -> float:
    """That quantile of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class Fleet:
    """Plays a plan with a policy.

    Args:
        plan: what is played.
        policy: who chooses.
    """

    def __init__(self, plan: Plan, policy: Policy) -> None:
        self._plan = plan
        self._policy = policy
        pace, costs = Pace(plan.costs.table()), plan.costs
        names = [f"m{number}" for number in range(plan.machines)]
        self.machines = {name: Machine(name, pace, costs.slots, costs.cache_tokens) for name in names}
        mean = fmean(PROMPT_TOKENS), fmean(ANSWER_TOKENS)
        self.rate = plan.load * plan.machines / costs.cold_s(*mean)
        self.lasts_s = plan.requests / self.rate
        self._publish_s = max(PUBLISH_S, plan.machines * self.lasts_s / MOST_PUBLISHED)
        self._trace = Trace(plan.shape, self.rate, plan.seed)
        self._arrivals = self._trace.arrivals()
        self._events: list[tuple[float, int, str, Any, int]] = []
        self._num_events = 0
        self._num_asked = 0
        self._num_live = 0
        self._known: set[int] = set()
        self._unsent: list[Job] = []
        self.tally = Tally()
        self.now = 0.0

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.machines)}, {self._num_asked} asked, {self._num_live} live>"

    def play(self) -> None:
        """All requests, to their ends; tells how far it is on stderr."""
        self._prepare()
        told = began = time.monotonic()
        while self._events and not (self._num_asked >= self._plan.requests and self._num_live == 0):
            self.now, _, kind, what, version = heappop(self._events)
            getattr(self, f"_on_{kind}")(what, version)
            if not self._num_events % 4096 and time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                share = self._num_asked / self._plan.requests
                left_s = (told - began) * (1 - share) / max(share, 1e-6)
                print(f"{self._num_asked:,} requests, {share:.0%}, {left_s:.0f} s left", file=sys.stderr)

    def _prepare(self) -> None:
        random = Random(self._plan.seed)
        for name in self.machines:
            self._tell(self.machines[name])
            self._later(random.uniform(0, self._publish_s), "publish", name)
        ends = [("death", self._plan.deaths), ("drain", self._plan.drains), ("suspend", self._plan.suspends)]
        kinds = [kind for kind, number in ends for _ in range(number)]
        if len(kinds) >= len(self.machines):
            raise BenchError(f"{len(kinds)} machines are to end, of {len(self.machines)}: fewer than all may")
        for kind, name in zip(kinds, random.sample(list(self.machines), len(kinds)), strict=True):
            self._later(random.uniform(WARM_UP, 0.9) * self.lasts_s, kind, name)
        self._later(self.lasts_s / 3, "viral", is_on := True)
        self._later(self.lasts_s * 2 / 3, "viral", not is_on)
        self._later(next(self._arrivals), "begin", None)

    def _later(self, at_s: float, kind: str, what: Any, version: int = 0) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, kind, what, version))

    # ------------------------------------------------------------ requests

    def _on_begin(self, _: None, __: int) -> None:
        if self._num_asked < self._plan.requests:
            self._ask(self._trace.conversation())
            self._later(next(self._arrivals), "begin", None)

    def _on_viral(self, is_on: bool, _: int) -> None:  # noqa: FBT001 - what the event is
        self._trace.is_viral_time = is_on

    def _on_next(self, talk: Conversation, _: int) -> None:
        if self._num_asked < self._plan.requests:
            self._ask(talk)

    def _ask(self, talk: Conversation) -> None:
        turn = self._trace.turn(talk, self.now)
        self._num_asked += 1
        self._num_live += 1
        job = Job(turn)
        home = talk.home
        self._send(job)
        if self._is_counted and home:
            self.tally.turns_next += 1
            self.tally.turns_moved += talk.home != home

    @property
    def _is_counted(self) -> bool:
        return self._num_asked > WARM_UP * self._plan.requests

    def _send(self, job: Job) -> None:
        """The policy chooses; its time is the only one that is measured."""
        began = time.thread_time()
        name = self._policy.choose(job.turn, self.now)
        self.tally.router_s.append(time.thread_time() - began)
        job.turn.conversation.home = name
        machine = self.machines[name]
        if not machine.is_up:  # the door does not know yet
            self._unsent.append(job)
            return
        self._ended(machine.advance(self.now), machine)
        machine.take(job)
        self._ended(machine.advance(self.now), machine)
        self._watch(machine)

    def _watch(self, machine: Machine) -> None:
        machine.version += 1
        at_s = machine.next_s()
        if at_s is not None:
            self._later(at_s, "machine", machine, machine.version)

    def _on_machine(self, machine: Machine, version: int) -> None:
        if version == machine.version:
            self._ended(machine.advance(self.now), machine)
            self._watch(machine)

    def _ended(self, jobs: list[Job], machine: Machine) -> None:
        for job in jobs:
            began = time.thread_time()
            self._policy.ended(job.turn, machine.name)
            self.tally.ended_s += time.thread_time() - began
            self._num_live -= 1
            self._count(job)
            wait_s = self._trace.answered(job.turn)
            if wait_s is not None:
                self._later(self.now + wait_s, "next", job.turn.conversation)

    def _count(self, job: Job) -> None:
        turn, tally = job.turn, self.tally
        possible = 0
        for key, num in zip(turn.chain, turn.tokens, strict=True):
            if key not in self._known:
                break
            possible += num
        self._known.update((*turn.chain, turn.answer_key))
        if not self._is_counted:
            return
        tally.prompt += turn.num_prompt
        tally.cached += job.cached
        tally.possible += max(possible, job.cached)
        if not turn.conversation.is_viral:
            tally.others_prompt += turn.num_prompt
            tally.others_cached += job.cached
        assert job.first_s is not None, f"{job} has ended without a token"
        (tally.first_s if job.rank == PEOPLE else tally.jobs_first_s).append(job.first_s - turn.asked_s)

    # ------------------------------------------------------------ machines

    def _tell(self, machine: Machine) -> None:
        running = ByClass(machine.num_running(PEOPLE), machine.num_running(JOBS))
        waiting = ByClass(machine.num_waiting(PEOPLE), machine.num_waiting(JOBS))
        state = PeerState(
            name=machine.name,
            at=self.now,
            is_up=machine.is_up,
            is_draining=machine.is_draining,
            is_suspended=machine.is_suspended,
            models=_MODELS,
            running=running,
            waiting=waiting,
            num_slots=machine.num_slots,
        )
        began = time.thread_time()
        self._policy.update(state)
        self.tally.num_told += 1
        self.tally.told_s += time.thread_time() - began

    def _on_publish(self, name: str, _: int) -> None:
        if self.machines[name].is_up:  # of a dead one the door learns later
            self._tell(self.machines[name])
        self._later(self.now + self._publish_s, "publish", name)

    def _on_death(self, name: str, _: int) -> None:
        machine = self.machines[name]
        self._ended(machine.advance(self.now), machine)
        machine.is_up = False
        machine.version += 1
        machine.forget()
        self._later(self.now + DETECT_S, "missed", name)

    def _on_missed(self, name: str, _: int) -> None:
        machine = self.machines[name]
        self._tell(machine)
        self._move([*machine.lose(), *self._lost(name)], name)
        self._later(self.now + AWAY_S, "back", name)

    def _lost(self, name: str) -> list[Job]:
        """What was sent to a dead machine before that was known."""
        lost = [job for job in self._unsent if job.turn.conversation.home == name]
        self._unsent = [job for job in self._unsent if job.turn.conversation.home != name]
        return lost

    def _on_drain(self, name: str, _: int) -> None:
        machine = self.machines[name]
        machine.is_draining = True
        self._tell(machine)
        self._later(self.now + AWAY_S, "back", name)

    def _on_suspend(self, name: str, _: int) -> None:
        machine = self.machines[name]
        self._ended(machine.advance(self.now), machine)
        machine.version += 1
        machine.is_suspended = True
        self._tell(machine)
        jobs = machine.lose()
        self._later(self.now + GRACE_S, "grace", (jobs, name))
        self._later(self.now + AWAY_S, "back", name)

    def _on_grace(self, held: tuple[list[Job], str], _: int) -> None:
        self._move(*held)

    def _on_back(self, name: str, _: int) -> None:
        machine = self.machines[name]
        if machine.is_draining:
            machine.forget()  # it was started anew, as drained machines are
        machine.advance(self.now)
        machine.is_up, machine.is_draining, machine.is_suspended = True, False, False
        self._tell(machine)
        self._watch(machine)

    def _move(self, jobs: list[Job], name: str) -> None:
        """Requests of a machine go on elsewhere, from the tokens that they have."""
        for job in jobs:
            self._policy.ended(job.turn, name)
            self.tally.moved_alive += 1
            self._send(job)


_MODELS = frozenset({MODEL})


def figures(fleet: Fleet, took_s: float) -> dict[str, float]:
    """What came of it, by name."""
    tally = fleet.tally
    people, jobs, router = sorted(tally.first_s), sorted(tally.jobs_first_s), sorted(tally.router_s)
    served = [machine.num_served for machine in fleet.machines.values()]
    busy = [machine.busy_s for machine in fleet.machines.values()]
    request_s = sum(tally.router_s) + tally.ended_s
    return {
        "requests": len(people) + len(jobs),
        "simulated_s": fleet.now,
        "requests_per_s": fleet.rate,
        "hit_rate": tally.cached / max(1, tally.prompt),
        "hit_rate_possible": tally.possible / max(1, tally.prompt),
        "hit_rate_others": tally.others_cached / max(1, tally.others_prompt),
        "first_token_p50_s": at(people, 0.5),
        "first_token_p95_s": at(people, 0.95),
        "first_token_p99_s": at(people, 0.99),
        "job_first_token_p95_s": at(jobs, 0.95),
        "turns_moved": tally.turns_moved / max(1, tally.turns_next),
        "moved_alive": tally.moved_alive,
        "served_most_over_mean": max(served) / max(1e-9, fmean(served)),
        "busy_most_over_mean": max(busy) / max(1e-9, fmean(busy)),
        "busy_share": fmean(busy) / max(1e-9, fleet.now),
        "router_us": 1e6 * request_s / max(1, len(router)),
        "choose_p50_us": 1e6 * at(router, 0.5),
        "choose_p99_us": 1e6 * at(router, 0.99),
        "state_us": 1e6 * tally.told_s / max(1, tally.num_told),
        "router_share": (request_s + tally.told_s) / max(1e-9, took_s),
        "took_s": took_s,
    }


def played(plan: Plan, policy: str) -> dict[str, float]:
    """The figures of one policy."""
    fleet = Fleet(plan, POLICIES[policy]())
    began = time.thread_time()
    fleet.play()
    return figures(fleet, time.thread_time() - began)


ROWS = (
    ("hit rate", "hit_rate", ".1%"),
    ("possible", "hit_rate_possible", ".1%"),
    ("first token p50, s", "first_token_p50_s", ".3g"),
    ("p95, s", "first_token_p95_s", ".3g"),
    ("jobs' p95, s", "job_first_token_p95_s", ".3g"),
    ("turns moved", "turns_moved", ".1%"),
    ("moved alive", "moved_alive", ".0f"),
    ("most over mean", "served_most_over_mean", ".2f"),
    ("busy", "busy_share", ".0%"),
    ("router, us", "router_us", ".1f"),
    ("p99, us", "choose_p99_us", ".0f"),
    ("a state, us", "state_us", ".1f"),
)


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a policy."""
    lines = [
        "| policy | " + " | ".join(title for title, _, _ in ROWS) + " |",
        "|---|" + "---|" * len(ROWS),
    ]
    for policy, found in results.items():
        lines.append(
            f"| `{policy}` | " + " | ".join(format(found[name], how) for _, name, how in ROWS) + " |"
        )
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    add = parser.add_argument
    add("--machines", type=int, default=1000)
    add("--requests", type=int, default=1_000_000)
    add("--seed", type=int, default=1)
    add("--policy", action="append", choices=POLICIES, help="repeatable; default: all")
    add("--costs", default="cpu", help=f"{', '.join(PRESETS)}, or a file of --measure (default: cpu)")
    add("--shape", choices=SHAPES, default="people", help="who asks (default: people)")
    add("--load", type=float, default=0.7, help="of the machines' time, if nothing were cached (default 0.7)")
    add(
        "--viral",
        type=float,
        default=0.0,
        help="share of new conversations that begin alike for a third of the time",
    )
    add("--deaths", type=int, default=0, help="machines that die")
    add("--drains", type=int, default=0, help="machines that are drained")
    add("--suspends", type=int, default=0, help="machines that are suspended")
    add("--measure", metavar="URL", help="print the costs of a running server, and play nothing")
    add("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args(arguments)
    if options.machines < 1 or options.requests < 1 or options.load <= 0:
        parser.error("--machines, --requests and --load must be above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the options say."""
    options = parse_arguments(arguments)
    try:
        if options.measure:
            print(msgspec.json.encode(measure(options.measure)).decode())
            return 0
        plan = Plan(
            machines=options.machines,
            requests=options.requests,
            costs=read(options.costs),
            shape=replace(SHAPES[options.shape], viral=options.viral),
            load=options.load,
            seed=options.seed,
            deaths=options.deaths,
            drains=options.drains,
            suspends=options.suspends,
        )
        results: dict[str, dict[str, float]] = {}
        for policy in options.policy or POLICIES:
            print(f"{policy}:", file=sys.stderr)
            results[policy] = played(plan, policy)
            print(table({policy: results[policy]}), file=sys.stderr)
    except BenchError as error:
        print(f"bench.fleet: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=1) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
