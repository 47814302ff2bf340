"""What a plain program does to answer with a model that is not in memory: load, context, prefill, one token.

Runs in a process of its own each time, as a program that was just started has nothing warm of its own; the
file is in the page cache, and the start of the process and its imports are not counted. No code of Stoker's
takes part: this is the least that any server has to do after a swap.

    python -m bench.bare_load --model FILE --ctx-size N --n-batch N --slots N --threads N < PROMPT
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from bench.errors import BenchError
from stoker.ipc.model import CALL_TOKENS
from stoker.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.peers import Shape

TIMEOUT_S = 300.0
NUM_TAIL_CHARS = 800
PIECE_BYTES = 64


@dataclass(frozen=True, slots=True)
class BareLoad:
    """Seconds from the call that loads to the text of the first token, and tokens of the prompt."""

    took_s: float
    num_prompt_tokens: int


async def measure_bare_load(model: Path, shape: Shape, prompt: str) -> BareLoad:
    """Load `model` in a new process with the context that Stoker makes for `shape`, and begin an answer.

    Raises:
        BenchError: it could not; the message carries the end of what the process said.
    """
    answer = await asyncio.to_thread(_run, _command(model, shape), prompt)
    if answer.returncode < 0:
        # a build may crash where it repacks weights for the CPU's matrix instructions; Stoker does without
        command = [*_command(model, shape), "--no-extra-bufts"]
        answer = await asyncio.to_thread(_run, command, prompt)
    if answer.returncode != 0:
        raise BenchError(f"a bare load of {model.name} failed:\n{answer.stderr[-NUM_TAIL_CHARS:]}")
    return BareLoad(**json.loads(answer.stdout.splitlines()[-1]))


def _command(model: Path, shape: Shape) -> list[str]:
    num_threads = shape.num_threads or psutil.cpu_count(logical=False) or 1
    return [
        *(sys.executable, "-m", "bench.bare_load", "--model", str(model)),
        *("--ctx-size", str(shape.ctx_size), "--n-batch", str(EngineSettings().n_batch or CALL_TOKENS)),
        *("--slots", str(shape.num_slots), "--threads", str(num_threads)),
    ]


def _run(command: list[str], prompt: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=prompt, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"a bare load was not done in {TIMEOUT_S:.0f} s") from None


# ---------------------------------------------------------------- in the process of its own


def load_and_begin(options: argparse.Namespace, prompt: bytes) -> BareLoad:
    """Load, prefill and draw the likeliest token, by the clock.

    Raises:
        BenchError: the library refused something; what it said is on stderr.
    """
    import llama_cpp  # noqa: PLC0415 - the benchmark's own process needs no native library

    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = not options.no_extra_bufts
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = options.ctx_size, options.slots, True
    params.n_batch = params.n_ubatch = options.n_batch
    params.n_threads = params.n_threads_batch = options.threads
    tokens = (llama_cpp.llama_token * options.n_batch)()
    piece = (ctypes.c_char * PIECE_BYTES)()

    began_s = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(str(options.model).encode(), model_params)
    _require(bool(model), "model")
    context = llama_cpp.llama_init_from_model(model, params)
    _require(bool(context), "context")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    num_tokens = llama_cpp.llama_tokenize(vocabulary, prompt, len(prompt), tokens, len(tokens), True, False)
    _require(num_tokens > 0, "tokens that fit a batch")
    batch = llama_cpp.llama_batch_get_one(tokens, num_tokens)
    _require(llama_cpp.llama_decode(context, batch) == 0, "logits")
    token = llama_cpp.llama_sampler_sample(llama_cpp.llama_sampler_init_greedy(), context, -1)
    llama_cpp.llama_token_to_piece(vocabulary, token, piece, len(piece), 0, False)
    return BareLoad(time.perf_counter() - began_s, num_tokens)


def _require(is_there: bool, what: str) -> None:  # noqa: FBT001 - a check
    if not is_there:
        raise BenchError(f"the library gave no {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON line. The process ends without freeing anything: that is nobody's first token."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_load", description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("--ctx-size", "--n-batch", "--slots", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--no-extra-bufts", action="store_true")
    options = parser.parse_args(arguments)
    try:
        found = load_and_begin(options, sys.stdin.buffer.read())
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"took_s": found.took_s, "num_prompt_tokens": found.num_prompt_tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
