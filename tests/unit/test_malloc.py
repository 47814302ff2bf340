"""What the C library keeps of freed memory: measured in processes of their own, where it is the GNU one."""

import platform
import subprocess
import sys

import pytest

from stoker.engine.process import limit_allocator
from stoker.machine import malloc
from stoker.machine.limits import DEFAULTS, Tier

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another")

MIB = 2**20
CHILD = """
import ctypes
from stoker.machine import malloc

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def used(size, count):
    "Blocks that were written to, each with another behind it, which stays."
    blocks = []
    for _ in range(count):
        blocks.append(library.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
        ctypes.memset(library.malloc(120_000), 1, 1)  # too large for what is free in between already
    return blocks


def free(blocks):
    for block in blocks:
        library.free(block)

"""


def kept_by(script):
    """Bytes that a process holds beyond those at its start when the script has run."""
    code = f"{CHILD}before = resident_bytes()\n{script}\nprint(resident_bytes() - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.parametrize("call", ["malloc.trim()", "malloc.give_back()"])
def test_what_is_free_between_blocks_goes_back_to_the_system(call):
    """SPEC M4: 96 MiB in small blocks; the C library keeps nearly all of it by itself."""
    script = "blocks = used(64 * 1024, 1536)\nfree(blocks)\n"
    assert kept_by(script) > 64 * MIB
    assert kept_by(script + call) < 16 * MIB


def test_large_blocks_go_back_at_once_under_a_limit():
    """SPEC M2, R10: the C library would else learn from the first one to keep such blocks for itself."""
    script = "free(used(12 * 2**20, 1))\nfree(used(11 * 2**20, 8))\n"
    assert kept_by(script) > 64 * MIB
    assert kept_by("malloc.limit_cache(3_000_000)\n" + script) < 16 * MIB


def arenas_after(script):
    """How many arenas the C library has after each of eight threads asked it for memory at the same time."""
    code = f"""{CHILD}
import threading
from stoker.machine import malloc
{script}
together = threading.Barrier(8)
def work():
    together.wait()
    library.malloc(1000)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
library.malloc_stats()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.count("Arena ")


def test_threads_of_an_engine_share_one_arena():
    """SPEC M2: each would else keep what it freed for itself, as many arenas as threads."""
    assert arenas_after("") > 1
    assert arenas_after("malloc.share_arena()") == 1


@pytest.mark.parametrize("size", [64 * 1024, 512 * 1024])
@pytest.mark.parametrize(("limit", "is_kept"), [(3_000_000, False), (50_000_000, True)])
def test_free_memory_at_the_end_of_the_heap_stays_below_the_limit(size, limit, *, is_kept):
    """SPEC M2: the tier's figure is what an engine keeps for its next allocation, of blocks below a MiB."""
    script = f"""
malloc.limit_cache({limit})
blocks = [0] * {32 * MIB // size}  # as long as it will be: a list that grew would stand between the blocks
for place in range(len(blocks)):
    blocks[place] = library.malloc({size})
for each in blocks:
    ctypes.memset(each, 1, {size})
free(blocks)
"""
    assert (kept_by(script) > 16 * MIB) is is_kept


def test_an_engine_limits_its_allocator_by_its_tier(monkeypatch):
    """SPEC M2: before a model is loaded."""
    limits = []
    monkeypatch.setattr(malloc, "limit_cache", limits.append)
    limit_allocator(2**30)
    assert limits == [DEFAULTS[Tier.ULTRA_LOW].allocator_cache_bytes]
