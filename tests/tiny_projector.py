"""Writes a tiny projector of random weights, and computes in numpy what it makes of a picture.

It goes with `tiny_models.write_llama`, whose width its embeddings have. Its graph is LLaVA's: patches, blocks
of attention of which the last is left out, and two layers with a GELU between.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from stoker.ipc.request import Picture
from tiny_models import WIDTH

IMAGE_SIZE, PATCH_SIZE = 16, 4
NUM_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
ENCODER_WIDTH, ENCODER_FEED_FORWARD, ENCODER_HEADS = 32, 64, 4
NUM_BLOCKS = 3
MEAN, DEVIATION = 0.5, 0.25
_EPSILON = 1e-6

Weights = dict[str, npt.NDArray[np.float32]]


def projector_weights(seed: int = 7, n_embd: int = WIDTH) -> Weights:
    """All its tensors by name."""
    random = np.random.default_rng(seed)
    width, wide = ENCODER_WIDTH, ENCODER_FEED_FORWARD
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (width, 3, PATCH_SIZE, PATCH_SIZE),
        "v.patch_embd.bias": (width,),
        "v.position_embd.weight": (NUM_TOKENS, width),
        "mm.0.weight": (wide, width),
        "mm.0.bias": (wide,),
        "mm.2.weight": (n_embd, wide),
        "mm.2.bias": (n_embd,),
    }
    for index in range(NUM_BLOCKS):
        block = f"v.blk.{index}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{block}.{name}.weight": (width, width), f"{block}.{name}.bias": (width,)}
        shapes |= {f"{block}.ffn_up.weight": (wide, width), f"{block}.ffn_up.bias": (wide,)}
        shapes |= {f"{block}.ffn_down.weight": (width, wide), f"{block}.ffn_down.bias": (width,)}
        for name in ("ln1", "ln2"):
            shapes |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
    return {name: _random(random, name, shape) for name, shape in shapes.items()}


def write_projector(path: Path, seed: int = 7, *, n_embd: int = WIDTH, has_vision: bool = True) -> Path:
    """The projector's file; its convolution is f16, as such files have it."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny projector {seed}")
    writer.add_string("clip.projector_type", "mlp")
    write_seeing(writer, seed, n_embd=n_embd, has_vision=has_vision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_seeing(
    writer: gguf.GGUFWriter, seed: int = 7, *, n_embd: int = WIDTH, has_vision: bool = True
) -> None:
    """The part of a projector's file that sees."""
    writer.add_bool("clip.has_vision_encoder", has_vision)
    writer.add_string("clip.vision.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "embedding_length": ENCODER_WIDTH,
        "feed_forward_length": ENCODER_FEED_FORWARD,
        "block_count": NUM_BLOCKS,
        "projection_dim": n_embd,
        "attention.head_count": ENCODER_HEADS,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", _EPSILON)
    writer.add_array("clip.vision.image_mean", [MEAN] * 3)
    writer.add_array("clip.vision.image_std", [DEVIATION] * 3)
    for name, values in projector_weights(seed, n_embd).items():
        writer.add_tensor(name, values.astype(np.float16) if name == "v.patch_embd.weight" else values)


def picture_of(seed: int, width: int = IMAGE_SIZE, height: int = IMAGE_SIZE) -> Picture:
    """A picture of noise."""
    return Picture(width, height, np.random.default_rng(seed).bytes(width * height * 3))


def embeddings_in_numpy(weights: Weights, picture: Picture) -> npt.NDArray[np.float32]:
    """What the projector makes of a picture of its own size: float32 (NUM_TOKENS, n_embd)."""
    rgb = np.frombuffer(picture.rgb, np.uint8).reshape(IMAGE_SIZE, IMAGE_SIZE, 3)
    pixels = (rgb.astype(np.float32) / 255 - MEAN) / DEVIATION
    side = IMAGE_SIZE // PATCH_SIZE
    patches = pixels.reshape(side, PATCH_SIZE, side, PATCH_SIZE, 3).transpose(0, 2, 4, 1, 3)
    kernel = weights["v.patch_embd.weight"].astype(np.float16).astype(np.float32).reshape(ENCODER_WIDTH, -1)
    hidden = patches.reshape(NUM_TOKENS, -1) @ kernel.T + weights["v.patch_embd.bias"]
    hidden = hidden + weights["v.position_embd.weight"]
    for index in range(NUM_BLOCKS - 1):
        hidden = _block(weights, f"v.blk.{index}", hidden)
    return _linear(weights, "mm.2", _gelu(_linear(weights, "mm.0", hidden)))


def _block(weights: Weights, name: str, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    normed = _norm(weights, f"{name}.ln1", hidden)
    parts = [_linear(weights, f"{name}.attn_{each}", normed) for each in "qkv"]
    q, k, v = (each.reshape(NUM_TOKENS, ENCODER_HEADS, -1).transpose(1, 0, 2) for each in parts)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    seen = (scores / scores.sum(axis=-1, keepdims=True)) @ v
    hidden = hidden + _linear(weights, f"{name}.attn_out", seen.transpose(1, 0, 2).reshape(NUM_TOKENS, -1))
    wide = _gelu(_linear(weights, f"{name}.ffn_up", _norm(weights, f"{name}.ln2", hidden)))
    return hidden + _linear(weights, f"{name}.ffn_down", wide)


def _linear(weights: Weights, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    centred = values - values.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPSILON)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _gelu(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return 0.5 * values * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = random.normal(size=shape).astype(np.float32)
    if ".ln" in name and name.endswith("weight"):
        return 1 + values / 8
    return values / np.float32(np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 8)
