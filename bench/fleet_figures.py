"""What is counted while a fleet is played, and the figures and the table that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.fleet_machine import Job, Machine
    from bench.fleet_trace import Turn


@dataclass(slots=True)
class Tally:
    """What is counted of requests that came after the warm-up, and what the router took.

    Attributes:
        prompt, cached, possible: tokens of prompts; those that were found; those that one cache with room for
            everything would have had.
        others_prompt, others_cached: the same of conversations that do not begin as everybody's.
        first_s, jobs_first_s: seconds to the first token, of people and of jobs.
        turns_next, turns_moved: turns after a first; those of them that another machine had.
        moved_alive: requests that went on elsewhere.
        router_s: each choice; `ended_s`: what it was told of ends; `told_s`: of `num_told` states.
    """

    prompt: int = 0
    cached: int = 0
    possible: int = 0
    others_prompt: int = 0
    others_cached: int = 0
    first_s: list[float] = field(default_factory=list)
    jobs_first_s: list[float] = field(default_factory=list)
    turns_next: int = 0
    turns_moved: int = 0
    moved_alive: int = 0
    router_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    told_s: float = 0.0
    num_told: int = 0
    _known: set[int] = field(default_factory=set)

    def went_on(self, *, is_elsewhere: bool) -> None:
        """A turn after a first has a machine."""
        self.turns_next += 1
        self.turns_moved += is_elsewhere

    def knew(self, turn: Turn) -> int:
        """Tokens of its prompt that any machine ever had; from now on all of it, and its answer."""
        known = 0
        for key, num in zip(turn.chain, turn.tokens, strict=True):
            if key not in self._known:
                break
            known += num
        self._known.update((*turn.chain, turn.answer_key))
        return known

    def answered(self, job: Job, known: int, *, is_persons: bool) -> None:
        """A request has ended, of whose prompt so much was `known`."""
        turn = job.turn
        assert job.first_s is not None, f"{job} has ended without a token"
        self.prompt += turn.num_prompt
        self.cached += job.cached
        self.possible += max(known, job.cached)
        if not turn.conversation.is_viral:
            self.others_prompt += turn.num_prompt
            self.others_cached += job.cached
        (self.first_s if is_persons else self.jobs_first_s).append(job.first_s - turn.asked_s)


def at(values: Sequence[float], share: float) -> float:
    """That quantile of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def figures(tally: Tally, machines: Sequence[Machine], lasted_s: float, took_s: float) -> dict[str, float]:
    """What came of it, by name.

    Args:
        tally: what was counted.
        machines: that were played.
        lasted_s: on their clock.
        took_s: processor time of playing them.
    """
    return {
        **_of_requests(tally),
        **_of_machines(machines, lasted_s),
        **_of_router(tally, took_s),
        "simulated_s": lasted_s,
        "took_s": took_s,
    }


def _of_requests(tally: Tally) -> dict[str, float]:
    people, jobs = sorted(tally.first_s), sorted(tally.jobs_first_s)
    return {
        "requests": len(people) + len(jobs),
        "hit_rate": tally.cached / max(1, tally.prompt),
        "hit_rate_possible": tally.possible / max(1, tally.prompt),
        "hit_rate_others": tally.others_cached / max(1, tally.others_prompt),
        "first_token_p50_s": at(people, 0.5),
        "first_token_p95_s": at(people, 0.95),
        "first_token_p99_s": at(people, 0.99),
        "job_first_token_p95_s": at(jobs, 0.95),
        "turns_moved": tally.turns_moved / max(1, tally.turns_next),
        "moved_alive": tally.moved_alive,
    }


def _of_machines(machines: Sequence[Machine], lasted_s: float) -> dict[str, float]:
    served = [machine.num_served for machine in machines]
    busy = [machine.busy_s for machine in machines]
    return {
        "served_most_over_mean": max(served) / max(1e-9, fmean(served)),
        "busy_most_over_mean": max(busy) / max(1e-9, fmean(busy)),
        "busy_share": fmean(busy) / max(1e-9, lasted_s),
    }


def _of_router(tally: Tally, took_s: float) -> dict[str, float]:
    router = sorted(tally.router_s)
    request_s = sum(router) + tally.ended_s
    return {
        "router_us": 1e6 * request_s / max(1, len(router)),
        "choose_p50_us": 1e6 * at(router, 0.5),
        "choose_p99_us": 1e6 * at(router, 0.99),
        "state_us": 1e6 * tally.told_s / max(1, tally.num_told),
        "router_share": (request_s + tally.told_s) / max(1e-9, took_s),
    }


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
