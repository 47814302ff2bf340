"""Bytes of memory and disk by line (SPEC C14): models, stored prefixes, parked states. Sets no limits."""

from __future__ import annotations

DISK = "disk"
"""The one line that is not memory."""


class Ledger:
    """Bytes by line, e.g. `weights`, `kv`, `cache` or `parked`, of the machine's memory and of devices."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._devices: dict[str, dict[str, int]] = {}

    def __repr__(self) -> str:
        return f"<Ledger {self._lines} {self._devices}>"

    def add(self, line: str, size_bytes: int, device: str = "") -> None:
        """Add `size_bytes`, which may be negative, to a line of a device's memory; none: of the machine's."""
        lines = self._devices.setdefault(device, {}) if device else self._lines
        held = lines.get(line, 0) + size_bytes
        assert held >= 0, f"line {line!r} would hold {held} bytes: {self!r}"
        lines[line] = held

    def used(self, line: str) -> int:
        """Bytes on a line of the machine's memory."""
        return self._lines.get(line, 0)

    def host_lines(self) -> dict[str, int]:
        """Every line that is the machine's memory."""
        return {line: size_bytes for line, size_bytes in self._lines.items() if line != DISK}

    def device_lines(self) -> dict[str, dict[str, int]]:
        """Every line of the memory of devices, by their ids."""
        return {device: dict(lines) for device, lines in self._devices.items()}

    def lines(self) -> dict[str, int]:
        """Every line, wherever its bytes lie."""
        found = dict(self._lines)
        for lines in self._devices.values():
            for line, size_bytes in lines.items():
                found[line] = found.get(line, 0) + size_bytes
        return found
