"""Measuring memory: one sample from files like the kernel's, and the thread that posts samples."""

import os
import queue
import select
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from stoker.machine import monitor as monitor_module
from stoker.machine.cgroups import ControlGroup
from stoker.machine.ladder import LADDER, Ladder
from stoker.machine.limits import Tier
from stoker.machine.monitor import (
    LINGER_S,
    CutWatch,
    DeviceSample,
    MemoryMonitor,
    Sources,
    StallTrigger,
    footprint_of,
    measure,
)
from stoker.machine.pressure import Pressure
from stoker.machine.thermal import Heat, HeatReading

MIB = 1024**2
GIB = 1024**3
WAIT_S = 60.0


def write(root, files):
    """A file system root with just these files; each changes at once, as the kernel's do."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name("fresh")
        fresh.write_text(text, encoding="ascii")
        fresh.replace(path)
    return root


def v1_group(root, *, usage, cached=0, failcnt=0, kills=0):
    """A version 1 group of 1000 MiB; sizes in MiB."""
    folder = "sys/fs/cgroup/memory/app/"
    return write(
        root,
        {
            "proc/self/cgroup": "4:memory:/app\n",
            folder + "memory.limit_in_bytes": f"{1000 * MIB}\n",
            folder + "memory.usage_in_bytes": f"{usage * MIB}\n",
            folder + "memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {cached * MIB}\n",
            folder + "memory.failcnt": f"{failcnt}\n",
            folder + "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        },
    )


def v2_group(root, *, usage, cached=0, events=""):
    """A version 2 group of 1000 MiB below one of 4000 MiB; sizes in MiB."""
    folder = "sys/fs/cgroup/slice/app/"
    return write(
        root,
        {
            "proc/self/cgroup": "0::/slice/app\n",
            "sys/fs/cgroup/slice/memory.max": f"{4000 * MIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{usage * MIB}\n",
            folder + "memory.max": f"{1000 * MIB}\n",
            folder + "memory.current": f"{usage * MIB}\n",
            folder + "memory.stat": f"anon 1\ninactive_file {cached * MIB}\nactive_file 7\n",
            folder + "memory.events": events,
        },
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 16 GiB, of which 12 are available, and an engine that holds 1; all can be changed."""
    state = SimpleNamespace(total=16 * GIB, available=12 * GIB, footprint=GIB)
    monkeypatch.setattr(monitor_module.psutil, "virtual_memory", lambda: state)
    monkeypatch.setattr(monitor_module, "footprint_of", lambda pids: state.footprint)
    return state


# ---------------------------------------------------------------- one sample


def test_a_sample_of_a_machine_without_groups(tmp_path):
    """SPEC M3: footprint, limit, machine; no group, no stalls, no device."""
    sample = measure(Sources(root=tmp_path))
    assert (sample.footprint_bytes, sample.limit_bytes) == (GIB, 16 * GIB)
    assert (sample.available_bytes, sample.system_available_bytes, sample.total_bytes) == (
        12 * GIB,
        12 * GIB,
        16 * GIB,
    )
    absent = (sample.cgroup_used_bytes, sample.cgroup_limit_bytes, sample.psi_some_avg10)
    assert absent == (None, None, None)
    assert sample.devices == ()
    assert (sample.heat, sample.is_os_event) == (HeatReading(), False)


@pytest.mark.parametrize("make_group", [v1_group, v2_group])
def test_a_group_counts_with_its_working_set(tmp_path, make_group):
    """SPEC M3: usage less the file cache that the kernel gives back first, in both versions."""
    sample = measure(Sources(root=make_group(tmp_path, usage=900, cached=300)))
    assert (sample.cgroup_used_bytes, sample.cgroup_limit_bytes) == (600 * MIB, 1000 * MIB)
    assert sample.limit_bytes == 1000 * MIB
    assert sample.system_available_bytes == 12 * GIB


def test_what_a_group_has_left_is_available(tmp_path, machine):
    """SPEC M1: inside every limit, that of the footprint included."""
    machine.footprint = 100 * MIB
    root = v2_group(tmp_path, usage=900, cached=300)
    assert measure(Sources(root=root)).available_bytes == 400 * MIB
    assert measure(Sources(root=root, memory_limit=150 * MIB)).available_bytes == 50 * MIB
    assert measure(Sources(root=root, memory_limit=50 * MIB)).available_bytes == 0


def test_the_fullest_group_is_shown(tmp_path):
    """SPEC M3: a parent near its limit presses although the own group has room."""
    root = v2_group(tmp_path, usage=100)
    write(root, {"sys/fs/cgroup/slice/memory.current": f"{3900 * MIB}\n"})
    sample = measure(Sources(root=root))
    assert (sample.cgroup_used_bytes, sample.cgroup_limit_bytes) == (3900 * MIB, 4000 * MIB)
    assert sample.limit_bytes == 1000 * MIB


def test_a_soft_limit_of_version_2_is_a_limit(tmp_path):
    """SPEC M1: over memory.high the kernel slows a group down until it is of no use."""
    root = v2_group(tmp_path, usage=100)
    write(root, {"sys/fs/cgroup/slice/app/memory.high": f"{500 * MIB}\n"})
    assert measure(Sources(root=root)).cgroup_limit_bytes == 500 * MIB


def test_the_limit_of_a_small_machine_is_its_tiers(tmp_path, machine):
    """SPEC M1, M2: 4 GiB may use 2.5 GB, unless the user says otherwise."""
    machine.total = 4 * GIB
    sample = measure(Sources(root=tmp_path))
    assert (sample.limit_bytes, sample.tier) == (2_500_000_000, Tier.STANDARD)
    assert measure(Sources(root=tmp_path, memory_limit=3 * GIB)).limit_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        (
            "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0 avg300=0 total=1\n",
            12.5,
        ),
        ("", None),
        ("some avg10=many\n", None),
    ],
)
def test_stalled_time_is_read(tmp_path, text, percent):
    """SPEC M3: PSI, where there is any."""
    root = write(tmp_path, {"proc/pressure/memory": text})
    assert measure(Sources(root=root)).psi_some_avg10 == percent


def test_a_device_is_read(tmp_path):
    """SPEC M3: each accelerator beside host memory; what neither is free nor ours is others'."""
    card = DeviceSample(id="CUDA0", free_bytes=3, total_bytes=8, own_bytes=4)
    sample = measure(Sources(root=tmp_path, devices=lambda: (card,)))
    assert sample.devices == (card,)
    assert card.other_bytes == 1
    assert DeviceSample(id="CUDA0", free_bytes=3, total_bytes=8, own_bytes=None).other_bytes is None


def test_the_hottest_of_sensors_and_cards_counts(tmp_path):
    """SPEC M6: whichever it is."""
    hot, cool = HeatReading(Heat.SERIOUS, "CUDA1", 92.0), HeatReading(Heat.FAIR, "cpu", 88.0)
    card = DeviceSample(id="CUDA1", free_bytes=3, total_bytes=8, heat=hot)
    sample = measure(Sources(root=tmp_path, heat=lambda: cool, devices=lambda: (card,)))
    assert sample.heat == hot
    assert measure(Sources(root=tmp_path, heat=lambda: cool)).heat == cool


def test_the_footprint_is_that_of_every_process_and_of_the_last_ones_children():
    """SPEC M3: two processes with a child each; one that is gone holds nothing."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        alone, family = {}, {}
        for process in (one, other):
            assert process.stdout.readline() == b"1\n"
            (child,) = psutil.Process(process.pid).children()
            alone[process] = psutil.Process(process.pid).memory_info().rss
            family[process] = alone[process] + child.memory_info().rss
        assert footprint_of((one.pid,)) == pytest.approx(family[one], rel=0.1)
        both = alone[one] + family[other]
        assert footprint_of((one.pid, other.pid)) == pytest.approx(both, rel=0.1)
        # A child that is named itself is counted once.
        assert footprint_of((other.pid, child.pid)) == pytest.approx(family[other], rel=0.1)
        for process in (one, other):
            process.communicate(b"\n")
    assert footprint_of((one.pid,)) == 0
    assert footprint_of(()) == 0


# ---------------------------------------------------------------- alarms


def group(*, used, cuts=0, kills=0):
    """A group of a thousand bytes."""
    return ControlGroup("/group", 1000, used, cuts, kills)


def test_a_cut_at_the_limit_is_an_alarm_and_one_of_file_cache_is_not():
    """SPEC M3: the kernel counts both; reading a large file in a small group is no shortage."""
    watch = CutWatch()
    assert not watch.has_risen([group(used=990, cuts=7)])  # before our time
    assert not watch.has_risen([group(used=990, cuts=7)])
    assert watch.has_risen([group(used=990, cuts=8)])
    assert not watch.has_risen([group(used=300, cuts=2000)])
    assert watch.has_risen([group(used=300, cuts=2000, kills=1)])
    assert not watch.has_risen([])
    assert not watch.has_risen([group(used=990, cuts=9000)])


def test_a_machine_without_stall_accounting_has_no_trigger(tmp_path):
    """SPEC M3: PSI where there is any."""
    trigger = StallTrigger(tmp_path)
    assert trigger.fd is None
    trigger.close()
    write(tmp_path, {"proc/pressure/memory": ""})
    trigger = StallTrigger(tmp_path)
    assert (tmp_path / "proc/pressure/memory").read_bytes() == b"some 150000 2000000\0"
    trigger.close()
    trigger.close()
    assert repr(trigger) == "<StallTrigger off>"


# ---------------------------------------------------------------- the thread


class Thermometer:
    """Shows what it is told and counts how often it is read, which is once a sample."""

    def __init__(self):
        self.reading = HeatReading()
        self.num_read = 0
        self._was_read = threading.Condition()

    def read(self):
        """The reading."""
        with self._was_read:
            self.num_read += 1
            self._was_read.notify_all()
        return self.reading

    def wait_for(self, num_more, *, after=None):
        """Wait until so many more samples were begun, from now or after a count."""
        with self._was_read:
            goal = num_more + (self.num_read if after is None else after)
            assert self._was_read.wait_for(lambda: self.num_read >= goal, WAIT_S)


class Bench:
    """A monitor over files, and what it posted."""

    def __init__(self, root, every_s):
        self.heat = Thermometer()
        self.posted = queue.Queue()
        self.monitor = MemoryMonitor(self.posted.put, Sources(root=root, heat=self.heat.read), every_s)

    def next(self):
        """The next sample posted."""
        return self.posted.get(timeout=WAIT_S)

    def drain(self):
        """What was posted meanwhile."""
        samples = []
        while not self.posted.empty():
            samples.append(self.posted.get())
        return samples


@pytest.fixture
def bench(tmp_path):
    """A fast gauge, not started."""
    bench = Bench(tmp_path, 0.002)
    yield bench
    bench.monitor.close()


@pytest.fixture
def slow(tmp_path):
    """A gauge that takes one sample and then waits for a reason; started, and its first sample taken."""
    bench = Bench(tmp_path, 3600.0)
    bench.monitor.start()
    bench.next()
    yield bench
    bench.monitor.close()


def test_on_a_quiet_machine_only_the_first_sample_is_posted(bench):
    """SPEC M3: an idle engine sleeps although the machine is sampled."""
    bench.monitor.start()
    assert bench.next().footprint_bytes == GIB
    bench.heat.wait_for(20)
    assert bench.drain() == []


def test_pressure_is_posted_while_it_lasts_and_until_the_ladder_has_let_go(bench, machine, monkeypatch):
    """SPEC M3, M4: nothing that could change a decision is missed, and then it sleeps again."""
    now_s = 100.0
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    bench.monitor.start()
    bench.next()
    machine.available = 3 * GIB
    assert [bench.next().system_available_bytes for _ in range(5)] == [3 * GIB] * 5
    machine.available = 12 * GIB
    while bench.next().system_available_bytes == 3 * GIB:
        pass
    now_s = 100.0 + LINGER_S
    while bench.next().at_s == 100.0:
        pass
    now_s += 0.1
    bench.heat.wait_for(2)  # one may be under way
    bench.drain()
    bench.heat.wait_for(20)
    assert bench.drain() == []


def test_it_lingers_as_long_as_the_ladder_may_need():
    """SPEC M4: the last rung is undone on a normal sample, which has to be posted."""
    ladder, at_s = Ladder(), 0.0
    for _ in range(9):  # relapses until the calm is at its longest
        while len(ladder.taken) < len(LADDER):
            ladder.decide(Pressure.CRITICAL, at_s)
            at_s += 1.0
        normal_s = at_s
        while ladder.decide(Pressure.NORMAL, at_s) is None:
            at_s += 1.0
    while ladder.taken:
        ladder.decide(Pressure.NORMAL, at_s)
        at_s += 1.0
    assert 500 < at_s - normal_s <= LINGER_S


def test_heat_is_posted_and_its_level_held(bench):
    """SPEC M6: a machine that is hot for a moment counts as hot for ten seconds."""
    bench.monitor.start()
    bench.next()
    bench.heat.reading = HeatReading(Heat.SERIOUS, "coretemp", 96.0)
    assert bench.next().heat == HeatReading(Heat.SERIOUS, "coretemp", 96.0)
    bench.heat.reading = HeatReading(Heat.NOMINAL, "coretemp", 50.0)
    while (sample := bench.next()).heat.celsius == 96.0:
        pass
    assert sample.heat.level is Heat.SERIOUS


def test_a_poke_samples_now_and_is_posted(slow, machine):
    """SPEC M4: re-measured when asked for."""
    machine.footprint = 2 * GIB
    slow.monitor.poke()
    assert slow.next().footprint_bytes == 2 * GIB


def test_any_number_of_pokes_blocks_nobody(bench):
    """SPEC M8: the loop never waits for the monitor, not even for one that does not run."""
    for _ in range(100_000):
        bench.monitor.poke()
    bench.monitor.start()
    bench.next()


def test_a_cut_in_the_group_is_an_event(tmp_path, bench):
    """SPEC M3: memory.failcnt of version 1."""
    v1_group(tmp_path, usage=850)
    bench.monitor.start()
    assert not bench.next().is_os_event
    v1_group(tmp_path, usage=850, failcnt=3)
    while not bench.next().is_os_event:
        pass
    later = [bench.next() for _ in range(3)]
    assert not any(sample.is_os_event for sample in later)


def oob_pair():
    """A connection on which a `send` with MSG_OOB is what a trigger is to poll."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


@pytest.mark.parametrize(("available", "is_event"), [(7 * GIB, True), (12 * GIB, False)])
def test_a_stall_is_sampled_at_once_and_an_event_where_memory_is_half_full(
    tmp_path, machine, available, is_event
):
    """SPEC M3: the trigger ends the wait; on a roomy machine others wait at a limit of their own."""
    bench = Bench(tmp_path, 3600.0)
    near, far = oob_pair()
    with near, far:
        bench.monitor._trigger.fd = os.dup(far.fileno())
        bench.monitor.start()
        assert not bench.next().is_os_event
        machine.available = available
        before = bench.heat.num_read
        near.send(b"!", socket.MSG_OOB)
        bench.heat.wait_for(1, after=before)
        bench.monitor.poke()  # its sample comes after that of the stall, if that one was posted
        assert bench.next().is_os_event is is_event
        bench.monitor.close()


def test_an_event_is_followed_by_every_sample(tmp_path, bench, machine):
    """SPEC M3: it counts for a while, in which the loop gets every sample."""
    machine.footprint = 100 * MIB
    v1_group(tmp_path, usage=100)
    bench.monitor.start()
    bench.next()
    v1_group(tmp_path, usage=100, kills=1)
    assert bench.next().is_os_event
    assert not any(bench.next().is_os_event for _ in range(20))


def test_a_trigger_that_goes_away_is_left_alone(tmp_path):
    """SPEC M3: a dead descriptor does not keep the thread busy."""
    bench = Bench(tmp_path, 3600.0)
    ears, voice = os.pipe()
    os.close(ears)
    bench.monitor._trigger.fd = voice
    bench.monitor.start()
    bench.next()
    for _ in range(20):
        bench.monitor.poke()
        bench.next()
    assert bench.monitor._trigger.fd is None
    assert bench.heat.num_read <= 22
    bench.monitor.close()


def test_what_cannot_be_measured_is_said_once_and_tried_again(bench, machine, caplog, monkeypatch):
    """SPEC M3: a machine that does not tell stops nothing."""
    state = machine.available
    num_failed = 0

    def broken():
        nonlocal num_failed
        num_failed += 1
        if num_failed < 5:
            raise OSError("no such thing")
        return machine

    monkeypatch.setattr(monitor_module.psutil, "virtual_memory", broken)
    bench.monitor.start()
    assert bench.next().system_available_bytes == state
    assert [record.message for record in caplog.records] == ["memory cannot be measured: no such thing"]


def test_a_closed_gauge_posts_nothing_and_can_be_closed_and_poked_again(tmp_path):
    """SPEC L4: idempotent."""
    bench = Bench(tmp_path, 0.001)
    bench.heat.reading = HeatReading(Heat.FAIR)
    bench.monitor.start()
    bench.next()
    bench.monitor.close()
    bench.drain()
    bench.monitor.poke()
    bench.monitor.close()
    assert bench.drain() == []
    assert repr(bench.monitor).startswith("<MemoryMonitor stopped")
    Bench(tmp_path, 1.0).monitor.close()  # never started


@pytest.mark.skipif(not hasattr(select, "POLLPRI"), reason="no PSI on this system")
def test_the_real_machine_can_be_measured(monkeypatch):
    """SPEC M1, M3: whatever this machine has, the numbers fit together."""
    monkeypatch.undo()
    sample = measure(Sources())
    assert 0 < sample.footprint_bytes < sample.total_bytes
    assert sample.limit_bytes <= sample.total_bytes
    assert sample.available_bytes <= sample.system_available_bytes <= sample.total_bytes
