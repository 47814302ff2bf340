"""Run as a program: loads a model, fills a step, and prints by how much the process grew.

Its own process, because nothing else may allocate meanwhile and because a library's pages count once.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import msgspec

from stoker.backends.llama import seq2seq
from stoker.backends.llama.backend import LlamaBackend, load
from stoker.backends.llama.binding import accelerators, label, start
from stoker.backends.llama.oneshot import encoder
from stoker.backends.llama.smoke.smoke import verdict_of
from stoker.backends.protocol.backend import BatchPlan, Conditioning, PlanItem
from stoker.ipc.model import ModelClass, ModelSpec
from stoker.models.gguf.header import read_header

_FIRST_TOKEN = 5  # past the special ones
_FLOAT_BYTES = 4


def rss_bytes() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def decode(backend: LlamaBackend, num_logits: int) -> int:
    """A full step; resident memory after it."""
    found = backend.capabilities
    span = found.n_vocab - _FIRST_TOKEN
    tokens = tuple(_FIRST_TOKEN + index * 7 % span for index in range(found.n_batch))
    backend._context.step(BatchPlan((PlanItem(0, 0, tokens, num_logits),)))
    backend.drop(0)
    return rss_bytes()


def probe_decoder(spec: ModelSpec, smoke_dir: Path) -> dict[str, object]:
    """Growth by a usual step, and by one of which every row is asked, less what that keeps rows in."""
    before = rss_bytes()
    with load(spec, cache_dir=smoke_dir) as backend:
        found = backend.capabilities
        usual = decode(backend, 1) - before
        rows = found.n_batch - found.num_sequences
        full = decode(backend, found.n_batch) - before - rows * found.n_vocab * _FLOAT_BYTES
        return {"usual": usual, "full": full, "lines": backend.memory()}


def probe_encoder(spec: ModelSpec, smoke_dir: Path) -> dict[str, object]:
    """Growth by a call with as many tokens as one may have."""
    before = rss_bytes()
    with encoder.load(spec, cache_dir=smoke_dir) as backend:
        found = backend.capabilities
        size = min(found.n_ctx, found.n_batch)
        texts = [tuple(range(_FIRST_TOKEN, _FIRST_TOKEN + 1)) * size] * (found.n_batch // size)
        backend.encode(texts)
        grown = rss_bytes() - before
        return {"usual": grown, "full": grown, "lines": backend.memory()}


def probe_seq2seq(spec: ModelSpec, smoke_dir: Path) -> dict[str, object]:
    """Growth by the longest source and the first token of its answer."""
    before = rss_bytes()
    with seq2seq.load(spec, cache_dir=smoke_dir) as backend:
        found = backend.capabilities
        backend.condition(0, Conditioning(source=(_FIRST_TOKEN,) * found.n_ctx))
        backend.launch(BatchPlan((PlanItem(0, 0, (found.decoder_start,), 1),))).rows()
        grown = rss_bytes() - before
        return {"usual": grown, "full": grown, "lines": backend.memory()}


def main() -> None:
    """Arguments: the spec as JSON, the folder of smoke verdicts."""
    spec, smoke_dir = msgspec.json.decode(sys.argv[1], type=ModelSpec), Path(sys.argv[2])
    header = read_header(spec.path)
    start()
    label(accelerators())
    verdict_of(header, smoke_dir)
    gc.collect()
    probes = {ModelClass.ENCODER: probe_encoder, ModelClass.ENCODER_DECODER: probe_seq2seq}
    json.dump(probes.get(header.model_class, probe_decoder)(spec, smoke_dir), sys.stdout)


if __name__ == "__main__":
    main()
