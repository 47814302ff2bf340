"""The report reader where 2 GiB may be used: pictures are shrunk, and rounds of all leave nothing behind."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from real_server import RealServer, serving

from real_models import PROJECTOR, READER, REPORTS, needs_reader

LIMIT_BYTES = 2 * 2**30
MAX_GROWTH_BYTES = 32 * 2**20
SETTINGS = {"mmproj": PROJECTOR, "memory_limit": LIMIT_BYTES, "slots": 4, "ctx_size": 8192}
NUM_REPORTS = 20
NUM_SETTLING = 3
"""Rounds after which the growth is counted."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "date": {"type": "string"}, "results": {"type": "array"}},
    "required": ["name", "date", "results"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}}

pytestmark = needs_reader


def about(number: int, question: str = "Read this report as JSON.", **fields: Any) -> dict[str, Any]:
    """A body that asks about a report."""
    data = base64.b64encode((REPORTS / f"{number % NUM_REPORTS:02}.png").read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    turn = {"role": "user", "content": [picture, {"type": "text", "text": f"\n{question}"}]}
    return {"messages": [turn], "temperature": 0, "max_tokens": 400, **fields}


async def ask(server: RealServer, body: dict[str, Any]) -> httpx.Response:
    """Its answer."""
    return (await server.http.post("/v1/chat/completions", json=body)).raise_for_status()


async def test_a_shrunk_picture_is_told_of_in_header_and_body() -> None:
    """SPEC M2, V3: the tier's 192 pixels; the reader still reads what is on it."""
    async with serving(READER, **SETTINGS) as server:
        answer = await ask(server, about(2))
        assert answer.headers["x-stoker-images"] == "320x320>192x192"
        assert answer.json()["images"] == [{"width": 320, "height": 320, "shrunk_to": [192, 192]}]
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["name"] == "Tahu Feti"


async def a_round(server: RealServer, number: int) -> None:
    """A report as JSON, a talk, the same report elsewhere, one that is given up, and the model anew."""
    (model,) = server.models
    read = await ask(server, about(number, response_format=FORM))
    assert set(json.loads(read.json()["choices"][0]["message"]["content"])) == set(SCHEMA["required"])
    await ask(server, {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 20})
    elsewhere = about(number, "Whose report is this?")
    elsewhere["messages"].insert(0, {"role": "system", "content": "Be brief."})
    await ask(server, elsewhere)
    try:
        body = about(number + 7, cache_salt=str(number))
        await server.http.post("/v1/chat/completions", json=body, timeout=0.05 + 0.02 * number)
    except httpx.TimeoutException:
        pass  # meant so: in a different moment each time
    for order in (server.unload, server.load):
        (await order(model)).raise_for_status()


@pytest.mark.slow
async def test_twenty_rounds_of_everything_leave_nothing_behind() -> None:
    """SPEC M1, M2, R10: below the limit all the time; front and engine grow by 32 MiB at the most."""
    async with serving(READER, **SETTINGS) as server:
        sizes = []
        for number in range(NUM_REPORTS):
            await a_round(server, number)
            sizes.append(server.rss_bytes())
        status = await server.status()
        print(f"\n{[size >> 20 for size in sizes]} MiB after each round")  # noqa: T201
        assert status["engine"]["restarts"] == 0
        assert max(sizes) < LIMIT_BYTES
        assert max(sizes) - sizes[NUM_SETTLING] < MAX_GROWTH_BYTES
