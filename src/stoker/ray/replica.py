"""A replica of Ray Serve that computes: one runtime, one machine's or one GPU's device.

Doors call it. What a request gives goes back over a stream that each door has open: one message carries what
a step of the engine gave all requests of that door.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from stoker.errors import (
    InvalidRequestError,
    MachineSetupError,
    ModelNotFoundError,
    NotReadyError,
    ServerLostError,
    StokerError,
)
from stoker.gate.link import PeerLook
from stoker.ipc.codec import encode_events
from stoker.ipc.commands import CountTokens, Detokenize, Submit, TextQuestion, Tokenize
from stoker.ipc.events import Event, Failed
from stoker.ipc.model import Reach
from stoker.ray.autoscaling import load_of
from stoker.ray.link import ReplicaAnswer
from stoker.remote.wire import Overview
from stoker.runtime import Runtime
from stoker.settings import EngineSettings

log = logging.getLogger(__name__)

BEAT_S = 5.0
"""The longest silence on a stream."""
SILENT_S = 45.0
"""A door that has asked nothing for so long is gone."""
SWEEP_S = 10.0
MAX_WAITING = 20_000
"""Events that wait for a door to read them; past that its requests wait too."""
SICK_S = 120.0
"""An engine that does not come up for so long is not waited for: Ray starts another replica."""
ROUTE = "ray"
"""What requests came by, for `/v1/runtime`."""

_submit = msgspec.msgpack.Decoder(Submit).decode
_question = msgspec.msgpack.Decoder(TextQuestion).decode
_encode = msgspec.msgpack.Encoder().encode


class DoorStream:
    """What one door has here: its requests, and their events on the way to it.

    Args:
        runtime: that computes.
        door: the name of the stream.
    """

    def __init__(self, runtime: Runtime, door: str) -> None:
        self._runtime, self._door = runtime, door
        self._waiting: list[Event] = []
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._heard_s = asyncio.get_running_loop().time()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<DoorStream {self._door}, {len(self._requests)} requests>"

    @property
    def silent_s(self) -> float:
        """Seconds since the door asked for anything."""
        return asyncio.get_running_loop().time() - self._heard_s

    def noticed(self) -> None:
        """The door has asked for something."""
        self._heard_s = asyncio.get_running_loop().time()

    def begin(self, submit: Submit) -> None:
        """Go on with a request."""
        self._requests[submit.request_id] = task = asyncio.ensure_future(self._carry(submit))
        task.add_done_callback(lambda _: self._requests.pop(submit.request_id, None))

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown one is ignored."""
        if (task := self._requests.get(request_id)) is not None:
            task.cancel()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """All that comes for the door, an empty list where nothing does for a while; until `close`."""
        yield encode_events([])
        while not self._is_over:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            found, self._waiting = self._waiting, []
            self._has_news.clear()
            self._has_room.set()
            yield encode_events(found)

    async def close(self) -> None:
        """Cancel what the door has here, and end the stream. Idempotent."""
        self._is_over = True
        self._has_news.set()
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, submit: Submit) -> None:
        """One request, to its end."""
        try:
            _check(self._runtime, submit)
            stream = self._runtime.take_over(submit, self._door, ROUTE)
            async with aclosing(stream) as events:
                async for event in events:
                    await self._tell(event)
        except StokerError as error:
            await self._tell(Failed(submit.request_id, error.info()))
        except Exception as error:
            log.exception("request %s failed", submit.request_id)
            await self._tell(Failed(submit.request_id, StokerError(f"it failed: {error!r}").info()))

    async def _tell(self, event: Event) -> None:
        self._waiting.append(event)
        self._has_news.set()
        if len(self._waiting) >= MAX_WAITING:
            self._has_room.clear()
        if not self._has_room.is_set():
            await self._has_room.wait()


def _check(runtime: Runtime, submit: Submit) -> None:
    """Refuse what cannot begin here now."""
    if not runtime.is_ready:
        health = runtime.health()
        raise NotReadyError(f"the replica takes no requests now: {health.state}", retry_after_s=2.0)
    runtime.resolve(submit.request.model)


class StokerReplica:
    """One runtime; a deployment of Ray Serve.

    Args:
        settings: of the engine, by name, as a settings file has them.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc] # Ray awaits it
        self._settings = EngineSettings(**settings)
        self._runtime = Runtime(settings=self._settings)
        self._runtime.takes_up = False  # what a replica that died had, the doors have
        self._streams: dict[str, DoorStream] = {}
        self._is_leaving = False
        try:
            await self._runtime.start()
        except BaseException:
            await self._runtime.close()
            raise
        self._sweeping = asyncio.ensure_future(self._sweep())

    def __repr__(self) -> str:
        return f"<StokerReplica {self._runtime!r}, {len(self._streams)} doors>"

    async def __del__(self) -> None:
        """Ray's destructor: doors have taken what they had here elsewhere, or it has ended."""
        self._is_leaving = True
        self._sweeping.cancel()
        for stream in list(self._streams.values()):
            await stream.close()
        await self._runtime.close()

    # ------------------------------------------------------------ Ray's

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Serve the models of these settings in place of those of the last; no request is lost."""
        found = EngineSettings(**settings)
        if found != self._settings:
            await self._runtime.take_settings(found)
            self._settings = found

    async def check_health(self) -> None:
        """Raises MachineSetupError: this process cannot help itself any more."""
        health = self._runtime.health()
        is_ended = health.state in {"failed", "closed"}
        if is_ended or (health.state == "failing" and health.for_s > SICK_S):
            raise MachineSetupError(f"no engine serves here: {health.state}, {health.reason}")

    async def record_routing_stats(self) -> dict[str, float]:
        """For calls that name no replica."""
        return {"load": float(len(self._runtime.with_client()))}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is decided by."""
        status = await self._runtime.status()
        is_taking = self._runtime.is_ready and not self._runtime.is_suspended
        return load_of(status.engine, is_taking=is_taking)

    # ------------------------------------------------------------ the doors'

    async def open(self, door: str, *, replica: str = "") -> AsyncGenerator[bytes, None]:  # noqa: ARG002 - the router's
        """The stream of a door: frames of events, until the door closes it."""
        stream = self._stream(door)
        try:
            async with aclosing(stream.frames()) as frames:
                async for frame in frames:
                    yield frame
        finally:
            await self._leave(door, stream)

    async def submit(self, door: str, body: bytes, *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """Go on with a request; its events come over the stream of that name, why it is refused as well."""
        self._stream(door).begin(_submit(body))
        return b""

    async def cancel(self, door: str, request_id: str, *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """End a request of that stream; one that is unknown is ignored."""
        if (stream := self._streams.get(door)) is not None:
            stream.cancel(request_id)
        return b""

    async def look(self, door: str = "", *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """How it is now: a `PeerLook`."""
        if (stream := self._streams.get(door)) is not None:
            stream.noticed()
        runtime = self._runtime
        overview = Overview(
            is_ready=runtime.is_ready and not self._is_leaving,
            is_suspended=runtime.is_suspended,
            health=runtime.health(),
            models=runtime.models,
            states=runtime.model_states(),
            prefixes=runtime.handover.held(),
        )
        return _encode(PeerLook(overview=overview, status=await runtime.status()))

    async def ask(self, question: bytes, *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """The answer of a model's vocabulary."""
        return await _answered(self._ask, _question(question))

    async def steer(self, request_id: str, action: str, *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """Pause or resume a request."""
        return await _answered(self._steer, request_id, action)

    async def operate(self, action: str, body: dict[str, Any], *, replica: str = "") -> bytes:  # noqa: ARG002 - the router's
        """Load, unload or pin a model."""
        return await _answered(self._operate, action, body)

    # ------------------------------------------------------------ inside

    def _stream(self, door: str) -> DoorStream:
        if self._is_leaving:
            raise ServerLostError("the replica ends")
        if door not in self._streams:
            self._streams[door] = DoorStream(self._runtime, door)
        self._streams[door].noticed()
        return self._streams[door]

    async def _sweep(self) -> None:
        """End the streams of doors that are gone, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for name, stream in list(self._streams.items()):
                if stream.silent_s > SILENT_S:
                    await self._leave(name, stream)

    async def _leave(self, door: str, stream: DoorStream) -> None:
        self._streams.pop(door, None)
        await stream.close()

    async def _ask(self, question: TextQuestion) -> dict[str, Any]:
        match question:
            case Tokenize(text=text, model=model, add_special=add, parse_special=parse):
                tokens, pieces = await self._runtime.tokenize(
                    text, model=model, add_special=add, parse_special=parse
                )
                return {"tokens": tokens, "pieces": pieces}
            case Detokenize(tokens=tokens, model=model):
                return {"text": await self._runtime.detokenize(tokens, model=model)}
            case CountTokens(request=request):
                return {"num_tokens": await self._runtime.count_tokens(request)}

    async def _steer(self, request_id: str, action: str) -> dict[str, Any]:
        steer = {"pause": self._runtime.pause_request, "resume": self._runtime.resume_request}
        await steer[action](request_id)
        return {}

    async def _operate(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        model = self._served(str(body["model"]))
        match action:
            case "load":
                await self._runtime.load_model(model, reach=Reach.LOCAL)
            case "unload":
                await self._runtime.unload_model(model)
            case "pin":
                await self._runtime.pin_model(model, is_pinned=bool(body.get("pinned", True)))
            case _:
                raise InvalidRequestError(f"{action!r} is nothing that is done to a model", param="action")
        return {}

    def _served(self, model: str) -> str:
        for info in self._runtime.models:
            if info.id == model:
                return model
        raise ModelNotFoundError(f"the replica does not serve {model!r}", param="model")


async def _answered(work: Callable[..., Awaitable[dict[str, Any]]], *given: Any) -> bytes:
    """The answer of a call, or its error, as `ReplicaAnswer`."""
    try:
        return _encode(ReplicaAnswer(await work(*given)))
    except StokerError as error:
        return _encode(ReplicaAnswer(error=error.info()))
