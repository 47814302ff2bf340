"""One process at a time on an accelerator."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from nvml_stand_in import NvmlStandIn
from stoker.backends.device import CPU, Device, DeviceMemory, HeldDevices
from stoker.errors import DeviceBusyError, MachineSetupError
from stoker.machine.device_lease import DeviceLease, lease_note
from stoker.machine.monitor import DeviceSample
from stoker.machine.nvml import CardProcess, Nvml
from stoker.machine.thermal import Heat, HeatReading

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
    assert caught.value.details == {"device": "CUDA0", "pid": holder.pid, "models": []}


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


def test_a_refusal_says_for_which_models_a_device_is_held(tmp_path):
    """SPEC R6: as the holder wrote down last, in people's words for the device."""
    with DeviceLease(["CUDA-0000:c1:00.0"], tmp_path) as lease:
        lease.note("CUDA-0000:c1:00.0", "CUDA NVIDIA H100", ["a-long-name", "b"])
        lease.note("CUDA-0000:c1:00.0", "CUDA NVIDIA H100", ["qwen"])
        with pytest.raises(DeviceBusyError) as caught:
            DeviceLease(["CUDA-0000:c1:00.0"], tmp_path)
    held, _, remedy = caught.value.message.partition("; ")
    assert held == f"process {os.getpid()} (model qwen) holds the device CUDA NVIDIA H100"
    assert "--no-device-lease" in remedy
    assert caught.value.details == {"device": "CUDA NVIDIA H100", "pid": os.getpid(), "models": ["qwen"]}


def test_a_full_disk_costs_the_note_and_not_the_lease(tmp_path, monkeypatch, caplog):
    """SPEC R6: the device is held, and another process is refused without a name."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with DeviceLease(["CUDA0"], tmp_path), pytest.raises(DeviceBusyError, match="another process holds"):
        DeviceLease(["CUDA0"], tmp_path)
    assert "No space left" in caplog.text


def test_a_file_that_says_nothing_of_its_holder_is_a_refusal_too(tmp_path, holder):
    """SPEC R6: it is locked all the same."""
    (tmp_path / "device-CUDA0.lock").write_text("what", "ascii")
    with pytest.raises(DeviceBusyError, match="another process holds the device CUDA0"):
        DeviceLease(["CUDA0"], tmp_path)


def test_who_holds_a_device_is_found_without_a_lock(tmp_path, holder):
    """SPEC R6: nobody once its process has ended, or another has its number."""
    note = lease_note("CUDA0", tmp_path)
    assert (note.pid, note.holder) == (holder.pid, f"process {holder.pid}")
    path = tmp_path / "device-CUDA0.lock"
    os.utime(path, (0, 0))
    assert lease_note("CUDA0", tmp_path) is None
    os.utime(path)
    assert lease_note("CUDA0", tmp_path) == note
    holder.kill()
    holder.wait()
    assert lease_note("CUDA0", tmp_path) is None
    assert lease_note("CUDA1", tmp_path) is None
    with DeviceLease(["CUDA0"], tmp_path):
        assert lease_note("CUDA0", tmp_path).pid == os.getpid()
    assert lease_note("CUDA0", tmp_path) is None


def test_an_engine_leases_what_it_computes_on_once(tmp_path):
    """SPEC R6: a reload keeps the lease, the CPU needs none, and the end of the engine frees everything."""
    ours, theirs = HeldDevices(tmp_path), HeldDevices(tmp_path)
    ours.take((CPU,), "m")
    theirs.take((CPU,), "m")
    for _ in range(2):
        ours.take((card("Card"),), "m")
    assert ours.known == (CPU, card("Card"))
    with pytest.raises(DeviceBusyError):
        theirs.take((card("Card"),), "n")
    assert theirs.is_taken(CPU)
    assert not theirs.is_taken(card("Card"))
    ours.close()
    theirs.take((card("Card"),), "n")
    theirs.close()


def test_an_engine_says_which_models_it_holds_a_device_for(tmp_path):
    """SPEC R6: from the load on, until the model is gone; the device stays its own."""
    ours, theirs = HeldDevices(tmp_path), HeldDevices(tmp_path)
    mine = f"process {os.getpid()}"
    ours.take((card("a"), card("b")), "m")
    assert theirs.holder(card("a")) == f"{mine} (model m)"
    ours.hold({"m": {"a": 1, "b": 2}})
    ours.hold(None)
    ours.take((card("b"),), "n")
    assert theirs.holder(card("b")) == f"{mine} (models m, n)"
    ours.hold({"n": {"b": 3}})
    assert [theirs.holder(each) for each in (card("a"), card("b"), CPU)] == [mine, f"{mine} (model n)", ""]
    assert ours.holder(card("a")) == ""
    ours.close()
    assert theirs.holder(card("a")) == ""
    theirs.close()


def test_without_leases_two_engines_share_a_device(tmp_path):
    """SPEC R6: where the settings say so; nothing is locked then."""
    ours, theirs = HeldDevices(None), HeldDevices(None)
    for held in (ours, theirs):
        held.take((card("a"),), "m")
        assert held.is_taken(card("a"))
        assert held.holder(card("a")) == ""
    assert list(tmp_path.iterdir()) == []


def test_each_device_is_measured_with_what_models_hold_of_it(tmp_path):
    """SPEC M3: those that have memory of their own; what models hold is not known while one is on its way."""
    held = HeldDevices(tmp_path, margin_bytes=5)
    assert held.samples() == ()
    plain, unified = Device("c", "Fake", id="c"), card("d", is_integrated=True)
    held.know((CPU, card("a"), card("b", 20, 400), plain, unified))
    held.hold({"m": {"b": 300}, "n": {"b": 50}})
    assert held.samples() == (
        DeviceSample(id="a", free_bytes=10, total_bytes=100, own_bytes=0, margin_bytes=5),
        DeviceSample(id="b", free_bytes=20, total_bytes=400, own_bytes=350, margin_bytes=5, left_bytes=20),
    )
    assert [sample.other_bytes for sample in held.samples()] == [90, 30]
    held.hold(None)
    assert [sample.other_bytes for sample in held.samples()] == [None, None]


def test_what_a_load_leaves_is_remembered_until_the_next_one():
    """SPEC M3: a model that goes makes no new mark, so that others' part stays told from it."""
    free = [100]
    device = Device("a", "Fake", id="a", read=lambda: DeviceMemory(free[0], 1000))
    held = HeldDevices(None)
    held.take((device,), "m")
    found = []
    for free[0], models in ((60, None), (40, {"m": {"a": 5}}), (30, {"m": {"a": 5}}), (20, {"n": {"a": 5}})):
        held.hold(models)
        found.append(held.samples()[0].left_bytes)
    free[0] = 500
    held.hold({})
    assert [*found, held.samples()[0].left_bytes] == [None, 40, 40, 20, 20]


def test_a_driver_tells_programs_apart_and_answers_for_cards_that_are_not_used(tmp_path):
    """SPEC M9: by it our own part holds what no buffer shows; the library is asked where it computes only."""
    nvml = NvmlStandIn()
    nvml.cards["0000:c1:00.0"] = {
        "memory": (30, 100),
        "processes": [(os.getpid(), 60, "python"), (7, 5, "/usr/bin/other")],
        "power_mw": 310_500,
        "celsius": 46,
    }
    asked = []

    def read():
        asked.append(1)
        return DeviceMemory(29, 100)

    device = Device("a", "CUDA", id="CUDA0", bus_id="0000:c1:00.0", read=read)
    held = HeldDevices(None, driver=Nvml(nvml))
    held.know((device,))
    (sample,) = held.samples()
    assert (asked, sample.free_bytes, sample.own_bytes) == ([], 30, 60)
    held.take((device,), "m")
    held.hold({"m": {"CUDA0": 50}})
    (sample,) = held.samples()
    assert (asked, sample.free_bytes, sample.own_bytes, sample.other_bytes) == ([1], 29, 60, 11)
    assert sample.processes == (CardProcess(7, "other", 5),)
    assert (sample.power_w, sample.heat) == (310.5, HeatReading(Heat.NOMINAL, "CUDA0", 46))
