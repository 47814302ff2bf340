"""Writes tiny models of random weights: recurrent, hybrid, with a sliding window, and an encoder.

Each runs in a fraction of a millisecond a token, and each of its tokens matters to what it gives. `TINY`
names the writers of those that generate and cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

WIDTH, FEED_FORWARD, HEADS, SHARED_HEADS, HEAD_WIDTH = 32, 48, 4, 2, 8
WINDOW = 32
CONTEXT_LENGTH = 4096
_SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world"]
_UNKNOWN, _CONTROL, _BYTE, _NORMAL = 2, 3, 6, 1
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{each}" for each in _LETTERS), *_LETTERS]
BERT_CONTEXT_LENGTH = 64

Shapes = dict[str, tuple[int, ...]]

_FFN: Shapes = {
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate.weight": (FEED_FORWARD, WIDTH),
    "ffn_up.weight": (FEED_FORWARD, WIDTH),
    "ffn_down.weight": (WIDTH, FEED_FORWARD),
}
_ATTENTION: Shapes = {
    "attn_q.weight": (HEADS * HEAD_WIDTH, WIDTH),
    "attn_k.weight": (SHARED_HEADS * HEAD_WIDTH, WIDTH),
    "attn_v.weight": (SHARED_HEADS * HEAD_WIDTH, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD_WIDTH),
}
_QK_NORMS: Shapes = {"attn_q_norm.weight": (HEAD_WIDTH,), "attn_k_norm.weight": (HEAD_WIDTH,)}
INNER, CONV, STATE, STEP_RANK = 2 * WIDTH, 4, 8, 4
_MAMBA: Shapes = {
    "ssm_in.weight": (2 * INNER, WIDTH),
    "ssm_conv1d.weight": (INNER, CONV),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x.weight": (STEP_RANK + 2 * STATE, INNER),
    "ssm_dt.weight": (INNER, STEP_RANK),
    "ssm_dt.bias": (INNER,),
    "ssm_a": (INNER, STATE),
    "ssm_d": (INNER,),
    "ssm_out.weight": (WIDTH, INNER),
}
_MAMBA_KEYS = {
    "ssm.conv_kernel": CONV,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": STEP_RANK,
}
_NORM: Shapes = {"attn_norm.weight": (WIDTH,)}


@dataclass(frozen=True)
class _Model:
    """Keys without their prefix, and tensors: of each layer, and outside of them."""

    architecture: str
    keys: dict[str, Any]
    layers: list[Shapes]
    outer: Shapes = field(default_factory=dict)
    has_word_pieces: bool = False
    num_tokens: int = 0  # as many as `TOKENS`
    more_tokens: Sequence[str] = ()  # after those
    broken_token: int | None = None


USED_EXPERTS = 2
RWKV_WIDTH = 64  # one head: the native kernel takes steps of 64 numbers
_LORA = 8


def write_mamba(path: Path, seed: int = 7) -> Path:
    """A recurrent model of two Mamba layers."""
    keys = {**_MAMBA_KEYS, "attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5}
    return _write(path, _Model("mamba", keys, [_NORM | _MAMBA] * 2), seed)


def write_rwkv7(path: Path, seed: int = 7) -> Path:
    """A recurrent model of two RWKV-7 layers."""
    keys = {
        "embedding_length": RWKV_WIDTH,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": RWKV_WIDTH,
        "attention.decay_lora_rank": _LORA,
        "attention.iclr_lora_rank": _LORA,
        "attention.value_residual_mix_lora_rank": _LORA,
        "attention.gate_lora_rank": _LORA,
    }
    return _write(path, _Model("rwkv7", keys, [_rwkv7_layer()] * 2, _rwkv_outer()), seed)


def write_rwkv6(path: Path, seed: int = 7) -> Path:
    """A recurrent model of two RWKV-6 layers."""
    keys = {
        "embedding_length": RWKV_WIDTH,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": RWKV_WIDTH,
        "time_mix_extra_dim": _LORA,
        "time_decay_extra_dim": _LORA,
        "rescale_every_n_layers": 0,
    }
    return _write(path, _Model("rwkv6", keys, [_rwkv6_layer()] * 2, _rwkv_outer()), seed)


def write_jamba(path: Path, seed: int = 7) -> Path:
    """A hybrid of two Mamba layers and one of attention."""
    keys = {
        **_MAMBA_KEYS,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, SHARED_HEADS, 0],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    norms = {"ssm_dt_norm.weight": (STEP_RANK,), "ssm_b_norm.weight": (STATE,), "ssm_c_norm.weight": (STATE,)}
    recurrent = _NORM | _MAMBA | norms | _FFN
    return _write(path, _Model("jamba", keys, [recurrent, _NORM | _ATTENTION | _FFN, recurrent]), seed)


def write_lfm2(path: Path, seed: int = 7) -> Path:
    """A hybrid of two layers of short convolutions and one of attention."""
    keys = {
        "shortconv.l_cache": 3,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, SHARED_HEADS, 0],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_WIDTH,
        "rope.freq_base": 10_000.0,
    }
    convolution = {
        "shortconv.conv.weight": (WIDTH, 3),
        "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
        "shortconv.out_proj.weight": (WIDTH, WIDTH),
    }
    recurrent = _NORM | convolution | _FFN
    layers = [recurrent, _NORM | _ATTENTION | _QK_NORMS | _FFN, recurrent]
    return _write(path, _Model("lfm2", keys, layers, {"token_embd_norm.weight": (WIDTH,)}), seed)


def write_llama(path: Path, seed: int = 7, *, is_tied: bool = False, context: int = CONTEXT_LENGTH) -> Path:
    """A plain decoder of two layers, weights in f32; tied: its embeddings are its output matrix."""
    outer: Shapes = {} if is_tied else {"output.weight": (len(TOKENS), WIDTH)}
    return _write(path, _Model("llama", _llama_keys(context), [_NORM | _ATTENTION | _FFN] * 2, outer), seed)


def write_wide_llama(path: Path, num_tokens: int, broken_token: int | None = None) -> Path:
    """The same with more tokens than `TOKENS`; the logit of `broken_token` is never a number."""
    outer: Shapes = {"output.weight": (num_tokens, WIDTH)}
    layers = [_NORM | _ATTENTION | _FFN] * 2
    keys = _llama_keys(CONTEXT_LENGTH)
    model = _Model("llama", keys, layers, outer, num_tokens=num_tokens, broken_token=broken_token)
    return _write(path, model, seed=7)


def write_moe(path: Path, *, num_layers: int = 2, num_experts: int = 16, width: int = 256) -> Path:
    """A mixture of experts (Qwen3): two of `num_experts` compute a token, each is `width` wide.

    A layer has 384 bytes of experts for each of them and each of their width. To make large ones is quick, as
    experts are made of the same numbers, each of them from others on.
    """
    keys = {
        **_llama_keys(CONTEXT_LENGTH),
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "expert_count": num_experts,
        "expert_used_count": USED_EXPERTS,
        "expert_feed_forward_length": width,
    }
    experts: Shapes = {
        "ffn_gate_inp.weight": (num_experts, WIDTH),
        "ffn_gate_exps.weight": (num_experts, width, WIDTH),
        "ffn_up_exps.weight": (num_experts, width, WIDTH),
        "ffn_down_exps.weight": (num_experts, WIDTH, width),
    }
    norm: Shapes = {"ffn_norm.weight": (WIDTH,)}
    layers = [_NORM | _ATTENTION | _QK_NORMS | norm | experts] * num_layers
    return _write(path, _Model("qwen3moe", keys, layers, {"output.weight": (len(TOKENS), WIDTH)}), seed=7)


def _llama_keys(context: int) -> dict[str, Any]:
    return {
        "context_length": context,
        "attention.head_count": HEADS,
        "attention.head_count_kv": SHARED_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_WIDTH,
        "rope.freq_base": 10_000.0,
    }


def write_qwen2vl(path: Path, seed: int = 7) -> Path:
    """A decoder of two layers that gives the tokens of a picture positions in a grid (M-RoPE)."""
    keys = _llama_keys(CONTEXT_LENGTH) | {"rope.dimension_sections": [2, 1, 1, 0]}
    layers = [_NORM | _ATTENTION | _FFN] * 2
    outer: Shapes = {"output.weight": (len(TOKENS), WIDTH)}
    return _write(path, _Model("qwen2vl", keys, layers, outer), seed)


def write_qwen3vl(path: Path, seed: int = 7) -> Path:
    """The same of three layers with interleaved sections; pictures give something to the first layer too."""
    keys = _llama_keys(CONTEXT_LENGTH) | {
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "rope.dimension_sections": [2, 1, 1, 0],
        "n_deepstack_layers": 1,
    }
    layers = [_NORM | _ATTENTION | _QK_NORMS | _FFN] * 3
    outer: Shapes = {"output.weight": (len(TOKENS), WIDTH)}
    return _write(path, _Model("qwen3vl", keys, layers, outer), seed)


SMOL_TOKENS = ("\n\n", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")


def write_smolvlm(path: Path, seed: int = 7) -> Path:
    """Like `write_llama`, with the tokens that stand around the tiles of a picture."""
    outer: Shapes = {"output.weight": (len(TOKENS) + len(SMOL_TOKENS), WIDTH)}
    layers = [_NORM | _ATTENTION | _FFN] * 2
    model = _Model("llama", _llama_keys(CONTEXT_LENGTH), layers, outer, more_tokens=SMOL_TOKENS)
    return _write(path, model, seed)


def write_crashing_llama(path: Path) -> Path:
    """Like `write_llama`, but its values are narrower than its keys: llama.cpp ends as it makes a context."""
    narrow = HEAD_WIDTH // 2
    keys = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": SHARED_HEADS,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": narrow,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_WIDTH,
    }
    values: Shapes = {"attn_v.weight": (SHARED_HEADS * narrow, WIDTH)}
    outer: Shapes = {"output.weight": (len(TOKENS), WIDTH)}
    return _write(path, _Model("llama", keys, [_NORM | _ATTENTION | values | _FFN] * 2, outer), 7)


def write_gemma3(path: Path, seed: int = 7, *, is_tied: bool = True) -> Path:
    """A decoder of six layers, five of which see the last 32 tokens only; tied as in `write_llama`."""
    keys = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": SHARED_HEADS,
        "attention.key_length": HEAD_WIDTH,
        "attention.value_length": HEAD_WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": WINDOW,
        "rope.freq_base": 10_000.0,
    }
    after = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    outer: Shapes = {} if is_tied else {"output.weight": (len(TOKENS), WIDTH)}
    layers = [_NORM | _ATTENTION | _QK_NORMS | _FFN | after] * 6
    return _write(path, _Model("gemma3", keys, layers, outer), seed)


def write_bert(
    path: Path,
    seed: int = 7,
    pooling: int | None = 1,
    context: int = BERT_CONTEXT_LENGTH,
    labels: Sequence[str] = ("",),
) -> Path:
    """An encoder of two layers with word pieces.

    `pooling` is llama.cpp's number: 0 none, 1 mean, 2 first token, 3 last, 4 rank; None: the file names none.
    `labels` are of the outputs of a classifier; empty: the file names none.
    """
    keys: dict[str, Any] = {
        "context_length": context,
        "attention.head_count": HEADS,
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-12,
    }
    if pooling is not None:
        keys["pooling_type"] = pooling
    outer: Shapes = {
        "token_embd.weight": (len(WORD_PIECES), WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (context, WIDTH),
    }
    outer |= {f"token_embd_norm.{part}": (WIDTH,) for part in ("weight", "bias")}
    if pooling == _RANK:
        outer |= {"cls.weight": (WIDTH, WIDTH), "cls.bias": (WIDTH,)}
        outer |= {"cls.output.weight": (len(labels), WIDTH), "cls.output.bias": (len(labels),)}
    if any(labels):
        keys["classifier.output_labels"] = list(labels)
    return _write(path, _Model("bert", keys, [_bert_layer()] * 2, outer, has_word_pieces=True), seed)


_RANK = 4


def write_t5(
    path: Path, seed: int = 8, *, is_gated: bool = True, is_tied: bool = False, context: int = 256
) -> Path:
    """An encoder-decoder of two layers each.

    `is_gated`: its feed-forward part is flan-T5's, gated by GELU, and not T5's own of ReLU; `is_tied`: its
    embeddings are its output matrix as well.
    """
    keys: dict[str, Any] = {
        "context_length": context,
        "attention.head_count": HEADS,
        "attention.key_length": T5_HEAD_WIDTH,
        "attention.value_length": T5_HEAD_WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.relative_buckets_count": T5_BUCKETS,
        "decoder_start_token_id": 0,
        "decoder_block_count": 2,
    }
    outer: Shapes = {"token_embd.weight": (len(T5_PIECES), WIDTH)}
    outer |= {f"{side}.output_norm.weight": (WIDTH,) for side in ("enc", "dec")}
    outer |= {f"{side}.blk.0.attn_rel_b.weight": (T5_BUCKETS, HEADS) for side in ("enc", "dec")}
    if not is_tied:
        outer["output.weight"] = (len(T5_PIECES), WIDTH)
    for index in range(2):
        outer |= {f"enc.blk.{index}.{name}": shape for name, shape in _t5_block(is_gated=is_gated).items()}
        outer |= {f"dec.blk.{index}.{name}": shape for name, shape in _t5_block(is_gated=is_gated).items()}
        outer |= {f"dec.blk.{index}.cross_{name}": shape for name, shape in _t5_attention().items()}
    return _write(path, _Model("t5", keys, [{}] * 2, outer), seed)


T5_HEAD_WIDTH, T5_BUCKETS = 16, 32  # heads are together wider than the model
T5_PIECES = ["<pad>", "</s>", "<unk>", "▁", *_LETTERS, *(f"▁{each}" for each in _LETTERS)]


def _t5_attention() -> Shapes:
    shapes: Shapes = {f"attn_{part}.weight": (HEADS * T5_HEAD_WIDTH, WIDTH) for part in "qkv"}
    return shapes | {"attn_norm.weight": (WIDTH,), "attn_o.weight": (WIDTH, HEADS * T5_HEAD_WIDTH)}


def _t5_block(*, is_gated: bool) -> Shapes:
    names = ("ffn_norm", "ffn_up", "ffn_down", *(["ffn_gate"] if is_gated else []))
    return _t5_attention() | {f"{name}.weight": _FFN[f"{name}.weight"] for name in names}


TINY: Mapping[str, Callable[[Path], Path]] = {
    "mamba": write_mamba,
    "rwkv6": write_rwkv6,
    "rwkv7": write_rwkv7,
    "jamba": write_jamba,
    "lfm2": write_lfm2,
    "gemma3": write_gemma3,
}


def _bert_layer() -> Shapes:
    products = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
    products |= {"ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD)}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in products.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in products.items()}
    for name in ("attn_output_norm", "layer_output_norm"):
        shapes |= {f"{name}.{part}": (WIDTH,) for part in ("weight", "bias")}
    return shapes


def _rwkv_outer() -> Shapes:
    outer: Shapes = {f"{name}.weight": (len(TOKENS), RWKV_WIDTH) for name in ("token_embd", "output")}
    return outer | _rwkv_norms("token_embd_norm", "output_norm")


def _rwkv_norms(*names: str) -> Shapes:
    return {f"{name}.{part}": (RWKV_WIDTH,) for name in names for part in ("weight", "bias")}


def _rwkv6_layer() -> Shapes:
    shapes = _rwkv_norms("attn_norm", "attn_norm_2", "time_mix_ln")
    for name in ("receptance", "key", "value", "gate", "output"):
        shapes[f"time_mix_{name}.weight"] = (RWKV_WIDTH, RWKV_WIDTH)
    return shapes | {
        "time_mix_lerp_x.weight": (1, 1, RWKV_WIDTH),
        "time_mix_lerp_fused.weight": (5, 1, 1, RWKV_WIDTH),
        "time_mix_w1.weight": (5 * _LORA, RWKV_WIDTH),
        "time_mix_w2.weight": (5, RWKV_WIDTH, _LORA),
        "time_mix_first.weight": (1, RWKV_WIDTH),
        "time_mix_decay.weight": (RWKV_WIDTH,),
        "time_mix_decay_w1.weight": (_LORA, RWKV_WIDTH),
        "time_mix_decay_w2.weight": (RWKV_WIDTH, _LORA),
        "channel_mix_lerp_k.weight": (1, 1, RWKV_WIDTH),
        "channel_mix_lerp_r.weight": (1, 1, RWKV_WIDTH),
        "channel_mix_key.weight": (FEED_FORWARD, RWKV_WIDTH),
        "channel_mix_value.weight": (RWKV_WIDTH, FEED_FORWARD),
        "channel_mix_receptance.weight": (RWKV_WIDTH, RWKV_WIDTH),
    }


def _rwkv7_layer() -> Shapes:
    shapes = _rwkv_norms("attn_norm", "attn_norm_2", "time_mix_ln")
    for name in ("w", "a", "v", "g"):
        shapes |= {
            f"time_mix_{name}1.weight": (_LORA, RWKV_WIDTH),
            f"time_mix_{name}2.weight": (RWKV_WIDTH, _LORA),
        }
    for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k"):
        shapes[f"time_mix_{name}.weight"] = (RWKV_WIDTH,)
    for name in ("receptance", "key", "value", "output"):
        shapes[f"time_mix_{name}.weight"] = (RWKV_WIDTH, RWKV_WIDTH)
    return shapes | {
        "time_mix_lerp_fused.weight": (6, 1, 1, RWKV_WIDTH),
        "channel_mix_lerp_k.weight": (RWKV_WIDTH,),
        "channel_mix_key.weight": (FEED_FORWARD, RWKV_WIDTH),
        "channel_mix_value.weight": (RWKV_WIDTH, FEED_FORWARD),
    }


def _write(path: Path, model: _Model, seed: int) -> Path:
    architecture, layers = model.architecture, model.layers
    num_tokens = model.num_tokens or len(TOKENS) + len(model.more_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture} {seed}")
    writer.add_block_count(len(layers))
    writer.add_feed_forward_length(FEED_FORWARD)
    for key, value in {"context_length": CONTEXT_LENGTH, "embedding_length": WIDTH, **model.keys}.items():
        _add(writer, f"{architecture}.{key}", value)
    if model.has_word_pieces:
        _add_word_pieces(writer)
    elif architecture == "t5":
        _add_t5_pieces(writer)
    else:
        _add_vocabulary(writer, num_tokens, model.more_tokens)
    shapes = {"token_embd.weight": (num_tokens, WIDTH), "output_norm.weight": (WIDTH,)}
    if architecture in {"lfm2", "bert", "t5"}:  # its last norm is the one of the embeddings, or of a layer
        del shapes["output_norm.weight"]
    shapes |= model.outer
    for index, layer in enumerate(layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        weights = _weights(random, name, shape)
        if architecture == "t5" and name == "output.weight":
            weights /= 4  # else one token is likeliest whatever was read
        if name == "output.weight" and model.broken_token is not None:
            weights[model.broken_token] = np.nan
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("exps.weight"):
        numbers = random.normal(size=2**16 + 1).astype(np.float32) / 16
        return np.resize(numbers, shape)
    values = random.normal(size=shape).astype(np.float32)
    return _fitting(values, name)


def _fitting(values: np.ndarray, name: str) -> np.ndarray:
    """Numbers of the size that weights of that name have."""
    if name.endswith("ssm_a"):
        return -np.exp(values - 4)  # decays so slowly that old tokens count
    if name.endswith(("time_mix_w0.weight", "time_mix_a0.weight", "time_mix_decay.weight")):
        return values - 6  # likewise
    if name == "output.weight" or name.endswith("time_mix_output.weight"):
        return values
    if name.endswith(("norm.weight", "norm_2.weight", "ln.weight")):
        return 1 + values / 8
    if name.startswith(("enc.", "dec.")) and name.endswith(("attn_q.weight", "attn_k.weight")):
        return values / 16  # T5 divides scores by no root: others would see one token each
    return values / 4


def _add_vocabulary(writer: gguf.GGUFWriter, num_tokens: int, more_tokens: Sequence[str]) -> None:
    named = [*TOKENS, *more_tokens]
    tokens = [*named, *(f"▁more{index}" for index in range(len(named), num_tokens))]
    normal = len(tokens) - len(_SPECIAL) - 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * normal])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(value=True)


def _add_word_pieces(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORD_PIECES)
    writer.add_token_types([_CONTROL, _UNKNOWN, *[_CONTROL] * 3, *[_NORMAL] * (len(WORD_PIECES) - 5)])
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)


def _add_t5_pieces(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(T5_PIECES)
    writer.add_token_scores([-float(len(piece) == 1) - 1 for piece in T5_PIECES])
    writer.add_token_types([_CONTROL, _CONTROL, _UNKNOWN, *[_NORMAL] * (len(T5_PIECES) - 3)])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(value=False)
    writer.add_add_eos_token(value=True)
    writer.add_add_space_prefix(value=True)


def _add(writer: gguf.GGUFWriter, key: str, value: float | list[Any]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def quantised(source: Path, target: Path, kind: str) -> Path:
    """A model file's weights in another type, named as in `llama_cpp.LLAMA_FTYPE_MOSTLY_...`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.pure = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise RuntimeError(f"{source} could not be quantised to {kind}")
    return target
