"""POST /v1/chat/completions as the official client sees it."""

from __future__ import annotations

import json

import openai
import pytest

from stoker.server.openai.conversation import ChatRequest

HELLO = [{"role": "user", "content": "Say hello"}]


def test_a_whole_answer_has_text_usage_and_identity(client):
    """S1, I8: the official client parses id, model, choice, finish reason and usage."""
    raw = client.chat.completions.with_raw_response.create(
        model="default", messages=HELLO, max_tokens=5, seed=1, temperature=0
    )
    answer = raw.parse()
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == client.models.list().data[0].id
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert raw.headers["x-request-id"]


def test_a_stream_says_what_the_whole_answer_says(client):
    """S2: role first, then the same text, one finish reason, and the usage chunk that was asked for."""
    asked = {"model": "default", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    shown = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in shown) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in shown if choice.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert set(chunks[-1].timings) == set(whole.timings)


def test_a_stream_without_stream_options_has_no_usage_chunk(client):
    """S2: usage comes on request only."""
    chunks = list(client.chat.completions.create(model="default", messages=HELLO, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_n_choices_come_with_their_own_index_and_role(client):
    """Q16, S1: two choices, streamed and whole."""
    asked = {"model": "default", "messages": HELLO, "max_tokens": 3, "n": 2, "seed": 7}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.completion_tokens == 6
    texts = {0: "", 1: ""}
    roles = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
    assert sorted(roles) == [0, 1]
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_logprobs_come_for_every_token(client):
    """D6: as many entries as tokens, each with its bytes and the alternatives asked for."""
    asked = {"model": "default", "messages": HELLO, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert len(streamed) == 4


def test_the_same_seed_gives_the_same_text_and_a_stop_ends_it(client):
    """D1, D3: seed and stop reach the engine."""
    asked = {"model": "default", "messages": HELLO, "max_tokens": 12, "seed": 3, "temperature": 1}
    texts = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


async def test_the_asynchronous_client_streams(async_client):
    """S1: the official asynchronous client."""
    stream = await async_client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=3, stream=True
    )
    reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == "length"


def test_every_field_reaches_the_runtime(scripted, scripted_http):
    """I7, D1, Q1: names of OpenAI, llama-server and vLLM, and the headers."""
    body = {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
            }
        ],
        "max_completion_tokens": 2,
        "temperature": 0.5,
        "top_n_sigma": 1.5,
        "dynatemp_range": 0.2,
        "dynatemp_exponent": 2,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical": 0.9,
        "mirostat": 2,
        "mirostat_tau": 4,
        "mirostat_eta": 0.2,
        "xtc_probability": 0.1,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "repetition_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {"5": -1.5},
        "seed": 9,
        "n": 2,
        "stop": ["x", "y"],
        "min_tokens": 1,
        "ignore_eos": True,
        "timeout_s": 30,
        "service_tier": "flex",
        "unknown_field": {"a": 1},
        "chat_template_kwargs": {"deep": True},
        "add_generation_prompt": False,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = scripted_http.post("/chat/completions", json=body, headers={"X-Stoker-Progress": "1"})
    assert answer.status_code == 200, answer.text
    request = scripted.runtime.requests[0]
    sampling = request.sampling
    assert request.prompt == "system: be \nbrief\nadd_generation_prompt=False\ndeep=True"
    assert (request.max_tokens, request.n, request.stop[:2], request.min_tokens) == (2, 2, ("x", "y"), 1)
    assert (request.ignore_eos, request.timeout_s, request.logprobs, request.is_chat) == (True, 30, 3, True)
    assert (request.priority, request.return_progress) == ("background", True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.5, 0.1)
    assert (sampling.top_n_sigma, sampling.dynatemp_range, sampling.dynatemp_exponent) == (1.5, 0.2, 2)
    assert (sampling.typical_p, sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta) == (
        0.9,
        2,
        4,
        0.2,
    )
    assert (sampling.xtc_probability, sampling.xtc_threshold, sampling.dry_multiplier) == (0.1, 0.2, 0.8)
    assert (sampling.dry_base, sampling.dry_allowed_length, sampling.dry_penalty_last_n) == (1.5, 3, 64)
    assert (sampling.dry_sequence_breakers, sampling.repeat_penalty, sampling.repeat_last_n) == (
        ("\n",),
        1.1,
        32,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)
    assert (sampling.logit_bias, sampling.seed) == ({5: -1.5}, 9)


def test_a_last_turn_of_the_assistant_is_gone_on_with(scripted, scripted_http):
    """As vLLM and llama-server do; the answer is the new text alone, and the fields for it are checked."""
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hello and"}]}]
    given = {"messages": begun, "max_tokens": 2}
    answer = scripted_http.post("/v1/chat/completions", json=given).json()
    assert answer["choices"][0]["message"]["content"] == "w0 w1 "
    assert scripted.runtime.requests[0].prompt == "user: Say hello\nassistant: Hello and"
    shown = scripted_http.post("/apply-template", json={"messages": begun, "continue_final_message": True})
    assert shown.json()["prompt"] == "user: Say hello\nassistant: Hello and"
    new = scripted_http.post("/apply-template", json={"messages": begun, "add_generation_prompt": True})
    assert new.json()["prompt"].endswith("assistant: Hello and\nadd_generation_prompt=True")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    for body in ({"messages": begun, **both}, {"messages": HELLO, "continue_final_message": True}):
        refused = scripted_http.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_two_last_turns_of_the_assistant_need_a_word(scripted_http):
    """As llama-server: it is not clear what is to be gone on with."""
    said = {"role": "assistant", "content": "Hello"}
    body = {"messages": [*HELLO, said, said], "max_tokens": 1}
    refused = scripted_http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    for name in ("add_generation_prompt", "continue_final_message"):
        assert scripted_http.post("/v1/chat/completions", json=body | {name: True}).status_code == 200


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"enable_thinking": False}, "enable_thinking=False"),
        ({"reasoning_effort": "none"}, "enable_thinking=False\nreasoning_effort=none"),
        ({"reasoning_effort": "low"}, "enable_thinking=True\nreasoning_effort=low"),
        (
            {"reasoning_effort": "low", "enable_thinking": False},
            "enable_thinking=False\nreasoning_effort=low",
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            "enable_thinking=True",
        ),
        ({}, "user: Say hello"),
    ],
)
def test_a_template_is_told_whether_to_think(scripted_http, given, told):
    """adr/0020: by any of the three names; without them it is told nothing."""
    shown = scripted_http.post("/apply-template", json={"messages": HELLO, **given}).json()["prompt"]
    assert shown.removeprefix("user: Say hello\n") == told


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_reasoning_of_a_message_is_read_by_either_name(name):
    """adr/0020: as answers have it; an object, as some gateways send, says nothing."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    thought = {"role": "assistant", "content": None, "tool_calls": [call], name: "I look."}
    other = {"role": "assistant", "content": "It rains.", "reasoning": {"effort": "low"}}
    body = ChatRequest.model_validate({"messages": [*HELLO, thought, other]})
    _, first, second = body.turns("m")
    assert (first["reasoning_content"], first["tool_calls"]) == ("I look.", [call])
    assert "reasoning_content" not in second


def chunks_of(answer):
    """The chunks of a stream as JSON."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_shape_of_a_stream(scripted_http):
    """S2: the role, the text, then the reason by itself, in chunks of one shape."""
    body = {"messages": HELLO, "max_tokens": 2, "stream": True}
    chunks = chunks_of(scripted_http.post("/v1/chat/completions", json=body))
    deltas = [{"role": "assistant", "content": ""}, {"content": "w0 "}, {"content": "w1 "}, {}]
    reasons = [None, None, None, "length"]
    assert [chunk.pop("choices") for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in zip(deltas, reasons, strict=True)
    ]
    assert chunks == [chunks[0]] * 4
    assert set(chunks[0]) == {"id", "object", "created", "model", "service_tier", "system_fingerprint"}


def test_logprobs_come_before_the_reason(scripted_http):
    """D6, S2: with the text they belong to."""
    body = {"messages": HELLO, "max_tokens": 1, "stream": True, "logprobs": True}
    _, text, last = [
        chunk["choices"][0] for chunk in chunks_of(scripted_http.post("/v1/chat/completions", json=body))
    ]
    assert (text["delta"], len(text["logprobs"]["content"])) == ({"content": "w0 "}, 1)
    assert (last["delta"], last["logprobs"], last["finish_reason"]) == ({}, None, "length")


@pytest.mark.parametrize(
    ("fields", "headers", "tier"),
    [
        ({}, {}, "default"),
        ({"service_tier": "auto"}, {}, "default"),
        ({"service_tier": "priority"}, {}, "default"),
        ({"service_tier": "flex"}, {}, "flex"),
        ({}, {"X-Stoker-Priority": "background"}, "flex"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_says_the_tier_it_was_served_with(scripted_http, path, fields, headers, tier):
    """Q1: the one that was used, whole and in every chunk."""
    body = {"messages": HELLO, "prompt": "x", "max_tokens": 1, **fields}
    assert scripted_http.post(path, json=body, headers=headers).json()["service_tier"] == tier
    chunks = chunks_of(scripted_http.post(path, json=body | {"stream": True}, headers=headers))
    assert {chunk["service_tier"] for chunk in chunks} == {tier}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", 2.01, "between 0 and 2"),
        ("temperature", -0.1, "between 0 and 2"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -3, "between -2 and 2"),
        ("top_p", 1.1, "between 0 and 1"),
        ("min_p", -1, "between 0 and 1"),
        ("n", 0, "between 1 and 32"),
        ("n", 33, "between 1 and 32"),
        ("max_tokens", 0, "between 1 and 2147483647"),
        ("max_tokens", -1, "between 1 and 2147483647"),
        ("max_tokens", 10**18, "between 1 and 2147483647"),
        ("max_tokens", 10**30, "between 1 and 2147483647, got a number of 100 bits"),
        ("max_completion_tokens", 10**400, "between 1 and 2147483647"),
        ("max_completion_tokens", 0, "between 1 and 2147483647"),
        ("top_logprobs", 21, "between 0 and 20"),
        ("logit_bias", {"5": 101}, "between -100 and 100"),
        ("seed", 2**64, ""),
        ("service_tier", "gold", ""),
        ("reasoning_effort", "much", ""),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(scripted_http, field, value, said):
    """S3: 400 with the field and the range."""
    body = {"messages": HELLO, "logprobs": True, field: value}
    answer = scripted_http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert field in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize("value", ["1", "true", "True", "on", "yes"])
def test_the_progress_header_takes_any_yes(scripted, scripted_http, value):
    """S2: as people write it."""
    body = {"messages": HELLO, "max_tokens": 1}
    scripted_http.post("/v1/chat/completions", json=body, headers={"X-Stoker-Progress": value})
    assert scripted.runtime.requests[0].return_progress
    scripted_http.post("/v1/chat/completions", json=body, headers={"X-Stoker-Progress": "no"})
    assert not scripted.runtime.requests[1].return_progress


def test_nulls_mean_the_defaults(scripted, scripted_http):
    """S1: clients send null for what they leave open."""
    names = (
        "model",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "max_tokens",
        "stream",
        "tools",
        "tool_choice",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "stream_options",
        "service_tier",
    )
    body = {"messages": HELLO, **dict.fromkeys(names)}
    assert scripted_http.post("/v1/chat/completions", json=body).status_code == 200
    assert scripted.runtime.requests[0].sampling.temperature == 0.8
    assert scripted.runtime.requests[0].max_tokens is None


def test_the_priority_header_beats_the_body(scripted, scripted_http):
    """Q1: X-Stoker-Priority names the class; an unknown one is refused."""
    body = {"messages": HELLO, "service_tier": "flex"}
    for name, status in (("interactive", 200), ("urgent", 400)):
        answer = scripted_http.post("/v1/chat/completions", json=body, headers={"X-Stoker-Priority": name})
        assert answer.status_code == status
    assert [request.priority for request in scripted.runtime.requests] == ["interactive"]


TIERS = {None: "interactive", "auto": "interactive", "default": "interactive", "flex": "background"}


@pytest.mark.parametrize("tier", TIERS)
def test_the_service_tier_names_the_class(scripted, scripted_client, tier):
    """Q1: as the official client sends it, in a chat and in a completion."""
    scripted_client.chat.completions.create(model="default", messages=HELLO, service_tier=tier)
    scripted_client.completions.create(model="default", prompt="x", extra_body={"service_tier": tier})
    assert [request.priority for request in scripted.runtime.requests] == [TIERS[tier]] * 2


@pytest.mark.parametrize("name", ["interactive", "background"])
def test_the_priority_header_reaches_both_routes(scripted, scripted_client, name):
    """Q1: X-Stoker-Priority of the official client."""
    headers = {"X-Stoker-Priority": name}
    scripted_client.chat.completions.create(model="default", messages=HELLO, extra_headers=headers)
    scripted_client.completions.create(model="default", prompt="x", extra_headers=headers)
    assert [request.priority for request in scripted.runtime.requests] == [name] * 2


@pytest.mark.parametrize("how", [None, "park", "cancel"])
def test_a_request_says_what_becomes_of_it_when_preempted(scripted, scripted_client, how):
    """Q4, I7: parked by default; both routes."""
    body = {"preempt": how}
    scripted_client.chat.completions.create(model="default", messages=HELLO, extra_body=body)
    scripted_client.completions.create(model="default", prompt="x", extra_body=body)
    assert [request.preempt for request in scripted.runtime.requests] == [how or "park"] * 2


@pytest.mark.parametrize("wrong", ["stop", "", True, 1])
def test_an_unknown_way_to_be_preempted_is_refused(client, wrong):
    """S3: 400 naming the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=HELLO, extra_body={"preempt": wrong})
    assert caught.value.param == "preempt"


def test_a_number_out_of_range_is_shown_with_all_its_digits(client):
    """S3: as it was sent, beside the bounds."""
    with pytest.raises(openai.BadRequestError, match="between 1 and 2147483647, got 2147483648"):
        client.chat.completions.create(model="default", messages=HELLO, max_tokens=2**31)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
        ),
        ({"tools": [{"type": "custom"}], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, change, param):
    """S3: 400 `unsupported` naming the field, rather than an answer that ignores it."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=HELLO, extra_body=change)
    assert (caught.value.code, caught.value.param) == ("unsupported", param)


def test_tools_that_may_not_be_used_are_no_reason_to_refuse(http):
    """S1: empty tools, or tool_choice none."""
    for change in ({"tools": []}, {"tools": [{"type": "function"}], "tool_choice": "none"}):
        answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **change})
        assert answer.status_code == 200, answer.text


def test_a_conversation_with_every_role_is_taken(http):
    """S1: system, user, assistant with and without tool calls, tool."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "a"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
    ]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text)["choices"][0]["finish_reason"] == "length"
