"""Work that ends when the client leaves (SPEC S5).

Owns the watch on the connection; what cancelling the work frees is left to the work.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Run `work`; cancel it, and wait for its clean-up, as soon as the client leaves.

    The request's body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
