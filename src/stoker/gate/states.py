"""What machines say of themselves: for the router, as one status, and as those who watch are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stoker.client.requests.held_prefixes import unpacked
from stoker.gate.journey import own_id
from stoker.ipc.figures import CacheFigures, MachineFigures, MemoryFigures
from stoker.ipc.model import ModelLife
from stoker.ipc.request import Priority
from stoker.ipc.status import EngineStatus, MemoryStatus, ModelStatus, SlotStatus, WaitStatus
from stoker.routing.load import ByClass, PeerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker.gate.journey import Journey
    from stoker.gate.link import PeerLook
    from stoker.gate.site import Site
    from stoker.ipc.events import Event
    from stoker.ipc.status import MachineStatus

_IN_MEMORY = frozenset({ModelLife.READY, ModelLife.LOADING})
_LEAVING = frozenset({"closing", "closed", "failed"})
_HEATS = ("nominal", "fair", "serious", "critical")
_PRESSURES = ("", "normal", "warning", "critical")


def is_draining(look: PeerLook) -> bool:
    """Whether a machine ends: it takes nothing new although its engine serves, or is on its way out."""
    state = look.overview.health.state
    return state in _LEAVING or (state == "serving" and not look.overview.is_ready)


def peer_state(name: str, look: PeerLook, now: float) -> PeerState:
    """One machine for the router; whether it is up is for who asked it to say."""
    engine = look.status.engine
    lives = {one.id: one.state for one in look.overview.states}
    waiting = [*engine.queue, *engine.parked]
    return PeerState(
        name=name,
        at=now,
        is_suspended=look.overview.is_suspended,
        heat=engine.memory.heat,
        rungs=tuple(engine.memory.rungs),
        models=frozenset(model for model, life in lives.items() if life in _IN_MEMORY),
        available={
            info.id: _fit(info.id, engine)
            for info in look.overview.models
            if lives.get(info.id) not in _IN_MEMORY
        },
        running=_by_class(slot.priority for slot in engine.slots if slot.priority is not None),
        waiting=_by_class(one.priority for one in waiting),
        num_slots=max(1, len(engine.slots)),
        free_cells={model: room.free_cells for model, room in engine.rooms.items()},
        interactive_wait_s=_interactive_wait_s(engine),
        prefixes=unpacked(look.overview.prefixes),
    )


def _by_class(priorities: Iterable[Priority]) -> ByClass:
    found = list(priorities)
    num_background = found.count(Priority.BACKGROUND)
    return ByClass(len(found) - num_background, num_background)


def _interactive_wait_s(engine: EngineStatus) -> float:
    """How long one more person would wait, at the model where it is longest."""
    told = [room.interactive_wait_s for room in engine.rooms.values()]
    etas = [one.eta_s for one in engine.queue if one.priority is Priority.INTERACTIVE]
    return max((wait_s for wait_s in (*told, *etas) if wait_s is not None), default=0.0)


def _fit(model: str, engine: EngineStatus) -> float:
    """Bytes that would stay free, 0 where idle models have to give way; below 0: it does not fit at all."""
    needed = next((sum(one.bytes.values()) for one in engine.models if one.id == model), 0)
    memory = engine.memory
    if not (needed and memory.limit):
        return 0.0
    return float(max(memory.available - needed, min(0, memory.limit - needed)))


# ---------------------------------------------------------------- one status of all


def site_status(
    site: Site, journeys: Iterable[Journey], counters: Mapping[str, float], now: float
) -> EngineStatus:
    """The machines as one engine, with what the gate itself counts."""
    looks = [(partial(site.slot_base, one), one.look) for one in site if one.look is not None and one.is_up]
    merged = merged_status(looks, own_id)
    return msgspec.structs.replace(
        merged, machines=_machines(site, journeys, now), counters={**merged.counters, **counters}
    )


def _machines(site: Site, journeys: Iterable[Journey], now: float) -> list[MachineStatus]:
    """Each machine, with how many requests are there."""
    num = Counter(one.peer for one in journeys)
    return [one.status(num[one.link.name], now) for one in site]


def figures_of(status: EngineStatus) -> list[Event]:
    """What those who watch are told now and then."""
    return [
        MachineFigures(machines=status.machines),
        MemoryFigures(memory=status.memory, physical=status.memory.limit, devices=[], models=status.models),
        CacheFigures(
            cache=status.cache,
            prefixes=[],
            cells_used=status.kv_cells_used,
            cells_total=status.kv_cells_total,
            queries_total=0,
            hits_total=0,
            hit_rate=None,
        ),
    ]


def merged_status(
    looks: Iterable[tuple[Callable[[str], int], PeerLook]], own_id: Callable[[str], str]
) -> EngineStatus:
    """The machines as one engine.

    Args:
        looks: what each said last, with what its slots are counted from, by model.
        own_id: the gate's id of a request, by the machine's.
    """
    slots: list[SlotStatus] = []
    queues: dict[str, list[WaitStatus]] = {"queue": [], "parked": [], "paused": []}
    statuses: list[EngineStatus] = []
    for base_of, look in looks:
        engine = look.status.engine
        statuses.append(engine)
        for slot in engine.slots:
            request_id = None if slot.request_id is None else own_id(slot.request_id)
            slots.append(
                msgspec.structs.replace(slot, id=slot.id + base_of(slot.model), request_id=request_id)
            )
        for name, found in queues.items():
            for one in getattr(engine, name):
                found.append(msgspec.structs.replace(one, request_id=own_id(one.request_id)))
    counters: dict[str, float] = {}
    for engine in statuses:
        for name, value in engine.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    return EngineStatus(
        slots=sorted(slots, key=lambda slot: (slot.model, slot.id)),
        queue=queues["queue"],
        parked=queues["parked"],
        paused=queues["paused"],
        counters=counters,
        num_threads=sum(engine.num_threads for engine in statuses),
        models=_models(statuses),
        memory=_memory(statuses),
        kv_cells_total=sum(engine.kv_cells_total for engine in statuses),
        kv_cells_used=sum(engine.kv_cells_used for engine in statuses),
    )


def _models(statuses: Iterable[EngineStatus]) -> list[ModelStatus]:
    """Each once, as it is where it is furthest."""
    order = {ModelLife.READY: 2, ModelLife.LOADING: 1}
    found: dict[str, ModelStatus] = {}
    for engine in statuses:
        for model in engine.models:
            known = found.get(model.id)
            if known is None or _rank(order, model) > _rank(order, known):
                found[model.id] = model
    return list(found.values())


def _rank(order: dict[ModelLife, int], model: ModelStatus) -> int:
    return order.get(ModelLife(model.state), 0)


def _memory(statuses: list[EngineStatus]) -> MemoryStatus:
    """The sums, and the worst of levels."""
    memories = [engine.memory for engine in statuses]
    if not memories:
        return MemoryStatus()
    lines: dict[str, int] = {}
    for memory in memories:
        for name, size in memory.lines.items():
            lines[name] = lines.get(name, 0) + size
    worst = max(memories, key=lambda one: _PRESSURES.index(one.pressure) if one.pressure in _PRESSURES else 0)
    return msgspec.structs.replace(
        worst,
        limit=sum(one.limit for one in memories),
        footprint=sum(one.footprint for one in memories),
        available=sum(one.available for one in memories),
        lines=lines,
        heat=max((one.heat for one in memories), key=_HEATS.index),
    )
