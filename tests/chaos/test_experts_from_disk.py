"""A mixture of experts three times as large as a memory group: planned, loaded, and it answers there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_group import MemoryGroup, memory_group
from real_server import Answer, serving

from tiny_models import write_moe

LIMIT_BYTES = 640 * 2**20
"""Of which Stoker itself takes about 250 MiB."""
SETTINGS = {"slots": 1, "ctx_size": 1024, "memory_margin": "64MiB", "cache_ram_bytes": 0}
NUM_TOKENS = 12


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A group of that size."""
    with memory_group(LIMIT_BYTES) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """1.1 GiB, nearly all of it experts, and none of it in the page cache."""
    path = write_moe(tmp_path / "large.gguf", num_layers=8, num_experts=64, width=6016)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield path
    path.unlink()


def planned(group: MemoryGroup, model: Path) -> dict[str, Any]:
    """What `stoker plan` says inside the group."""
    command = [sys.executable, "-P", "-m", "stoker.cli", "plan", str(model), "--json", "--ctx", "1024"]
    done = subprocess.run(
        group.enter(*command, "--slots", "1", "--margin", "64MiB"), capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
async def test_a_mixture_three_times_too_large_streams_its_experts(group: MemoryGroup, model: Path) -> None:
    """SPEC R14: the verdict is `streams`; it answers, within the group, and nothing is killed."""
    plan = planned(group, model)
    assert plan["verdict"] == "streams"
    experts = plan["experts"]
    assert experts["bytes"] > 1.7 * LIMIT_BYTES
    assert 0 < experts["budget_bytes"] < LIMIT_BYTES
    assert experts["active_bytes"] == experts["bytes"] // 32
    async with serving(model, group=group, **SETTINGS) as server:
        answer = await server.stream(Answer("a"), "hello world", NUM_TOKENS)
        assert (answer.finish, len(answer.tokens)) == ("length", NUM_TOKENS)
        served = next(each for each in (await server.status())["models"] if each["id"] == "large")
        found = served["streaming"]
        print(f"\nplan {experts}\nload {found}")  # noqa: T201
        assert "park_interactive" not in (await server.status())["memory"]["rungs"]
        assert served["degraded"][-1].endswith("read from disk as needed")
        assert found["resident"] <= found["budget"] < LIMIT_BYTES < found["size"]
        assert found["num_faults"] > 0
        assert found["read_bytes"] > 0
        metrics = (await server.http.get("/metrics")).text
        assert 'stoker:expert_bytes{model="large",part="budget"}' in metrics
        assert (await server.stream(Answer("b"), "hello", 2)).finish == "length"
        assert (await server.status())["engine"]["restarts"] == 0
    assert group.num_kills() == 0
