"""Three real servers behind a gate: how near the simulator is, and what its routing costs people.

    python -m bench.fleet_real agree
    python -m bench.fleet_real background
    python -m bench.fleet_real agree --model fake:eog_period=0,step_delay_s=0.01,token_delay_s=0.0005 \
        --scale 1 --min-system 1100

`agree` measures the costs of steps at one of the machines, plays a trace of some minutes against all of them
and the same trace in the simulator, with those costs and with those that steps had meanwhile, in company, and
prints figures of all. `background` plays a trace of people with jobs on every machine, in turns through the
gate and with each machine asked by its own third of them.

Servers, gate and clients share this machine. Each server computes with one thread; with a real model at a
load that lets them rarely compute at once (`--load`), as two cores do not carry three. A `fake:` model
computes nothing and takes the time that it is told to, so its servers do not disturb each other at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from bench.errors import BenchError
from bench.fleet_costs import fitted, measured, read
from bench.fleet_figures import at
from bench.fleet_play import Fleet, Plan
from bench.fleet_policies import Routed
from bench.fleet_site import Homes, Players, Site, background, frame_of, site, words_of
from bench.fleet_trace import AGENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.fleet_costs import Costs
    from bench.fleet_site import Answered, Frame, Words
    from bench.fleet_trace import Arrival

MACHINES = 3
NUM_SITES = 15
"""Names that the simulator gives its machines, one set after the other: places on the ring are chance."""
TIMEOUT_S = 600.0
COMPARED = ("hit_rate", "first_token_p50_s", "first_token_p95_s", "turns_moved", "served_most_over_mean")


def plan_of(options: argparse.Namespace, costs: Costs) -> Plan:
    """What is played, with these costs."""
    shape = replace(
        AGENTS,
        num_systems=options.systems,
        private=0.5,
        job_share=options.job_share,
        scale=options.scale,
        min_system=options.min_system,
    )
    plan = Plan(
        machines=MACHINES,
        requests=1,
        costs=costs,
        shape=shape,
        load=options.load,
        seed=options.seed,
        warm_up=0.0,
    )
    return replace(plan, requests=max(1, int(options.seconds * plan.rate)))


def arrivals(plan: Plan) -> Iterator[Arrival]:
    """Whole conversations, until they have as many turns as the plan has requests."""
    num_left = plan.requests
    for arrival in plan.trace():
        if num_left <= 0:
            return
        num_left -= arrival.conversation.turns_left
        yield arrival


# ---------------------------------------------------------------- do they agree


async def agree(given: argparse.Namespace, servers: Site, http: httpx.AsyncClient) -> dict[str, object]:
    """Figures of the servers and of the simulator, and their ratios."""
    costs = read(given.costs) if given.costs else await measured(servers.machines[0])
    print(f"costs: {json.dumps(costs.steps)}", file=sys.stderr)
    words, frame = await words_of(http, servers.gate), await frame_of(http, servers.machines[0])
    plan = plan_of(given, costs)
    plan = replace(plan, requests=sum(one.conversation.turns_left for one in arrivals(plan)))
    print(f"{plan.requests} requests in about {plan.lasts_s:.0f} s", file=sys.stderr)
    async with Homes(http, servers.machines) as homes:
        answers = await Players(http, words.salted(str(given.seed)), lambda _: servers.gate).play(
            arrivals(plan)
        )
        served = measured_figures(answers, await homes.of(answers))
    company = fitted(homes.steps, costs)
    return {
        "model": given.model,
        "requests": plan.requests,
        "servers": _rounded(served),
        "costs_before": _compared(plan, frame, costs, served),
        "costs_in_company": _compared(plan, frame, company, served),
    }


def _compared(plan: Plan, frame: Frame, costs: Costs, served: dict[str, float]) -> dict[str, object]:
    played = simulated(plan, frame, costs)
    ratios = {name: played[name] / served[name] for name in COMPARED if served[name]}
    return {"steps": costs.steps, "simulator": _rounded(played), "ratios": _rounded(ratios)}


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in found.items()}


def measured_figures(answers: Sequence[Answered], homes: dict[str, str]) -> dict[str, float]:
    """As `bench.fleet_figures.figures` names them."""
    people = sorted(one.first_s for one in answers if one.is_persons)
    jobs = sorted(one.first_s for one in answers if not one.is_persons)
    ordered = sorted(answers, key=lambda one: (one.talk, one.turn))
    moves = [
        homes[before.answer_id] != homes[after.answer_id]
        for before, after in pairwise(ordered)
        if before.talk == after.talk
    ]
    served = Counter(homes.values())
    num_prompt = sum(one.num_prompt for one in answers)
    return {
        "requests": len(answers),
        "prompt_tokens": num_prompt,
        "hit_rate": sum(one.num_cached for one in answers) / max(1, num_prompt),
        "first_token_p50_s": at(people, 0.5),
        "first_token_p95_s": at(people, 0.95),
        "job_first_token_p95_s": at(jobs, 0.95),
        "turns_moved": sum(moves) / max(1, len(moves)),
        "served_most_over_mean": max(served.values()) * MACHINES / max(1, len(answers)),
    }


def simulated(plan: Plan, frame: Frame, costs: Costs) -> dict[str, float]:
    """The plan's trace at machines of these costs: medians over sites whose machines have other names."""
    runs = []
    for number in range(NUM_SITES):
        site_plan = replace(plan, site=f"site{number}.", costs=costs)
        fleet = Fleet(site_plan, Routed(), map(frame.around, arrivals(plan)))
        runs.append(fleet.play() | {"prompt_tokens": fleet.tally.prompt})
    names = ("requests", "prompt_tokens", "job_first_token_p95_s", *COMPARED)
    found = {name: statistics.median(run[name] for run in runs) for name in names}
    p95s = [run["first_token_p95_s"] for run in runs]
    return found | {"first_token_p95_s_least": min(p95s), "first_token_p95_s_most": max(p95s)}


# ---------------------------------------------------------------- people beside jobs


async def beside_jobs(given: argparse.Namespace, servers: Site, http: httpx.AsyncClient) -> dict[str, object]:
    """p95 of people's first token with jobs on all machines, through the gate and directly, in turns."""
    costs = read(given.costs) if given.costs else await measured(servers.machines[0])
    words, plan = await words_of(http, servers.gate), plan_of(given, costs)
    plan = replace(plan, shape=replace(plan.shape, job_share=0.0))
    p95s: dict[str, list[float]] = {"gate": [], "direct": []}
    firsts: dict[str, list[float]] = {"gate": [], "direct": []}
    async with background(http, servers.machines, given.jobs, words.salted("jobs")):
        for number in range(given.rounds):
            for way in ("gate", "direct") if number % 2 else ("direct", "gate"):
                found = await _people(http, servers, plan, words.salted(f"{way} {number}"), way)
                firsts[way] += found
                p95s[way].append(at(found, 0.95))
                print(f"{way}: {len(found)} requests, p95 {p95s[way][-1]:.3f} s", file=sys.stderr)
    p95 = {way: at(sorted(found), 0.95) for way, found in firsts.items()}
    return {
        "model": given.model,
        "requests": {way: len(found) for way, found in firsts.items()},
        "first_token_p95_s": {way: round(found, 3) for way, found in p95.items()},
        "of_rounds": {way: [round(one, 3) for one in found] for way, found in p95s.items()},
        "ratio": round(p95["gate"] / p95["direct"], 3),
    }


async def _people(http: httpx.AsyncClient, servers: Site, plan: Plan, words: Words, way: str) -> list[float]:
    """Sorted seconds to first tokens of one trace that goes one way."""
    machines = servers.machines
    players = Players(
        http, words, lambda talk: servers.gate if way == "gate" else machines[talk.number % len(machines)]
    )
    return sorted(one.first_s for one in await players.play(arrivals(plan)))


# ---------------------------------------------------------------- command line


async def asked(given: argparse.Namespace) -> dict[str, object]:
    """What the options ask for, with servers that live as long as that."""
    settings = ["--model", given.model, "--slots", str(given.slots), "--threads", "1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        site(Path(folder), MACHINES, *settings) as servers,
    ):
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as http:
            return await (agree if given.what == "agree" else beside_jobs)(given, servers, http)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet_real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=["agree", "background"])
    add("--model", default="smollm2-135m-instruct", help="name or file of the model of every server")
    add("--costs", help="a preset or a file of `bench.fleet --measure` (default: measure now)")
    add("--slots", type=int, default=4, help="of each server")
    add("--seconds", type=float, default=240.0, help="that conversations begin in (default 240)")
    add("--load", type=float, default=0.35, help="of the machines' time, if nothing were cached")
    add("--scale", type=float, default=0.25, help="of lengths of the trace")
    add("--min-system", type=int, default=220, help="tokens of a system prompt at the least: 1,024 bytes")
    add("--systems", type=int, default=8, help="system prompts there are")
    add("--job-share", type=float, default=0.2, help="of the requests of `agree`, those that are background")
    add("--jobs", type=int, default=1, help="jobs that each machine always has, for `background`")
    add("--rounds", type=int, default=2, help="traces each way, for `background`")
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    try:
        found = asyncio.run(asked(parse_arguments(arguments)))
    except (BenchError, httpx.HTTPError) as error:
        print(f"bench.fleet_real: {error!r}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
