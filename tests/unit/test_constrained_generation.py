"""A choice that is held to a constraint: masks, its end, replay; and control tokens that are spelled out."""

import numpy as np
import pytest

from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.request import FinishReason, GenerateRequest, Sampling
from stoker.sampling import Generation, Workspace

VOCABULARY = FakeVocabulary()
WORKSPACE = Workspace(N_VOCAB)
GRAMMARS = GrammarCompiler(lambda: GrammarTokenizer(VOCABULARY, N_VOCAB))
DATE = Constraint(kind=ConstraintKind.REGEX, source="[0-9]{4}-[0-9]{2}")


def made(constraint=DATE, **fields):
    """A generation under a constraint."""
    known = {"sampling": Sampling(temperature=1.0, seed=7), "constraint": constraint, "max_tokens": 40}
    request = GenerateRequest(prompt="", **known | fields)
    generation = Generation(request, ("r", 0), VOCABULARY, (), WORKSPACE)
    if constraint is not None:
        generation.constrain(GRAMMARS.state(constraint))
    return generation


def rows():
    """Rows of logits, always the same ones."""
    source = np.random.default_rng(3)
    while True:
        yield source.normal(size=N_VOCAB).astype(np.float32)


def written(generation, source):
    """The text to its end."""
    text = ""
    while generation.finish_reason is None:
        text += generation.advance(next(source)).text
    return text


def test_it_ends_where_nothing_more_may_follow():
    """SPEC D2: with the grammar's last token, not after it."""
    generation = made()
    text = written(generation, rows())
    assert len(text) == 7
    assert text[4] == "-"
    assert generation.finish_reason is FinishReason.STOP
    assert len(generation.tokens) == 7


def test_max_tokens_ends_it_before_its_grammar_does():
    """SPEC D4: and says so."""
    generation = made(max_tokens=3)
    assert len(written(generation, rows())) == 3
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("cut", range(7))
def test_a_replayed_one_goes_on_under_the_same_constraint(cut):
    """SPEC D2, L3: parked, crashed or forked, the text is what it would have been."""
    whole = written(made(), rows())
    source, first = rows(), made()
    text = "".join(first.advance(next(source)).text for _ in range(cut))
    second = made()
    second.replay(first.tokens, None)
    assert text + written(second, source) == whole


def test_a_control_token_is_spelled_where_the_request_wants_it():
    """SPEC D7: others stay silent."""
    end = VOCABULARY.eog_tokens[0]
    silent = next(t for t in range(N_VOCAB) if t != end and not VOCABULARY.piece(t))
    name = VOCABULARY.special_piece(silent).decode()
    for spelled, expected in ((), ""), ((name,), name), (("other",), ""):
        generation = made(None, spelled=spelled, sampling=Sampling(temperature=0.0))
        row = np.zeros(N_VOCAB, np.float32)
        row[silent] = 9.0
        assert generation.advance(row).text == expected
