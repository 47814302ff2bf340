"""Calls of replicas through a handle of Ray Serve, each to the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

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
        try:
            async with asyncio.timeout(limit_s):
                found: bytes = await self._unary[method].remote(*given, replica=replica)
        except (RayError, RayServeException, TimeoutError) as error:
            raise lost(replica, error) from None
        return found

    async def open(self, replica: str, door: str) -> AsyncGenerator[bytes, None]:
        """The frames of a stream, until either side ends it. Raises ServerLostError: the replica is gone."""
        stream = cast("DeploymentResponseGenerator[bytes]", self._open.remote(door, replica=replica))
        try:
            async for frame in stream:
                yield frame
        except (RayError, RayServeException) as error:
            raise lost(replica, error) from None
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]
