"""Models that hear, in the loop: every answer has to equal llama.cpp's own helper, which its server uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hearing_kinds import KINDS, sound_of, write_listener, write_pair
from seeing_kinds import helped
from stoker.backends.llama.backend import load
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.steps import carry_out
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.errors import InvalidRequestError, ModelFileError
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Failed, Finished
from stoker.ipc.model import ModelSpec, ProjectorSpec
from stoker.ipc.request import IMAGE_MARKER, GenerateRequest, Medium, Sampling, Sound
from stoker.kv.sequence import ParkForm, SequenceState
from stoker.machine.ledger import Ledger
from stoker.models.projector import read_projector
from tiny_models import write_llama
from tiny_projector import picture_of

NUM_WANTED = 32
MOST_PARKED = 4
PROMPT = f"What is {IMAGE_MARKER} saying?"
LENGTHS_S = (0.5, 31.0)  # a window, and two


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotRunner]:
    """A model of each kind, on this thread."""
    folder = tmp_path_factory.mktemp(request.param)
    runner = runner_of(request.param, folder, *write_pair(request.param, folder))
    yield runner
    runner.close()


def runner_of(name: str, folder: Path, model: Path, projector: Path) -> SlotRunner:
    """A model with its projector, on this thread."""
    spec = ModelSpec(
        id=name,
        path=str(model),
        projector=ProjectorSpec(path=str(projector), has_vision=False),
        n_ctx=4096,
        n_batch=512,
        num_slots=2,
        num_threads=1,
    )
    cache = PrefixCache(CacheLimits(ram_bytes=2**26), Ledger())
    return SlotRunner(spec, load(spec, cache_dir=folder), StepTimer(Stopwatch(60.0)), cache, JobTable())


def asked(prompt: str, *sounds: Medium, cache: bool = False) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(
        prompt=prompt,
        model="m",
        pictures=sounds,
        max_tokens=NUM_WANTED,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
        speculate=False,
        cache=cache,
    )


def run(runner: SlotRunner, request: GenerateRequest) -> tuple[list[int], Finished | Failed]:
    """Tokens and end of the request."""
    runner.accept(prepare(Submit(request_id="r", request=request), runner.prep, 0.0), 0.0)
    tokens: list[int] = []
    while True:
        runner.schedule(0.0)
        runner.step(0.0)
        runner.scheduler.check()
        events = list(runner._jobs.events)
        runner._jobs.events.clear()
        tokens += [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        for event in events:
            if isinstance(event, Finished | Failed):
                return tokens, event


@pytest.mark.long
@pytest.mark.parametrize("duration_s", LENGTHS_S)
def test_a_recording_is_heard_as_the_library_itself_hears_it(runner: SlotRunner, duration_s: float) -> None:
    """SPEC V9: 32 greedy tokens after a recording of each length, with text around it."""
    sound = sound_of(1, duration_s)
    expected = helped(runner.backend, PROMPT, [sound], NUM_WANTED)
    answer, _ = run(runner, asked(PROMPT, sound))
    assert answer == expected


@pytest.mark.parametrize("runner", ["ultravox", "qwen3a"], indirect=True)
def test_recordings_and_text_between_them_are_heard_in_their_order(runner: SlotRunner) -> None:
    """SPEC V9, V2: two that differ, with text around them; what is encoded of each differs too."""
    prompt = f"First {IMAGE_MARKER} and then {IMAGE_MARKER}?"
    sounds = [sound_of(1, 0.4), sound_of(2, 0.7)]
    answer, _ = run(runner, asked(prompt, *sounds))
    assert answer == helped(runner.backend, prompt, sounds, NUM_WANTED)
    first, second = (runner.backend.vision.encode(sound) for sound in sounds)
    assert not np.allclose(first[: len(second)], second[: len(first)], atol=1e-3)


def test_a_recording_that_was_heard_is_not_encoded_again(runner: SlotRunner) -> None:
    """SPEC V9, C11: the second turn takes the first, recording and all, and reads as without that."""
    assert runner._image_encoder is not None
    sound = sound_of(3, 1.0)
    longer = PROMPT + " And what else, if anything at all?"
    run(runner, asked(PROMPT, sound, cache=True))
    num_encoded = runner._image_encoder.num_encoded_total
    answer, end = run(runner, asked(longer, sound, cache=True))
    assert answer == helped(runner.backend, longer, [sound], NUM_WANTED)
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens > 12
    assert runner._image_encoder.num_encoded_total == num_encoded


@pytest.mark.parametrize("form", ParkForm)
def test_parked_in_the_middle_of_a_recording_the_answer_is_the_same(
    runner: SlotRunner, form: ParkForm
) -> None:
    """SPEC V9, Q4: in each form, while the recording is computed and while it decodes."""
    sound = sound_of(5, 1.0)
    expected = helped(runner.backend, PROMPT, [sound], NUM_WANTED)
    live = prepare(Submit(request_id="r", request=asked(PROMPT, sound)), runner.prep, 0.0)
    sequence, num_parked, num_turns = live.choices[0].sequence, 0, 0
    runner.accept(live, 0.0)
    while sequence.state is not SequenceState.DONE:
        num_turns += 1
        if num_parked < MOST_PARKED and num_turns % 3 == 0 and sequence.is_running and sequence.num_computed:
            num_parked += 1
            moved = runner.scheduler.park(sequence, form, 0.0)
            carry_out(moved.ops, runner.backend, runner.scheduler.allocator)
        runner.schedule(0.0)
        runner.step(0.0)
    answer = [token for event in runner._jobs.events if isinstance(event, Delta) for token in event.token_ids]
    runner._jobs.events.clear()
    assert answer == expected
    assert num_parked == MOST_PARKED


def test_the_library_says_what_the_header_does(runner: SlotRunner) -> None:
    """SPEC V9: samples a second; memory of an encode is within the estimate."""
    vision = runner.backend.vision
    header = read_projector(vision.path)
    assert header.hearing is not None
    assert runner.backend.capabilities.hears_hz == header.hearing.rate_hz == vision.hears_hz
    assert not runner.backend.capabilities.has_vision
    assert vision._compute_bytes <= header.compute_bytes


@pytest.mark.parametrize("sound", [sound_of(1, 0.05), sound_of(1, 1.0, rate_hz=8000)], ids=["short", "rate"])
def test_what_would_end_the_process_is_refused(runner: SlotRunner, sound: Sound) -> None:
    """SPEC V9: a recording that is too short, or of another rate, is a 400 before the library sees it."""
    with pytest.raises(InvalidRequestError):
        prepare(Submit(request_id="r", request=asked(PROMPT, sound)), runner.prep, 0.0)


def test_a_projector_with_too_few_positions_is_broken(tmp_path: Path) -> None:
    """SPEC V9: the library would end the process at its first window."""
    path = write_listener(tmp_path / "p.gguf", num_positions=1499)
    with pytest.raises(ModelFileError, match="1499 positions"):
        read_projector(path)


def test_a_projector_whose_stacks_the_library_counts_otherwise_is_broken(tmp_path: Path) -> None:
    """SPEC V9: 1500 tokens in eights; the library would end the process at the end of the first encode."""
    path = write_listener(tmp_path / "p.gguf", stack=8)
    with pytest.raises(ModelFileError, match="188, where 187"):
        read_projector(path)


def test_an_encode_that_is_given_up_before_its_spectrogram_is_there_holds_up_nobody(
    runner: SlotRunner,
) -> None:
    """SPEC V9: cancelled after a first slice that is too short; the next encode is right."""
    vision = runner.backend.vision
    vision.begin(sound_of(1, 20.0)).run(1e-9)
    vision._encoding.cancel()
    again = vision.encode(sound_of(2, 0.5))
    assert np.array_equal(again, vision.encode(sound_of(2, 0.5)))


def test_pictures_and_recordings_stand_in_one_prompt(tmp_path: Path) -> None:
    """SPEC V9, V2: a projector that does both; each is what llama.cpp's helper makes of it."""
    model = write_llama(tmp_path / "m.gguf")
    runner = runner_of("both", tmp_path, model, write_listener(tmp_path / "p.gguf", "qwen3a", sees=True))
    try:
        assert runner.backend.capabilities.has_vision
        assert runner.backend.capabilities.hears_hz == 16_000
        header = read_projector(tmp_path / "p.gguf")
        assert header.hearing is not None
        assert (header.kind, header.hearing.kind) == ("mlp", "qwen3a")
        prompt = f"What you see {IMAGE_MARKER} and hear {IMAGE_MARKER} is?"
        media = [picture_of(1), sound_of(1, 0.5)]
        answer, _ = run(runner, asked(prompt, *media))
        assert answer == helped(runner.backend, prompt, media, NUM_WANTED)
    finally:
        runner.close()
