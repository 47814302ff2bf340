"""GET /health, /ready and /metrics: for supervisors and dashboards; they wake nothing (SPEC S6)."""

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from stoker.errors import StokerError
from stoker.server.context import ServerContext
from stoker.server.native.status_body import engine_document


def router(context: ServerContext) -> APIRouter:
    """Is it alive, does it take work, how is it doing."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/health")
    async def health() -> Response:
        """200 while it serves or is about to; 503 where no engine starts, or none will any more.

        `engine.state`: starting, serving, restarting, suspended, closing; failing, failed or closed.
        """
        found = context.runtime.health()
        status = "ok" if found.is_alive else "error"
        content = msgspec.json.encode({"status": status, "engine": engine_document(found)})
        return Response(content, 200 if found.is_alive else 503, media_type="application/json")

    @routes.get("/ready")
    async def ready() -> Response:
        """Requests are taken; 503 until then. A suspended runtime takes them and keeps them."""
        context.require_ready()
        state = context.runtime.health().state
        status = "ready" if state == "serving" else state
        return Response(msgspec.json.encode({"status": status}), media_type="application/json")

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            status = await context.runtime.status()
        except StokerError:  # an engine that restarts has no figures; the front's own still count
            status = None
        text = context.metrics.render(status, context.runtime.model_states())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes
