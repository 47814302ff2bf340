"""What MLX really takes of memory for a folder, beside what was estimated from its headers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from model_folders import smollm2_folder

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("mlx_lm", reason="the extra mlx is not installed")
pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from pathlib import Path
from stoker.backends.mlx.reader import open_model
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.ipc.model import ModelSpec
from stoker.models.reader import LoadContext

def most_bytes():
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

path, slots, length = sys.argv[1], 4, 400
spec = ModelSpec(id="m", path=path, num_slots=slots, n_ctx=slots * (length + 16), n_batch=256)
reader = open_model(path)
estimate, before = reader.estimator()(spec), most_bytes()
backend = reader.load(spec, LoadContext(lambda _: None))
backend.vocabulary.tokenize("x", add_special=False, parse_special=False)
backend.vocabulary.least_tokens("x", 1)
for seq in range(slots):
    for start in range(0, length, 200):
        backend.launch(BatchPlan((PlanItem(seq, start, [5 + seq] * 200, 1),))).rows()
for step in range(4):
    backend.launch(BatchPlan(tuple(PlanItem(seq, length + step, [7], 1) for seq in range(slots)))).rows()
told = sum(backend.memory().values())
print(json.dumps({"estimated": estimate.total_bytes, "taken": most_bytes() - before, "told": told}))
"""


def test_an_estimate_is_no_less_than_what_is_taken_and_not_far_more(tmp_path: Path) -> None:
    """F4: of SmolLM2 in float32, with all its slots in use."""
    path = smollm2_folder(tmp_path / "smollm2")
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)
    assert found["taken"] <= found["estimated"] <= 1.5 * found["taken"], found
    assert found["told"] <= found["estimated"], found
