"""Machines of counted memory, for every test of residency and relief."""

import pytest

from memory_stand_in import Clock, Gate, Machines


@pytest.fixture
def make(tmp_path):
    """Machines, closed at the end."""
    machines = Machines(tmp_path)
    yield machines
    machines.close()


@pytest.fixture
def gate(monkeypatch):
    """Holds loads until it is opened; opened at the end, whatever happened."""
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def clock(monkeypatch):
    """Time to be moved."""
    return Clock(monkeypatch)


@pytest.fixture
def still_clock(monkeypatch):
    """Time that only looks at it move, a millionth of a second each: no step is long on a busy machine."""
    return Clock(monkeypatch, is_still=True)
