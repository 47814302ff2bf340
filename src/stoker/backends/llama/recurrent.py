"""A recurrent model's state as named tensors: what a sequence has seen, layer by layer (SPEC K5).

llama.cpp gives a sequence's state as bytes: seven words of head (magic, sequence, cells, position, owners,
order, layers), then for every layer the type, the row's bytes and the row of its first kind of state, then
the same of its second kind. `state` moves those bytes; here they are taken apart and put together.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import ModelLoadError
from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.backends.llama.context import LlamaContext
    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.llama.state import SequenceStates

    Layout = tuple[tuple[str, tuple[int, ...]], ...]

_HEAD = struct.Struct("<IIIiIII")
_POSITION_AT = 12  # bytes before the position in the head
_ROW = struct.Struct("<iQ")  # ggml_type, bytes
_F32 = 0
_FLOATS = np.dtype("<f4")


class RecurrentStates:
    """States of the sequences of a context that holds none yet.

    Raises:
        ModelLoadError: llama.cpp lays the state out in a way not known here.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, states: SequenceStates) -> None:
        self._context = context
        self._states = states
        context.step(BatchPlan((PlanItem(0, 0, (0,), 0),)))
        self._template = states.payload(0)  # every state of this model has these bytes but for the numbers
        context.drop(0)
        rows = _rows(self._template.data)
        if rows is None:
            raise ModelLoadError(f"the state of {model.description} has a layout that is not known here")
        self._template[_POSITION_AT : _POSITION_AT + 4] = 0
        for begin, end in rows:
            self._template[begin:end] = 0
        self._rows = rows
        self.layout = _layout(model, [(end - begin) // _FLOATS.itemsize for begin, end in rows])

    def __repr__(self) -> str:
        return f"<RecurrentStates of {len(self.layout)} tensors, {len(self._template)} bytes>"

    def read(self, seq: int) -> list[Tensor]:
        """The state after the sequence's tokens; zeros where it has not begun."""
        is_begun = self._context.lengths[seq] > 0 or seq in self._context.with_initial_state
        payload = self._states.payload(seq) if is_begun else self._template
        return [
            Tensor(name, shape, payload[begin:end].tobytes())
            for (name, shape), (begin, end) in zip(self.layout, self._rows, strict=True)
        ]

    def write(self, seq: int, tensors: Sequence[Tensor]) -> None:
        """Let the empty sequence `seq` begin from a state of `layout`. Raises PoolFullError."""
        assert self._context.lengths[seq] == 0, f"sequence {seq} is not empty"
        assert tuple((tensor.name, tensor.shape) for tensor in tensors) == self.layout, "another layout"
        payload = self._template.copy()
        for tensor, (begin, end) in zip(tensors, self._rows, strict=True):
            payload[begin:end] = np.frombuffer(tensor.data, np.uint8)
        self._context.drop(seq)  # an initial state it had before
        self._states.put(seq, payload, 0)
        self._context.with_initial_state.add(seq)


def _rows(payload: memoryview) -> list[tuple[int, int]] | None:
    """Begin and end of each row, first and second kind of each layer in turn; None: another layout."""
    _, _, num_cells, _, _, is_transposed, num_layers = _HEAD.unpack_from(payload)
    if num_cells != 1 or is_transposed or not 0 < num_layers < 2**16:
        return None
    found, at = [], _HEAD.size
    for _ in range(2 * num_layers):
        if at + _ROW.size > len(payload):
            return None
        element_type, size = _ROW.unpack_from(payload, at)
        if element_type != _F32 or size % _FLOATS.itemsize:
            return None
        at += _ROW.size
        found.append((at, at + size))
        at += size
    if at != len(payload):
        return None
    return [row for layer in range(num_layers) for row in (found[layer], found[num_layers + layer])]


def _layout(model: LlamaModel, counts: list[int]) -> Layout:
    """Names and shapes by layer; a shape is flat where the file's keys do not explain the count."""
    first, second = _names(model)
    layout = []
    for index, count in enumerate(counts):
        name, shape = second if index % 2 else first
        is_shape = int(np.prod(shape)) == count
        layout.append((f"layers.{index // 2}.{name}", shape if is_shape else (count,)))
    return tuple(layout)


def _names(model: LlamaModel) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    """What the two kinds of state of a layer are called, and their shapes.

    RWKV keeps the last inputs of time mix and channel mix, and a matrix a head; Mamba keeps the inputs that
    its convolution still needs, and a matrix (Mamba-2: one a head).
    """
    heads = _number(model, "wkv.head_size")
    if heads:
        num_shifts = _number(model, "token_shift_count") or 2
        return ("shift", (num_shifts, model.n_embd)), ("state", (model.n_embd // heads, heads, heads))
    inner, width = _number(model, "ssm.inner_size"), _number(model, "ssm.state_size")
    groups, kernel = _number(model, "ssm.group_count"), _number(model, "ssm.conv_kernel")
    convolved = ("conv", (inner + 2 * groups * width, max(kernel - 1, 0)))
    if not groups:
        return convolved, ("state", (inner, width))
    num_heads = max(_number(model, "ssm.time_step_rank"), 1)
    return convolved, ("state", (num_heads, inner // num_heads, width))


def _number(model: LlamaModel, key: str) -> int:
    """A whole number of the file's metadata; 0 where there is none."""
    text = model.metadata(f"{model.metadata('general.architecture')}.{key}")
    return int(text) if text and text.isdecimal() else 0
