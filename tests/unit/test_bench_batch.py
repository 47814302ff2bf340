"""The figure of a person beside a batch: every mode runs, and what is told follows from what was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import batch_beside, session
from bench.batch_beside import Beside, felt


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts, and people who come at once."""
    monkeypatch.setattr(batch_beside, "NUM_PROMPTS", 12)
    monkeypatch.setattr(batch_beside, "NUM_ARRIVALS", 2)
    monkeypatch.setattr(batch_beside, "ARRIVE_EVERY_S", 0)


def test_every_mode_is_run_in_turns_and_every_prompt_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Bar 4: both ways in one run, printed as a ratio."""
    assert batch_beside.main(["--model", "fake:eog_period=0"]) == 0
    alone, requests, batch, ratio = capsys.readouterr().out.splitlines()
    assert alone.startswith("alone: first token p95 ")
    assert "12 of 12 prompts answered; 2 of 2 arrivals beside it" in requests
    assert "12 of 12 prompts answered; 2 of 2 arrivals beside it" in batch
    assert ratio.startswith("batch over requests: ")


def test_modes_are_summed_over_repetitions() -> None:
    """Answers and arrivals are counted, first tokens pooled."""
    found = [Beside("batch", (0.1, 0.2), 2, 12, 12), Beside("batch", (0.3,), 0, 12, 11)]
    others = [Beside(mode, (0.1,), 1, 0, 0) for mode in ("alone", "requests")]
    row = felt([*found, *others])[-1]
    assert (row.num_beside, row.num_arrivals, row.num_prompts, row.num_answers) == (2, 3, 24, 23)
    assert 200 < row.first_token_p95_ms <= 300


def test_a_lost_answer_and_a_late_token_miss_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar 4: 600 answers, and a first token as beside single requests."""
    rows = [
        {"mode": mode, "first_token_p95_ms": ms, "num_prompts": 600, "num_answers": 599}
        for mode, ms in (("alone", 100), ("requests", 200), ("batch", 400))
    ]
    monkeypatch.setattr(session, "_measured", lambda module, arguments: json.loads(json.dumps(rows)))
    first, over_alone, lost = session.measure_batch(Path("m.gguf"), range(1, 3))
    assert (first.value, first.is_good) == (2.0, False)
    assert (over_alone.value, over_alone.is_good) == (4.0, None)
    assert (lost.value, lost.is_good) == (1.0, False)
