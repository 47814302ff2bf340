"""Which beginnings a machine tells its gates that it has, and what it has left."""

from __future__ import annotations

import struct

import msgspec

from stoker.client.requests.held_prefixes import MAX_CHAIN, MAX_HELD, HeldPrefixes, unpacked
from stoker.gate.link import PeerLook
from stoker.gate.states import peer_state
from stoker.ipc.status import EngineHealth, EngineStatus, ModelRoom, RuntimeStatus
from stoker.remote.wire import Overview


def test_the_newest_are_told_and_no_more_than_a_bound() -> None:
    """P12: the oldest give way, what is used again is new; one request gives so many at most."""
    held = HeldPrefixes()
    for key in range(MAX_HELD):
        held.note((key,), 0)
    held.note((0, 2**64 - 1), 0)
    told = unpacked(held.packed(0))
    assert len(told) == MAX_HELD
    assert {0, 2**64 - 1} <= told
    assert 1 not in told
    held.note(range(2**32, 2**32 + 10 * MAX_CHAIN), 0)
    assert len(unpacked(held.packed(0)) - told) == MAX_CHAIN


def test_what_an_engine_held_goes_with_it() -> None:
    """P12: another engine computes it anew."""
    held = HeldPrefixes()
    held.note((1, 2), 0)
    assert unpacked(held.packed(0)) == {1, 2}
    assert not unpacked(held.packed(1))


def test_bytes_that_are_no_hashes_are_none() -> None:
    """P12: of a machine of another version, or a broken one."""
    assert not unpacked(b"abc")
    assert not unpacked(struct.pack("<Q", 1) * (MAX_HELD + 1))


def test_the_router_is_told_what_a_machine_has_left() -> None:
    """P5, P12: free cells by model, the longest wait of a person, what is held."""
    rooms = {
        "a": ModelRoom(num_cells=100, free_cells=40, interactive_wait_s=2.5),
        "b": ModelRoom(num_cells=10, free_cells=10),
    }
    engine = EngineStatus(
        slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0, rooms=rooms
    )
    health = EngineHealth(state="serving")
    overview = Overview(
        is_ready=True,
        is_suspended=False,
        health=health,
        models=[],
        states=[],
        prefixes=struct.pack("<2Q", 3, 4),
    )
    status = RuntimeStatus(
        pid=1, state="serving", restarts=0, label="", threads=1, engine=engine, health=health
    )
    sent = msgspec.json.decode(msgspec.json.encode(PeerLook(overview=overview, status=status)), type=PeerLook)
    state = peer_state("m", sent, 0.0)
    assert state.free_cells == {"a": 40, "b": 10}
    assert state.interactive_wait_s == 2.5
    assert state.prefixes == {3, 4}
