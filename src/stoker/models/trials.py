"""What trials on this machine have found out, in one file of the cache folder: verdicts, costs, calibrations.

Owns reading and writing that file, and what tells one machine from another. What a key says, and what is
found, belongs to those who have something tried: smoke decodes and `calibration`.
"""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path
from typing import Any

from stoker.private import write_text

TRIALS_FILE = "smoke.json"

_log = logging.getLogger(__name__)


def read_trials(file: Path) -> dict[str, Any]:
    """What is remembered; nothing if the file is missing or damaged."""
    try:
        known = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_trials(file: Path, known: dict[str, Any]) -> None:
    """Replace the file in one move, readable by its owner alone; where that fails nothing is kept."""
    try:
        write_text(file, json.dumps(known, indent=1))
    except OSError as error:
        _log.warning("what trials have found could not be kept in %s: %s", file, error)


def cpu_identity() -> tuple[str, ...]:
    """Model and instruction sets of the first CPU as Linux names them; elsewhere what Python knows."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.machine(), platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    values = {name.strip().lower(): value.strip() for name, _, value in lines}
    names = ("vendor_id", "model name", "cpu part", "flags", "features")
    return platform.machine(), *(values.get(name, "") for name in names)
