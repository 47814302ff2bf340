"""A control group of 1.5 GiB: three models of which two fit, many clients, and one that could never fit."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import openai
import pytest
from control_group import MemoryGroup, memory_group
from real_server import MODEL, Answer, RealServer, copies, serving
from sparse_model import write_huge

LIMIT_BYTES = 3 * 2**29
NAMES = ("one", "two", "three")
SETTINGS = {"slots": 4, "ctx_size": 6144}
"""With these a model takes about 360 MiB, at the least 260; the default margin leaves room for about 770."""
NUM_CLIENTS = 12
NUM_TOKENS = 16
REFUSALS = {"insufficient_memory", "model_too_large", "queue_full"}


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A group of that size."""
    with memory_group(LIMIT_BYTES) as made:
        yield made


def not_in_memory(paths: Iterable[Path]) -> None:
    """Have the files out of the page cache, so that those who read them next are charged for them."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Clients:
    """Twelve who use the three models in turn.

    Attributes:
        ends: how each request ended, by model.
        halves: answers that were neither whole nor refused.
    """

    def __init__(self, server: RealServer, until_s: float) -> None:
        self._server = server
        self._until_s = until_s
        self.ends: Counter[tuple[str, str]] = Counter()
        self.halves: list[str] = []
        self.refusals: set[str] = set()

    async def run(self) -> None:
        """All of them at once."""
        await asyncio.gather(*map(self._client, range(NUM_CLIENTS)))

    async def _client(self, number: int) -> None:
        for turn in count():
            if time.monotonic() >= self._until_s:
                return
            model = NAMES[(number + turn) % len(NAMES)]
            answer = Answer(f"client-{number}-{turn}")
            prompt = f"Client {number} asks for the {turn}th time about rivers, which are"
            try:
                await self._server.stream(answer, prompt, NUM_TOKENS, model=model)
            except openai.APIError as error:
                self._refused(answer, model, error)
            else:
                self.ends[model, str(answer.finish)] += 1
                if len(answer.tokens) != NUM_TOKENS:
                    self.halves.append(f"{answer}")

    def _refused(self, answer: Answer, model: str, error: openai.APIError) -> None:
        """A refusal has a code and figures, and comes before any text."""
        self.ends[model, str(error.code)] += 1
        self.refusals.add(error.message)
        if answer.tokens or error.code not in REFUSALS:
            self.halves.append(f"{answer} {error.code} {error.message}")


async def use_in_turn(group: MemoryGroup, folder: Path, for_s: float) -> None:
    """Run the clients for so long, and look at what came of it."""
    paths = copies(folder, *NAMES)
    not_in_memory(paths)
    async with serving(*paths, group=group, **SETTINGS) as server:
        ready = [model["id"] for model in (await server.status())["models"] if model["state"] == "ready"]
        assert ready == ["one", "two"]
        clients = Clients(server, time.monotonic() + for_s)
        await clients.run()
        status = await server.status()
        assert not clients.halves
        assert all(any(letter.isdigit() for letter in text) for text in clients.refusals)
        assert all(clients.ends[name, "length"] for name in NAMES), clients.ends
        assert status["engine"]["restarts"] == 0
        assert sum(model["state"] == "ready" for model in status["models"]) <= 2
        swaps = [e for e in server.tape.of("model", state="ready") if e["model"] == "three"]
        assert swaps, "the third was never loaded"
        assert not any(each["dropped"] for each in server.tape.of("snapshot"))
        most = group.most_bytes()
        print(f"\n{dict(clients.ends)}; most {(most or 0) / 2**20:.0f} MiB of the group")  # noqa: T201
    assert group.num_kills() == 0


@pytest.mark.slow
async def test_twelve_clients_use_three_models_where_two_fit(group: MemoryGroup, tmp_path: Path) -> None:
    """SPEC R3, M3, M4: nothing is killed, every answer is whole or refused with numbers, all three serve."""
    await use_in_turn(group, tmp_path, for_s=12)


@pytest.mark.slow
async def test_they_do_so_for_three_minutes(group: MemoryGroup, tmp_path: Path) -> None:
    """SPEC R3, M3, M4: as above."""
    await use_in_turn(group, tmp_path, for_s=180)


@pytest.mark.long
async def test_a_model_far_too_large_is_refused_at_once(group: MemoryGroup, tmp_path: Path) -> None:
    """SPEC R1, R2: by its header; what it needs, what there is; the model that serves is not touched."""
    huge = write_huge(tmp_path / "huge.gguf")
    async with serving(MODEL, huge, group=group, **SETTINGS) as server:
        begun_s = time.monotonic()
        with pytest.raises(
            openai.APIError, match=r"needs \d{3} GiB at the least; of the .* that may be used here"
        ) as refused:
            await server.stream(Answer("huge"), "x", 1, model="huge")
        request_s = time.monotonic() - begun_s
        assert refused.value.code == "model_too_large"
        begun_s = time.monotonic()
        answer = await server.load("huge")
        load_s = time.monotonic() - begun_s
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "model_too_large")
        print(f"\nrefused after {request_s:.2f} s and {load_s:.2f} s")  # noqa: T201
        others = [event for event in server.tape.of("model") if event["model"] != "huge"]
        assert all(event["what"] == "changed" for event in others), "how long it stays may change"
        assert all(event["state"] == "ready" for event in others)
        assert (await server.stream(Answer("x"), "Water boils at", 2)).finish == "length"
    assert group.num_kills() == 0
