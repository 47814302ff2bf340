"""A status with something of everything, and the samples of a text that Prometheus reads."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from stoker.ipc.request import Priority
from stoker.ipc.status import (
    CacheStatus,
    DeviceStatus,
    EngineHealth,
    EngineStatus,
    MemoryStatus,
    ModelStatus,
    RequestStatus,
    RuntimeStatus,
    SlotStatus,
    StreamingStatus,
)

DEVICE = DeviceStatus(
    id="CUDA0",
    name="card",
    is_used=True,
    total=100,
    free=30,
    own=50,
    others=20,
    celsius=61.0,
    held_by="another",
    lines={"weights": 40},
)
STREAMING = StreamingStatus(size=90, budget=30, resident=20, num_faults=4, read_bytes=60, read_s=1.5)
MODELS = [
    ModelStatus(
        id="chat", state="ready", leases=2, is_pinned=True, bytes={"weights": 7}, streaming=STREAMING
    ),
    ModelStatus(id="other", state="loading", stage="weights", fraction=0.25),
]


def request(state: str, priority: Priority, eta_s: float | None = None) -> RequestStatus:
    """A live request."""
    return RequestStatus(
        request_id=f"req-{state}",
        model="chat",
        priority=priority,
        kind="chat",
        route="library",
        arrived_at=0.0,
        state=state,
        eta_s=eta_s,
    )


def status_of(**fields) -> RuntimeStatus:
    """A status with something of everything."""
    engine = EngineStatus(
        slots=[
            SlotStatus(id=0, state="decode", model="chat", num_tokens=3, request_id="req-decode"),
            SlotStatus(id=1, state="idle", model="chat", num_tokens=0),
        ],
        queue=[],
        parked=[],
        threads_reason="cores are taken",
        devices=[DEVICE, msgspec.structs.replace(DEVICE, id="CUDA1", power_w=80.0)],
        counters={"num_steps": 12.0, "step_busy_s": 1.5, "step_target_ms": 50.0},
        cache=CacheStatus(ram_bytes=5, ram_limit_bytes=10, disk_problem="full"),
        models=MODELS,
        memory=MemoryStatus(
            limit=1000, lines={"weights": 7}, pressure="warning", rungs=["a"], ladder=["a", "b"]
        ),
        kv_cells_total=64,
        kv_cells_used=16,
        activity={
            "chat": {
                "step_ms": 20.0,
                "rows_per_step": 2.0,
                "tokens_per_step": 3.0,
                "people_share": 1.0,
                "jobs_share": 0.0,
            }
        },
    )
    status = RuntimeStatus(
        pid=1,
        state="serving",
        restarts=1,
        label="fake",
        threads=2,
        engine=engine,
        health=EngineHealth(state="serving", for_s=8.0),
        requests=[
            request("decode", Priority.INTERACTIVE),
            request("queued", Priority.BACKGROUND, 4.0),
            request("prefix_wait", Priority.BACKGROUND),
        ],
        as_of_s=2.5,
        version="9",
    )
    return msgspec.structs.replace(status, **fields)


def figures(text: bytes) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels, in the order of their names."""
    return {
        (
            sample.name.removeprefix("stoker:"),
            *(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
