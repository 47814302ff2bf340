"""The machines of a site: how each is, which models they have together, and who may be given what.

Owns the links, a task a machine that asks how it is, and the router's picture of them. What becomes of
requests is `engine`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import MachineSetupError, StokerError
from stoker.gate.breaker import NOT_ASKED, Breaker, Gauge
from stoker.gate.states import is_draining, peer_state
from stoker.ipc.model import CLIENT_SIDE, ModelInfo, ModelLife
from stoker.ipc.status import MachineStatus
from stoker.routing.load import PeerState
from stoker.routing.peers import Peers, RouteRequest
from stoker.routing.router import Route, Router

if TYPE_CHECKING:
    from stoker.gate.link import PeerLink, PeerLook
    from stoker.ipc.status import ModelRoom

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class Machine:
    """One machine of the site.

    Attributes:
        link: the way to it.
        breaker: whether it is trusted.
        look: what it said last of itself; None: nothing yet.
        slots: the numbers of its slots by model: each slot of the site has one.
        num_moved: requests that were taken away from it.
        is_wanted: it is a part of the site; else it ends what it has.
        num_looks: times that it was asked how it is.
        newest_look: from that one on an answer counts: what it says is not older than what is known.
    """

    link: PeerLink
    breaker: Breaker = field(default_factory=Breaker)
    look: PeerLook | None = None
    slots: dict[str, range] = field(default_factory=dict)
    is_wanted: bool = True
    num_moved: int = 0
    suspended_since: float | None = None
    looked_s: float = 0.0
    num_looks: int = 0
    newest_look: int = 0
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def was_asked(self) -> bool:
        """Whether it has said how it is, or has failed to, at least once."""
        return self.look is not None or self.breaker.reason != NOT_ASKED

    @property
    def is_up(self) -> bool:
        """Whether it answers and takes requests."""
        has_said = self.look is not None and self.look.overview.is_ready
        return self.breaker.state is not Gauge.OPEN and has_said

    @property
    def is_draining(self) -> bool:
        """Whether it ends, or is no part of the site any more."""
        return not self.is_wanted or (self.look is not None and is_draining(self.look))

    def infos(self) -> list[ModelInfo]:
        """Its models, as it was last heard of."""
        return [] if self.look is None else self.look.overview.models

    def info(self, model: str) -> ModelInfo | None:
        """One of them."""
        return next((info for info in self.infos() if info.id == model), None)

    def life(self, model: str) -> str:
        """The state of one of them."""
        states = [] if self.look is None else self.look.overview.states
        return next((one.state for one in states if one.id == model), ModelLife.ABSENT)

    def room(self, model: str) -> ModelRoom | None:
        """What one of them has left there; None: it is not in memory, or nothing was heard of it."""
        return None if self.look is None else self.look.status.engine.rooms.get(model)

    @property
    def why_not(self) -> str:
        """Why it gets nothing new, for people; empty: it does."""
        if self.breaker.state is Gauge.OPEN:
            return self.breaker.reason
        if self.is_draining:
            return "it is being drained"
        if not self.is_up:
            return "it is not ready yet"
        return "it is suspended" if self.look and self.look.overview.is_suspended else ""

    def status(self, num_requests: int, now: float) -> MachineStatus:
        """How it is shown; `num_requests` of this gate are there."""
        name, url, gauge = self.link.name, self.link.url, self.breaker.state
        why, state = self.why_not, "up"
        if gauge is Gauge.OPEN or not (self.is_up or self.is_draining):
            state = "down"
        elif self.is_draining:
            state = "draining"
        elif why:
            state = "suspended"
        elif gauge is Gauge.HALF_OPEN:
            state = "trial"
        if self.look is None:
            return MachineStatus(name=name, url=url, state=state, reason=why)
        engine = self.look.status.engine
        return MachineStatus(
            name=name,
            url=url,
            state=state,
            reason=why,
            num_slots=len(engine.slots),
            num_busy=sum(slot.request_id is not None for slot in engine.slots),
            num_waiting=len(engine.queue) + len(engine.parked),
            num_requests=num_requests,
            num_moved=self.num_moved,
            heat=engine.memory.heat,
            pressure=engine.memory.pressure,
            age_s=round(now - self.looked_s, 3),
            models=[one.id for one in self.look.overview.states if one.state == ModelLife.READY],
            slots={model: (numbers.start, len(numbers)) for model, numbers in self.slots.items()},
        )


class Site:
    """See the module.

    Args:
        links: to the machines.

    Attributes:
        on_change: called when a machine has said how it is, or has failed.
        on_models: called when the models of the site are others than before, or served otherwise.
        peers: the router's picture.
    """

    def __init__(self, links: Sequence[PeerLink]) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_models: Callable[[], None] = lambda: None
        self.peers = Peers()
        self._router = Router()
        self._machines = {link.name: Machine(link) for link in links}
        self._served: list[tuple[Any, ...]] = []
        self._kept: list[ModelInfo] = []
        self._next_slot: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        up = sum(one.is_up for one in self._machines.values())
        return f"<Site of {len(self._machines)} machines, {up} up>"

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self._machines.values()))

    def __len__(self) -> int:
        return len(self._machines)

    def start(self) -> None:
        """Begin to ask the machines how they are. Idempotent."""
        for machine in self._machines.values():
            if machine.task is None:
                machine.task = asyncio.create_task(
                    self._watch(machine), name=f"stoker-peer-{machine.link.name}"
                )

    async def until_up(self) -> None:
        """Until a machine takes requests; the log has why none does.

        Raises:
            MachineSetupError: every machine answers and refuses this gate.
        """
        told = ""
        while not any(machine.is_up for machine in self):
            self._changed.clear()
            await self._changed.wait()
            why = self.why_down()
            if why not in {"", told} and all(machine.was_asked for machine in self):
                told = why
                log.warning("%s; waiting until one does", why)
            refusals = [one.breaker.reason for one in self if one.breaker.is_refused]
            if refusals and len(refusals) == len(self._machines):
                raise MachineSetupError(f"no machine lets this gate in: {'; '.join(refusals)}", param="peers")

    def why_down(self) -> str:
        """Why no machine takes requests, for people; empty: one does."""
        reasons = [f"{one.link.name}: {one.why_not}" for one in self]
        return "" if any(one.is_up for one in self) else f"no machine serves yet ({'; '.join(reasons)})"

    async def close(self) -> None:
        """Ask no more, and disconnect. Idempotent."""
        machines, self._machines = list(self._machines.values()), {}
        await asyncio.gather(*(self._end(machine) for machine in machines), *self._closing)

    async def _end(self, machine: Machine) -> None:
        if machine.task is not None:
            machine.task.cancel()
            await asyncio.gather(machine.task, return_exceptions=True)
        await machine.link.close()

    # ------------------------------------------------------------ the list changes

    def replace(self, links: Sequence[PeerLink]) -> None:
        """From now on these are the machines; one that is left out gets nothing new, and `forget` ends it."""
        named = {link.name: link for link in links}
        for name, machine in self._machines.items():
            machine.is_wanted = name in named
        for name, link in named.items():
            known = self._machines.get(name)
            if known is None:
                self._machines[name] = Machine(link)
            elif link is not known.link:
                known.link.take_key(link)
                known.wakes.set()
                self._later(link.close())
        self.start()
        for machine in self:
            self._tell(machine)
        self._told_models()
        self.on_change()

    def forget(self, name: str) -> None:
        """A machine that is no part of the site has ended its last request."""
        machine = self._machines.get(name)
        if machine is not None and not machine.is_wanted:
            del self._machines[name]
            if name in self.peers:
                self.peers.remove(name)
            self._later(self._end(machine))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # ------------------------------------------------------------ questions

    def machine(self, name: str) -> Machine | None:
        """The machine of that name."""
        return self._machines.get(name)

    def infos(self) -> list[ModelInfo]:
        """Every model of the site once, in the order of the machines, with the slots of all that have it.

        While none of them has said what it has, as where all were replaced, these are those of the last ones.
        """
        if not any(machine.is_wanted and machine.look is not None for machine in self):
            return self._kept
        found: dict[str, ModelInfo] = {}
        for machine in self:
            for info in machine.infos() if machine.is_wanted else ():
                known = found.get(info.id)
                is_better = known is None or (not known.vocabulary_sample and info.vocabulary_sample)
                found[info.id] = info if is_better else known or info
        slots = {model: self._num_slots(model) for model in found}
        return [
            msgspec.structs.replace(info, num_slots=max(1, slots[info.id]), path=f"peers:{info.id}")
            for info in found.values()
        ]

    def _num_slots(self, model: str) -> int:
        having = [one.info(model) for one in self if one.is_up]
        return sum(info.num_slots for info in having if info is not None)

    def life(self, model: str) -> ModelLife:
        """Where a model is furthest, of machines that take requests."""
        lives = {machine.life(model) for machine in self if machine.is_up}
        for life in (ModelLife.READY, ModelLife.LOADING):
            if life in lives:
                return life
        return ModelLife.ABSENT

    def slot_base(self, machine: Machine, model: str) -> int:
        """What is added to the number of a machine's slot."""
        info, numbers = machine.info(model), machine.slots.get(model)
        num_slots = info.num_slots if info else 1
        if numbers is None or len(numbers) < num_slots:  # with more than before it gets others
            first = self._next_slot.get(model, 0)
            numbers = machine.slots[model] = range(first, first + num_slots)
            self._next_slot[model] = numbers.stop
        return numbers.start

    def takes(self, name: str) -> bool:
        """Whether a machine takes new requests."""
        machine = self._machines.get(name)
        return machine is not None and machine.breaker.takes and not machine.why_not

    def choose(self, request: RouteRequest, exclude: Container[str], now: float) -> Route:
        """The machine that is to take a request. Raises as `Router.choose`."""
        busy = {one.link.name for one in self if not one.breaker.takes}
        left_out = busy | {name for name in self._machines if name in exclude}
        return self._router.choose(request, self.peers, now, left_out)

    # ------------------------------------------------------------ what requests tell

    def began(self, request: RouteRequest, name: str) -> None:
        """A request goes to a machine."""
        self.peers.began(request, name)
        self._machines[name].breaker.began(request)

    def ended(self, request: RouteRequest, name: str) -> None:
        """It is not there any more."""
        self.peers.ended(request, name)
        if (machine := self._machines.get(name)) is not None:
            machine.breaker.ended(request)

    def worked(self, name: str) -> None:
        """A machine has told something of a request."""
        if (machine := self._machines.get(name)) is not None and machine.breaker.state is not Gauge.OPEN:
            machine.breaker.worked()

    def lost(self, name: str, error: StokerError) -> None:
        """A machine has lost a request: it gets none until it answers again."""
        if (machine := self._machines.get(name)) is not None:
            machine.breaker.lost(error.message)
            machine.newest_look = machine.num_looks + 1  # one that is under way says how it was before
            self._tell(machine)
            machine.wakes.set()

    async def ask_now(self, name: str) -> None:
        """Ask a machine how it is, and await the answer."""
        if (machine := self._machines.get(name)) is not None:
            await self._ask(machine)

    def now(self) -> float:
        """On the clock of the machines' states."""
        return asyncio.get_running_loop().time()

    def look_soon(self, name: str) -> None:
        """Ask a machine now how it is."""
        if (machine := self._machines.get(name)) is not None:
            machine.wakes.set()

    # ------------------------------------------------------------ watching

    async def _watch(self, machine: Machine) -> None:
        """Ask one machine how it is, for ever."""
        while True:
            await self._ask(machine)
            pause_s = machine.breaker.pause_s if machine.breaker.state is Gauge.OPEN else LOOK_EVERY_S
            try:
                async with asyncio.timeout(pause_s):
                    await machine.wakes.wait()
            except TimeoutError:
                pass
            machine.wakes.clear()

    async def _ask(self, machine: Machine) -> None:
        was_open = machine.breaker.state is Gauge.OPEN
        machine.num_looks = number = machine.num_looks + 1
        found: PeerLook | StokerError
        try:
            found = await machine.link.look()
        except StokerError as error:
            found = error
        if number < machine.newest_look:
            return  # how it was before what is known of it
        machine.newest_look = number
        if isinstance(found, StokerError):
            machine.breaker.silent(found.message)
            machine.breaker.is_refused = not found.code.startswith("server_")
            if machine.breaker.state is Gauge.OPEN and not was_open:
                log.warning("%s gets no requests: %s", machine.link.name, found.message)
        else:
            machine.look, machine.looked_s = found, self.now()
            machine.breaker.answered()
            self._note_sleep(machine, found)
            if was_open:
                log.info("%s is up, %s", machine.link.name, found.overview.health.state)
        self._tell(machine)
        self._changed.set()
        self._told_models()
        self.on_change()

    def _told_models(self) -> None:
        """Tell that the models are others, if they are."""
        self._kept = self.infos()
        served = [tuple(getattr(info, name) for name in ("id", *CLIENT_SIDE)) for info in self._kept]
        if served != self._served:
            self._served = served
            self.on_models()

    @staticmethod
    def _note_sleep(machine: Machine, look: PeerLook) -> None:
        if not look.overview.is_suspended:
            machine.suspended_since = None
        elif machine.suspended_since is None:
            machine.suspended_since = asyncio.get_running_loop().time()

    def _tell(self, machine: Machine) -> None:
        """Give the router the machine as it is now."""
        if machine.look is None:
            state = PeerState(name=machine.link.name, is_up=False)
        else:
            state = peer_state(machine.link.name, machine.look, asyncio.get_running_loop().time())
            state = msgspec.structs.replace(state, is_up=machine.is_up, is_draining=machine.is_draining)
        self.peers.update(state)

    def names_unlike(self, model: str, vocabulary: str) -> Collection[str]:
        """Machines whose model of that name is known to have another vocabulary."""
        found = set()
        for machine in self:
            info = machine.info(model)
            if info is not None and info.vocabulary_sample not in {"", vocabulary}:
                found.add(machine.link.name)
        return found if vocabulary else set()
