"""Marks in llama.cpp's graphs that keep what CUDA captures of different steps apart (docs/adr/0028).

llama.cpp captures a step's graph as a CUDA graph once it comes a second time, keeps it by the address of the
first node that the device computes, and updates the one that it has there to what it captures next. An update
from one number of rows to another may compute NaN. So the graphs of each shape begin with nodes at an address
of their own, where what was captured of them is found again. Where a shape takes the place of another one,
its first nodes are of other kinds: the update fails, and the library makes a new instance.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from stoker.backends.llama.graph.ggml import F32, GraphTensor, ggml

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_ROW_PLACES, NUM_OTHER_PLACES = 16, 8
"""Shapes whose captured graphs are kept, some hundred kilobytes of the device's memory each: those of decode
rows come again and again, and those of prompts, each of which comes once, are not to take their places."""
NUM_PLACES = NUM_ROW_PLACES + NUM_OTHER_PLACES
NUM_MARKS = 3
"""Nodes at least; where more than four kinds are to be told apart, some more."""
_NUM_HOST_NODES = 8
"""Among so many nodes at the beginning of a graph are those that the host computes: embeddings."""
_NUM_SHAPED = 48
"""Nodes by which a graph's shape is known: more than a layer has."""

Shape = tuple[int, int, bytes]


class LogitRows(NamedTuple):
    """So many rows of logits; `are_alone`: of decode rows, and nothing else is computed."""

    num: int
    are_alone: bool


class MarkPlace:
    """Where graphs of one shape are captured.

    Attributes:
        kinds: what their marks are: the bits of a number say copy or kernel.
    """

    def __init__(self) -> None:
        self.kinds = 0
        self._captured: set[int] = set()  # the kinds of all of which one may be captured here

    def may_be_captured(self) -> None:
        """A graph came again, built anew: where its tensors lie elsewhere what was captured before stays."""
        self._captured.add(self.kinds)

    def was_captured(self) -> None:
        """A graph was used again: nothing else is captured here now."""
        self._captured = {self.kinds}

    def give_away(self) -> None:
        """To graphs of another shape, whose marks differ from those of all that may be captured here."""
        self.kinds = next(kind for kind in count() if kind not in self._captured | {self.kinds})


class GraphMarks:
    """The marks of one native context's graphs."""

    def __init__(self) -> None:
        self._places = [MarkPlace() for _ in range(NUM_PLACES)]
        self._rows: dict[Shape, int] = {}  # numbers of places, by shape, the one used last at the end
        self._others: dict[Shape, int] = {}
        self._last = self._places[0]
        self._num_reused = 0

    def __repr__(self) -> str:
        return f"<GraphMarks of {len(self._rows)} shapes of rows and {len(self._others)} others>"

    def add(self, context: int, graph: int, rows: LogitRows, num_reused: int) -> None:
        """Mark a graph that is complete but for what is made of its logits.

        Args:
            context: address of its ggml_context.
            graph: address of the ggml_cgraph.
            rows: what it gives.
            num_reused: times that the library has used a graph again so far.
        """
        make = ggml()
        if num_reused > self._num_reused:
            self._last.was_captured()
        self._num_reused = num_reused
        nodes = (ctypes.c_void_p * make.num_nodes(graph)).from_address(make.nodes(graph))
        shape = len(nodes), rows.num, _dimensions(nodes[:_NUM_SHAPED])
        if rows.are_alone:
            number = self._place_of(shape, self._rows, range(NUM_ROW_PLACES))
        else:
            number = self._place_of(shape, self._others, range(NUM_ROW_PLACES, NUM_PLACES))
        place = self._last = self._places[number]
        for _ in range(number):  # each takes as much of the context: the mark's address is the place's own
            make.new_tensor_2d(context, F32, 1, 1)
        mark = make.arange(context, 0, 1, 1)
        for bit in range(max(NUM_MARKS - 1, place.kinds.bit_length())):
            is_copy = place.kinds >> bit & 1
            mark = make.cont(context, mark) if is_copy else make.scale_bias(context, mark, 1, 0)
        make.add_to_graph(graph, mark)
        _put_first(make.nodes(graph), make.num_nodes(graph), len(nodes))

    def _place_of(self, shape: Shape, numbers: dict[Shape, int], places: range) -> int:
        """The number of the place that a shape has, or gets; `numbers` are those of its kind."""
        number = numbers.pop(shape, -1)
        if number >= 0:
            self._places[number].may_be_captured()
        else:
            is_full = len(numbers) == len(places)
            number = numbers.pop(next(iter(numbers))) if is_full else places[len(numbers)]
            self._places[number].give_away()
        numbers[shape] = number
        return number


def _dimensions(nodes: Sequence[int | None]) -> bytes:
    field = GraphTensor.ne
    return b"".join([ctypes.string_at(node + field.offset, field.size) for node in nodes if node])


def _put_first(address: int, num_nodes: int, num_others: int) -> None:
    """Move the marks from behind the other nodes at `address` before the first that the device computes."""
    nodes = (ctypes.c_void_p * num_nodes).from_address(address)
    marks, begin = nodes[num_others:], nodes[: min(_NUM_HOST_NODES, num_others)]
    first = max((index + 1 for index, node in enumerate(begin) if node and _reads_host(node)), default=0)
    pointer_bytes = ctypes.sizeof(ctypes.c_void_p)
    here, there = (address + index * pointer_bytes for index in (first, first + len(marks)))
    ctypes.memmove(there, here, (num_others - first) * pointer_bytes)
    for offset, mark in enumerate(marks):
        nodes[first + offset] = mark


def _reads_host(node: int) -> bool:
    """Whether it reads what a model keeps in the host's memory, as the embeddings of tokens are."""
    sources = [source.contents.buffer for source in GraphTensor.from_address(node).src if source]
    return any(buffer and ggml().is_host_memory(buffer) for buffer in sources)
