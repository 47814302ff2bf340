"""What a grammar may cost before it is compiled: the size of a regex, the depth of references, counted work.

The grammar engine derives automata lazily, so a short regex may cost seconds later, and it recurses along
references in native code. Whether a regex is well-formed is the engine's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

MAX_EXPANDED_CHARS = 20_000
MAX_QUANTIFIERS = 1000  # compiling takes time in their square: 1 s for as many optional \p{L}

# None reads a part of a stranger's regex over and over; a class that is never closed goes to the end.
_COUNT = re.compile(r"\{(\d*+)(,?)(\d*+)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]{0,99}\}|.)", re.DOTALL)


def refusal(regex: str) -> str:
    """Why a regex is too much to compile, "repeats too often" for instance; empty: it is not."""
    if expanded_size(regex) > MAX_EXPANDED_CHARS:
        return f"repeats more than {MAX_EXPANDED_CHARS} characters"
    plain = _ESCAPE.sub("", _CLASS.sub("", regex))
    if sum(map(plain.count, "?*+")) + len(_COUNT.findall(plain)) > MAX_QUANTIFIERS:
        return f"has more than {MAX_QUANTIFIERS} quantifiers"
    return ""


def _number(digits: str) -> int:
    """What they say, or of a long number its beginning, which is too much as well."""
    return int(digits.lstrip("0")[:9] or 0)


def expanded_size(regex: str) -> int:
    """Characters to match in `regex` with every `{m,n}` written out; a lower bound where it is malformed."""
    totals, last = [0], 0
    index = 0
    while index < len(regex):
        char = regex[index]
        match = _CLASS.match(regex, index) or _ESCAPE.match(regex, index)
        if char == "(":
            totals.append(0)
            last = 0
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif (count := _COUNT.match(regex, index)) is not None:
            times = max(map(_number, (count[1], count[3])))
            grown = last * max(times, 1)
            totals[-1] += grown - last
            last = grown
            match = count
        elif char not in "*+?|^$":
            last = 1
            totals[-1] += 1
        index = index + 1 if match is None else match.end()
    return sum(totals)


Node = TypeVar("Node", bound=Hashable)


def deepest_path(edges: Mapping[Node, Sequence[Node]], start: Node) -> int:
    """Nodes on the longest path from `start` that visits none twice, or more, never fewer.

    Exact without cycles; of nodes that lead to each other all are counted. In linear time: Tarjan's strongly
    connected components, without recursion. They end in an order in which what they lead to is done.
    """
    order: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    depth: dict[Node, int] = {}  # of nodes whose component is done
    open_nodes: list[Node] = []
    stack = [(start, iter(edges.get(start, ())))]
    order[start] = lowest[start] = 0
    open_nodes.append(start)
    while stack:
        node, following = stack[-1]
        for child in following:
            if child not in order:
                order[child] = lowest[child] = len(order)
                open_nodes.append(child)
                stack.append((child, iter(edges.get(child, ()))))
                break
            if child not in depth:
                lowest[node] = min(lowest[node], order[child])
        else:
            stack.pop()
            if stack:
                lowest[stack[-1][0]] = min(lowest[stack[-1][0]], lowest[node])
            if lowest[node] == order[node]:
                _finish(node, open_nodes, edges, depth)
    return depth[start]


def _finish(
    root: Node, open_nodes: list[Node], edges: Mapping[Node, Sequence[Node]], depth: dict[Node, int]
) -> None:
    """The component that `root` began is whole: note how deep it leads."""
    at = open_nodes.index(root) if open_nodes[-1] != root else len(open_nodes) - 1
    members = open_nodes[at:]
    del open_nodes[at:]
    below = max(
        (depth[child] for node in members for child in edges.get(node, ()) if child in depth), default=0
    )
    depth.update(dict.fromkeys(members, below + len(members)))


class Exhausted(Exception):  # noqa: N818 - it says what the effort is
    """The steps that were allowed are spent."""


class Effort:
    """Steps that may still be taken, each about a microsecond of work.

    Args:
        max_steps: at the start.
    """

    def __init__(self, max_steps: int) -> None:
        self._num_left = max_steps

    def __repr__(self) -> str:
        return f"Effort(num_left={self._num_left})"

    def spend(self, num_steps: int) -> None:
        """Take so many steps. Raises Exhausted where fewer are left."""
        self._num_left -= num_steps
        if self._num_left < 0:
            raise Exhausted
