"""Texts drawn from constraints on a real vocabulary, judged by independent readers."""

import itertools
import json
import os
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from smol_vocabulary import drawn, grammar_tokenizer
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.gbnf.gbnf import parse_gbnf
from stoker.grammar.gbnf.notation import Alternatives, Chars, Concatenation, Ref, Repeat
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

SUITE_FILE = os.environ.get("STOKER_JSON_SCHEMA_SUITE", "")
"""The public suite, draft 2020-12, as a list of {"name", "schema", "tests": [[instance, is_valid], ...]}."""
SUITE = json.loads(Path(SUITE_FILE).read_text(encoding="utf-8")) if SUITE_FILE else []
needs_suite = pytest.mark.skipif(not SUITE_FILE, reason="STOKER_JSON_SCHEMA_SUITE names no file")
BYTES = GrammarTokenizer(FakeVocabulary(), N_VOCAB)
PATTERNS = (
    r"^[A-Z]{2,4}-\d{3}$",
    r"^(red|green|blue)$",
    r"[aeiou]",
    r"^[a-z]+@[a-z]+\.com$",
    r"^.{3}$",
    r"^[^a-y]*$",
)


def schema_constraint(schema):
    """The constraint of a schema given as Python values."""
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema))


def compiled_or_none(constraint, tokenizer, reason):
    """The grammar, None where the constraint is refused for that reason, which blames its own field."""
    error = None
    try:
        return compile_grammar(constraint, tokenizer)
    except InvalidRequestError as refusal:
        error = refusal
    assert re.search(reason, error.message), error
    assert error.param == constraint.param
    return None


def accepts(grammar, text):
    """Whether a grammar on byte tokens takes `text` as a whole."""
    state = grammar.state()
    try:
        for byte in text.encode():
            state.accept(byte)
    except InvalidRequestError:
        return False
    return state.may_end


class SchemaMaker:
    """Random schemas of the features that answers are asked for with."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def make(self):
        """One schema with an object, a list or anything else at its root."""
        schema = self._any(3)
        if self._random.random() < 0.3:
            node = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
            node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
            node |= {"required": ["name", "next"], "additionalProperties": False}
            schema = {"$defs": {"node": node, "leaf": self._scalar()}, "allOf": [schema]}
            record = self._object(2)
            if "maxProperties" not in record:  # not together with listed properties that may be left out
                schema = {"$defs": schema["$defs"], **record}
                schema["properties"]["chain"] = {"$ref": "#/$defs/node"}
                schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
                schema["required"] = [*schema["required"], "chain"]
        return schema

    def _any(self, depth):
        kinds = [self._scalar]
        if depth:
            kinds += [lambda: self._object(depth - 1)] * 3 + [lambda: self._array(depth - 1)] * 2
            kinds += [lambda: self._union(depth - 1)]
        return self._random.choice(kinds)()

    def _scalar(self):
        pick = self._random
        low = pick.randint(-1000, 1000)
        number = {"type": "number", "minimum": low / 4, "maximum": low / 4 + pick.choice((0.5, 3, 1000))}
        return pick.choice(
            (
                {"type": "string", "minLength": pick.randint(0, 3), "maxLength": pick.randint(3, 12)},
                {"type": "string", "pattern": pick.choice(PATTERNS)},
                {"type": "string", "format": pick.choice(("date", "ipv4", "uuid", "date-time"))},
                {"type": "integer", "minimum": low, "maximum": low + pick.randint(0, 500)},
                {"type": "integer", "exclusiveMinimum": low, "multipleOf": pick.randint(2, 9)},
                number,
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "number", "multipleOf": pick.choice((0.5, 0.25, 3))},
                {"enum": ["a", "ab", "\u00e9\n", 12, None, True, {"k": [1]}][: pick.randint(1, 7)]},
                {"const": pick.choice(("x", 5, False, {"a": 1}))},
                {"type": ["boolean", "null"]},
                {"type": "boolean"},
            )
        )

    def _object(self, depth):
        names = self._random.sample(("id", "name", "größe", "a b", 'q"', "items", "next"), 3)
        listed = {name: self._any(depth) for name in names}
        schema = {"type": "object", "properties": listed}
        schema["required"] = self._random.sample(names, self._random.randint(0, 3))
        rest = self._random.choice((False, None, {"type": "integer"}, "patterns", "map"))
        if rest is False or isinstance(rest, dict):
            schema["additionalProperties"] = rest
        elif rest == "patterns":
            schema |= {"patternProperties": {"^x_": {"type": "boolean"}}, "additionalProperties": False}
        elif rest == "map":
            schema = {"type": "object", "additionalProperties": self._any(0), "maxProperties": 3}
            schema |= {"minProperties": self._random.randint(0, 1), "properties": {}, "required": []}
        return schema

    def _array(self, depth):
        low = self._random.randint(0, 2)
        schema = {"type": "array", "minItems": low, "maxItems": low + self._random.randint(0, 3)}
        if self._random.random() < 0.3:
            return schema | {"prefixItems": [self._any(depth), self._any(0)], "items": self._any(0)}
        return schema | {"items": self._any(depth)}

    def _union(self, depth):
        if self._random.random() < 0.5:
            return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": name}, "value": self._any(depth)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for name in ("circle", "square")
            ]
        }


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_what_is_drawn_from_a_random_schema_validates(part):
    """SPEC D2: every completed answer is valid; 180 schemas on SmolLM2's tokens."""
    num_completed = 0
    for seed in range(part * 30, part * 30 + 30):
        schema = SchemaMaker(seed).make()
        jsonschema.Draft202012Validator.check_schema(schema)
        grammar = compile_grammar(schema_constraint(schema), grammar_tokenizer())
        text = drawn(grammar.state(), np.random.default_rng(seed))
        if text is not None:
            num_completed += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert num_completed >= 27


@needs_suite
def test_the_public_suite_finds_no_invalid_instance_that_is_accepted():
    """SPEC D2: schemas that compile accept no instance that the suite calls invalid; the others name why."""
    num_compiled = 0
    for case in SUITE:
        grammar = compiled_or_none(schema_constraint(case["schema"]), BYTES, "")
        if grammar is None:
            continue
        num_compiled += 1
        for instance, is_valid in case["tests"]:
            text = json.dumps(instance, ensure_ascii=False)
            assert is_valid or not accepts(grammar, text), (case["name"], text)
    assert num_compiled >= 140


@needs_suite
def test_what_is_drawn_from_the_public_suite_validates():
    """SPEC D2: the same schemas, now generated from."""
    num_completed = 0
    for number, case in enumerate(SUITE):
        grammar = compiled_or_none(schema_constraint(case["schema"]), grammar_tokenizer(), "")
        if grammar is None:
            continue
        text = drawn(grammar.state(), np.random.default_rng(number), max_tokens=120)
        if text is not None:
            num_completed += 1
            value = json.loads(text)
            assert jsonschema.Draft202012Validator(case["schema"]).is_valid(value), (case["name"], text)
    assert num_completed >= 120


REGEXES = (
    r"[a-z]+( [a-z]+){0,3}",
    r"\d{4}-(0[1-9]|1[0-2])-\d{2}",
    r"(ab|a|b)*c?",
    r"(?i:yes|no)[.!]?",
    r"[^\x00-\x1f\"]{1,20}",
    r"(é|ü|日本){2,5}",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"x{3,7}(y|z{2})+",
)


@pytest.mark.parametrize("regex", REGEXES)
def test_what_is_drawn_from_a_regex_matches_it_as_a_whole(regex):
    """SPEC D2: Python's own reader agrees."""
    grammar = compile_grammar(Constraint(kind=ConstraintKind.REGEX, source=regex), grammar_tokenizer())
    texts = [drawn(grammar.state(), np.random.default_rng(seed), max_tokens=60) for seed in range(20)]
    completed = [text for text in texts if text is not None]
    assert completed
    for text in completed:
        assert re.fullmatch(regex, text), text


def _ends(node, text, start, table, wanted):
    """Places where a match of `node` that begins at `start` may end; reads what `table` knows of rules."""
    match node:
        case Chars(ranges):
            fits = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
            return {start + 1} if fits else set()
        case Ref(name):
            wanted.add((name, start))
            return table.get((name, start), set())
        case Alternatives(options):
            return {end for option in options for end in _ends(option, text, start, table, wanted)}
        case Concatenation(items):
            places = {start}
            for item in items:
                places = {end for at in places for end in _ends(item, text, at, table, wanted)}
            return places
        case Repeat(item, low, high):
            places, found = {start}, {start} if low == 0 else set()
            for count in range(1, min(high or 99, low + len(text) + 1) + 1):
                places = {end for at in places for end in _ends(item, text, at, table, wanted)}
                found |= places if count >= low else set()
            return found


def _matches(rules, root, text):
    """Whether `text` is of the grammar's language, by a slow reader that takes every split into account."""
    table, wanted = {}, {(root, 0)}
    while True:
        before = {key: set(ends) for key, ends in table.items()}, len(wanted)
        for name, start in sorted(wanted):
            ends = _ends(rules[name], text, start, table, wanted)
            table[name, start] = table.get((name, start), set()) | ends
        if before == (table, len(wanted)):
            return len(text) in table[root, 0]


class GrammarMaker:
    """Random GBNF over a few letters, ambiguous and recursive as it comes."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def make(self):
        """A grammar of one to three rules."""
        names = ["root", "x", "y"][: self._random.randint(1, 3)]
        rules = []
        for name in names:
            rest = f" | {self._node(1, [])}" if self._random.random() < 0.7 else ""
            rules.append(f"{name} ::= {self._node(3, names)}{rest}")
        return "\n".join(rules)

    def _node(self, depth, names):
        pick = self._random.random()
        if depth == 0 or pick < 0.3:
            atoms = ('"a"', '"b"', '"ab"', '"ba"', "[ab]", "[^a-z]", '"c"', '""', *names)
            return self._random.choice(atoms)
        parts = [self._node(depth - 1, names) for _ in range(self._random.randint(2, 3))]
        if pick < 0.55:
            return " ".join(parts)
        if pick < 0.75:
            return f"({' | '.join(parts)})"
        return f"({parts[0]}){self._random.choice(('*', '+', '?', '{1,2}', '{2}', '{,2}'))}"


TEXTS = ["".join(chars) for size in range(6) for chars in itertools.product("abc", repeat=size)]


@pytest.mark.parametrize("part", range(4))
def test_a_gbnf_grammar_means_what_a_slow_reader_says(part):
    """SPEC D2: ambiguity and greed change nothing about the language."""
    num_compiled = 0
    for seed in range(part * 60, part * 60 + 60):
        source = GrammarMaker(seed).make()
        rules, root = parse_gbnf(source)
        constraint = Constraint(kind=ConstraintKind.GBNF, source=source)
        grammar = compiled_or_none(constraint, BYTES, "no (finite )?text satisfies")
        if grammar is None:
            continue
        num_compiled += 1
        for text in random.Random(seed).sample(TEXTS, 60):
            assert accepts(grammar, text) == _matches(rules, root, text), (source, text)
    assert num_compiled >= 45


def test_a_forked_and_a_replayed_state_allow_what_the_first_one_allows():
    """SPEC D2: state survives fork, parking and crash replay."""
    rng = np.random.default_rng(5)
    for seed in range(12):
        grammar = compile_grammar(schema_constraint(SchemaMaker(seed).make()), grammar_tokenizer())
        state, past = grammar.state(), []
        for _ in range(30):
            row = rng.standard_normal(grammar.tokenizer.num_vocab, dtype=np.float32)
            other, third = row.copy(), row.copy()
            twin, replayed = state.fork(), grammar.state()
            replayed.replay(past)
            state.apply(row)
            twin.apply(other)
            replayed.apply(third)
            assert np.array_equal(row, other)
            assert np.array_equal(row, third)
            token = int(row.argmax())
            past.append(token)
            state.accept(token)
            assert replayed.num_tokens == twin.num_tokens == state.num_tokens - 1
            if token in grammar.tokenizer.ends or state.is_complete:
                break
