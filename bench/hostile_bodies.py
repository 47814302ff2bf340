"""Bodies that are made to hold a server up: `python -m bench.hostile_bodies [--mib 32] [--only NAME]`.

For each shape: how long its answer took, the longest that /health took meanwhile, and by how many times the
body's size the server's memory grew at most. The server runs the deterministic fake backend, so that what is
measured is the front; with `--url` and `--pid` a running one is measured.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

MIB = 2**20
MAX_ANSWER_S = 1.0
MAX_HEALTH_S = 0.1
MAX_FACTOR = 4.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# (route, what stands before what is repeated, what is repeated, what stands behind)
SHAPES: dict[str, tuple[str, bytes, bytes, bytes]] = {
    "prompt of nulls": (TEXT, b'{"prompt":[', b"null,", b"null]}"),
    "prompt of objects": (TEXT, b'{"prompt":[', b"{},", b"{}]}"),
    "prompt of short texts": (TEXT, b'{"prompt":[', b'"a",', b'"a"]}'),
    "prompt of lists": (TEXT, b'{"prompt":[', b"[1],", b"[1]]}"),
    "prompt of token ids": (TEXT, b'{"prompt":[', b"49151,", b"1]}"),
    "prompt of floats": (TEXT, b'{"prompt":[', b"0.12345678901,", b"1]}"),
    "prompt of true": (TEXT, b'{"prompt":[', b"true,", b"1]}"),
    "one prompt": (TEXT, b'{"prompt":"', b"a", b'"}'),
    "one prompt with an emoji": (TEXT, b'{"prompt":"\xf0\x9f\x98\x80', b"a", b'"}'),
    "one prompt ending in an emoji": (TEXT, b'{"prompt":"', b"a", b'\xf0\x9f\x98\x80"}'),
    "one Chinese prompt": (TEXT, b'{"prompt":"', "中".encode(), b'"}'),
    "escaped letters": (TEXT, b'{"prompt":"', rb"\u00e9", b'"}'),
    "escaped emoji": (TEXT, b'{"prompt":"', rb"\ud83d\ude00", b'"}'),
    "escaped lines": (TEXT, b'{"prompt":"', rb"\n", b'"}'),
    "backslashes": (TEXT, b'{"prompt":"', rb"\\", b'"}'),
    "not UTF-8": (TEXT, b'{"prompt":"\xff', b"a", b'"}'),
    "zero bytes": (TEXT, b'{"prompt":"', b"\0", b'"}'),
    "white space": (TEXT, b'{"prompt":', b" ", b'"a"}'),
    "one number": (TEXT, b'{"prompt":', b"1", b"}"),
    "one fraction": (TEXT, b'{"temperature":1.', b"1", b',"prompt":"a"}'),
    "quotes": (TEXT, b"{", b'"', b"}"),
    "closing brackets": (TEXT, b"{", b"]", b"}"),
    "commas": (TEXT, b"{", b",", b"}"),
    "the same key": (TEXT, b"{", b'"prompt":"x",', b'"prompt":"x"}'),
    "one key": (TEXT, b'{"prompt":"a","', b"k", b'":1}'),
    "one key of logit_bias": (TEXT, b'{"prompt":"a","logit_bias":{"', b"k", b'":"x"}}'),
    "unknown values": (TEXT, b'{"prompt":"a","more":[', b"0,", b"0]}"),
    "unknown objects": (TEXT, b'{"prompt":"a","more":[', b'{"a":1},', b"0]}"),
    "deep": (TEXT, b'{"prompt":', b"[", b"]}"),
    "deep objects": (TEXT, b'{"prompt":', b'{"a":', b"1}"),
    "stop of nulls": (TEXT, b'{"prompt":"a","stop":[', b"null,", b"null]}"),
    "logit_bias": (TEXT, b'{"prompt":"a","logit_bias":{', b'"1":null,', b'"1":null}}'),
    "a text as options": (TEXT, b'{"prompt":"a","stream_options":"', b"a", b'"}'),
    "a text as a number": (TEXT, b'{"prompt":"a","n":"', b"1", b'"}'),
    "a text as the model": (TEXT, b'{"prompt":"a","model":"', b"m", b'"}'),
    "a text as the class": (TEXT, b'{"prompt":"a","service_tier":"', b"m", b'"}'),
    "a text as the body": (TEXT, b'"', b"a", b'"'),
    "a list as the body": (TEXT, b"[", b"1,", b"1]"),
    "choices of nulls": ("/v1/choose", b'{"prompt":"a","choices":[', b"null,", b"null]}"),
    "documents of nulls": ("/v1/rerank", b'{"query":"a","documents":[', b"null,", b"null]}"),
    "input of nulls": ("/v1/embeddings", b'{"input":[', b"null,", b"null]}"),
    "state of nulls": ("/v1/states", b'{"prompt":[', b"null,", b"null]}"),
    "states of nulls": ("/v1/states/embeddings", b'{"input":[', b"null,", b"null]}"),
    "tokens of nulls": ("/detokenize", b'{"tokens":[', b"null,", b"null]}"),
    "content to tokenize": ("/tokenize", b'{"content":[', b"null,", b"null]}"),
    "turns of nulls": ("/apply-template", b'{"messages":[', b"null,", b"null]}"),
    "a model's name": ("/v1/runtime/models/load", b'{"model":"', b"m", b'"}'),
    "a model as a list": ("/v1/runtime/models/unload", b'{"model":[', b"null,", b"null]}"),
    "chat of nulls": (CHAT, b'{"messages":[', b"null,", b"null]}"),
    "chat of turns": (
        CHAT,
        b'{"messages":[',
        b'{"role":"user","content":""},',
        b'{"role":"user","content":"x"}]}',
    ),
    "parts of nulls": (CHAT, b'{"messages":[{"role":"user","content":[', b"null,", b"null]}]}"),
    "parts": (
        CHAT,
        b'{"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"},',
        b'{"type":"text","text":"b"}]}]}',
    ),
    "tools": (CHAT, b'{"messages":[{"role":"user","content":"x"}],"tools":[', b'{"a":1},', b"null]}"),
    "a text as tools": (CHAT, b'{"messages":[{"role":"user","content":"x"}],"tools":"', b"a", b'"}'),
    "a role": (CHAT, b'{"messages":[{"role":"', b"a", b'","content":"x"}]}'),
    "items of nulls": ("/v1/responses", b'{"input":[', b"null,", b"null]}"),
    "items": ("/v1/responses", b'{"input":[', b'{"role":"user","content":"a"},', b"{}]}"),
    "message of nulls": ("/v1/messages", b'{"max_tokens":1,"messages":[', b"null,", b"null]}"),
    "blocks": (
        "/v1/messages",
        b'{"max_tokens":1,"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"},',
        b"{}]}]}",
    ),
}


def bodies(num_bytes: int) -> Iterator[tuple[str, str, bytes]]:
    """(name, route, body) of each shape, at most `num_bytes` long, and of pictures that are to be served."""
    for name, (route, begin, unit, end) in SHAPES.items():
        yield name, route, begin + unit * ((num_bytes - len(begin) - len(end)) // len(unit)) + end
    data = base64.b64encode(os.urandom(num_bytes // 4 * 3 // 8 // 3 * 3 - 300))
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + data + b'"}}'
    for name, found in (("eight pictures", part), ("eight pictures of PHP", part.replace(b"/", rb"\/"))):
        parts = b",".join([found] * (num_bytes // len(found)))
        yield name, CHAT, b'{"messages":[{"role":"user","content":[' + parts + b"]}]}"


class Probe:
    """Asks for /health without a pause, in a process of its own; tells how long the slowest answer took."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_probe, args=(url, theirs), daemon=True)
        self._process.start()

    def slowest_s(self) -> float:
        """Since it was asked last."""
        self._ours.send("slowest")
        found: float = self._ours.recv()
        return found

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.join()


def _probe(url: str, asked: Connection) -> None:
    slowest_s = 0.0
    with httpx.Client(base_url=url, timeout=60) as http:
        while True:
            began_s = time.perf_counter()
            http.get("/health").raise_for_status()
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
            if asked.poll(0.002):
                asked.recv()
                asked.send(slowest_s)
                slowest_s = 0.0


class Memory:
    """The resident memory of a process, in bytes, and its highest since `reset`."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def now(self) -> int:
        """Resident now."""
        return self._field("VmRSS")

    def highest(self) -> int:
        """The peak since `reset`."""
        return self._field("VmHWM")

    def reset(self) -> None:
        """Begin anew."""
        (self._folder / "clear_refs").write_text("5", encoding="ascii")

    def _field(self, name: str) -> int:
        for line in (self._folder / "status").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise KeyError(name)


@contextlib.contextmanager
def started() -> Iterator[tuple[str, int]]:
    """(url, pid) of a server with the fake backend in its own process."""
    command = [sys.executable, "-m", "stoker.cli", "serve", "--port", "0", "--model", "fake:eog_period=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            yield f"http://{ready['host']}:{ready['port']}", ready["pid"]
        finally:
            server.terminate()


def measure(url: str, pid: int, num_bytes: int, only: str) -> bool:
    """Print a line for each shape; whether all kept within the bounds."""
    memory, probe, is_good = Memory(pid), Probe(url), True
    print(f"{'shape':32}{'MiB':>6}{'status':>8}{'answer s':>10}{'health ms':>11}{'memory x':>10}")
    try:
        for name, route, body in bodies(num_bytes):
            if only not in name:
                continue
            with httpx.Client(base_url=url, timeout=120) as http:
                http.get("/health")
                probe.slowest_s()
                memory.reset()
                before, began_s = memory.now(), time.perf_counter()
                answer = http.post(route, content=body)
                answer_s = time.perf_counter() - began_s
            health_s, factor = probe.slowest_s(), (memory.highest() - before) / len(body)
            bad = answer_s > MAX_ANSWER_S or health_s > MAX_HEALTH_S or factor > MAX_FACTOR
            is_good &= not bad and len(answer.content) < MIB
            line = f"{name:32}{len(body) / MIB:6.1f}{answer.status_code:8}{answer_s:10.2f}"
            print(
                f"{line}{health_s * 1000:11.1f}{factor:10.2f}{'  over' if bad else ''}  {answer.text[:90]}",
                flush=True,
            )
    finally:
        probe.close()
    return is_good


def main() -> int:
    """Exit code 1: something held the server up."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_bodies", description=__doc__)
    parser.add_argument("--mib", type=float, default=32, help="size of a body (default 32)")
    parser.add_argument("--only", default="", help="shapes with this in their name")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--pid", type=int, help="its process")
    given = parser.parse_args()
    running = contextlib.nullcontext((given.url, given.pid)) if given.url else started()
    with running as (url, pid):
        return 0 if measure(url, pid, int(given.mib * MIB), given.only) else 1


if __name__ == "__main__":
    sys.exit(main())
