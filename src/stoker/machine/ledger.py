"""Bytes of memory and disk by line (SPEC C14): models, stored prefixes, parked states. Sets no limits."""

from __future__ import annotations

DISK = "disk"
"""The one line that is not memory."""


class Ledger:
    """Bytes by line, e.g. `weights`, `kv`, `cache` or `parked`."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Ledger {self._lines}>"

    def add(self, line: str, size_bytes: int) -> None:
        """Add `size_bytes`, which may be negative, to a line."""
        held = self._lines.get(line, 0) + size_bytes
        assert held >= 0, f"line {line!r} would hold {held} bytes: {self!r}"
        self._lines[line] = held

    def used(self, line: str) -> int:
        """Bytes on a line."""
        return self._lines.get(line, 0)

    def host_lines(self) -> dict[str, int]:
        """Every line that is memory."""
        return {line: size_bytes for line, size_bytes in self._lines.items() if line != DISK}

    def lines(self) -> dict[str, int]:
        """Every line."""
        return dict(self._lines)
