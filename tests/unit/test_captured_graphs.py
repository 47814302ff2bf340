"""Steps are not captured as CUDA graphs unless somebody asks for it."""

import os
import subprocess
import sys

import pytest
from bench import captured_graphs

from tiny_models import write_llama

STARTED = """
import os
from stoker.backends.llama import binding
binding.start()
print(os.environ.get(binding.NO_GRAPHS, ""))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1"), ({"STOKER_CUDA_GRAPHS": "1"}, ""), ({"GGML_CUDA_DISABLE_GRAPHS": "yes"}, "yes")],
)
def test_the_library_is_told_before_it_starts(given, expected):
    """B7: what it would capture may be wrong; who asks for it gets it, and a variable that is set stays."""
    clean = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STARTED], env=clean | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_the_bench_of_them_finds_steps_that_are_not_finite(tmp_path, monkeypatch):
    """B7: it counts them, and says where the first one was."""
    model = write_llama(tmp_path / "model.gguf")
    assert "0 of 12 steps not finite; 1: " in captured_graphs.measure(model, 12)
    sound = captured_graphs._step
    monkeypatch.setattr(captured_graphs, "_step", lambda context, rows: (sound(context, rows)[0], rows > 60))
    found = captured_graphs.measure(model, 12)
    assert "0 of 12" not in found
    assert ", the first at step " in found
