"""One process at a time on an accelerator."""

import os
import signal
import subprocess
import sys

import pytest

from stoker.backends.device import CPU, Device, DeviceMemory, HeldDevices
from stoker.errors import DeviceBusyError, MachineSetupError
from stoker.machine.device_lease import DeviceLease
from stoker.machine.monitor import DeviceSample

HOLDER = """
import sys
from pathlib import Path
from stoker.machine.device_lease import DeviceLease
lease = DeviceLease(sys.argv[2:], Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds CUDA0 until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "CUDA0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        yield child
        child.kill()


def test_a_held_device_is_refused_with_the_holders_pid(tmp_path, holder):
    """SPEC R6: typed, with the numbers."""
    with pytest.raises(DeviceBusyError, match=str(holder.pid)) as caught:
        DeviceLease(["CUDA0"], tmp_path)
    assert caught.value.details == {"device": "CUDA0", "pid": holder.pid}


def test_a_dead_owner_frees_its_device(tmp_path, holder):
    """SPEC R6: the system lets go of a lock whose process was killed."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with DeviceLease(["CUDA0"], tmp_path) as lease:
        assert lease.names == ("CUDA0",)


def test_all_devices_are_held_or_none(tmp_path, holder):
    """SPEC R6: the free one of two is free again after the refusal."""
    with pytest.raises(DeviceBusyError):
        DeviceLease(["CUDA1", "CUDA0", "A"], tmp_path)
    with DeviceLease(["CUDA1", "A"], tmp_path):
        pass


def test_a_closed_lease_can_be_had_again(tmp_path):
    """SPEC R6: within one process too; closing twice does nothing."""
    lease = DeviceLease(["CUDA0"], tmp_path)
    with pytest.raises(DeviceBusyError) as caught:
        DeviceLease(["CUDA0"], tmp_path)
    assert caught.value.details["pid"] == os.getpid()
    lease.close()
    lease.close()
    with DeviceLease(["CUDA0", "CUDA0"], tmp_path) as again:
        assert repr(again) == "<DeviceLease CUDA0>"


def test_a_refusal_names_the_holder_and_not_one_before_it(tmp_path):
    """SPEC R6: an earlier owner's number was longer."""
    (tmp_path / "device-CUDA0.lock").write_text("1234567890123", encoding="ascii")
    with DeviceLease(["CUDA0"], tmp_path), pytest.raises(DeviceBusyError) as caught:
        DeviceLease(["CUDA0"], tmp_path)
    assert caught.value.details["pid"] == os.getpid()


def test_a_cpu_alone_locks_nothing(tmp_path):
    """SPEC R6: none for CPU only."""
    folder = tmp_path / "run"
    with DeviceLease([], folder), DeviceLease([], folder):
        assert not folder.exists()


def test_a_child_process_does_not_inherit_the_lease(tmp_path):
    """SPEC R6: a program that the holder started does not keep the device after it."""
    lease = DeviceLease(["CUDA0"], tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:  # noqa: S607 - any program will do
        lease.close()
        with DeviceLease(["CUDA0"], tmp_path):
            pass
        child.kill()


def test_devices_with_odd_names_stay_in_the_folder(tmp_path):
    """SPEC R6: a name is never a path."""
    with DeviceLease(["../x/0000:41:00.0"], tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["device-.._x_0000_41_00.0.lock"]


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    """SPEC R6: nobody's other file is written."""
    victim = tmp_path / "victim"
    victim.write_text("text", encoding="ascii")
    (tmp_path / "device-CUDA0.lock").symlink_to(victim)
    with pytest.raises(MachineSetupError, match=r"device-CUDA0\.lock"):
        DeviceLease(["CUDA0"], tmp_path)
    assert victim.read_text(encoding="ascii") == "text"


def test_a_forgotten_lease_warns_and_lets_go(tmp_path):
    """R6: a leaked resource warns with its story."""
    lease = DeviceLease(["CUDA0"], tmp_path)
    with pytest.warns(ResourceWarning, match="DeviceLease CUDA0"):
        lease.__del__()
    with DeviceLease(["CUDA0"], tmp_path):
        pass


def card(name, free_bytes=10, total_bytes=100, **fields):
    """An accelerator that is alone with its name."""
    return Device(
        name, "Fake", id=name, lock=name, read=lambda: DeviceMemory(free_bytes, total_bytes), **fields
    )


def test_an_engine_leases_what_it_computes_on_once(tmp_path):
    """SPEC R6: a reload keeps the lease, the CPU needs none, and the end of the engine frees everything."""
    ours, theirs = HeldDevices(tmp_path), HeldDevices(tmp_path)
    ours.take((CPU,))
    theirs.take((CPU,))
    for _ in range(2):
        ours.take((card("Card"),))
    assert ours.names == ("CPU", "Fake Card")
    with pytest.raises(DeviceBusyError):
        theirs.take((card("Card"),))
    assert theirs.names == ("CPU",)
    ours.close()
    theirs.take((card("Card"),))
    theirs.close()


def test_each_device_is_measured_with_what_models_hold_of_it(tmp_path):
    """SPEC M3: those that have memory of their own; what models hold is not known while one is on its way."""
    held = HeldDevices(tmp_path, margin_bytes=5)
    assert held.samples() == ()
    held.know(
        (CPU, card("a"), card("b", 20, 400), Device("c", "Fake", id="c"), card("d", is_integrated=True))
    )
    held.own_bytes = {"b": 350}
    assert held.samples() == (
        DeviceSample(id="a", free_bytes=10, total_bytes=100, own_bytes=0, margin_bytes=5),
        DeviceSample(id="b", free_bytes=20, total_bytes=400, own_bytes=350, margin_bytes=5),
    )
    assert [sample.other_bytes for sample in held.samples()] == [90, 30]
    held.own_bytes = None
    assert [sample.other_bytes for sample in held.samples()] == [None, None]
    held.close()
