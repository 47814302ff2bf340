"""Who may profit from whose prompts: what a caller is told, and what the engine had to compute."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from stoker.runtime import Runtime

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
START_S = 60.0
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
TEXT = "A long beginning that two callers may well have in common, whoever they are, word for word: "
NUM_PROMPT = 260
PROMPT = (TEXT * 4)[: NUM_PROMPT - 1]  # a token a character, and one for the beginning of the text


SLOW = "fake:eog_period=0,step_delay_s=0.01"


@pytest.fixture(params=[SLOW, f"{SLOW},recurrent=1"], ids=["decoder", "recurrent"])
def keyed(request, start_server, tmp_path):
    """A server over an engine whose steps take their time and are short, for callers of two keys."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n", encoding="utf-8")
    server = start_server(
        lambda: Runtime(
            request.param, isolation="thread", slots=4, n_batch=64, cache_dir=tmp_path / "cache", drain_s=0.0
        ),
        api_key_file=keys,
    )
    server.ready.result(START_S)
    return server


@asynccontextmanager
async def client_of(server):
    """Connections to it."""
    async with httpx.AsyncClient(base_url=server.url, timeout=START_S) as client:
        yield client


async def counters(http):
    """What the engine has counted so far."""
    return (await http.get("/v1/runtime", headers=FIRST)).json()["counters"]


async def ask(http, key, prompt=PROMPT, **fields):
    """A short completion; its text, and what it was told of the cache."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0} | fields
    answer = await http.post(COMPLETIONS, json=body, headers=key)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["usage"]["prompt_tokens"] == len(prompt) + 1
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


async def computed(http, *asks):
    """Prompt tokens that the engine computes for these, asked at once, and what each of them was told."""
    before = await counters(http)
    told = await asyncio.gather(*asks)
    after = await counters(http)
    return after["prompt_tokens_computed_total"] - before["prompt_tokens_computed_total"], told


async def test_the_prompt_of_another_key_is_computed_as_if_nobody_had_asked_it(keyed):
    """C1, C13: nothing is reused, all of it is computed, and its owner still hits."""
    async with client_of(keyed) as http:
        cold, ((text, cached),) = await computed(http, ask(http, FIRST))
        assert (cold, cached) == (NUM_PROMPT, 0)
        num_other, (told_other,) = await computed(http, ask(http, SECOND))
        assert (num_other, told_other) == (cold, (text, 0))
        num_own, ((text_own, cached_own),) = await computed(http, ask(http, FIRST))
        assert text_own == text
        assert cached_own == NUM_PROMPT - num_own > NUM_PROMPT // 2
        counted = await counters(http)
    assert counted["cache_misses_total"] == 2
    assert sum(value for name, value in counted.items() if name.startswith("cached_tokens_")) == cached_own


@pytest.mark.parametrize("salts", [("", "a"), ("a", ""), ("a", "b")])
async def test_another_salt_of_the_same_key_finds_nothing_and_the_same_one_does(keyed, salts):
    """C1: a salt parts the prompts of one key as well."""
    async with client_of(keyed) as http:
        cold, ((text, _),) = await computed(http, ask(http, FIRST, cache_salt=salts[0]))
        num_other, (told_other,) = await computed(http, ask(http, FIRST, cache_salt=salts[1]))
        assert (num_other, told_other) == (cold, (text, 0))
        num_same, ((_, cached),) = await computed(http, ask(http, FIRST, cache_salt=salts[0]))
        assert cached == NUM_PROMPT - num_same > 0


async def test_the_same_salt_of_another_key_is_no_way_in(keyed):
    """C1: a salt belongs to the key it came with."""
    async with client_of(keyed) as http:
        await ask(http, FIRST, cache_salt="shared")
        num_other, ((_, cached),) = await computed(http, ask(http, SECOND, cache_salt="shared"))
    assert (num_other, cached) == (NUM_PROMPT, 0)


async def test_callers_of_different_salts_at_once_do_not_wait_for_each_other(keyed):
    """C1, C4: each computes the whole prompt, while those who may share one compute it once."""
    async with client_of(keyed) as http:
        asks = [ask(http, FIRST, cache_salt=salt) for salt in ("a", "b", "c")]
        apart, told = await computed(http, *asks)
        assert apart == 3 * NUM_PROMPT
        assert [cached for _, cached in told] == [0, 0, 0]
        of_keys, told = await computed(http, ask(http, FIRST), ask(http, SECOND))
        assert of_keys == 2 * NUM_PROMPT
        assert [cached for _, cached in told] == [0, 0]
        together, told = await computed(http, *(ask(http, FIRST, cache_salt="d") for _ in range(3)))
        assert together < NUM_PROMPT + 3 * 32
        assert sorted(cached > 0 for _, cached in told) == [False, True, True]


async def test_what_the_progress_of_a_stream_tells_is_the_same_whether_or_not_another_key_was_there(keyed):
    """C1, S2: not even the steps of its prefill differ."""
    async with client_of(keyed) as http:
        for salt in ("a", "b"):  # what steps cost is known then
            await ask(http, FIRST, cache_salt=salt)
        before = await progress(http, FIRST)
        assert before == await progress(http, SECOND)
        assert before != await progress(http, FIRST)


async def test_the_first_progress_of_a_stream_says_what_is_taken_from_the_cache(keyed):
    """S2, C13: what the cache holds counts from the first one on, as in the usage."""
    async with client_of(keyed) as http:
        (total, cached, processed), *_ = await progress(http, FIRST)
        assert (cached, processed) == (0, 0)
        told = await progress(http, FIRST)
        assert {(each_total, each_cached) for each_total, each_cached, _ in told} == {(total, told[0][1])}
        _, cached, processed = told[0]
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "temperature": 0.0}
        usage = (await http.post(CHAT, json=body, headers=FIRST)).json()["usage"]
        assert cached == processed == usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * total


async def progress(http, key):
    """What is told of the prefill, without times."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "return_progress": True,
    }
    told = []
    async with http.stream("POST", CHAT, json=body, headers=key) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                part = json.loads(line.removeprefix("data: ")).get("prompt_progress")
                if part:
                    told.append((part["total"], part["cache"], part["processed"]))
    assert told
    return told


async def test_who_wants_no_cache_neither_finds_nor_leaves_anything(keyed):
    """C10: `cache: false` computes everything, and serves nobody, at once or afterwards."""
    async with client_of(keyed) as http:
        num_first, _ = await computed(http, ask(http, FIRST, cache=False), ask(http, FIRST, cache=False))
        assert num_first == 2 * NUM_PROMPT
        num_next, ((_, cached),) = await computed(http, ask(http, FIRST))
        assert (num_next, cached) == (NUM_PROMPT, 0)
        num_last, ((_, cached),) = await computed(http, ask(http, FIRST, cache=False))
        assert (num_last, cached) == (NUM_PROMPT, 0)


CONVERSATION = [{"role": "user", "content": "hi"}]
ROUTES = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": CONVERSATION, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": CONVERSATION, "max_tokens": 1},
    "/v1/choose": {"prompt": "x", "choices": ["a", "b"]},
    "/v1/embeddings": {"model": "vectors", "input": "x"},
    "/v1/states/embeddings": {"input": "x"},
    "/v1/rerank": {"model": "ranker", "query": "x", "documents": ["a"]},
}


@pytest.fixture
def recorded(start_server, tmp_path):
    """A server of every kind of model that asks for keys, and the requests that reached its runtime."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n", encoding="utf-8")
    models = ("fake:eog_period=0", "fake:encoder=1,id=vectors", "fake:encoder=1,pooling=rank,id=ranker")
    found = []

    def runtime():
        made = Runtime(models=models, isolation="thread", cache_dir=tmp_path / "cache", drain_s=0.0)
        client = made._client
        stream = client.stream
        client.stream = lambda record, *args: found.append(record.request) or stream(record, *args)
        return made

    server = start_server(runtime, api_key_file=keys)
    server.ready.result(START_S)
    return server, found


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_computes_under_a_salt_of_its_key(recorded, path):
    """C1: of two keys, and of two salts of one key, none is another's; neither can be read from it."""
    server, found = recorded
    salts = []
    async with client_of(server) as http:
        for key, salt in ((FIRST, None), (SECOND, None), (FIRST, "a"), (SECOND, "a"), (FIRST, None)):
            answer = await http.post(
                path, json=ROUTES[path] | ({"cache_salt": salt} if salt else {}), headers=key
            )
            assert answer.is_success, answer.text
            salts.append({request.cache_salt for request in found})
            found.clear()
    assert all(len(each) == 1 for each in salts)
    assert salts[4] == salts[0]
    assert len(set.union(*salts)) == 4
    assert not any("key" in salt or salt in {"", "a"} for each in salts for salt in each)
