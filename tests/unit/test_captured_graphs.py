"""Which steps are captured as CUDA graphs, and that no captured graph is turned into one of another shape."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from bench import captured_graphs

from ggml_graphs import begun, function
from stoker.backends.device import Device
from stoker.backends.llama import context as contexts
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.graph.ggml import F32, GraphTensor, ggml
from stoker.backends.llama.graph.marks import NUM_MARKS, NUM_PLACES, NUM_ROW_PLACES, GraphMarks, LogitRows
from stoker.backends.llama.model import LlamaModel, ModelOptions
from tiny_models import write_llama, write_wide_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLED = """
import logging, os
from stoker.backends.llama import binding
logging.basicConfig()
for is_marked in {models}:
    binding.settle_graphs("a model", is_marked=is_marked)
print(os.environ.get(binding.NO_GRAPHS, "captured"))
"""


@pytest.mark.parametrize(
    ("models", "given", "expected"),
    [
        ([True], {}, "captured"),
        ([False], {}, "1"),
        ([True, False], {}, "captured"),
        ([False, True], {}, "1"),
        ([True], {"STOKER_CUDA_GRAPHS": "0"}, "1"),
        ([False], {"STOKER_CUDA_GRAPHS": "1"}, "captured"),
        ([True], {"GGML_CUDA_DISABLE_GRAPHS": "yes"}, "yes"),
    ],
)
def test_the_first_model_decides_unless_somebody_has(models, given, expected):
    """B7: the library asks once; a model without marks that comes first has nothing captured."""
    clean = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    done = subprocess.run(
        [sys.executable, "-c", SETTLED.format(models=models)],
        env=clean | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
    assert ("STOKER_CUDA_GRAPHS=0" in done.stderr) == (expected == "captured" and False in models)


class Card:
    """What ggml's CUDA backend does with graphs, of which only shape, first node and marks are looked at.

    It captures a graph that comes a second time unchanged, by the address of its first node, and updates what
    it has there; that fails where a node has become one of another kind, and then it makes a new one.
    """

    def __init__(self) -> None:
        self.seen: dict[
            int, tuple[object, bool]
        ] = {}  # properties of the last graph, and whether it is captured
        self.instances: dict[int, tuple[object, tuple[int, ...]]] = {}
        self.num_captured = 0

    def compute(self, key: int, shape: object, ops: tuple[int, ...], data: int = 0) -> None:
        """One graph; `data` is where its tensors are, which may differ between graphs of one shape."""
        properties = shape, ops, data
        before, is_captured = self.seen.get(key, (None, False))
        if before != properties:
            self.seen[key] = properties, False
            return
        if is_captured:
            return
        captured_shape, captured_ops = self.instances.get(key, (shape, ops))
        assert captured_shape == shape or captured_ops != ops, f"{captured_shape} was updated to {shape}"
        self.instances[key], self.seen[key] = (shape, ops), (properties, True)
        self.num_captured += 1


@pytest.fixture
def context() -> Iterator[int]:
    """A ggml_context that is begun anew at the same place for each graph."""
    memory = ctypes.create_string_buffer(2**22)
    yield ctypes.addressof(memory)
    del memory


def built(
    context: int, marks: GraphMarks, shape: tuple[int, int], num_reused: int
) -> tuple[int, tuple[int, ...]]:
    """A marked graph, of decode rows if these are all its tokens: its first node, and its marks' ops."""
    native = begun(context, 2**22, no_alloc=True)
    graph, make = function("ggml_new_graph", ctypes.c_void_p, ctypes.c_void_p)(native), ggml()
    num_tokens, num_rows = shape
    node = make.new_tensor_2d(native, F32, 4, num_tokens)
    for _ in range(5):
        node = make.scale_bias(native, node, 2, 0)
    make.add_to_graph(graph, node)
    marks.add(native, graph, LogitRows(num_rows, are_alone=num_tokens == num_rows), num_reused)
    count = make.num_nodes(graph)
    nodes = (ctypes.c_void_p * count).from_address(make.nodes(graph))[:]
    assert count >= 5 + NUM_MARKS
    assert nodes[-1] == node
    ops = tuple(GraphTensor.from_address(each).op for each in nodes[:-5])
    function("ggml_free", None, ctypes.c_void_p)(native)
    return nodes[0], ops


@pytest.mark.parametrize("num_shapes", [2, NUM_PLACES, 3 * NUM_PLACES])
@pytest.mark.parametrize("seed", range(3))
def test_no_captured_graph_is_updated_to_another_shape(context, num_shapes, seed):
    """B7: whatever comes after what, how often, and whether the library uses its graph again or builds it."""
    chance, card, marks, num_reused = random.Random(seed), Card(), GraphMarks(), 0
    sizes = [1 + chance.randrange(512) for _ in range(num_shapes)]
    shapes = [(size, chance.choice([size, chance.randrange(64)])) for size in sizes]
    shape, graph, data = None, None, 0
    for _ in range(1500):
        if shape is not None and chance.random() < 0.5:
            if chance.random() < 0.8:
                num_reused += 1
            else:
                data = chance.randrange(2)  # other streams
                graph = built(context, marks, shape, num_reused)
        else:
            shape = chance.choice(shapes[: 1 + chance.randrange(num_shapes)])
            graph = built(context, marks, shape, num_reused)
        card.compute(graph[0], shape, graph[1], data)
    assert card.num_captured > num_shapes // 2


def test_what_was_captured_of_a_shape_is_found_again(context):
    """B7: a prompt between two equal steps costs no new capture of these."""
    card, marks = Card(), GraphMarks()
    for _ in range(10):
        for shape in ((8, 8), (8, 8), (300, 1)):
            card.compute(built(context, marks, shape, 0)[0], shape, ())
    assert card.num_captured == 2


def test_prompts_do_not_take_the_places_of_decode_rows(context):
    """B7: a crowd's prompts are of shapes that come once each, and its rows are computed right after them."""
    card, marks = Card(), GraphMarks()
    rows = [(count, count) for count in range(1, NUM_ROW_PLACES + 1)]
    for shape in rows:
        for _ in range(2):
            graph = built(context, marks, shape, 0)
            card.compute(graph[0], shape, graph[1])
    for size in range(100, 100 + 3 * NUM_PLACES):
        built(context, marks, (size, 3), 0)
    num_captured = card.num_captured
    for shape in rows:
        graph = built(context, marks, shape, 0)
        card.compute(graph[0], shape, graph[1])
        assert card.seen[graph[0]] == ((shape, graph[1], 0), True)
    assert num_captured == card.num_captured == len(rows)


@pytest.mark.parametrize(("draws", "is_marked"), [(True, True), (True, False), (False, True)])
def test_every_context_on_a_device_says_whether_its_graphs_are_marked(
    tmp_path, monkeypatch, draws, is_marked
):
    """B7: whoever opens it; without draws nothing marks them."""
    settled = []
    monkeypatch.setattr(contexts, "settle_graphs", lambda what, *, is_marked: settled.append(is_marked))
    model = LlamaModel(ModelOptions(path=write_wide_llama(tmp_path / "model.gguf", 600)))
    for devices in ((), (Device("a card", "CUDA", id="CUDA0", lock="a"),)):
        model.devices = devices
        options = ContextOptions(
            num_cells=256, n_batch=64, num_sequences=2, num_threads=1, draws=draws, is_marked=is_marked
        )
        LlamaContext(model, options).close()
    model.close()
    assert settled == [draws and is_marked]


@pytest.fixture
def few_streams(monkeypatch):
    """The bench with fewer and shorter steps than a device needs."""
    for name, value in {"NUM_STREAMS": 20, "STEADY_ROWS": (1, 8), "STEADY_STEPS": 10}.items():
        monkeypatch.setattr(captured_graphs, name, value)


@pytest.mark.usefixtures("few_streams")
def test_marks_come_before_the_first_node_of_the_device(tmp_path, monkeypatch):
    """B7: behind what the host computes, such as the embeddings of tokens; here it computes all."""
    orders = []
    add = GraphMarks.add

    def added(self, context, graph, rows, num_reused):
        before = ggml().num_nodes(graph)
        add(self, context, graph, rows, num_reused)
        nodes = (ctypes.c_void_p * (before + NUM_MARKS)).from_address(ggml().nodes(graph))
        name = function("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
        orders.append([name(GraphTensor.from_address(node).op).decode() for node in nodes[:9]])

    monkeypatch.setattr(GraphMarks, "add", added)
    captured_graphs.measure(write_llama(tmp_path / "model.gguf"), 4, has_marks=True)
    assert orders
    assert all(order[0] == "GET_ROWS" and "ARANGE" in order for order in orders)


@pytest.mark.long
@pytest.mark.usefixtures("few_streams")
def test_the_bench_of_them_finds_steps_that_are_not_finite(tmp_path, monkeypatch):
    """B7: it counts them, and says where the first one was."""
    model = write_llama(tmp_path / "model.gguf")
    for has_marks in (False, True):
        assert "0 of 9 steps not finite; 1: " in captured_graphs.measure(model, 9, has_marks=has_marks)
    sound = captured_graphs._step
    monkeypatch.setattr(
        captured_graphs, "_step", lambda context, rows, **how: (sound(context, rows, **how)[0], rows > 18)
    )
    found = captured_graphs.measure(model, 9, has_marks=True)
    assert "0 of 9" not in found
    assert ", the first at step " in found
