"""A context that is full: an end by default, going on without the oldest tokens where that is asked for."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, Self

import numpy as np
import pytest

from stoker import FinishReason, Runtime
from stoker.backends.fake.backend import FakeBackend, FakeFaults
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.client.process.transport import config_of
from stoker.engine.inbox import Inbox
from stoker.engine.loop import EngineLoop
from stoker.errors import ContextLengthError
from stoker.ipc.commands import LoadModel, Shutdown, Submit
from stoker.ipc.events import Admitted, Delta, Failed, Finished, ModelState
from stoker.ipc.model import ModelSpec
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.kv.context_shift import NUM_KEPT, num_dropped, num_kept, replayed, shifted
from stoker.settings import EngineSettings

GREEDY = Sampling(temperature=0.0)
N_CTX = 160
KEPT = 40
PROMPT = tuple(97 + at * 7 % 26 for at in range(100))
LONG = tuple(97 + at * 11 % 26 for at in range(500))


def test_the_first_hundred_tokens_stay_or_a_quarter_of_a_small_context():
    """C12."""
    assert NUM_KEPT == 100
    assert [num_kept(n_ctx) for n_ctx in (8, 160, 399, 400, 401, 8192)] == [2, 40, 99, 100, 100, 100]
    for n_ctx in (8, 160, 1000):
        tokens = list(range(n_ctx))
        assert shifted(tokens, n_ctx)[: num_kept(n_ctx)] == tokens[: num_kept(n_ctx)]


def test_nothing_is_dropped_while_one_more_token_fits():
    """C12."""
    assert num_dropped(159, 160) == 0
    assert shifted(list(range(159)), 160) == list(range(159))
    assert num_dropped(160, 160) == 60
    assert shifted(list(range(160)), 160) == [*range(40), *range(100, 160)]


def test_what_stays_is_the_start_and_the_end_and_leaves_room():
    """C12: about half of what follows the start, in one piece, whatever the length."""
    random = Random(12)
    for _ in range(300):
        n_ctx = random.randint(4, 600)
        tokens = list(range(random.randint(n_ctx, 3 * n_ctx)))
        left, kept = shifted(tokens, n_ctx), num_kept(n_ctx)
        assert left == tokens[:kept] + tokens[len(tokens) - (len(left) - kept) :]
        assert kept < len(left) < n_ctx
        assert abs((len(left) - kept) - (n_ctx - kept) / 2) <= 1
        assert num_dropped(len(tokens), n_ctx) == len(tokens) - len(left)


def test_a_replay_holds_what_going_token_by_token_held():
    """C12, L5: after any number of tokens, and never as many as the context has."""
    random = Random(13)
    for _ in range(100):
        n_ctx = random.randint(4, 60)
        prompt = list(range(random.randint(1, 3 * n_ctx)))
        generated = list(range(1000, 1000 + random.randint(0, 4 * n_ctx)))
        held = shifted(prompt, n_ctx)
        for at, token in enumerate(generated):
            assert replayed(prompt, generated[:at], n_ctx) == held
            assert len(held) < n_ctx
            assert held[: min(num_kept(n_ctx), len(prompt))] == prompt[: num_kept(n_ctx)]
            held = shifted([*held, token], n_ctx)
        assert replayed(prompt, generated, n_ctx) == held
        assert replayed(held, [], n_ctx) == held


@cache
def by_hand(prompt: tuple[int, ...], num_tokens: int, n_ctx: int) -> tuple[list[int], int]:
    """Greedy tokens after `prompt`, each from a backend that holds just what stays, and how many dropped."""
    tokens, drawn = list(prompt), []
    dropped = 0
    for _ in range(num_tokens):
        if len(tokens) >= n_ctx:
            kept = num_kept(n_ctx)
            last = (n_ctx - kept) // 2
            dropped += len(tokens) - kept - last
            tokens = tokens[:kept] + tokens[len(tokens) - last :]
        backend = FakeBackend(num_cells=1024, n_batch=1024, faults=FakeFaults(eog_period=0))
        row = backend.launch(BatchPlan((PlanItem(0, 0, tuple(tokens), 1),))).rows()[0]
        drawn.append(int(np.argmax(row[:256])))
        tokens.append(drawn[-1])
    if len(tokens) >= n_ctx:
        kept = num_kept(n_ctx)
        dropped += len(tokens) - kept - (n_ctx - kept) // 2
    return drawn, dropped


class Engine:
    """A loop of one fake model, driven on this thread."""

    def __init__(self, path: str = "fake:eog_period=0", **spec: Any) -> None:
        self.events: list[Any] = []
        self.inbox = Inbox()
        settings = EngineSettings(isolation="thread", cache_disk_bytes=0)
        self.loop = EngineLoop(self.inbox, self.events.extend, config_of(settings))
        self.inbox.put(LoadModel(ModelSpec(**{"id": "m", "path": path, "n_ctx": N_CTX} | spec)))
        self.until(lambda: any(e.state == "ready" for e in self.events if isinstance(e, ModelState)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.put(Shutdown())
        self.loop.run()

    def until(self, is_done: Any) -> None:
        """Turn until then."""
        for _ in range(3000):
            if is_done():
                return
            self.loop.turn(0 if self.loop._runners.has_work else 5)
        pytest.fail(f"not reached: {self.events[-5:]}")

    def submit(self, name: str, generated: list[list[int]] | None = None, **fields: Any) -> None:
        """A greedy request that shifts, unless `fields` say otherwise."""
        defaults = {"model": "m", "sampling": GREEDY, "prompt": PROMPT, "context_shift": True}
        request = GenerateRequest(**defaults | fields)
        self.inbox.put(Submit(request_id=name, request=request, generated=generated or []))

    def run(self, name: str, **fields: Any) -> Finished | Failed:
        """The same, to its end."""
        self.submit(name, **fields)
        self.until(lambda: self.end(name) is not None)
        return self.end(name)

    def end(self, name: str) -> Any:
        """Its terminal event."""
        return next((e for e in self.of(Finished | Failed, name)), None)

    def of(self, kind: Any, name: str) -> list[Any]:
        """Its events of a kind."""
        return [e for e in self.events if isinstance(e, kind) and getattr(e, "request_id", None) == name]

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """What one choice was given."""
        return [t for e in self.of(Delta, name) if e.index == index for t in e.token_ids]


def test_a_full_context_is_the_end_unless_something_else_is_asked():
    """C12."""
    with Engine() as engine:
        ended = engine.run("r", context_shift=False, max_tokens=200)
        assert engine.of(Delta, "r")[-1].finish_reason is FinishReason.LENGTH
        assert len(engine.tokens("r")) == N_CTX - len(PROMPT)
        assert ended.usage.dropped_tokens == 0
        refused = engine.run("long", prompt=LONG, context_shift=False)
        assert refused.error.code == "context_length_exceeded"


@pytest.mark.parametrize("path", ["fake:eog_period=0", "fake:eog_period=0,recurrent=1"])
@pytest.mark.parametrize("num_tokens", [59, 60, 61, 150, 400])
def test_a_text_goes_on_past_the_context_from_the_tokens_that_stay(path, num_tokens):
    """C12, K5: it is what the model says after just these tokens; the response tells how many went."""
    with Engine(path) as engine:
        ended = engine.run("r", max_tokens=num_tokens)
        drawn, dropped = by_hand(PROMPT, num_tokens, N_CTX)
        assert engine.tokens("r") == drawn
        assert ended.usage.completion_tokens == num_tokens
        assert ended.usage.prompt_tokens == len(PROMPT)
        is_at_the_brim = (len(PROMPT) + num_tokens) == N_CTX  # the last token of all shifts nothing any more
        assert ended.usage.dropped_tokens == (0 if is_at_the_brim else dropped)


def test_a_prompt_longer_than_the_context_is_cut_not_refused():
    """C12."""
    with Engine() as engine:
        ended = engine.run("r", prompt=LONG, max_tokens=5)
        assert isinstance(ended, Finished)
        assert engine.tokens("r") == by_hand(LONG, 5, N_CTX)[0]
        assert ended.usage.dropped_tokens == len(LONG) - KEPT - (N_CTX - KEPT) // 2
        assert ended.usage.prompt_tokens == len(LONG)


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("num_before", [0, 1, 59, 60, 61, 100, 130, 199])
def test_a_replay_goes_on_as_if_nothing_had_happened(prompt, num_before):
    """C12, L5: whatever was delivered before the engine died."""
    with Engine() as engine:
        whole = engine.run("whole", prompt=prompt, max_tokens=200)
        tokens = engine.tokens("whole")
    with Engine() as engine:
        ended = engine.run("again", prompt=prompt, generated=[tokens[:num_before]], max_tokens=200)
        assert engine.tokens("again") == tokens[num_before:]
        assert ended.usage == whole.usage


@pytest.mark.parametrize("path", ["fake:eog_period=0", "fake:eog_period=0,recurrent=1"])
def test_neighbours_of_one_that_shifts_are_not_disturbed(path):
    """C12, C3: they may share its first cells; all of them shift at different times."""
    with Engine(path, n_ctx=N_CTX, num_slots=3) as engine:
        prompts = {f"r{at}": (*PROMPT[:60], *range(97, 97 + 3 * at)) for at in range(4)}
        for name, prompt in prompts.items():
            engine.submit(name, prompt=prompt, max_tokens=250)
        engine.until(lambda: all(engine.end(name) for name in prompts))
        for name, prompt in prompts.items():
            assert engine.tokens(name) == by_hand(prompt, 250, N_CTX)[0]


@pytest.mark.parametrize("path", ["fake:eog_period=0", "fake:eog_period=0,recurrent=1"])
def test_choices_shift_each_for_itself(path):
    """C12, Q16: what all of them dropped is told together."""
    with Engine(path) as engine:
        ended = engine.run("r", n=3, max_tokens=150)
        drawn, dropped = by_hand(PROMPT, 150, N_CTX)
        assert [engine.tokens("r", index) for index in range(3)] == [drawn] * 3
        assert ended.usage.dropped_tokens == 3 * dropped


def test_choices_that_had_ended_before_a_replay_count_as_they_did():
    """C12, L5: what they dropped was dropped."""
    with Engine() as engine:
        whole = engine.run("whole", n=2, max_tokens=150)
        tokens = engine.tokens("whole")
    with Engine() as engine:
        request = GenerateRequest(
            model="m", sampling=GREEDY, prompt=PROMPT, context_shift=True, n=2, max_tokens=150
        )
        half = Submit(
            request_id="r", request=request, generated=[tokens, tokens[:80]], is_finished=[True, False]
        )
        engine.inbox.put(half)
        engine.until(lambda: engine.end("r") is not None)
        assert engine.tokens("r", 1) == tokens[80:]
        assert engine.end("r").usage.dropped_tokens == whole.usage.dropped_tokens


def test_a_shifted_text_is_not_mistaken_for_the_whole_one():
    """C1, C12: what is stored after a shift stands for the tokens that stay, and serves who asks for them."""
    with Engine() as engine:
        engine.run("r", max_tokens=150)
        drawn = by_hand(PROMPT, 150, N_CTX)[0]
        whole = (*PROMPT, *drawn[:40])
        engine.run("again", prompt=whole, max_tokens=10, context_shift=False)
        assert engine.tokens("again") == by_hand(whole, 10, N_CTX)[0]
        held = replayed(list(PROMPT), drawn, N_CTX)
        engine.run("held", prompt=tuple(held), max_tokens=3, context_shift=False)
        assert engine.tokens("held") == by_hand(tuple(held), 3, N_CTX)[0]
        assert engine.of(Admitted, "held")[0].cached_tokens >= len(held) - 2


def test_what_the_answer_says_and_looks_at_spans_the_shift():
    """C12, D1: a stop text and penalties know of what was dropped."""
    with Engine() as engine:
        engine.run("r", max_tokens=150)
        drawn = by_hand(PROMPT, 150, N_CTX)[0]
        stop = bytes(drawn[57:63]).decode()
        engine.run("stopped", max_tokens=150, stop=(stop,))
        text = "".join(e.text for e in engine.of(Delta, "stopped"))
        assert text == bytes(drawn).decode().split(stop)[0]
        assert engine.of(Delta, "stopped")[-1].finish_reason is FinishReason.STOP


async def test_an_application_asks_for_it_with_one_field():
    """C12, I9: through the façade; the default raises."""
    async with Runtime(
        "fake:eog_period=0", isolation="thread", ctx_size=N_CTX, drain_s=0.0, cache_disk_bytes=0
    ) as runtime:
        text = bytes(LONG).decode()
        with pytest.raises(ContextLengthError):
            _ = [delta async for delta in runtime.generate(text, max_tokens=5)]
        deltas = [d async for d in runtime.generate(text, max_tokens=200, context_shift=True)]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].usage.completion_tokens == 200
        assert deltas[-1].usage.dropped_tokens > len(LONG) - N_CTX
