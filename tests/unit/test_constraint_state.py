"""One choice in its grammar: masks, the end, reasoning first, errors."""

import numpy as np
import pytest

from smol_vocabulary import grammar_tokenizer, tokens, vocabulary
from stoker.backends.fake.vocabulary import BOS, EOS, IM_END, N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind
from stoker.ipc.request import Sampling
from stoker.sampling.sampler import Sampler
from stoker.sampling.truncation import Workspace

BYTES = GrammarTokenizer(FakeVocabulary(), N_VOCAB)


def regex_state(source, tokenizer=BYTES, **markers):
    """A state at the start of a regex."""
    constraint = Constraint(kind=ConstraintKind.REGEX, source=source, **markers)
    return GrammarCompiler(lambda: tokenizer).state(constraint)


def allowed(state, num_vocab=N_VOCAB):
    """Ids of the tokens that may come next."""
    row = np.zeros(num_vocab, np.float32)
    state.apply(row)
    return np.flatnonzero(np.isfinite(row)).tolist()


def test_a_mask_changes_forbidden_logits_only():
    """SPEC D1: the grammar's mask is an edit of the row, in place."""
    state = regex_state("[ab]x")
    row = np.linspace(-5, 5, N_VOCAB, dtype=np.float32)
    before = row.copy()
    state.apply(row)
    kept = [ord("a"), ord("b")]
    assert np.array_equal(row[kept], before[kept])
    assert np.isneginf(np.delete(row, kept)).all()


def test_ends_are_allowed_only_where_the_grammar_may_end():
    """SPEC D2: generation ends when the grammar is complete, and not before."""
    state = regex_state("ab?")
    assert allowed(state) == [ord("a")]
    state.accept(ord("a"))
    assert state.may_end
    assert not state.is_complete
    assert allowed(state) == [ord("b"), EOS, IM_END]
    twin = state.fork()
    state.accept(EOS)
    twin.accept(ord("b"))
    assert twin.is_complete
    assert allowed(twin) == [EOS, IM_END]


def test_control_tokens_are_never_text():
    """SPEC D2: a token without a piece is let through only where a grammar names it."""
    state = regex_state("(.|\n)+")
    assert BOS not in allowed(state)
    assert EOS not in allowed(state)
    lark = Constraint(kind=ConstraintKind.LARK, source='start: <s> "x"')
    assert allowed(compile_grammar(lark, BYTES).state()) == [BOS]


def test_a_real_token_may_span_several_parts_of_a_grammar():
    """SPEC D2: tokens are cut as the model's vocabulary cuts them."""
    constraint = Constraint(kind=ConstraintKind.JSON_OBJECT)
    state = compile_grammar(constraint, grammar_tokenizer()).state()
    answer = tokens('{"name": ["Ada", 1815]}')
    for token in answer:
        assert token in allowed(state, vocabulary().n_vocab)
        state.accept(token)
    assert state.is_complete
    assert state.num_tokens == len(answer)


def test_a_token_that_is_not_allowed_is_an_error_with_its_place():
    """SPEC D2: a replay that does not fit its grammar says so, and says where."""
    state = regex_state("abc")
    with pytest.raises(
        InvalidRequestError, match=r"does not allow token 120 \(b'x'\) after 2 tokens"
    ) as caught:
        state.replay([ord("a"), ord("x")])
    assert caught.value.param == "regex"


def test_a_grammar_that_leads_nowhere_is_an_error_instead_of_a_standstill():
    """SPEC D2: never stuck; Lark rules can promise what no token delivers."""
    lark = Constraint(kind=ConstraintKind.LARK, source='start: "a" B\nB: /b/ & /c/')
    state = compile_grammar(lark, BYTES).state()
    assert allowed(state) == [ord("a")]
    state.accept(ord("a"))
    assert not state.is_complete
    with pytest.raises(InvalidRequestError, match="Lark grammar allows no token after 1 tokens"):
        allowed(state)


def test_a_fork_goes_its_own_way():
    """SPEC D2: choices of one request share a grammar and no state."""
    state = regex_state("(ab|ac)+")
    state.accept(ord("a"))
    assert allowed(state) == [ord("b"), ord("c")]
    twin = state.fork()
    twin.accept(ord("b"))
    assert allowed(twin) == [ord("a"), EOS, IM_END]
    assert allowed(state) == [ord("b"), ord("c")]
    assert (state.num_tokens, twin.num_tokens) == (1, 2)


def test_the_constraint_waits_until_reasoning_has_ended():
    """SPEC D2: inside reasoning the constraint waits, and the generation cannot end there."""
    state = regex_state("yes|no", reasoning_end="</think>")
    for byte in b"so </ </thi </think":
        assert state.is_waiting
        assert byte in allowed(state)
        assert EOS not in allowed(state)
        state.accept(byte)
    assert not state.may_end
    assert not state.is_complete
    state.accept(ord(">"))
    assert not state.is_waiting
    assert allowed(state) == [ord("n"), ord("y")]
    state.replay(list(b"no"))
    assert state.is_complete


def test_a_token_that_ends_reasoning_and_begins_the_answer_is_not_drawn():
    """SPEC D2: what a token says beyond the marker would escape the grammar; blanks may follow."""
    num_vocab = vocabulary().n_vocab
    pieces = {vocabulary().piece(token): token for token in range(num_vocab)}
    state = regex_state("yes", grammar_tokenizer(), reasoning_end="</think>")
    assert pieces[b">>"] in allowed(state, num_vocab)
    state.replay(tokens("hm </think"))
    assert pieces[b">"] in allowed(state, num_vocab)
    assert pieces[b">>"] not in allowed(state, num_vocab)


class _WideVocabulary(FakeVocabulary):
    """Its tokens 1 and 2 are longer than a byte."""

    def special_piece(self, token):
        return {1: b">\n", 2: b">\nye"}.get(token) or super().special_piece(token)


def test_blanks_in_the_token_that_ends_reasoning_are_not_the_grammars():
    """SPEC D2: the end of reasoning and a line break are often one token."""
    tokenizer = GrammarTokenizer(_WideVocabulary(), N_VOCAB)
    state = regex_state("yes", tokenizer, reasoning_end="</think>")
    state.replay(list(b"</think"))
    assert 1 in allowed(state)
    assert 2 not in allowed(state)
    twin = state.fork()
    state.accept(1)
    assert allowed(state) == [ord("y")]
    twin.accept(2)  # from a run that did not mask: what it says beyond the blanks counts
    assert allowed(twin) == [ord("s")]


def test_reasoning_that_may_begin_is_an_offer_beside_the_answer():
    """SPEC D2: a model that opens its reasoning itself may also answer at once."""
    markers = {"reasoning_start": "<think>", "reasoning_end": "</think>"}
    assert allowed(regex_state("yes|no", **markers)) == [ord("<"), ord("n"), ord("y")]
    answering = regex_state("yes|no", **markers)
    answering.replay(list(b"yes"))
    assert answering.is_complete
    thinking = regex_state("yes|no", **markers)
    thinking.accept(ord("<"))
    assert allowed(thinking) == [ord("t")]
    replayed = regex_state("yes|no", **markers)
    text = list(b"<think>yes or no?</think>")
    replayed.replay(text)
    assert allowed(replayed) == [ord("n"), ord("y")]
    for token in text[1:]:
        thinking.accept(token)
    assert allowed(thinking) == allowed(replayed)


def test_control_tokens_can_be_the_markers_of_reasoning():
    """SPEC D2: markers are found in the spelling of tokens, not only in their text."""
    state = regex_state("yes", reasoning_start="<|im_start|>", reasoning_end="<s>")
    state.accept(N_VOCAB - 2)
    assert state.is_waiting
    state.replay([ord("h"), BOS])
    assert allowed(state) == [ord("y")]


def test_a_bias_prefers_among_the_allowed_and_adds_none():
    """SPEC D1: bias and penalties first, then the mask; as the sampler's last edit."""
    state = regex_state("[ab]")
    sampler = Sampler(Sampling(temperature=0.0), 0, [state], Workspace(N_VOCAB))
    row = np.zeros(N_VOCAB, np.float32)
    row[[ord("b"), ord("z")]] = 1.0, 9.0
    token = sampler.draw(row)
    sampler.accept(token)
    assert token == ord("b")
    assert state.is_complete


def test_where_a_bias_forbids_all_that_is_allowed_the_sampler_says_so():
    """SPEC D2: never stuck."""
    sampler = Sampler(Sampling(temperature=0.0), 0, [regex_state("a")], Workspace(N_VOCAB))
    row = np.zeros(N_VOCAB, np.float32)
    row[ord("a")] = -np.inf
    with pytest.raises(InvalidRequestError, match="all are forbidden"):
        sampler.draw(row)


def test_a_grammar_that_grows_too_complex_ends_its_request_alone():
    """SPEC D2: bounded work a step; other states of the engine go on."""
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(25))
    bomb = Constraint(kind=ConstraintKind.LARK, source=f'start: "b" | r0\n{rules}\nr25: "a"')
    other = regex_state("ab")

    def run():
        state = compile_grammar(bomb, BYTES).state()
        for _ in range(2000):
            allowed(state)
            state.accept(ord("a"))

    with pytest.raises(InvalidRequestError, match=r"complex|many|error"):
        run()
    assert allowed(other) == [ord("a")]
