"""A small folder of a language model as MNN's own tools write it, with random weights, for tests.

The graph is made with MNN's expressions. These have no attention with a cache of keys and values, so each
attention is put in as an op of no known kind and becomes one in the file that MNN has written.
"""

from __future__ import annotations

import base64
import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

N_VOCAB = 320
IM_START, IM_END, END_OF_TEXT = 256, 257, 258
WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 64, 4, 2, 16, 128, 2
UNSAID = -30.0
"""Added to the logits of tokens that a text of a test is better without."""
_EXTRA, _ATTENTION, ATTENTION_MAIN = 512, 299, 98  # numbers of the schema
_NET_OPS, _OP_MAIN_TYPE, _OP_MAIN, _OP_TYPE = 3, 1, 2, 5

FILES = (
    "config.json",
    "llm_config.json",
    "llm.mnn",
    "llm.mnn.weight",
    "tokenizer.txt",
    "embeddings_bf16.bin",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def tiny_mnn_folder(path: Path, *, form: int = 1, main: int = ATTENTION_MAIN, **settings: Any) -> Path:
    """Write a folder to `path`.

    Args:
        path: it is made.
        form: of the tokenizer: 0 SentencePiece, 1 longest match.
        main: kind of the attentions' parameters; MNN ends the process that loads most others.
        settings: put into llm_config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "llm.mnn").write_bytes(_with_attentions(_graph(), main))
    (path / "llm.mnn.weight").write_bytes(bytes(64))  # the weights of so small a model lie in the graph
    embeddings = np.random.default_rng(1).standard_normal((N_VOCAB, WIDTH)).astype(np.float32)
    halves = (embeddings.view(np.uint32) >> 16).astype(np.uint16)
    (path / "embeddings_bf16.bin").write_bytes(halves.tobytes())
    (path / "tokenizer.txt").write_text(_tokenizer(form))
    config = {"llm_model": "llm.mnn", "llm_weight": "llm.mnn.weight", "backend_type": "cpu", "thread_num": 4}
    config |= {"precision": "high", "memory": "high", "sampler_type": "mixed"}
    (path / "config.json").write_text(json.dumps(config))
    inner = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "layer_nums": LAYERS,
        "attention_mask": "float",
        "key_value_shape": [2, 1, 0, KV_HEADS, HEAD],
        "jinja": {"chat_template": CHAT_TEMPLATE, "eos": "<|im_end|>"},
    }
    (path / "llm_config.json").write_text(json.dumps(inner | settings))
    return path


def tokens() -> list[bytes]:
    """What each token is spelled with."""
    found = [bytes([byte]) for byte in range(256)] + [b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>"]
    return found + [f" w{number}".encode() for number in range(len(found), N_VOCAB)]


def _tokenizer(form: int) -> str:
    """The text form: head, count, and a token a line in base 64."""
    head = [f"430 {form}", "3 2 0", f"{IM_START} {IM_END} {END_OF_TEXT} {IM_END} {END_OF_TEXT}", str(N_VOCAB)]
    lines = [base64.b64encode(token).decode() for token in tokens()]
    if form == 0:
        spelled = [b"<0x%02X>" % byte if byte != 32 else "▁".encode() for byte in range(256)]
        kinds = [6 if byte != 32 else 1 for byte in range(256)] + [3] * 3
        kinds += [1] * (N_VOCAB - len(kinds))
        spelled += [token.replace(b" ", "▁".encode()) for token in tokens()[256:]]
        rows = zip(spelled, kinds, strict=True)
        lines = [f"{base64.b64encode(text).decode()} {-at} {kind}" for at, (text, kind) in enumerate(rows)]
    return "\n".join([*head, *lines]) + "\n"


@cache
def _graph() -> bytes:
    """The model's graph as MNN writes it, with ops of no known kind in place of attentions."""
    expr = pytest.importorskip("MNN.expr", reason="MNN is not installed (the mnn extra)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.mnn"
        expr.save([_Net(expr._F).logits()], str(file), False)
        return file.read_bytes()


class _Net:
    """A Llama of two layers in expressions of MNN's."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._random = np.random.default_rng(0)

    def logits(self) -> Any:
        """What the graph computes of embeddings, positions and the number of the first row that is asked."""
        ops = self._ops
        hidden = self._input("input_ids", [1, 1, WIDTH], ops.float)
        mask = self._input("attention_mask", [], ops.float)
        positions = self._input("position_ids", [1, 1], ops.int)
        first = self._input("logits_index", [1], ops.int)
        turns = self._turns(positions)
        hidden = ops.reshape(hidden, [-1, WIDTH], ops.NCHW)
        for _ in range(LAYERS):
            hidden = ops.add(hidden, self._attention(self._norm(hidden), mask, turns))
            hidden = ops.add(hidden, self._mlp(self._norm(hidden)))
        hidden = ops.reshape(self._norm(hidden), [1, -1, WIDTH], ops.NCHW)
        zero = self._const(np.zeros(1, np.int32))
        begin = ops.concat([zero, first, zero], 0)
        end, step = self._const(np.array([1, 2**31 - 1, WIDTH], np.int32)), self._const(np.ones(3, np.int32))
        hidden = ops.strided_slice(hidden, begin, end, step, 0, 2, 0, 0, 0)
        rows = ops.matmul(
            ops.reshape(hidden, [-1, WIDTH], ops.NCHW), self._weight(WIDTH, N_VOCAB), False, False
        )
        unsaid = np.zeros(N_VOCAB, np.float32)
        unsaid[:32] = unsaid[127 : END_OF_TEXT + 1] = UNSAID
        found = ops.reshape(ops.add(rows, self._const(unsaid)), [1, -1, N_VOCAB], ops.NCHW)
        found.name = "logits"
        return found

    def _input(self, name: str, shape: list[int], kind: Any) -> Any:
        found = self._ops.placeholder(shape, self._ops.NCHW, kind)
        found.name = name
        return found

    def _const(self, values: Any) -> Any:
        kind = self._ops.float if values.dtype.kind == "f" else self._ops.int
        return self._ops.const(values.ravel().tolist(), list(values.shape), self._ops.NCHW, kind)

    def _weight(self, rows: int, columns: int) -> Any:
        values = self._random.standard_normal((rows, columns)) / np.sqrt(rows)
        return self._const(values.astype(np.float32))

    def _turns(self, positions: Any) -> tuple[Any, Any]:
        ops = self._ops
        speeds = (10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)).astype(np.float32).reshape(1, 1, 1, HEAD // 2)
        angles = ops.reshape(ops.cast(positions, ops.float), [1, -1, 1, 1], ops.NCHW)
        angles = ops.multiply(angles, self._const(speeds))
        angles = ops.concat([angles, angles], 3)
        return ops.cos(angles), ops.sin(angles)

    def _turned(self, values: Any, heads: int, turns: tuple[Any, Any]) -> Any:
        ops = self._ops
        values = ops.reshape(values, [1, -1, heads, HEAD], ops.NCHW)
        left, right = ops.split(values, [HEAD // 2, HEAD // 2], 3)
        crossed = ops.concat([ops.negative(right), left], 3)
        return ops.add(ops.multiply(values, turns[0]), ops.multiply(crossed, turns[1]))

    def _norm(self, hidden: Any) -> Any:
        ops = self._ops
        mean = ops.reduce_mean(ops.multiply(hidden, hidden), [-1], True)
        least = self._const(np.array([1e-5], np.float32))
        return ops.multiply(hidden, ops.rsqrt(ops.add(mean, least)))

    def _product(self, hidden: Any, rows: int, columns: int) -> Any:
        return self._ops.matmul(hidden, self._weight(rows, columns), False, False)

    def _attention(self, hidden: Any, mask: Any, turns: tuple[Any, Any]) -> Any:
        ops = self._ops
        query = self._turned(self._product(hidden, WIDTH, HEADS * HEAD), HEADS, turns)
        key = self._turned(self._product(hidden, WIDTH, KV_HEADS * HEAD), KV_HEADS, turns)
        value = self._product(hidden, WIDTH, KV_HEADS * HEAD)
        value = ops.reshape(value, [1, -1, KV_HEADS, HEAD], ops.NCHW)
        (found,) = ops.jsonop([query, key, value, mask], "attention", 1)
        return self._product(ops.reshape(found, [-1, HEADS * HEAD], ops.NCHW), HEADS * HEAD, WIDTH)

    def _mlp(self, hidden: Any) -> Any:
        ops = self._ops
        gate, up = self._product(hidden, WIDTH, INNER), self._product(hidden, WIDTH, INNER)
        inner = ops.multiply(ops.multiply(gate, ops.sigmoid(gate)), up)
        return self._product(inner, INNER, WIDTH)


def _with_attentions(graph: bytes, main_kind: int) -> bytes:
    """The graph with each op of no known kind as an attention, its parameters left at their defaults."""
    data = bytearray(graph)
    data += bytes(-len(data) % 4)
    empty = len(data)  # what tells of a table that it has no fields
    data += struct.pack("<HH", 4, 4)

    def word(at: int) -> int:
        return int(struct.unpack_from("<i", data, at)[0])

    def field(table: int, number: int) -> int:
        head = table - word(table)
        size = int(struct.unpack_from("<H", data, head)[0])
        at = 4 + 2 * number
        offset = int(struct.unpack_from("<H", data, head + at)[0]) if at < size else 0
        return table + offset if offset else 0

    ops = field(word(0), _NET_OPS)
    ops += word(ops)
    for at in range(ops + 4, ops + 4 + 4 * word(ops), 4):
        op = at + word(at)
        kind = field(op, _OP_TYPE)
        if kind and word(kind) == _EXTRA:
            struct.pack_into("<i", data, kind, _ATTENTION)
            data[field(op, _OP_MAIN_TYPE)] = main_kind
            main = field(op, _OP_MAIN)
            main += word(main)
            struct.pack_into("<i", data, main, main - empty)
    return bytes(data)
