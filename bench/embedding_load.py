"""Embeddings over HTTP: many at once against one after the other, and what readers of a chat see of them.

Starts `stoker serve` of a chat model and an encoder. First 64 requests of one sentence each, one after the
other and all at once. Then eight answers at once, without and with sentences that arrive steadily. Figures
are ratios of neighbouring measurements, so that a machine that grows slower does not show.

    python -m bench.embedding_load --chat FILE --encoder FILE [--repeat N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import httpx

from bench.client import Completion
from bench.peers import ServerProcess, Shape, StokerServer
from bench.prompts import random_prompt
from bench.workloads.workload import percentile

if TYPE_CHECKING:
    from bench.client import Client

NUM_TEXTS = 64
NUM_STREAMS = 8
NUM_TOKENS = 96
PROMPT_WORDS = 24
SENTENCE_WORDS = 8
ARRIVE_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ChatAndEncoder:
    """`stoker serve` of both files."""

    chat: Path
    encoder: Path
    cache_dir: Path
    label: ClassVar[str] = StokerServer.label

    def command(self, shape: Shape, port: int) -> list[str]:
        """As for one model, with both, which stay."""
        models = (word for file in (self.chat, self.encoder) for word in ("--model", str(file)))
        own = StokerServer(cache_dir=self.cache_dir).command(shape, port)
        return [*own, *models, "--keep-alive", "-1"]

    async def address(self, output: str, port: int) -> str | None:
        """From the readiness line."""
        return await StokerServer().address(output, port)


class Load:
    """What is sent to one server."""

    def __init__(self, client: Client, http: httpx.AsyncClient, names: tuple[str, str]) -> None:
        self._client = client
        self._http = http
        self._chat, self._encoder = names
        self._num_sent = 0

    def __repr__(self) -> str:
        return f"<Load {self._num_sent} requests sent>"

    async def embed(self) -> None:
        """One sentence that was not sent before."""
        self._num_sent += 1
        text = random_prompt(SENTENCE_WORDS, f"sentence {self._num_sent}")
        body = {"model": self._encoder, "input": text, "encoding_format": "base64"}
        (await self._http.post("/v1/embeddings", json=body)).raise_for_status()

    async def speedup(self) -> float:
        """How many times as fast all at once are as one after the other."""
        begun_s = time.perf_counter()
        for _ in range(NUM_TEXTS):
            await self.embed()
        middle_s = time.perf_counter()
        await asyncio.gather(*(self.embed() for _ in range(NUM_TEXTS)))
        return (middle_s - begun_s) / (time.perf_counter() - middle_s)

    async def gap_p95_s(self) -> float:
        """The 95th percentile of seconds between two tokens of eight answers that run at once."""
        self._num_sent += NUM_STREAMS
        prompts = [random_prompt(PROMPT_WORDS, f"chat {self._num_sent} {at}") for at in range(NUM_STREAMS)]
        asked = [Completion(prompt=each, max_tokens=NUM_TOKENS, model=self._chat) for each in prompts]
        streams = await asyncio.gather(*map(self._client.complete, asked))
        return percentile([gap for stream in streams for gap in stream.gaps_s], 95)

    async def rise(self) -> float:
        """What steadily arriving sentences do to that percentile, as a ratio."""
        quiet_s = await self.gap_p95_s()
        arriving = asyncio.create_task(self._arrive())
        try:
            return await self.gap_p95_s() / quiet_s
        finally:
            arriving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await arriving

    async def _arrive(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.embed())
                await asyncio.sleep(ARRIVE_EVERY_S)


async def measure(chat: Path, encoder: Path, repeat: int) -> tuple[list[float], list[float]]:
    """The speedups, to be at least 3, and the rises, to be at most 1.25."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        server = ChatAndEncoder(chat, encoder, Path(folder) / "cache")
        async with ServerProcess(server, Shape(NUM_STREAMS, 16384, None), Path(folder)) as process:
            limits = httpx.Limits(max_connections=NUM_TEXTS)
            async with httpx.AsyncClient(base_url=process.client.url, limits=limits, timeout=300) as http:
                load = Load(process.client, http, (chat.stem, encoder.stem))
                await load.gap_p95_s()
                await load.speedup()
                speedups = [await load.speedup() for _ in range(repeat)]
                return speedups, [await load.rise() for _ in range(repeat)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.embedding_load", description=__doc__)
    parser.add_argument("--chat", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    speedups, rises = asyncio.run(measure(options.chat, options.encoder, options.repeat))
    for name, values in (("64 at once, times as fast", speedups), ("p95 between tokens, rise", rises)):
        print(f"{name}: {median(values):.2f} ({', '.join(f'{each:.2f}' for each in values)})")


if __name__ == "__main__":
    main()
