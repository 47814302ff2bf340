"""Who holds how many bytes of host memory and disk, by line (SPEC C14).

Counts only: what a line may hold, and who gives way, is the business of whoever writes it.
"""

from __future__ import annotations


class Ledger:
    """Bytes by line, e.g. `cache` or `parked`."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Ledger {self._lines}>"

    def add(self, line: str, size_bytes: int) -> None:
        """Count `size_bytes` more (or fewer, if negative) on a line."""
        held = self._lines.get(line, 0) + size_bytes
        assert held >= 0, f"line {line!r} would hold {held} bytes: {self!r}"
        self._lines[line] = held

    def used(self, line: str) -> int:
        """Bytes on a line."""
        return self._lines.get(line, 0)

    def lines(self) -> dict[str, int]:
        """Every line."""
        return dict(self._lines)
