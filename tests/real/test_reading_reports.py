"""The report reader, where somebody has it, through a runtime with its own engine process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import jsonschema
import pytest

from real_models import PROJECTOR, READER, REPORTS, needs_reader
from stoker import GenerateRequest, Image, Runtime, Sampling
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta, Finished
from stoker.ipc.request import IMAGE_MARKER
from stoker.ipc.status import EngineStatus

NUM_QUICK = 4
"""Of twenty reports; the others are slow tests."""
NUM_TOKENS = 400
"""Of a picture."""
WAIT_S = 60.0
PAUSE_S = 0.003
HEAD = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
TEXT = {"type": "string"}
ROW = {
    "type": "object",
    "properties": {"test": TEXT, "value": TEXT, "unit": TEXT},
    "required": ["test", "value", "unit"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": TEXT, "date": TEXT, "results": {"type": "array", "items": ROW}},
    "required": ["name", "date", "results"],
    "additionalProperties": False,
}

pytestmark = needs_reader


@asynccontextmanager
async def reading(**settings: Any) -> AsyncIterator[Runtime]:
    """A runtime with the reader; four slots of whole answers."""
    given = {"mmproj": PROJECTOR, "slots": 4, "ctx_size": 4096, "threads": 2, **settings}
    async with Runtime(str(READER), **given) as runtime:
        yield runtime


def answers() -> list[dict[str, Any]]:
    """What is on each report; `file` names it."""
    return [json.loads(line) for line in (REPORTS / "answers.jsonl").read_text().splitlines()]


async def counters(runtime: Runtime) -> dict[str, float]:
    """Of the engine of the moment."""
    return (await runtime.status()).engine.counters


def about(file: str, question: str, head: str = HEAD, **fields: Any) -> GenerateRequest:
    """A question about a report, as the reader's template has it."""
    picture, _ = Image(REPORTS / file).picture()
    prompt = f"{head}{IMAGE_MARKER}\n{question}{TAIL}"
    given = {"max_tokens": 240, "sampling": Sampling(temperature=0.0), "is_chat": True, **fields}
    return GenerateRequest(prompt=prompt, pictures=(picture,), **given)


@pytest.mark.parametrize("count", [NUM_QUICK, pytest.param(None, marks=pytest.mark.slow)])
async def test_reports_are_read_as_valid_json(count: int | None) -> None:
    """SPEC V4: every answer matches the schema; of twenty at most one letter is wrong, as in llama.cpp."""
    wanted = answers()[:count]
    async with reading() as runtime:
        paths = [REPORTS / each.pop("file") for each in wanted]
        found = await asyncio.gather(*(runtime.read(path, schema=SCHEMA) for path in paths))
        assert (await counters(runtime))["images_encoded_total"] == len(paths)
    for each in found:
        jsonschema.validate(each.value, SCHEMA)
    assert [each.images[0].shrunk_to for each in found] == [None] * len(found)
    assert sum(each.value != right for each, right in zip(found, wanted, strict=True)) <= 1


async def test_a_picture_is_encoded_once_for_all_questions_and_conversations() -> None:
    """SPEC C11: a second question finds its tokens, another conversation its embeddings, a restart both."""
    first, second = about("02.png", "Whose report is this?"), about("02.png", "What is its date?")
    elsewhere = about("02.png", "What is its date?", HEAD.replace("helpful", "terse"))

    async def ask(runtime: Runtime, request: GenerateRequest) -> tuple[str, int]:
        deltas = [delta async for delta in runtime.generate(request)]
        return "".join(delta.text for delta in deltas), deltas[-1].usage.cached_tokens

    async with reading() as runtime:
        assert await ask(runtime, first) == ("Tahu Feti", 0)
        text, num_cached = await ask(runtime, second)
        assert (text, num_cached >= NUM_TOKENS) == ("2026-05-25", True)
        assert await ask(runtime, elsewhere) == ("2026-05-25", 0)
        found = await counters(runtime)
        assert (found["images_encoded_total"], found["images_reused_total"]) == (1, 1)
    async with reading() as runtime:
        text, num_cached = await ask(runtime, second)
        assert (text, num_cached >= NUM_TOKENS) == ("2026-05-25", True)
        elsewhere = about("02.png", "What is its date?", HEAD.replace("helpful", "brief"))
        assert await ask(runtime, elsewhere) == ("2026-05-25", 0)
        assert (await counters(runtime))["images_encoded_total"] == 0


async def test_on_a_small_machine_pictures_are_shrunk_and_that_is_told() -> None:
    """SPEC M2, V3: 192 pixels where 2 GiB may be used; the reader still reads it."""
    (wanted,) = [each for each in answers() if each["file"] == "02.png"]
    async with reading(memory_limit=2 * 2**30) as runtime:
        found = await runtime.read(REPORTS / wanted.pop("file"), schema=SCHEMA)
    (image,) = found.images
    assert (image.width, image.height, image.shrunk_to) == (320, 320, (192, 192))
    assert found.value == wanted


# ------------------------------------------------------------ an engine that is killed

CONSTRAINT = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
READ = "Read this report as JSON."
Given = dict[int, tuple[list[int], str, str]]


def crowd() -> dict[str, GenerateRequest]:
    """Readers of every kind, and one who talks."""
    drawn = Sampling(temperature=0.8, seed=11)
    return {
        "greedy": about("00.png", READ),
        "schema": about("03.png", READ, constraint=CONSTRAINT),
        "two choices": about("04.png", READ, n=2, sampling=drawn),
        "text": GenerateRequest(
            prompt=f"{HEAD}Tell me a story.{TAIL}",
            max_tokens=240,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0),
        ),
    }


class Listener:
    """One request that reads itself."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.num_ends = 0

    async def read(self, runtime: Runtime, request: GenerateRequest) -> None:
        """To its end."""
        async with aclosing(runtime.stream(request)) as events:
            async for event in events:
                self.num_ends += isinstance(event, Finished)
                if isinstance(event, Delta):
                    self.tokens.setdefault(event.index, []).extend(event.token_ids)
                    self.text[event.index] = self.text.get(event.index, "") + event.text
                    if event.finish_reason:
                        self.reasons[event.index] = event.finish_reason

    @property
    def given(self) -> tuple[object, ...]:
        """All that was given."""
        return self.tokens, self.text, self.reasons, self.num_ends


def is_encoding(engine: EngineStatus) -> bool:
    """The first picture is not encoded yet."""
    return engine.counters.get("images_encoded_total") == 0 and engine.counters["num_prefill"] > 0


def is_in_prefill(engine: EngineStatus) -> bool:
    """A part of a picture is in its cells."""
    return any(slot.state == "prefill" and 40 < slot.num_tokens < NUM_TOKENS for slot in engine.slots)


def is_answering(engine: EngineStatus) -> bool:
    """An answer about a picture is under way."""
    return any(slot.state == "decode" and slot.num_tokens > NUM_TOKENS + 60 for slot in engine.slots)


MOMENTS = {"encode": is_encoding, "prefill": is_in_prefill, "answer": is_answering}


async def reach(runtime: Runtime, holds: Callable[[EngineStatus], bool]) -> int:
    """Wait until the engine is there; its process."""
    async with asyncio.timeout(WAIT_S):
        while not holds((status := await runtime.status()).engine):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(PAUSE_S)
    return status.pid


async def given(moments: list[str]) -> dict[str, tuple[object, ...]]:
    """What everybody gets where the engine is killed at these moments, one after the other."""
    listeners = {name: Listener() for name in crowd()}
    async with reading(n_batch=64, cache_mode="off") as runtime, asyncio.TaskGroup() as group:
        for name, request in crowd().items():
            group.create_task(listeners[name].read(runtime, request))
        for number, moment in enumerate(moments):
            os.kill(await reach(runtime, MOMENTS[moment]), signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                while (await runtime.status()).restarts <= number:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(PAUSE_S)
    return {name: listener.given for name, listener in listeners.items()}


@pytest.mark.slow
async def test_an_engine_killed_while_it_reads_costs_no_answer() -> None:
    """SPEC L3, L6: in an encode, in a picture's prefill and in the answers; token by token the same."""
    undisturbed = await given([])
    assert all(num_ends == 1 for *_, num_ends in undisturbed.values())
    assert await given(["encode", "prefill", "answer"]) == undisturbed
