"""One thing that `stoker doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding stands: fine, worth a look, or in the way of working at all."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `remedy` says what to do where something is wrong."""

    subject: str
    level: Level
    text: str
    remedy: str = ""
