"""What becomes of calls of a replica: every way in which one fails is that the replica is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed (the ray extra)")

TOLD = """
import asyncio, json
import grpc
from grpc.aio import AioRpcError, Metadata
from stoker.errors import ServerLostError
from stoker.ray.calls import ReplicaCalls

class Handle:
    app_name, deployment_name = "site", "replicas"
    def __init__(self, error, told):
        self.error, self.told = error, told
    def options(self, **options):
        self.told.append(options)
        return self
    def remote(self, *given, **named):
        return Answer(self.error)

class Answer:
    def __init__(self, error):
        self.error = error
    def __await__(self):
        async def failed():
            raise self.error
        return failed().__await__()
    async def __aiter__(self):
        yield b"first"
        raise self.error
    def cancel(self):
        pass

async def found(error):
    calls = ReplicaCalls(Handle(error, told))
    try:
        await calls.call("one", "submit", 1.0)
    except BaseException as raised:
        called = raised
    try:
        async for _ in calls.open("one", "door"):
            pass
    except BaseException as raised:
        opened = raised
    return [str(each) if isinstance(each, ServerLostError) else None for each in (called, opened)]

async def cancelled():
    class Silent(Answer):
        def __await__(self):
            return asyncio.sleep(60).__await__()
    class Waiting(Handle):
        def remote(self, *given, **named):
            return Silent(None)
    task = asyncio.ensure_future(ReplicaCalls(Waiting(None, [])).call("one", "submit", None))
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False

told = []
errors = [AioRpcError(code, Metadata(), Metadata(), details="it went away") for code in
          (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)]
errors += [KeyError("model"), asyncio.CancelledError(), ServerLostError("gone", param="url", url="one")]
ends = [asyncio.run(found(error)) for error in errors]
is_over_grpc = any(each.get("_by_reference") is False for each in told)
print(json.dumps([ends, asyncio.run(cancelled()), is_over_grpc]))
"""


def test_whatever_a_call_raises_a_replica_is_lost_and_a_cancelled_one_is_cancelled() -> None:
    """P42, P40: over gRPC errors come as themselves, and the end of a connection as a cancelled call."""
    done = subprocess.run(
        [sys.executable, "-c", TOLD], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    ends, is_cancelled, is_over_grpc = json.loads(done.stdout.splitlines()[-1])
    assert ends[:3] == [["the replica one was lost: it went away"] * 2] * 3
    assert all(all(end) for end in ends), ends
    assert is_cancelled
    assert is_over_grpc
