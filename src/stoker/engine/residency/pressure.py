"""What is done about a shortage of memory and about heat (SPEC M3, M4, M6, M8).

Owns the meters and the ladder of one engine. How much is too much and what comes first is policy
(`stoker.machine.pressure`, `ladder`, `thermal`); this does it between two steps, and undoes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from stoker.engine.residency.streamed import lower
from stoker.errors import TooHotError
from stoker.ipc.events import HeatMoved, PressureMoved, RungTaken
from stoker.ipc.status import DeviceStatus, MemoryStatus
from stoker.machine import malloc
from stoker.machine.ladder import LADDER, Ladder, Move, Rung
from stoker.machine.pressure import (
    CRITICAL_FROM,
    PSI_CRITICAL,
    PSI_WARNING,
    WARNING_FROM,
    Pressure,
    PressureMeter,
    PressureReading,
    fullest,
)
from stoker.machine.thermal import DEFAULT_CRITICAL_C, DEFAULT_HIGH_C, FAIR_BELOW_K, Heat, HeatReading
from stoker.scheduler.queue import Throttle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker.backends.device import Device, HeldDevices
    from stoker.cache.store import PrefixStore
    from stoker.engine.residency.residency import Residency
    from stoker.engine.runners.turns import Runners
    from stoker.ipc.events import Event
    from stoker.machine.monitor import DeviceSample, Sample

log = logging.getLogger(__name__)

RETRY_AFTER_HEAT_S = 30.0
LOWERED_PART = 0.5
"""Of their budgets of pages, what models whose experts are read as needed keep while limits are lowered."""


THRESHOLDS = {
    "fraction_warning": WARNING_FROM,
    "fraction_critical": CRITICAL_FROM,
    "psi_warning": PSI_WARNING,
    "psi_critical": PSI_CRITICAL,
    "heat_fair_below_high": FAIR_BELOW_K,
    "heat_high": DEFAULT_HIGH_C,
    "heat_critical": DEFAULT_CRITICAL_C,
}
"""Where levels begin, for those who draw them. A sensor may have heat thresholds of its own."""


class PressureHandler:
    """Follows memory and heat of one engine.

    Args:
        runners: the models in memory.
        residency: which those are.
        store: the prefix cache.
        events: where what happens is put.
    """

    def __init__(
        self, runners: Runners, residency: Residency, store: PrefixStore, events: list[Event]
    ) -> None:
        self._runners = runners
        self._residency = residency
        self._store = store
        self._events = events
        self._meter = PressureMeter()
        self._ladder = Ladder()
        self._reading: PressureReading | None = None
        self._is_card_short = False  # and not the machine: what lies in its memory may stay
        self._heat = HeatReading()

    def __repr__(self) -> str:
        return f"<PressureHandler {self._reading} {self._heat} {self._ladder!r}>"

    def measured(self, sample: Sample, now: float) -> bool:
        """Take a sample in; at most one rung follows.

        Returns:
            Whether a rung was taken, so that the next sample should come soon.
        """
        self._note_pressure(sample)
        self._note_heat(sample.heat)
        move = self._ladder.decide(self._reading.level if self._reading else Pressure.NORMAL, now)
        if move is not None:
            freed_bytes = self._undo(move.rung) if move.is_undone else self._take(move.rung, now)
            log.warning("memory ladder: %s", self._move_text(move))
            rung = RungTaken(rung=move.rung, is_undone=move.is_undone, freed_bytes=freed_bytes)
            self._events.append(rung)
            self._runners.hold_back(self._throttle())
        else:
            self._repeat(now)
        return move is not None and not move.is_undone

    def _move_text(self, move: Move) -> str:
        """The rung, and for one that is taken what is short."""
        if move.is_undone or self._reading is None:
            return f"undone: {move.rung}" if move.is_undone else move.rung
        return f"{move.rung}, as {self._reading.source} is at {self._reading.fraction:.0%}"

    @property
    def _is_short(self) -> bool:
        return self._reading is not None and self._reading.level is Pressure.CRITICAL

    def _repeat(self, now: float) -> None:
        """What was in use when its rung was taken may go now."""
        if self._ladder.is_taken(Rung.DROP_SNAPSHOTS):
            self._drop_snapshots(now)
        if self._is_short and self._ladder.is_taken(Rung.UNLOAD_IDLE):
            self._residency.unload_idle(now)

    def _note_pressure(self, sample: Sample) -> None:
        before, self._reading = self._reading, self._meter.update(sample)
        self._is_card_short = self._reading.source in {device.id for device in sample.devices}
        if before is None or before.level is not self._reading.level:
            reading = self._reading
            if before is not None or reading.level is not Pressure.NORMAL:
                moved = PressureMoved(
                    level=reading.level, fraction=round(reading.fraction, 3), source=reading.source
                )
                self._events.append(moved)

    def _note_heat(self, heat: HeatReading) -> None:
        before, self._heat = self._heat, heat
        if before.level is heat.level:
            return
        self._events.append(HeatMoved(level=heat.level, sensor=heat.sensor, celsius=heat.celsius))
        self._residency.refusal = self._refusal() if heat.level.rank >= Heat.SERIOUS.rank else None
        self._runners.hold_back(self._throttle())

    def _refusal(self) -> TooHotError:
        shown = (
            "" if self._heat.celsius is None else f": {self._heat.sensor} shows {self._heat.celsius:.0f} °C"
        )
        return TooHotError(
            f"the machine is too hot to load a model ({self._heat.level}{shown})",
            retry_after_s=RETRY_AFTER_HEAT_S,
            heat=self._heat.level,
        )

    def _throttle(self) -> Throttle:
        """What the rungs that are taken, and heat, let run."""
        is_hot = self._heat.level.rank >= Heat.SERIOUS.rank
        is_taken = self._ladder.is_taken
        by_heat = is_hot and not is_taken(Rung.PAUSE_BACKGROUND)
        who = "everything" if is_taken(Rung.PARK_INTERACTIVE) else "background"
        return Throttle(
            holds_background=is_hot or is_taken(Rung.PAUSE_BACKGROUND),
            holds_all=is_taken(Rung.PARK_INTERACTIVE),
            is_lowered=is_taken(Rung.LOWER_LIMITS),
            keeps_nothing=is_taken(Rung.DROP_IDLE_CELLS),
            halves_time=self._heat.level is Heat.CRITICAL,
            reason=f"{'heat' if by_heat else 'memory pressure'}: {who} waits",
        )

    def _take(self, rung: Rung, now: float) -> int:
        """Carry a rung out; returns the bytes it gave back, as far as they are counted."""
        match rung:
            case Rung.TRIM_ALLOCATOR:
                malloc.trim()
            case Rung.DROP_SNAPSHOTS:
                return self._drop_snapshots(now)
            case Rung.DROP_IDLE_CELLS:
                for runner in self._runners:
                    runner.drop_idle(now)
            case Rung.UNLOAD_IDLE:
                return self._residency.unload_idle(now)
            case Rung.PARK_INTERACTIVE:
                self._residency.is_barred = True
                return self._residency.step_aside(now)
            case Rung.LOWER_LIMITS:
                return lower(self._runners, LOWERED_PART)
            case Rung.PAUSE_BACKGROUND:
                pass  # the throttle follows what is taken
        return 0

    def _drop_snapshots(self, now: float) -> int:
        """They lie in the machine's memory: none goes where a card alone is short."""
        return 0 if self._is_card_short else self._store.hold(now)

    def _undo(self, rung: Rung) -> int:
        """Allow again what it had taken away."""
        match rung:
            case Rung.DROP_SNAPSHOTS:
                self._store.release()
            case Rung.PARK_INTERACTIVE:
                self._residency.is_barred = False
            case Rung.LOWER_LIMITS:
                lower(self._runners, 1.0)
            case _:
                pass  # one-shots come back by use; the rest is the throttle's
        return 0

    def status(self, sample: Sample, lines: dict[str, int]) -> MemoryStatus:
        """Memory as `sample` shows it now, and what is done about it; `lines` are the ledger's."""
        level = self._reading.level if self._reading else Pressure.NORMAL
        fraction, source = fullest(sample)
        return MemoryStatus(
            limit=sample.limit_bytes,
            footprint=sample.footprint_bytes,
            available=sample.available_bytes,
            tier=sample.tier,
            pressure=level,
            pressure_fraction=round(fraction, 3),
            pressure_source=source,
            rungs=list(self._ladder.taken),
            lines=lines,
            heat=self._heat.level,
            thresholds=THRESHOLDS,
            ladder=list(LADDER),
        )


def device_status(
    devices: HeldDevices, samples: Iterable[DeviceSample], lines: Mapping[str, Mapping[str, int]]
) -> list[DeviceStatus]:
    """Every device that is known, with its own memory as measured where it has some.

    Args:
        devices: the engine's.
        samples: their memory now.
        lines: the ledger's, by id of the device.
    """
    measured = {sample.id: sample for sample in samples}
    return [
        _measured(_described(device, devices, lines.get(device.id, {})), measured.get(device.id))
        for device in devices.known
    ]


def _described(device: Device, devices: HeldDevices, lines: Mapping[str, int]) -> DeviceStatus:
    return DeviceStatus(
        id=device.id,
        name=device.name,
        kind=device.kind,
        is_used=devices.is_taken(device),
        is_integrated=device.is_integrated,
        held_by=devices.holder(device),
        lines=dict(lines),
    )


def _measured(plain: DeviceStatus, sample: DeviceSample | None) -> DeviceStatus:
    if sample is None:
        return plain
    return msgspec.structs.replace(
        plain,
        total=sample.total_bytes,
        free=sample.free_bytes,
        own=sample.own_bytes,
        others=sample.other_bytes,
        celsius=sample.heat.celsius,
        power_w=sample.power_w,
    )
