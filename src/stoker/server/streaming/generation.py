"""One HTTP request's work in the runtime: one stream a prompt, merged, counted and watched.

Owns the runtime ids, the merging and the metrics. What an event looks like on the wire is the route's.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import OperatorOnlyError
from stoker.ipc.usage import Usage
from stoker.server.context import OwnedRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.requests import Request

    from stoker.client.requests.stream import StreamEvent
    from stoker.ipc.request import GenerateRequest
    from stoker.server.context import ServerContext

    Numbered = AsyncGenerator[tuple[int, StreamEvent], None]  # with the index of the prompt
    Arrival = tuple[int, StreamEvent] | Exception | None

_MERGE_DEPTH = 64  # events waiting for a slow client; then the prompts' streams wait too


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        request_id: of the HTTP request.
        key_digest: of its API key; empty: none is asked for.
        refusal: as in `Identity`.
    """

    request_id: str
    key_digest: str = ""
    refusal: str = ""

    @classmethod
    def of(cls, request: Request) -> Caller:
        """As the gate found them."""
        identity = request.state.identity
        return cls(request.state.request_id, identity.key_digest, identity.refusal)

    @property
    def is_operator(self) -> bool:
        """Whether the caller may operate the server."""
        return not self.refusal

    def require_operator(self) -> None:
        """Raises OperatorOnlyError where the caller may not operate the server."""
        if self.refusal:
            raise OperatorOnlyError(self.refusal)

    def may_steer(self, owner: str) -> bool:
        """Whether requests of that owner may be ended, paused, resumed and attached to by their ids."""
        return self.is_operator or owner == self.key_digest

    def may_see(self, owner: str) -> bool:
        """Whether ids and stories of that owner's requests are shown: without a key only to an operator."""
        return self.is_operator or (owner != "" and owner == self.key_digest)


class GenerationCall:
    """The prompts of one HTTP request, run side by side.

    Attributes:
        id: the answer's `id`.
        runtime_ids: the runtime's request ids, one a prompt.
    """

    def __init__(
        self, context: ServerContext, prefix: str, caller: Caller, requests: Sequence[GenerateRequest]
    ) -> None:
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self._context = context
        self._names = (caller.request_id, self.id)
        self._owner = caller.key_digest
        self._requests = requests
        several = len(requests) > 1
        self.runtime_ids = [f"{self.id}-{i}" if several else self.id for i in range(len(requests))]

    def __repr__(self) -> str:
        return f"Generation({self.id}, {len(self._requests)} prompts)"

    async def events(self) -> Numbered:
        """(index of the prompt, event) as they come; closing it cancels every prompt.

        Raises:
            StokerError: of the first prompt that failed; the others are cancelled.
        """
        with self._context.live.entered(self._live()):
            streams = [self._one(index) for index in range(len(self._requests))]
            async with aclosing(merged(streams)) as events:
                async for event in events:
                    yield event

    @property
    def is_ready(self) -> bool:
        """Whether every model it needs is in memory."""
        runtime = self._context.runtime
        needed = {runtime.resolve(request.model).id for request in self._requests}
        ready = {status.id for status in runtime.model_states() if status.state == "ready"}
        return needed <= ready

    def _live(self) -> list[OwnedRequest]:
        return [
            OwnedRequest(own, self._names, request.model, request.is_chat, self._owner)
            for own, request in zip(self.runtime_ids, self._requests, strict=True)
        ]

    async def _one(self, index: int) -> Numbered:
        stream = self._context.runtime.stream(
            self._requests[index],
            request_id=self.runtime_ids[index],
            names=self._names,
            owner=self._owner,
        )
        with self._context.metrics.request() as meter:
            async with aclosing(stream) as events:
                async for event in events:
                    meter.note(event)
                    yield index, event


def merged(streams: Sequence[Numbered]) -> Numbered:
    """The events of several prompts' streams as they come; closing it closes all of them.

    Iterating raises the StokerError of the first stream that failed; the others are closed.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[Numbered]) -> Numbered:
    arrived: asyncio.Queue[Arrival] = asyncio.Queue(_MERGE_DEPTH)
    tasks = [asyncio.ensure_future(_forward(stream, arrived)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            arrival = await arrived.get()
            if arrival is None:
                num_open -= 1
            elif isinstance(arrival, Exception):
                raise arrival
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: Numbered, arrived: asyncio.Queue[Arrival]) -> None:
    """Pass one stream's events on, then None or what ended it."""
    try:
        async with aclosing(stream) as events:
            async for event in events:
                await arrived.put(event)
    except Exception as error:  # noqa: BLE001 - raised again where the streams meet
        await arrived.put(error)
    else:
        await arrived.put(None)


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sum over the prompts of one HTTP request; the cache's source is that of the most cached tokens."""
    most = max(usages, key=lambda usage: usage.cached_tokens, default=Usage())
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        cache_source=most.cache_source,
        dropped_tokens=sum(usage.dropped_tokens for usage in usages),
    )
