"""From rules to the grammar engine's Lark: what is cut into lexemes, so that the language stays the same.

The engine matches lexemes (regexes) greedily: of all that are possible at a place the longest wins, and the
next begins where it ends. That is quick, and wrong for rules whose meaning needs a shorter match. So the
parts without recursion become lexemes as large as can be, and wherever the longest match could take what
belongs to what follows, both parts are cut smaller, down to single characters, which cannot clash.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from functools import reduce
from operator import or_

from stoker.errors import InvalidRequestError
from stoker.grammar.gbnf.automaton import Automaton, Overlong, meet, union
from stoker.grammar.gbnf.notation import (
    Alternatives,
    Chars,
    Concatenation,
    Lexeme,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    is_nullable,
    parts,
    references,
    rules_that,
    walk,
)
from stoker.grammar.limits import Effort, Exhausted

# Beyond these everything is cut into single characters: slower masks, the same language.
_MAX_ROUNDS = 40
_MAX_STEPS = 800_000  # of a microsecond: under a second
_PAIRS_A_STEP = 2  # so many pairs are made in the time of a step
_MAX_LEXEMES = 500
# Rules nested deeper than this are no part of a lexeme, which keeps what recurses over lexemes shallow.
_MAX_FLAT_DEPTH = 50


def to_lark(rules: Rules, root: str) -> str:
    """The grammar in the engine's notation.

    Raises:
        InvalidRequestError: no finite text satisfies it.
    """
    if root not in rules_that(rules, are_chars=True):
        raise InvalidRequestError(f"no finite text satisfies the rule {root}", param="grammar")
    return _Cutter(rules, root).lark()


class _Cutter:
    """Cuts one grammar into lexemes; the work is counted, and where it is too much everything is cut."""

    def __init__(self, rules: Rules, root: str) -> None:
        self._rules = rules
        self._root = root
        self._nullable = rules_that(rules, are_chars=False)
        self._effort = Effort(_MAX_STEPS)
        self._flat = self._without_recursion()
        self._flat_nodes: set[Node] = set()
        for node in rules.values():
            self._note_flat(node)
        self._alone: set[Node] = set()  # not joined with its neighbours
        self._cut: set[Node] = set()  # no lexeme, its parts are
        self._forms: dict[str, Node] = {}
        self._automata: dict[tuple[Node, ...], Automaton] = {}

    def lark(self) -> str:
        try:
            is_done = self._cut_clashing()
        except Exhausted:
            is_done = False
        if not is_done:
            self._cut_everything()
            self._effort = Effort(sys.maxsize)  # what is left is done once, in linear time
            self._lower_reachable()
        return _Writer(self._rules, self._forms, self._nullable).text(self._root)

    def _cut_clashing(self) -> bool:
        """Cut until nothing clashes; False: that takes too many rounds. Raises Exhausted."""
        for _ in range(_MAX_ROUNDS):
            self._lower_reachable()
            clashing = self._clashing()
            if not clashing:
                return True
            for lexeme in clashing:
                (self._alone if len(lexeme.items) > 1 else self._cut).update(lexeme.items)
        return False

    def _without_recursion(self) -> set[str]:
        used = {name: set(references(node)) for name, node in self._rules.items()}
        flat: set[str] = set()
        for _ in range(_MAX_FLAT_DEPTH):
            flat |= {name for name, names in used.items() if names <= flat}
        return flat

    def _note_flat(self, node: Node) -> bool:
        """Whether a tree leads to no recursion; if so, it is noted."""
        below = [self._note_flat(part) for part in parts(node)]
        is_flat = node.name in self._flat if isinstance(node, Ref) else all(below)
        if is_flat:
            self._flat_nodes.add(node)
        return is_flat

    def _cut_everything(self) -> None:
        waiting = list(self._rules.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(parts(node))
            (self._alone if isinstance(node, Chars) else self._cut).add(node)

    def _lower_reachable(self) -> None:
        self._forms = {}
        waiting = [self._root]
        while waiting:
            name = waiting.pop()
            if name in self._forms:
                continue
            form = self._lower(self._rules[name])
            self._forms[name] = form
            for part in walk(form):
                self._effort.spend(1)
                if isinstance(part, Ref):
                    waiting.append(part.name)

    def _is_flat(self, node: Node) -> bool:
        return node not in self._cut and node in self._flat_nodes

    def _lower(self, node: Node) -> Node:
        if self._is_flat(node):
            return Lexeme((node,))
        match node:
            case Ref(name):
                return Ref(name)
            case Alternatives(options):
                return Alternatives(tuple(map(self._lower, options)))
            case Repeat(item, low, high):
                return Repeat(self._lower(item), low, high)
            case Concatenation(items):
                return Concatenation(tuple(self._runs(items)))
        return Lexeme((node,))

    def _runs(self, items: tuple[Node, ...]) -> list[Node]:
        """Items of a sequence, those without recursion joined with their neighbours."""
        forms: list[Node] = []
        run: list[Node] = []
        for item in items:
            joins = self._is_flat(item) and item not in self._alone
            if not joins and run:
                forms.append(Lexeme(tuple(run)))
                run = []
            if joins:
                run.append(item)
            else:
                forms.append(self._lower(item))
        return [*forms, Lexeme(tuple(run))] if run else forms

    def _clashing(self) -> list[Lexeme]:
        """Lexemes of which one could take what another one, or what follows, should have.

        Two are possible at one place at the start, and after two that one text could match.
        """
        lexemes = _lexemes(self._forms.values())
        try:
            automata = [self._automaton(lexeme) for lexeme in lexemes[: _MAX_LEXEMES + 1]]
        except Overlong:
            automata = []
        if len(automata) != len(lexemes):  # too much to compare
            return list(filter(self._can_cut, lexemes))
        follow = _Follow(self._forms, self._root, self._nullable, lexemes, self._effort)
        found = self._clashes(automata, follow)
        return [lexeme for number, lexeme in enumerate(lexemes) if number in found and self._can_cut(lexeme)]

    def _clashes(self, automata: list[Automaton], follow: _Follow) -> set[int]:
        """Numbers of the lexemes that clash with another one."""
        found: set[int] = set()
        chars: dict[int, Ranges] = {}
        paired: set[tuple[int, int]] = set()
        seen: set[tuple[int, int]] = set()
        waiting = self._pairs((follow.first, follow.first), seen)
        while waiting:
            one, other = waiting.pop()
            behind = (follow.after[one], follow.after[other])
            if behind[0] not in chars:
                parts_behind = (automata[number].first_ranges for number in _numbers(behind[0]))
                chars[behind[0]] = union(parts_behind, self._effort)
            meeting = meet(automata[one], automata[other], chars[behind[0]], self._effort)
            if meeting.has_clash:
                found.update((one, other))
            if meeting.has_match and behind not in paired:  # many lexemes have the same ones behind them
                paired.add(behind)
                waiting += self._pairs(behind, seen)
        return found

    def _pairs(self, sets: tuple[int, int], seen: set[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs of lexemes of two sets that were not seen before; now they are."""
        one, other = map(_numbers, sets)
        self._effort.spend(len(one) * len(other) // _PAIRS_A_STEP)
        fresh = set(itertools.product(one, other)) - seen
        seen |= fresh
        return list(fresh)

    def _automaton(self, lexeme: Lexeme) -> Automaton:
        if lexeme.items not in self._automata:
            self._automata[lexeme.items] = Automaton(lexeme.items, self._rules, self._effort)
        return self._automata[lexeme.items]

    def _can_cut(self, lexeme: Lexeme) -> bool:
        return len(lexeme.items) > 1 or not isinstance(lexeme.items[0], Chars)


class _Follow:
    """Which lexemes may stand at the start, and after each one. More than really may, never fewer.

    Sets of lexemes are integers: bit n stands for lexeme n.

    Attributes:
        after: lexemes that may come next, by the number of a lexeme; an empty match of one counts.
    """

    def __init__(
        self,
        forms: dict[str, Node],
        root: str,
        nullable: frozenset[str],
        lexemes: list[Lexeme],
        effort: Effort,
    ) -> None:
        self.after = [0] * len(lexemes)
        self._forms = forms
        self._root = root
        self._nullable = nullable
        self._effort = effort
        self._numbers = {lexeme: number for number, lexeme in enumerate(lexemes)}
        self._may_be_empty = [is_nullable(lexeme, nullable) for lexeme in lexemes]
        self._first = dict.fromkeys(forms, 0)
        self._behind = dict.fromkeys(forms, 0)
        self._fix_first()
        self._moved = dict.fromkeys(forms)
        while self._moved:
            name = next(iter(self._moved))
            del self._moved[name]
            self._walk(forms[name], self._behind[name])

    @property
    def first(self) -> int:
        """Lexemes that may stand at the start."""
        return self._first[self._root]

    def _fix_first(self) -> None:
        users: dict[str, dict[str, None]] = {name: {} for name in self._forms}
        for name, form in self._forms.items():
            for used in references(form):
                users[used][name] = None
        waiting = dict.fromkeys(reversed(self._forms))  # what is used is mostly written below its users
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            first = self._begin(self._forms[name])[0]
            if first != self._first[name]:
                self._first[name] = first
                waiting |= users[name]
                self._effort.spend(len(users[name]) // _PAIRS_A_STEP)

    def _begin(self, form: Node) -> tuple[int, bool]:
        """Lexemes that may come first, and whether the form matches the empty text."""
        self._effort.spend(1)
        match form:
            case Lexeme():
                number = self._numbers[form]
                return 1 << number, self._may_be_empty[number]
            case Ref(name):
                return self._first[name], name in self._nullable
            case Alternatives(options):
                begun = [self._begin(option) for option in options]
                return reduce(or_, (first for first, _ in begun), 0), any(is_empty for _, is_empty in begun)
            case Repeat(item, low, _):
                first, is_empty = self._begin(item)
                return first, is_empty or low == 0
            case Concatenation(items):
                firsts = 0
                for item in items:
                    first, is_empty = self._begin(item)
                    firsts |= first
                    if not is_empty:
                        return firsts, False
                return firsts, True
        raise AssertionError(f"{form!r} is in no lexeme")

    def _walk(self, form: Node, behind: int) -> None:
        self._effort.spend(1)
        match form:
            case Lexeme():
                self.after[self._numbers[form]] |= behind
            case Ref(name):
                if behind & ~self._behind[name]:
                    self._behind[name] |= behind
                    self._moved[name] = None
            case Alternatives(options):
                for option in options:
                    self._walk(option, behind)
            case Repeat(item, _, high):
                self._walk(item, behind if high == 1 else behind | self._begin(item)[0])
            case Concatenation(items):
                for item in reversed(items):
                    self._walk(item, behind)
                    first, is_empty = self._begin(item)
                    behind = behind | first if is_empty else first


class _Writer:
    """Writes Lark: rules in small letters, lexemes and the rules inside them in capitals."""

    def __init__(self, rules: Rules, forms: dict[str, Node], nullable: frozenset[str]) -> None:
        self._rules = rules
        self._forms = forms
        self._nullable = nullable
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lexemes: dict[str, str] = {}
        self._inner: list[str] = []

    def text(self, root: str) -> str:
        lines = [f"start: r{self._numbers[root]}"]
        lines += [f"r{self._numbers[name]}: {self._form(form)}" for name, form in self._forms.items()]
        lines += [f"{name}: {body}" for body, name in self._lexemes.items()]
        written: set[str] = set()
        while self._inner:
            name = self._inner.pop()
            if name not in written:
                written.add(name)
                lines.append(f"R{self._numbers[name]}: {self._node(self._rules[name])}")
        return "\n".join(lines) + "\n"

    def _form(self, form: Node) -> str:
        match form:
            case Lexeme(items):
                name = self._lexemes.setdefault(self._nodes(items), f"T{len(self._lexemes)}")
                return f"{name}?" if is_nullable(form, self._nullable) else name
            case Ref(name):
                return f"r{self._numbers[name]}"
            case Alternatives(options):
                return f"({' | '.join(map(self._form, options))})"
            case Repeat(item, low, high):
                return f"({self._form(item)}){_times(low, high)}"
            case Concatenation(items):
                return f"({' '.join(map(self._form, items))})"
        raise AssertionError(f"{form!r} is in no lexeme")

    def _node(self, node: Node) -> str:
        match node:
            case Chars():
                return self._nodes((node,))
            case Ref(name):
                self._inner.append(name)
                return f"R{self._numbers[name]}"
            case Alternatives(options):
                return f"({' | '.join(map(self._node, options))})"
            case Repeat(item, low, high):
                return f"({self._node(item)}){_times(low, high)}"
            case Concatenation(items) | Lexeme(items):
                return f"({self._nodes(items)})"

    def _nodes(self, nodes: tuple[Node, ...]) -> str:
        """Nodes in turn; neighbouring characters are one regex."""
        written = []
        for is_regex, run in itertools.groupby(nodes, lambda node: isinstance(node, Chars)):
            if is_regex:
                written.append(f"/{''.join(_shown(node.ranges) for node in run if isinstance(node, Chars))}/")
            else:
                written += map(self._node, run)
        return " ".join(written) or '""'


def _numbers(members: int) -> list[int]:
    """The numbers that a set of lexemes stands for."""
    return [number for number, bit in enumerate(reversed(f"{members:b}")) if bit == "1"]


def _lexemes(forms: Iterable[Node]) -> list[Lexeme]:
    """All lexemes in these, those of the last one first."""
    return [part for form in reversed(list(forms)) for part in walk(form) if isinstance(part, Lexeme)]


def _times(low: int, high: int | None) -> str:
    match low, high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    return f"{{{low},{'' if high is None else high}}}"


def _shown(ranges: Ranges) -> str:
    """A character class of Rust's regexes."""
    spans = (f"\\x{{{low:x}}}" + (f"-\\x{{{high:x}}}" if high > low else "") for low, high in ranges)
    return f"[{''.join(spans)}]"
