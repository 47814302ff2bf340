"""SPEC L10: the driver of an NVIDIA device is started beside the imports of the engine."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from stoker.engine import driver


class _Driver:
    """libcuda of a machine with so many devices; remembers what is asked of it."""

    def __init__(self, num_devices: int, error: int = 0) -> None:
        self.calls: list[str] = []
        self._num_devices = num_devices
        self._error = error

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - the driver's name
        self.calls.append("init")
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - likewise
        count._obj.value = self._num_devices
        return 0

    def cuDeviceGet(self, _device: Any, number: int) -> int:  # noqa: N802 - likewise
        self.calls.append(f"device {number}")
        return 0

    def cuDevicePrimaryCtxRetain(self, _context: Any, _device: Any) -> int:  # noqa: N802 - likewise
        self.calls.append("context")
        return 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the device's node and for llama.cpp's libraries; both are missing."""
    monkeypatch.setattr(driver, "NODES", (tmp_path / "nvidiactl",))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    return tmp_path


def _with(monkeypatch: pytest.MonkeyPatch, found: _Driver) -> _Driver:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found if name == driver.LIBRARY else None)
    return found


@pytest.mark.parametrize(
    ("num_devices", "calls"), [(1, ["init", "device 0", "context"]), (2, ["init"]), (0, ["init"])]
)
def test_the_context_of_the_only_device_is_made_ahead(
    machine: Path, monkeypatch: pytest.MonkeyPatch, num_devices: int, calls: list[str]
) -> None:
    """SPEC L10: of several it is not known yet which are used."""
    (machine / "nvidiactl").touch()
    (machine / "libggml-cuda.so").touch()
    found = _with(monkeypatch, _Driver(num_devices))
    thread = driver.begin_driver()
    assert thread is not None
    thread.join()
    assert found.calls == calls


@pytest.mark.parametrize("there", [[], ["nvidiactl"], ["libggml-cuda.so"]])
def test_the_driver_is_not_started_without_a_device_or_a_build_for_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch, there: list[str]
) -> None:
    """A build for the CPU takes no memory of a device that another program uses."""
    for name in there:
        (machine / name).touch()
    found = _with(monkeypatch, _Driver(1))
    assert driver.begin_driver() is None
    assert not found.calls


def test_a_driver_that_fails_is_left_to_the_library(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library asks again, and its error is the one that is told."""
    (machine / "nvidiactl").touch()
    (machine / "libggml-cuda.so").touch()
    found = _with(monkeypatch, _Driver(1, error=100))
    thread = driver.begin_driver()
    assert thread is not None
    thread.join()
    assert found.calls == ["init"]
