"""llama.cpp's libraries are loaded before numpy in every process that computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

RECORD = """
import sys

order = []

def note(event, arguments):
    if event == "import" and arguments[0] in {"numpy", "numpy._core._multiarray_umath"}:
        order.append("numpy")
    if event == "ctypes.dlopen" and "libllama" in str(arguments[0]):
        order.append("llama.cpp")

sys.addaudithook(note)
"""
ENGINE = """
import io, socket
from stoker.engine.process import serve
import msgspec
from stoker.client.process.transport import config_of
from stoker.settings import EngineSettings

ours, theirs = socket.socketpair()
ours.close()  # the front is gone: the engine comes up, and leaves
sys.stdin = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(config_of(EngineSettings()))))
assert serve([str(theirs.detach())]) == 0
"""
TRIAL = """
import runpy
sys.argv = ["trial", "no-such-file.gguf"]
try:
    runpy.run_module("stoker.backends.llama.smoke.trial", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
"""
LIBRARY = "import stoker.backends.llama.backend"


@pytest.mark.parametrize("program", [ENGINE, TRIAL, LIBRARY], ids=["engine", "trial", "backend"])
def test_llama_cpp_is_loaded_before_numpy(program: str) -> None:
    """R9: else a toolchain that links the C++ runtime into each library crashes at every load."""
    script = RECORD + program + '\nprint("ORDER", *order)'
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    order = next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ORDER"))
    assert order[0] == "llama.cpp"
    assert "numpy" in order
