"""When the engine's loop has stored prefixes written: not in the moment between two requests."""

from __future__ import annotations

import pytest

from stoker.cache.disk.tier import BUSY_SETTLE_S
from stoker.engine import loop

pytestmark = pytest.mark.usefixtures("still_clock")
ORDER = "eog_period=0"


class Writing:
    """A machine whose disk is never reached: what was begun to be written is known."""

    def __init__(self, make, monkeypatch):
        self.machine = make()
        self.machine.know("m", ORDER, n_ctx=2048)
        self.written = []
        store = self.machine.loop._store
        monkeypatch.setattr(store._disk, "run", self.written.extend)

    def ask(self, name):
        """A request that is answered; what it computed is its own."""
        self.machine.submit(name, "m", prompt=f"{name} {'x' * 300}", max_tokens=4)
        self.machine.run(name)

    @property
    def num_due(self):
        """How many stored prefixes would be written by now if it rested."""
        disk = self.machine.loop._store.cache.disk
        return sum(at <= self.machine.loop._clock.now() for at in disk._due_s.values())

    def wait(self, clock, seconds):
        """Let so much time pass, and the loop do what is due."""
        clock.pass_(seconds)
        for _ in range(4):
            self.machine.turn()


@pytest.fixture
def writing(make, monkeypatch):
    """A machine of its kind."""
    return Writing(make, monkeypatch)


def test_nothing_is_written_while_a_client_asks_one_thing_after_the_other(writing, still_clock):
    """SPEC C7: the next request, which comes at once, would share the cores with the write."""
    for name in "qrstuvwxyz":
        writing.ask(name)
        for _ in range(3):
            writing.wait(still_clock, 0.3 * loop.REST_AFTER_S)
            assert writing.machine.loop._wait_s() != 0, "it spins until it may"
        assert not writing.written
    assert writing.num_due, "nothing was due, so nothing was tried"
    writing.wait(still_clock, loop.REST_AFTER_S)
    assert len(writing.written) == 1


def test_a_client_that_never_rests_does_not_keep_everything_in_memory_alone(writing, still_clock):
    """SPEC C7: what has waited for ten seconds is written between two requests."""
    gap_s = 0.9 * loop.REST_AFTER_S
    num_early = int(0.9 * BUSY_SETTLE_S / gap_s)
    for at in range(num_early):
        writing.ask(f"r{at}")
        writing.wait(still_clock, gap_s)
    assert not writing.written
    for at in range(num_early, int(1.1 * BUSY_SETTLE_S / gap_s)):
        writing.ask(f"r{at}")
        writing.wait(still_clock, gap_s)
    assert writing.written
