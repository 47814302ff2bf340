"""SmolLM2 parked every twenty tokens in each form: the same tokens and the same text as undisturbed."""

from dataclasses import dataclass
from functools import cache

import pytest

from conftest import MODEL
from stoker.backends.llama.backend import load
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.runners.steps import carry_out
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.commands import Submit
from stoker.ipc.events import Delta, Finished
from stoker.ipc.model import ModelSpec, Repeatable
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.kv.sequence import ParkForm, SequenceState
from stoker.machine.ledger import Ledger

NUM_TOKENS = 220
NUM_QUICK = 1
"""Of the samplings; with the others it takes minutes."""
FORMS = [pytest.param(form, marks=pytest.mark.slow) if form is ParkForm.TOKENS else form for form in ParkForm]
"""Tokens are computed again each time: half a minute."""
PARK_EVERY = 20
PROMPT = "Here is a long list of things that can be found in a kitchen, one after the other:"
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=0.8, seed=7, repeat_penalty=1.1),
    "mirostat": Sampling(mirostat=2, seed=7),
}


@dataclass
class Outcome:
    """What a request got."""

    tokens: list[int]
    text: str
    reason: str
    num_preemptions: int


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """One model on this thread."""
    spec = ModelSpec(
        id="smol", path=str(MODEL), num_slots=2, n_ctx=8192, num_threads=1, repeatable=Repeatable.ON
    )
    backend = load(spec, lambda _: None, tmp_path_factory.mktemp("cache"))
    cache = PrefixCache(CacheLimits(), Ledger())
    runner = SlotRunner(spec, backend, StepTimer(Stopwatch(60.0)), cache, JobTable())
    yield runner
    runner.close()


def run(runner, sampling, form=None, stop=()):
    """So many tokens; with a form, parked in it each 20 tokens, and moved about in the pool by a visitor."""
    request = GenerateRequest(
        prompt=PROMPT, model="smol", max_tokens=NUM_TOKENS, sampling=sampling, ignore_eos=True, stop=stop
    )
    live = prepare(Submit(request_id="r", request=request), runner.prep, 0.0)
    sequence = live.choices[0].sequence
    runner.accept(live, 0.0)
    parked_at = 0
    while sequence.state is not SequenceState.DONE:
        if form is not None and sequence.num_generated >= parked_at + PARK_EVERY and sequence.is_running:
            parked_at = sequence.num_generated
            park(runner, sequence, form)
        turn(runner)
    events = list(runner._jobs.events)
    runner._jobs.events.clear()
    deltas = [event for event in events if isinstance(event, Delta) and event.request_id == "r"]
    (finished,) = [event for event in events if isinstance(event, Finished) and event.request_id == "r"]
    return Outcome(
        [token for delta in deltas for token in delta.token_ids],
        "".join(delta.text for delta in deltas),
        deltas[-1].finish_reason,
        finished.timings.num_preemptions,
    )


def park(runner, sequence, form):
    """Out of its slot in that form; a visitor uses the cells meanwhile."""
    scheduler = runner.scheduler
    carry_out(scheduler.park(sequence, form, 0.0).ops, runner.backend, scheduler.allocator)
    assert sequence.form is form
    scheduler.pause(sequence, 0.0)
    visit = GenerateRequest(
        prompt="A visitor says:", model="smol", max_tokens=3, sampling=Sampling(temperature=0.0)
    )
    visitor = prepare(Submit(request_id="visitor", request=visit), runner.prep, 0.0)
    runner.accept(visitor, 0.0)
    while visitor.choices:
        turn(runner)
    scheduler.resume(sequence, 0.0)


def turn(runner):
    """One step."""
    runner.schedule(0.0)
    runner.step(0.0)
    runner.scheduler.check()


@pytest.fixture(scope="module")
def undisturbed(runner):
    """A sampling's tokens without any parking."""
    return cache(lambda name: run(runner, SAMPLINGS[name]))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name",
    [
        name if at < NUM_QUICK else pytest.param(name, marks=pytest.mark.slow)
        for at, name in enumerate(SAMPLINGS)
    ],
)
def test_parked_every_twenty_tokens_the_text_is_the_undisturbed_one(runner, undisturbed, name, form):
    """Q4: token-identical for cells and snapshots, and with quantised weights on a CPU for tokens too."""
    outcome = run(runner, SAMPLINGS[name], form)
    assert outcome.num_preemptions == NUM_TOKENS // PARK_EVERY - 1
    assert outcome.tokens == undisturbed(name).tokens
    assert outcome.text == undisturbed(name).text


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_stop_string_half_matched_when_it_is_parked_still_matches_or_is_let_go(runner, undisturbed, form):
    """Q4, D3: what was held back at the parking is held on, then cut or delivered."""
    whole = undisturbed("greedy")
    pieces = [runner.backend.vocabulary.piece(token).decode() for token in whole.tokens]
    ends = [sum(map(len, pieces[: at + 1])) for at in range(len(pieces))]
    boundary = ends[10 * PARK_EVERY - 1]  # what was said when it is parked for the tenth time
    straddling = whole.text[boundary - 6 : boundary + 6]
    begun = whole.text[boundary - 6 : boundary] + "\x00 never said"
    let_go = run(runner, SAMPLINGS["greedy"], form, stop=(begun,))
    assert (let_go.text, let_go.reason) == (whole.text, "length")
    cut = run(runner, SAMPLINGS["greedy"], form, stop=(begun, straddling))
    assert cut.reason == "stop"
    assert cut.text == whole.text[: whole.text.index(straddling)]
