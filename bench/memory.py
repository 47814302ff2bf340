"""What servers hold in memory with the same model, each alone: PSS of the whole process tree.

A page that several processes map counts in each by its share, so the sum over a tree has it once, where
resident sizes added up have it several times. Other programs that map the same model take a share of it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from bench.errors import BenchError
from bench.results import Figure
from bench.workloads.fanout import Fanout
from bench.workloads.single import Single

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.target import Target

WORK = (Single, Fanout)
LIMIT_MIB = 110.0
"""What processes of Python, their libraries and stored prefixes may take beside a program without them."""


def tree_pss_mib(root: psutil.Process) -> float:
    """MiB of a process and all its live descendants, as `/proc/PID/smaps_rollup` has it.

    Raises:
        BenchError: this system does not tell.
    """
    try:
        sizes = [each.memory_full_info().pss for each in (root, *root.children(recursive=True))]
    except AttributeError:
        raise BenchError("what memory processes share is told on Linux only") from None
    return float(sum(sizes)) / 2**20


async def held_after_work(target: Target, pid: int, seed: int) -> dict[str, float]:
    """MiB of the server `pid` after one run of each piece of work, one behind the other, by its name."""
    held = {}
    for kind in WORK:
        await kind().run(target, seed)
        held[kind.name] = tree_pss_mib(psutil.Process(pid))
    return held


def memory_figures(held: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Of two servers, by label: what each held, and how much more the first than the second."""
    (first, ours), (second, theirs) = held.items()
    figures = []
    for kind in WORK:
        for label, sizes in held.items():
            title = f"memory of {label} after {kind.title}"
            figures.append(Figure(f"memory_{kind.name}_{label}", title, "MiB", sizes[kind.name]))
        title = f"memory of {first} beyond {second}'s after {kind.title}"
        more = ours[kind.name] - theirs[kind.name]
        figures.append(Figure(f"memory_{kind.name}_more", title, "MiB", more, LIMIT_MIB))
    return figures
