"""What a sequence's exported state is to those who only keep it: bytes of a known size."""

from __future__ import annotations

from typing import TypeAlias

Snapshot: TypeAlias = bytes | bytearray | memoryview
