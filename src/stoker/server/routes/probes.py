"""GET /health, /ready and /metrics: for supervisors and dashboards; they wake nothing (SPEC S6)."""

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from stoker.errors import StokerError
from stoker.server.context import ServerContext


def router(context: ServerContext) -> APIRouter:
    """Is it alive, does it take work, how is it doing."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/health")
    async def health() -> Response:
        """The server process answers."""
        return Response(msgspec.json.encode({"status": "ok"}), media_type="application/json")

    @routes.get("/ready")
    async def ready() -> Response:
        """Requests are taken; 503 until then."""
        context.require_ready()
        return Response(msgspec.json.encode({"status": "ready"}), media_type="application/json")

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            status = await context.runtime.status()
        except StokerError:  # an engine that restarts has no figures; the front's own still count
            status = None
        return Response(context.metrics.render(status), media_type=CONTENT_TYPE_LATEST)

    return routes
