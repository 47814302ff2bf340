"""From a constraint to a grammar that states are made of: off the step loop, bounded, cached by content.

The grammar engine's own fuel bounds its work; what that does not count is refused before it (schemas in
`constraint_schema`, regexes in `constraint_regex`). Notations other than its own are translated by
`constraint_gbnf`.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from stoker.constraint import Constraint, ConstraintKind
from stoker.decode.constraint_gbnf import parse_bnf, parse_gbnf
from stoker.decode.constraint_lexemes import to_lark
from stoker.decode.constraint_regex import MAX_QUANTIFIERS, refusal
from stoker.decode.constraint_schema import checked_schema
from stoker.decode.constraint_state import DEAD_END, ConstraintState
from stoker.decode.constraint_tokenizer import GrammarTokenizer
from stoker.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 64
MAX_LARK_RULES = 1000

_Key = tuple[str, ConstraintKind, str, tuple[str, ...]]

# Native limits. Fuel is spent at 50,000 a ms to build and 14,000 a ms to step, items at 20,000 a ms: a
# compile stays below 2 s and a mask below 0.1 s, and an object of 2,000 optional properties fits.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=250_000,
    step_lexer_fuel=200_000,
    step_max_items=200_000,
    max_items_in_row=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_JSON_OPTIONS: JsonCompileOptions = {
    # A bound, because small models fill a page with blanks: one space, or a line break with its indentation.
    "whitespace_pattern": r"(?: |\r?\n[ \t]{0,32})",
    # No \uXXXX: a key spelled with one would escape what is said of its plain spelling.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_LABELS = {
    ConstraintKind.JSON_SCHEMA: "JSON Schema",
    ConstraintKind.JSON_OBJECT: "JSON object",
    ConstraintKind.LARK: "Lark grammar",
    ConstraintKind.GBNF: "GBNF grammar",
    ConstraintKind.BNF: "BNF grammar",
}
_JSON_OBJECT = json.dumps({"type": "object"})
_MAX_REASON_CHARS = 400
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


class CompiledGrammar:
    """A grammar on a model's tokens; immutable and safe to use from any thread.

    Attributes:
        tokenizer: whose tokens.
        label: what it is, for messages.
        param: the request field it came in.
    """

    def __init__(self, tokenizer: GrammarTokenizer, prototype: LLMatcher, label: str, param: str) -> None:
        self.tokenizer = tokenizer
        self.label = label
        self.param = param
        self._prototype = prototype
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"CompiledGrammar({self.label})"

    def state(self, *, reasoning_start: str = "", reasoning_end: str = "") -> ConstraintState:
        """A state at the start of the grammar; the markers as in `Constraint`."""
        with self._lock:
            matcher = self._prototype.deep_copy()
        return ConstraintState(self, matcher, reasoning_start, reasoning_end)


class GrammarCompiler:
    """Compiles for one model and remembers what it has compiled. Safe to use from several threads.

    Args:
        make_tokenizer: makes the model's, which takes a quarter of a second: with the first grammar.
        max_cached: grammars that are remembered; beyond it the one not used for longest is forgotten.
    """

    def __init__(self, make_tokenizer: Callable[[], GrammarTokenizer], max_cached: int = MAX_CACHED) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: GrammarTokenizer | None = None
        self._max_cached = max_cached
        self._cached: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._num_hits = 0
        self._num_compiled = 0

    def __repr__(self) -> str:
        return f"GrammarCompiler({self.stats()})"

    def stats(self) -> dict[str, int]:
        """Grammars cached, compiled and found in the cache."""
        return {"cached": len(self._cached), "compiled": self._num_compiled, "hits": self._num_hits}

    def compile(self, constraint: Constraint, salt: str = "") -> CompiledGrammar:
        """The grammar of `constraint`; may take a second. Raises InvalidRequestError.

        A grammar that was compiled for another `salt` is not used again: the time would tell of it (SPEC C1).
        """
        key = (salt, constraint.kind, constraint.source, constraint.choices)
        with self._lock:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
                self._num_hits += 1
                return found
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            tokenizer = self._tokenizer
        grammar = compile_grammar(constraint, tokenizer)
        with self._lock:
            self._num_compiled += 1
            self._cached[key] = grammar
            self._cached.move_to_end(key)
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)
        return grammar

    def state(self, constraint: Constraint, salt: str = "") -> ConstraintState:
        """A state at the start of `constraint`, reasoning included; `salt` and errors as in `compile`."""
        grammar = self.compile(constraint, salt)
        return grammar.state(
            reasoning_start=constraint.reasoning_start, reasoning_end=constraint.reasoning_end
        )


def compile_grammar(constraint: Constraint, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """Compile `constraint` for a model's tokens.

    Raises:
        InvalidRequestError: it is malformed, too large or too complex, asks for what is not supported, or no
            text satisfies it; the message names the place or the keyword.
    """
    label = _LABELS.get(constraint.kind, constraint.kind.value)
    try:
        source = _native_source(constraint)
    except InvalidRequestError as error:  # whichever part it was: the caller knows the field that it sent
        error.param = constraint.param
        raise
    except RecursionError:  # brackets behind what only looked like a string or a class to `Constraint`
        raise InvalidRequestError(f"the {label} nests too deep", param=constraint.param) from None
    matcher = LLMatcher(tokenizer.native, source, log_level=0, limits=_LIMITS)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() and not matcher.get_error().startswith(DEAD_END):
        raise InvalidRequestError(f"the {label} is refused: {_reason(matcher)}", param=constraint.param)
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    allowed[tokenizer.native_ends] = 0
    if matcher.is_error() or not allowed.any():
        raise InvalidRequestError(f"the {label} is refused: no text satisfies it", param=constraint.param)
    return CompiledGrammar(tokenizer, matcher, label, constraint.param)


def _native_source(constraint: Constraint) -> str:
    """The grammar as the engine reads it, made by its own functions, which judge nothing yet."""
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
            schema = checked_schema(source) if source else _JSON_OBJECT
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case ConstraintKind.REGEX:
            if reason := refusal(source):
                raise InvalidRequestError(f"the regex {reason}", param=constraint.param)
            return LLMatcher.grammar_from_regex(source)
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
    return LLMatcher.grammar_from_lark(lark)


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


def _reason(matcher: LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
