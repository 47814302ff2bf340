"""Schemas, regexes and grammars that are made to hurt: refused by name, and soon."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest

from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError
from stoker.grammar import compiled as constraint_compile
from stoker.grammar import matcher as constraint_state
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.gbnf import lexemes as constraint_lexemes
from stoker.grammar.gbnf.gbnf import MAX_RULES
from stoker.grammar.json_schema import MAX_NESTED
from stoker.grammar.limits import MAX_QUANTIFIERS, deepest_path
from stoker.grammar.source import MAX_LARK_RULES, native_grammar
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

BYTES = GrammarTokenizer(FakeVocabulary(), N_VOCAB)
MAX_CALLS = 5_000_000
WRAPPERS = {
    "alone": lambda ref: ref,
    "property": lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
    "items": lambda ref: {"type": "array", "items": ref, "minItems": 1},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "allOf": lambda ref: {"allOf": [ref, {}]},
    "pattern": lambda ref: {
        "type": "object",
        "patternProperties": {"^a": ref},
        "additionalProperties": False,
    },
}


def compiled(kind, source):
    """The grammar on byte tokens."""
    return compile_grammar(Constraint(kind=ConstraintKind(kind), source=source), BYTES)


def chain(wrap, length):
    """A schema of so many definitions, each of which refers to the next."""
    links = {str(i): wrap({"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**links, str(length): {"type": "integer"}}})


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_references_that_lead_too_deep_are_refused(wrap):
    """SPEC D2: natively they would overrun the stack, which ends the engine; a hundred in turn are fine."""
    compiled("json_schema", chain(wrap, 100))
    with pytest.raises(InvalidRequestError, match=rf"by \$ref, at most {MAX_NESTED} may"):
        compiled("json_schema", chain(wrap, 600))


def test_schemas_that_refer_to_each_other_count_together():
    """SPEC D2: in which order the engine meets them is its own business, so each of a tangle counts."""

    def tangle(size):
        refs = [{"$ref": f"#/$defs/{i}"} for i in (1, size // 2, size - 1)]
        node = {"type": "object", "properties": dict(zip("abc", refs, strict=True))}
        return json.dumps({"$ref": "#/$defs/0", "$defs": {str(i): node for i in range(size)}})

    compiled("json_schema", tangle(60))
    long = {str(i): WRAPPERS["property"]({"$ref": f"#/$defs/{(i + 1) % 500}"}) for i in range(500)}
    long = {name: {**schema, "required": []} for name, schema in long.items()}
    with pytest.raises(InvalidRequestError, match="lead into each other"):
        compiled("json_schema", json.dumps({"$ref": "#/$defs/0", "$defs": long}))


def test_the_deepest_path_is_never_told_too_short():
    """SPEC D2: compared with a search of all paths, on random graphs; exact where there is no cycle."""

    def searched(edges, node, seen):
        return 1 + max(
            (searched(edges, child, seen | {child}) for child in edges[node] if child not in seen), default=0
        )

    for seed in range(150):
        rng = random.Random(seed)
        size, is_acyclic = rng.randint(1, 8), seed % 2
        edges = {
            node: [child for child in range(node + 1 if is_acyclic else 0, size) if rng.random() < 0.35]
            for node in range(size)
        }
        longest = searched(edges, 0, {0})
        found = deepest_path(edges, 0)
        assert longest <= found <= size
        assert found == longest or not is_acyclic
    assert deepest_path({i: [i + 1] for i in range(50_000)}, 0) == 50_001


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_does_not_have_is_refused(number):
    """SPEC D2: by name; the grammar engine reads JSON as JSON."""
    with pytest.raises(InvalidRequestError, match="is no number of JSON") as caught:
        compiled("json_schema", f'{{"type": "number", "minimum": {number}}}')
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("regex", r"\p{L}?" * (MAX_QUANTIFIERS + 1), "quantifiers"),
        ("regex", ".*a{2}" * MAX_QUANTIFIERS, "quantifiers"),
        ("lark", "start: /" + ".?" * (MAX_QUANTIFIERS + 1) + "/", "quantifiers"),
        ("json_schema", json.dumps({"pattern": "a?" * (MAX_QUANTIFIERS + 1)}), "quantifiers"),
        ("lark", "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(MAX_LARK_RULES)), "rules"),
        ("gbnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(MAX_RULES)), "rules"),
        ("bnf", "".join(f"<r{i}> ::= a <r{i + 1}>\n" for i in range(MAX_RULES + 1)), "rules"),
    ],
)
def test_what_would_take_long_is_refused_before(kind, source, told):
    """SPEC D2: the work is in the square of these, natively, where nothing stops it."""
    with pytest.raises(InvalidRequestError, match=told):
        compiled(kind, source)


def test_quantifiers_are_told_from_characters():
    """SPEC D2: those in classes, escapes and, in Lark, strings count as nothing."""
    compiled("regex", r"\?[?*+]" * 300)
    compiled("lark", 'start: "' + "?" * 1500 + '"')


def test_lexemes_that_may_all_follow_each_other_are_paired_once(monkeypatch):
    """SPEC D2: pairs of pairs, which would be 200 million here, are not gone through."""
    num_pairs = 0

    def product(*parts):
        nonlocal num_pairs
        num_pairs += len(parts[0]) * len(parts[1])
        return ((one, other) for one in parts[0] for other in parts[1])

    monkeypatch.setattr(constraint_lexemes.itertools, "product", product)
    rules = "".join(f'r{i} ::= "a" r{i + 1} | root "b"\n' for i in range(120))
    grammar = compiled("gbnf", f'root ::= r0\n{rules}r120 ::= "c"\n')
    state = grammar.state()
    for byte in b"a" * 120 + b"c":
        state.accept(byte)
    assert state.may_end
    assert num_pairs < 500_000


def test_an_error_in_a_schema_within_a_grammar_names_the_rule_and_the_callers_field():
    """SPEC D2, D7: whoever forces a call sent `tools`, and no grammar."""
    source = 'start: "x" args_1_look\nargs_1_look: %json {"properties": {"a": {"not": {}}}}\n'
    with pytest.raises(
        InvalidRequestError, match=r"'not' .*#/properties/a\), in the rule args_1_look"
    ) as caught:
        compiled("lark", source)
    assert caught.value.param == "grammar"
    asked = Constraint(kind=ConstraintKind.LARK, source=source, asked_as="tools")
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(asked, BYTES)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", "\n" * 100_000 + "start"),
        ("lark", "start" + " " * 100_000),
        ("lark", "start: %json" + " " * 100_000 + "["),
        ("lark", 'start: "' + '\\"' * 50_000),
        ("lark", "start: /" + "[" * 60 + "x" * 100_000),
        ("gbnf", 'root ::= "a"{' + " " * 100_000),
        ("gbnf", 'root ::= "a"{' + "1" * 100_000 + "}"),
        ("regex", "a{" + "1" * 100_000),
        ("regex", "a{" + "1" * 5000 + "}"),
        ("regex", '"' + "[" * 50_000 + '"'),
        ("regex", '"' + r"\p{" * 40_000 + '"'),
        ("gbnf", '# [\nroot ::= "a" ' + "(" * 3000 + '"a"' + ")" * 3000 + "\n# ]\n"),
        ("lark", "start: %json " + '{"x":"[","allOf":[' * 3000 + "{}" + "]}" * 3000),
    ],
)
def test_what_is_hard_to_read_is_refused_without_reading_it_over_and_over(kind, source):
    """SPEC D2, S4: backtracking in the square of this, or worse, would hold up everybody for minutes."""
    with pytest.raises(InvalidRequestError):
        compiled(kind, source)


@pytest.mark.parametrize("text", ["\n" * 10**6, " \n" * 10**6, "a" + "\n" * 10**6, "<a>" + "\n" * 10**6])
def test_the_notation_of_a_grammar_shows_at_once_however_long_it_is(text):
    """SPEC D2, S4: this runs on the thread that serves everybody; the size is refused afterwards."""
    with pytest.raises(InvalidRequestError, match=r"bytes, at most|is empty"):
        Constraint.of_grammar(text)


@pytest.mark.parametrize(
    "head", ["start[stop=/x/]", "!start[stop=/x/]", "?start [temperature=0.5]", "start[lazy, max_tokens=3]"]
)
def test_an_option_that_steers_sampling_is_refused_however_its_rule_begins(head):
    """SPEC D2: a stop there would take back text that was delivered."""
    with pytest.raises(InvalidRequestError, match="is not supported"):
        compiled("lark", f"{head}: /a*/\n")


HOSTILE_RULES = {
    "in a circle": lambda i: f'r{(i + 1) % 480} "a" | "b" r{(i + 1) % 480} | [a-z]',
    "across": lambda i: (
        f'"(" r{i} ")" r{(i * 7 + 1) % 480} | r{i * 13 % 480} "[" r{i * 3 % 480} | [0-{i % 9}]+'
    ),
    "each optional": lambda i: (
        " ".join(f"r{(i + j) % 480}?" for j in range(1, 4)) + f" [a-{chr(98 + i % 24)}]?"
    ),
    "known one by one": lambda i: f'r{i + 1} root? | "b"' if i < 479 else '"a"',
    "in turns": lambda i: f'([a-z] "{i}" | root "{i}b")*',
    "twice the last": lambda i: f'r{i + 1} r{i + 1} | "{i}"' if i < 479 else "[a-z]",
}


@pytest.mark.parametrize("rule", HOSTILE_RULES.values(), ids=HOSTILE_RULES)
def test_a_grammar_is_translated_in_bounded_work(rule):
    """D2: fixpoints, positions and pairs are counted; one of 13 kB took 28 s, some hundred million calls."""
    rules = "\n".join(f"r{i} ::= {rule(i)}" for i in range(480))
    every = " ".join(f"r{i}?" for i in range(480))
    constraint = Constraint(kind=ConstraintKind.GBNF, source=f"root ::= r0 {every}\n{rules}")
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event in {"call", "c_call"}
        assert num_calls < MAX_CALLS

    sys.setprofile(count)
    try:
        native = native_grammar(constraint)
    finally:
        sys.setprofile(None)
    assert native.text.startswith("start: r0")


@pytest.mark.parametrize("max_steps", [0, 300, 3_000])
@pytest.mark.parametrize(
    ("text", "is_valid"), [("aab1", True), ("b22", True), ("aab", False), ("ab1x", False)]
)
def test_where_the_effort_ends_the_language_is_the_same(monkeypatch, max_steps, text, is_valid):
    """D2: a grammar that is too much work is cut into single characters; it is not refused."""
    monkeypatch.setattr(constraint_lexemes, "_MAX_STEPS", max_steps)
    state = compiled("gbnf", 'root ::= "a"* (pair | root)\npair ::= "b" [0-9]+').state()
    try:
        for byte in text.encode():
            state.accept(byte)
    except InvalidRequestError:
        assert not is_valid
    else:
        assert state.may_end is is_valid


def test_a_grammar_whose_first_token_takes_too_long_is_refused(monkeypatch):
    """D2: items are counted natively, but where rules are ambiguous one may cost a hundred times another."""
    monkeypatch.setattr(constraint_compile, "GRAMMAR_S_AHEAD", 0.0)
    with pytest.raises(InvalidRequestError, match="the GBNF grammar is refused: a token takes") as caught:
        compiled("gbnf", 'root ::= "a"')
    assert caught.value.param == "grammar"


class SlowMatcher:
    """A matcher of which one call takes a second of processor time, by the clock it brings.

    Args:
        matcher: does the work.
        slow: the name of the call.
    """

    def __init__(self, matcher, slow):
        self.now_s = 0.0
        self._matcher = matcher
        self._slow = slow

    def __getattr__(self, name):
        self.now_s += name == self._slow
        return getattr(self._matcher, name)


@pytest.mark.parametrize(("slow", "num_tokens"), [("unsafe_compute_mask_ptr", 9), ("try_consume_tokens", 10)])
def test_a_grammar_that_takes_too_long_to_follow_ends_its_own_request(monkeypatch, slow, num_tokens):
    """D2: every sequence of a step waits for masks and for steps through it: so much a token is saved up."""
    state = compiled("gbnf", 'root ::= "a"*').state()
    matcher = state._matcher = SlowMatcher(state._matcher, slow)
    monkeypatch.setattr(constraint_state, "GRAMMAR_S_AHEAD", 5.0)
    monkeypatch.setattr(constraint_state, "GRAMMAR_S_A_TOKEN", 0.5)
    monkeypatch.setattr(constraint_state.time, "thread_time", lambda: matcher.now_s)
    state._left_s = 5.0

    def follow():
        for _ in range(20):
            state.apply(np.zeros(N_VOCAB, np.float32))
            state.accept(ord("a"))

    expected = rf"takes too long to follow \(1000 ms .* after {num_tokens} tokens"
    with pytest.raises(InvalidRequestError, match=expected):
        follow()
