"""A tiny model of every class, and a runtime that serves them all: for what each of them refuses."""

from __future__ import annotations

from pathlib import Path

from stoker import Runtime
from tiny_models import write_bert, write_gemma3, write_rwkv7, write_t5

DECODER, ENCODER, RERANKER, SEQ2SEQ, RECURRENT = "decoder", "encoder", "reranker", "seq2seq", "recurrent"


def write_all(folder: Path) -> list[Path]:
    """One file a class, named as the constants are; the decoder is the default."""
    return [
        write_gemma3(folder / f"{DECODER}.gguf"),
        write_bert(folder / f"{ENCODER}.gguf"),
        write_bert(folder / f"{RERANKER}.gguf", pooling=4),
        write_t5(folder / f"{SEQ2SEQ}.gguf"),
        write_rwkv7(folder / f"{RECURRENT}.gguf"),
    ]


def runtime_of(folder: Path) -> Runtime:
    """All of them in one runtime, not started."""
    models = tuple(map(str, write_all(folder)))
    folders = {name: folder / name for name in ("cache_dir", "run_dir", "states_dir")}
    return Runtime(models=models, threads=1, ctx_size=512, isolation="thread", **folders)
