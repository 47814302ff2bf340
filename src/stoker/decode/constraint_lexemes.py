"""From rules to the grammar engine's Lark: what is cut into lexemes, so that the language stays the same.

The engine matches lexemes (regexes) greedily: of all that are possible at a place the longest wins, and the
next begins where it ends. That is quick, and wrong for rules whose meaning needs a shorter match. So the
parts without recursion become lexemes as large as can be, and wherever the longest match could take what
belongs to what follows, both parts are cut smaller, down to single characters, which cannot clash.
"""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from stoker.decode.constraint_automaton import Automaton, Overlong, first_chars, meet
from stoker.decode.constraint_notation import (
    Chars,
    Choice,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Sequence,
    is_nullable,
    parts,
    references,
    rules_that,
)
from stoker.errors import InvalidRequestError

# Beyond these everything is cut into single characters: slower masks, the same language.
_MAX_ROUNDS = 40
_MAX_STEPS = 200_000
_PAIRS_A_STEP = 8  # so many pairs are made in the time of a step
_MAX_LEXEMES = 500
# Rules nested deeper than this are no part of a lexeme, which keeps what recurses over lexemes shallow.
_MAX_FLAT_DEPTH = 50


@dataclass(frozen=True, slots=True, eq=False)
class _Lexeme:
    """Items without recursion that are matched as one regex."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _All:
    items: tuple[_Form, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Any:
    options: tuple[_Form, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    item: _Form
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    name: str


_Form: TypeAlias = _Lexeme | _All | _Any | _Times | _Rule


def to_lark(rules: Rules, root: str) -> str:
    """The grammar in the engine's notation.

    Raises:
        InvalidRequestError: no finite text satisfies it.
    """
    if root not in rules_that(rules, _can_end):
        raise InvalidRequestError(f"no finite text satisfies the rule {root}", param="grammar")
    return _Cutter(rules, root).lark()


def _can_end(node: Node, ending: AbstractSet[str]) -> bool:
    """Whether a finite text matches a tree, where the rules for which one does are known."""
    match node:
        case Ref(name):
            return name in ending
        case Choice(options):
            return any(_can_end(option, ending) for option in options)
        case Repeat(item, low, _):
            return low == 0 or _can_end(item, ending)
        case _:
            return all(_can_end(part, ending) for part in parts(node))


class _Cutter:
    """Cuts one grammar into lexemes."""

    def __init__(self, rules: Rules, root: str) -> None:
        self._rules = rules
        self._root = root
        self._nullable = rules_that(rules, is_nullable)
        self._num_steps_left = _MAX_STEPS
        self._flat = self._without_recursion()
        self._alone: set[Node] = set()  # not joined with its neighbours
        self._cut: set[Node] = set()  # no lexeme, its parts are
        self._forms: dict[str, _Form] = {}

    def lark(self) -> str:
        for is_last in [False] * _MAX_ROUNDS + [True]:
            if is_last:
                self._cut_everything()
            self._lower_reachable()
            clashing = [] if is_last else self._clashing()
            if not clashing:
                break
            for lexeme in clashing:
                (self._alone if len(lexeme.items) > 1 else self._cut).update(lexeme.items)
        return _Writer(self._rules, self._forms, self._nullable).text(self._root)

    def _without_recursion(self) -> set[str]:
        used = {name: set(references(node)) for name, node in self._rules.items()}
        flat: set[str] = set()
        for _ in range(_MAX_FLAT_DEPTH):
            flat |= {name for name, names in used.items() if names <= flat}
        return flat

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
            stack = [form]
            while stack:
                part = stack.pop()
                if isinstance(part, _Rule):
                    waiting.append(part.name)
                stack.extend(_form_parts(part))

    def _is_flat(self, node: Node) -> bool:
        return node not in self._cut and all(name in self._flat for name in references(node))

    def _lower(self, node: Node) -> _Form:
        if self._is_flat(node):
            return _Lexeme((node,))
        match node:
            case Ref(name):
                return _Rule(name)
            case Choice(options):
                return _Any(tuple(map(self._lower, options)))
            case Repeat(item, low, high):
                return _Times(self._lower(item), low, high)
            case Sequence(items):
                return _All(tuple(self._runs(items)))
        return _Lexeme((node,))

    def _runs(self, items: tuple[Node, ...]) -> list[_Form]:
        """Items of a sequence, those without recursion joined with their neighbours."""
        forms: list[_Form] = []
        run: list[Node] = []
        for item in items:
            joins = self._is_flat(item) and item not in self._alone
            if not joins and run:
                forms.append(_Lexeme(tuple(run)))
                run = []
            if joins:
                run.append(item)
            else:
                forms.append(self._lower(item))
        return [*forms, _Lexeme(tuple(run))] if run else forms

    def _clashing(self) -> list[_Lexeme]:
        """Lexemes of which one could take what another one, or what follows, should have.

        Two are possible at one place at the start, and after two that one text could match.
        """
        follow = _Follow(self._forms, self._root, self._nullable)
        try:
            automata = {lexeme: Automaton(lexeme.items, self._rules) for lexeme in follow.lexemes()}
        except Overlong:
            return [lexeme for lexeme in follow.after if self._can_cut(lexeme)]
        found: set[_Lexeme] = set()
        waiting = list(itertools.product(follow.first, follow.first))
        seen = set(waiting)
        behind_chars: dict[_Lexeme, frozenset[Ranges]] = {}
        paired: set[tuple[frozenset[_Lexeme], frozenset[_Lexeme]]] = set()
        while waiting and self._num_steps_left > 0:
            one, other = waiting.pop()
            if one not in behind_chars:
                behind_chars[one] = first_chars(automata[lexeme] for lexeme in follow.after[one])
            meeting = meet(automata[one], automata[other], behind_chars[one], self._num_steps_left)
            self._num_steps_left -= 1 + meeting.num_steps
            if meeting.has_clash:
                found.update((one, other))
            behind = (follow.after[one], follow.after[other])
            if meeting.has_match and behind not in paired:  # many lexemes have the same ones behind them
                paired.add(behind)
                self._num_steps_left -= len(behind[0]) * len(behind[1]) // _PAIRS_A_STEP
                fresh = set(itertools.product(*behind)) - seen
                seen |= fresh
                waiting.extend(fresh)
        if self._num_steps_left <= 0:
            found.update(follow.after)
        return [lexeme for lexeme in follow.after if lexeme in found and self._can_cut(lexeme)]

    def _can_cut(self, lexeme: _Lexeme) -> bool:
        return len(lexeme.items) > 1 or not isinstance(lexeme.items[0], Chars)


class _Follow:
    """Which lexemes may stand at the start, and after each one. More than really may, never fewer.

    Attributes:
        after: lexemes that may come next, by lexeme; an empty match of one counts.
    """

    def __init__(self, forms: dict[str, _Form], root: str, nullable: frozenset[str]) -> None:
        self.after: dict[_Lexeme, frozenset[_Lexeme]] = {}
        self._forms = forms
        self._root = root
        self._nullable = nullable
        self._first: dict[str, frozenset[_Lexeme]] = dict.fromkeys(forms, frozenset())
        self._behind: dict[str, frozenset[_Lexeme]] = dict.fromkeys(forms, frozenset())
        self._fix_first()
        is_moving = True
        while is_moving:
            before = (dict(self._behind), dict(self.after))
            for name, form in forms.items():
                self._walk(form, self._behind[name])
            is_moving = before != (self._behind, self.after)

    def lexemes(self) -> list[_Lexeme]:
        """All of them. Raises Overlong where they are too many to compare."""
        if len(self.after) > _MAX_LEXEMES:
            raise Overlong
        return list(self.after)

    @property
    def first(self) -> frozenset[_Lexeme]:
        """Lexemes that may stand at the start."""
        return self._first[self._root]

    def _fix_first(self) -> None:
        is_moving = True
        while is_moving:
            before = dict(self._first)
            for name, form in self._forms.items():
                self._first[name] = self._begin(form)[0]
            is_moving = before != self._first

    def _begin(self, form: _Form) -> tuple[frozenset[_Lexeme], bool]:
        """Lexemes that may come first, and whether the form matches the empty text."""
        match form:
            case _Lexeme(items):
                return frozenset((form,)), all(is_nullable(item, self._nullable) for item in items)
            case _Rule(name):
                return self._first[name], name in self._nullable
            case _Any(options):
                begun = [self._begin(option) for option in options]
                return frozenset(lexeme for first, _ in begun for lexeme in first), any(e for _, e in begun)
            case _Times(item, low, _):
                first, is_empty = self._begin(item)
                return first, is_empty or low == 0
            case _All(items):
                firsts: frozenset[_Lexeme] = frozenset()
                for item in items:
                    first, is_empty = self._begin(item)
                    firsts |= first
                    if not is_empty:
                        return firsts, False
                return firsts, True

    def _walk(self, form: _Form, behind: frozenset[_Lexeme]) -> None:
        match form:
            case _Lexeme():
                self.after[form] = self.after.get(form, frozenset()) | behind
            case _Rule(name):
                self._behind[name] |= behind
            case _Any(options):
                for option in options:
                    self._walk(option, behind)
            case _Times(item, _, high):
                self._walk(item, behind if high == 1 else behind | self._begin(item)[0])
            case _All(items):
                for item in reversed(items):
                    self._walk(item, behind)
                    first, is_empty = self._begin(item)
                    behind = behind | first if is_empty else first


class _Writer:
    """Writes Lark: rules in small letters, lexemes and the rules inside them in capitals."""

    def __init__(self, rules: Rules, forms: dict[str, _Form], nullable: frozenset[str]) -> None:
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

    def _form(self, form: _Form) -> str:
        match form:
            case _Lexeme(items):
                name = self._lexemes.setdefault(self._nodes(items), f"T{len(self._lexemes)}")
                return f"{name}?" if all(is_nullable(item, self._nullable) for item in items) else name
            case _Rule(name):
                return f"r{self._numbers[name]}"
            case _Any(options):
                return f"({' | '.join(map(self._form, options))})"
            case _Times(item, low, high):
                return f"({self._form(item)}){_times(low, high)}"
            case _All(items):
                return f"({' '.join(map(self._form, items))})"

    def _node(self, node: Node) -> str:
        match node:
            case Chars():
                return self._nodes((node,))
            case Ref(name):
                self._inner.append(name)
                return f"R{self._numbers[name]}"
            case Choice(options):
                return f"({' | '.join(map(self._node, options))})"
            case Repeat(item, low, high):
                return f"({self._node(item)}){_times(low, high)}"
            case Sequence(items):
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


def _form_parts(form: _Form) -> tuple[_Form, ...]:
    match form:
        case _All(items):
            return items
        case _Any(options):
            return options
        case _Times(item):
            return (item,)
        case _:
            return ()


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
