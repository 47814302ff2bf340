"""SmolLM2 with tokens guessed ahead: to the token the same as without, however it is asked (SPEC D9)."""

import msgspec
import numpy as np
import pytest

from conftest import MODEL
from stoker.backends.llama.backend import load
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem
from stoker.cache.prefix_cache import CacheLimits, PrefixCache
from stoker.engine.jobs.prepare import prepare
from stoker.engine.jobs.table import JobTable
from stoker.engine.runners.slots import SlotRunner
from stoker.engine.threads.timer import StepTimer, Stopwatch
from stoker.ipc.commands import Submit
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.events import Delta
from stoker.ipc.model import ModelSpec, Repeatable, Speculation
from stoker.ipc.request import GenerateRequest, Sampling
from stoker.kv.sequence import ParkForm
from stoker.machine.ledger import Ledger
from stoker.speculation.speculator import DraftLength

LIST = "- apples, 3 kg\n- pears, 4 kg\n- flour, 1 kg\n- butter, 250 g\n- sugar, 2 kg\n"
PROMPT = f"The shopping list:\n{LIST}\nThe same list again:\n- apples,"
NUM_TOKENS = 32
REQUESTS = {
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "seeded": {"sampling": Sampling(temperature=0.8, seed=7)},
    "penalties": {"sampling": Sampling(temperature=0.7, seed=3, repeat_penalty=1.05)},
    "logprobs": {"sampling": Sampling(temperature=0.0), "logprobs": 2},
    "stop": {"sampling": Sampling(temperature=0.0), "stop": ("250 g",)},
    "constraint": {
        "sampling": Sampling(temperature=0.9, seed=5),
        "constraint": Constraint(kind=ConstraintKind.REGEX, source="( [0-9]{1,3} k?g\n- [a-z]{3,9},){6}"),
    },
}


class EagerWager(DraftLength):
    """Guesses wherever something repeats, in drafts of changing lengths."""

    num_asked = 0

    def num_worth(self, odds, most, guess_s=0.0, longest_s=0.0):
        """1, 5, 9 ... 25 and again."""
        self.num_asked += 1
        return max(0, min(most, 1 + 4 * (self.num_asked % 7)))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """One model on this thread."""
    spec = ModelSpec(
        id="smol",
        path=str(MODEL),
        num_slots=2,
        n_ctx=2048,
        num_threads=1,
        speculation=Speculation.LOOKUP,
        repeatable=Repeatable.ON,
    )
    backend = load(spec, lambda _: None, tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.speculation.speculator.DraftLength", EagerWager)
        cache = PrefixCache(CacheLimits(), Ledger())
        runner = SlotRunner(spec, backend, StepTimer(Stopwatch(60.0)), cache, JobTable())
    yield runner
    runner.close()


def run(runner, park_every=0, form=ParkForm.CELLS, **fields):
    """A request to its end: its deltas put together by choice; and how many guessed tokens were drawn."""
    known = {"prompt": PROMPT, "model": "smol", "max_tokens": NUM_TOKENS, "ignore_eos": True, "cache": False}
    submit = Submit(request_id="r", request=GenerateRequest(**known | fields))
    live = prepare(submit, runner.prep, 0.0)
    sequences = [choice.sequence for choice in live.choices.values()]
    before = runner.stats()["num_accepted_total"]
    runner.accept(live, 0.0)
    num_turns = 0
    while runner.has_work:
        runner.schedule(0.0)
        runner.step(0.0)
        num_turns += 1
        if park_every and num_turns % park_every == 0 and sequences[0].is_running:
            runner._carry_out(runner.scheduler.park(sequences[0], form, 0.0), 0.0)
    answers = {index: ([], "", []) for index in range(submit.request.n)}
    for event in runner._jobs.events:
        if isinstance(event, Delta):
            tokens, text, logprobs = answers[event.index]
            noted = logprobs + [msgspec.to_builtins(each) for each in event.logprobs or []]
            answers[event.index] = (tokens + event.token_ids, text + event.text, noted)
    runner._jobs.events.clear()
    runner.scheduler.check()
    return answers, runner.stats()["num_accepted_total"] - before


@pytest.mark.long
@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_is_the_same_to_the_bit_with_guessed_tokens(runner, name):
    """SPEC D9: tokens, text and log-probabilities; on a CPU a row does not depend on those beside it."""
    plain, none = run(runner, speculate=False, **REQUESTS[name])
    quick, num_accepted = run(runner, **REQUESTS[name])
    assert none == 0
    assert num_accepted > 5
    assert quick == plain


@pytest.mark.parametrize(
    "form", [ParkForm.CELLS, *(pytest.param(f, marks=pytest.mark.slow) for f in list(ParkForm)[1:])]
)
def test_parked_between_drafts_it_is_still_the_same(runner, form):
    """SPEC D9, Q4: in every form."""
    plain, _ = run(runner, speculate=False, **REQUESTS["greedy"])
    quick, num_accepted = run(runner, park_every=3, form=form, **REQUESTS["greedy"])
    assert num_accepted > 5
    assert quick == plain


@pytest.mark.long
@pytest.mark.parametrize("num_kept", [40, 70])
def test_a_draft_after_a_prompt_whose_logits_were_asked_has_its_own_rows(runner, num_kept):
    """SPEC D9, D6: the prompt's came from another context, which knows nothing of who has its cells now."""
    backend, prompt, more, draft = runner.backend, [*range(1000, 1070)], [7, 8, 9], [500, 501, 502]

    def rows(seq, start, tokens, num_rows):
        return backend.launch(BatchPlan((PlanItem(seq, start, tokens, num_rows),))).rows().copy()

    runner.drop_idle(0.0)
    own, other = backend.capabilities.num_sequences - 2, backend.capabilities.num_sequences - 1
    backend.condition(own, Conditioning(asked=tuple(prompt)))
    rows(own, 0, prompt, len(prompt))
    backend.trim(own, num_kept)
    if num_kept < len(prompt):  # else the same sequence goes on
        backend.condition(own, Conditioning())
    rows(own, num_kept, more, 1)
    drafted = rows(own, num_kept + len(more), draft, len(draft))
    rows(other, 0, prompt[:num_kept] + more, 1)
    plain = [rows(other, num_kept + len(more) + at, [token], 1) for at, token in enumerate(draft)]
    backend.drop(own)
    backend.drop(other)
    assert np.array_equal(drafted, np.concatenate(plain))
