"""Which stored prefixes share how many leading tokens with a given one (SPEC C1, C2).

Owns the tree of one namespace and what it is searched by: token ids as bytes, four each, little-endian. Ids
are non-negative; an image's place in a prompt is taken by negative numbers made of its content (SPEC C11),
as many as it takes tokens: the same image matches itself and nothing else. Of the values the tree knows
nothing.

A way down looks only at the first token of each edge and skips the rest, as in a Patricia trie. Every key
below the node it ends at shares the same number of tokens with the key sought, so one comparison of whole
byte strings with any of them says where the two part. No bytes are copied into the nodes.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

TOKEN_BYTES = 4
_FIRST_LOOK = 32


def key_of(tokens: Sequence[int]) -> bytes:
    """The key of some tokens; a prefix of them has a prefix of it."""
    numbers = array("i", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def num_tokens(key: bytes) -> int:
    """How many tokens a key stands for."""
    return len(key) // TOKEN_BYTES


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many leading tokens, or bytes of keys, are the same; of the first `limit`.

    Bisection over slice comparisons, which run in C; most pairs differ at a first look.
    """
    most = min(len(left), len(right), len(left) if limit is None else limit)
    low, high = 0, min(most, _FIRST_LOOK)
    if left[:high] == right[:high]:
        low, high = high, most
        if left[low:high] == right[low:high]:
            return high
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def image_ids(content: bytes, count: int) -> list[int]:
    """Negative numbers for the `count` tokens of an image with these bytes."""
    stream = hashlib.shake_128(content).digest(count * TOKEN_BYTES)
    numbers = array("I", stream)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [-1 - (number >> 1) for number in numbers]


DIGEST_BYTES = 32


@dataclass(frozen=True)
class Namespace:
    """Requests that may share what was computed (SPEC C1): of one model, adapter, initial state and salt.

    Attributes:
        model: fingerprint of the file and of how its state is laid out.
        adapter: name and digest of what changes the weights; empty: nothing.
        initial_state: digest of the state a recurrent model begins from; empty: its own.
        salt: what the caller chose to be apart.
    """

    model: str
    adapter: str = ""
    initial_state: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """Names it in the tree and on disk, where a salt must not be readable."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"stoker-space")
        for part in (self.model, self.adapter, self.initial_state, self.salt):
            text = part.encode()
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return digest.digest()


V = TypeVar("V")
MAX_VALUES = 8


@dataclass(frozen=True, slots=True)
class PrefixMatch(Generic[V]):
    """What shares most with a key.

    Attributes:
        num_tokens: leading tokens shared; 0: nothing stored begins with the same token.
        values: up to `MAX_VALUES` of those that share as many, the one that ends there first.
    """

    num_tokens: int
    values: tuple[V, ...]


@dataclass(slots=True, eq=False)
class _Entry(Generic[V]):
    """A stored key and its value."""

    key: bytes
    value: V


class _Node(Generic[V]):
    """A place in the tree where keys end or part.

    Attributes:
        parent: the place before; None: the root.
        end: bytes from the root to here.
        entry: what ends here.
        sample: some entry at or below here; its first `end` bytes lead here. None in an empty root only.
        children: the places after, by the token their edge begins with.
    """

    __slots__ = ("children", "end", "entry", "parent", "sample")

    def __init__(self, parent: _Node[V] | None, end: int, sample: _Entry[V] | None) -> None:
        self.parent = parent
        self.end = end
        self.entry: _Entry[V] | None = None
        self.sample = sample
        self.children: dict[bytes, _Node[V]] = {}


class RadixTree(Generic[V]):
    """The keys of one namespace, each with a value.

    Lookups are pure; only `insert` splits. Every key is a whole number of tokens. A lookup takes a step a
    node on the way, of which there are at most as many as stored keys that part or end there, and one
    comparison of the key.
    """

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(None, 0, None)
        self._stored: dict[bytes, _Node[V]] = {}  # where each key ends: what is stored is asked for often

    def __repr__(self) -> str:
        return f"<RadixTree {len(self)} keys>"

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[V]:
        """Every value, in no order that means something."""
        for node in self._stored.values():
            assert node.entry is not None, "a place without an entry is called stored"
            yield node.entry.value

    def get(self, key: bytes) -> V | None:
        """The value stored under exactly this key."""
        assert len(key) % TOKEN_BYTES == 0, f"{len(key)} bytes are no whole number of tokens"
        node = self._stored.get(key)
        return None if node is None or node.entry is None else node.entry.value

    def insert(self, key: bytes, value: V) -> V | None:
        """Store a value; returns the one it replaces."""
        node, shared = self._descend(key)
        if node.end > shared:
            node = self._split(node, shared)
        if shared < len(key):
            leaf: _Node[V] = _Node(node, len(key), None)
            node.children[_token(key, shared)] = leaf
            node = leaf
        if node.entry is not None:
            replaced, node.entry.value = node.entry.value, value
            return replaced
        node.entry = _Entry(key, value)
        self._stored[key] = node
        above: _Node[V] | None = node
        while above is not None and above.sample is None:  # the leaf, and a root that was empty
            above.sample = node.entry
            above = above.parent
        return None

    def remove(self, key: bytes) -> V | None:
        """Take a key out; returns its value. Places that nothing needs any more go with it."""
        node = self._stored.pop(key, None)
        if node is None or node.entry is None:
            return None
        entry, node.entry = node.entry, None
        parent = node.parent
        lowest = node
        if parent is not None and not node.children:
            del parent.children[_token(key, parent.end)]
            lowest = self._dissolve(parent)
        elif parent is not None:
            lowest = self._dissolve(node)
        self._forget(entry, lowest)
        return entry.value

    def num_shared(self, key: bytes) -> int:
        """The most leading tokens of `key` that any stored key shares."""
        return self._descend(key)[1] // TOKEN_BYTES

    def longest_shared(self, key: bytes) -> PrefixMatch[V]:
        """The most leading tokens of `key` that any stored key shares, and some of those that do."""
        node, shared = self._descend(key)
        return PrefixMatch(shared // TOKEN_BYTES, _some_values(node)) if shared else PrefixMatch(0, ())

    def on_path(self, key: bytes) -> list[tuple[int, V]]:
        """Number of tokens and value of each stored key that `key` begins with or is; shortest first."""
        node: _Node[V] | None
        node, shared = self._descend(key)
        found: list[tuple[int, V]] = []
        while node is not None:
            if node.entry is not None and node.end <= shared:
                found.append((node.end // TOKEN_BYTES, node.entry.value))
            node = node.parent
        return found[::-1]

    def above(self, key: bytes) -> list[tuple[int, V | None]]:
        """Number of tokens and value of each place above a stored key but the root; None: only a fork.

        Shortest first. Raises KeyError: not stored.
        """
        found: list[tuple[int, V | None]] = []
        node = self._place_of(key).parent
        while node is not None and node.parent is not None:
            found.append((node.end // TOKEN_BYTES, node.entry.value if node.entry else None))
            node = node.parent
        return found[::-1]

    def own_tokens(self, key: bytes) -> int:
        """Tokens of this stored key that no other stored key shares. Raises KeyError: not stored."""
        node = self._place_of(key)
        if node.children or node.parent is None:
            return 0
        return (node.end - node.parent.end) // TOKEN_BYTES

    def beside(self, key: bytes) -> list[V]:
        """Values of other keys of which some may have more own tokens without this one: next to it, few.

        Raises KeyError: not stored.
        """
        node = self._place_of(key)
        nearest = list(node.children.values())
        if (above := node.parent) is not None:
            is_new_fork = len(above.children) == 2  # noqa: PLR2004 - with a third it forked there before
            nearest += [above, *(above.children.values() if is_new_fork else ())]
        return [each.entry.value for each in nearest if each.entry is not None and each is not node]

    def own_tokens_exact(self, key: bytes) -> int:
        """Tokens of this stored key beyond the longest other one that it begins with.

        What only this entry saves a model that cannot trim (SPEC C2). Raises KeyError: not stored.
        """
        above = self._place_of(key).parent
        while above is not None and above.entry is None:
            above = above.parent
        return num_tokens(key) - (0 if above is None else above.end // TOKEN_BYTES)

    def check(self) -> None:
        """Assert that every place is needed and where its keys say, and that nothing removed is kept."""
        num_entries = 0
        for node in self._nodes():
            num_entries += node.entry is not None
            self._check_node(node)
        assert num_entries == len(self), f"{self!r} holds {num_entries}"
        for key, node in self._stored.items():
            assert node.entry is not None, "a removed key is called stored"
            assert node.entry.key == key, "a key is not where it is looked for"

    def _check_node(self, node: _Node[V]) -> None:
        assert node.end % TOKEN_BYTES == 0, f"a token is cut at byte {node.end}"
        if node.parent is None:
            assert node is self._root
            assert (node.sample is None) == (len(self) == 0)
        else:
            assert node.end > node.parent.end, f"an edge from {node.parent.end} to {node.end}"
            assert node.entry is not None or len(node.children) > 1, f"nothing ends or parts at {node.end}"
        if node.sample is None:
            assert node.parent is None
            return
        head = node.sample.key[: node.end]
        place = self._at(node.sample.key)
        assert place is not None
        assert place.entry is node.sample, "a sample was removed"
        while place is not node:
            assert place.parent is not None, "a sample is not below its place"
            place = place.parent
        assert node.entry is None or node.entry.key == head, "an entry is not where its key says"
        for token, child in node.children.items():
            assert child.parent is node
            assert child.sample is not None
            assert child.sample.key[: node.end] == head, "a child begins with other tokens"
            assert _token(child.sample.key, node.end) == token, "a child hangs under another token"

    def _descend(self, key: bytes) -> tuple[_Node[V], int]:
        """The place nearest to the root below which all share most with `key`, and how many bytes that is."""
        assert len(key) % TOKEN_BYTES == 0, f"{len(key)} bytes are no whole number of tokens"
        node = self._root
        child: _Node[V] | None = node
        while child is not None:
            node = child
            child = node.children.get(_token(key, node.end))
        shared = 0 if node.sample is None else _num_shared(key, node.sample.key[: node.end])
        while node.parent is not None and node.parent.end >= shared:
            node = node.parent
        return node, shared

    def _at(self, key: bytes) -> _Node[V] | None:
        node, shared = self._descend(key)
        return node if node.end == shared == len(key) else None

    def _place_of(self, key: bytes) -> _Node[V]:
        node = self._stored.get(key)
        if node is None:
            raise KeyError(f"a key of {num_tokens(key)} tokens is not stored")
        return node

    def _nodes(self) -> Iterator[_Node[V]]:
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    @staticmethod
    def _split(node: _Node[V], end: int) -> _Node[V]:
        """Put a place into the edge that leads to `node`."""
        parent, sample = node.parent, node.sample
        assert parent is not None
        assert sample is not None
        middle: _Node[V] = _Node(parent, end, sample)
        middle.children[_token(sample.key, end)] = node
        parent.children[_token(sample.key, parent.end)] = middle
        node.parent = middle
        return middle

    @staticmethod
    def _dissolve(node: _Node[V]) -> _Node[V]:
        """Take a place out where nothing ends or parts; returns the lowest that is left."""
        if node.parent is None or node.entry is not None or len(node.children) > 1:
            return node
        parent, (child,) = node.parent, node.children.values()
        assert child.sample is not None
        parent.children[_token(child.sample.key, parent.end)] = child
        child.parent = parent
        return parent

    @staticmethod
    def _forget(entry: _Entry[V], lowest: _Node[V]) -> None:
        """Give every place from `lowest` up another sample than a removed entry."""
        node: _Node[V] | None = lowest
        while node is not None:
            if node.sample is entry:
                child = next(iter(node.children.values()), None)
                node.sample = node.entry or (None if child is None else child.sample)
            node = node.parent


def _token(key: bytes, start: int) -> bytes:
    return key[start : start + TOKEN_BYTES]


def _num_shared(one: bytes, other: bytes) -> int:
    """Leading bytes that are the same, in whole tokens."""
    num_bytes = common_prefix(one, other)
    return num_bytes - num_bytes % TOKEN_BYTES


def _some_values(top: _Node[V]) -> tuple[V, ...]:
    """What ends at `top`, then some of what is below: opens places only until there are enough."""
    found: list[V] = []
    closed = deque([top])
    while closed and len(found) + len(closed) < MAX_VALUES:
        node = closed.popleft()
        if node.entry is not None:
            found.append(node.entry.value)
        closed.extend(islice(node.children.values(), MAX_VALUES))
    for node in closed:
        if len(found) == MAX_VALUES:
            break
        entry = node.entry or node.sample
        assert entry is not None
        found.append(entry.value)
    return tuple(found)
