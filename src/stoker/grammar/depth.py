"""How deep references can lead: an upper bound for what recurses along them in native code, off its stack.

Owns the arithmetic on a graph only; what its nodes are is the caller's business.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

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
