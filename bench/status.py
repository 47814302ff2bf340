"""What a Stoker server tells of itself at `/v1/runtime`. Another server tells nothing, and that is no error.

Which models are in memory llama-server's router tells as well, in its list of models.

Every number is looked up by its name, so a server without it is read as well.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError

if TYPE_CHECKING:
    from bench.client import Client

PATH = "/v1/runtime"
OUT = frozenset({"absent", "unloaded", "suspended", "failed"})
"""States of models that take no memory, in Stoker's words and llama-server's."""
COMPUTED = "prompt_tokens_computed_total"
LOOK_EVERY_S = 0.1
ANSWER_LIMIT_S = 5.0
SAVED_LIMIT_S = 15.0
NUM_LOOKS = 3
"""An entry is made a moment after the answer's end: all is saved once this many looks in a row say so."""


async def counter(client: Client, name: str) -> float | None:
    """An engine counter; None: this server does not count that."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + ANSWER_LIMIT_S
    while True:
        counters = (await _document(client)).get("counters")
        if not isinstance(counters, dict):
            return None
        if name in counters:
            return float(counters[name])
        # an engine in a long step is left out of the document, with all its counters
        if counters or loop.time() >= deadline_s:
            return None
        await asyncio.sleep(LOOK_EVERY_S)


async def engine_pid(client: Client) -> int | None:
    """Process id of an engine that takes requests; None: there is none now, or it is not told."""
    engine = (await _document(client)).get("engine", {})
    return engine.get("pid") if engine.get("state") == "serving" else None


async def wait_saved(client: Client) -> None:
    """Wait until every stored prefix is on disk, at most `SAVED_LIMIT_S` seconds; not where none is told."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + SAVED_LIMIT_S
    num_saved_looks = 0
    while num_saved_looks < NUM_LOOKS and loop.time() < deadline_s:
        num_unsaved = _find((await _document(client)).get("cache"), "unsaved")
        if num_unsaved is None:
            return
        num_saved_looks = 0 if num_unsaved else num_saved_looks + 1
        await asyncio.sleep(LOOK_EVERY_S)


async def models_in_memory(client: Client) -> frozenset[str]:
    """Models that take memory now or are about to.

    Raises:
        BenchError: the server does not tell.
    """
    states = {str(model.get("id")): model.get("state") for model in await _models(client)}
    if not states:
        listed = (await client.get("/v1/models"))["data"]
        states = {str(model["id"]): model.get("status", {}).get("value") for model in listed}
    if None in states.values():
        raise BenchError(f"{client.url} does not tell which models are in memory")
    return frozenset(model for model, state in states.items() if state not in OUT)


async def cut_down(client: Client, model: str) -> str:
    """What a model was given less of than was asked for; empty: nothing, or it is not told."""
    found = (each.get("degraded", ()) for each in await _models(client) if each.get("id") == model)
    return ", ".join(str(phrase) for phrases in found for phrase in phrases)


async def _models(client: Client) -> list[dict[str, Any]]:
    models = (await _document(client)).get("models", [])
    return models if isinstance(models, list) else []


async def _document(client: Client) -> dict[str, Any]:
    try:
        document = await client.get(PATH)
    except BenchError:
        return {}
    return document if isinstance(document, dict) else {}


def _find(document: Any, name: str) -> Any:
    """The value under `name`, however deep; None: there is none."""
    if not isinstance(document, dict):
        return None
    if name in document:
        return document[name]
    found = (_find(value, name) for value in document.values())
    return next((value for value in found if value is not None), None)
