"""From a constraint to a grammar that states are made of: off the step loop, bounded.

The grammar engine's own fuel bounds its work; what that does not count is refused, and other notations are
translated, by `source` before, mostly in a worker process of the client.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from stoker.errors import InvalidRequestError
from stoker.grammar.matcher import DEAD_END, GRAMMAR_S_AHEAD, ConstraintState
from stoker.grammar.source import native_grammar
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, NativeGrammar, Notation

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_SCHEMA_ITEMS, _RULE_ITEMS = 200_000, 50_000
_JSON_RULE = "%json"
_JSON_OPTIONS: JsonCompileOptions = {
    # A bound, because small models fill a page with blanks: one space, or a line break with its indentation.
    "whitespace_pattern": r"(?: |\r?\n[ \t]{0,32})",
    # No \uXXXX: a key spelled with one would escape what is said of its plain spelling.
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_MAX_REASON_CHARS = 400


def _limits(native: NativeGrammar) -> LLParserLimits:
    """How much native work a grammar may be.

    Fuel is spent at 50,000 a ms to build and 14,000 a ms to step, a schema's items at 2,000 to 20,000 a ms:
    some 500 optional properties of one object fit. Rules can be so ambiguous that 75 items take a ms.
    """
    is_schema = native.notation is Notation.JSON_SCHEMA or _JSON_RULE in native.text
    return LLParserLimits(
        initial_lexer_fuel=250_000,
        step_lexer_fuel=200_000,
        step_max_items=_SCHEMA_ITEMS if is_schema else _RULE_ITEMS,
        max_items_in_row=10_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


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


def compile_grammar(constraint: Constraint, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """Compile `constraint` for a model's tokens.

    Raises:
        InvalidRequestError: it is malformed, too large or too complex, asks for what is not supported, or no
            text satisfies it; the message names the place or the keyword.
    """
    label = constraint.kind.label
    native = constraint.native or native_grammar(constraint)
    # Both calls leave the interpreter's lock to others while they compute.
    matcher = LLMatcher(tokenizer.native, _engine_source(native), log_level=0, limits=_limits(native))
    started_s = time.thread_time()
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    mask_s = time.thread_time() - started_s
    if mask_s > GRAMMAR_S_AHEAD:
        text = f"the {label} is refused: a token takes {mask_s:.1f} s, at most {GRAMMAR_S_AHEAD} s may be had"
        raise InvalidRequestError(text, param=constraint.param)
    if matcher.is_error() and not matcher.get_error().startswith(DEAD_END):
        raise InvalidRequestError(f"the {label} is refused: {_reason(matcher)}", param=constraint.param)
    allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    allowed[tokenizer.native_ends] = 0
    if matcher.is_error() or not allowed.any():
        raise InvalidRequestError(f"the {label} is refused: no text satisfies it", param=constraint.param)
    return CompiledGrammar(tokenizer, matcher, label, constraint.param)


def _engine_source(native: NativeGrammar) -> str:
    """The grammar as the engine reads it, made by its own functions, which judge nothing yet."""
    match native.notation:
        case Notation.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(native.text, overrides=_JSON_OPTIONS)
        case Notation.REGEX:
            return LLMatcher.grammar_from_regex(native.text)
        case Notation.LARK:
            return LLMatcher.grammar_from_lark(native.text)


def _reason(matcher: LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
