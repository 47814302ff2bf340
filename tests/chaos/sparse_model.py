"""A model that is far too large: a whole header over a sparse file of zeros."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, FEED_FORWARD, HEADS, LAYERS = 8192, 28672, 64, 80
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
_TYPES = [2, 3, 3, *[6] * 256]
_LAYER = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (FEED_FORWARD, WIDTH),
    "ffn_up": (FEED_FORWARD, WIDTH),
    "ffn_down": (WIDTH, FEED_FORWARD),
}


def write_huge(path: Path) -> Path:
    """80 layers, 306 GB of F32 that take no place on the disk."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(_TYPES)
    shapes = {f"blk.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in _LAYER.items()}
    shapes |= {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    size_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = 4 * int(np.prod(shape))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), tensor_bytes)
        size_bytes += tensor_bytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size_bytes + writer.data_alignment)
    return path
