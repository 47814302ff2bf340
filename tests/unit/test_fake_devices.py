"""Accelerators of the fake backend: memory, others' use, latency, an end."""

import pytest

from stoker.backends.device import CPU, DeviceMemory
from stoker.backends.fake.backend import FakeBackend, FakeFaults, load
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.registry import open_model
from stoker.errors import InsufficientMemoryError, ModelFileError
from stoker.ipc.model import ModelSpec

MIB = 2**20


def spec_of(path):
    """A model of few cells."""
    return ModelSpec(id="m", path=path, n_ctx=512)


def test_without_devices_a_fake_model_is_computed_on_the_cpu():
    """SPEC B4: it holds nothing of any device."""
    reader = open_model("fake:")
    assert reader.devices() == reader.devices_for(spec_of("fake:")) == (CPU,)
    assert load(spec_of("fake:")).extensions.devices is None


def test_a_model_takes_its_part_of_each_card_and_gives_it_back():
    """SPEC B4: several cards of their own size, with what another program has of them."""
    path = "fake:device=parts-a+parts-b,device_mib=100+60,others_mib=20+0,weights_mib=64"
    first, second = open_model(path).devices()
    assert (first.id, second.index, first.memory()) == ("parts-a", 1, DeviceMemory(80 * MIB, 100 * MIB))
    backend = load(spec_of(path))
    held = backend.extensions.devices.memory_by_device()
    assert held["parts-a"]["weights"] == held["parts-b"]["weights"] == 32 * MIB
    lines = {line: sum(held[card][line] for card in held) for line in held["parts-a"]}
    assert lines == backend.memory()
    taken = {card: sum(held[card].values()) for card in held}
    assert first.memory().free_bytes == 80 * MIB - taken["parts-a"]
    assert second.memory().free_bytes == 60 * MIB - taken["parts-b"]
    backend.close()
    assert first.memory().free_bytes == 80 * MIB


def test_a_card_that_has_not_enough_refuses_the_load_and_keeps_nothing():
    """SPEC B4: the second of two is too small, so the first is free again."""
    path = "fake:device=small-a+small-b,device_mib=100+10,weights_mib=64"
    with pytest.raises(
        InsufficientMemoryError, match=r"small-b is out of memory: 32\.\d MiB asked for, 10 MiB free"
    ):
        load(spec_of(path))
    assert open_model(path).devices()[0].memory().free_bytes == 100 * MIB


def test_what_others_hold_changes_and_a_card_may_be_gone(tmp_path):
    """SPEC B4: a file says it, and is read at each look."""
    others = tmp_path / "others"
    others.write_text("100 0", "ascii")
    reader = open_model(f"fake:device=gone-a+gone-b,others={others}")
    first, second = reader.devices()
    assert (first.memory().free_bytes, second.memory().free_bytes) == (924 * MIB, 1024 * MIB)
    others.write_text("gone 1000", "ascii")
    assert first.memory() is None
    assert second.memory().free_bytes == 24 * MIB
    assert [device.name for device in reader.devices()] == ["gone-b"]
    others.write_text("what", "ascii")
    with pytest.raises(ModelFileError, match="does not say what others hold"):
        reader.devices()


@pytest.mark.parametrize("orders", ["device=A,device_mib=1+2", "device=A,others_mib=many", "device_mib=3"])
def test_numbers_that_are_not_one_a_card_are_refused(orders):
    """SPEC B4: as any order that is not understood."""
    with pytest.raises(ModelFileError, match="not a number of MiB for each of"):
        open_model(f"fake:{orders}").devices()


class Clock:
    """Time that passes in `sleep`, or where a test says so."""

    def __init__(self):
        self.now_s = 100.0
        self.slept_s = []

    def monotonic(self):
        """Now."""
        return self.now_s

    def sleep(self, wait_s):
        """Waits at once."""
        self.slept_s.append(round(wait_s, 6))
        self.now_s += wait_s


def test_a_device_computes_while_the_caller_does_other_things(monkeypatch):
    """SPEC B5: a step is over some time after its launch; what the caller did meanwhile is not waited for."""
    clock = Clock()
    monkeypatch.setattr("stoker.backends.fake.backend.time", clock)
    backend = FakeBackend(num_sequences=1, faults=FakeFaults(is_async=True, step_delay_s=2, token_delay_s=1))
    waited_s = []
    for busy_s in (1.0, 5.0):
        step = backend.launch(BatchPlan((PlanItem(0, backend.length(0), [1, 2], 1),)))
        assert not clock.slept_s
        clock.now_s += busy_s
        step.rows()
        waited_s.append(clock.slept_s.pop())
    assert waited_s == [3.0, 0.0]


def test_a_cpu_computes_in_the_launch(monkeypatch):
    """SPEC B5: the caller waits there, for the step and each of its tokens."""
    clock = Clock()
    monkeypatch.setattr("stoker.backends.fake.backend.time", clock)
    backend = FakeBackend(num_sequences=1, faults=FakeFaults(step_delay_s=2, token_delay_s=1))
    backend.launch(BatchPlan((PlanItem(0, 0, [1, 2, 3], 1),)))
    assert clock.slept_s == [5.0]
