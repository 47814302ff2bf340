from __future__ import annotations

import os
import random
import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from gguf_files import CHAT_TEMPLATE, HEADS, TOKENS, WIDTH, write_tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import ModelClass
from stoker.models.gguf import bounded_file
from stoker.models.gguf.bounded_file import BoundedFile, GgufArray
from stoker.models.gguf.header import read_header
from stoker.models.gguf.tensor_types import TENSOR_TYPES
from tiny_models import (
    write_bert,
    write_gemma3,
    write_jamba,
    write_llama,
    write_rwkv6,
    write_rwkv7,
    write_t5,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

U32_BOUNDS = (0, 1, 2, 3, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
U64_BOUNDS = (0, 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MAX_GROWTH_KIB = 64 * 1024


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a valid tiny model."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


def refused(path: Path, pattern: str) -> None:
    """The file is refused with an error that names it and matches."""
    with pytest.raises(ModelFileError, match=pattern) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_is_walked_over_once_though_merges_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L10, R1: it is looked at again behind them; a walk takes 40 ms for 150,000 tokens."""
    walked: list[str] = []
    walk = BoundedFile._read_strings

    def counted(file: BoundedFile, length: int, what: str) -> list[bytes]:
        walked.append(what)
        return walk(file, length, what)

    monkeypatch.setattr(BoundedFile, "_read_strings", counted)
    tokens = [*TOKENS, *(f"word{number}" for number in range(2000))]
    merges = [f"a b{number}" for number in range(2000)]
    path = write_tiny(tmp_path / "t.gguf", tokens=tokens, changes={"tokenizer.ggml.merges": merges})
    assert read_header(path).token_text(len(tokens) - 1) == "word1999"
    in_header = [what for what in walked if "merges" in what or "tokens" in what][:2]
    assert in_header == ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"]
    assert len(walked) == 3, "the last is the token's own, of a file opened anew"


_AWKWARD = st.sampled_from(
    [b"", b"\0", bytes(7), bytes(8), b"\5" + bytes(7), b"x" * 255, b"x" * 256, b"x" * 3000]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=9), _AWKWARD), max_size=200), st.integers(1, 400))
def test_strings_are_found_whatever_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strings: list[bytes], window_bytes: int
) -> None:
    """SPEC R1: any may hold zeros, be empty, or end where what was read of the file does."""
    monkeypatch.setattr(bounded_file, "_WINDOW_BYTES", window_bytes)
    path = tmp_path / "strings"
    path.write_bytes(b"head" + b"".join(struct.pack("<Q", len(each)) + each for each in strings) + b"tail")
    with BoundedFile(path) as file:
        file.seek(4)
        assert file._read_strings(len(strings), "words") == strings
        assert file.read(4, "the tail") == b"tail"


def test_a_header_tells_what_the_file_holds(tmp_path: Path) -> None:
    """SPEC R1, K1: everything that is needed before a load is in the header."""
    path = write_tiny(tmp_path / "tiny.gguf")
    header = read_header(path)
    assert (header.version, header.architecture) == (3, "llama")
    assert header.model_class is ModelClass.DECODER
    assert (header.n_ctx_train, header.block_count, header.embedding_length) == (256, 2, WIDTH)
    assert header.chat_template == CHAT_TEMPLATE
    assert (header.n_vocab, header.bos_text, header.eos_text) == (len(TOKENS), "<s>", "</s>")
    assert header.quantisation == "F32"
    assert header.tensor_types == {"F32"}
    assert header.file_size == header.size_bytes == path.stat().st_size
    assert header.shards == (path,)


def test_the_tensor_table_agrees_with_another_reader(tmp_path: Path) -> None:
    """SPEC R1: names, shapes, types and places are those that the reference reader finds."""
    path = write_tiny(tmp_path / "tiny.gguf")
    header, reference = read_header(path), gguf.GGUFReader(path)
    assert [
        (each.name, list(each.shape), each.type_name, header.data_offset + each.offset, each.size_bytes)
        for each in header.tensors
    ] == [
        (each.name, each.shape.tolist(), each.tensor_type.name, each.data_offset, each.n_bytes)
        for each in reference.tensors
    ]
    assert header.num_params == sum(int(each.n_elements) for each in reference.tensors)


def test_long_arrays_are_left_in_the_file_and_read_on_demand(tmp_path: Path) -> None:
    """SPEC R1: a vocabulary costs no memory, single tokens are there all the same."""
    tokens = [*TOKENS, *(f"word{index}" for index in range(2000))]
    header = read_header(write_tiny(tmp_path / "tiny.gguf", tokens=tokens))
    array = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(array, GgufArray)
    assert (array.element_type, array.length, array.values) == ("string", len(tokens), None)
    assert [header.token_text(index) for index in (1, 300, len(tokens) - 1)] == [
        tokens[1],
        tokens[300],
        tokens[-1],
    ]
    assert (header.token_text(-1), header.token_text(len(tokens))) == ("", "")


def test_known_block_sizes_are_those_of_the_reference() -> None:
    """SPEC R1: tensor sizes are computed from ggml's own block sizes."""
    legacy = {"Q8_1"}  # the reference counts two floats, ggml stores two halves
    for number, (elements, size_bytes) in gguf.GGML_QUANT_SIZES.items():
        known = TENSOR_TYPES[int(number)]
        assert known.name == number.name
        if known.name not in legacy:
            assert (known.block_elements, known.block_bytes) == (elements, size_bytes)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("qwen2", ModelClass.DECODER),
        ("gemma3", ModelClass.DECODER),
        ("bert", ModelClass.ENCODER),
        ("nomic-bert", ModelClass.ENCODER),
        ("t5", ModelClass.ENCODER_DECODER),
        ("jamba", ModelClass.HYBRID),
        ("falcon-h1", ModelClass.HYBRID),
        ("granitehybrid", ModelClass.HYBRID),
        ("lfm2", ModelClass.HYBRID),
        ("nemotron_h", ModelClass.HYBRID),
        ("plamo2", ModelClass.HYBRID),
        ("qwen3next", ModelClass.HYBRID),
    ],
)
def test_the_class_follows_from_the_architecture(
    tmp_path: Path, architecture: str, expected: ModelClass
) -> None:
    """SPEC K1: class from the metadata, before any load."""
    assert read_header(write_tiny(tmp_path / "m.gguf", architecture=architecture)).model_class is expected


def test_recurrent_models_need_their_state_sizes(tmp_path: Path) -> None:
    """SPEC K1, R1: Mamba and RWKV are recurrent; sizes the native graph divides by have to be there."""
    sizes = {"conv_kernel": 4, "inner_size": 64, "state_size": 16, "time_step_rank": 2}
    good = {f"mamba.ssm.{name}": np.uint32(value) for name, value in sizes.items()}
    path = write_tiny(tmp_path / "m.gguf", architecture="mamba", changes=good)
    assert read_header(path).model_class is ModelClass.RECURRENT
    for key in good:
        refused(
            write_tiny(tmp_path / "z.gguf", architecture="mamba", changes=good | {key: np.uint32(0)}), key
        )
        refused(write_tiny(tmp_path / "n.gguf", architecture="mamba", changes=good | {key: None}), key)
    heads = {"rwkv7.wkv.head_size": np.uint32(8), "rwkv7.attention.head_count_kv": None}
    path = write_tiny(tmp_path / "r.gguf", architecture="rwkv7", changes=heads)
    assert read_header(path).model_class is ModelClass.RECURRENT
    uneven = heads | {"rwkv7.wkv.head_size": np.uint32(5)}
    refused(write_tiny(tmp_path / "u.gguf", architecture="rwkv7", changes=uneven), "does not divide")
    wrong = heads | {"rwkv7.attention.head_count": np.uint32(3)}
    refused(write_tiny(tmp_path / "w.gguf", architecture="rwkv7", changes=wrong), "the state has 4 heads")


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("clip", "projector"), ("llada", "diffusion"), ("eagle3", "draft"), ("made-up", "does not know")],
)
def test_what_is_no_language_model_is_refused(tmp_path: Path, architecture: str, why: str) -> None:
    """SPEC K1: neither class is a typed error that says what the file is."""
    with pytest.raises(UnsupportedError, match=why):
        read_header(write_tiny(tmp_path / "m.gguf", architecture=architecture))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_llama, ModelClass.DECODER),
        (write_gemma3, ModelClass.DECODER),
        (write_bert, ModelClass.ENCODER),
        (write_t5, ModelClass.ENCODER_DECODER),
        (write_rwkv6, ModelClass.RECURRENT),
        (write_rwkv7, ModelClass.RECURRENT),
        (write_jamba, ModelClass.HYBRID),
    ],
)
def test_files_of_every_class_are_read(
    tmp_path: Path, write: Callable[[Path], Path], expected: ModelClass
) -> None:
    """SPEC K1, R1: models that llama.cpp runs pass every check."""
    assert read_header(write(tmp_path / "m.gguf")).model_class is expected


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.head_count": None}, "head_count is missing"),
        ({"llama.attention.head_count": np.uint32(0)}, "head_count is missing or 0"),
        ({"llama.attention.head_count": np.uint32(5)}, "does not divide the embedding length 32"),
        ({"llama.attention.head_count_kv": np.uint32(3)}, "head_count_kv is 3, which does not divide 4"),
        ({"llama.attention.head_count_kv": np.uint32(0)}, "head_count_kv is 0"),
        ({"llama.attention.head_count": "four"}, "head_count is not an integer"),
        ({"llama.attention.head_count": [HEADS]}, "has 1 values for 2 layers"),
        ({"llama.context_length": np.uint32(0)}, "context_length is 0"),
        ({"llama.context_length": np.uint32(2**32 - 1)}, "context_length is 4294967295"),
        ({"llama.embedding_length": np.uint32(64)}, "rows of 32, not of 64"),
        ({"llama.feed_forward_length": np.uint32(0)}, "feed_forward_length is 0"),
        ({"llama.feed_forward_length": np.uint32(2**30)}, "feed_forward_length is 1073741824"),
        ({"llama.block_count": np.uint32(1)}, "block_count is 1, the tensors are of 2 layers"),
        ({"llama.block_count": np.uint32(3)}, "block_count is 3, the tensors are of 2 layers"),
        ({"llama.block_count": np.uint32(100_000)}, "block_count is 100000"),
        ({"llama.attention.key_length": np.uint32(0)}, "key_length is 0"),
        ({"llama.rope.freq_base": np.float32("nan")}, "freq_base is not a finite number"),
        ({"llama.rope.freq_base": np.float32(-1)}, "freq_base is -1.0"),
        ({"llama.rope.freq_base": np.uint32(10_000)}, "freq_base is 10000, a number"),
        ({"llama.rope.dimension_count": np.uint32(7)}, "dimension_count is 7, an even"),
        ({"llama.rope.scaling.type": "bent"}, "scaling.type is 'bent'"),
        ({"llama.attention.layer_norm_rms_epsilon": np.float32(0)}, "epsilon is 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": np.float32("inf")}, "epsilon is not a finite"),
        ({"llama.expert_count": np.uint32(4)}, "0 of 4 experts"),
        ({"llama.expert_used_count": np.uint32(2)}, "2 experts in 0 groups are used"),
        ({"llama.expert_count": np.uint32(5000)}, "expert_count is 5000"),
        ({"llama.pooling_type": np.uint32(9)}, "pooling_type is 9"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "none"}, "no vocabulary"),
        ({"tokenizer.ggml.model": "abacus"}, "'abacus', a tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "has 263 values for 262 tokens"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "the token '<unk>' occurs 2 times"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:5], "gap", *TOKENS[6:]]}, "1 of 256 byte tokens are missing"),
        ({"tokenizer.ggml.tokens": list(range(263))}, "tokens is not an array of string"),
        ({"tokenizer.ggml.scores": [0.5] * 10}, "scores has 10 values for 263"),
        ({"tokenizer.ggml.scores": [float("nan")] * 263}, "no finite number"),
        ({"tokenizer.ggml.token_type": [1] * 264}, "token_type has 264 values for 263"),
        ({"tokenizer.ggml.bos_token_id": np.uint32(263)}, "bos_token_id is 263"),
        ({"tokenizer.ggml.eos_token_id": np.uint32(10**6)}, "eos_token_id is 1000000"),
        ({"tokenizer.ggml.add_bos_token": np.uint32(1)}, "add_bos_token is not a bool"),
        ({"tokenizer.chat_template": np.uint32(1)}, "chat_template is not a string"),
        ({"split.count": "three"}, "split.count is not a number"),
        ({"split.count": np.uint16(3)}, "has to be named NAME-00001-of-00003.gguf"),
    ],
)
def test_inconsistent_metadata_is_refused(tmp_path: Path, changes: dict[str, Any], pattern: str) -> None:
    """SPEC R1: what the native loader would assert on is a typed error with the key and the numbers."""
    refused(write_tiny(tmp_path / "m.gguf", changes=changes), pattern)


def test_a_token_that_is_added_has_to_exist(tmp_path: Path) -> None:
    """SPEC R1: the native tokenizer asserts on an added token without an id."""
    changes = {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.bos_token_id": None}
    refused(write_tiny(tmp_path / "m.gguf", changes=changes), "add_bos_token asks for a token")


@pytest.mark.parametrize(
    ("shapes", "pattern"),
    [
        ({"token_embd.weight": (10, WIDTH)}, r"shape \(32, 10\), the vocabulary 263"),
        ({"token_embd.weight": (len(TOKENS), 16)}, "rows of 16, not of 32"),
        ({"blk.7.attn_q.weight": (WIDTH, WIDTH)}, "tensors are of 3 layers up to 7"),
    ],
)
def test_shapes_that_contradict_the_metadata_are_refused(
    tmp_path: Path, shapes: dict[str, Any], pattern: str
) -> None:
    """SPEC R1: tensor shapes agree with the hyperparameters and the vocabulary."""
    refused(write_tiny(tmp_path / "m.gguf", shapes=shapes), pattern)


def test_layers_of_a_left_out_draft_head_may_be_missing(tmp_path: Path) -> None:
    """SPEC R1: files whose converter dropped the draft layers are sound."""
    changes = {"llama.block_count": np.uint32(3), "llama.nextn_predict_layers": np.uint32(1)}
    assert read_header(write_tiny(tmp_path / "m.gguf", changes=changes)).block_count == 3


def patched(tiny: bytes, path: Path, position: int, replacement: bytes) -> Path:
    """The tiny model with some bytes replaced."""
    path.write_bytes(tiny[:position] + replacement + tiny[position + len(replacement) :])
    return path


def key_value_at(tiny: bytes, key: str) -> int:
    """Where the value of a key begins (behind its type)."""
    return tiny.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4


def tensor_at(tiny: bytes, name: str) -> int:
    """Where the dimension count of a tensor stands."""
    return tiny.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("position", "replacement", "pattern"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack("<I", 9), "GGUF version 9"),
        (4, struct.pack("<I", 0), "GGUF version 0"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**62), "claims 4611686018427387904 tensors"),
        (8, struct.pack("<q", -1), "tensors"),
        (8, struct.pack("<Q", 0), "no tensors"),
        (16, struct.pack("<Q", 2**40), "claims 1099511627776 metadata keys"),
        (24, struct.pack("<Q", 2**63), "metadata key 0 claims 9223372036854775808 bytes"),
        (24, struct.pack("<Q", 0), "metadata key 0 is ''"),
        (32, b"\xff\xfe", "metadata key 0 is not UTF-8"),
    ],
)
def test_hostile_counts_are_refused(
    tiny: bytes, tmp_path: Path, position: int, replacement: bytes, pattern: str
) -> None:
    """SPEC R1: counts and lengths are compared with the file before anything is allocated."""
    refused(patched(tiny, tmp_path / "m.gguf", position, replacement), pattern)


@pytest.mark.parametrize(
    ("offset", "replacement", "pattern"),
    [
        (0, struct.pack("<I", 0), "has 0 dimensions"),
        (0, struct.pack("<I", 5), "has 5 dimensions"),
        (4, struct.pack("<q", -32), "impossible shape"),
        (4, struct.pack("<q", 0), "impossible shape"),
        (4, struct.pack("<qq", 2**40, 2**40), "impossible shape"),
        (20, struct.pack("<I", 4), "unknown type 4"),
        (20, struct.pack("<I", 99), "unknown type 99"),
        (20, struct.pack("<I", 12), "no multiple of Q4_K's 256"),
        (24, struct.pack("<Q", 32), "lies at 32 of the data"),
        (24, struct.pack("<Q", 2**63), "lies at 9223372036854775808"),
    ],
)
def test_hostile_tensors_are_refused(
    tiny: bytes, tmp_path: Path, offset: int, replacement: bytes, pattern: str
) -> None:
    """SPEC R1: dimensions, types and places of tensors are bounded."""
    position = tensor_at(tiny, "blk.0.attn_q.weight") + offset
    refused(patched(tiny, tmp_path / "m.gguf", position, replacement), pattern)


def test_arrays_are_bounded(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1: array lengths, element types and nesting are checked before they are followed."""
    at = key_value_at(tiny, "tokenizer.ggml.scores")
    path = tmp_path / "m.gguf"
    refused(patched(tiny, path, at, struct.pack("<I", 9)), "array of arrays")
    refused(patched(tiny, path, at, struct.pack("<I", 77)), "unknown element type 77")
    refused(patched(tiny, path, at + 4, struct.pack("<Q", 2**61)), "claims 2305843009213693952 elements")
    refused(patched(tiny, path, at + 4, struct.pack("<Q", 10**6)), "truncated")
    at = key_value_at(tiny, "tokenizer.ggml.tokens")
    refused(patched(tiny, path, at + 12, struct.pack("<Q", 2**50)), "claims 1125899906842624 bytes")
    refused(patched(tiny, path, at + 20, b"\xff"), "not UTF-8")


def test_values_of_an_impossible_type_are_refused(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1: an unknown value type and a bool that is neither 0 nor 1."""
    path, at = tmp_path / "m.gguf", key_value_at(tiny, "tokenizer.ggml.add_bos_token")
    refused(patched(tiny, path, at, b"\x02"), "a bool with the value 2")
    refused(patched(tiny, path, at - 4, struct.pack("<I", 13)), "unknown value type 13")


def test_what_occurs_twice_is_refused(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1: duplicate keys and duplicate tensors."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"))
    refused(path, "eos_token_id' occurs twice")
    path.write_bytes(tiny.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    refused(path, "'blk.0.attn_q.weight' occurs twice")


def test_weights_of_a_type_no_product_takes_are_refused(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1: integers are no weights, vectors are single precision; the native code aborts on others."""
    at = tensor_at(tiny, "blk.0.attn_q.weight") + 20
    refused(patched(tiny, tmp_path / "m.gguf", at, struct.pack("<I", 26)), "of type I32")
    at = tensor_at(tiny, "output_norm.weight") + 12
    refused(patched(tiny, tmp_path / "m.gguf", at, struct.pack("<I", 26)), "of type I32, not F32")


@pytest.mark.parametrize("alignment", [1, 8, 1 << 20])
def test_an_absurd_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    """SPEC R1: an alignment the native vector loads cannot take, or that wastes the file."""
    refused(write_tiny(tmp_path / "m.gguf", alignment=alignment), f"alignment is {alignment}")


def test_a_larger_alignment_is_honoured(tmp_path: Path) -> None:
    """SPEC R1: data offset and tensor places follow the file's own alignment."""
    header = read_header(write_tiny(tmp_path / "m.gguf", alignment=4096))
    assert header.data_offset % 4096 == 0
    assert all(tensor.offset % 4096 == 0 for tensor in header.tensors)


def test_every_truncation_is_noticed(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1, R7: a file that lacks its end, wherever it was cut, is refused."""
    path = tmp_path / "m.gguf"
    lengths = [*range(0, len(tiny), 397), len(tiny) - 1]
    for length in lengths:
        path.write_bytes(tiny[:length])
        with pytest.raises(ModelFileError, match=r"truncated|not a GGUF|bytes are left"):
            read_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """SPEC R7: missing, a folder, a pipe, an unreadable place: typed, at once, without hanging."""
    refused(tmp_path / "none.gguf", "no such file")
    refused(tmp_path, "a folder")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "not a regular file")
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "not a GGUF file")


def test_an_unfinished_download_is_refused(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R7: a partial marker, in the name or beside the file."""
    for name in ("m.gguf.part", "m.gguf.0123abcd.incomplete"):
        (tmp_path / name).write_bytes(tiny)
        refused(tmp_path / name, "has not finished")
    for suffix in (".part", ".incomplete", ".aria2"):
        path = tmp_path / f"x{suffix[1:]}.gguf"
        path.write_bytes(tiny)
        marker = path.with_name(path.name + suffix)
        marker.touch()
        refused(path, "has not finished")
        marker.unlink()
        read_header(path)


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model in three shards."""
    write_tiny(tmp_path / "tiny.gguf", shard_tensors=7)
    paths = sorted(tmp_path.glob("tiny-*-of-*.gguf"))
    assert len(paths) == 3
    return paths


def test_a_complete_split_model_is_read_as_one(split: list[Path], tmp_path: Path) -> None:
    """SPEC R7: the tensors and bytes of all shards count."""
    whole = read_header(write_tiny(tmp_path / "whole.gguf"))
    header = read_header(split[0])
    assert header.shards == tuple(split)
    assert {tensor.name for tensor in header.tensors} == {tensor.name for tensor in whole.tensors}
    assert header.num_params == whole.num_params
    assert header.size_bytes == sum(path.stat().st_size for path in split)


def test_a_missing_shard_is_named(split: list[Path]) -> None:
    """SPEC R7: every shard present, or the error names the missing file."""
    split[2].unlink()
    refused(split[0], rf"shard {split[2].name} is missing")


def test_a_broken_or_foreign_shard_is_named(split: list[Path], tiny: bytes) -> None:
    """SPEC R7: sizes match in every shard, and each is the one its name says."""
    data = split[1].read_bytes()
    split[1].write_bytes(data[:-1])
    with pytest.raises(ModelFileError, match=rf"{split[1].name}: truncated"):
        read_header(split[0])
    split[1].write_bytes(split[2].read_bytes())
    with pytest.raises(ModelFileError, match=rf"{split[1].name}: says it is shard number 2"):
        read_header(split[0])
    split[1].write_bytes(tiny)
    with pytest.raises(ModelFileError, match="says it is shard number None"):
        read_header(split[0])


def test_a_further_shard_points_to_the_first(split: list[Path]) -> None:
    """SPEC R7: the path to give is named."""
    refused(split[1], f"not the first shard; give {split[0].name}")


def mutations(tiny: bytes, header_bytes: int, count: int) -> Iterator[bytes]:
    """Bit flips, hostile numbers, truncations and shifts in the header, the same in every run."""
    dice = random.Random(20)
    for _ in range(count):
        data = bytearray(tiny)
        for _ in range(dice.choice((1, 1, 1, 2, 5))):
            at = dice.randrange(4, header_bytes - 8)
            match dice.randrange(6):
                case 0 | 1:
                    data[at] ^= 1 << dice.randrange(8)
                case 2:
                    struct.pack_into("<I", data, at, dice.choice(U32_BOUNDS))
                case 3:
                    struct.pack_into("<Q", data, at, dice.choice(U64_BOUNDS))
                case 4:
                    del data[at : at + dice.randrange(1, 9)]
                case _:
                    del data[dice.randrange(8, len(data)) :]
                    data += b"\0" * max(0, header_bytes - len(data))
        yield bytes(data)


@pytest.mark.long
def test_no_mutation_does_more_than_raise_a_typed_error(tiny: bytes, tmp_path: Path) -> None:
    """SPEC R1: 1,000 mutated headers are read or refused with a typed error, in bounded memory."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny)
    header_bytes = read_header(path).data_offset
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"read": 0, "refused": 0}
    for data in mutations(tiny, header_bytes, 1000):
        path.write_bytes(data)
        try:
            read_header(path)
        except (ModelFileError, UnsupportedError):
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
    assert outcomes["refused"] > 500
    assert sum(outcomes.values()) == 1000


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), num_tensors=st.integers(0, 3), num_keys=st.integers(0, 3))
def test_arbitrary_bytes_behind_the_magic_are_refused(
    tmp_path: Path, tail: bytes, num_tensors: int, num_keys: int
) -> None:
    """SPEC R1: nothing that only begins like a model passes or escapes as another exception."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + tail)
    with pytest.raises((ModelFileError, UnsupportedError)):
        read_header(path)
