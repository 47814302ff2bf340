"""GBNF and BNF: what is read, and errors with their place."""

import pytest

from stoker.backends.fake.vocabulary import N_VOCAB, FakeVocabulary
from stoker.errors import InvalidRequestError
from stoker.grammar.compiled import compile_grammar
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

BYTES = GrammarTokenizer(FakeVocabulary(), N_VOCAB)

JSON_GBNF = r"""
# llama.cpp's own JSON grammar
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CALCULATOR_BNF = """
<sum>    ::= <sum> + <digit> | <digit>
<digit>  ::= 0 | 1 | "2" | '3'
"""


def accepts(kind, source, text):
    """Whether the grammar takes `text` as a whole."""
    state = compile_grammar(Constraint(kind=kind, source=source), BYTES).state()
    try:
        for byte in text.encode():
            state.accept(byte)
    except InvalidRequestError:
        return False
    return state.may_end


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a": [1, 2.5e3, {"b": null}], "c": "\\u00e9\\n"}', True),
        ("{\n  }", True),
        ("{}", True),
        ('{"a": 01}', False),
        ('{"a": 1,}', False),
        ("[1]", False),
        ('{"a": "\x7f"}', False),
    ],
)
def test_the_json_grammar_of_llama_cpp_reads_json(text, is_valid):
    """SPEC D2: GBNF with classes, escapes, counts, comments and rules over several lines."""
    assert accepts(ConstraintKind.GBNF, JSON_GBNF, text) is is_valid


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= [a-z]* "x"', ["x", "axx", "abx"], ["a", ""]),
        ('root ::= "a" "b" "c" | "ab" "d"', ["abc", "abd"], ["ab"]),
        ('root ::= "(" root ")" | "a"+ | "aa" "b"', ["(aab)", "((aaa))", "aab"], ["(a", "ab"]),
        ('root ::= x* x\nx ::= "a" | "(" root ")"', ["a", "aa(a)"], [""]),
        ('root ::= . "\\u00e9" [\\U0001F600-\\U0001F64F] [\\]\\-a^]{2,}', ["xé😀]-a^", "\né🙏aa"], ["xé😀a"]),
        (
            'root ::= a{2} b{1,} c{,2} d{0,1}\na ::= "a"\nb ::= "b"\nc ::= "c"\nd ::= "d"',
            ["aab", "aabbccd"],
            ["ab"],
        ),
        ('root ::= root "," item | item\nitem ::= [0-9]+ ("." [0-9]+)?', ["1", "1.5,22"], ["1.", ","]),
        ('root ::= w (" " w)*\nw ::= [a-z]+ | "a b" | "(" root ")"', ["a b", "a c (b a)", "a b c"], [" a"]),
    ],
)
def test_gbnf_takes_all_of_its_language_and_nothing_else(source, good, bad):
    """SPEC D2: the longest match does not hide what follows it."""
    assert [text for text in good if not accepts(ConstraintKind.GBNF, source, text)] == []
    assert [text for text in bad if accepts(ConstraintKind.GBNF, source, text)] == []


def test_bnf_takes_names_in_angle_brackets_and_words_for_themselves():
    """SPEC D2: plain BNF; the first rule is where it starts, left recursion is fine."""
    assert accepts(ConstraintKind.BNF, CALCULATOR_BNF, "1+2+3")
    assert not accepts(ConstraintKind.BNF, CALCULATOR_BNF, "1+")
    assert accepts(ConstraintKind.BNF, "<a> ::= x <b>\n<b> ::= y |", "x")


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ConstraintKind.GBNF, 'root ::= "a', r"GBNF: cannot read '\"a' \(line 1, column 10\)"),
        (ConstraintKind.GBNF, 'root ::= "a"\nx ::= y', r"no rule y \(line 2, column 7\)"),
        (ConstraintKind.GBNF, 'x ::= "a"', "no rule root"),
        (ConstraintKind.GBNF, "\nroot ::= y", r"no rule y \(line 2, column 10\)"),
        (ConstraintKind.GBNF, 'root ::= ("a"', r"not closed \(line 1, column 10\)"),
        (ConstraintKind.GBNF, 'root ::= "a")', r"not open \(line 1, column 13\)"),
        (ConstraintKind.GBNF, "root ::= *", r"'\*' follows nothing"),
        (ConstraintKind.GBNF, 'root ::= "a"{3,2}', r"cannot repeat \{3,2\}"),
        (ConstraintKind.GBNF, 'root ::= "a"{20000}', "at most 10000"),
        (ConstraintKind.GBNF, 'root ::= "a"\nroot ::= "b"', r"root is there twice \(line 2, column 1\)"),
        (ConstraintKind.GBNF, 'root ::= "\\q"', r"unknown escape \\q \(line 1, column 11\)"),
        (ConstraintKind.GBNF, 'root ::= "\\uD800"', "no character"),
        (ConstraintKind.GBNF, "root ::= [z-a]", "backwards"),
        (ConstraintKind.GBNF, "root ::= [^\\U00000000-\\U0010FFFF]", "class without a character"),
        (ConstraintKind.GBNF, "root ::= <think>", "cannot read '<think>'"),
        (ConstraintKind.GBNF, 'root ::= "a" root', "no finite text satisfies the rule root"),
        (ConstraintKind.GBNF, 'root ::= ""', "no text"),
        (ConstraintKind.BNF, "<a> ::= <b>", r"BNF: there is no rule <b> \(line 1, column 9\)"),
        (ConstraintKind.BNF, "x <a> ::= y", r"expected a rule, got 'x' \(line 1, column 1\)"),
    ],
)
def test_a_mistake_in_a_grammar_is_named_with_its_place(kind, source, message):
    """SPEC D2: invalid = 400 naming the place."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_grammar(Constraint(kind=kind, source=source), BYTES)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    "source",
    [
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"',
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= ""',
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(1900)) + '\nr1900 ::= "a"',
        'root ::= s\ns ::= s s | s s s | "a" | [a]+ |',
        "root ::= " + " | ".join(f'"word{i}" root' for i in range(1500)) + ' | "."',
        'root ::= ((("a"{1,9999}){1,9999}){1,9999}){1,9999} root | "b"',
        'root ::= "a"{9999} "b"{9999} root | "c"',
    ],
)
def test_a_grammar_made_to_explode_is_compiled_or_refused(source):
    """SPEC D2: bounded size, depth and time, whatever the rules do; the test's own time limit judges."""
    try:
        state = compile_grammar(Constraint(kind=ConstraintKind.GBNF, source=source), BYTES).state()
        for byte in b"aaaaaaaa":
            state.accept(byte)
    except InvalidRequestError as error:
        assert error.param == "grammar"  # noqa: PT017 - either outcome is fine, an endless one is not
