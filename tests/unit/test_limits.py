"""The memory limit that counts, from files like those the kernel shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil

from stoker.machine.limits import MemoryLimits, read_limits

MIB = 1024**2


def write(root: Path, files: dict[str, str]) -> Path:
    """A file system root with just these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_a_machine_without_control_groups_counts_its_ram(tmp_path: Path) -> None:
    """SPEC M1: physical memory is the limit where nothing else is set."""
    profile = read_limits(root=tmp_path)
    assert profile.cgroup_bytes is None
    assert profile.effective_bytes == profile.physical_bytes == psutil.virtual_memory().total
    assert 0 < profile.available_bytes <= profile.physical_bytes


def test_a_v2_limit_of_the_own_group_counts(tmp_path: Path) -> None:
    """SPEC M1: cgroup v2, with reclaimable file cache counted as available."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/app\n",
            "sys/fs/cgroup/app/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
        },
    )
    profile = read_limits(root=root)
    assert profile.effective_bytes == profile.cgroup_bytes == 100 * MIB
    assert profile.available_bytes == 60 * MIB


def test_a_tighter_parent_group_wins(tmp_path: Path) -> None:
    """SPEC M1: a limit anywhere above the own group binds too."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/app\n",
            "sys/fs/cgroup/user/memory.max": f"{50 * MIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{10 * MIB}\n",
            "sys/fs/cgroup/user/app/memory.max": "max\n",
        },
    )
    profile = read_limits(root=root)
    assert (profile.effective_bytes, profile.available_bytes) == (50 * MIB, 40 * MIB)


def test_a_container_that_sees_only_the_mount_finds_its_limit(tmp_path: Path) -> None:
    """SPEC M1: the path in /proc is the host's and does not exist inside."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/host/only/path\n",
            "sys/fs/cgroup/memory.max": f"{70 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{90 * MIB}\n",
        },
    )
    profile = read_limits(root=root)
    assert (profile.effective_bytes, profile.available_bytes) == (70 * MIB, 0)


def test_a_v1_limit_counts(tmp_path: Path) -> None:
    """SPEC M1: cgroup v1 with its own file names."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/app\n0::/\n",
            "sys/fs/cgroup/memory/app/memory.limit_in_bytes": f"{80 * MIB}\n",
            "sys/fs/cgroup/memory/app/memory.usage_in_bytes": f"{30 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    profile = read_limits(root=root)
    assert (profile.effective_bytes, profile.available_bytes) == (80 * MIB, 50 * MIB)


def test_the_users_own_limit_can_only_lower_it(tmp_path: Path) -> None:
    """SPEC M1: min(physical, cgroup, memory_limit); what this process uses counts against it."""
    rss = psutil.Process().memory_info().rss
    profile = read_limits(memory_limit=2 * rss, root=tmp_path)
    assert profile.effective_bytes == profile.user_bytes == 2 * rss
    assert profile.available_bytes <= 2 * rss
    assert (
        read_limits(memory_limit=2 * rss, root=tmp_path, own_bytes=rss // 2).available_bytes
        == 2 * rss - rss // 2
    )
    assert read_limits(memory_limit=2 * rss, root=tmp_path, own_bytes=3 * rss).available_bytes == 0
    roomy = MemoryLimits(physical_bytes=10, available_bytes=5, user_bytes=20)
    assert roomy.effective_bytes == 10


def test_a_server_that_is_not_there_yet_takes_its_part_of_the_machine_too(
    monkeypatch, tmp_path: Path
) -> None:
    """SPEC R2: what is free for a model is what is left beside it, not beside who asks."""
    rss = psutil.Process().memory_info().rss
    memory = psutil.virtual_memory()._replace(available=10 * rss)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(
        psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=rss))
    )
    assert read_limits(root=tmp_path).available_bytes == 10 * rss
    assert read_limits(root=tmp_path, own_bytes=3 * rss).available_bytes == 8 * rss
