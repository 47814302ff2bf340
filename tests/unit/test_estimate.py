"""What a model will take, told from headers that a test bends; tests/real/test_estimates.py measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf_files import HEADS, SHARED_HEADS, WIDTH, TinyModel

from stoker.errors import ModelFileError, UnsupportedError
from stoker.ipc.model import FlashAttention, ModelSpec, PlacementSpec, SplitMode
from stoker.models.gguf.header import read_header
from stoker.models.memory_estimate import shares
from stoker.models.memory_estimate.estimate import SPARE_SEQUENCES, estimator, estimator_of, num_sequences
from stoker.models.memory_estimate.layers import read_layers
from stoker.models.memory_estimate.shares import read_parts
from tiny_models import CONTEXT_LENGTH, CONV, INNER, RWKV_WIDTH, STATE, TINY, WINDOW, write_bert

if TYPE_CHECKING:
    from stoker.models.gguf.header import GgufHeader

HEAD = WIDTH // HEADS
KV_LAYER_BYTES = 2 * SHARED_HEADS * HEAD * 2  # of one cell: keys and values, two bytes each


def spec(**changes: Any) -> ModelSpec:
    """A model of 1024 cells and one slot."""
    return ModelSpec(**{"id": "m", "path": "m", "n_ctx": 1024, "num_slots": 1, "num_threads": 1, **changes})


def lines(path: Path, **changes: Any) -> dict[str, int]:
    """The estimate's lines."""
    return dict(estimator_of(path)(spec(**changes)).lines)


def uint32s(values: Sequence[int]) -> list[int]:
    """A list as GGUF carries it."""
    return [int(value) for value in values]


def windowed(folder: Path, architecture: str, **changes: Any) -> list[bool]:
    """Which layers of a model of six see a window only."""
    keys = {f"{architecture}.{name.replace('__', '.')}": value for name, value in changes.items()}
    path = TinyModel(architecture=architecture, num_layers=6, changes=keys).write(folder / "m.gguf")
    return [layer.is_windowed for layer in read_layers(read_header(path)).each]


def test_weights_are_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    """SPEC R1: the tensor table, not the size of the file with its vocabulary and padding."""
    model = TinyModel()
    path = model.write(tmp_path / "m.gguf")
    assert lines(path)["weights"] == sum(array.nbytes for array in model.tensors().values())
    assert "repacked" not in lines(path)


def test_cells_count_the_shared_heads_of_every_layer(tmp_path: Path) -> None:
    """SPEC R1: grouped queries share keys and values."""
    path = TinyModel(num_layers=3).write(tmp_path / "m.gguf")
    assert lines(path)["kv"] == 1024 * 3 * KV_LAYER_BYTES


def test_layers_may_differ_in_their_shared_heads(tmp_path: Path) -> None:
    """SPEC R1: some models name them layer by layer; 0 is a layer without cells."""
    changes = {"llama.attention.head_count_kv": uint32s([4, 0, 2])}
    path = TinyModel(num_layers=3, changes=changes).write(tmp_path / "m.gguf")
    assert lines(path)["kv"] == 1024 * (4 + 0 + 2) * 2 * HEAD * 2


def test_heads_may_be_wider_than_the_stream_divides(tmp_path: Path) -> None:
    """SPEC R1: key and value length have keys of their own."""
    changes = {
        "llama.attention.key_length": np.uint32(64),
        "llama.attention.value_length": np.uint32(32),
    }
    path = TinyModel(num_layers=1, changes=changes).write(tmp_path / "m.gguf")
    assert lines(path)["kv"] == 1024 * SHARED_HEADS * (64 + 32) * 2


def test_latent_attention_keeps_keys_alone(tmp_path: Path) -> None:
    """SPEC R1: the values are a part of the compressed keys."""
    changes = {
        "deepseek2.attention.head_count_kv": np.uint32(1),
        "deepseek2.attention.key_length": np.uint32(576),
        "deepseek2.attention.value_length": np.uint32(512),
        "deepseek2.attention.key_length_mla": np.uint32(192),
        "deepseek2.attention.value_length_mla": np.uint32(128),
    }
    path = TinyModel(architecture="deepseek2", num_layers=2, changes=changes).write(tmp_path / "m.gguf")
    assert lines(path)["kv"] == 1024 * 2 * 576 * 2


@pytest.mark.parametrize(("asked", "cells"), [(1, 256), (256, 256), (257, 512), (0, 512), (5000, 5120)])
def test_cells_are_rounded_up_as_the_library_does(tmp_path: Path, asked: int, cells: int) -> None:
    """SPEC R1: multiples of 256; 0 is the trained length."""
    path = TinyModel(num_layers=1, changes={"llama.context_length": np.uint32(300)}).write(
        tmp_path / "m.gguf"
    )
    found = estimator_of(path)(spec(n_ctx=asked))
    assert (found.n_ctx, found.lines["kv"]) == (cells, cells * KV_LAYER_BYTES)


@pytest.mark.parametrize(("kv_type", "size"), [("q8_0", 34 / 32 / 2), ("q4_0", 18 / 32 / 2), ("bf16", 1.0)])
def test_quantised_cells_take_less(tmp_path: Path, kv_type: str, size: float) -> None:
    """SPEC R2: 34 or 18 bytes for 32 elements instead of 64."""
    path = TinyModel().write(tmp_path / "m.gguf")
    assert lines(path, kv_type=kv_type)["kv"] == lines(path)["kv"] * size


def test_an_unknown_type_of_cells_is_refused(tmp_path: Path) -> None:
    """SPEC R1: not estimated as something else."""
    estimate = estimator_of(TinyModel().write(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedError, match="q7_9"):
        estimate(spec(kv_type="q7_9"))


def test_quantised_cells_are_offered_where_heads_are_whole_blocks(tmp_path: Path) -> None:
    """SPEC R2: llama.cpp refuses heads that 32 does not divide; cells that are small already stay."""
    narrow = estimator_of(TinyModel().write(tmp_path / "narrow.gguf"))
    changes = {f"llama.attention.{part}_length": np.uint32(32) for part in ("key", "value")}
    wide = estimator_of(TinyModel(changes=changes).write(tmp_path / "wide.gguf"))
    assert narrow(spec()).smaller_kv_types == ()
    assert wide(spec()).smaller_kv_types == ("q8_0",)
    assert wide(spec(kv_type="q8_0")).smaller_kv_types == ()


def test_without_flash_attention_the_scores_of_every_head_are_counted(tmp_path: Path) -> None:
    """SPEC R1, R2, C21: floats of every token and cell, wider masks; no quantised cells."""
    changes = {f"llama.attention.{part}_length": np.uint32(32) for part in ("key", "value")}
    path = TinyModel(changes=changes).write(tmp_path / "m.gguf")
    fused, off = (
        estimator_of(path)(spec(n_batch=512, flash_attention=each))
        for each in (FlashAttention.AUTO, FlashAttention.OFF)
    )
    least = 1024 * 512 * (HEADS * 4 + 2)
    assert least <= off.lines["compute"] - fused.lines["compute"] <= 1.1 * least
    assert (fused.smaller_kv_types, off.smaller_kv_types) == (("q8_0",), ())
    with pytest.raises(UnsupportedError, match="kv_type q8_0 needs it"):
        estimator_of(path)(spec(kv_type="q8_0", flash_attention=FlashAttention.OFF))


def test_windows_keep_quantised_cells_away(tmp_path: Path) -> None:
    """SPEC R2: a model with a window does not keep every cell."""
    changes: dict[str, Any] = {f"gemma2.attention.{part}_length": np.uint32(32) for part in ("key", "value")}
    changes["gemma2.attention.sliding_window"] = np.uint32(64)
    path = TinyModel(architecture="gemma2", changes=changes).write(tmp_path / "m.gguf")
    assert estimator_of(path)(spec()).smaller_kv_types == ()


@pytest.mark.parametrize("name", sorted(TINY))
def test_models_that_cannot_go_back_keep_their_kind_of_cells(tmp_path: Path, name: str) -> None:
    """SPEC R2: quantised cells are for models that keep every cell."""
    path = TINY[name](tmp_path / "m.gguf")
    assert estimator_of(path)(spec()).smaller_kv_types == ()


def test_a_recurrent_model_keeps_a_state_a_sequence(tmp_path: Path) -> None:
    """SPEC R1: slots and those to spare, whatever the context is."""
    state = (CONV - 1) * INNER + STATE * INNER
    path = TINY["mamba"](tmp_path / "m.gguf")
    for n_ctx in (1024, 65536):
        assert lines(path, n_ctx=n_ctx, num_slots=8)["kv"] == 2 * state * (8 + SPARE_SEQUENCES) * 4


def test_an_rwkv_keeps_two_shifted_tokens_and_a_matrix_a_head(tmp_path: Path) -> None:
    """SPEC R1: as n_embd_r and n_embd_s of llama.cpp."""
    path = TINY["rwkv7"](tmp_path / "m.gguf")
    state = 2 * RWKV_WIDTH + RWKV_WIDTH * RWKV_WIDTH
    assert lines(path)["kv"] == 2 * state * num_sequences(1) * 4


def test_a_hybrid_has_states_in_some_layers_and_cells_in_others(tmp_path: Path) -> None:
    """SPEC R1: those without shared heads are recurrent."""
    path = TINY["jamba"](tmp_path / "m.gguf")
    states = 2 * ((CONV - 1) * INNER + STATE * INNER) * num_sequences(1) * 4
    assert lines(path)["kv"] == states + 1024 * KV_LAYER_BYTES


@pytest.mark.parametrize(
    "keys",
    [
        {"full_attention_interval": np.uint32(3)},
        {"attention.recurrent_layers": [True, True, False]},
        {"attention.head_count_kv": uint32s([0, 0, SHARED_HEADS])},
    ],
)
def test_a_hybrid_names_its_recurrent_layers_in_one_of_three_ways(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """SPEC R1: two of three layers keep a state, with the convolved groups; the third has cells."""
    changes = {f"qwen35.{name}": value for name, value in keys.items()}
    sizes = {"conv_kernel": CONV, "inner_size": INNER, "state_size": STATE, "group_count": 2}
    changes |= {f"qwen35.ssm.{name}": np.uint32(size) for name, size in sizes.items()}
    path = TinyModel(architecture="qwen35", num_layers=3, changes=changes).write(tmp_path / "m.gguf")
    state = (CONV - 1) * (INNER + 2 * 2 * STATE) + STATE * INNER
    found = read_layers(read_header(path)).each
    assert [layer.state_width for layer in found] == [state, state, 0]
    assert [layer.key_width for layer in found] == [0, 0, SHARED_HEADS * HEAD]


def test_windowed_layers_keep_a_window_a_sequence_and_a_batch(tmp_path: Path) -> None:
    """SPEC R1: five layers of six, in multiples of 256, never more than the others have."""
    path = TINY["gemma3"](tmp_path / "m.gguf")
    inside = 1792  # 32 * 40 + 512
    assert WINDOW * num_sequences(8) + 512 == inside
    assert lines(path, n_ctx=16384, num_slots=8)["kv"] == (5 * inside + 16384) * KV_LAYER_BYTES
    assert lines(path, n_ctx=512, num_slots=8)["kv"] == 6 * 512 * KV_LAYER_BYTES


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gemma2", {"attention__sliding_window": np.uint32(64)}, [True, False] * 3),
        (
            "gpt-oss",
            {"attention__sliding_window": np.uint32(64), "attention__sliding_window_pattern": np.uint32(3)},
            [True, True, False] * 2,
        ),
        (
            "smallthinker",
            {"attention__sliding_window": np.uint32(64)},
            [False, True, True, True, False, True],
        ),
        (
            "gemma4",
            {
                "attention__sliding_window": np.uint32(64),
                "attention__sliding_window_pattern": [True, False, True, False, True, False],
            },
            [True, False] * 3,
        ),
        ("olmo2", {}, [False] * 6),
        ("llama", {"attention__sliding_window": np.uint32(64)}, [False] * 6),
    ],
)
def test_each_architecture_has_its_own_pattern_of_windows(
    tmp_path: Path, architecture: str, keys: dict[str, Any], expected: list[bool]
) -> None:
    """SPEC R1: a window that llama.cpp does not look at saves nothing."""
    assert windowed(tmp_path, architecture, **keys) == expected


def test_layers_that_look_at_earlier_ones_have_no_cells(tmp_path: Path) -> None:
    """SPEC R1: shared layers (gemma 3n, 4)."""
    changes = {
        "gemma4.attention.shared_kv_layers": np.uint32(4),
        "gemma4.attention.sliding_window": np.uint32(64),
        "gemma4.attention.sliding_window_pattern": [False] * 6,
    }
    path = TinyModel(architecture="gemma4", num_layers=6, changes=changes).write(tmp_path / "m.gguf")
    assert lines(path)["kv"] == 2 * 1024 * KV_LAYER_BYTES


def test_compute_grows_with_the_batch_and_with_the_masks(tmp_path: Path) -> None:
    """SPEC R1: rows of logits for a whole batch at the least, and two bytes for each cell and token."""
    path = TinyModel().write(tmp_path / "m.gguf")
    n_vocab = read_header(path).n_vocab
    assert lines(path, n_batch=512)["compute"] > 512 * n_vocab * 4
    assert lines(path, n_batch=512)["compute"] > 3 * lines(path, n_batch=128)["compute"]
    more = lines(path, n_ctx=65536)["compute"] - lines(path, n_ctx=32768)["compute"]
    assert more >= 32768 * 512 * 2


def test_a_vocabulary_costs_memory_of_its_own(tmp_path: Path) -> None:
    """SPEC R1: maps and lists of tokens, which no buffer shows."""
    small = TinyModel().write(tmp_path / "small.gguf")
    tokens = TinyModel().tokens + [f"word{index}" for index in range(5000)]
    large = TinyModel(tokens=tokens).write(tmp_path / "large.gguf")
    assert lines(large)["other"] - lines(small)["other"] > 5000 * 64


def with_types(path: Path, kind: str, *, is_tied: bool) -> GgufHeader:
    """The header of a model whose matrices are all of one type, with or without an output matrix."""
    header = read_header(path)
    tensors = [replace(each, type_name=kind) for each in header.tensors if len(each.shape) > 1]
    if not is_tied:
        tensors.append(replace(tensors[0], name="output.weight"))
    return replace(header, tensors=tuple(tensors))


@pytest.mark.parametrize(("kind", "is_repacked"), [("Q4_0", True), ("Q4_K", True), ("Q8_0", False)])
def test_what_a_cpu_lays_out_anew_is_counted_beside_the_file(
    tmp_path: Path, kind: str, *, is_repacked: bool
) -> None:
    """SPEC R1: all matrices that are multiplied by; the embeddings too where they serve as output."""
    path = TinyModel(tokens=[*TinyModel().tokens, "more"]).write(tmp_path / "m.gguf")  # rows in eights
    for is_tied in (True, False):
        header = with_types(path, kind, is_tied=is_tied)
        found = estimator(header)(spec()).lines
        embeddings = next(each.size_bytes for each in header.tensors if each.name == "token_embd.weight")
        expected = found["weights"] if is_tied else found["weights"] - embeddings
        assert found.get("repacked", 0) == (expected if is_repacked else 0)


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, "CUDA0"),
        ({"gpu_layers": "all"}, "CUDA0"),
        ({"device": ("ROCm0",)}, "ROCm0"),
        ({"device": ("CUDA0", "CUDA1"), "split_mode": SplitMode.NONE, "main_gpu": 1}, "CUDA1"),
        ({"device": ("CUDA0", "CUDA1"), "tensor_split": (0.0, 1.0), "main_gpu": 0}, "CUDA1"),
        ({"device": ("CUDA0", "CUDA1"), "split_mode": SplitMode.LAYER}, ""),
        ({"gpu_layers": 1}, ""),
        ({"cpu_moe": 1}, ""),
        ({"device": ("Vulkan0",)}, ""),
        ({"device": ("none",)}, ""),
    ],
)
def test_tied_embeddings_are_not_in_host_memory_where_a_device_has_all_else(
    tmp_path: Path, changes: dict[str, Any], device: str
) -> None:
    """SPEC R1, R11: and the device holds no more than without them."""
    header = with_types(TinyModel().write(tmp_path / "m.gguf"), "F16", is_tied=True)
    size = next(each.size_bytes for each in header.tensors if each.name == "token_embd.weight")
    placement, parts = PlacementSpec(**{"device": ("CUDA0",)} | changes), read_parts(header)
    assert parts.tied_bytes == size
    assert shares.device_of_tied(parts, placement) == device
    held = shares.weights_by_device(parts, placement)
    bare = shares.weights_by_device(replace(parts, tied_bytes=0), placement)
    assert bare.pop(shares.HOST) - held.pop(shares.HOST) == (size if device else 0)
    assert held == bare


@pytest.mark.parametrize(
    ("kind", "is_tied", "others"),
    [("F16", False, []), ("IQ4_NL", True, []), ("F16", True, ["token_embd_norm"])],
)
def test_other_embeddings_stay_in_host_memory(
    tmp_path: Path, kind: str, *, is_tied: bool, others: list[str]
) -> None:
    """SPEC R11: a matrix of their own, a type that devices get no rows of, beside what stays there anyway."""
    header = with_types(TinyModel().write(tmp_path / "m.gguf"), kind, is_tied=is_tied)
    extra = tuple(replace(header.tensors[0], name=f"{name}.weight") for name in others)
    parts = read_parts(replace(header, tensors=header.tensors + extra))
    assert shares.device_of_tied(parts, PlacementSpec(device=("CUDA0",))) == ""


def test_an_encoder_has_no_cells_and_a_row_for_every_token(tmp_path: Path) -> None:
    """SPEC R1, K2: llama.cpp keeps room for logits of every token, though none are computed."""
    path = write_bert(tmp_path / "m.gguf", context=512)
    header = read_header(path)
    found = estimator(header)(spec(n_ctx=0))
    assert "kv" not in found.lines
    assert found.n_ctx == 512
    assert found.lines["compute"] > 512 * (header.n_vocab + header.embedding_length) * 4
    assert estimator(header)(spec(n_ctx=128, n_batch=128)).total_bytes < found.total_bytes


def test_a_context_left_to_the_model_is_its_trained_one(tmp_path: Path) -> None:
    """SPEC R1: n_ctx 0."""
    assert estimator_of(TINY["gemma3"](tmp_path / "m.gguf"))(spec(n_ctx=0)).n_ctx == CONTEXT_LENGTH


def test_a_broken_file_is_no_estimate(tmp_path: Path) -> None:
    """SPEC R7: it fails as reading the header does."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        estimator_of(path)
