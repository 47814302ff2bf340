"""Three servers behind a gate, all processes of their own: one is killed under mixed streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

FAKE = "fake:eog_period=0,step_delay_s=0.01"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 30}}, "required": ["a"]}


@contextlib.contextmanager
def program(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A `stoker` that serves: its URL when it is ready, and its process."""
    own = ["--port", "0", "--quiet", "--run-dir", str(folder / "run")]
    command = [sys.executable, "-m", "stoker.cli", *arguments, *own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield f"http://127.0.0.1:{ready['port']}", process
        finally:
            process.kill()


@dataclass
class Told:
    """What one client was given."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: list[tuple[int, str]] = field(default_factory=list)
    num_tokens: int = 0
    num_done: int = 0


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Chats and completions, people and jobs, greedy and drawn, one choice and two, free and to a schema."""
    body: dict[str, Any] = {
        "max_tokens": 80 + number % 7,
        "temperature": 0.9 * (number % 2),
        "seed": number,
        "n": 1 + (number % 9 == 0),
        "priority": "background" if number % 5 == 0 else "interactive",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if number % 11 == 3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    if number % 3 == 0:
        return "/v1/completions", {**body, "prompt": f"Story {number}"}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"Tell {number}"}]}


class Crowd:
    """Clients of one gate.

    Args:
        url: of the gate.
        num_streams: clients there are.
        trouble_at: chunks of all of them together, when most have begun.
    """

    def __init__(self, url: str, num_streams: int, trouble_at: int) -> None:
        self._url = url
        self._num_streams, self._trouble_at = num_streams, trouble_at
        self._num_chunks = 0
        self._news = asyncio.Condition()

    async def run(self, trouble: Any = None) -> list[Told]:
        """All of them at once; `trouble` is made when most have begun."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as http:
            asking = [asyncio.ensure_future(self._one(http, number)) for number in range(self._num_streams)]
            if trouble is not None:
                async with self._news:
                    await self._news.wait_for(lambda: self._num_chunks >= self._trouble_at)
                trouble()
            return await asyncio.gather(*asking)

    async def _one(self, http: httpx.AsyncClient, number: int) -> Told:
        path, body = body_of(number)
        told = Told()
        async with http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(told, json.loads(line.removeprefix("data: ")))
                    async with self._news:
                        self._num_chunks += 1
                        self._news.notify_all()
                told.num_done += line == "data: [DONE]"
        return told

    @staticmethod
    def _take(told: Told, document: dict[str, Any]) -> None:
        assert "error" not in document, document
        if document.get("usage"):
            told.num_tokens = document["usage"]["completion_tokens"]
        for choice in document["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            told.texts[choice["index"]] = told.texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                told.ends.append((choice["index"], choice["finish_reason"]))


def kill_machine(process: subprocess.Popen[str]) -> None:
    """The server itself."""
    process.kill()


def kill_engine(process: subprocess.Popen[str]) -> None:
    """Its engine: the server starts another."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if "stoker.engine" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)


async def moved_away(gate: str, machine: str) -> int:
    """Requests that a gate took away from a machine."""
    async with httpx.AsyncClient(timeout=60) as http:
        status = (await http.get(f"{gate}/v1/runtime")).raise_for_status().json()
    return sum(one["num_moved"] for one in status["machines"] if one["url"] == machine)


async def assert_outlived(
    folder: Path, settings: list[str], kill: Any, *, num_streams: int, trouble_at: int
) -> None:
    """A crowd that has one of three machines killed is told what an undisturbed one is."""
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(
                program(folder / name, "serve", *settings, "--cache-dir", str(folder / name / "cache"))
            )
            for name in "abc"
        ]
        peers = [part for url, _ in machines for part in ("--peer", url)]
        gate, _ = stack.enter_context(program(folder / "gate", "gate", *peers))
        calm = await Crowd(gate, num_streams, trouble_at).run()
        told = await Crowd(gate, num_streams, trouble_at).run(lambda: kill(machines[1][1]))
        num_moved = await moved_away(gate, machines[1][0])
    assert num_moved > 0 or kill is kill_engine
    for before, after in zip(calm, told, strict=True):
        assert after.texts == before.texts
        assert sorted(after.ends) == sorted(before.ends)
        assert after.num_tokens == before.num_tokens
        assert after.num_done == 1


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_machine, kill_engine])
async def test_fifty_streams_outlive_a_machine(tmp_path: Path, kill: Any) -> None:
    """P7: all end once, with the text and the number of tokens of an undisturbed run."""
    await assert_outlived(tmp_path, ["--model", FAKE], kill, num_streams=50, trouble_at=400)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_machine, kill_engine])
async def test_streams_of_a_real_model_outlive_a_machine(tmp_path: Path, kill: Any) -> None:
    """P7: where answers are repeatable, the text that goes on elsewhere is the same to the letter."""
    settings = ["--repeatable", "on", "--threads", "1", "--slots", "4"]
    await assert_outlived(tmp_path, settings, kill, num_streams=12, trouble_at=200)
