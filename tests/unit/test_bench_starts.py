"""Repetitions of the benchmark are spread over several starts of the servers, and joined again."""

from __future__ import annotations

import pytest
from bench.__main__ import parse_arguments, plan_of
from bench.results import Comparison, Series, Turn, joined
from bench.stages import Stage
from bench.workloads import Better, Metric

SPEED = Metric("speed", "speed", "tok/s", Better.HIGHER)


def test_repetitions_are_spread_over_starts() -> None:
    """Q9: as even as can be, in order; as many starts as repetitions unless fewer are asked for."""
    given = ["--seed", "3", "--repeat", "5"]
    each = plan_of(parse_arguments(given))
    assert [list(seeds) for seeds in each.seeds_by_start] == [[3], [4], [5], [6], [7]]
    two = plan_of(parse_arguments([*given, "--starts", "2"]))
    assert [list(seeds) for seeds in two.seeds_by_start] == [[3, 4], [5, 6, 7]]


@pytest.mark.parametrize("starts", ["0", "6"])
def test_starts_without_a_repetition_are_refused(starts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """O2: the message says the bounds."""
    with pytest.raises(SystemExit):
        parse_arguments(["--repeat", "5", "--starts", starts])
    assert "--starts is at least 1 and at most --repeat, which is 5" in capsys.readouterr().err


def test_servers_that_run_are_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    """O2: what somebody else started is not said to be started anew."""
    urls = ["--url", "http://a", "--label", "a", "--url", "http://b", "--label", "b"]
    with pytest.raises(SystemExit):
        parse_arguments([*urls, "--starts", "2"])
    assert "--starts is of servers that the benchmark starts" in capsys.readouterr().err


def test_starts_are_joined_in_order() -> None:
    """Q9: repetitions stay paired with their neighbours; stages are medians over the starts that have any."""

    def start(ours: tuple[float, ...], theirs: tuple[float, ...], ttft_ms: float | None) -> Comparison:
        stages = () if ttft_ms is None else ((Stage("turn 1", 0.5, ttft_ms),), (Stage("turn 1", 0.5, 10.0),))
        turns = tuple((Turn(load, 0.0), Turn(load, None)) for load in ours)
        return Comparison("w", "a load", (Series(SPEED, ours, theirs),), (), stages, turns)

    whole = joined(
        [start((1.0, 2.0), (10.0, 10.0), 1.0), start((3.0,), (20.0,), None), start((6.0,), (30.0,), 3.0)]
    )
    assert (whole.series[0].first, whole.series[0].second) == ((1.0, 2.0, 3.0, 6.0), (10.0, 10.0, 20.0, 30.0))
    assert [turn.load for turn, _ in whole.turns] == [1.0, 2.0, 3.0, 6.0]
    assert [stages[0].ttft_ms for stages in whole.stages] == [2.0, 10.0]
