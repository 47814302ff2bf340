"""What the run was made on, without anything that names the machine or its folders."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str]:
    """CPU, cores, memory, system and versions, as text by name."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{psutil.cpu_count(logical=False)} physical, {os.cpu_count()} logical",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "load before": f"{os.getloadavg()[0]:.1f} (1 minute mean; a quiet machine is near 0)",
        "python": platform.python_version(),
        "stoker": version("stoker"),
        "llama-cpp-python": version("llama-cpp-python"),
    }


def binary_version(binary: Path) -> str:
    """The first line of `--version`, which llama-server prints to stderr."""
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version:").strip() if lines else "unknown"


def _cpu_model() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
