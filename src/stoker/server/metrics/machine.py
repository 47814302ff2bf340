"""What `/metrics` shows of the machine: memory by line of the ledger, pressure, heat, and each device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.server.metrics.families import gauge, gauges, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

    from stoker.ipc.status import DeviceStatus, MemoryStatus

_PRESSURES = ("normal", "warning", "critical")
_HEATS = ("nominal", "fair", "serious", "critical")


def measured(memory: MemoryStatus) -> Iterable[Metric]:
    """Memory by line of the ledger, pressure and heat; nothing before they were measured."""
    if not memory.limit:
        return
    lines = {(line,): float(num_bytes) for line, num_bytes in memory.lines.items()}
    yield gauges("memory_bytes", "Bytes by line of the ledger.", ["line"], lines)
    for name, text, value in (
        ("limit", "What engine and client may take together.", memory.limit),
        ("footprint", "What they take.", memory.footprint),
        ("available", "What could be used now without swapping.", memory.available),
    ):
        yield gauge(f"memory_{name}_bytes", text, value)
    fraction = memory.pressure_fraction
    yield gauge("memory_pressure_fraction", "Of the worst source, 0 to 1 and more.", fraction)
    yield one_of("memory_pressure", "1 at the level it has.", _PRESSURES, memory.pressure)
    rungs = {(rung,): float(rung in memory.rungs) for rung in memory.ladder}
    yield gauges("memory_rung", "1 for what is given up to relieve memory.", ["rung"], rungs)
    yield one_of("heat", "1 at the level it has.", _HEATS, memory.heat)


def devices(found: Sequence[DeviceStatus]) -> Iterable[Metric]:
    """Each accelerator's own memory by who has it and by purpose, and what its driver says of it."""
    known = [device for device in found if device.total]
    held = {
        (device.id, holder): num_bytes
        for device in known
        for holder, num_bytes in (("own", device.own), ("others", device.others), ("free", device.free))
    }
    yield gauges(
        "device_memory_bytes",
        "Own memory of an accelerator, by who has it: own, others or free.",
        ["device", "held_by"],
        held,
    )
    totals = {(device.id,): float(device.total) for device in known}
    yield gauges("device_memory_total_bytes", "Own memory of an accelerator.", ["device"], totals)
    lines = {
        (device.id, line): float(num_bytes) for device in known for line, num_bytes in device.lines.items()
    }
    yield gauges("device_ledger_bytes", "Of its memory, by line of the ledger.", ["device", "line"], lines)
    celsius = {(device.id,): device.celsius for device in known}
    yield gauges("device_celsius", "Of an accelerator's processor.", ["device"], celsius)
    power_w = {(device.id,): device.power_w for device in known}
    yield gauges("device_power_watts", "What an accelerator takes.", ["device"], power_w)
    used = {(device.id,): float(device.is_used) for device in found}
    yield gauges("device_used", "1: models were loaded on it.", ["device"], used)
    leased = {(device.id,): float(bool(device.held_by)) for device in found}
    yield gauges("device_held_by_another", "1: another Stoker has the lease on it.", ["device"], leased)
