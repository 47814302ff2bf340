"""The child process of a smoke decode: load a model, decode a batch and one token, say how it went.

    python -m stoker.backends.llama.smoke.trial MODEL.gguf --extra-bufts on|off --offload on|off

prints one line of JSON: `outcome` (ok, refused, wrong), `detail`, `label`, `shortage` where memory was short,
`token_s` and `key_cost` where they were measured. A crash says the rest by its signal. The variable
STOKER_SMOKE_FAULT makes it fail on purpose, for tests: "segv" and "nan" with repacked weights,
"segv-offload" where an accelerator may be used, "segv-always" in any case, "hang" for good.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import msgspec

from stoker.backends.llama.binding import label
from stoker.backends.llama.context import LlamaContext
from stoker.backends.llama.context_options import ContextOptions
from stoker.backends.llama.model import LlamaModel, ModelOptions
from stoker.backends.llama.seq2seq import SourceReader
from stoker.backends.llama.smoke.first_decode import BATCH_TOKENS, first_tokens, nonsense_in
from stoker.backends.llama.smoke.key_cost import key_cost
from stoker.backends.protocol.backend import BatchPlan, PlanItem
from stoker.backends.threads import num_physical_cores
from stoker.errors import InsufficientMemoryError, StokerError
from stoker.ipc.model import PlacementSpec
from stoker.native_crash import prepare_to_crash

NUM_CELLS = 256


def main(arguments: list[str] | None = None) -> int:
    """Run the trial and print its outcome; the exit code is 0 whatever that is."""
    parser = argparse.ArgumentParser(prog="trial", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--extra-bufts", choices=("on", "off"), default="on")
    parser.add_argument("--offload", choices=("on", "off"), default="on")
    parser.add_argument("--placement", default="{}", help="a PlacementSpec as JSON")
    parser.add_argument("--timed", type=int, default=0, help="tokens to measure")
    parser.add_argument("--key-cost", action="store_true", help="measure it in place of a decode")
    options = parser.parse_args(arguments)
    prepare_to_crash()
    fault = os.environ.get("STOKER_SMOKE_FAULT", "")
    _meet(fault, options)
    try:
        model = LlamaModel(
            ModelOptions(
                path=options.path,
                use_extra_bufts=options.extra_bufts == "on",
                offloads=options.offload == "on",
                placement=msgspec.json.decode(options.placement, type=PlacementSpec),
            )
        )
    except InsufficientMemoryError as error:
        return _say("refused", error.message, "", shortage=error)
    except StokerError as error:
        return _say("refused", error.message, "")
    detail, token_s, cost = "", 0.0, None
    try:
        if options.key_cost:
            cost = key_cost(model)
        else:
            detail, token_s = _decode(model, options.timed)
    except InsufficientMemoryError as error:
        return _say("refused", error.message, "", shortage=error)
    except StokerError as error:
        detail = error.message
    finally:
        model.close()
    if fault == "nan" and options.extra_bufts == "on":
        detail = "a fault was ordered"
    return _say("wrong" if detail else "ok", detail, label(model.devices), token_s=token_s, key_cost=cost)


def _meet(fault: str, options: argparse.Namespace) -> None:
    """Fail as ordered."""
    faulty = {
        "segv-always": True,
        "segv": options.extra_bufts == "on",
        "segv-offload": options.offload == "on",
    }
    if faulty.get(fault, False):
        signal.raise_signal(signal.SIGSEGV)
    if fault == "hang":
        signal.pause()


def _decode(model: LlamaModel, num_timed: int) -> tuple[str, float]:
    """What is wrong with the logits of a batch and of the token after it; empty if nothing is.

    And the seconds that a token takes, in the median of `num_timed` more.
    """
    context = LlamaContext(
        model,
        ContextOptions(
            num_cells=NUM_CELLS, n_batch=BATCH_TOKENS, num_sequences=1, num_threads=num_physical_cores()
        ),
    )
    try:
        tokens = first_tokens(model.vocabulary.n_vocab)
        if model.has_encoder:
            SourceReader(context).read(tokens[:-1])
        if nonsense := nonsense_in(context.step, model.vocabulary.n_vocab):
            return nonsense, 0.0
        took_s = []
        for at in range(len(tokens), len(tokens) + num_timed):
            begun = time.perf_counter()
            context.step(BatchPlan((PlanItem(0, at, tokens[:1], 1),)))
            took_s.append(time.perf_counter() - begun)
    finally:
        context.close()
    return "", statistics.median(took_s) if took_s else 0.0


def _say(
    outcome: str, detail: str, what: str, *, shortage: StokerError | None = None, **measured: object
) -> int:
    info = None if shortage is None else shortage.info()
    said: dict[str, object] = {"outcome": outcome, "detail": detail, "label": what, "shortage": info}
    said |= {"token_s": 0.0, "key_cost": None, **measured}
    print(msgspec.json.encode(said).decode())  # noqa: T201 - for the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
