"""When a state is moved between machines, and what becomes of a request while it is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from test_gate import LOST, MODEL, Bench, ScriptedLink, look

from stoker.errors import CacheFileError, StateNotFoundError, StokerError
from stoker.gate.carrier import MAX_MOVE_S, is_move_quicker, move_limit_s
from stoker.gate.engine import PeersEngine
from stoker.gate.link import MovingState, PeerLook
from stoker.gate.site import Site
from stoker.ipc.events import Admitted
from stoker.ipc.request import GenerateRequest
from stoker.ipc.status import ModelRoom
from stoker.settings import EngineSettings

MIB = 2**20


@pytest.mark.parametrize(
    ("size_bytes", "bytes_per_s", "num_tokens", "tokens_per_s", "is_quicker"),
    [
        (23 * MIB, 110 * MIB, 1000, 400, True),  # a gigabit, a small model on two cores: 0.2 s against 2.5
        (128 * MIB, 110 * MIB, 1000, 2500, False),  # a large one on an accelerator: 1.2 s against 0.4
        (128 * MIB, 1100 * MIB, 1000, 2500, True),  # the same over ten gigabits
        (100, 100, 10, 10, False),  # as quick: computing needs nobody else
        (10**12, 0, 1000, 100, True),  # nothing was measured of the way: the move does
        (1, 1, 1000, 0, False),  # nothing was measured of computing
        (1, 10**9, 0, 100, False),  # there is nothing to be computed
        (3 * 10**9, 10**6, 10**6, 10, False),  # an hour against a day: nobody waits that long
    ],
)
def test_a_state_is_moved_where_it_arrives_before_its_tokens_are_computed(
    size_bytes: int,
    bytes_per_s: float,
    num_tokens: int,
    tokens_per_s: float,
    is_quicker: bool,  # noqa: FBT001 - a table
) -> None:
    """P13: bytes over measured bandwidth against tokens over measured prefill."""
    assert is_move_quicker(size_bytes, bytes_per_s, num_tokens, tokens_per_s) is is_quicker
    assert move_limit_s(num_tokens, tokens_per_s) <= MAX_MOVE_S


@dataclass
class CarryingLink(ScriptedLink):
    """A machine that gives states out and takes them, when the test lets it."""

    goes: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: StokerError | None = None
    asked: list[str] = field(default_factory=list)
    taken: list[tuple[GenerateRequest, bytes]] = field(default_factory=list)

    @asynccontextmanager
    async def state_of(self, request_id: str) -> AsyncIterator[MovingState]:
        """Ten bytes, once it may."""
        self.asked.append(request_id)
        await self.goes.wait()
        if self.refuses is not None:
            raise self.refuses

        async def parts() -> AsyncIterator[bytes]:
            yield b"01234"
            yield b"56789"

        yield MovingState(num_tokens=4, size_bytes=10, parts=parts())

    async def take_state(self, request: GenerateRequest, state: MovingState) -> int:
        """Note it."""
        self.taken.append((request, b"".join([part async for part in state.parts])))
        return state.num_tokens


def roomy(fingerprint: str = "f", **changed: Any) -> PeerLook:
    """A machine that has computed a token a second so far."""
    found = look(**changed)
    room = ModelRoom(num_cells=99, free_cells=99, prefill_tokens_per_s=1.0, fingerprint=fingerprint)
    engine = msgspec.structs.replace(found.status.engine, rooms={MODEL: room})
    return msgspec.structs.replace(found, status=msgspec.structs.replace(found.status, engine=engine))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Two machines that serve."""
    links: list[Any] = [CarryingLink("a", roomy()), CarryingLink("b", roomy())]
    site = Site(links)
    engine = PeersEngine(site, EngineSettings(peer_grace_s=0.0, peer_wait_s=0.0))
    found = Bench(site, engine, links)
    await engine.start(found.told.extend)
    for link in links:
        await site.ask_now(link.name)
    found.submit()
    found.run.say_all([Admitted("r", prompt_tokens=3, slot=1)])
    found.run.say(1)
    yield found
    engine.kill()
    await site.close()


async def settle(bench: Bench) -> None:
    """Let what was begun come to its end."""
    for _ in range(8):
        await bench.settle()


def counts(bench: Bench) -> dict[str, float]:
    """What the gate has counted."""
    return bench.engine._status().counters


async def test_a_request_goes_on_where_it_is_until_its_state_is_at_the_other(bench: Bench) -> None:
    """P13: its tokens come meanwhile, it goes to the machine that has the state, with every token."""
    machine, other, first = bench.link, bench.other, bench.run
    await bench.turn(machine, roomy(is_ready=False))
    assert machine.asked == ["r"]
    assert not first.is_abandoned
    first.say(2, 3)
    await bench.turn(machine, roomy(is_ready=False))  # told again each second
    assert machine.asked == ["r"]
    machine.goes.set()
    await settle(bench)
    ((request, state),) = other.taken
    assert (state, request.prompt, request.model) == (b"0123456789", "", MODEL)
    assert first.is_abandoned
    assert bench.link is other
    assert bench.run.submit.generated == [[1, 2, 3]]
    told = counts(bench)
    names = ("requests_moved_total", "states_moved_total", "states_moved_bytes_total", "states_lost_total")
    assert [told[name] for name in names] == [1, 1, 10, 0]


@pytest.mark.parametrize("error", [CacheFileError("damaged"), StateNotFoundError("none"), LOST])
async def test_a_state_that_cannot_be_had_costs_nothing_else(bench: Bench, error: StokerError) -> None:
    """P13: the request goes on from its tokens."""
    machine, other, first = bench.link, bench.other, bench.run
    machine.refuses = error
    machine.goes.set()
    await bench.turn(machine, roomy(is_ready=False))
    await settle(bench)
    assert first.is_abandoned
    assert bench.link is other
    assert bench.run.submit.generated == [[1]]
    assert not other.taken
    assert counts(bench)["states_moved_total"] == 0


async def test_a_machine_that_dies_with_a_state_on_its_way_is_one_that_died(bench: Bench) -> None:
    """P13: the request is moved once, from its tokens."""
    machine, other, first = bench.link, bench.other, bench.run
    await bench.turn(machine, roomy(is_ready=False))
    first.end(LOST)
    await settle(bench)
    assert bench.link is other
    machine.goes.set()
    await settle(bench)
    assert [len(link.runs) for link in bench.links] == [1, 1]
    assert bench.run.submit.generated == [[1]]


async def test_a_request_that_ends_with_its_state_on_its_way_has_ended(bench: Bench) -> None:
    """P13: one end, and nothing of it goes on."""
    machine, other, first = bench.link, bench.other, bench.run
    await bench.turn(machine, roomy(is_ready=False))
    first.finish()
    machine.goes.set()
    await settle(bench)
    assert len(bench.ends) == 1
    assert not other.runs


@pytest.mark.parametrize("changed", [{"fingerprint": "another"}, {"fingerprint": ""}])
async def test_states_go_only_to_machines_whose_states_are_alike(
    bench: Bench, changed: dict[str, Any]
) -> None:
    """P13: of another file or build nothing is asked."""
    machine, other = bench.link, bench.other
    await bench.turn(other, roomy(**changed))
    await bench.turn(machine, roomy(is_ready=False))
    await settle(bench)
    assert bench.link is other
    assert not machine.asked
