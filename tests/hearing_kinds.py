"""Tiny models that hear, of each kind of projector: what it makes of a recording has to be llama.cpp's.

`KINDS` names the writers of model and projector; `sound_of` makes a recording of noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from stoker.ipc.request import Sound
from tiny_models import WIDTH, write_llama, write_qwen2vl
from tiny_projector import write_seeing

HIDDEN, WIDE, HEADS, NUM_BLOCKS, NUM_MELS, STACK = 32, 64, 4, 2, 8, 4
RATE_HZ = 16_000
NUM_FRAMES = 3000
_CONV_CHANNELS = 4
_LOWEST_MELS = 1
_SCALES = {"a.position_embd.weight": 64, "a.conv1d.1.weight": 1, "a.conv2d.1.weight": 1}
"""What is heard has to weigh more than where."""

Shapes = dict[str, tuple[int, ...]]

WHISPER, STACKED, WINDOWED = "qwen2a", "ultravox", "qwen3a"

KINDS: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2a": (write_llama, WHISPER),
    "ultravox": (write_llama, STACKED),
    "qwen3a": (write_llama, WINDOWED),
    "qwen2a-mrope": (write_qwen2vl, WHISPER),
}


def write_pair(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model of `KINDS` and its projector."""
    write_model, projector = KINDS[kind]
    model = write_model(folder / f"{kind}.gguf")
    return model, write_listener(folder / f"{kind}-mmproj.gguf", projector)


def write_listener(
    path: Path,
    kind: str = STACKED,
    *,
    num_positions: int = 1500,
    stack: int = STACK,
    sees: bool = False,
) -> Path:
    """A projector of that kind, which hears; it sees nothing, or as `tiny_projector` does."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"tiny {kind}")
    writer.add_bool("clip.has_audio_encoder", True)
    if sees:
        write_seeing(writer)
        writer.add_string("clip.audio.projector_type", kind)
    else:
        writer.add_string("clip.projector_type", kind)
    numbers = {
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "block_count": NUM_BLOCKS,
        "projection_dim": WIDTH,
        "attention.head_count": HEADS,
        "num_mel_bins": NUM_MELS,
        "projector.stack_factor": stack,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.audio.{name}", value)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    random = np.random.default_rng(7)
    for name, shape in _shapes(kind, num_positions).items():
        values = random.normal(size=shape).astype(np.float32)
        values = 1 + values / 8 if "ln" in name or "norm" in name else values / _SCALES.get(name, 4)
        is_kernel = "conv" in name and len(shape) > 1 + ("1d" not in name)
        if name.endswith("bias") and "conv" in name and "1d" in name:
            values = values.reshape(-1, 1)
        writer.add_tensor(name, values.astype(np.float16) if is_kernel else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(kind: str, num_positions: int) -> Shapes:
    """All tensors of a projector."""
    shapes: Shapes = {"a.position_embd.weight": (num_positions, HIDDEN)} | _linear("a.post_ln", (HIDDEN,))
    for index in range(NUM_BLOCKS):
        shapes |= _block(f"a.blk.{index}")
    if kind == WINDOWED:
        return shapes | _windowed()
    shapes |= _linear("a.conv1d.1", (HIDDEN, NUM_MELS, 3)) | _linear("a.conv1d.2", (HIDDEN, HIDDEN, 3))
    if kind == WHISPER:
        return shapes | _linear("mm.a.fc", (WIDTH, HIDDEN))
    return shapes | {
        "mm.a.norm_pre.weight": (HIDDEN * STACK,),
        "mm.a.mlp.1.weight": (2 * WIDE, HIDDEN * STACK),
        "mm.a.norm_mid.weight": (WIDE,),
        "mm.a.mlp.2.weight": (WIDTH, WIDE),
    }


def _windowed() -> Shapes:
    """Three convolutions in two dimensions that halve both, before the blocks."""
    channels = _CONV_CHANNELS
    shapes = _linear("a.conv2d.1", (channels, 1, 3, 3))
    shapes |= _linear("a.conv2d.2", (channels, channels, 3, 3))
    shapes |= _linear("a.conv2d.3", (channels, channels, 3, 3))
    shapes |= {"a.conv_out.weight": (HIDDEN, channels * _LOWEST_MELS)}
    return shapes | _linear("mm.a.mlp.1", (WIDE, HIDDEN)) | _linear("mm.a.mlp.2", (WIDTH, WIDE))


def _block(name: str) -> Shapes:
    shapes = {f"{name}.attn_k.weight": (HIDDEN, HIDDEN)}  # keys have no bias
    for part in ("attn_q", "attn_v", "attn_out"):
        shapes |= _linear(f"{name}.{part}", (HIDDEN, HIDDEN))
    shapes |= _linear(f"{name}.ffn_up", (WIDE, HIDDEN)) | _linear(f"{name}.ffn_down", (HIDDEN, WIDE))
    return shapes | _linear(f"{name}.ln1", (HIDDEN,)) | _linear(f"{name}.ln2", (HIDDEN,))


def _linear(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def sound_of(seed: int, duration_s: float = 2.0, rate_hz: int = RATE_HZ) -> Sound:
    """Noise under a slow swell, so that no two moments are alike."""
    num_samples = int(duration_s * rate_hz)
    noise = np.random.default_rng(seed).normal(size=num_samples) / 8
    swell = np.sin(np.arange(num_samples) / rate_hz * (1 + seed)) ** 2
    return Sound(rate_hz, (noise * swell * 32767).clip(-32768, 32767).astype("<i2").tobytes())
