"""What a connected program may see and do by its key; what strangers may not do by the library's routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker import GenerateRequest, Runtime
from stoker.errors import OperatorOnlyError, RequestNotFoundError
from stoker.ipc.events import Delta
from stoker.remote.runtime import RemoteRuntime

SLOW = "fake:eog_period=0,step_delay_s=0.01"
PROMPT = "a prompt that both of them have " * 8


@pytest.fixture
async def connected(
    start_server: Callable[..., Any], tmp_path: Path
) -> AsyncIterator[tuple[RemoteRuntime, RemoteRuntime, RemoteRuntime]]:
    """One server as two keys and an operator's have it."""
    keys, operators = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("one\ntwo\n")
    operators.write_text("root\n")

    def make() -> Runtime:
        places = {"cache_dir": tmp_path / "cache", "run_dir": tmp_path / "run"}
        return Runtime(SLOW, isolation="thread", slots=2, ctx_size=4096, drain_s=0.0, **places)

    server = await asyncio.to_thread(start_server, make, api_key_file=keys, admin_key_file=operators)
    await asyncio.to_thread(server.ready.result, 60)
    one, two, root = (Runtime.connect(server.url, api_key=key) for key in ("one", "two", "root"))
    async with one, two, root:
        yield one, two, root


async def test_another_keys_request_is_counted_and_not_shown(connected) -> None:
    """S4, I11: neither its id nor its story; its owner and an operator see both."""
    one, two, root = connected
    async with aclosing(one.stream(GenerateRequest(prompt="x", max_tokens=3000), "mine")) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
        for caller, wanted in ((one, "mine"), (two, None), (root, "mine")):
            requests = (await caller.status()).requests
            assert [(one.request_id, one.owner) for one in requests] == ([(wanted, "")] if wanted else [])
            slots = [slot for slot in (await caller.status()).engine.slots if slot.state != "idle"]
            assert [slot.request_id for slot in slots] == [wanted]
            assert all(bool(slot.story) is bool(wanted) for slot in slots)
            assert [found.id for found in caller.with_client()] == ([wanted] if wanted else [])
        with pytest.raises(RequestNotFoundError):
            await two.cancel("mine")
        await root.cancel("mine")


async def test_places_of_files_and_acts_of_operators_are_for_operators(connected) -> None:
    """S4, I11: paths of models; to load, unload, pin and suspend."""
    one, _, root = connected
    assert (one.models[0].path, root.models[0].path) == ("", SLOW)
    for act in (
        one.load_model("fake"),
        one.unload_model("fake"),
        one.pin_model("fake"),
        one.suspend(),
        one.resume(),
    ):
        with pytest.raises(OperatorOnlyError, match="give it as `api_key`"):
            await act
    await root.pin_model("fake")


async def test_keys_share_nothing_of_what_was_computed(connected) -> None:
    """C1, I11: the salt of a request is bound to its key on the library's routes too."""
    one, two, _ = connected

    async def num_cached(runtime: RemoteRuntime, **fields: Any) -> int:
        return (await runtime.ask(PROMPT, raw=True, max_tokens=1, **fields)).usage.cached_tokens

    assert await num_cached(one) == 0
    assert await num_cached(one) > 0
    assert await num_cached(two) == 0
    assert await num_cached(one, cache_salt="other") == 0


SILENCE = {"type": "sound", "rate_hz": 16_000, "pcm": "AAAA" * 2000}
LONG = SILENCE | {"rate_hz": 1, "pcm": "AAAA" * 402}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "request": {"max_tokens": 0, "state_output": "save"}}, "state_output"),
        ({"prompt": "x", "request": {"initial_state": "AAAA"}}, "initial_state"),
        ({"prompt": "x", "request": {"max_tokens": "many"}}, "request"),
        ({"prompt": [1, 99999], "request": {}}, "prompt"),
        ({"prompt": "x", "conversation": {"messages": [{"role": "user", "content": "x"}]}}, "prompt"),
        ({"request": {}}, "prompt"),
        ({"prompt": "x", "request": {"top_p": 1}, "request_id": "a b"}, "request_id"),
        ({"prompt": "x", "request": {"sampling": {"top_p": 7.0}}}, "top_p"),
        ({"prompt": "x", "request": {"pictures": [{"width": 1, "height": 1, "rgb": "AA=="}]}}, "image"),
        (
            {"prompt": "x", "request": {"pictures": [{"width": 5000, "height": 1, "rgb": "AAAA" * 5000}]}},
            "pictures",
        ),
        ({"prompt": "x", "request": {"pictures": [SILENCE | {"rate_hz": 0}]}}, "audio"),
        ({"prompt": "x", "request": {"pictures": [SILENCE] * 17}}, "pictures"),
        ({"prompt": "x", "request": {"pictures": [LONG]}}, "pictures"),
    ],
)
async def test_a_request_in_the_librarys_form_is_checked_like_a_strangers(connected, body, param) -> None:
    """S3, I11: each is a 400 that names the field."""
    one, _, _ = connected
    async with httpx.AsyncClient(base_url=one.url, headers={"Authorization": "Bearer one"}) as http:
        answer = await http.post("/v1/runtime/requests", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_constraint_that_claims_to_be_translated_is_translated_here(connected) -> None:
    """D2, S4: the grammar engine gets nothing that was not checked."""
    one, _, _ = connected
    native = {"notation": "lark", "text": 'start: "unchecked"'}
    constraint = {"kind": "regex", "source": "[0-9]{3}", "native": native}
    body = {"prompt": "x", "request": {"constraint": constraint, "max_tokens": 20}}
    async with httpx.AsyncClient(base_url=one.url, headers={"Authorization": "Bearer one"}) as http:
        answer = await http.post("/v1/runtime/requests", json=body, timeout=60)
    assert answer.status_code == 200
    assert "unchecked" not in answer.text
    assert "event: finished" in answer.text


async def test_an_id_in_use_is_refused(connected) -> None:
    """I11: as in one program."""
    one, _, _ = connected
    request = GenerateRequest(prompt="x", max_tokens=3000)
    async with aclosing(one.stream(request, "mine")) as events:
        await anext(events)
        with pytest.raises(Exception, match="in use") as caught:
            await anext(one.stream(request, "mine"))
        assert caught.value.param == "request_id"
