"""Requests about images, parked in each form at each of their stages; a tiny model with a projector.

What every answer has to equal is computed here with the backend alone: whole pictures, in their places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.vision.slices import SlicedEncode
from stoker.backends.protocol.backend import PLAIN, BatchPlan, Conditioning, Placed, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.steps import carry_out
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Finished
from stoker.ipc.model import ModelSpec, ProjectorSpec
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Picture, Sampling
from stoker.kv.sequence import ParkForm, Sequence, SequenceState
from stoker.machine.ledger import Ledger
from tiny_models import write_llama
from tiny_projector import NUM_TOKENS, picture_of, write_projector

NUM_WANTED = 24
GREEDY = Sampling(temperature=0.0)
TEXTS = ("What is", " and what", " is", "?")
PICTURES = tuple(map(picture_of, (1, 2, 3)))
NOW = 1e-9
"""A slice so short that it ends with the operation that it begins."""
EVERY, MOST = 2, 9
STAGES = ("encode", "prefill", "decode")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    """The model on this thread; steps of so few tokens that a picture takes several, and short slices."""
    folder = tmp_path_factory.mktemp("seeing")
    spec = ModelSpec(
        id="m",
        path=str(write_llama(folder / "m.gguf")),
        n_ctx=512,
        n_batch=8,
        num_slots=2,
        num_threads=1,
        projector=ProjectorSpec(path=str(write_projector(folder / "p.gguf"))),
    )
    timer, run = StepTimer(Stopwatch(60.0)), SlicedEncode.run
    cache = PrefixCache(CacheLimits(), Ledger())
    runner = SlotRunner(spec, load(spec, cache_dir=folder), timer, cache, JobTable())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlicedEncode, "run", lambda encode, _: run(encode, NOW))
        yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(runner: SlotRunner) -> dict[tuple[int, ...], list[int]]:
    """The answers about the three pictures, by their order; nobody uses the cells yet."""
    orders = itertools.permutations(range(len(PICTURES)))
    return {order: computed(runner.backend, in_order(order)) for order in orders}


def in_order(order: tuple[int, ...]) -> tuple[Picture, ...]:
    """The three pictures so."""
    return tuple(PICTURES[index] for index in order)


def run(
    runner: SlotRunner, pictures: tuple[Picture, ...], form: ParkForm | None = None, stage: str = ""
) -> tuple[list[int], int]:
    """Tokens of the answer, and how often it was parked: at that stage, after some turns each time."""
    prompt = IMAGE_MARKER.join(TEXTS)
    request = GenerateRequest(
        prompt=prompt,
        model="m",
        max_tokens=NUM_WANTED,
        sampling=GREEDY,
        ignore_eos=True,
        pictures=pictures,
        cache=False,
        speculate=False,
    )
    live = prepare(Submit(request_id="r", request=request), runner.prep, 0.0)
    sequence = live.choices[0].sequence
    runner.accept(live, 0.0)
    num_parked, num_turns = 0, 0
    while sequence.state is not SequenceState.DONE:
        is_there = sequence.is_running and num_turns >= EVERY and is_at(runner, sequence, stage)
        if form is not None and is_there and num_parked < MOST:
            num_parked, num_turns = num_parked + 1, 0
            park(runner, sequence, form)
        turn(runner)
        num_turns += 1
    events, runner._jobs.events[:] = list(runner._jobs.events), []
    (finished,) = [event for event in events if isinstance(event, Finished) and event.request_id == "r"]
    assert finished.timings.num_preemptions == num_parked
    deltas = [event for event in events if isinstance(event, Delta) and event.request_id == "r"]
    return [token for delta in deltas for token in delta.token_ids], num_parked


def is_at(runner: SlotRunner, sequence: Sequence, stage: str) -> bool:
    """Whether it is in the middle of it."""
    match stage:
        case "encode":
            return runner._image_encoder.is_encoding and bool(sequence.unencoded_images)
        case "prefill":
            return any(span.start < sequence.num_computed < span.end for span in sequence.images)
        case "decode":
            return sequence.num_generated > 0
    return False


def park(runner: SlotRunner, sequence: Sequence, form: ParkForm) -> None:
    """Out of its slot in that form; a visitor, with a picture too, uses the cells meanwhile."""
    scheduler = runner.scheduler
    carry_out(scheduler.park(sequence, form, 0.0).ops, runner.backend, scheduler.allocator)
    scheduler.pause(sequence, 0.0)
    visit = GenerateRequest(
        prompt=f"Visit {IMAGE_MARKER}",
        model="m",
        max_tokens=2,
        sampling=GREEDY,
        ignore_eos=True,
        pictures=(picture_of(9),),
    )
    visitor = prepare(Submit(request_id="visitor", request=visit), runner.prep, 0.0)
    runner.accept(visitor, 0.0)
    while visitor.choices:
        turn(runner)
    scheduler.resume(sequence, 0.0)


def turn(runner: SlotRunner) -> None:
    """One step, and a slice."""
    runner.schedule(0.0)
    runner.step(0.0)
    runner.scheduler.check()


def computed(backend: LlamaBackend, pictures: tuple[Picture, ...]) -> list[int]:
    """The greedy answer, from the embeddings of whole pictures and the texts around them."""
    assert backend.vision is not None
    vocabulary, tokens, placed = backend.vocabulary, [], []
    parts: list[list[int]] = []
    for text, picture in itertools.zip_longest(TEXTS, pictures):
        parts.append(vocabulary.tokenize(text, add_special=not tokens, parse_special=True))
        tokens += parts[-1]
        if picture is not None:
            placed.append(Placed(len(tokens), backend.vision.encode(picture)))
            parts.append([-1 - at for at in range(NUM_TOKENS)])
            tokens += parts[-1]
    seq = backend.capabilities.num_sequences - 1
    backend.condition(seq, Conditioning(pictures=tuple(placed)))
    steps = [part[at : at + 8] for part in parts for at in range(0, len(part), 8)]
    answer: list[int] = []
    try:
        while len(answer) < NUM_WANTED:
            step = steps.pop(0) if steps else [answer[-1]]
            row = backend.launch(BatchPlan((PlanItem(seq, backend.length(seq), step, 1),))).rows()[-1]
            if not steps:
                answer.append(int(row.argmax()))
        return answer
    finally:
        backend.drop(seq)
        backend.condition(seq, PLAIN)


def test_each_of_three_pictures_is_seen_in_its_place(
    runner: SlotRunner, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """SPEC V2: all six orders give what embeddings in these places give, and no two the same."""
    for order, answer in expected.items():
        assert run(runner, in_order(order))[0] == answer, order
    assert len(set(map(tuple, expected.values()))) == len(expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ParkForm)
def test_parked_at_any_stage_the_answer_is_the_undisturbed_one(
    runner: SlotRunner, expected: dict[tuple[int, ...], list[int]], form: ParkForm, stage: str
) -> None:
    """SPEC Q4, V3: pictures wait with their request, whatever becomes of its cells."""
    answer, num_parked = run(runner, PICTURES, form, stage)
    assert num_parked >= 2
    assert answer == expected[0, 1, 2]
