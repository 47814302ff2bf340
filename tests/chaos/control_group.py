"""A memory control group of the test's own, v1 or v2, where this machine lets us make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")
V1 = MOUNT / "memory"
ENTER = 'echo $$ > "$0" && exec "$@"'
"""What a shell runs to enter a group before it becomes the program; $0 is the group's list of processes."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a limit.

    Attributes:
        folder: where the kernel shows it.
        limit_bytes: what everything in it may take together.
    """

    folder: Path
    limit_bytes: int

    @property
    def _is_v1(self) -> bool:
        return self.folder.is_relative_to(V1)

    def enter(self, *command: str) -> list[str]:
        """The command that runs `command` inside, from its first page on."""
        return ["sh", "-c", ENTER, str(self.folder / "cgroup.procs"), *command]

    def used_bytes(self) -> int:
        """The working set: use less the file cache that goes first."""
        name, cached = (
            ("memory.usage_in_bytes", "total_inactive_file")
            if self._is_v1
            else (
                "memory.current",
                "inactive_file",
            )
        )
        return int((self.folder / name).read_text()) - self._pairs("memory.stat")[cached]

    def most_bytes(self) -> int | None:
        """The highest use so far, file cache included; None: this kernel does not tell."""
        path = self.folder / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")
        return int(path.read_text()) if path.exists() else None

    def num_kills(self) -> int:
        """Processes that were killed for want of memory, since it was made."""
        return self._pairs("memory.oom_control" if self._is_v1 else "memory.events").get("oom_kill", 0)

    def _pairs(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group for a while; skips the test where none can be made. What ran in it has to have ended before."""
    is_v1 = V1.is_dir()
    folder = (V1 if is_v1 else MOUNT) / f"stoker-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            limit = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
            limit.write_text(str(limit_bytes))
            assert (folder / "cgroup.procs").exists()
        except OSError as error:
            pytest.skip(f"no limit can be set on a control group here: {error}")
        yield MemoryGroup(folder, limit_bytes)
    finally:
        folder.rmdir()
