"""One HTTP request's work in the runtime: one stream a prompt, merged, counted and watched.

Owns the runtime ids, the merging and the metrics. What an event looks like on the wire is the route's.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from stoker.values import Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from stoker.request import GenerateRequest
    from stoker.server.context import ServerContext
    from stoker.streams import StreamEvent

    Arrival = tuple[int, StreamEvent | Exception | None]

_MERGE_DEPTH = 64  # events waiting for a slow client; then the prompts' streams wait too


class Generation:
    """The prompts of one HTTP request, run side by side.

    Attributes:
        id: the answer's `id`.
        runtime_ids: the runtime's request ids, one a prompt.
    """

    def __init__(
        self, context: ServerContext, prefix: str, request_id: str, requests: Sequence[GenerateRequest]
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._context = context
        self._request_id = request_id
        self._requests = requests
        several = len(requests) > 1
        self.runtime_ids = [f"{self.id}-{i}" if several else self.id for i in range(len(requests))]

    def __repr__(self) -> str:
        return f"Generation({self.id}, {len(self._requests)} prompts)"

    async def events(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """(index of the prompt, event) as they come; closing it cancels every prompt.

        Raises:
            StokerError: of the first prompt that failed; the others are cancelled.
        """
        with self._context.live.entered([self._request_id, self.id], self.runtime_ids):
            merged = self._one(0) if len(self._requests) == 1 else self._merged()
            async with aclosing(merged) as events:
                async for event in events:
                    yield event

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        stream = self._context.runtime.stream(self._requests[index], request_id=self.runtime_ids[index])
        with self._context.metrics.request() as meter:
            async with aclosing(stream) as events:
                async for event in events:
                    meter.note(event)
                    yield index, event

    async def _merged(self) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        arrived: asyncio.Queue[Arrival] = asyncio.Queue(_MERGE_DEPTH)
        tasks = [asyncio.ensure_future(self._forward(i, arrived)) for i in range(len(self._requests))]
        num_open = len(tasks)
        try:
            while num_open:
                index, event = await arrived.get()
                if event is None:
                    num_open -= 1
                elif isinstance(event, Exception):
                    raise event
                else:
                    yield index, event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, index: int, arrived: asyncio.Queue[Arrival]) -> None:
        """Pass one prompt's events on, then None or what ended it."""
        try:
            async with aclosing(self._one(index)) as events:
                async for event in events:
                    await arrived.put(event)
        except Exception as error:  # noqa: BLE001 - raised again where the streams meet
            await arrived.put((index, error))
        else:
            await arrived.put((index, None))


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
