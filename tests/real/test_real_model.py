"""What the engine says, against what llama.cpp says when it is called directly with the same weights."""

import asyncio

import pytest
from reference import log_softmax

from stoker import GenerateRequest, Sampling
from stoker.ipc.events import Delta, PromptEcho
from stoker.ipc.request import FinishReason

GREEDY = Sampling(temperature=0.0)
TOPICS = ["rivers", "bread", "a lighthouse", "the moon", "clocks", "a violin", "honey bees", "snow"]


async def collect(runtime, request):
    """Every event of a request."""
    return [event async for event in runtime.stream(request)]


def tokens_of(events, index=0):
    """Token ids of a choice."""
    return [t for e in events if isinstance(e, Delta) and e.index == index for t in e.token_ids]


def text_of(events, index=0):
    """Text of a choice."""
    return "".join(e.text for e in events if isinstance(e, Delta) and e.index == index)


@pytest.mark.long
async def test_thirty_two_streams_through_eight_slots_each_get_the_tokens_they_get_alone(runtime):
    """Q9: all complete; on a CPU no token depends on the company."""
    prompts = [f"A short text number {n} about {TOPICS[n % 8]}:" for n in range(32)]
    requests = [
        GenerateRequest(prompt=prompt, max_tokens=16, sampling=GREEDY, ignore_eos=True) for prompt in prompts
    ]
    alone = [tokens_of(await collect(runtime, request)) for request in requests]
    together = await asyncio.gather(*(collect(runtime, request) for request in requests))
    for mine, events in zip(alone, together, strict=True):
        assert len(mine) == 16
        assert tokens_of(events) == mine
    status = await runtime.status()
    assert [slot.state for slot in status.engine.slots] == ["idle"] * 8
    assert status.engine.queue == []
    assert runtime.stats()["num_live_requests"] == 0


@pytest.mark.long
async def test_echo_with_prompt_logprobs_is_what_the_logits_say(runtime, reference):
    """D6: natural logs of the softmax of raw logits, best alternatives first."""
    text = "The quick brown fox jumps over the lazy dog, and then it rests. " * 6
    request = GenerateRequest(
        prompt=text, echo=True, prompt_logprobs=3, logprobs=3, max_tokens=1, sampling=GREEDY
    )
    events = await collect(runtime, request)
    (echo,) = [event for event in events if isinstance(event, PromptEcho)]
    tokens = reference.tokenize(text)
    assert echo.text == text
    assert [entry.token_id for entry in echo.logprobs] == tokens
    logprobs = log_softmax(reference.logits(tokens))
    for at in range(1, len(tokens)):
        entry = echo.logprobs[at]
        assert entry.logprob == pytest.approx(logprobs[at - 1][tokens[at]], abs=1e-3)
        best = sorted(logprobs[at - 1], reverse=True)[:3]
        assert [lp for _, _, lp in entry.top] == pytest.approx(best, abs=1e-3)
    (drawn,) = [entry for e in events if isinstance(e, Delta) for entry in e.logprobs or []]
    assert drawn.token_id == int(logprobs[-1].argmax())
    assert drawn.logprob == pytest.approx(logprobs[-1].max(), abs=1e-3)


async def test_one_token_gives_one_tokens_text(runtime, reference):
    """D3: max_tokens = 1."""
    prompt = "The capital of France is"
    events = await collect(runtime, GenerateRequest(prompt=prompt, max_tokens=1, sampling=GREEDY))
    expected = reference.greedy(reference.tokenize(prompt), 1).tokens[0]
    assert tokens_of(events) == [expected]
    assert text_of(events) == reference.piece(expected).decode()


@pytest.mark.long
async def test_a_stop_string_cuts_where_the_whole_text_would_first_match(runtime, reference):
    """D3, D4: across token boundaries, the stop not included."""
    prompt = "One, two, three, four, five,"
    run = reference.greedy(reference.tokenize(prompt), 40)
    whole = b"".join(map(reference.piece, run.tokens)).decode()
    stop = whole[11:17]
    request = GenerateRequest(prompt=prompt, max_tokens=40, sampling=GREEDY, stop=(stop, "never said"))
    events = await collect(runtime, request)
    assert text_of(events) == whole[: whole.index(stop)]
    last = [event for event in events if isinstance(event, Delta)][-1]
    assert (last.finish_reason, last.stop_text) == (FinishReason.STOP, stop)


async def test_characters_split_over_tokens_arrive_whole(runtime, reference):
    """D3: an emoji of several tokens is never delivered in pieces."""
    emoji = "🦜"
    parts = reference.tokenize(emoji)
    assert len(parts) > 1
    sampling = Sampling(
        temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3, logit_bias=dict.fromkeys(parts, 60.0)
    )
    request = GenerateRequest(prompt="Parrots: 🦜🦜", max_tokens=60, sampling=sampling, ignore_eos=True)
    events = await collect(runtime, request)
    raw = b"".join(map(reference.piece, tokens_of(events)))
    assert text_of(events) == raw.decode("utf-8", "replace")
    assert len(tokens_of(events)) == 60


async def test_a_seed_gives_the_same_text_alone_and_in_company(runtime):
    """D1: the draw is counter-based; equal as of SPEC E1 is exact here but for near ties."""
    sampling = Sampling(temperature=0.7, seed=11)
    request = GenerateRequest(prompt="My favourite place is", max_tokens=24, sampling=sampling)
    alone = tokens_of(await collect(runtime, request))
    again = tokens_of(await collect(runtime, request))
    assert alone == again
    other = GenerateRequest(
        prompt="My favourite place is", max_tokens=24, sampling=Sampling(temperature=0.7, seed=12)
    )
    assert tokens_of(await collect(runtime, other)) != alone


@pytest.mark.long
async def test_choices_of_one_prompt_share_it_and_differ_by_their_seed(runtime):
    """Q16, D1."""
    prompt = "A list of words: " + "river stone cloud apple " * 30
    request = GenerateRequest(prompt=prompt, n=3, max_tokens=16, sampling=Sampling(temperature=1.0, seed=5))
    events = await collect(runtime, request)
    texts = {text_of(events, index) for index in range(3)}
    assert len(texts) == 3
    status = await runtime.status()
    prompt_tokens = events[-1].usage.prompt_tokens
    assert status.engine.kv_cells_used < 2 * prompt_tokens + 3 * 16
