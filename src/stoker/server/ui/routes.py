"""GET /ui and its files (SPEC U1): who gets the page, and what a browser gets that asks for something else.

The page holds nothing of the server; what it shows and does goes through the other routes, with their keys.
Apart because a recording is shown by the same files without a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import OperatorOnlyError
from stoker.server.inbound.address import is_loopback
from stoker.server.ui.page import ASSETS, PATH, shipped_page

if TYPE_CHECKING:
    from stoker.server.context import ServerContext

_LOCAL_ONLY = (
    "a server without keys shows its page to browsers of its own machine alone; with --admin-key-file or"
    " [keys.NAME] it is there for all, and asks for a key"
)


def router(context: ServerContext) -> APIRouter:
    """The page; none where the settings say so."""
    routes = APIRouter(include_in_schema=False)
    if not context.settings.ui:
        return routes

    def check(request: Request) -> None:
        peer = request.client.host if request.client else ""
        if not (context.access.asks_for_keys or is_loopback(peer)):
            raise OperatorOnlyError(_LOCAL_ONLY)

    @routes.head(PATH)
    @routes.get(PATH)
    async def index(request: Request) -> Response:
        check(request)
        return shipped_page().index()

    @routes.get(f"{ASSETS}/{{digest}}/{{name:path}}")
    async def asset(request: Request, digest: str, name: str) -> Response:
        check(request)
        found = shipped_page().asset(digest, name, request.headers.get("Accept-Encoding", ""))
        if found is None:
            raise HTTPException(404, f"this version of the page has no file {name[:99]!r}: load it again")
        return found

    return routes
