"""From a constraint to text that the grammar engine compiles: checked, translated, nothing compiled.

Its time grows with the text, and more for hostile grammars. It needs no native code, so a worker process does
it.
"""

from __future__ import annotations

import json
import re

from stoker.errors import InvalidRequestError
from stoker.grammar.gbnf.gbnf import parse_bnf, parse_gbnf
from stoker.grammar.gbnf.lexemes import to_lark
from stoker.grammar.json_schema import checked_schema
from stoker.grammar.limits import MAX_QUANTIFIERS, refusal
from stoker.ipc.constraint import Constraint, ConstraintKind, NativeGrammar, Notation

MAX_LARK_RULES = 1000

_JSON_OBJECT = json.dumps({"type": "object"})
# Options of Lark rules that steer sampling, or take back tokens that were delivered: not done here.
# As all patterns here they read each line of a stranger's text once: a rule's head is one line to the engine.
_FOREIGN_OPTION = re.compile(
    r"^[^\S\n]*+[?!]?[A-Za-z_][\w-]*+[^\S\n]*+\[[^\]\n]*\b(temperature|stop|max_tokens)\s*=", re.MULTILINE
)
_LARK_RULE = re.compile(
    r"^[^\S\n]*+[?!]?[A-Za-z_][\w-]*+[^\S\n]*+(?:\[[^\]\n]*\][^\S\n]*+)?(?:\.\d++[^\S\n]*+)?:", re.MULTILINE
)
_LARK_STRING = re.compile(r'\\.|"(?:\\.|[^"\\\n])*+"')  # and what is escaped outside of them, in a regex
_RULE = re.compile(r"^[^\S\n]*+[?!]?([a-z_][\w-]*+)[^\S\n]*+(?:\[[^\]\n]*\][^\S\n]*+)?:", re.MULTILINE)
_INLINE_SCHEMA = re.compile(r"%json\s*+(?=\{)")


def native_grammar(constraint: Constraint) -> NativeGrammar:
    """What the grammar engine is to compile for `constraint`.

    Raises:
        InvalidRequestError: it is malformed, too large, or asks for what is not supported; `param` is the
            field that the constraint came in.
    """
    try:
        return _native(constraint)
    except InvalidRequestError as error:  # whichever part it was: the caller knows the field that it sent
        error.param = constraint.param
        raise
    except RecursionError:  # brackets behind what only looked like a string or a class to `Constraint`
        text = f"the {constraint.kind.label} nests too deep"
        raise InvalidRequestError(text, param=constraint.param) from None


def _native(constraint: Constraint) -> NativeGrammar:
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
            schema = checked_schema(source) if source else _JSON_OBJECT
            return NativeGrammar(Notation.JSON_SCHEMA, schema)
        case ConstraintKind.REGEX:
            if reason := refusal(source):
                raise InvalidRequestError(f"the regex {reason}", param=constraint.param)
            return NativeGrammar(Notation.REGEX, source)
        case ConstraintKind.CHOICE:
            # One terminal: as several, the longer of two would shadow the shorter that begins it.
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
            lark = f"start: CHOICE\nCHOICE: {texts}\n"
        case ConstraintKind.LARK:
            _check_options(source)
            _check_size(source)
            lark = _with_checked_schemas(source)
        case ConstraintKind.GBNF:
            lark = to_lark(*parse_gbnf(source))
        case ConstraintKind.BNF:
            lark = to_lark(*parse_bnf(source))
    return NativeGrammar(Notation.LARK, lark)


def _check_options(source: str) -> None:
    option = _FOREIGN_OPTION.search(source)
    if option is not None:
        line = source.count("\n", 0, option.start(1)) + 1
        raise InvalidRequestError(
            f"Lark: the option {option[1]!r} in line {line} is not supported", param="grammar"
        )


def _check_size(source: str) -> None:
    """Refuses what the engine, which recurses along rules, would take long for or overrun its stack with."""
    plain = _LARK_STRING.sub("", source)
    num_rules = len(_LARK_RULE.findall(plain))
    if num_rules > MAX_LARK_RULES:
        raise InvalidRequestError(
            f"Lark: {num_rules} rules, at most {MAX_LARK_RULES} are taken", param="grammar"
        )
    if sum(map(plain.count, "?*+")) > MAX_QUANTIFIERS:
        raise InvalidRequestError(f"Lark: more than {MAX_QUANTIFIERS} quantifiers", param="grammar")


def _with_checked_schemas(source: str) -> str:
    """A Lark grammar whose `%json` schemas are checked and rewritten; their own `x-guidance` stays."""
    parts, done = [], 0
    for match in _INLINE_SCHEMA.finditer(source):
        if match.start() < done:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(source, match.end())
        except ValueError:
            continue  # comments, which the engine takes; or it says what is wrong
        text = source[match.end() : end]
        checked = json.loads(_checked_in_rule(text, source[: match.start()]))
        checked |= {name: schema[name] for name in ("x-guidance",) if name in schema}
        lines = "\n" * text.count("\n")  # what follows keeps its line
        parts += [source[done : match.end()], "{", lines, json.dumps(checked)[1:]]
        done = end
    return "".join((*parts, source[done:]))


def _checked_in_rule(schema: str, before: str) -> str:
    """`checked_schema` with errors that name the rule, which is the last one that begins `before`."""
    try:
        return checked_schema(schema)
    except InvalidRequestError as error:
        rules = _RULE.findall(before)
        if rules:
            error.message = f"{error.message}, in the rule {rules[-1]}"
            error.args = (error.message,)
        raise
