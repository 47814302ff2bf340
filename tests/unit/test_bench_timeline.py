"""Who ran when, from token arrivals, and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import publication
from bench.results import Comparison, Report, Series
from bench.timeline import Spell, State, Timeline, Trace, pack, spells_of, timeline_of
from bench.workloads import Better, Metric

from stoker.ipc.request import Priority

FLEX, ASKED = Priority.BACKGROUND, Priority.INTERACTIVE


def trace(*times_s: float, sent_s: float = 0.0, ended_s: float | None = None, whole: bool = True) -> Trace:
    """A background request whose tokens came at these times."""
    end_s = (times_s[-1] if times_s else sent_s) if ended_s is None else ended_s
    return Trace(priority=FLEX, sent_s=sent_s, token_times_s=times_s, ended_s=end_s, is_complete=whole)


def ticks(began_s: float, count: int, gap_s: float = 0.05) -> list[float]:
    """Token times at even gaps."""
    return [began_s + gap_s * index for index in range(count)]


def borders(seen: Trace) -> list[tuple[str, float, float]]:
    """State, begin and end of each spell, to the millisecond."""
    return [(s.state.value, round(s.began_s, 3), round(s.ended_s, 3)) for s in spells_of(0, seen)]


def test_a_long_gap_between_tokens_splits_a_run() -> None:
    """Q4: what was parked shows as a pause between two runs of one request."""
    assert borders(trace(*ticks(1.0, 5), *ticks(3.0, 5))) == [
        ("waiting", 0.0, 1.0),
        ("running", 1.0, 1.2),
        ("paused", 1.2, 3.0),
        ("running", 3.0, 3.2),
    ]


def test_a_gap_that_is_short_or_usual_is_no_pause() -> None:
    """Q8: a hiccup of a few steps, or a request that is slow throughout, goes on running."""
    assert borders(trace(*ticks(1.0, 5), 1.45)) == [("waiting", 0.0, 1.0), ("running", 1.0, 1.45)]
    assert borders(trace(*ticks(1.0, 9, gap_s=0.5), 7.0)) == [("waiting", 0.0, 1.0), ("running", 1.0, 7.0)]


def test_a_request_without_tokens_waits_to_its_end() -> None:
    """Q6: one that never ran has no run."""
    (spell,) = spells_of(7, trace(sent_s=2.0, ended_s=5.0, whole=False), start_s=2.0)
    assert spell == Spell(7, FLEX, State.WAITING, 0.0, 3.0, is_broken=True)


def test_a_failure_is_marked_where_the_request_ended() -> None:
    """Q12: at the last token if it came at once, after a silence if it did not."""
    at_once = spells_of(0, trace(*ticks(1.0, 5), ended_s=1.25, whole=False))
    later = spells_of(0, trace(*ticks(1.0, 5), ended_s=120.0, whole=False))
    assert [spell.is_broken for spell in at_once] == [False, True]
    assert [spell.is_broken for spell in later] == [False, False, True]
    assert (later[-1].state, later[-1].ended_s) == (State.PAUSED, 120.0)
    assert not any(spell.is_broken for spell in spells_of(0, trace(1.0, 1.1)))


def run(request: int, began_s: float, ended_s: float) -> Spell:
    """A running spell."""
    return Spell(request, FLEX, State.RUNNING, began_s, ended_s)


def test_spells_are_packed_into_as_few_lanes_as_keep_them_apart() -> None:
    """Q10: as many lanes as ran at once; a lane is free at the moment its spell ends."""
    lanes = pack([run(2, 1.0, 2.0), run(0, 0.0, 1.0), run(1, 0.0, 3.0), run(3, 2.5, 4.0)])
    assert [[spell.request for spell in lane] for lane in lanes] == [[0, 2, 3], [1]]


def test_a_request_returns_to_the_lane_it_had() -> None:
    """Q4: resumed beside where it ran before, so that the eye can follow."""
    lanes = pack([run(0, 0, 1), run(1, 0, 1), run(2, 1, 2), run(1, 2, 3)])
    assert [[spell.request for spell in lane] for lane in lanes] == [[0, 2], [1, 1]]


def test_a_timeline_starts_with_the_first_request_and_ends_with_the_last() -> None:
    """Q2: waiting and paused spells queue apart from those that run."""
    timeline = timeline_of([trace(11.0, 11.1, sent_s=10.0), trace(11.1, 11.2, sent_s=10.5, ended_s=14.0)])
    assert [[spell.request for spell in lane] for lane in timeline.slots] == [[0, 1]]
    assert [[spell.state for spell in lane] for lane in timeline.queue] == [
        [State.WAITING],
        [State.WAITING, State.PAUSED],
    ]
    assert timeline.slots[0][0].began_s == pytest.approx(1.0)
    assert timeline.end_s == pytest.approx(4.0)
    assert Timeline((), ()).end_s == 0.0


def test_the_report_shows_who_ran_when(tmp_path: Path) -> None:
    """O2: a picture a workload that has timelines, its spells as data, and none left of an older report."""
    pytest.importorskip("matplotlib")
    asked = Trace(priority=ASKED, sent_s=0.5, token_times_s=(0.8, 0.85, 2.0), ended_s=2.0, is_complete=True)
    first = timeline_of([trace(0.1, 0.2, 1.5), asked])
    second = timeline_of([trace(*ticks(0.1, 30), whole=False), trace(sent_s=0.2, ended_s=3.0, whole=False)])
    speed = Series(Metric("speed", "decode", "tok/s", Better.HIGHER, bar=0.95), (8.0,), (0.0,))
    comparison = Comparison("priority", "a crowd", (speed,), (first, second))
    report = Report(("a", "b"), {}, {}, (comparison,), ())
    stale = tmp_path / "timeline-exhaustion.png"
    stale.write_bytes(b"old")
    names = [path.name for path in publication.write(report, tmp_path)]
    assert names == ["report.md", "report.json", "report.png", "timeline-priority.png"]
    assert (tmp_path / "timeline-priority.png").read_bytes().startswith(b"\x89PNG")
    assert not stale.exists()
    assert "](timeline-priority.png)" in (tmp_path / "report.md").read_text()
    (workload,) = json.loads((tmp_path / "report.json").read_bytes())["workloads"]
    assert workload["timelines"][0]["slots"][0][0]["priority"] == "background"
