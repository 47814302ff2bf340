"""POST /v1/completions as the official client and evaluation harnesses see it."""

from __future__ import annotations

import json

import openai
import pytest


def test_a_prompt_is_continued_whole_and_streamed(client):
    """S1, S2: the same text either way."""
    asked = {"model": "default", "prompt": "One two", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.id.startswith("cmpl-")
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_the_shape_of_a_stream(scripted_http):
    """S2: the text, then the reason by itself, in chunks of one shape."""
    body = {"prompt": "x", "max_tokens": 2, "stream": True, "logprobs": 0}
    answer = scripted_http.post("/v1/completions", json=body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    choices = [chunk.pop("choices")[0] for chunk in chunks]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("w0 ", None),
        ("w1 ", None),
        ("", "length"),
    ]
    assert [choice["logprobs"] and choice["logprobs"]["tokens"] for choice in choices] == [
        ["w0 "],
        ["w1 "],
        None,
    ]
    assert chunks == [chunks[0]] * 3
    assert set(chunks[0]) == {"id", "object", "created", "model", "service_tier", "system_fingerprint"}


def test_prompts_of_a_list_are_requests_of_their_own(client):
    """S1: choice j of prompt i has the index i * n + j, and equals what the prompt gets alone."""
    asked = {"model": "default", "max_tokens": 3, "seed": 5, "n": 2}
    both = client.completions.create(**asked, prompt=["alpha", "beta"])
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage.completion_tokens == 12
    alone = [client.completions.create(**asked, prompt=prompt).choices for prompt in ("alpha", "beta")]
    assert [choice.text for choice in both.choices] == [choice.text for found in alone for choice in found]
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, prompt=["alpha", "beta"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in both.choices]


def test_token_ids_are_prompts_too(client):
    """S1: one list of ids, or a list of them."""
    one = client.completions.create(model="default", prompt=[5, 6, 7], max_tokens=2, temperature=0)
    two = client.completions.create(model="default", prompt=[[5, 6, 7], [8]], max_tokens=2, temperature=0)
    assert len(two.choices) == 2
    assert two.choices[0].text == one.choices[0].text


def test_echo_with_logprobs_covers_prompt_and_completion(client):
    """D6: what lm-eval reads: a null first, an entry a token, the chosen token among its alternatives."""
    answer = client.completions.create(model="default", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith("abc")
    lists = choice.logprobs
    count = len(lists.tokens)
    assert count == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset)
    assert lists.token_logprobs[0] is None
    assert lists.top_logprobs[0] is None
    assert lists.tokens[-5:-2] == ["a", "b", "c"]  # an opening special token may stand before them
    assert lists.text_offset[-5:-1] == [0, 1, 2, 3]
    for token, value, top in list(zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True))[
        1:
    ]:
        assert top[token] == value


def test_echo_without_completion_scores_the_prompt_only(client):
    """D6: max_tokens 0 with echo."""
    answer = client.completions.create(model="default", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens[-3:] == ["a", "b", "c"]
    assert answer.usage.completion_tokens == 0


def test_echo_is_streamed_before_the_completion(client):
    """D6: the prompt's text and logprobs come first."""
    chunks = list(
        client.completions.create(
            model="default", prompt="abc", max_tokens=1, echo=True, logprobs=0, stream=True
        )
    )
    assert chunks[0].choices[0].text == "abc"
    tokens = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens
    ]
    assert tokens[-4:-1] == ["a", "b", "c"]


def test_sixteen_tokens_are_the_default(client):
    """S1: as with OpenAI."""
    assert client.completions.create(model="default", prompt="x").usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"top_p": 2}, "top_p"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"service_tier": "gold"}, "service_tier"),
    ],
)
def test_a_wrong_field_is_named(client, change, param):
    """S3: 400 with the field as `param`."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt="x", extra_body=change)
    assert caught.value.type == "invalid_request_error"
    assert str(caught.value.param).startswith(param)


def test_best_of_equal_to_n_is_no_news(client):
    """S1: clients send both."""
    answer = client.completions.create(model="default", prompt="x", n=2, best_of=2, max_tokens=1)
    assert len(answer.choices) == 2
