"""The doors of a site: the server's own application on a runtime whose engine is the replicas.

`Door` listens by itself, as a server of one machine does; HTTP comes to `ProxiedDoor` through Ray's proxies.
Keys, dialects, the page, and what becomes of a request whose replica is lost are the gate's and the server's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stoker.gate.runtime import GateRuntime
from stoker.ray.calls import ReplicaCalls
from stoker.ray.link import RayPeer
from stoker.ray.roster import roster_of
from stoker.server.app import create_app, server_context
from stoker.server.serve import bind
from stoker.server.service import Service
from stoker.server.start import RuntimeStart
from stoker.settings import EngineSettings, ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle


class Door:
    """One door with a port of its own, a deployment of Ray Serve.

    Args:
        replicas: handle of the deployment of `StokerReplica`.
        engine: settings, by name; of an engine's those that a gate obeys.
        server: likewise, of the server.
        stop_s: what its requests have to end when it is stopped, before they are cut short.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, replicas: DeploymentHandle[Any], engine: dict[str, Any], server: dict[str, Any], stop_s: float
    ) -> None:
        self._stop_s = stop_s
        self._service: Service | None = None
        settings = ServerSettings(**server)
        self._machines = ReplicaMachines(replicas, GateRuntime(EngineSettings(**engine), []))
        start = await self._machines.started()
        try:  # not before it serves: each of two doors at a port gets a part of what comes
            listener = bind(settings.host, settings.port, is_shared=True, flag="`port` in the file")
            self._service = Service(self._machines.runtime, settings, listener)
        except BaseException:
            await start.close_runtime()
            raise
        self._serving = asyncio.ensure_future(self._service.run(lambda _line: None, start))

    def __repr__(self) -> str:
        return f"<Door {self._machines!r}>"

    async def __del__(self) -> None:
        """Ray's destructor: what it has ends first; new requests go to the door that takes its place."""
        if self._service is None:  # it never began
            return
        await self._service.leave_port(self._stop_s)
        self._service.stop()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def check_health(self) -> None:
        """Raises StokerError: the runtime has ended."""
        if self._serving.done():
            await self._serving


class ProxiedDoor:
    """One door behind Ray's proxies; with `serve.ingress()` around it a deployment of Ray Serve.

    Args:
        replicas: handle of the deployment of `StokerReplica`.
        engine: settings, by name; of an engine's those that a gate obeys.
        server: likewise, of the server.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, replicas: DeploymentHandle[Any], engine: dict[str, Any], server: dict[str, Any]
    ) -> None:
        self._runtime = GateRuntime(EngineSettings(**engine), [])
        self._context = server_context(self._runtime, ServerSettings(**server))
        self._machines = ReplicaMachines(replicas, self._runtime)
        self._start = await self._machines.started()
        self._context.log = self._start.log

    def __repr__(self) -> str:
        return f"<ProxiedDoor {self._machines!r}>"

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


class ReplicaMachines:
    """Keeps the replicas that there are as the machines of a door's runtime.

    Args:
        replicas: handle of their deployment.
        runtime: of the door; not started yet.
    """

    def __init__(self, replicas: DeploymentHandle[Any], runtime: GateRuntime) -> None:
        from ray.serve import get_replica_context  # noqa: PLC0415 - it is loaded with a door, not before

        self._door = get_replica_context().replica_id.unique_id
        self.runtime = runtime
        self._calls = ReplicaCalls(replicas)
        self._roster = roster_of(replicas.app_name, replicas.deployment_name)
        self._peers: dict[str, RayPeer] = {}
        self._roster.follow(self._replicas_changed)

    def __repr__(self) -> str:
        return f"<ReplicaMachines of {self._door}: {sorted(self._peers)}>"

    async def started(self) -> RuntimeStart:
        """The start of the runtime, which is done: a replica takes requests.

        Raises:
            StokerError: it failed.
        """
        start = RuntimeStart(self.runtime)
        try:
            await start.done
        except BaseException:
            await start.close_runtime()
            raise
        return start

    def _replicas_changed(self) -> None:
        """Other replicas are there than were."""
        names = self._roster.names
        known = {name: peer for name, peer in self._peers.items() if not peer.is_closed}
        new = [name for name in names if name not in known]
        known |= {name: RayPeer(self._calls, name, self._door, self._roster) for name in new}
        self._peers = known
        self.runtime.replace_machines([known[name] for name in names])
