"""Models whose pictures lie in grids, see themselves in both directions, or come in tiles, in the loop.

What every answer has to equal is llama.cpp's own helper, which its server uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from seeing_kinds import KINDS, helped, write_pair
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.binding import llama, vision_library
from stoker.backends.protocol.backend import PLAIN, BatchPlan, Conditioning, Placed, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.steps import carry_out
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import InvalidRequestError, PoolFullError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Failed, Finished
from stoker.ipc.model import KVLayout, ModelSpec, ProjectorSpec
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Picture, Sampling
from stoker.kv.sequence import ParkForm, SequenceState
from stoker.machine.ledger import Ledger
from tiny_projector import picture_of

NUM_WANTED = 32
MOST = 9
"""Times that a request is parked."""
GREEDY = Sampling(temperature=0.0)
SIZES = ((32, 32), (72, 40), (40, 96))
HEAD, TAIL = "Look: ", " there"
PROMPT = f"What is {IMAGE_MARKER} here?"


def spec_of(kind: str, folder: Path, **changes: object) -> ModelSpec:
    """A model of that kind, with steps of so few tokens that most pictures take several."""
    model, projector = write_pair(kind, folder)
    fields = {"n_ctx": 2048, "n_batch": 16, "num_slots": 2, "num_threads": 1, **changes}
    return ModelSpec(id=kind, path=str(model), projector=ProjectorSpec(path=str(projector)), **fields)


def runner_of(spec: ModelSpec, folder: Path) -> SlotRunner:
    """The model on this thread."""
    cache = PrefixCache(CacheLimits(ram_bytes=2**26), Ledger())
    return SlotRunner(spec, load(spec, cache_dir=folder), StepTimer(Stopwatch(60.0)), cache, JobTable())


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    """A model of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    runner = runner_of(spec_of(request.param, folder), folder)
    yield runner
    runner.close()


@pytest.fixture
def emptied(runner: SlotRunner) -> Iterator[SlotRunner]:
    """The same without the cells of requests before, for steps by hand; nothing of these is left either."""
    runner.drop_idle(0.0)
    yield runner
    for seq in (0, 1):
        runner.backend.drop(seq)
        runner.backend.condition(seq, PLAIN)


def asked(prompt: str, *pictures: Picture, **changes: object) -> GenerateRequest:
    """A greedy request."""
    fields = {"max_tokens": NUM_WANTED, "sampling": GREEDY, "ignore_eos": True, "speculate": False, **changes}
    return GenerateRequest(prompt=prompt, model="m", pictures=pictures, **fields)


def run(runner: SlotRunner, *requests: GenerateRequest) -> list[tuple[list[int], Finished | Failed]]:
    """Tokens and end of each of the requests, all begun together."""
    for index, request in enumerate(requests):
        live = prepare(Submit(request_id=str(index), request=request), runner.prep, 0.0)
        runner.accept(live, 0.0)
    ends: dict[str, Finished | Failed] = {}
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
    while len(ends) < len(requests):
        runner.schedule(0.0)
        runner.step(0.0)
        runner.scheduler.check()
        for event in runner._jobs.events:
            if isinstance(event, Delta):
                tokens[event.request_id] += event.token_ids
            elif isinstance(event, Finished | Failed):
                ends[event.request_id] = event
        runner._jobs.events.clear()
    return [(tokens[key], ends[key]) for key in sorted(ends, key=int)]


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_reads_as_the_library_itself_reads_it(runner: SlotRunner, size: tuple[int, int]) -> None:
    """SPEC V6, V7, V8: 32 greedy tokens after a picture of each size."""
    picture = picture_of(1, *size)
    expected = helped(runner.backend, PROMPT, [picture], NUM_WANTED)
    ((answer, _),) = run(runner, asked(PROMPT, picture, cache=False))
    assert answer == expected


def test_two_pictures_are_seen_in_their_order(runner: SlotRunner) -> None:
    """SPEC V6, V7, V2: of different sizes, with text around them; the other order is another answer."""
    prompt = f"First {IMAGE_MARKER} and then {IMAGE_MARKER}?"
    pictures = [picture_of(1, *SIZES[0]), picture_of(2, *SIZES[1])]
    answers = []
    for order in (pictures, pictures[::-1]):
        ((answer, _),) = run(runner, asked(prompt, *order, cache=False))
        assert answer == helped(runner.backend, prompt, order, NUM_WANTED)
        answers.append(answer)
    assert answers[0] != answers[1]


def test_pictures_of_several_requests_are_computed_beside_each_other(runner: SlotRunner) -> None:
    """SPEC V6, V7, Q14: two with pictures at once, and text before them, read as each alone."""
    pictures = [picture_of(seed, *SIZES[seed]) for seed in (1, 2)]
    expected = [helped(runner.backend, PROMPT, [picture], NUM_WANTED) for picture in pictures]
    requests = [asked(PROMPT, picture, cache=False) for picture in pictures]
    found = run(runner, *requests, asked("Nothing to see", cache=False))
    assert [answer for answer, _ in found[:2]] == expected


def test_a_conversation_goes_on_after_a_cached_picture(runner: SlotRunner) -> None:
    """SPEC V6, V7, C11: the second turn takes the first, picture and all, and reads as without that."""
    picture = picture_of(3, *SIZES[1])
    longer = PROMPT + " And what else is there, somewhere in it?"
    run(runner, asked(PROMPT, picture))
    ((answer, end),) = run(runner, asked(longer, picture))
    assert answer == helped(runner.backend, longer, [picture], NUM_WANTED)
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens > 16


@pytest.mark.parametrize("form", ParkForm)
def test_parked_in_the_middle_of_a_picture_the_answer_is_the_same(runner: SlotRunner, form: ParkForm) -> None:
    """SPEC V6, V7, Q4: in each form, again and again while its pictures are computed and while it decodes."""
    pictures = [picture_of(5, *SIZES[1]), picture_of(6, *SIZES[2])]
    prompt = f"One {IMAGE_MARKER} and one more: {IMAGE_MARKER} what now?"
    expected = helped(runner.backend, prompt, pictures, NUM_WANTED)
    live = prepare(Submit(request_id="r", request=asked(prompt, *pictures, cache=False)), runner.prep, 0.0)
    sequence, num_parked, num_turns = live.choices[0].sequence, 0, 0
    runner.accept(live, 0.0)
    while sequence.state is not SequenceState.DONE:
        num_turns += 1
        if num_parked < MOST and num_turns % 3 == 0 and sequence.is_running and sequence.num_computed:
            num_parked += 1
            carry_out(
                runner.scheduler.park(sequence, form, 0.0).ops, runner.backend, runner.scheduler.allocator
            )
            runner.scheduler.check()
        runner.schedule(0.0)
        runner.step(0.0)
    answer = [token for event in runner._jobs.events if isinstance(event, Delta) for token in event.token_ids]
    runner._jobs.events.clear()
    assert answer == expected
    assert num_parked == MOST


def placed(backend: LlamaBackend, picture: Picture) -> tuple[list[int], tuple[Placed, ...]]:
    """The tokens of a prompt with that picture, and where its embeddings stand."""
    assert backend.vision is not None
    tokens = backend.vocabulary.tokenize(HEAD, add_special=True, parse_special=True)
    pictures, rows, offset = [], backend.vision.encode(picture), 0
    for part in backend.vision.layout(picture):
        if isinstance(part, tuple):
            tokens += part
            continue
        pictures.append(Placed(len(tokens), rows[offset : offset + part.num_tokens], part))
        tokens += [-1] * part.num_tokens
        offset += part.num_tokens
    tokens += backend.vocabulary.tokenize(TAIL, add_special=False, parse_special=True)
    return tokens, tuple(pictures)


def items_of(seq: int, tokens: list[int], pictures: tuple[Placed, ...], begin: int) -> list[PlanItem]:
    """Items for all tokens from `begin` on, each of text or of a part of a picture."""
    ends = [each.start + len(each.embeddings) for each in pictures]
    edges = {begin, len(tokens), *ends, *(each.start + shift for each in pictures for shift in (0, 7))}
    found = []
    for start, end in pairwise(sorted(edge for edge in edges if edge >= begin)):
        for at in range(start, end, 16):
            part = tokens[at : min(at + 16, end)]
            found.append(PlanItem(seq, at, part, int(at + len(part) == len(tokens))))
    return found


def likeliest(backend: LlamaBackend, items: list[PlanItem]) -> int:
    """What follows the last item."""
    rows = [backend.launch(BatchPlan((item,))).rows().copy() for item in items]
    return int(rows[-1][-1].argmax())


@pytest.mark.parametrize("way", ["trim", "fork", "state"])
def test_a_sequence_goes_on_from_the_middle_of_a_picture(emptied: SlotRunner, way: str) -> None:
    """SPEC V6, V7, C1: cut there, shared up to there, or put back; text after it takes its right place."""
    backend, picture = emptied.backend, picture_of(7, *SIZES[1])
    (expected,) = helped(backend, HEAD + IMAGE_MARKER + TAIL, [picture], 1)
    tokens, pictures = placed(backend, picture)
    middle = pictures[0].start + 7
    for seq in (0, 1):
        backend.condition(seq, Conditioning(pictures=pictures))
    items = items_of(0, tokens, pictures, 0)
    if not backend.capabilities.can_trim:
        way = "state"
    if way == "state":
        items = [item for item in items if item.start < middle]
    for item in items:
        backend.launch(BatchPlan((item,))).rows()
    match way:
        case "trim":
            backend.trim(0, middle)
            seq = 0
        case "fork":
            backend.fork(0, 1, middle)
            seq = 1
        case _:
            backend.import_state(1, backend.export_state(0))
            seq = 1
    assert backend.length(seq) == middle
    found = likeliest(backend, items_of(seq, tokens, pictures, middle))
    assert found == expected


def test_a_step_that_fails_in_a_picture_takes_nothing_from_the_answer(
    emptied: SlotRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC V6, V7, K1: what a picture's cells held before goes with it and is computed again."""
    backend, picture = emptied.backend, picture_of(7, *SIZES[1])
    (expected,) = helped(backend, HEAD + IMAGE_MARKER + TAIL, [picture], 1)
    tokens, pictures = placed(backend, picture)
    backend.condition(0, Conditioning(pictures=pictures))
    decode = llama.llama_decode
    for item in items_of(0, tokens, pictures, 0):
        monkeypatch.setattr(llama, "llama_decode", lambda *_: 1)
        with suppress(PoolFullError):
            backend.launch(BatchPlan((item,))).rows()
            assert item.tokens[0] < 0, "a step without a native call"
            continue
        assert backend.length(0) == item.start
        monkeypatch.setattr(llama, "llama_decode", decode)
        row = backend.launch(BatchPlan((item,))).rows()
    assert int(row[-1].argmax()) == expected


def test_text_goes_on_where_a_picture_failed_to_begin(
    emptied: SlotRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC V6, V7, K1: another request takes the tokens before it, and its own their right places."""
    backend = emptied.backend
    tokens, pictures = placed(backend, picture_of(7))
    head, after = tokens[: pictures[0].start], [20, 21, 22, 23]
    backend.condition(0, Conditioning(pictures=pictures))
    likeliest(backend, items_of(0, head, (), 0))
    whole = PlanItem(0, len(head), [-1] * min(16, pictures[0].part.num_tokens), 0)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "llama_decode", lambda *_: 1)
        with pytest.raises(PoolFullError):
            backend.launch(BatchPlan((whole,))).rows()
    backend.condition(0, PLAIN)
    for index, token in enumerate(after):
        backend.launch(BatchPlan((PlanItem(0, len(head) + index, [token], 0),))).rows()
    last = llama.llama_memory_seq_pos_max(llama.llama_get_memory(backend._context.handle), 0)
    assert last == len(head) + len(after) - 1


def test_a_picture_that_sees_itself_and_fits_no_call_is_refused(tmp_path: Path) -> None:
    """SPEC V7: before the model hears of it, with both numbers; text is answered."""
    spec = spec_of("gemma3", tmp_path, n_batch=12)
    runner = runner_of(spec, tmp_path)
    try:
        with pytest.raises(InvalidRequestError, match=r"16 tokens .* 12 tokens here"):
            prepare(Submit(request_id="r", request=asked(PROMPT, picture_of(1))), runner.prep, 0.0)
        assert len(run(runner, asked("Just text"))[0][0]) == NUM_WANTED
    finally:
        runner.close()


def test_a_model_whose_pictures_lie_in_grids_has_one_pool(tmp_path: Path) -> None:
    """SPEC V6, C15: cells of one position cannot be told apart, neither to order nor to copy them."""
    for layout in KVLayout:
        spec = spec_of("qwen2vl", tmp_path, kv_layout=layout, kv_type="bf16")
        with load(spec, cache_dir=tmp_path) as backend:
            assert backend.capabilities.kv_layout is KVLayout.POOL
            assert not backend.capabilities.is_repeatable
        with load(msgspec.structs.replace(spec, projector=None), cache_dir=tmp_path) as backend:
            assert backend.capabilities.is_repeatable


def test_positions_that_do_not_count_from_the_picture_are_refused_at_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC V6, V1: of pictures whose places depend on others (HunyuanVL); text is served."""
    monkeypatch.setattr(vision_library(), "mtmd_helper_image_get_decoder_pos", lambda *_: None)
    with load(spec_of("qwen2vl", tmp_path), cache_dir=tmp_path) as backend:
        assert backend.capabilities.pairing == "broken"
        assert backend.launch(BatchPlan((PlanItem(0, 0, [10, 11], 1),))).rows().size
