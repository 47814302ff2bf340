"""A sequence's state: its bytes, a recurrent model's tensors (SPEC K5), the hidden state of a token (D8).

Bytes are llama.cpp's own state behind a header that tells foreign or damaged ones apart; native code never
sees bytes that fail the header or the checksum. Those of a recurrent model are seven words of head (magic,
sequence, cells, position, owners, order, layers), then for every layer the type, the row's bytes and the row
of its first kind of state, then the same of its second kind.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from stoker.backends.llama.binding import LIBRARY_VERSION
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.errors import (
    InvalidRequestError,
    ModelLoadError,
    StepFailedError,
    UnsupportedError,
)
from stoker.ipc.model import FlashAttention
from stoker.ipc.usage import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from stoker.backends.llama.model import LlamaModel
    from stoker.backends.protocol.backend import Buffer

    Bytes = npt.NDArray[np.uint8]
    from collections.abc import Sequence

    Layout = tuple[tuple[str, tuple[int, ...]], ...]


_MAGIC = b"STK2"
_PICTURED = b"STP2"
"""Of a sequence with pictures that are not computed as text is: their places are at the payload's end."""
_HEADER = struct.Struct("<4s16sI?QI")
"""Magic, fingerprint, tokens, whether an initial state came before them, bytes, checksum of the payload."""
_WORD = np.dtype("<u8")
_BLOCK_BYTES = 4096


def _checksum(payload: Bytes) -> int:
    """CRC-32 of the sums of its blocks and of what is behind them.

    A state is checked before its request's first token; the bytes' own CRC takes four times as long.
    """
    end = len(payload) // _BLOCK_BYTES * _BLOCK_BYTES
    blocks = payload[:end].view(_WORD).reshape(-1, _BLOCK_BYTES // _WORD.itemsize)
    return zlib.crc32(payload[end:].data, zlib.crc32(blocks.sum(axis=1).data))


class SequenceStates:
    """Exports and imports sequences of one context.

    Args:
        file_fingerprint: what tells the model's file from every other and from its own later versions.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, file_fingerprint: str) -> None:
        self._context = context
        self._fingerprint = _fingerprint(model, context, file_fingerprint)

    def __repr__(self) -> str:
        return f"<SequenceStates {self.fingerprint}>"

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; differs between files, libraries and layouts of the cache."""
        return self._fingerprint.hex()

    def export(self, seq: int) -> memoryview:
        """The state of `seq`, bit-exact, in memory of its own."""
        num_tokens = self._context.lengths[seq]
        has_initial_state = seq in self._context.with_initial_state
        is_empty = num_tokens == 0 and not has_initial_state
        data = np.empty(_HEADER.size, np.uint8) if is_empty else self._context.read_state(seq, _HEADER.size)
        magic, places = _MAGIC, self._context.places.packed(seq)
        if places:
            magic, data = _PICTURED, np.concatenate((data, np.frombuffer(places, np.uint8)))
        payload = data[_HEADER.size :]
        head = (magic, self._fingerprint, num_tokens, has_initial_state, len(payload), _checksum(payload))
        _HEADER.pack_into(data.data, 0, *head)
        return data.data

    def restore(self, seq: int, data: Buffer) -> None:
        """Put an exported state into the empty sequence `seq`.

        Raises:
            InvalidRequestError: the bytes are damaged, or of another model or build.
            PoolFullError: its cells do not fit; nothing changed.
        """
        assert self._context.lengths[seq] == 0, f"sequence {seq} is not empty"
        payload, num_tokens, has_initial_state = self._checked(data)
        if len(payload) == 0:
            return
        if bytes(data[: len(_PICTURED)]) == _PICTURED:
            payload = payload[: len(payload) - self._context.places.unpack(seq, payload.data)]
        self._context.write_state(seq, payload, num_tokens)
        if has_initial_state:
            self._context.with_initial_state.add(seq)

    def _checked(self, data: Buffer) -> tuple[Bytes, int, bool]:
        """Payload, tokens, whether it began from an initial state; if it is this model's and whole."""
        if len(data) < _HEADER.size or bytes(data[:4]) not in {_MAGIC, _PICTURED}:
            raise InvalidRequestError(f"{len(data)} bytes are not an exported state", param="state")
        _, fingerprint, num_tokens, has_initial_state, size, checksum = _HEADER.unpack_from(data)
        if fingerprint != self._fingerprint:
            raise InvalidRequestError("the state was made by another model or build", param="state")
        payload = np.frombuffer(data, np.uint8)[_HEADER.size :]
        if len(payload) != size or _checksum(payload) != checksum:
            raise InvalidRequestError(
                f"the state is damaged: {len(payload)} of {size} bytes, or its checksum differs",
                param="state",
            )
        return payload, int(num_tokens), bool(has_initial_state)


def _fingerprint(model: LlamaModel, context: LlamaContext, file_fingerprint: str) -> bytes:
    """Sixteen bytes that differ between models and between layouts of the cache."""
    parts = (
        _MAGIC,
        file_fingerprint,
        LIBRARY_VERSION,
        model.description,
        model.metadata("general.name"),
        model.shape,
        context.flash_attention,
        context.key_type,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


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

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._context = context
        context.step(BatchPlan((PlanItem(0, 0, (0,), 0),)))
        self._template = context.read_state(
            0
        )  # every state of this model has these bytes but for the numbers
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
        payload = self._context.read_state(seq) if is_begun else self._template
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
        self._context.write_state(seq, payload, 0)
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


class HiddenStates:
    """Hidden states of the sequences of `context`."""

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._model = model
        self._context = context

    def __repr__(self) -> str:
        return f"<HiddenStates of {self._context!r}>"

    def last(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """See `LastHidden`."""
        held = self._context.lengths[seq]
        assert held in {len(tokens), len(tokens) - 1}, f"sequence {seq} holds {held} of {len(tokens)} tokens"
        if held == len(tokens):
            if held > 1 and not self._model.keeps_every_cell:
                if seq in self._context.with_initial_state:
                    raise UnsupportedError("a sequence that began from a state cannot be computed once more")
                return self._alone(tokens)
            self._context.trim(seq, held - 1)
        return self._stepped(self._context, seq, tokens[-1])

    def _alone(self, tokens: Sequence[int]) -> Tensor:
        """Computed once more from the first token, in a context made for it."""
        is_off = self._context.flash_attention == "off"
        options = ContextOptions(
            num_cells=len(tokens),
            n_batch=self._context.n_ubatch,
            num_sequences=1,
            num_threads=self._context.num_threads,
            key_type=self._context.key_type,
            flash_attention=FlashAttention.OFF if is_off else FlashAttention.AUTO,
        )
        try:
            context = LlamaContext(self._model, options)
        except ModelLoadError as error:
            raise StepFailedError(f"a hidden state needs a context of its own: {error}") from error
        try:
            for begin in range(0, len(tokens) - 1, context.n_batch):
                part = tokens[begin : min(begin + context.n_batch, len(tokens) - 1)]
                context.step(BatchPlan((PlanItem(0, begin, part, 0),)))
            return self._stepped(context, 0, tokens[-1])
        finally:
            context.close()

    @staticmethod
    def _stepped(context: LlamaContext, seq: int, token: int) -> Tensor:
        found = context.step_hidden(seq, token)
        return Tensor("hidden", found.shape, found.astype("<f4").tobytes())
