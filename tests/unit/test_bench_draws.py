"""The bench of candidates in place of rows, on a tiny model of the CPU's build."""

import json

import pytest
from bench import draw_cost

from stoker.backends.llama.graph import draws
from tiny_models import write_llama

ARGUMENTS = ["--rows", "3", "--steps", "4", "--tokens", "10"]


@pytest.mark.parametrize("way", [[], ["--streams"]])
def test_it_compares_and_times_three_ways(tmp_path, capsys, way):
    """B6: what is drawn from candidates is what whole rows give; each way has its time."""
    model = write_llama(tmp_path / "model.gguf")
    assert draw_cost.main(["--model", str(model), "--json", *ARGUMENTS, *way]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["whole rows, greedy", "candidates, greedy", "candidates, sampled"]
    assert [each["name"] for each in found["ways"]] == names
    assert all(each["launch_ms"] > 0.0 and each["draw_ms"] > 0.0 for each in found["ways"])
    assert found["equal_steps"] == 4


def test_it_ends_where_candidates_are_wrong(tmp_path, capsys, monkeypatch):
    """B6: a device whose sort is another one is named, and nothing is timed on it."""
    model = write_llama(tmp_path / "model.gguf")
    monkeypatch.setattr(draws, "_DESCENDING", 0)
    assert draw_cost.main(["--model", str(model), *ARGUMENTS]) == 1
    assert "not right" in capsys.readouterr().err
