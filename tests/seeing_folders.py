"""Tiny folders of models that see, of random float32 weights: LLaVA with CLIP or SigLIP, Idefics3, SmolVLM.

`KINDS` names them. The language model inside is a tiny llama, or a Qwen2; nothing here imports MLX.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from model_folders import (
    CONTEXT_LENGTH,
    FEED_FORWARD,
    HEAD_WIDTH,
    HEADS,
    NUM_LAYERS,
    SHARED_HEADS,
    WIDTH,
    byte_pairs,
    tiny_tokenizer,
    tiny_tokens,
    transformer,
    write_tokenizer,
    write_weights,
)

EDGE, PATCH, HIDDEN, WIDE, TOWER_HEADS, TOWER_LAYERS = 32, 4, 32, 48, 2, 3
FACTOR = 2
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
Shapes = dict[str, tuple[int, ...]]


def _layers(stem: str) -> Shapes:
    """A CLIP-like encoder's."""
    found: Shapes = {}
    for number in range(TOWER_LAYERS):
        layer = f"{stem}.encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{layer}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
            found[f"{layer}.self_attn.{name}.bias"] = (HIDDEN,)
        found |= {f"{layer}.mlp.fc1.weight": (WIDE, HIDDEN), f"{layer}.mlp.fc1.bias": (WIDE,)}
        found |= {f"{layer}.mlp.fc2.weight": (HIDDEN, WIDE), f"{layer}.mlp.fc2.bias": (HIDDEN,)}
        found |= _norm(f"{layer}.layer_norm1") | _norm(f"{layer}.layer_norm2")
    return found


def _norm(name: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}


def _tower(stem: str, *, has_class: bool) -> Shapes:
    patches = (EDGE // PATCH) ** 2
    found = {
        f"{stem}.embeddings.patch_embedding.weight": (HIDDEN, 3, PATCH, PATCH),  # as torch lays it out
        f"{stem}.embeddings.position_embedding.weight": (patches + has_class, HIDDEN),
        **_layers(stem),
        **_norm(f"{stem}.post_layernorm"),
    }
    if has_class:
        return {**found, f"{stem}.embeddings.class_embedding": (HIDDEN,), **_norm(f"{stem}.pre_layrnorm")}
    return {**found, f"{stem}.embeddings.patch_embedding.bias": (HIDDEN,)}


def _llava(*, is_clip: bool) -> Shapes:
    return {
        **_tower("vision_tower.vision_model", has_class=is_clip),
        "multi_modal_projector.linear_1.weight": (WIDTH, HIDDEN),
        "multi_modal_projector.linear_1.bias": (WIDTH,),
        "multi_modal_projector.linear_2.weight": (WIDTH, WIDTH),
        "multi_modal_projector.linear_2.bias": (WIDTH,),
    }


def _tiled() -> Shapes:
    projection = {"model.connector.modality_projection.proj.weight": (WIDTH, HIDDEN * FACTOR**2)}
    return {**_tower("model.vision_model", has_class=False), **projection}


_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED_HEADS,
    "head_dim": HEAD_WIDTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": TOWER_HEADS,
    "num_hidden_layers": TOWER_LAYERS,
    "image_size": EDGE,
    "patch_size": PATCH,
}
_CLIP_STEPS = {
    "do_resize": True,
    "size": {"shortest_edge": EDGE},
    "do_center_crop": True,
    "crop_size": {"height": EDGE, "width": EDGE},
    "resample": 3,
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SIGLIP_STEPS = {"size": {"height": EDGE, "width": EDGE}, "resample": 2, **_HALF}
_TILED_STEPS = {
    "do_image_splitting": True,
    "size": {"longest_edge": 2 * EDGE},
    "max_image_size": {"longest_edge": EDGE},
    "resample": 1,
    **_HALF,
}
KINDS = ("llava-clip", "llava-siglip", "llava-qwen2", "idefics3", "smolvlm")


def seeing_folder(path: Path, kind: str, *, seed: int = 7, **changes: Any) -> Path:
    """A folder of one of `KINDS`; `changes` are other values of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    _write_words(path)
    is_tiled, text = not kind.startswith("llava"), "qwen2" if kind == "llava-qwen2" else "llama"
    config = {
        "model_type": "llava" if not is_tiled else kind,
        "vocab_size": len(_words()),
        "text_config": {"model_type": text, "vocab_size": len(_words()), **_TEXT},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    number = _words().index("<image>")
    if is_tiled:
        seen = "siglip_vision_model" if kind == "idefics3" else "smolvlm_vision"
        config |= {"image_token_id": number, "scale_factor": FACTOR}
        shapes, steps = _tiled(), _TILED_STEPS
    else:
        is_clip = kind == "llava-clip"
        seen = "clip_vision_model" if is_clip else "siglip_vision_model"
        strategy = "default" if is_clip else "full"
        config |= {"vision_feature_layer": -2, "vision_feature_select_strategy": strategy}
        config |= {"image_token_index": number}
        shapes, steps = _llava(is_clip=is_clip), _CLIP_STEPS if is_clip else _SIGLIP_STEPS
    config |= {"vision_config": {"model_type": seen, **_VISION}}
    config |= changes
    stem = "model.text_model" if is_tiled else "language_model.model"
    head = "lm_head.weight" if is_tiled else "language_model.lm_head.weight"
    inner = transformer(has_bias=text == "qwen2")
    shapes |= {f"{stem}.{name.removeprefix('model.')}": shape for name, shape in inner.items()}
    shapes |= {f"{stem}.embed_tokens.weight": (len(_words()), WIDTH), head: (len(_words()), WIDTH)}
    rng = np.random.default_rng(seed)
    write_weights(path, {name: _random(name, shape, rng) for name, shape in shapes.items()})
    for name, document in (("config", config), ("preprocessor_config", steps)):
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


def _words() -> list[str]:
    return [*SPECIALS[:3], *tiny_tokens()[3:], *SPECIALS[3:]]


def _write_words(path: Path) -> None:
    merges = tiny_tokenizer()["model"]["merges"]
    write_tokenizer(path, byte_pairs(_words(), merges, list(SPECIALS), []))


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name and name.endswith("weight"):
        return 1 + values * np.float32(0.1)
    if len(shape) == 1:
        return values * np.float32(0.2)
    return values * np.float32(1.5 / np.sqrt(np.prod(shape[1:])))
