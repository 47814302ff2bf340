"""Parts of a workload by what a cache did in them, and their picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # bench lies beside src and is not installed

from bench import publication
from bench.cache_chart import rows_of
from bench.client import Client, Completion, Stream
from bench.results import Comparison, Report, Series
from bench.stages import Stage, hit_rate, medians, stage_of
from bench.workloads import Better, Metric
from bench_stand_in import Remembering, serving

# ---------------------------------------------------------------- stages and their picture


def answer(num_prompt: int, num_cached: int, ttft_s: float) -> Stream:
    """A whole answer."""
    return Stream(
        sent_s=1.0,
        token_times_s=(1.0 + ttft_s,),
        last_s=3.0,
        prompt_tokens=num_prompt,
        completion_tokens=1,
        cached_tokens=num_cached,
        text="",
    )


def test_a_hit_rate_is_of_tokens_not_of_requests() -> None:
    """O1: cached prompt tokens over all; a first token is the median."""
    stage = stage_of("all", [answer(100, 0, 0.5), answer(300, 300, 0.1), answer(100, 50, 0.2)])
    assert (stage.name, stage.hit_rate) == ("all", pytest.approx(0.7))
    assert stage.ttft_ms == pytest.approx(200)
    assert hit_rate([]) == 0


def test_what_was_computed_is_by_the_servers_timings_where_it_has_them() -> None:
    """C13: else prompt tokens less cached ones."""
    assert answer(100, 60, 0.1).computed_tokens == 40
    assert replace(answer(100, 60, 0.1), timed_tokens=41).computed_tokens == 41


async def test_the_timings_of_a_stream_are_read() -> None:
    """C13: `prompt_n` of the last chunk."""
    async with serving(Remembering()) as url:
        stream = await Client(url).complete(Completion(prompt="a b c", max_tokens=2))
    assert (stream.timed_tokens, stream.computed_tokens) == (3, 3)


def test_stages_of_repetitions_are_matched_by_name() -> None:
    """Q12: one in which nothing was answered is missing from its repetition only."""
    one, two = Stage("a", 0.0, 10.0), Stage("b", 0.5, 20.0)
    assert medians([[one, two], [Stage("a", 1.0, 30.0)]]) == (Stage("a", 0.5, 20.0), two)


def test_the_picture_has_a_row_a_stage_even_if_one_server_lacks_it() -> None:
    """Q12: matched by name, in the order of the workload."""
    one, two = Stage("a", 0.0, 10.0), Stage("b", 0.5, 20.0)
    speed = Series(Metric("s", "s", "s", Better.HIGHER), (1.0,), (1.0,))
    silent = Comparison("v", "v", (speed,))
    rows = rows_of((silent, Comparison("w", "w", (speed,), (), ((one, two), (two,)))))
    assert [(row.title, row.stages) for row in rows] == [("w\na", (one, None)), ("w\nb", (two, two))]


@pytest.mark.parametrize("slow_ms", [30.0, 3000.0])
def test_the_report_shows_hit_rates_and_first_tokens(tmp_path: Path, slow_ms: float) -> None:
    """O1: a picture beside the page, the numbers in the document; none where there is nothing to show."""
    pytest.importorskip("matplotlib")
    stages = ((Stage("a", 0.9, 12.0),), (Stage("a", 0.0, slow_ms),))
    speed = Series(Metric("s", "s", "s", Better.HIGHER), (1.0,), (1.0,))
    report = Report(("x", "y"), {}, {}, (Comparison("w", "w", (speed,), (), stages),), ())
    names = [path.name for path in publication.write(report, tmp_path)]
    assert names == ["report.md", "report.json", "report.png", "cache.png"]
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")
    assert "](cache.png)" in (tmp_path / "report.md").read_text()
    (workload,) = json.loads((tmp_path / "report.json").read_bytes())["workloads"]
    assert workload["stages"][1] == [{"name": "a", "hit_rate": 0.0, "ttft_ms": slow_ms}]
    plain = Report(("x", "y"), {}, {}, (Comparison("w", "w", (speed,)),), ())
    publication.write(plain, tmp_path)
    assert not (tmp_path / "cache.png").exists()
    assert "cache.png" not in (tmp_path / "report.md").read_text()
