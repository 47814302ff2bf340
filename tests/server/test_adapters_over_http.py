"""Adapters over HTTP, in every way that clients of other servers name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from stoker.runtime import Runtime

LORA = ("red=fake:red", "blue=fake:blue@0.5")
ASKED = {"prompt": "once upon a time", "max_tokens": 8, "temperature": 0.0}
TURN = [{"role": "user", "content": "once upon a time"}]


@pytest.fixture(scope="module")
def adapting(_module_servers: Callable[..., Any]) -> Any:
    """A server over a fake model with two adapters."""
    server = _module_servers(
        lambda: Runtime("fake:eog_period=0,id=base", lora=LORA, isolation="thread", ctx_size=1024, slots=4)
    )
    server.ready.result(60)
    return server


@pytest.fixture
def api(adapting: Any) -> Iterator[httpx.Client]:
    """Plain requests to it."""
    with httpx.Client(base_url=adapting.url, timeout=60) as client:
        yield client


@pytest.fixture
def official(adapting: Any) -> Iterator[openai.OpenAI]:
    """The official client of it."""
    with openai.OpenAI(base_url=f"{adapting.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text(api: httpx.Client, **fields: Any) -> str:
    """A completion's text."""
    answer = api.post("/v1/completions", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_a_model_to_the_official_client(official: openai.OpenAI, api: httpx.Client) -> None:
    """SPEC K6, S1: listed after the model it adapts, and asked for by name."""
    listed = official.models.list().data
    base = listed[0].id
    assert [(each.id, getattr(each, "parent", None)) for each in listed] == [
        (base, None),
        ("red", base),
        ("blue", base),
    ]
    assert official.models.retrieve("red").id == "red"
    answer = official.completions.create(model="red", **ASKED)  # type: ignore[call-overload]
    assert answer.model == "red"
    assert answer.choices[0].text == text(api, lora="red") != text(api)


def test_every_way_to_name_it_means_the_same(api: httpx.Client) -> None:
    """SPEC K6: a name, scales by name, llama-server's list by place or name."""
    plain, red, blue = text(api), text(api, model="red"), text(api, lora={"blue": 0.5})
    assert len({plain, red, blue}) == 3
    for lora in ("red", {"red": 1}, [{"id": 0}], [{"id": "red", "scale": 1.0}]):
        assert text(api, lora=lora) == red
    for lora in ("blue", [{"id": 1, "scale": 0.5}], [{"id": 0, "scale": 0}, {"id": 1}]):
        assert text(api, lora=lora) == blue
    assert text(api, lora=[{"id": 0, "scale": 0.0}]) == text(api, lora=[]) == text(api, lora={}) == plain
    assert text(api, model="red", lora={"blue": 0.5}) == text(api, lora={"red": 1, "blue": 0.5})


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chats_are_adapted_too(official: openai.OpenAI, *, is_streamed: bool) -> None:
    """SPEC K6, S1: streamed or not, under the adapter's own name."""
    fields: dict[str, Any] = {"messages": TURN, "max_tokens": 8, "temperature": 0}

    def said(model: str, **extra: Any) -> tuple[str, str]:
        if not is_streamed:
            whole = official.chat.completions.create(model=model, extra_body=extra, **fields)
            return whole.model, whole.choices[0].message.content or ""
        chunks = list(official.chat.completions.create(model=model, extra_body=extra, stream=True, **fields))
        return chunks[0].model, "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    name, adapted = said("blue")
    assert name == "blue"
    assert said("default", lora="blue")[1] == adapted != said("default")[1]


def test_the_other_apis_take_an_adapter_as_their_model(api: httpx.Client) -> None:
    """SPEC K6, S1: responses and messages."""
    texts = []
    for model in ("default", "red"):
        fields = {"model": model, "temperature": 0}
        answer = api.post("/v1/responses", json=fields | {"input": "hello", "max_output_tokens": 16})
        assert answer.status_code == 200, answer.text
        message = api.post("/v1/messages", json=fields | {"messages": TURN, "max_tokens": 8})
        assert message.status_code == 200, message.text
        texts.append((answer.json()["output"][0]["content"][0]["text"], message.json()["content"][0]["text"]))
    (first, second), (red_first, red_second) = texts
    assert first != red_first
    assert second != red_second


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("green", "has no adapter 'green'; it has: red, blue"),
        ([{"id": 7}], "has no adapter 7"),
        ({"red": 1e6}, "between -100 and 100"),
        ([{"scale": 1.0}], "lora"),
        (3, "lora"),
        ([{"id": "red"}, {"id": 0}], "named twice"),
    ],
)
def test_what_cannot_be_meant_is_a_400_that_says_so(api: httpx.Client, lora: Any, said: str) -> None:
    """SPEC K6, I7: before any event, by the field's name."""
    answer = api.post("/v1/completions", json=ASKED | {"lora": lora, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"].startswith("lora")


def test_an_unknown_model_stays_a_404(api: httpx.Client) -> None:
    """SPEC S1: adapters' names are no catch-all."""
    assert api.post("/v1/completions", json=ASKED | {"model": "green"}).status_code == 404
