"""What was measured, one line each: appended to a file as it comes, so that a run that is cut short keeps it.

A line is a JSON object: `model`, `server`, `row`, `round`, `values` by name, or `error`.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


BUSY_CLIENT = 0.6
"""Of one core: from here on a client may be what is slow."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of one server in one round, or why there is none.

    Attributes:
        model: file name of the model; empty: the line is about the machine.
        client_busy: share of one core that the client took meanwhile.
        facts: of the machine.
    """

    model: str = ""
    server: str = ""
    row: str = ""
    round: int = 0
    values: dict[str, float] = {}
    error: str = ""
    client_busy: float = 0.0
    facts: dict[str, str] = {}


class Lines:
    """All lines of a run.

    Args:
        path: gets each as it is added, behind what is there; None: no file does.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: list[Line] = []

    def __repr__(self) -> str:
        return f"<Lines {len(self._lines)}, {self._path}>"

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Lines:
        """Those of former runs.

        Raises:
            OSError, msgspec.DecodeError: a file is none, or holds something else.
        """
        found = cls()
        for path in paths:
            found._lines += [msgspec.json.decode(text, type=Line) for text in path.read_bytes().splitlines()]
        return found

    def add(self, line: Line) -> None:
        """Keep another."""
        self._lines.append(line)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order in which they came."""
        return list(dict.fromkeys(line.model for line in self._lines if line.model))

    def rows(self, model: str) -> list[str]:
        """Names of the rows of a model, in the order in which they came."""
        return list(dict.fromkeys(line.row for line in self._lines if line.model == model))

    def facts(self) -> dict[str, str]:
        """Of the machine."""
        return {name: fact for line in self._lines for name, fact in line.facts.items()}

    def value(self, model: str, server: str, row: str, name: str) -> float | None:
        """The median over all rounds; None: it was not measured."""
        found = [
            line.values[name]
            for line in self._lines
            if (line.model, line.server, line.row) == (model, server, row) and name in line.values
        ]
        return median(found) if found else None

    def doubts(self) -> list[str]:
        """Rows in which the client may be what was measured, a sentence each."""
        return [
            f"{one.model} {one.server} {one.row}: the client took {one.client_busy:.2f} of a core"
            for one in self._lines
            if one.client_busy > BUSY_CLIENT
        ]

    def errors(self) -> list[str]:
        """What could not be measured, a sentence each: of what a program said, how it begins and ends."""
        found = []
        for line in self._lines:
            if said := line.error.strip().splitlines():
                text = said[0] if len(said) == 1 else f"{said[0]} ... {said[-1]}"
                found.append(f"{line.model} {line.server} {line.row}: {text}")
        return found
