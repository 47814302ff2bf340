"""What llama.cpp computes beside a sequence's own cells is used again within one namespace only (SPEC C1).

Proved by what is computed: of a text that another namespace has had, as much as of one that nobody had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny_models
from stoker.backends.llama import context as llama_context
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.draft import SLICE_TOKENS
from stoker.backends.llama.seq2seq import load as load_seq2seq
from stoker.backends.protocol.backend import PLAIN, BatchPlan, Conditioning, PlanItem
from stoker.backends.protocol.scoring import ScoringLane
from stoker.ipc.model import ModelSpec, Speculation

A, B = b"a" * 32, b"b" * 32
PROMPT = tuple(range(40, 80)) * 5  # of the tiny models' vocabulary, over several calls of 64 tokens
TEXTS = [(90, 91, 92), (93, 94)]

Count = Callable[[Callable[[], object]], int]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Count:
    """A function that runs another and tells how many tokens any native context computed for it."""
    counts: list[int] = []
    launch = llama_context.LlamaContext.launch

    def counted(self: llama_context.LlamaContext, plan: BatchPlan) -> object:
        counts.append(plan.num_tokens)
        return launch(self, plan)

    monkeypatch.setattr(llama_context.LlamaContext, "launch", counted)

    def count(work: Callable[[], object]) -> int:
        counts.clear()
        work()
        return sum(counts)

    return count


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny decoder and a tiny encoder-decoder."""
    folder = tmp_path_factory.mktemp("namespaces")
    tiny_models.write_llama(folder / "llama.gguf")
    tiny_models.write_t5(folder / "t5.gguf")
    return folder


@pytest.fixture(scope="module")
def decoder(files: Path) -> Iterator[LlamaBackend]:
    """The decoder, which guesses for itself."""
    path = str(files / "llama.gguf")
    spec = ModelSpec(
        id="m",
        path=path,
        num_slots=2,
        n_ctx=512,
        n_batch=128,
        num_threads=1,
        speculation=Speculation.AUTO,
        draft_path=path,
    )
    with load(spec, cache_dir=files) as backend:
        yield backend


def chosen(backend: LlamaBackend, prompt: tuple[int, ...], namespace: bytes) -> None:
    """Score the texts after a prompt."""
    scoring = backend.scoring(prompt, TEXTS, namespace)
    while not scoring.is_done:
        scoring.advance(64)


def echoed(backend: LlamaBackend, prompt: tuple[int, ...], namespace: bytes) -> None:
    """Have every row of a prompt, in slices."""
    backend.drop(0)
    backend.condition(0, Conditioning(asked=prompt, namespace=namespace))
    for begin in range(0, len(prompt), 70):
        part = prompt[begin : begin + 70]
        backend.launch(BatchPlan((PlanItem(0, begin, part, len(part)),))).rows()
    backend.condition(0, PLAIN)
    backend.drop(0)


def guessed(backend: LlamaBackend, prompt: tuple[int, ...], namespace: bytes) -> None:
    """Have the draft model read a text and guess once."""
    assert backend.drafter is not None
    for _ in range(len(prompt) // SLICE_TOKENS + 2):
        if backend.drafter.guess(prompt, 1, namespace):
            return
    raise AssertionError("it still reads")


@pytest.mark.parametrize("work", [chosen, echoed, guessed])
def test_a_text_of_another_namespace_costs_what_an_unknown_one_costs(
    decoder: LlamaBackend, computed: Count, work: Callable[[LlamaBackend, tuple[int, ...], bytes], None]
) -> None:
    """C1: whole, and where it only begins as the other's."""
    unknown = computed(lambda: work(decoder, tuple(reversed(PROMPT)), B))
    first = computed(lambda: work(decoder, PROMPT, A))
    assert first == unknown
    assert computed(lambda: work(decoder, PROMPT, B)) == unknown
    begins_alike = (*PROMPT[:150], *reversed(PROMPT[150:]))
    assert computed(lambda: work(decoder, begins_alike, A)) == unknown


@pytest.mark.parametrize("work", [chosen, guessed])
def test_a_text_of_the_same_namespace_is_gone_on_from(
    decoder: LlamaBackend, computed: Count, work: Callable[[LlamaBackend, tuple[int, ...], bytes], None]
) -> None:
    """C1: whoever may share does."""
    work(decoder, tuple(reversed(PROMPT)), B)
    first = computed(lambda: work(decoder, PROMPT, A))
    assert computed(lambda: work(decoder, PROMPT, A)) < first / 2


def test_scorings_of_two_namespaces_that_take_turns_go_on_from_their_own(
    decoder: LlamaBackend, computed: Count
) -> None:
    """C1, D5: neither goes on from what the other has computed of the same prompt."""

    def work(namespaces: tuple[bytes, ...]) -> None:
        scorings = [decoder.scoring(PROMPT, TEXTS, namespace) for namespace in namespaces]
        while any(not scoring.is_done for scoring in scorings):
            for scoring in scorings:
                if not scoring.is_done:
                    scoring.advance(512)

    decoder.give_back()
    assert computed(lambda: work((A, B))) >= 2 * len(PROMPT)
    decoder.give_back()
    assert computed(lambda: work((A, A))) < 2 * len(PROMPT)


def test_slices_of_another_lane_cost_a_scoring_nothing(decoder: LlamaBackend, computed: Count) -> None:
    """D5, Q7: people's choices, a job's choices and a scored prompt take turns, and each comes to its end."""

    def in_turns() -> None:
        lanes = (ScoringLane.CHOICES, ScoringLane.BACKGROUND_CHOICES)
        scorings = [decoder.scoring(PROMPT, TEXTS, A, lane) for lane in lanes]
        decoder.drop(0)
        decoder.condition(0, Conditioning(asked=PROMPT, namespace=A))
        for begin in range(0, len(PROMPT), 70):
            for scoring in scorings:
                if not scoring.is_done:
                    scoring.advance(64)
            part = PROMPT[begin : begin + 70]
            decoder.launch(BatchPlan((PlanItem(0, begin, part, len(part)),))).rows()
        while any(not scoring.is_done for scoring in scorings):
            for scoring in scorings:
                if not scoring.is_done:
                    scoring.advance(64)
        decoder.condition(0, PLAIN)
        decoder.drop(0)

    decoder.give_back()
    alone = computed(lambda: chosen(decoder, PROMPT, A))
    decoder.give_back()
    echo = computed(lambda: echoed(decoder, PROMPT, A))
    decoder.give_back()
    assert computed(in_turns) == 2 * alone + echo


def test_a_source_of_another_namespace_is_read_again(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1, K3: an encoder's reading of a source belongs to who gave it."""
    spec = ModelSpec(id="t", path=str(files / "t5.gguf"), num_slots=1, n_ctx=64, num_threads=1)
    with load_seq2seq(spec, cache_dir=files) as backend:
        reads: list[int] = []
        fill = backend._reader._batch.fill
        monkeypatch.setattr(
            backend._reader._batch, "fill", lambda plan: reads.append(plan.num_tokens) or fill(plan)
        )
        for namespace in (A, A, B, A):
            backend.drop(0)
            backend.condition(0, Conditioning(source=(40, 41, 42, 1), namespace=namespace))
            backend.launch(BatchPlan((PlanItem(0, 0, (0,), 1),))).rows()
    assert reads == [4, 4, 4]
