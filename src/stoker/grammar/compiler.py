"""The grammars of one model: compiled off the step loop, remembered by content.

What compiles them is imported with the first one: its library takes memory that most engines never need.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.grammar.matcher import ConstraintState
from stoker.grammar.tokenizer import GrammarTokenizer
from stoker.ipc.constraint import Constraint, ConstraintKind

if TYPE_CHECKING:
    from stoker.grammar.compiled import CompiledGrammar

MAX_CACHED = 64

_Key = tuple[str, ConstraintKind, str, tuple[str, ...]]


class GrammarCompiler:
    """Compiles for one model and remembers what it has compiled. Safe to use from several threads.

    Args:
        make_tokenizer: makes the model's, with the first grammar: a quarter of a second for 49,152 tokens,
            about a second for 151,936.
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

    def has(self, constraint: Constraint, salt: str = "") -> bool:
        """Whether it is compiled; never waits for one that is being compiled."""
        return _key(constraint, salt) in self._cached

    def compile(self, constraint: Constraint, salt: str = "") -> CompiledGrammar:
        """The grammar of `constraint`; may take a second. Raises InvalidRequestError.

        A grammar that was compiled for another `salt` is not reused: the time would reveal it (SPEC C1).
        """
        from stoker.grammar.compiled import compile_grammar  # noqa: PLC0415 - see above

        key = _key(constraint, salt)
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


def _key(constraint: Constraint, salt: str) -> _Key:
    return salt, constraint.kind, constraint.source, constraint.choices
