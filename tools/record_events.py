"""Record two minutes of a busy server, for the page's tests and pictures: `record_events.py FILE.jsonl.gz`.

Starts `stoker serve` with the fake backend and drives it through everything that the page shows: classes that
give way to each other, prompts with a common beginning, a pause, a cancel, an engine that is killed, a model
that is loaded and one that is unloaded, memory that gets short, heat.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

LENGTH_S = 125.0
MAX_BYTES = 150_000
FAKE = "eog_period=0,draws=1,token_delay_s=0.0006"
MODELS = (
    f"fake:id=assistant,step_delay_s=0.030,weights_mib=96,cell_kib=1,{FAKE}",
    f"fake:id=coder,step_delay_s=0.022,weights_mib=40,cell_kib=1,{FAKE}",
    "fake:id=spare,load_s=4,weights_mib=24",
)
HEAT = "0,61\n40,74\n55,89\n70,93\n85,84\n100,71\n"
GUIDE = "You answer briefly, in the style of the house, and name your sources. " * 30
PAPER = "The minutes of the last meeting, which everybody has to read before the next one. " * 40


class Crowd:
    """Callers of one server; each call is a task that ends with it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._tasks: set[asyncio.Task[None]] = set()
        self._chance = random.Random(7)  # noqa: S311 - it only looks like chance

    def ask(self, model: str, text: str, *, job: bool = False, tokens: int = 80, **fields: Any) -> None:
        """One chat, in a task of its own."""
        body = {
            "model": model,
            "messages": [{"role": "system", "content": GUIDE}, {"role": "user", "content": text}],
            "max_tokens": tokens,
            "priority": "background" if job else "interactive",
            "stream": True,
            **fields,
        }
        self._start("/v1/chat/completions", body)

    def choose(self, texts: list[str]) -> None:
        """A call of several requests."""
        self._start("/v1/choose", {"model": "coder", "prompt": PAPER, "choices": texts})

    def _start(self, path: str, body: dict[str, Any]) -> None:
        task = asyncio.create_task(self._call(path, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def people(self, until_s: float) -> None:
        """Somebody asks something now and then."""
        now = asyncio.get_running_loop().time
        end = now() + until_s
        while now() < end:
            await asyncio.sleep(self._chance.uniform(2.0, 6.5))
            model = self._chance.choice(["assistant", "assistant", "coder"])
            question = "What was decided? " * self._chance.randrange(4, 60)
            self.ask(model, question, tokens=self._chance.randrange(30, 130))

    async def jobs(self, until_s: float) -> None:
        """Something is to be done in the background now and then."""
        for number in range(int(until_s / 6)):
            model = ["assistant", "coder"][number % 2]
            self.ask(
                model, f"{PAPER} Summarise part {number}.", job=True, tokens=self._chance.randrange(120, 420)
            )
            await asyncio.sleep(6)

    async def end(self) -> None:
        """Wait for all that run, or cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=8)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def live(http: httpx.AsyncClient, *states: str) -> str:
    """The id of a request that is in one of these states, as soon as there is one."""
    for _ in range(200):
        rows = (await http.get("/v1/runtime")).json()["requests"]
        if found := [row["request_id"] for row in rows if row["state"] in states]:
            return str(found[0])
        await asyncio.sleep(0.05)
    raise SystemExit(f"no request came to be in {states}")


async def play(http: httpx.AsyncClient, crowd: Crowd) -> None:
    """The two minutes."""
    people = asyncio.gather(crowd.people(LENGTH_S - 15), crowd.jobs(LENGTH_S - 30))
    for number in range(3):
        crowd.ask("assistant", f"{PAPER} Summarise part {number}.", job=True, tokens=420)
    for number in range(2):
        crowd.ask("coder", f"{PAPER} Describe part {number}.", job=True, tokens=300)
    await asyncio.sleep(14)
    crowd.ask("assistant", PAPER + "Why?", tokens=60)
    crowd.ask("assistant", PAPER + "Who?", tokens=60)  # the same beginning: one computes it, the other waits
    await asyncio.sleep(10)
    paused = await live(http, "decode")
    await http.post(f"/v1/runtime/requests/{paused}/pause")
    await asyncio.sleep(6)
    await http.post(f"/v1/runtime/requests/{paused}/resume")
    crowd.choose([f"candidate {number}" for number in range(8)])
    await asyncio.sleep(8)
    await http.post(f"/v1/runtime/requests/{await live(http, 'queued', 'parked', 'decode')}/cancel")
    await asyncio.sleep(10)
    os.kill((await http.get("/v1/runtime")).json()["engine"]["pid"], signal.SIGKILL)
    await asyncio.sleep(14)
    loading = asyncio.create_task(http.post("/v1/runtime/models/load", json={"model": "spare"}))
    for number in range(6):
        crowd.ask("coder", f"{PAPER} Check part {number}.", job=True, tokens=160, n=1 + number % 2)
    await asyncio.sleep(20)
    await loading
    await http.post("/v1/runtime/models/pin", json={"model": "assistant", "pinned": True})
    await http.post("/v1/runtime/models/unload", json={"model": "spare"})
    await people


async def read(http: httpx.AsyncClient, lines: list[str]) -> None:
    """The documents of the stream, as they come."""
    async with http.stream("GET", "/v1/runtime/events", timeout=None) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                lines.append(line.removeprefix("data:").strip())  # noqa: PERF401 - as it comes: it is cut at the end


async def record(folder: Path) -> list[str]:
    """Start a server, drive it, and what it told."""
    heat = folder / "heat.csv"
    heat.write_text(HEAT, encoding="utf-8")
    options = [
        "--port",
        "0",
        "--slots",
        "2",
        "--ctx-size",
        "16384",
        "--quiet",
        "--no-follow-sleep",
        "--drain-s",
        "0",
    ]
    options += [
        "--heat-trace",
        str(heat),
        "--cache-dir",
        str(folder / "cache"),
        "--run-dir",
        str(folder / "run"),
    ]
    options += [part for model in MODELS for part in ("--model", model)]
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stoker.cli", "serve", *options, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    ready = json.loads(await server.stdout.readline())
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ready['port']}", timeout=120) as http:
        reader = asyncio.create_task(read(http, lines))
        crowd = Crowd(http)
        try:
            await play(http, crowd)
            await crowd.end()
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            server.terminate()
            await server.wait()
    return lines


def main() -> None:
    """Record into the file that is named."""
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        lines = asyncio.run(record(Path(folder)))
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress("\n".join([*lines, ""]).encode(), mtime=0)
    if len(packed) > MAX_BYTES:
        raise SystemExit(f"{len(packed)} bytes: a recording may have {MAX_BYTES}")
    path.write_bytes(packed)
    print(f"{len(lines)} documents, {len(packed)} bytes")


if __name__ == "__main__":
    main()
