"""Compiling constraints: what is taken, what is refused and why, limits, the cache."""

import gc
import json
import threading
import weakref

import numpy as np
import pytest

from smol_vocabulary import grammar_tokenizer, tokens
from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.compiler import GrammarCompiler
from stoker.grammar.limits import MAX_EXPANDED_CHARS, expanded_size
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

BYTES = GrammarTokenizer(FakeVocabulary(), N_VOCAB)


def schema(value):
    """A constraint of a schema given as Python values."""
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(value))


def regex(source):
    """A constraint of a regex."""
    return Constraint(kind=ConstraintKind.REGEX, source=source)


def lark(source):
    """A constraint of a Lark grammar."""
    return Constraint(kind=ConstraintKind.LARK, source=source)


def choice(*texts):
    """A constraint of a list of texts."""
    return Constraint(kind=ConstraintKind.CHOICE, choices=texts)


def accepts(constraint, text):
    """Whether it takes `text` as a whole."""
    state = compile_grammar(constraint, BYTES).state()
    try:
        for byte in text.encode():
            state.accept(byte)
    except InvalidRequestError:
        return False
    return state.may_end


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            Constraint(kind=ConstraintKind.JSON_OBJECT),
            ['{"a": [1, {}]}', "{}", "{\n    }"],
            ["[]", "1", "{} "],
        ),
        (choice("a", "ab", 'q"\\/\n', "é"), ["a", "ab", 'q"\\/\n', "é"], ["", "abb", "q"]),
        (regex(r"(a|ab)(c|bcd)/?"), ["ac", "abcd", "abbcd/"], ["a", "abc/d"]),
        (lark('start: "x" NUM ("," NUM)*\nNUM: /[0-9]+/'), ["x1", "x1,22"], ["x", "x1,"]),
        (lark('start: %json {"type": "boolean"} "!"'), ["true!"], ["true", "1!"]),
        (
            lark(
                'start: "a" %json {"x-guidance": {"whitespace_flexible": false}, "type": "array",\n'
                '"uniqueItems": false} %json {"const": 1}'
            ),
            ["a[]1", "a[1,1]1"],
            ["a[ ]1", "a[]2"],
        ),
        (schema(True), ["1", "[]"], [""]),
        (schema({"type": "array", "uniqueItems": False}), ["[1,1]"], ["{}"]),
        (schema({"type": "integer", "x-order": 3, "deprecated": True, "examples": [1]}), ["7"], ["7.5"]),
        (schema({"$id": "http://x/y", "type": "null"}), ["null"], ["1"]),
    ],
)
def test_every_kind_takes_its_texts_and_no_others(constraint, good, bad):
    """SPEC D2: JSON Schema, JSON object, regex, choice and Lark."""
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


def test_a_key_cannot_dodge_its_schema_by_another_spelling():
    """SPEC D2: a completed answer validates, so keys have one spelling; so have blanks a bound."""
    constraint = schema(
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    )
    assert accepts(constraint, '{"a": 1, "b": "x"}')
    assert not accepts(constraint, '{"\\u0061": "x"}')
    assert not accepts(constraint, '{"a": 1, "a": "x"}')
    assert not accepts(constraint, '{"a":  1}')
    assert not accepts(constraint, '{"a":\n\n1}')


def test_settings_of_the_grammar_engine_in_a_schema_do_nothing():
    """SPEC D2: `x-guidance` could make the answer something else than JSON."""
    constraint = schema({"x-guidance": {"item_separator": ";"}, "type": "array", "items": {"type": "null"}})
    assert accepts(constraint, "[null,null]")
    assert not accepts(constraint, "[null;null]")


def test_branches_that_exclude_each_other_are_taken_through_references():
    """SPEC D2: `oneOf` of tagged objects, as client libraries write unions."""

    def tagged(name):
        properties = {"kind": {"const": name}, "size": {"type": "integer"}}
        return {
            "type": "object",
            "properties": properties,
            "required": ["kind"],
            "additionalProperties": False,
        }

    constraint = schema(
        {
            "$defs": {"cat": tagged("cat"), "dog": tagged("dog")},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        }
    )
    assert accepts(constraint, '{"kind": "dog", "size": 3}')
    assert not accepts(constraint, '{"kind": "cow"}')


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "integer", "not": {"const": 3}}, r"keyword 'not' is not supported \(at #\)"),
        ({"properties": {"a": {"if": {}}}}, r"keyword 'if' is not supported \(at #/properties/a\)"),
        (
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"contains": 1}}},
            "keyword 'contains' is not supported",
        ),
        ({"type": "integer", "minimun": 3}, "keyword 'minimun' is not supported"),
        ({"type": "string", "nullable": True}, "keyword 'nullable' is not supported"),
        ({"uniqueItems": True}, "keyword 'uniqueItems' is not supported"),
        ({"type": "string", "format": "regex"}, "format 'regex' is not supported"),
        ({"$ref": "http://x/y"}, r"\$ref 'http://x/y' leads outside the schema"),
        ({"$ref": "#/$defs/x"}, r"\$ref '#/\$defs/x' leads nowhere"),
        ({"$ref": "#"}, "no finite text satisfies it"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite text"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "no finite text"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, r"minimum \(5\) is greater than maximum \(2\)"),
        ({"enum": []}, "refused"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "pattern": "a{30000}"}, "a pattern repeats more than 20000"),
        ({"type": "object", "minProperties": 3}, "minProperties 3 is not supported"),
        ({"type": "string", "maxLength": 10**10}, "maxLength must be between 0 and 1000000"),
        ({"type": "integer", "multipleOf": 1000003}, "multipleOf 1000003 is out of range"),
        ({"type": "integer", "multipleOf": True}, "multipleOf must be above 0, got true"),
        ({"type": "integer", "multipleOf": "2"}, 'multipleOf must be above 0, got "2"'),
        ({"type": "integer", "multipleOf": 0}, "multipleOf must be above 0, got 0"),
        (
            {"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]},
            "in common",
        ),
        ({"const": "a\u0000b"}, "const holds a control character"),
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": []}, "properties must be an object"),
        ({"anyOf": {}}, "anyOf must be a list"),
        ([1], "a JSON Schema is an object"),
        (False, "a JSON Schema is an object"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(value, message):
    """SPEC D2: an unsupported keyword is a 400 that names it and is never ignored."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_grammar(schema(value), BYTES)
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(kind=ConstraintKind.JSON_SCHEMA, source='{"a": '), "no JSON: Expecting value: line 1"),
        (regex("("), "unclosed group"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("(a{1000}){1000}"), "regex repeats more than 20000"),
        (regex("a&&^"), "regex|text"),
        (lark('start: "a" b'), r"at 1\(8\): unknown name"),
        (lark('begin: "a"'), "no start rule"),
        (lark("start: x\nx[temperature=0.5]: /a+/"), "'temperature' in line 2 is not supported"),
        (lark('start: %json {"not": {}}'), "keyword 'not' is not supported"),
        (lark('start: ""'), "no text satisfies it"),
        (lark("start: A\nA: /b/ & /c/"), "no text satisfies it"),
        (lark('start: %json {\n"type": "null"\n} x\nx: b'), r"at 4\(4\): unknown name"),
    ],
)
def test_a_malformed_constraint_is_refused_with_its_place(constraint, message):
    """SPEC D2: invalid = 400 naming the place."""
    with pytest.raises(InvalidRequestError, match=message):
        compile_grammar(constraint, BYTES)


def nested(depth):
    """Objects in one another."""
    value = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def joined(count, width):
    """`allOf` of `anyOf`: as many combinations as width to the power of count."""
    part = [{"properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]} for i in range(width)]
    return {"allOf": [{"anyOf": part} for _ in range(count)]}


PATHOLOGICAL = {
    "nested": schema(nested(14)),
    "joined": schema(joined(5, 8)),
    "joined more": schema(joined(12, 4)),
    "many optional": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    ),
    "large enum": schema({"enum": [f"v{i}" for i in range(9000)]}),
    "many items": schema({"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
    "long": schema({"type": "string", "minLength": 10**6}),
    "multiple": schema({"type": "integer", "multipleOf": 19_997}),
    "patterns": schema({"allOf": [{"type": "string", "pattern": f"({c}.*){{20}}"} for c in "abcdefgh"]}),
    "one long regex": regex("a{20000}"),
    "regex of classes": regex("(\\p{L}{1,50}\\s){1,300}"),
    "late choice": regex("(.|\n)*a(.|\n){2000}"),
    "alternatives": regex("|".join(f"word{i}[a-z]*" for i in range(3000))),
    "lark repeats": lark('start: A\nA: B{1000}\nB: C{1000}\nC: "a"{1000}'),
    "lark doubles": lark(
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'
    ),
    "lark rules": lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(25)) + '\nr25: "a"'
    ),
    "lark endless": lark('start: "a" start'),
    "lark ambiguous": lark('start: s\ns: s s s | "a" | /a+/ | '),
    "lark nots": lark("start: A\nA: " + " & ".join(f"~/(?s:.*)w{i}(?s:.*)/" for i in range(30))),
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_constraint_ends_in_bounded_time(name):
    """SPEC D2: compiled or refused, and its masks are bounded, too; the test's own time limit judges."""
    rng = np.random.default_rng(1)
    refusals = []
    try:
        state = compile_grammar(PATHOLOGICAL[name], grammar_tokenizer()).state()
        for _ in range(40):
            row = rng.standard_normal(grammar_tokenizer().num_vocab, dtype=np.float32)
            state.apply(row)
            state.accept(int(row.argmax()))
            if state.is_complete or int(row.argmax()) in grammar_tokenizer().ends:
                break
    except InvalidRequestError as error:
        refusals.append(error)
    assert all(error.param in {"response_format", "regex", "grammar"} for error in refusals)
    after = compile_grammar(choice("fine"), grammar_tokenizer()).state()
    after.replay(tokens("fine"))
    assert after.is_complete


def test_the_written_out_size_of_a_regex_counts_repetitions_in_repetitions():
    """SPEC D2: what a short regex may cost is known before the engine sees it."""
    assert expanded_size("abc") == 3
    assert expanded_size("a{3}b{2,5}c*") == 9
    assert expanded_size("(ab|c{4}){10}") == 60
    assert expanded_size(r"[{5}()]{2}\({3}\p{L}{2}") == 7
    assert expanded_size("(a{1000}){1000}") == 10**6 > MAX_EXPANDED_CHARS
    assert expanded_size("a{") == expanded_size("(a(b") == 2


def test_the_cache_finds_equal_constraints_and_forgets_the_oldest():
    """SPEC D2: cached by content, bounded; the markers of reasoning are no content."""
    compiler = GrammarCompiler(lambda: BYTES, max_cached=2)
    first = compiler.compile(choice("a", "b"))
    marked = Constraint(kind=ConstraintKind.CHOICE, choices=("a", "b"), reasoning_end="</think>")
    assert compiler.compile(marked) is first
    compiler.compile(regex("a"))
    assert compiler.compile(choice("a", "b")) is first
    compiler.compile(regex("b"))
    assert compiler.stats() == {"cached": 2, "compiled": 3, "hits": 2}
    assert compiler.compile(choice("a", "b")) is first
    compiler.compile(regex("a"))
    assert compiler.stats()["compiled"] == 4


def test_a_grammar_of_another_salt_is_compiled_as_if_nobody_had_sent_it():
    """SPEC C1, D2: how long it takes does not tell one caller of another's."""
    compiler = GrammarCompiler(lambda: BYTES)
    for salt in ("first", "second", ""):
        before = compiler.stats()["compiled"]
        for _ in range(2):
            compiler.state(choice("a", "b"), salt)
        assert compiler.stats()["compiled"] == before + 1


def test_grammars_compile_and_states_are_made_on_several_threads():
    """SPEC D2: compiled off the step loop, used on it."""
    compiler = GrammarCompiler(lambda: BYTES)
    states = []

    def work():
        states.append(compiler.state(choice("yes", "no")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states:
        state.replay(list(b"yes"))
    assert [state.is_complete for state in states] == [True] * 8
    assert compiler.stats()["cached"] == 1


class _SpacedVocabulary(FakeVocabulary):
    """Begins every text with a space of its own, as some vocabularies do."""

    def tokenize(self, text, *, add_special, parse_special):
        return [32, *super().tokenize(text, add_special=add_special, parse_special=parse_special)]


class _EndlessVocabulary(FakeVocabulary):
    """Has no token that ends a generation."""

    @property
    def eog_tokens(self):
        return ()


def test_a_vocabulary_that_puts_a_space_first_spells_texts_exactly():
    """SPEC D2: forced text is cut into tokens that make it up, and nothing else."""
    tokenizer = GrammarTokenizer(_SpacedVocabulary(), N_VOCAB)
    assert tokenizer.plain_tokens_of(b"yes") == list(b"yes")
    assert tokenizer.tokens_of("yes") == list(b"yes")
    state = compile_grammar(choice("yes", "no"), tokenizer).state()
    row = np.zeros(N_VOCAB, np.float32)
    state.apply(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [ord("n"), ord("y")]


def test_a_vocabulary_without_an_end_still_completes():
    """SPEC D2: no token is let through in place of the missing end."""
    state = compile_grammar(regex("ab?"), GrammarTokenizer(_EndlessVocabulary(), N_VOCAB)).state()
    state.accept(ord("a"))
    assert not state.is_complete
    row = np.zeros(N_VOCAB, np.float32)
    state.apply(row)
    assert np.flatnonzero(np.isfinite(row)).tolist() == [ord("b")]
    state.accept(ord("b"))
    assert state.is_complete


def test_a_tokenizer_goes_with_the_last_that_uses_it():
    """SPEC R10: nothing of an unloaded model stays behind; the grammar engine knows no cycles."""
    tokenizer = GrammarTokenizer(FakeVocabulary(), N_VOCAB)
    grammar = compile_grammar(schema({"type": "object"}), tokenizer)
    left = weakref.ref(tokenizer)
    del tokenizer
    assert grammar.tokenizer.plain_tokens_of(b"a") == [ord("a")]
    del grammar
    gc.collect()
    assert left() is None
