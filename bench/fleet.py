"""A fleet of machines with a router in front of it, played as events: what routing is worth.

The router is that of `stoker.routing`; a machine is what its measured step costs make of its requests
(`bench/fleet_machine.py`); the requests have the shape of public traces (`bench/fleet_trace.py` says which,
and where the figures are).

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
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from bench.errors import BenchError
from bench.fleet_costs import PRESETS, measure, read
from bench.fleet_figures import table
from bench.fleet_play import Plan, played
from bench.fleet_policies import POLICIES
from bench.fleet_trace import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def plan_of(options: argparse.Namespace) -> Plan:
    """What they say. Raises BenchError: the file of costs cannot be read."""
    return Plan(
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the options say."""
    options = parse_arguments(arguments)
    try:
        if options.measure:
            print(msgspec.json.encode(measure(options.measure)).decode())
            return 0
        plan = plan_of(options)
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
