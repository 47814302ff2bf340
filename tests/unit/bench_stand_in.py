"""A server for the benchmark's tests: an event loop's own, with no model behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.client import Client


@dataclass
class StandIn:
    """Answers `/v1/completions` token by token, cut into small pieces at odd places."""

    num_missing: int = 0
    status: int = 200
    tail: str = "whole"
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request on one connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            writer.write(b"HTTP/1.1 %d Whatever\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status)
            for index, piece in enumerate(self._pieces(head, body)):
                await self.timer(body, index)
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            if self.tail != "cut":
                writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()

    async def timer(self, body: bytes, index: int) -> None:
        """Called before each piece; one that holds its answers back waits here."""

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        if head.startswith(b"GET"):
            return [b'{"data": [{"id": "m"}]}']
        if self.status != 200:
            return [b'{"error": {"message": "no such thing"}}']
        self.bodies.append(json.loads(body))
        text = b": a comment\n\n" + b"".join(map(self._frame, self._documents())) + b"data: [DONE]\n\n"
        return [text[at : at + 37] for at in range(0, len(text), 37)]

    @staticmethod
    def _frame(document: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(document).encode() + b"\n\n"

    def _documents(self) -> list[dict[str, Any]]:
        count = self.bodies[-1]["max_tokens"] - self.num_missing
        tokens = [{"choices": [{"text": f" t{index}", "finish_reason": None}]} for index in range(count)]
        if self.tail == "error":
            return [*tokens, {"error": {"message": "out of cells"}}]
        usage = {
            "prompt_tokens": 7,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        return [
            *tokens,
            {"choices": [{"text": "", "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]


@dataclass
class Remembering(StandIn):
    """Counts a word as a token, and a prompt's longest known beginning as cached; tells it as Stoker does."""

    remembers: bool = True
    is_stoker: bool = True
    num_computed: int = 1000
    known: list[list[str]] = field(default_factory=list)

    def _pieces(self, head: bytes, body: bytes) -> list[bytes]:
        if head.startswith(b"GET /v1/runtime"):
            counters = {"prompt_tokens_computed_total": self.num_computed}
            return [json.dumps({"counters": counters} if self.is_stoker else {}).encode()]
        return super()._pieces(head, body)

    def _documents(self) -> list[dict[str, Any]]:
        words = self.bodies[-1]["prompt"].split()
        cached = max((num_common(words, known) for known in self.known), default=0)
        if self.remembers:
            self.known.append(words)
        self.num_computed += len(words) - cached
        *others, last = super()._documents()
        usage = last["usage"] | {
            "prompt_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return [*others, {"choices": [], "usage": usage, "timings": {"prompt_n": len(words) - cached}}]


def num_common(one: list[str], other: list[str]) -> int:
    """How many words both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@asynccontextmanager
async def serving(stand_in: StandIn) -> AsyncIterator[str]:
    """The address of a running stand-in."""
    server = await asyncio.start_server(stand_in.answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class StandInProcess:
    """What the benchmark started, as far as a target needs it; notes what is done to it."""

    def __init__(self, url: str, pid: int = 0) -> None:
        self.pid = pid
        self.client = Client(url)
        self.deeds: list[str] = []

    async def restart(self) -> None:
        """Another client, as a server started anew has another address."""
        self.deeds.append("restart")
        self.client = Client(self.client.url)

    async def kill(self) -> None:
        """Nothing ends."""
        self.deeds.append("kill")

    async def start(self) -> None:
        """Another client."""
        self.deeds.append("start")
        self.client = Client(self.client.url)
