"""The engine and everything it holds now, in one value; works with an engine and without."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import NotReadyError
from stoker.ipc.commands import GetStatus
from stoker.ipc.status import EngineStatus, RuntimeStatus

if TYPE_CHECKING:
    from stoker.client.supervisor import EngineSupervisor

STATUS_WAIT_S = 2.0
_NO_STATUS = EngineStatus(slots=[], queue=[], parked=[], counters={}, kv_cells_total=0, kv_cells_used=0)


async def overview(supervisor: EngineSupervisor) -> RuntimeStatus:
    """What `/v1/runtime` shows; the engine's part is empty where none serves or answers in time."""
    engine = await _engine_status(supervisor)
    default = next(iter(supervisor.registry.infos()), None)
    return RuntimeStatus(
        pid=supervisor.pid,
        state=supervisor.state.value,
        restarts=supervisor.num_restarts,
        label=default.label if default else "",
        threads=engine.num_threads or (default.num_threads if default else 0),
        engine=engine,
        health=supervisor.health(),
        groups=supervisor.requests.groups(),
    )


async def _engine_status(supervisor: EngineSupervisor) -> EngineStatus:
    if not supervisor.has_engine:
        await asyncio.sleep(0)  # who asks again and again must not keep the engine from starting
        return _NO_STATUS
    try:
        answer = (await asyncio.wait_for(supervisor.ask(GetStatus(0)), STATUS_WAIT_S))["status"]
    except (NotReadyError, TimeoutError):  # it died between the two questions, or a step is long
        return _NO_STATUS
    return answer if isinstance(answer, EngineStatus) else msgspec.convert(answer, EngineStatus)
