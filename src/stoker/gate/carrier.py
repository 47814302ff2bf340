"""States of requests on their way from a machine that goes to the one that goes on with them.

Owns what was measured of such moves, and how many run at once. A request that is moved goes on where it is
until its state is at the other machine, so its client sees no longer pause than without. A failure costs time
alone: the request goes as tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import NotReadyError, StateNotFoundError, StokerError
from stoker.gate.link import CarriesStates

if TYPE_CHECKING:
    from stoker.gate.journey import Journey
    from stoker.gate.site import Machine
    from stoker.ipc.request import GenerateRequest
    from stoker.ipc.status import ModelRoom

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Moves from one machine: one is written out while another arrives."""
ALL_S = 20.0
"""Time in which a machine that goes gives states out; what is left there then goes as tokens."""
FOLLOW = 0.3
"""Weight of a new measurement of a way."""
MAX_MOVE_S = 60.0
"""The longest that one state may be on its way, however long computing takes."""


def is_move_quicker(size_bytes: int, bytes_per_s: float, num_tokens: int, tokens_per_s: float) -> bool:
    """Whether a state arrives sooner than its tokens are computed.

    Args:
        size_bytes: of the state.
        bytes_per_s: that came from the one machine to the other before; 0: not measured.
        num_tokens: of the state.
        tokens_per_s: of a prompt, at the machine that takes it; 0: not measured.
    """
    limit_s = move_limit_s(num_tokens, tokens_per_s)
    return limit_s > 0.0 and (bytes_per_s <= 0.0 or size_bytes / bytes_per_s < limit_s)


def move_limit_s(num_tokens: int, tokens_per_s: float) -> float:
    """Seconds that a move may take: those that computing takes, up to a bound; 0: none is made."""
    return min(MAX_MOVE_S, num_tokens / tokens_per_s) if tokens_per_s > 0.0 else 0.0


class StateCarrier:
    """See the module."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[tuple[str, str], float] = {}
        self._places: dict[str, asyncio.Semaphore] = {}
        self._until_s: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._num_moved = self._num_bytes = self._num_tokens = self._num_slower = self._num_failed = 0

    def __repr__(self) -> str:
        return f"<StateCarrier {self._num_moved} states, {self._num_bytes} bytes>"

    def stats(self) -> dict[str, float]:
        """What was moved, and what was not."""
        return {
            "states_moved_total": self._num_moved,
            "states_moved_bytes_total": self._num_bytes,
            "states_moved_tokens_total": self._num_tokens,
            "states_not_moved_total": self._num_slower,
            "states_lost_total": self._num_failed,
        }

    def begin(self, machine: Machine) -> None:
        """A machine begins to go: from now on it has its time, whatever it went through before."""
        self._until_s.setdefault(machine.link.name, self._loop.time() + ALL_S)

    def stays(self, machine: Machine) -> None:
        """A machine does not go, or does not any more."""
        self._until_s.pop(machine.link.name, None)

    def may_carry(self, journey: Journey, machine: Machine) -> bool:
        """Whether there may be a state of it on a machine that goes, and time for it."""
        has_time = self._loop.time() < self._until_s.get(machine.link.name, 0.0)
        has_state = journey.has_begun_here and journey.num_known_tokens > 0
        return has_time and has_state and isinstance(machine.link, CarriesStates)

    def place(self, machine: Machine) -> asyncio.Semaphore:
        """Of a move from that machine."""
        return self._places.setdefault(machine.link.name, asyncio.Semaphore(AT_ONCE))

    async def carry(self, journey: Journey, source: Machine, target: Machine) -> bool:
        """Move what is computed of a request, if that is quicker; whether the target has it now."""
        model = journey.request.model
        here, there = source.room(model), target.room(model)
        speed = _speed(here, there)
        giver, taker = source.link, target.link
        if not (speed and isinstance(giver, CarriesStates) and isinstance(taker, CarriesStates)):
            return False
        way = (giver.name, taker.name)
        seen, began_s = _Seen(), self._loop.time()
        try:
            async with asyncio.timeout(self._limit_s(journey, source, speed)):
                async with giver.state_of(journey.peer_id) as state:
                    if not is_move_quicker(
                        state.size_bytes, self._bytes_per_s.get(way, 0.0), state.num_tokens, speed
                    ):
                        self._num_slower += 1
                        return False
                    counted = msgspec.structs.replace(state, parts=seen.of(state.parts))
                    await taker.take_state(_without_prompt(journey), counted)
        except (StateNotFoundError, NotReadyError):  # nothing is computed there, or its engine has gone
            return False
        except TimeoutError:
            self._measured(way, seen.num_bytes, began_s)
            self._num_slower += 1
            return False
        except StokerError as error:
            log.info("the state of %s goes not from %s to %s: %s", journey.request_id, *way, error)
            self._num_failed += 1
            return False
        self._measured(way, seen.num_bytes, began_s)
        self._num_moved += 1
        self._num_bytes += seen.num_bytes
        self._num_tokens += state.num_tokens
        return True

    def _limit_s(self, journey: Journey, source: Machine, speed: float) -> float:
        """Seconds that it may take: those of computing, and those that the machine has left."""
        left_s = self._until_s.get(source.link.name, 0.0) - self._loop.time()
        return max(0.0, min(left_s, move_limit_s(journey.num_known_tokens, speed)))

    def _measured(self, way: tuple[str, str], num_bytes: int, began_s: float) -> None:
        now = num_bytes / max(1e-6, self._loop.time() - began_s)
        before = self._bytes_per_s.get(way, now)
        self._bytes_per_s[way] = max(1.0, before + FOLLOW * (now - before))


class _Seen:
    """Counts what comes by."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def of(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in parts:
            self.num_bytes += len(part)
            yield part


def _speed(here: ModelRoom | None, there: ModelRoom | None) -> float:
    """Tokens a second of a prompt at the machine that takes it, or of the other's; 0: states differ there."""
    if here is None or there is None or not here.fingerprint or here.fingerprint != there.fingerprint:
        return 0.0
    return there.prefill_tokens_per_s or here.prefill_tokens_per_s


def _without_prompt(journey: Journey) -> GenerateRequest:
    return msgspec.structs.replace(journey.request, prompt="", pictures=())
