"""Calls of replicas through a handle of Ray Serve, each to the one that it names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, cast

from stoker.errors import ServerLostError
from stoker.ray.link import lost

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator


class ReplicaCalls:
    """See the module.

    Calls go over gRPC from process to process. By Ray's objects, which is Ray's default, an answer and each
    message of a stream takes several milliseconds longer, and two cores were a tenth slower with 32 streams.

    Whoever calls does it in an empty context: Ray ties calls to the HTTP request in whose context they are
    made, ends them with it, and may mix up two of one request.

    Args:
        handle: of the replicas' deployment.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self.name = f"ray:{handle.app_name}/{handle.deployment_name}"
        handle = handle.options(_by_reference=False)
        methods = ("submit", "cancel", "ask", "steer", "operate", "look")
        self._unary = {method: handle.options(method_name=method) for method in methods}
        self._open = handle.options(method_name="open", stream=True)

    def __repr__(self) -> str:
        return f"<ReplicaCalls of {self.name}>"

    async def call(self, replica: str, method: str, limit_s: float | None, *given: Any) -> bytes:
        """The answer of one call. Raises ServerLostError: there is none."""
        with _lost_for_any(replica):
            async with asyncio.timeout(limit_s):
                found: bytes = await self._unary[method].remote(*given, replica=replica)
        return found

    async def open(self, replica: str, door: str) -> AsyncGenerator[bytes, None]:
        """The frames of a stream, until either side ends it. Raises ServerLostError: the replica is gone."""
        stream = cast("DeploymentResponseGenerator[bytes]", self._open.remote(door, replica=replica))
        try:
            with _lost_for_any(replica):
                async for frame in stream:
                    yield frame
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _lost_for_any(replica: str) -> Iterator[None]:
    """Whatever a call raises is that the replica is lost; this task's own end stays what it is.

    Over gRPC an exception of the replica's comes as itself, and an end of its connection as one of grpc's or
    as the cancellation of the call.
    """
    try:
        yield
    except ServerLostError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        details = getattr(error, "details", None)  # grpc's own text has several lines, of which this is one
        raise lost(replica, EOFError(details()) if callable(details) else error) from None
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise lost(replica, error) from None
