"""The door of a site: the server's own application on a runtime whose engine is the replicas.

Ray Serve brings HTTP to it. Keys, dialects, the page, and what becomes of a request whose replica is lost are
the gate's and the server's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stoker.gate.runtime import GateRuntime
from stoker.ray.calls import ReplicaCalls
from stoker.ray.link import RayPeer
from stoker.ray.roster import roster_of
from stoker.server.app import create_app, server_context
from stoker.server.start import RuntimeStart
from stoker.settings import EngineSettings, ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle


class Door:
    """One door; with `serve.ingress()` around it a deployment of Ray Serve.

    Args:
        replicas: handle of the deployment of `StokerReplica`.
        door: its name, which no other has.
        engine: settings, by name; of an engine's those that a gate obeys.
        server: likewise, of the server.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, replicas: DeploymentHandle[Any], engine: dict[str, Any], server: dict[str, Any]
    ) -> None:
        from ray.serve import get_replica_context  # noqa: PLC0415 - it is loaded with this class, not before

        self._door = get_replica_context().replica_id.unique_id
        self._calls = ReplicaCalls(replicas)
        self._roster = roster_of(replicas.app_name, replicas.deployment_name)
        self._peers: dict[str, RayPeer] = {}
        self._runtime = GateRuntime(EngineSettings(**engine), [])
        self._context = server_context(self._runtime, ServerSettings(**server))
        self._start = RuntimeStart(self._runtime)
        self._context.log = self._start.log
        self._roster.follow(self._replicas_changed)
        try:
            await self._start.done
        except BaseException:
            await self._start.close_runtime()
            raise

    def __repr__(self) -> str:
        return f"<Door {self._door} {self._runtime!r}>"

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application."""
        return create_app(self._context)

    async def __del__(self) -> None:
        """Ray's destructor: its last request has ended."""
        self._context.is_stopping = True
        await self._start.close_runtime()
        await asyncio.to_thread(self._context.responses.close)
        if self._context.tracing is not None:
            await self._context.tracing.close()
        self._context.bodies.close()

    async def check_health(self) -> None:
        """Raises StokerError: the runtime has ended."""
        if self._runtime.health().state in {"failed", "closed"}:
            await self._runtime.ended()

    def _replicas_changed(self) -> None:
        """Other replicas are there than were."""
        names = self._roster.names
        known = {name: peer for name, peer in self._peers.items() if not peer.is_closed}
        new = [name for name in names if name not in known]
        known |= {name: RayPeer(self._calls, name, self._door, self._roster) for name in new}
        self._peers = known
        self._runtime.replace_machines([known[name] for name in names])
